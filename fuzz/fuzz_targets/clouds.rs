//! Fuzz target of `bodies/clouds.rs`.

#![no_main]

#[path = "../bodies/clouds.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &str| body::run(input));
