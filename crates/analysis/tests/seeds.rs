//! The fuzz target of this crate, on its seeds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]
#![allow(missing_docs, unreachable_pub)]

extern crate gpuwarden_analysis as analysis;

#[path = "../../../fuzz/bodies/rules.rs"]
mod rules;
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[test]
fn rules() {
    seeds::run("rules", |text| {
        rules::run(std::str::from_utf8(text).unwrap());
    });
}
