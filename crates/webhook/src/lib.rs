//! The preflight webhook: it puts checks into pods that are created, and tells the pods of a gang of
//! each other.
//!
//! What a pod becomes is decided in `preflight`; this room asks the cluster what that takes, answers the
//! API server, keeps the certificate and the registration by which the API server finds it, and keeps
//! the `ConfigMap`s of gangs. It tells failed checks as Kubernetes Events, and brings what checks report that cannot report on their node to the controller.

pub mod admission;
pub mod certificates;
pub mod discoveries;
pub mod facts;
pub mod failures;
#[cfg(test)]
mod fake;
pub mod gangs;
mod kept;
mod metrics;
pub mod registration;
pub mod rendezvous;
pub mod requests;
mod review;
mod seen;
pub mod server;
mod turns;
