//! What stands in the status of a resource about its signal.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::Status;

/// The condition that says whether the signal was sent; its message is the request id of the provider.
pub(super) const SIGNAL_SENT: &str = "SignalSent";
/// The condition that is true where somebody else sends the signal.
pub(super) const MANUAL_MODE: &str = "ManualMode";
/// The condition of our own whose message is the [`Record`].
const RECORD: &str = "gpuwarden.dev/Signal";

/// What is remembered of a signal, and stands in the status before the signal is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Record {
    /// The boot id of the node before.
    pub(super) boot_id: String,
    /// The uid of the node before.
    pub(super) node_uid: String,
    /// The number of the try, from 1 on; 0: it was begun by somebody else, who may have sent one.
    #[serde(rename = "try")]
    pub(super) attempt: u32,
    /// The process that sends it, and nobody else without asking the provider.
    pub(super) by: String,
    /// The time before which it is not tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) not_before: Option<Timestamp>,
}

// === impl Record ===

impl Record {
    /// Reads what is remembered; `None` where nothing is, or it cannot be read.
    pub(super) fn read(status: &Status) -> Option<Self> {
        serde_json::from_str(&status.condition(RECORD)?.message).ok()
    }

    /// Writes it into a status.
    pub(super) fn write(&self, status: &mut Status, now: Timestamp) {
        // Its few short texts cannot fail to be written.
        let message = serde_json::to_string(self).unwrap_or_default();
        // True where a signal may be on its way: what has a true condition is not withdrawn any more.
        let on_its_way = !self.by.is_empty() || self.attempt == 0;
        let to = if on_its_way { "True" } else { "False" };
        status.set(RECORD, to, "Recorded", &message, now);
    }
}
