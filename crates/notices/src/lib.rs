//! Announced maintenance of a cloud: a node leaves before its host goes down, and returns after.
//!
//! ```text
//! source -> Notice -> Book: a Record for each maintenance, by the clock and the nodes -> Report
//! ```
//!
//! A source reads all notices again and again, or tells changes. The book compares what it holds
//! for each node with what was reported last, so a reading that is repeated, late or lost costs
//! time and nothing else. Stored together with the reports on their way, as a monitor's state is
//! (`monitor/lib.rs`), it loses and doubles nothing by a restart at any moment.
//!
//! Notices come from the Node objects ([`node_object`]), from the metadata service of each machine,
//! and from the APIs of clouds (the room `clouds`). The monitor that has the book is
//! `controller/maintenance.rs`.
//!
//! The janitor's part, which causes maintenance, is the room `maintenance`.

mod book;
mod config;
pub mod node_object;
mod notice;
mod record;
mod report;
pub mod request;
pub mod words;

pub use book::{Book, MAX_ENDED, MAX_OPEN, NodeState, Settings};
pub use config::{AwsConfig, Clouds, GcpConfig, MaintenanceConfig, OciConfig};
pub use notice::{Kind, Notice, Phase, Reading};
pub use record::{Record, Settled, State};
pub use report::{AGENT, Report};

#[cfg(test)]
mod tests;
