//! Compares the bindings and constants with NVIDIA's header.

use testkit::Component;

use super::*;
use crate::c_header::Header;

#[test]
fn the_functions_are_those_of_the_header() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let types = [
        ("Code", "cudaError_t"),
        ("c_int", "int"),
        ("c_uint", "unsigned int"),
        ("usize", "size_t"),
        ("*mut c_int", "int *"),
        ("*mut f32", "float *"),
        ("*mut c_char", "char *"),
        ("*const c_char", "const char *"),
        ("*mut c_void", "void *"),
        ("*const c_void", "const void *"),
        ("Address", "void *"),
        ("*mut Address", "void **"),
        ("StreamHandle", "cudaStream_t"),
        ("*mut StreamHandle", "cudaStream_t *"),
        ("EventHandle", "cudaEvent_t"),
        ("*mut EventHandle", "cudaEvent_t *"),
    ];
    Header::cuda(&wheels).assert_signatures(Functions::SIGNATURES, &types);
}

#[test]
fn the_numbers_are_those_of_the_header() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let ours = [
        ("cudaErrorNotReady", NOT_READY),
        ("cudaStreamNonBlocking", NON_BLOCKING),
        ("cudaMemcpyHostToDevice", TO_DEVICE),
        ("cudaMemcpyDeviceToHost", FROM_DEVICE),
    ];
    let ours = ours.map(|(name, number)| (name.to_owned(), i64::from(number)));
    Header::cuda(&wheels).assert_numbers(&ours);
}
