//! The fuzz target of this crate, run on its seeds.

#![allow(clippy::unwrap_used, clippy::match_same_arms, clippy::print_stdout)]
#![allow(missing_docs, unreachable_pub)]

extern crate gpuwarden_diagnosis as diagnosis;

#[path = "../../../fuzz/bodies/decoder.rs"]
mod decoder;
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[test]
fn lines_of_drivers() {
    seeds::run("decoder", decoder::run);
}
