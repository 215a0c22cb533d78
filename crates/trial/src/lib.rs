//! Tools that run the decisions of `fleet` without a live cluster: what a policy would have
//! done ([`replay`]), how two policies differ ([`compare`]), likely mistakes in one ([`lint`]),
//! its tests ([`cases`]), the same for rules of the analysis ([`rules`]), tests of policies over
//! Kubernetes objects ([`objects`]), why a node is in service or not ([`why_not`]), and a search for
//! broken invariants ([`simulate`]).
//!
//! The crate makes no decisions itself, does no I/O and reads no clock.

pub mod cases;
pub mod compare;
pub mod lint;
pub mod objects;
pub mod presets;
pub mod replay;
pub mod rules;
pub mod simulate;
pub mod standard;
pub mod why_not;
