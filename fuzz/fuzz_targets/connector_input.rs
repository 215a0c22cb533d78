//! Fuzz target of `bodies/connector_input.rs`.

#![no_main]

#[path = "../bodies/connector_input.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &[u8]| body::run(input));
