//! A client on the connector's socket: any bytes, through the filter before the gRPC server.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| runtime::unix_grpc::fuzz_rewrite(bytes));
