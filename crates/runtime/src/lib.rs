//! Process plumbing: logging, the audit log, metrics, freshness of sources, TLS, HTTP, gRPC on Unix sockets
//! and TCP, and the share of each that one user may have.

pub mod audit;
pub mod backoff;
pub mod build;
pub mod descriptors;
pub mod file_stamp;
pub mod http_server;
mod line_queue;
pub mod logging;
pub mod metrics;
mod network;
pub mod shares;
pub mod sources;
pub mod tcp_grpc;
pub mod text_file;
pub mod tls;
pub mod unix_grpc;
pub mod work_queue;

use metrics::Group;

/// Returns the descriptions of the metrics of this room, but for those of work queues
/// ([`work_queue::WorkQueue::described`]).
pub fn described_metrics() -> Vec<Group> {
    vec![
        Group::new("sources", [sources::described()]),
        Group::new("process", build::BuildMetrics::described()),
        Group::new(
            "process",
            [tls::described(), logging::lost_lines(), audit::lost_lines()],
        ),
    ]
}
