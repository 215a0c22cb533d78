//! The domain model that all decisions share: health events, the faults that they open, nodes
//! as the API server shows them, and the annotations that gpuwarden writes on a node.
//!
//! ```text
//! record(event) -> FaultBook   which faults are open, per node and device
//! ```
//!
//! No module here does I/O or reads a clock: time is an argument.

pub mod actors;
pub mod attempt;
pub mod condition;
pub mod device;
pub mod event;
pub mod fault;
pub mod future;
pub mod journal;
pub mod listing;
pub mod mode;
pub mod node;
pub mod ownership;
pub mod position;
pub mod proposal;
pub mod reporter;
pub mod resource;
pub mod selector;
pub mod shell;
pub mod status;
pub mod time;
pub mod topology;
pub mod wakes;
