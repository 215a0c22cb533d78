//! Preflight decisions that need no I/O: which pods get checks, how their containers change,
//! which pods form a gang, and the contents of a gang's `ConfigMap`.
//!
//! Pods are JSON as the API server sent it. Typed objects would drop fields they do not know,
//! and the fields that identify gangs differ between Kubernetes versions.

pub mod config;
pub mod failure;
mod field;
pub mod gang;
pub mod inject;
pub mod quantity;
pub mod rendezvous;
pub mod resources;
pub mod roster;
pub mod topology;
