//! The note of a signal at the node, written before it is sent.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{Log, Machine};

/// Time in which a BMC tells of a reset that it was asked for.
const TOLD_WITHIN: SignedDuration = SignedDuration::from_mins(2);

/// The note of a signal, as the annotation `gpuwarden.dev/power-cycle` of the node has it (JSON).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The operation.
    pub operation: String,
    /// The boot of the node before.
    pub boot_id: String,
    /// The time of the machine's last reset before, in the BMC's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_reset: Option<String>,
    /// The last boot in the log before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_boot: Option<Timestamp>,
    /// The time of this note.
    pub at: Timestamp,
}

/// A `Verdict` says whether a signal that was recorded has reached the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The machine has been reset since.
    Reset,
    /// It has not.
    NotReset,
    /// It may still be told.
    TooSoon,
    /// Nothing tells.
    Unknown,
}

// === impl Record ===

impl Record {
    /// Returns the record in an annotation, if it is this operation's.
    pub fn read(annotation: Option<&str>, operation: &str) -> Option<Self> {
        let record: Self = serde_json::from_str(annotation?).ok()?;
        (record.operation == operation).then_some(record)
    }

    /// Returns whether the node itself shows another boot.
    pub fn booted(&self, boot_id: &str) -> bool {
        !boot_id.is_empty() && boot_id != self.boot_id
    }

    /// Returns whether the machine has been reset since, by its own word and its log's. A log without a new
    /// boot proves nothing: it may be full, or not have that entry yet.
    pub fn verdict(&self, machine: &Machine, log: &Log, now: Timestamp) -> Verdict {
        if log.last_boot.is_some() && log.last_boot > self.last_boot {
            return Verdict::Reset;
        }
        match (&self.last_reset, &machine.last_reset) {
            (Some(before), Some(after)) if before != after => Verdict::Reset,
            _ if now.duration_since(self.at).abs() < TOLD_WITHIN => Verdict::TooSoon,
            (Some(_), Some(_)) => Verdict::NotReset,
            _ => Verdict::Unknown,
        }
    }
}
