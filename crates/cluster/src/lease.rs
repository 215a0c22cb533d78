//! Election of the leader among several controllers of a cluster, by a Lease.
//!
//! A Lease (`coordination.k8s.io/v1`) is an object with a holder, which renews it. A candidate
//! that observes the Lease unchanged for its whole duration may take it over. [`election`]
//! decides that, and the next request, without I/O; [`Candidate`] sends the requests;
//! [`Tenure`](crate::Tenure) is checked before every write to the cluster.
//!
//! Clocks of two machines are never compared. The holder counts from the time when it *sent* the
//! last confirmed renewal, the others from the time when they *received* the answer that first
//! showed it. So the holder's time runs out first, however long either request took.
//!
//! ```text
//! renewed          sent                                    observed by others
//!   holder          |--- may begin writes ---10 s|-- their end --14 s|
//!   others          |                   |---- not before ---------------15 s|
//! ```
//!
//! This does not cover a process that is stopped between checking the tenure and handing the
//! bytes to the kernel, and continues after another process has taken over. So no decision rests
//! on the Lease alone: a patch names the state that its decision was made on, and fails if
//! another process has acted since. The same holds for a virtual machine that was paused, whose
//! monotonic clock stood still, and for the up to 2 s before a leader notices that its Lease was
//! deleted.

mod candidate;
mod election;
mod store_note;

pub use candidate::{Candidate, LeaseName, Standing};
pub use election::Deposed;
pub use store_note::StoreNote;
