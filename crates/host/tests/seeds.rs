//! The fuzz targets of this crate, run on their seeds.

#![allow(clippy::unwrap_used, clippy::print_stdout)]
#![allow(missing_docs, unreachable_pub)]

extern crate gpuwarden_host as host;

#[path = "../../../fuzz/bodies/journal.rs"]
mod journal;
#[path = "../../../fuzz/bodies/kmsg_record.rs"]
mod kmsg_record;
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[test]
fn files_of_the_journal() {
    seeds::run("journal", journal::run);
}

#[test]
fn records_of_the_kernel_log() {
    seeds::run("kmsg_record", kmsg_record::run);
}
