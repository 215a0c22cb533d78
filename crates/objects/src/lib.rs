//! Policies that decide which Kubernetes objects, of any kind, are faults of a node, as in NVSentinel's
//! object monitor.
//!
//! - [`load`](parse) reads the policies; `presets` has those that come with the product.
//! - [`Reducer`] reduces an object to the fields that the policies read.
//! - [`ObjectMonitor`] keeps the reduced objects, and decides when a fault opens, is refreshed and
//!   closes. Watches deliver its inputs; the time is an argument.
//! - [`marks`] reads and writes the annotation of a node that names its open matches.

mod event;
mod judge;
mod load;
pub mod marks;
mod monitor;
mod policies;
pub mod presets;
mod reduce;
mod step;

pub use load::parse;
pub use monitor::{Input, ObjectMonitor};
pub use policies::{EventForm, Kind, ObjectPolicies, ObjectPolicy, Watched};
pub use reduce::{Kept, Reducer};
pub use step::{Change, Match, Matches};

/// Agent of the events, the same as NVSentinel's.
pub const AGENT: &str = "kubernetes-object-monitor";
