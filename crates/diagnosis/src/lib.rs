//! The language of machines: what a line of the kernel log says, what a code means, which device
//! an event is about, and which reports are repeats of each other.
//!
//! Nothing here does I/O or reads a clock, and nothing decides what is done about a fault: that
//! is the business of `domain`, which stands above.

pub mod catalog;
pub mod decode;
pub mod fold;
pub mod gpu;
pub mod limits;
pub mod subject;
