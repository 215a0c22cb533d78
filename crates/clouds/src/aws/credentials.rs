//! Credentials of AWS, from where its own clients look for them, and in their order: the environment, the
//! shared file, a web identity (IRSA), EKS Pod Identity, and the role of the instance.
//!
//! The first place that is configured counts; if it fails, the failure is that place's. They are kept until
//! shortly before their end.

mod places;

use std::fmt;

use jiff::{SignedDuration, Timestamp};

use crate::http::Http;
use crate::{Environment, Failure};

/// Time before the end of credentials at which new ones are fetched.
const EARLY: SignedDuration = SignedDuration::from_mins(5);

/// Credentials of AWS.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    /// Access key id.
    pub(super) id: String,
    /// Secret access key.
    pub(super) secret: String,
    /// Session token of temporary credentials.
    pub(super) token: Option<String>,
    /// End of temporary credentials.
    pub(super) expires: Option<Timestamp>,
}

/// Credentials that are kept, and renewed in time.
pub(super) struct Keys {
    http: Http,
    environment: Environment,
    /// URL of STS.
    sts: String,
    kept: Option<Credentials>,
}

// === impl Keys ===

impl Keys {
    /// Creates keys that are fetched once they are needed. `sts` is the URL of STS.
    pub(super) fn new(http: Http, environment: Environment, sts: String) -> Self {
        Self {
            http,
            environment,
            sts,
            kept: None,
        }
    }

    /// Returns credentials that are valid for the next minutes.
    pub(super) async fn current(&mut self, now: Timestamp) -> Result<Credentials, Failure> {
        let is_valid = |kept: &&Credentials| kept.expires.is_none_or(|end| end - EARLY > now);
        if let Some(kept) = self.kept.as_ref().filter(is_valid) {
            return Ok(kept.clone());
        }
        let fetched = match places::fetch(&self.http, &self.environment, &self.sts).await {
            Ok(fetched) => fetched,
            // The old ones serve as long as they are valid.
            Err(failure) => {
                let still = self.kept.clone();
                let still = still.filter(|kept| kept.expires.is_some_and(|end| end > now));
                return still.ok_or(failure);
            }
        };
        Ok(self.kept.insert(fetched).clone())
    }

    /// Forgets credentials that a service has refused.
    pub(super) fn forget(&mut self) {
        self.kept = None;
    }
}

impl fmt::Debug for Credentials {
    /// Shows no secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("id", &self.id)
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
