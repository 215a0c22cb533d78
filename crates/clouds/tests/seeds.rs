//! The fuzz target of this crate, run over its seeds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]
#![allow(missing_docs, unreachable_pub)]

extern crate gpuwarden_clouds as clouds;

#[path = "../../../fuzz/bodies/clouds.rs"]
mod body;
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[test]
fn responses_of_clouds() {
    seeds::run("clouds", |text| {
        body::run(std::str::from_utf8(text).unwrap());
    });
}
