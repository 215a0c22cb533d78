//! Types of NVML's C interface that the bindings lack, and its conventions for texts and
//! versions of structures.

use std::ffi::{c_char, c_uint};

use nvml_wrapper_sys::bindings::nvmlReturn_t;

/// Length of NVML's longest text, with its terminating zero.
pub(super) const TEXT_BYTES: usize = 96;

/// Buffer for a zero-terminated text.
pub(super) type Text = [c_char; TEXT_BYTES];

/// Length of a [`Text`], a type of its own so that no other length can be passed.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct Length(c_uint);

/// Fabric state of drivers from version 615 on. The bindings lack it; NVIDIA's Python bindings
/// have it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct FabricInfoV4 {
    pub(super) cluster: [u8; 16],
    pub(super) status: nvmlReturn_t,
    pub(super) cliques: [FabricClique; 64],
    pub(super) clique_count: c_uint,
    pub(super) state: u8,
    pub(super) health_mask: c_uint,
    pub(super) health_summary: u8,
}

/// Clique of a GPU for one kind of access to its members.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct FabricClique {
    pub(super) kind: u8,
    pub(super) id: c_uint,
}

// === impl Length ===

impl Length {
    /// Length of every [`Text`].
    #[allow(clippy::cast_possible_truncation, reason = "a small constant")]
    pub(super) const OF_TEXT: Self = Self(TEXT_BYTES as c_uint);
}

/// Returns the version of a structure, which NVML composes of its size and its version number.
#[allow(clippy::cast_possible_truncation, reason = "sizes of small structures")]
pub(super) const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// Returns the text before the terminating zero.
pub(super) fn text(bytes: &[c_char]) -> String {
    let bytes = bytes.iter().take_while(|byte| **byte != 0);
    let bytes: Vec<u8> = bytes.map(|byte| byte.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
