//! Fuzz target of `bodies/rules.rs`.

#![no_main]

#[path = "../bodies/rules.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &str| body::run(input));
