//! Fuzz target of `bodies/policy.rs`.

#![no_main]

#[path = "../bodies/policy.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &str| body::run(input));
