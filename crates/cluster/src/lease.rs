//! Elects the leader, one of several controllers of a cluster, by a Lease.
//!
//! A Lease (`coordination.k8s.io/v1`) is an object with a holder, which the holder renews.
//! A candidate that sees it unchanged for its whole duration may take it. When that is, and what
//! to ask the API server next, is decided in [`election`] without I/O; [`Candidate`] carries it out;
//! [`Tenure`](crate::Tenure) is asked before every write to the cluster and says whether we still lead.
//!
//! Nobody compares clocks of two machines. The holder counts from when it *sent* the last
//! renewal that was confirmed, the others from when they *received* the answer that first
//! showed it: so the holder's time runs out first, however long either was under way.
//!
//! ```text
//! renewed          sent                                    seen by others
//!   holder          |--- may begin writes ---10 s|-- their end --14 s|
//!   others          |                   |---- not before ---------------15 s|
//! ```
//!
//! What this does not shut out is a process that is stopped between asking the tenure and
//! giving the bytes to the kernel, and goes on after another has taken over. That is why no
//! decision rests on the Lease alone: a patch names what it has seen, and fails where another
//! has acted since. The same goes for a virtual machine that was paused, whose monotonic clock stood
//! still, and for the 2 s in which a leader has not noticed that somebody deleted its Lease.

mod candidate;
mod election;
mod store_note;

pub use candidate::{Candidate, LeaseName, Standing};
pub use election::Deposed;
pub use store_note::StoreNote;
