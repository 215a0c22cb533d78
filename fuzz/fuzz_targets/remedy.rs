//! `bodies/remedy.rs`, as a target of the fuzzer.

#![no_main]

#[path = "../bodies/remedy.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &str| body::run(input));
