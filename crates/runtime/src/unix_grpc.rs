//! gRPC over a Unix socket that stock clients of every language can call.
//!
//! gRPC's C core (Python, C++, Ruby) sends the percent-encoded socket path as `:authority` when
//! it dials a Unix socket. `h2`, which tonic is built on, rejects that as malformed and resets
//! the stream before tonic sees the call (hyperium/h2 pull 487, grpc/grpc-rust issue 243).
//! Monitors written in those languages dial without options, so the server has to adapt.
//! [`incoming`] therefore puts a filter between the socket and tonic:
//!
//! ```text
//! client ── UnixStream ── AuthorityStream ── tonic
//!                          reads: frames, hpack; writes: untouched
//! ```
//!
//! The filter replaces octets of the authority in place. Input that it does not understand
//! passes unchanged, and `h2` judges it as it would without the filter.
//!
//! Remove the filter when `h2` accepts such an authority; the integration test
//! `stock_tonic_still_refuses_c_core` fails on that day. [`bind`] and [`UnixPeer`] stay.

mod bind;
mod frames;
mod hpack;
mod peer;
#[cfg(test)]
mod tests;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::UCred;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tonic::transport::server::Connected;

use crate::logging::Seldom;
use crate::shares::{Share, Shares};

use frames::{NoPreface, Repair};

pub use bind::{BindError, MAX_PATH_LENGTH, bind};
pub use peer::UnixPeer;

/// Most open connections; more wait in the listener's backlog. One user may have a share of
/// them ([`crate::shares`]); further connections of that user are closed at once.
pub const MAX_CONNECTIONS: usize = 512;

/// Time limit for the first call on a connection, so that clients that send nothing keep no
/// other out. A client that connects early has to reconnect.
pub const FIRST_CALL: Duration = Duration::from_secs(10);

/// Pause after a failed `accept`, which mostly means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepted connection whose requests `h2` can read.
pub struct AuthorityStream {
    io: UnixStream,
    peer: UnixPeer,
    repair: Repair,
    /// Rate limit of log lines about clients that speak another protocol.
    garbled: Arc<Seldom>,
    /// Time limit for the first call; `None` once a call has begun.
    first_call: Option<Pin<Box<Sleep>>>,
    /// Counts the connection until dropped.
    _counted: (OwnedSemaphorePermit, Share),
}

/// Returns the connections of a listener, for tonic's `serve_with_incoming`.
///
/// At most [`MAX_CONNECTIONS`] are open at a time. Never ends and never yields an error, which
/// would end tonic's server: a failed `accept` is logged and retried. The item is a `Result`
/// because tonic requires one.
pub fn incoming(listener: UnixListener) -> impl Stream<Item = io::Result<AuthorityStream>> {
    incoming_of(listener, MAX_CONNECTIONS, UnixPeer::new)
}

fn incoming_of(
    listener: UnixListener,
    connections: usize,
    peer: fn(UCred) -> UnixPeer,
) -> impl Stream<Item = io::Result<AuthorityStream>> {
    let permits = Arc::new(Semaphore::new(connections));
    let incoming = Incoming {
        listener,
        peer,
        permits,
        shares: Shares::new(connections),
        failed: Seldom::default(),
        too_many: Seldom::default(),
        garbled: Arc::default(),
    };
    futures::stream::unfold(incoming, |incoming| async move {
        // Fails only if the semaphore is closed, which never happens.
        let permit = Arc::clone(&incoming.permits).acquire_owned().await.ok()?;
        let stream = incoming.accept(permit).await;
        Some((Ok(stream), incoming))
    })
}

/// Listener with the limits on its connections.
struct Incoming {
    listener: UnixListener,
    peer: fn(UCred) -> UnixPeer,
    permits: Arc<Semaphore>,
    shares: Arc<Shares>,
    failed: Seldom,
    too_many: Seldom,
    garbled: Arc<Seldom>,
}

impl Incoming {
    /// Waits for the next connection that lives long enough to have peer credentials, of a user
    /// who may have one more.
    async fn accept(&self, permit: OwnedSemaphorePermit) -> AuthorityStream {
        loop {
            let accepted = match self.listener.accept().await {
                Ok((io, _)) => io.peer_cred().map(|credentials| (io, credentials)),
                Err(err) => Err(err),
            };
            match accepted {
                Ok((io, credentials)) => {
                    let peer = (self.peer)(credentials);
                    if let Some(share) = self.shares.take(peer.sharing_user(), 1) {
                        let garbled = Arc::clone(&self.garbled);
                        return AuthorityStream::new(io, peer, garbled, (permit, share));
                    }
                    if let Some(not_logged_before) = self.too_many.now() {
                        tracing::warn!(
                            uid = peer.uid,
                            pid = peer.pid,
                            not_logged_before,
                            "a user has too many connections to the unix socket; one more is closed"
                        );
                    }
                }
                Err(err) => {
                    if let Some(not_logged_before) = self.failed.now() {
                        tracing::warn!(%err, not_logged_before, "cannot accept a connection on the unix socket");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// Feeds arbitrary bytes of a client to the filter, for a fuzz target.
///
/// # Panics
///
/// If the result depends on how the bytes are cut into reads, or if filtering the result again
/// changes it. Both are bugs.
#[doc(hidden)]
pub fn fuzz_rewrite(bytes: &[u8]) {
    let repaired = |bytes: &[u8], read_size: usize| {
        let (mut repair, mut octets) = (Repair::default(), bytes.to_vec());
        for read in octets.chunks_mut(read_size) {
            assert_eq!(repair.pass(read), Ok(()));
        }
        octets
    };
    let client = [&frames::PREFACE[..], bytes].concat();
    let once = repaired(&client, client.len());
    assert_eq!(repaired(&client, 1), once);
    assert_eq!(repaired(&once, client.len()), once);
}

// === impl AuthorityStream ===

impl AuthorityStream {
    fn new(
        io: UnixStream,
        peer: UnixPeer,
        garbled: Arc<Seldom>,
        counted: (OwnedSemaphorePermit, Share),
    ) -> Self {
        Self {
            io,
            peer,
            garbled,
            repair: Repair::default(),
            first_call: Some(Box::pin(tokio::time::sleep(FIRST_CALL))),
            _counted: counted,
        }
    }

    /// Returns the process at the other end.
    pub fn peer(&self) -> UnixPeer {
        self.peer
    }
}

impl std::fmt::Debug for AuthorityStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthorityStream")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl Connected for AuthorityStream {
    type ConnectInfo = UnixPeer;

    fn connect_info(&self) -> UnixPeer {
        self.peer
    }
}

impl AsyncRead for AuthorityStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(first_call) = &mut this.first_call
            && first_call.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        let read = buf.filled_mut().get_mut(before..).unwrap_or_default();
        if let Err(err) = this.repair.pass(read) {
            say_garbled(&this.garbled, this.peer, err);
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, err)));
        }
        if this.repair.has_seen_a_call() {
            this.first_call = None;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for AuthorityStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

fn say_garbled(seldom: &Seldom, peer: UnixPeer, err: NoPreface) {
    if let Some(not_logged_before) = seldom.now() {
        tracing::warn!(
            uid = peer.uid,
            pid = peer.pid,
            not_logged_before,
            "a client of the unix socket does not speak gRPC, its connection is closed: {err}"
        );
    }
}
