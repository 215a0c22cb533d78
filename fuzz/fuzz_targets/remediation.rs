//! Fuzz target of `bodies/remediation.rs`.

#![no_main]

#[path = "../bodies/remediation.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &str| body::run(input));
