//! The controller's gRPC port over TLS: events of agents and of central monitors, and the other
//! requests of agents.
//!
//! Callers are identified before a request is read (`identity.rs`): a node by its certificate or
//! by the token of its agent's pod, a central monitor by a token and a list. The connector
//! decides what a caller may report, as for all callers.

mod identity;
mod layer;

use std::sync::Arc;
use std::time::Duration;

use connector::{Caller, Connector};
use contract::node::node_service_server::NodeServiceServer;
use runtime::tcp_grpc;
use runtime::tls::ServerTls;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use identity::{Identify, Reviewer, ServiceAccount, ServiceAccountError, TokenRules};

use crate::agents::Agents;
use crate::pods::MAX_REPORT_BYTES;
use layer::Identified;

/// Longest time of a request. The events of a request that is cut off may still be stored.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Silence after which a connection is pinged, and the longest wait for the answer.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));
/// Longest age of a connection, after which it is closed gracefully, so that a certificate that
/// has expired, or was replaced, does not stay in use.
const MAX_AGE: Duration = Duration::from_secs(60 * 60);

/// Serves requests on `listener` until `cancel`, then answers those in flight. Without `tls` the
/// connection is in the clear, for tests and for callers on this machine.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    identify: Identify,
    connector: Connector,
    agents: Agents,
    cancel: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let service = connector::service(connector, |extensions| extensions.get::<Caller>().cloned());
    let agents = NodeServiceServer::new(agents).max_decoding_message_size(MAX_REPORT_BYTES);
    tonic::transport::Server::builder()
        .timeout(REQUEST_TIMEOUT)
        .http2_keepalive_interval(Some(PING.0))
        .http2_keepalive_timeout(Some(PING.1))
        .max_connection_age(MAX_AGE)
        .max_concurrent_streams(connector::MAX_STREAMS)
        .add_service(Identified::new(service, identify.clone()))
        .add_service(Identified::new(agents, identify))
        .serve_with_incoming_shutdown(tcp_grpc::incoming(listener, tls), cancel.cancelled_owned())
        .await
}

#[cfg(test)]
mod tests;
