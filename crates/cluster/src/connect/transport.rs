//! HTTP transport of the client: what kube's own builder makes, with two settings that it gives
//! no access to.
//!
//! - `TCP_NODELAY`. Without it the first request on a new TLS connection waits 40 ms: Nagle's
//!   algorithm holds back the end of the handshake until the server's delayed acknowledgement.
//!   That request cordons a node whose GPU has just failed.
//! - HTTP/2 where the server speaks it. Every API server does; a proxy in front may not, and
//!   gets HTTP/1.1. The watch and all patches share one connection, so the first patch after a
//!   quiet month finds it open, and 32 patches at once need no 32 handshakes. A burst over 32
//!   connections of HTTP/1.1 was not measurably faster: the API server's own work takes ten
//!   times as long.

use std::time::Duration;

use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::{Body, ClientBuilder, ConfigExt as _};
use kube::{Client, Config};
use tower::{BoxError, ServiceExt as _};

use super::ConnectError;
use crate::audit::{Audit, audited};

/// Longest time to open a TLS connection, including the name look-up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time to write a request, if the API server does not read it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence on a connection, after which it counts as dead and is closed.
///
/// Where HTTP/1.1 is spoken, which has no ping, this detects a connection that died without
/// notice (a rebooted load balancer, a dropped NAT entry). A watch is never silent for so long,
/// because it asks the server to end it after [`crate::watch::WATCH_SECONDS`].
const SILENCE_TIMEOUT: Duration = Duration::from_secs(35);

/// Times of pings. With HTTP/2, a connection that was silent for `after` is pinged, and closed
/// if no answer comes within `timeout`. All requests share it, and a dead connection would hold
/// them all.
#[derive(Clone, Copy)]
pub(super) struct Pings {
    after: Duration,
    timeout: Duration,
}

impl Pings {
    /// Times for most connections.
    pub(super) const DEFAULT: Self = Self {
        after: Duration::from_secs(10),
        timeout: Duration::from_secs(5),
    };
    /// Times for the Lease: a dead connection has to be detected, and another one opened, before
    /// the Lease has to be renewed.
    pub(super) const SOON: Self = Self {
        after: Duration::from_secs(2),
        timeout: Duration::from_secs(2),
    };
}

/// Creates a client for the cluster that `config` names, without opening a connection. Errors
/// name `server`.
pub(super) fn client(
    config: &Config,
    server: &str,
    pings: Pings,
    audit: Option<Audit>,
) -> Result<Client, ConnectError> {
    let credentials = |source| ConnectError::Credentials {
        server: server.to_owned(),
        source: Box::new(source),
    };
    if let Some(proxy) = &config.proxy_url {
        return Err(ConnectError::Proxy {
            server: server.to_owned(),
            proxy: proxy.to_string(),
        });
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);

    let tls = config.rustls_client_config().map_err(credentials)?;
    let mut https = HttpsConnectorBuilder::new()
        .with_tls_config(tls)
        .https_or_http();
    if let Some(name) = &config.tls_server_name {
        let name = name
            .clone()
            .try_into()
            .map_err(|_| ConnectError::ServerName {
                server: server.to_owned(),
                name: name.clone(),
            })?;
        https = https.with_server_name_resolver(FixedServerNameResolver::new(name));
    }
    let mut connector = TimeoutConnector::new(https.enable_all_versions().wrap_connector(tcp));
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_read_timeout(Some(SILENCE_TIMEOUT));
    connector.set_write_timeout(Some(WRITE_TIMEOUT));
    // The silence of a pooled connection before a request does not count.
    connector.set_reset_reader_on_write(true);

    let http = legacy::Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .http2_keep_alive_interval(pings.after)
        .http2_keep_alive_timeout(pings.timeout)
        .http2_keep_alive_while_idle(true)
        .build::<_, Body>(connector)
        .map_err(BoxError::from);
    let http = audited(http, audit);

    let headers = config.extra_headers_layer().map_err(credentials)?;
    let base = config.base_uri_layer();
    let builder = ClientBuilder::new(http, config.default_namespace.clone()).with_layer(&headers);
    Ok(match config.auth_layer().map_err(credentials)? {
        Some(auth) => builder.with_layer(&auth).with_layer(&base).build(),
        None => builder.with_layer(&base).build(),
    })
}
