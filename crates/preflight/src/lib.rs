//! Preflight, as far as it is decided without looking anywhere: which pods get checks, what their
//! containers become, which pods form a gang, and what a gang's `ConfigMap` says.
//!
//! Pods are JSON as the API server sent it, for typed objects lose the fields that they do not know,
//! and the fields by which gangs are told differ in each version of Kubernetes.

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
