//! Runs this crate's fuzz target on its seeds.

#![allow(clippy::unwrap_used, clippy::print_stdout)]
#![allow(missing_docs, unreachable_pub)]

#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[test]
fn clients_on_the_socket() {
    seeds::run("unix_grpc", gpuwarden_runtime::unix_grpc::fuzz_rewrite);
}
