//! The janitor: decides what is done next for each maintenance request.
//!
//! ```text
//! board.rs      all resources as one object: inputs go in, effects come out
//! order.rs      one resource of a node at a time
//! signal.rs     steps of a reboot or a termination
//! sending.rs    sending of one signal: recorded, sent once, looked up after a lost response
//! reset.rs      signal of a GPU reset by a provider
//! record.rs     record of a signal in the status
//! failure.rs    failures reported by providers
//! admission.rs  refusal of requests by the webhook
//! config.rs     the configuration file
//! generic.rs    Jobs of the generic provider
//! redfish.rs    power cycles through BMCs
//! label.rs      requests to owners of machines by labels of nodes
//! ```
//!
//! All essential state is in the status of the resource, and is written there before the action
//! that depends on it. A crash between two actions therefore never causes a second signal.

use crate::Maintenance;

mod admission;
mod board;
mod config;
mod failure;
pub mod generic;
pub mod label;
mod order;
mod record;
pub mod redfish;
mod reset;
mod sending;
mod signal;

pub use admission::{AdmissionRequest, RequestedNode};
pub use board::{Board, CreateResult, Effect, Input, NodeUpdate, ResourceEvent, WriteResult};
pub use config::{JanitorConfig, ProviderPlace, Rules};
pub use failure::{Class, ProviderFailure};
pub use sending::{FoundOperation, ProviderAnswer, Question};
pub use signal::NodeObservation;

/// Action requested of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// Reboot of a node, for a `RebootNode`.
    Reboot,
    /// Termination of a node, for a `TerminateNode`.
    Terminate,
    /// Reset of GPUs, for a `GPUReset` that no Job carries out.
    Reset,
}

// === impl Action ===

impl Action {
    /// Returns the provider's action for resources of a kind. `None` if the kind involves no
    /// provider.
    pub fn of(kind: Maintenance) -> Option<Self> {
        match kind {
            Maintenance::Reboot => Some(Self::Reboot),
            Maintenance::Terminate => Some(Self::Terminate),
            Maintenance::Reset => Some(Self::Reset),
            Maintenance::HandOver => None,
        }
    }

    /// Returns the kind of resources that request the action.
    pub fn kind(self) -> Maintenance {
        match self {
            Self::Reboot => Maintenance::Reboot,
            Self::Terminate => Maintenance::Terminate,
            Self::Reset => Maintenance::Reset,
        }
    }

    /// Returns the action's name in metrics and for providers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reboot => "reboot",
            Self::Terminate => "terminate",
            Self::Reset => "gpu-reset",
        }
    }

    /// Returns the condition that is true once the action is done.
    pub fn done(self) -> &'static str {
        match self {
            Self::Reboot => "NodeReady",
            Self::Terminate => "NodeTerminated",
            Self::Reset => "Complete",
        }
    }
}

#[cfg(test)]
mod tests;
