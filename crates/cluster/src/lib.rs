//! Kubernetes client: watches, conditional patches, token reviews and leader election.
//!
//! [`Cluster`] is the only connection of the other rooms to the API server. It turns nodes into
//! [`model::node::NodeView`]s and applies [`model::node::NodeChange`]s, each as one patch that
//! fails if the node no longer matches the view that the decision was made on. `policy` and
//! `fleet` decide what to change; `controller` decides when to retry.

mod access;
mod apply;
mod audit;
mod causes;
mod config_map;
mod connect;
mod connections;
mod counters;
mod devices;
mod drain;
mod error;
mod event;
mod evict;
#[cfg(test)]
mod fake;
mod follow;
mod kind;
mod known_nodes;
mod labels;
mod layer;
mod lease;
mod maintenance;
mod object;
mod one_off;
mod pace;
pub mod patch;
mod pods;
mod remediation;
mod request;
mod services;
mod signals;
mod status;
mod sweep;
mod tenure;
mod token;
mod warnings;
mod watch;

pub use access::{Access, ServerInfo};
pub use audit::{Audit, AuditSink, Reason};
pub use config_map::{ConfigMap, ConfigMapChange, ConfigMapEvent};
pub use connect::{Cluster, ConnectError, ConnectOptions};
pub use counters::RequestCounts;
pub use devices::{DeviceApi, DeviceEvent};
pub use drain::PodWatches;
pub use error::ApiError;
pub use event::{Event, EventPod};
pub use kind::ObjectKind;
pub use known_nodes::KnownNodes;
pub use lease::{Candidate, Deposed, LeaseName, Standing, StoreNote};
pub use pace::Urgency;
pub use patch::PatchCall;
pub use pods::{NodePod, UnhealthyGpu};
pub use remediation::{ResourceEvent, ResourceKinds, ResourceWatches};
pub use services::{ServiceEvent, ServiceWatches};
pub use signals::{ObjectChange, apply_signal};
pub use sweep::{Page, Parts, Removal, ServedKind};
pub use tenure::Tenure;
pub use token::{TokenError, TokenOwner};
pub use watch::{NodeEvent, Selection, Signal};
