//! What a provider says went wrong with a signal.
//!
//! Only one thing counts for what is done next: whether the signal may have had an effect.

use jiff::SignedDuration;

/// Longest message (characters): it stands in a status, an annotation and a line of the log, and repeats what a
/// machine's controller or a cloud has said, which may be anything.
const MAX_MESSAGE: usize = 1000;

/// A failure of a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its class.
    pub class: Class,
    /// A word that stays the same for the same failure, such as `RATE_LIMITED`; for people.
    pub reason: String,
    /// What happened, for people.
    pub message: String,
    /// The time after which to try again, where the provider says so.
    pub retry_after: Option<SignedDuration>,
}

/// What a failure means for another try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Nothing was done, and another try may succeed.
    Transient,
    /// Nothing was done, and another try will not succeed either.
    Permanent,
    /// Nobody knows whether anything was done.
    Ambiguous,
}

// === impl Failure ===

impl Failure {
    /// Returns a failure of a class. A message that is too long is cut.
    pub fn new(class: Class, reason: &str, message: impl Into<String>) -> Self {
        let message: String = message.into();
        Self {
            class,
            reason: reason.to_owned(),
            message: message.chars().take(MAX_MESSAGE).collect(),
            retry_after: None,
        }
    }

    /// Returns the same failure with a time after which to try again.
    #[must_use]
    pub fn after(self, wait: SignedDuration) -> Self {
        Self {
            retry_after: Some(wait),
            ..self
        }
    }

    /// Returns it for people.
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
    /// Returns its word in `failure_class` of an `ErrorInfo`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Transient => "TRANSIENT",
            Self::Permanent => "PERMANENT",
            Self::Ambiguous => "AMBIGUOUS",
        }
    }

    /// Returns the class of a word.
    pub fn of_word(word: &str) -> Option<Self> {
        [Self::Transient, Self::Permanent, Self::Ambiguous]
            .into_iter()
            .find(|class| class.word() == word)
    }
}
