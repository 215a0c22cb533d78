//! Process plumbing: configuration layers, logging, metrics, Unix-socket gRPC, shutdown.

pub mod logging;
pub mod metrics;
pub mod sources;
pub mod unix_grpc;
