//! Record of a signal in the status of its resource.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::Status;

/// Condition about the sending of the signal. Its message is the provider's request id.
pub(super) const SIGNAL_SENT: &str = "SignalSent";
/// Condition that is true if a person has to send the signal.
pub(super) const MANUAL_MODE: &str = "ManualMode";
/// Condition of gpuwarden whose message is the [`SignalRecord`].
const RECORD: &str = "gpuwarden.dev/Signal";

/// Record of a signal, written before the signal is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SignalRecord {
    /// Boot id of the node before the signal.
    pub(super) boot_id: String,
    /// `metadata.uid` of the node before the signal.
    pub(super) node_uid: String,
    /// Number of the try, from 1. Zero if another janitor started the resource and may have
    /// sent a signal.
    #[serde(rename = "try")]
    pub(super) attempt: u32,
    /// Process that sends the signal. No other process sends it without asking the provider
    /// first.
    pub(super) by: String,
    /// Earliest time of the next try.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) not_before: Option<Timestamp>,
}

// === impl SignalRecord ===

impl SignalRecord {
    /// Reads the record. `None` if it is missing or malformed.
    pub(super) fn read(status: &Status) -> Option<Self> {
        serde_json::from_str(&status.condition(RECORD)?.message).ok()
    }

    /// Writes the record into a status.
    pub(super) fn write(&self, status: &mut Status, now: Timestamp) {
        // Serialising a few strings cannot fail.
        let message = serde_json::to_string(self).unwrap_or_default();
        // True if a signal may be on its way. A resource with a true condition is no longer
        // withdrawn.
        let on_its_way = !self.by.is_empty() || self.attempt == 0;
        let to = if on_its_way { "True" } else { "False" };
        status.set(RECORD, to, "Recorded", &message, now);
    }
}
