//! The janitor: carries out what custom resources such as `RebootNode` ask for.
//!
//! It decides nothing itself: [`Janitor`] turns what it watches into inputs of [`domain::janitor::Board`],
//! and carries its effects out; so does [`requests`] with resets of GPUs and hand-overs of nodes. Signals go through a [`Provider`]: the [generic](generic::Generic) one in
//! this process, or one behind gRPC ([`client`]); [`server`] is the other end of that.

pub mod client;
pub mod generic;
mod grpc;
mod metrics;
mod provider;
mod requests;
mod run;
pub mod server;

pub use provider::{OpenError, Provider, Providers, Signal};
pub use run::{Janitor, JanitorParts};
