//! Labels that tell which software and how many devices a node has, as NVSentinel's labeler
//! writes them: its monitors choose their nodes by these labels.
//!
//! ```text
//! pods of DCGM and drivers, slices, nodes --> Board --> change of each node
//! ```
//!
//! [`Board`] keeps of each object only what a label depends on. The change of a node follows from
//! the current objects alone, in whatever order their events arrived.

mod board;
pub mod classes;
mod counts;
mod groups;
pub mod pod;
mod slices;
mod software;

pub use board::{Board, Counted, Learned};
pub use counts::Skip;

use classes::Class;
use pod::DcgmVersion;

/// Settings of all labels.
#[derive(Clone, Debug)]
pub struct LabelConfig {
    /// Label of a node that also tells that it runs Kata Containers.
    pub kata_label: Option<String>,
    /// True if each node with GPUs has a driver, whatever pods it has.
    pub assume_driver: bool,
    /// True if DCGM also runs outside of pods: the label with its version stays without a pod.
    pub assume_dcgm: bool,
    /// True if the first label of a node with DCGM's version waits until its pod is ready.
    pub dcgm_ready_first: bool,
    /// Version of DCGM where a pod does not tell it.
    pub dcgm_version: Option<DcgmVersion>,
    /// Classes of devices that are counted.
    pub classes: Vec<Class>,
}

// === impl LabelConfig ===

impl LabelConfig {
    /// Returns whether a class counts the devices of slices.
    pub fn reads_slices(&self) -> bool {
        let mut classes = self.classes.iter();
        classes.any(|class| class.expression.reads_slices)
    }
}
