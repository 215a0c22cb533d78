//! Interprets what machines report: the content of a kernel log line, the meaning of a code,
//! the device of an event, and which reports are repeats of each other.
//!
//! This room does no I/O, reads no clock, and does not decide how to react to a fault;
//! `model`, above it, does.

pub mod catalog;
pub mod decode;
pub mod fold;
pub mod gpu;
pub mod limits;
pub mod subject;
pub mod sympathy;
