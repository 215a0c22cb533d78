//! The fuzz target of this crate, run over its seeds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]
#![allow(missing_docs, unreachable_pub)]

extern crate gpuwarden_preflight as preflight;

#[path = "../../../fuzz/bodies/preflight.rs"]
mod body;
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[test]
fn configurations_pods_and_gangs() {
    seeds::run("preflight", |text| {
        body::run(std::str::from_utf8(text).unwrap());
    });
}
