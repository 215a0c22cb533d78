//! Status page, its JSON API, metrics and health endpoints.
//!
//! The console is read-only. It reads the state of the fleet from a watch channel, events and
//! journal from the store, and freshness from the sources.
//!
//! - [`api`]: JSON types of the API, which the command line shares.
//! - [`explain`]: timeline of a node, built from its events and journal without I/O.
//! - [`Console`], [`serve`]: the HTTP server. The page consists of static files that use only
//!   this API.

// Only this workspace uses this crate: names that need no explanation get none.
#![allow(missing_docs)]

pub mod api;
pub mod explain;
mod http;

pub use http::{
    AgentPart, Console, ControllerPart, LeadershipSource, MAX_FOLLOWERS, MAX_SUBSCRIBERS,
    UnhealthyGpuSource, WhyNotSource, serve,
};

use runtime::metrics::Group;

/// Returns the descriptions of the metrics of this room.
pub fn described_metrics() -> Vec<Group> {
    vec![Group::new("process", [http::room::held_bytes()])]
}
