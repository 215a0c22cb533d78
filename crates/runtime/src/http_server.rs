//! HTTP server, with or without TLS, with a bounded number of connections and an orderly end.
//!
//! Anybody may connect and then send nothing, or never read. So that probes and metrics are
//! answered all the same, no connection waits to be accepted. Beyond the limit, the address
//! with the most connections gives up its oldest one, which moves to a small reserve. A
//! connection in the reserve gets one answer, and the oldest there makes room for the newest.
//! Thus no address takes the room of one that has fewer; the IPv6 addresses of one network
//! count as one address. When room is needed, idle connections are closed.

mod bodies;
mod probes;
mod write_deadline;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

pub use bodies::{Bodies, BodyError, ReadBody};
pub use probes::{liveness, metrics, readiness};
use write_deadline::WriteDeadline;

use crate::logging::Seldom;
use crate::network::network;
use crate::tls::ServerTls;

/// Most connections that are kept at a time.
pub const MAX_CONNECTIONS: usize = 256;
/// Most connections in the reserve, each for one answer. A client that wants to push a probe
/// out of the reserve has to open this many connections while the answer is computed.
const RESERVE: usize = 64;
/// Time limit for a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the head of a request, and for an idle connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without progress after which a response to a client that does not read is given up.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest head of a request (bytes).
const MAX_HEAD_BYTES: usize = 32 * 1024;
/// Time for requests in progress to finish during shutdown.
const GRACE: Duration = Duration::from_millis(500);
/// Protocol negotiated within TLS.
const ALPN: &[u8] = b"http/1.1";
/// Wait after a failed accept, which mostly means that the process has run out of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Limits on connections, sizes and times of clients.
#[derive(Clone, Copy)]
struct Limits {
    connections: usize,
    reserve: usize,
    header_timeout: Duration,
    write_timeout: Duration,
}

/// Address of the peer, or its network for IPv6. Available in the extensions of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer(IpAddr);

/// Expected behaviour of a server's clients.
#[derive(Clone, Copy, Debug)]
pub struct Clients {
    /// Most connections that are kept at a time.
    pub connections: usize,
    /// Time limit for an idle connection and for the head of a request. Longer for clients that
    /// keep connections open and would not retry if one is closed just before a request.
    pub idle: Duration,
}

// === impl Peer ===

impl Peer {
    /// Returns the peer with this address.
    pub fn of(address: IpAddr) -> Self {
        Self(network(address))
    }
}

/// Serves until `cancel`, ends within a second of it while requests in progress may finish, and
/// returns the listener. `tls` is `None` for plain-text connections. At most
/// [`MAX_CONNECTIONS`] connections are kept at a time; further ones get one answer each.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    routes: Router,
    cancel: CancellationToken,
) -> TcpListener {
    serve_within(Limits::default(), listener, tls, routes, cancel).await
}

/// Serves like [`serve`], with limits fit for `clients`.
pub async fn serve_clients(
    clients: Clients,
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    routes: Router,
    cancel: CancellationToken,
) -> TcpListener {
    let limits = Limits {
        connections: clients.connections,
        header_timeout: clients.idle,
        ..Limits::default()
    };
    serve_within(limits, listener, tls, routes, cancel).await
}

async fn serve_within(
    limits: Limits,
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    routes: Router,
    cancel: CancellationToken,
) -> TcpListener {
    let room_wanted = Arc::new(Notify::new());
    let mut connections = JoinSet::new();
    let mut kept = Kept::default();
    // Otherwise clients that use up all descriptors would cause ten lines a second.
    let failed = Seldom::default();
    // Oldest connections first.
    let mut reserve: VecDeque<AbortHandle> = VecDeque::new();
    let accept = async {
        loop {
            while connections.try_join_next().is_some() {}
            let (stream, address) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    if let Some(not_logged_before) = failed.now() {
                        tracing::warn!(%error, not_logged_before, "cannot accept a connection");
                    }
                    tokio::time::sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            let tls = tls.as_deref().map(acceptor);
            let peer = Peer::of(address.ip());
            let leave = CancellationToken::new();
            let connection = Connection {
                routes: routes.clone(),
                limits,
                peer,
                cancel: cancel.clone(),
                leave: leave.clone(),
                room_wanted: Arc::clone(&room_wanted),
            };
            kept.forget_ended(limits.connections);
            let is_full = kept.count() >= limits.connections;
            if is_full {
                // Notified before this connection subscribes, so that it is not closed itself.
                room_wanted.notify_waiters();
            }
            let giving_way = is_full.then(|| kept.shed_for(peer)).flatten();
            let keep = !is_full || giving_way.is_some();
            let serving = connections.spawn(connection.serve(stream, tls, keep));
            let crowded = if keep {
                kept.add(peer, serving, leave);
                giving_way
            } else {
                Some(serving)
            };
            let Some(crowded) = crowded else { continue };
            reserve.retain(|served| !served.is_finished());
            if reserve.len() >= limits.reserve
                && let Some(oldest) = reserve.pop_front()
            {
                oldest.abort();
            }
            reserve.push_back(crowded);
        }
    };
    cancel.run_until_cancelled(accept).await;
    let finish = async { while connections.join_next().await.is_some() {} };
    // Connections that are still busy are cut off when the set is dropped.
    drop(tokio::time::timeout(GRACE, finish).await);
    listener
}

/// Connections that are kept, by peer, oldest first.
#[derive(Default)]
struct Kept {
    by_peer: HashMap<Peer, VecDeque<(AbortHandle, CancellationToken)>>,
    count: usize,
}

// === impl Kept ===

impl Kept {
    fn count(&self) -> usize {
        self.count
    }

    fn add(&mut self, peer: Peer, serving: AbortHandle, leave: CancellationToken) {
        let of_peer = self.by_peer.entry(peer).or_default();
        of_peer.push_back((serving, leave));
        self.count += 1;
    }

    /// Forgets connections that have ended, if the limit is reached.
    fn forget_ended(&mut self, limit: usize) {
        if self.count < limit {
            return;
        }
        self.by_peer.retain(|_, of_peer| {
            of_peer.retain(|(serving, _)| !serving.is_finished());
            !of_peer.is_empty()
        });
        self.count = self.by_peer.values().map(VecDeque::len).sum();
    }

    /// Asks the oldest connection of the address with the most connections to end, and returns
    /// it. Returns `None` if no address has more than `peer` would have.
    fn shed_for(&mut self, peer: Peer) -> Option<AbortHandle> {
        let own = self.by_peer.get(&peer).map_or(0, VecDeque::len);
        let most = self
            .by_peer
            .values_mut()
            .max_by_key(|theirs| theirs.len())?;
        if most.len() <= own + 1 {
            return None;
        }
        let (serving, leave) = most.pop_front()?;
        self.count -= 1;
        leave.cancel();
        Some(serving)
    }
}

/// Returns the TLS acceptor for the next connection; the certificates may have changed.
fn acceptor(tls: &ServerTls) -> TlsAcceptor {
    let mut config = ServerConfig::clone(&tls.config());
    config.alpn_protocols = vec![ALPN.to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// State of one connection: what answers it, and what ends it.
struct Connection {
    routes: Router,
    limits: Limits,
    peer: Peer,
    cancel: CancellationToken,
    /// Cancelled when this connection is to end after the answer in progress.
    leave: CancellationToken,
    room_wanted: Arc<Notify>,
}

// === impl Connection ===

impl Connection {
    /// Performs the TLS handshake if there is TLS, then answers.
    async fn serve(self, stream: TcpStream, tls: Option<TlsAcceptor>, keep: bool) {
        let stream = WriteDeadline::new(stream, self.limits.write_timeout);
        let Some(tls) = tls else {
            return self.answer(stream, keep).await;
        };
        let limit = self.limits.header_timeout.min(HANDSHAKE_TIMEOUT);
        match tokio::time::timeout(limit, tls.accept(stream)).await {
            Ok(Ok(stream)) => self.answer(stream, keep).await,
            Ok(Err(error)) => tracing::debug!(%error, "connection was not secured"),
            Err(_) => tracing::debug!("connection was not secured in time"),
        }
    }

    /// Answers one request, or all requests if `keep` is set, until the client leaves or the
    /// connection is to end.
    async fn answer(self, stream: impl AsyncRead + AsyncWrite + Unpin, keep: bool) {
        let (routes, peer) = (TowerToHyperService::new(self.routes), self.peer);
        let routes = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            routes.call(request)
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.header_timeout)
            .max_buf_size(MAX_HEAD_BYTES)
            .keep_alive(keep)
            .serve_connection(TokioIo::new(stream), routes);
        let mut connection = pin!(connection);
        let to_end = async {
            tokio::select! {
                () = self.cancel.cancelled() => {}
                () = self.leave.cancelled() => {}
                () = self.room_wanted.notified() => {}
            }
        };
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = to_end => {
                // An idle connection ends at once, a busy one after the answer in progress.
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = result {
            // Clients may disconnect at any time.
            tracing::debug!(%error, "connection ended");
        }
    }
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: MAX_CONNECTIONS,
            reserve: RESERVE,
            header_timeout: HEADER_TIMEOUT,
            write_timeout: WRITE_TIMEOUT,
        }
    }
}

#[cfg(test)]
mod tests;
