//! Trying and explaining: what a policy would have done ([`replay`]), how two differ, what is odd
//! in one, what its tests say, why a node is in service or not ([`why_not`]), and whether an invariant can be
//! broken ([`simulate`]).
//!
//! Everything here runs the decisions of `domain` on something else than a live cluster, and
//! decides nothing itself. It does no I/O and reads no clock.

pub mod cases;
pub mod compare;
pub mod lint;
pub mod presets;
pub mod replay;
pub mod simulate;
pub mod standard;
pub mod why_not;
