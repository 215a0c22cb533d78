//! `gpuwarden uninstall`: removes everything that gpuwarden has written from a cluster.

mod node;
mod object;
mod owner;

use crate::args::NodesFate;

/// Decisions of the caller.
#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    nodes: Option<NodesFate>,
    machines: bool,
    crds: bool,
}
