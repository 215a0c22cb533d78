//! Compares the bindings and constants with NVIDIA's header.

use testkit::Component;

use super::*;
use crate::c_header::{Header, layout};

#[test]
fn the_functions_are_those_of_the_header() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let types = [
        ("Code", "ncclResult_t"),
        ("*mut Code", "ncclResult_t *"),
        ("c_int", "int"),
        ("c_uint", "unsigned int"),
        ("usize", "size_t"),
        ("*mut c_int", "int *"),
        ("*const c_char", "const char *"),
        ("*const c_void", "const void *"),
        ("Address", "void *"),
        ("StreamHandle", "cudaStream_t"),
        ("Handle", "ncclComm_t"),
        ("*mut Handle", "ncclComm_t *"),
        ("RawId", "ncclUniqueId"),
        ("*mut RawId", "ncclUniqueId *"),
    ];
    Header::nccl(&wheels).assert_signatures(Functions::SIGNATURES, &types);
}

#[test]
fn the_numbers_are_those_of_the_header() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let mut ours = layout!(RawId, "ncclUniqueId" { bytes: "internal" });
    ours.push(("ncclFloat32".to_owned(), FLOAT32.into()));
    Header::nccl(&wheels).assert_numbers(&ours);
}
