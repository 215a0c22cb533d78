//! Record of a signal on the node, written before the signal is sent.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{ComputerSystem, Log};

/// Time for a BMC to report a requested reset.
const TOLD_WITHIN: SignedDuration = SignedDuration::from_mins(2);

/// Record of a signal, as JSON in the node's annotation `gpuwarden.dev/power-cycle`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PowerCycleRecord {
    /// Id of the operation.
    pub operation: String,
    /// Boot id of the node before the signal.
    pub boot_id: String,
    /// Time of the machine's previous reset, as written by the BMC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_reset: Option<String>,
    /// Time of the last boot in the log before the signal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_boot: Option<Timestamp>,
    /// Time of this record.
    pub at: Timestamp,
}

/// Result of looking for the effect of a recorded signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalEffect {
    /// The machine has been reset since.
    Reset,
    /// The machine has not been reset.
    NotReset,
    /// A reset may still be reported.
    TooSoon,
    /// There is no evidence.
    Unknown,
}

// === impl PowerCycleRecord ===

impl PowerCycleRecord {
    /// Reads the record from an annotation, if it belongs to the operation.
    pub fn read(annotation: Option<&str>, operation: &str) -> Option<Self> {
        let record: Self = serde_json::from_str(annotation?).ok()?;
        (record.operation == operation).then_some(record)
    }

    /// Returns whether the node runs another boot than recorded.
    pub fn booted(&self, boot_id: &str) -> bool {
        !boot_id.is_empty() && boot_id != self.boot_id
    }

    /// Returns whether the machine has been reset since, according to the machine itself and
    /// its log. A log without a new boot proves nothing: it may be full, or delayed.
    pub fn verdict(&self, machine: &ComputerSystem, log: &Log, now: Timestamp) -> SignalEffect {
        if log.last_boot.is_some() && log.last_boot > self.last_boot {
            return SignalEffect::Reset;
        }
        match (&self.last_reset, &machine.last_reset) {
            (Some(before), Some(after)) if before != after => SignalEffect::Reset,
            _ if now.duration_since(self.at).abs() < TOLD_WITHIN => SignalEffect::TooSoon,
            (Some(_), Some(_)) => SignalEffect::NotReset,
            _ => SignalEffect::Unknown,
        }
    }
}
