//! A client of the connector's socket: any bytes, through the filter in front of the gRPC
//! server.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| runtime::unix_grpc::fuzz_rewrite(bytes));
