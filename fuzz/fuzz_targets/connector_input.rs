//! `bodies/connector_input.rs`, as a target of the fuzzer.

#![no_main]

#[path = "../bodies/connector_input.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &[u8]| body::run(input));
