//! The GPUs of the node, as their driver tells of them.

pub mod probe;
