//! Fuzz target of `bodies/kmsg_record.rs`.

#![no_main]

#[path = "../bodies/kmsg_record.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|input: &[u8]| body::run(input));
