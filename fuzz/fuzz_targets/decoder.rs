//! Fuzz target of `bodies/decoder.rs`.

#![no_main]

#[path = "../bodies/decoder.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &[u8]| body::run(input));
