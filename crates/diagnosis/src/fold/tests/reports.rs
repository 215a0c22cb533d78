//! Reports and recoveries of GPUs for the tests of counting: those of this crate, and those of
//! `model`, which check the counts against a fault book.

use contract::{Entity, HealthEvent, keys};
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

/// Start of the log.
const START: &str = "2026-11-21T11:40:00Z";

/// Returns the time that many seconds after [`START`].
pub(crate) fn second(second: i64) -> Timestamp {
    START.parse::<Timestamp>().unwrap() + SignedDuration::from_secs(second)
}

/// Returns a report of XID 95 on a GPU, in line `line` of the log.
pub(crate) fn report(pci: &str, line: u64) -> HealthEvent {
    HealthEvent {
        node_name: "n1".into(),
        agent: keys::SYSLOG_AGENT.into(),
        component_class: keys::COMPONENT_GPU.into(),
        check_name: keys::CHECK_XID.into(),
        error_code: vec!["95".into()],
        entities_impacted: vec![Entity {
            entity_type: keys::ENTITY_PCI.into(),
            entity_value: pci.into(),
        }],
        is_fatal: true,
        metadata: [(keys::META_LOG_PLACE.to_owned(), line.to_string())].into(),
        ..HealthEvent::default()
    }
}

/// Returns the recovery of all faults of a GPU.
pub(crate) fn healthy(pci: &str) -> HealthEvent {
    HealthEvent {
        is_healthy: true,
        is_fatal: false,
        error_code: Vec::new(),
        ..report(pci, 0)
    }
}

/// A step of a test: an event of one of four GPUs, or of the process.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// A line of the log, `after` seconds after the previous one by the log's own time.
    Report { gpu: u8, after: i64 },
    /// Number of seconds that pass.
    Wait(u64),
    /// Another sender reports a recovery of this GPU.
    Recover(u8),
    /// The log reports a recovery of this GPU.
    Heal(u8),
    /// The counts are saved and restored.
    Restart,
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..4_u8, -5..40_i64).prop_map(|(gpu, after)| Step::Report { gpu, after }),
        2 => (0..90_u64).prop_map(Step::Wait),
        1 => (0..4_u8).prop_map(Step::Recover),
        4 => (0..4_u8).prop_map(Step::Heal),
        1 => Just(Step::Restart),
    ]
}
