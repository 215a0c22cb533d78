//! `bodies/decoder.rs`, as a target of the fuzzer.

#![no_main]

#[path = "../bodies/decoder.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &[u8]| body::run(input));
