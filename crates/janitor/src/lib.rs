//! The janitor: carries out what custom resources such as `RebootNode` ask for.
//!
//! It decides nothing itself: [`Janitor`] turns what it watches into inputs of [`maintenance::janitor::Board`],
//! and carries its effects out. Signals go through a [`Provider`]: the [generic](generic::Generic) one or the
//! BMC ([`redfish`]) in this process, or one behind gRPC ([`client`]); [`server`] is the other end of that.
//! `conformance` (cargo feature of that name) has the tests that every provider passes.
//!
//! [`Validator`] does the same for `ValidationRequest`s, each of which tests several nodes, by
//! [`maintenance::validation_request`].

mod acts;
pub mod client;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod generic;
mod grpc;
mod metrics;
mod node;
mod provider;
mod providers;
pub mod redfish;
mod run;
pub mod server;
mod validation;
mod watches;

pub use provider::{OpenError, Provider, Signal};
pub use providers::Providers;
pub use run::{Janitor, JanitorParts};
pub use validation::{Validator, ValidatorParts};
