//! Fuzz target of `bodies/preflight.rs`.

#![no_main]

#[path = "../bodies/preflight.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &str| body::run(input));
