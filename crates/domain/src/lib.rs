//! Pure decisions. Events wake; state decides:
//!
//! ```text
//! record(event)          -> FaultBook   which faults are open, per node and device
//! assess(faults, policy) -> Desired     cordon? taints? recomputed from all open faults
//! step(session, desired, observed, now) -> (session', effects)
//! ```
//!
//! Nothing here does I/O or reads a clock: time is an argument. The same code runs in
//! production, in replay and in the tests; everything else turns the outside into
//! inputs of these functions and carries their effects out.

pub mod brake;
pub mod drain;
pub mod fleet;
pub mod pipeline;
pub mod remediation;
pub mod session;
pub mod status;
pub mod veto;
pub mod view;
