//! Decisions about the nodes of a cluster: when a node goes out of service, how it is drained,
//! remediated and validated, and when it comes back.
//!
//! ```text
//! record(event)          -> FaultBook   which faults are open, per node and device   (model)
//! assess(faults, policy) -> Desired     cordon? taints? recomputed from all open faults   (policy)
//! step(session, desired, observed, now) -> (session', effects)
//! ```
//!
//! [`Fleet`] runs these functions for all nodes, and the stages of a node's way back
//! (`stage.rs`). Nothing here does I/O or reads a clock: time is an argument. The same code runs
//! in production, in replay and in tests; the caller turns I/O into [`FleetInput`]s and carries
//! out each [`Effect`].

mod agenda;
mod approval;
mod assessment;
pub mod brake;
mod claim;
mod desired;
mod devices;
pub mod drain;
mod entry;
mod fleet;
mod inputs;
mod io;
mod look;
pub mod remediation;
pub mod session;
mod stage;
mod state;
pub mod status;
mod uncordon;
pub mod veto;
mod veto_state;
pub mod view;
mod waiting;
#[cfg(test)]
mod world;

pub use claim::Owns;
pub use devices::{DeviceInput, DeviceWatch, PlannedRule};
pub use fleet::{Fleet, SavedState, Settings, Situation, Unsaved};
pub use inputs::LIST_DELAY;
pub use io::{
    CreateAnswer, Effect, EventInStore, EventReason, FleetInput, Level, PatchAnswer, Planned,
    PlannedCheckpoint, PlannedRemoval, PlannedResource, PodUpdate, Purpose, RemediationResult,
    RemovalAnswer, ResourceUpdate, RuleSetOutcome,
};
pub use stage::drain::custom::DRAIN_ACTION;
pub use waiting::SwitchState;
