//! Fuzz target of `bodies/journal.rs`.

#![no_main]

#[path = "../bodies/journal.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &[u8]| body::run(input));
