//! The cluster side: what follows from the events.
//!
//! [`quarantine`] takes nodes with faults out of service and gives them back. It decides
//! nothing itself: it keeps the fault book and the sessions of `domain` up to date with
//! the store and the cluster, and carries out what they say. [`policy`] follows the rules
//! by which it does.
//!
//! [`conditions`] tells on the nodes, as conditions and Events, what their faults are.
//!
//! [`ingest`] lets in what agents and central monitors report over the network; [`agents`] is what
//! agents tell and ask beside, and what they say of their pods is written on these by [`pods`].

pub mod agents;
pub mod api_requests;
pub mod conditions;
pub mod ingest;
pub mod leadership;
pub mod pods;
pub mod policy;
pub mod quarantine;
pub mod retention;
