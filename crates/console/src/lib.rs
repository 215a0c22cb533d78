//! Status page, its JSON API, metrics and health endpoints.
//!
//! The console shows and changes nothing: it reads the fleet's state from a watch
//! channel, events and journal from the store, and freshness from the sources.
//!
//! - [`api`]: the JSON of the API; the command line reads the same types.
//! - [`explain`]: one causal timeline of a node, put together from its events and its
//!   journal, without I/O.
//! - [`Console`], [`serve`]: the HTTP side. The page itself is three static files that
//!   use nothing but this API.

pub mod api;
pub mod explain;
mod http;

pub use http::{
    AgentPart, Console, ControllerPart, LeadershipSource, MAX_FOLLOWERS, MAX_SUBSCRIBERS,
    UnhealthyGpuSource, WhyNotSource, serve,
};
