//! The seeds of the fuzz targets, through what the targets do with an input. The fuzzer
//! (`cargo xtask fuzz`) builds the same files with flags of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::match_same_arms)]
#![allow(missing_docs, unreachable_pub)]

use std::fs;
use std::path::Path;

#[path = "../../../fuzz/bodies/connector_input.rs"]
mod connector_input;
#[path = "../../../fuzz/bodies/decoder.rs"]
mod decoder;
#[path = "../../../fuzz/bodies/journal.rs"]
mod journal;
#[path = "../../../fuzz/bodies/kmsg_record.rs"]
mod kmsg_record;
#[path = "../../../fuzz/bodies/policy.rs"]
mod policy;

/// Runs every seed of a target.
fn seeds(target: &str, run: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus-seed");
    let mut count = 0;
    for seed in fs::read_dir(corpus.join(target)).unwrap() {
        run(&fs::read(seed.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count > 0, "{target} has no seed");
}

#[test]
fn requests_to_the_connector() {
    seeds("connector_input", connector_input::run);
}

#[test]
fn lines_of_drivers() {
    seeds("decoder", decoder::run);
}

#[test]
fn files_of_the_journal() {
    seeds("journal", journal::run);
}

#[test]
fn records_of_the_kernel_log() {
    seeds("kmsg_record", kmsg_record::run);
}

#[test]
fn policies() {
    seeds("policy", |text| {
        policy::run(std::str::from_utf8(text).unwrap());
    });
}

#[test]
fn clients_on_the_socket() {
    seeds("unix_grpc", runtime::unix_grpc::fuzz_rewrite);
}
