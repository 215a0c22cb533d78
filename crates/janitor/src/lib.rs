//! Janitor: executes maintenance resources such as `RebootNode`.
//!
//! [`Janitor`] makes no decisions. It passes watch events to [`maintenance::janitor::Board`] and
//! carries out the resulting effects. A [`Provider`] sends signals to machines: the
//! [generic](generic::Generic) one, the BMC ([`redfish`]) or a [`label`] in this process, or a
//! remote one over gRPC ([`client`]), which [`server`] serves. The feature `conformance` enables a test
//! suite that every provider must pass.
//!
//! [`Validator`] works the same way for `ValidationRequest`s, which test several nodes each,
//! with decisions in [`maintenance::validation_request`].

// Only the gpuwarden binary uses this crate: names that need no explanation get none.
#![allow(missing_docs)]

mod acts;
pub mod client;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod generic;
mod grpc;
pub mod label;
mod metrics;
mod node;
mod provider;
mod providers;
pub mod redfish;
mod run;
pub mod server;
mod validation;
mod watches;

pub use provider::{Provider, ProviderOpenError, Signal};
pub use providers::Providers;
pub use run::{Janitor, JanitorParts};
pub use validation::{Validator, ValidatorParts};

use runtime::metrics::Group;

/// Returns the descriptions of the metrics of this room.
pub fn described_metrics() -> Vec<Group> {
    let (own, validation) = (
        metrics::JanitorMetrics::described(),
        metrics::ValidationMetrics::described(),
    );
    vec![Group::new("janitor", own.into_iter().chain(validation))]
}
