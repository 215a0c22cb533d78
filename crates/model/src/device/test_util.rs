//! Slices for tests of this crate and of others.

use super::{GPU_DRIVER, Slice, SliceDevice};

/// Returns the slice of a node with `gpus` GPUs, whose UUIDs are `GPU-0` and so on.
pub fn slice(node: &str, gpus: u8) -> Slice {
    let device = |index: u8| SliceDevice {
        name: format!("gpu-{index}"),
        gpu: Some(format!("GPU-{index}")),
        pci: Some(format!("0000:{index:02x}:00.0")),
        ..SliceDevice::default()
    };
    Slice {
        driver: GPU_DRIVER.into(),
        pool: node.into(),
        generation: 1,
        slices: 1,
        node: Some(node.into()),
        devices: (0..gpus).map(device).collect(),
    }
}
