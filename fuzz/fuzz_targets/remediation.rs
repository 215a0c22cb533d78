//! `bodies/remediation.rs`, as a target of the fuzzer.

#![no_main]

#[path = "../bodies/remediation.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &str| body::run(input));
