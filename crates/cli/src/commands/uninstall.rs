//! `gpuwarden uninstall`: removes everything that gpuwarden has written from a cluster.

mod node;
mod owner;

use crate::args::NodesFate;

/// Decisions of the caller.
#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    nodes: Option<NodesFate>,
    machines: bool,
    #[allow(dead_code)] // Read by the next decision to come, about kinds.
    crds: bool,
}
