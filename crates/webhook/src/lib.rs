//! Preflight webhook: adds checks to new pods, and introduces the pods of a gang to each other.
//!
//! The `preflight` crate decides how a pod changes. This crate collects what that decision
//! needs from the cluster, answers the API server, and maintains the webhook's
//! registration and the `ConfigMap`s of gangs. It also publishes failed checks as Kubernetes
//! Events, and forwards reports to the controller for checks that cannot reach the connector of
//! their node.

// Only the gpuwarden binary uses this crate: names that need no explanation get none.
#![allow(missing_docs)]

pub mod admission;
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

use runtime::metrics::Group;

/// Returns the descriptions of the metrics of this room.
pub fn described_metrics() -> Vec<Group> {
    vec![Group::new("webhook", metrics::WebhookMetrics::described())]
}
