//! Maintenance of nodes: what is done next for each of the custom resources by which it is asked for.
//!
//! ```text
//! board.rs      all resources as one object: inputs go in, effects come out; it asks signal.rs about reboots
//!               and terminations, `gpu_reset` and `handover` about the others
//! turn.rs       one signal of a node at a time
//! signal.rs     a reboot or a termination, step by step: pure, from the status and what was seen
//! sending.rs    the sending of one signal, whatever it is for: announced, sent once, asked for
//! reset.rs      the signal of a reset of GPUs, as `gpu_reset` sees it
//! record.rs     what stands in the status about a signal
//! failure.rs    what a provider says went wrong
//! admission.rs  why a request is refused before it is there, by the webhook
//! config.rs     the file
//! generic.rs    the Job by which the generic provider reboots
//! redfish.rs    what a machine's BMC is asked for, and whether it has done it
//! ```
//!
//! Everything that must not be forgotten stands in the status of the resource, and stands there before it
//! is done. So a crash between any two effects makes no second signal.

use crate::Maintenance;

mod admission;
mod board;
mod config;
mod failure;
pub mod generic;
mod record;
pub mod redfish;
mod reset;
mod sending;
mod signal;
mod turn;

pub use admission::{Named, Request};
pub use board::{Board, Effect, Input, Made, News, NodeTold, Written};
pub use config::{JanitorConfig, MAX_CONFIG_BYTES, ProviderPlace, Rules};
pub use failure::{Class, Failure};
pub use sending::{Answer, Found, Question};
pub use signal::NodeSeen;

/// What a provider is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// A node is to boot anew: a `RebootNode`.
    Reboot,
    /// A node is to be taken away: a `TerminateNode`.
    Terminate,
    /// GPUs are to be reset: a `GPUReset`, where no Job does it.
    Reset,
}

// === impl Action ===

impl Action {
    /// Returns the action that resources of a kind ask for; `None`: they ask for none of a provider.
    pub fn of(kind: Maintenance) -> Option<Self> {
        match kind {
            Maintenance::Reboot => Some(Self::Reboot),
            Maintenance::Terminate => Some(Self::Terminate),
            Maintenance::Reset => Some(Self::Reset),
            Maintenance::HandOver => None,
        }
    }

    /// Returns the kind of its resources.
    pub fn kind(self) -> Maintenance {
        match self {
            Self::Reboot => Maintenance::Reboot,
            Self::Terminate => Maintenance::Terminate,
            Self::Reset => Maintenance::Reset,
        }
    }

    /// Returns its name, as metrics and providers have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reboot => "reboot",
            Self::Terminate => "terminate",
            Self::Reset => "gpu-reset",
        }
    }

    /// Returns the condition that is true once it is done.
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
