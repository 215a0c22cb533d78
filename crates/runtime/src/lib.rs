//! Process plumbing: logging, metrics, freshness of sources, TLS, gRPC on Unix sockets and TCP.

pub mod logging;
pub mod metrics;
pub mod sources;
pub mod tcp_grpc;
pub mod tls;
pub mod unix_grpc;
pub mod work_queue;
