//! Tests of providers over gRPC, and with Jobs in a real API server.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "janitor/generic.rs"]
mod generic;
#[path = "janitor/grpc.rs"]
mod grpc;
#[path = "janitor/label.rs"]
mod label;
#[path = "janitor/lies.rs"]
mod lies;
#[path = "janitor/redfish.rs"]
mod redfish;
#[path = "janitor/strangers.rs"]
mod strangers;
