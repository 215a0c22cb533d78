//! Maintenance of nodes: the custom resources by which it is asked for, and what is done for each next.
//!
//! ```text
//! board.rs      all resources as one object: inputs go in, effects come out
//! turn.rs       one resource of a node at a time
//! signal.rs     a reboot or a termination, step by step: pure, from the status and what was seen
//! resource.rs   a resource as it is read, status.rs its status as it is written
//! failure.rs    what a provider says went wrong
//! expiry.rs     when a resource that has ended is deleted
//! config.rs     the file
//! generic.rs    the Job by which the generic provider reboots
//! redfish.rs    what a machine's BMC is asked for, and whether it has done it
//! ```
//!
//! Everything that must not be forgotten stands in the status of the resource, and stands there before it
//! is done. So a crash between any two effects makes no second signal.

mod board;
mod config;
mod expiry;
mod failure;
pub mod generic;
pub mod redfish;
mod resource;
mod signal;
mod status;
mod turn;

pub use board::{Board, Effect, Input, Key, News, Written};
pub use config::{JanitorConfig, MAX_CONFIG_BYTES, ProviderPlace, Rules};
pub use failure::{Class, Failure};
pub use resource::{Resource, ResourceError};
pub use signal::{Answer, Found, NodeSeen, Question};
pub use status::{Condition, Outcome, Status};

/// The API group of the resources that ask for an action.
pub const GROUP: &str = "janitor.dgxc.nvidia.com";
/// Its version.
pub const VERSION: &str = "v1alpha1";

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// A node is to boot anew: a `RebootNode`.
    Reboot,
    /// A node is to be taken away: a `TerminateNode`.
    Terminate,
}

// === impl Action ===

impl Action {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Reboot, Self::Terminate];

    /// Returns the kind of its resources.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Reboot => "RebootNode",
            Self::Terminate => "TerminateNode",
        }
    }

    /// Returns the plural of this kind, as it stands in paths.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Reboot => "rebootnodes",
            Self::Terminate => "terminatenodes",
        }
    }

    /// Returns the API version of its resources.
    pub fn api_version(self) -> String {
        format!("{GROUP}/{VERSION}")
    }

    /// Returns its name, as metrics and providers have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reboot => "reboot",
            Self::Terminate => "terminate",
        }
    }

    /// Returns the condition that is true once it is done.
    pub fn done(self) -> &'static str {
        match self {
            Self::Reboot => "NodeReady",
            Self::Terminate => "NodeTerminated",
        }
    }
}

#[cfg(test)]
mod tests;
