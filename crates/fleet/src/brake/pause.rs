//! A pause: a person stops new quarantines for a while, and on request drains and remediation
//! too. It is JSON in the `ConfigMap` [`keys::CONFIG_MAP`](contract::keys::CONFIG_MAP), so that
//! all gpuwardens of a cluster observe it at once; it ends by itself.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Longest reason that is shown, in characters.
const SHOWN_CHARS: usize = 200;

/// A pause of new quarantines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pause {
    /// Reason, as text for people.
    pub reason: String,
    /// Person who asked for it.
    pub by: String,
    /// Begin of the pause.
    pub since: Timestamp,
    /// End of the pause; `None` where a person has to end it, as with text that cannot be read.
    pub until: Option<Timestamp>,
    /// True if the pause also holds back drains and remediation, including those under way.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repairs: bool,
}

// === impl Pause ===

impl Pause {
    /// Parses the value in the `ConfigMap`. Unreadable text counts as a pause: whoever wrote it
    /// wanted one.
    pub fn read(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.is_empty() {
            return None;
        }
        let pause: Self = serde_json::from_str(text).unwrap_or_else(|error| Self {
            reason: format!("the text in the ConfigMap is not a pause ({error})"),
            by: "somebody unknown".to_owned(),
            since: Timestamp::UNIX_EPOCH,
            until: None,
            repairs: false,
        });
        Some(pause)
    }

    /// Returns whether the pause holds at `now`.
    pub fn holds(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

impl fmt::Display for Pause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason: String = self.reason.chars().take(SHOWN_CHARS).collect();
        match self.until {
            Some(until) => write!(f, "paused until {until:.0} by {}: {reason}", self.by),
            None => write!(f, "paused by {}: {reason}", self.by),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_read_back_and_ends_by_itself() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let pause = Pause {
            reason: "driver roll-out".into(),
            by: "alice".into(),
            since: at(100),
            until: Some(at(200)),
            repairs: true,
        };
        let text = serde_json::to_string(&pause).unwrap();
        assert_eq!(Pause::read(&text), Some(pause.clone()));
        assert!(pause.holds(at(199)) && !pause.holds(at(200)));
        assert_eq!(
            pause.to_string(),
            "paused until 1970-01-01T00:03:20Z by alice: driver roll-out"
        );
        assert_eq!(Pause::read(" \n"), None);
    }

    #[test]
    fn what_cannot_be_read_pauses_until_it_is_mended() {
        for text in ["yes", "{}", "{\"reason\": 5}", "null"] {
            let pause = Pause::read(text).unwrap();
            assert!(pause.holds(Timestamp::MAX), "{text}");
            assert!(pause.to_string().contains("is not a pause"), "{text}");
        }
    }
}
