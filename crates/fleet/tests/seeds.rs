//! The fuzz targets of this crate, on their seeds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]
#![allow(missing_docs, unreachable_pub)]

extern crate gpuwarden_fleet as fleet;

#[path = "../../../fuzz/bodies/connector_input.rs"]
mod connector_input;
#[path = "../../../fuzz/bodies/policy.rs"]
mod policy;
#[path = "../../../fuzz/bodies/remediation.rs"]
mod remediation;
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[test]
fn requests_to_the_connector() {
    seeds::run("connector_input", connector_input::run);
}

#[test]
fn policies() {
    seeds::run("policy", |text| {
        policy::run(std::str::from_utf8(text).unwrap());
    });
}

#[test]
fn repairs() {
    seeds::run("remediation", |text| {
        remediation::run(std::str::from_utf8(text).unwrap());
    });
}
