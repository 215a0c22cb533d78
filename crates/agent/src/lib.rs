//! The node side: monitors that look at the machine, and the platform connector that
//! takes events in.
//!
//! ```text
//! kernel log -> kernel_log (decode, count) -+
//!                                           +-> connector (check, name, store) -> EventStore
//! any monitor -> gRPC on a Unix socket -----+
//! ```
//!
//! An event is accepted when the store has it on disk, and only then is a sender told so.

pub mod connector;
pub mod kernel_log;
