//! gRPC over a Unix socket that stock clients of every language can call.
//!
//! gRPC's C core (Python, C++, Ruby) sends the percent-encoded socket path as `:authority`
//! when it dials a Unix socket. `h2`, which tonic stands on, takes that for malformed and
//! resets the stream before tonic sees the call (hyperium/h2 pull 487, grpc/grpc-rust issue
//! 243). Monitors written in those languages dial without options, so the server has to
//! give way. [`incoming`] therefore puts a filter between the socket and tonic:
//!
//! ```text
//! client ── UnixStream ── AuthorityStream ── tonic
//!                          reads: frames, hpack, huffman; writes: untouched
//! ```
//!
//! This whole filter is to be removed when `h2` accepts such an authority; the integration
//! test `stock_tonic_still_refuses_c_core` fails on that day. [`bind`] and [`UnixPeer`] stay.

mod bind;
mod frames;
mod hpack;
mod huffman;
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

use frames::{RewriteError, Rewriter};

pub use bind::{BindError, MAX_PATH_LENGTH, bind};
pub use peer::UnixPeer;

/// Connections open at the same time; more wait in the listener's backlog. What of it one
/// user can have says [`crate::shares`]; more than that are closed at once.
pub const MAX_CONNECTIONS: usize = 512;

/// A connection on which no call has begun by then is closed: whoever sends nothing keeps
/// no other out. A client that connects before it has something to say connects again.
pub const FIRST_CALL: Duration = Duration::from_secs(10);

/// Octets read from a socket at once: a full frame of the default size and its head fit.
const READ_BUFFER: usize = 16_384 + 9;

/// Pause after a failed `accept`, which mostly means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An accepted connection whose requests `h2` can read.
pub struct AuthorityStream {
    io: UnixStream,
    peer: UnixPeer,
    rewriter: Rewriter,
    input: Box<[u8]>,
    /// The part of `input` that the rewriter has not taken yet.
    start: usize,
    end: usize,
    /// Says now and then that a client speaks something else.
    garbled: Arc<Seldom>,
    /// When the connection is closed; `None`: a call has begun.
    first_call: Option<Pin<Box<Sleep>>>,
    /// Counts the connection until it is dropped.
    _counted: (OwnedSemaphorePermit, Share),
}

/// The connections of a listener, for tonic's `serve_with_incoming`.
///
/// At most [`MAX_CONNECTIONS`] are open at a time. Never ends and never yields an error,
/// which would end tonic's server: a failed `accept` is logged and tried again. The item is
/// a `Result` because tonic wants one.
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
        // Fails only once the semaphore is closed, which nobody does.
        let permit = Arc::clone(&incoming.permits).acquire_owned().await.ok()?;
        let stream = incoming.accept(permit).await;
        Some((Ok(stream), incoming))
    })
}

/// What makes connections.
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
    /// Waits for the next connection that lives long enough to have a peer, of a user who may
    /// have one more.
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

/// Feeds arbitrary bytes of a client to the rewriting, for a fuzz target.
///
/// # Panics
///
/// If the result depends on how the bytes are cut into reads, or if rewriting the result
/// once more changes it. Both are bugs.
#[doc(hidden)]
pub fn fuzz_rewrite(bytes: &[u8]) {
    let rewrite = |bytes: &[u8], read_size: usize, room: usize| {
        let mut rewriter = Rewriter::default();
        let mut output = Vec::new();
        for mut read in bytes.chunks(read_size) {
            loop {
                let before = output.len();
                let mut limited = bytes::BufMut::limit(&mut output, room);
                if let Err(err) = rewriter.rewrite(&mut read, &mut limited) {
                    return (output, Some(err));
                }
                if output.len() < before + room {
                    break;
                }
            }
        }
        (output, None)
    };
    let client = [&frames::PREFACE[..], bytes].concat();
    let (output, failure) = rewrite(&client, client.len(), client.len());
    assert_eq!(rewrite(&client, 1, 3), (output.clone(), failure));
    let again = rewrite(&output, output.len(), output.len());
    assert_eq!(again, (output, None));
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
            rewriter: Rewriter::default(),
            input: vec![0; READ_BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            first_call: Some(Box::pin(tokio::time::sleep(FIRST_CALL))),
            _counted: counted,
        }
    }

    /// The process at the other end.
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
        let before = buf.filled().len();
        loop {
            let mut unread = this.input.get(this.start..this.end).unwrap_or_default();
            let result = this.rewriter.rewrite(&mut unread, buf);
            this.start = this.end - unread.len();
            if buf.filled().len() > before || buf.remaining() == 0 {
                // An error comes again on the next read, after what went before it.
                return Poll::Ready(Ok(()));
            }
            result.map_err(|err| {
                say_garbled(&this.garbled, this.peer, &err);
                invalid_data(err)
            })?;
            if this.rewriter.has_seen_a_call() {
                this.first_call = None;
            }
            if let Some(first_call) = &mut this.first_call
                && first_call.as_mut().poll(cx).is_ready()
            {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }

            // All input is with the rewriter now, which waits for more of it.
            let mut input = ReadBuf::new(&mut this.input);
            ready!(Pin::new(&mut this.io).poll_read(cx, &mut input))?;
            (this.start, this.end) = (0, input.filled().len());
            if this.end == 0 {
                return Poll::Ready(Ok(()));
            }
        }
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

fn say_garbled(seldom: &Seldom, peer: UnixPeer, err: &RewriteError) {
    if let Some(not_logged_before) = seldom.now() {
        tracing::warn!(
            uid = peer.uid,
            pid = peer.pid,
            not_logged_before,
            "a client of the unix socket does not speak gRPC, its connection is closed: {err}"
        );
    }
}

fn invalid_data(err: RewriteError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, err)
}
