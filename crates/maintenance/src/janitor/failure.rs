//! Failures reported by providers.
//!
//! The next step depends only on whether the signal may have had an effect.

use jiff::SignedDuration;

/// Longest message (characters). It is copied into a status, an annotation and a log line, and
/// comes from a BMC or a cloud.
const MAX_MESSAGE: usize = 1000;

/// Failure of a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderFailure {
    /// Possible effect of the signal.
    pub class: Class,
    /// Stable identifier of the failure, such as `RATE_LIMITED`, for people.
    pub reason: String,
    /// Description of the failure, for people.
    pub message: String,
    /// Minimum wait before the next try, if the provider names one.
    pub retry_after: Option<SignedDuration>,
}

/// Effect of a failed signal, which decides about another try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Nothing was done, and another try may succeed.
    Transient,
    /// Nothing was done, and another try would fail as well.
    Permanent,
    /// Unknown whether anything was done.
    Ambiguous,
}

// === impl ProviderFailure ===

impl ProviderFailure {
    /// Creates a failure. A message that is too long is cut.
    pub fn new(class: Class, reason: &str, message: impl Into<String>) -> Self {
        let message: String = message.into();
        Self {
            class,
            reason: reason.to_owned(),
            message: message.chars().take(MAX_MESSAGE).collect(),
            retry_after: None,
        }
    }

    /// Sets the minimum wait before the next try.
    #[must_use]
    pub fn after(self, wait: SignedDuration) -> Self {
        Self {
            retry_after: Some(wait),
            ..self
        }
    }

    /// Returns the failure for people.
    pub fn text(&self) -> String {
        match (self.reason.as_str(), self.message.as_str()) {
            ("", message) => message.to_owned(),
            (reason, "") => reason.to_owned(),
            (reason, message) => format!("{reason}: {message}"),
        }
    }
}

// === impl Class ===

impl Class {
    /// Returns the class as written in `failure_class` of an `ErrorInfo`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Transient => "TRANSIENT",
            Self::Permanent => "PERMANENT",
            Self::Ambiguous => "AMBIGUOUS",
        }
    }

    /// Returns the class with this name.
    pub fn of_name(name: &str) -> Option<Self> {
        [Self::Transient, Self::Permanent, Self::Ambiguous]
            .into_iter()
            .find(|class| class.name() == name)
    }
}
