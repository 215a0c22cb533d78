//! Names that gpuwarden writes on, or reads from, Kubernetes objects, and names inside events.

mod event;
mod kubernetes;

pub use event::*;
pub use kubernetes::*;
