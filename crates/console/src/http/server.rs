//! Accepts connections, as many as are allowed, and ends them in order.
//!
//! Anybody may connect, ask and not read, or not even ask. So that probes and metrics answer
//! nevertheless, no connection waits to be accepted: beyond the limit it comes into a small
//! reserve, where it gets one answer, and where the oldest gives way to the newest. And where
//! room is wanted, whoever is idle is let go.

mod write_deadline;

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use write_deadline::WriteDeadline;

/// Most connections that are kept at a time.
pub const MAX_CONNECTIONS: usize = 256;
/// Most connections beyond these, each for one answer. Whoever wants to keep a probe from its
/// answer has to connect so often while the answer is made.
const RESERVE: usize = 64;
/// How long a client may take for the head of a request, and how long an idle
/// connection is kept.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may take nothing of what is sent to it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of a request's head.
const MAX_HEAD_BYTES: usize = 32 * 1024;
/// How long requests under way may take after the end was asked for.
const GRACE: Duration = Duration::from_millis(500);
/// Wait after a failed accept: mostly the process has run out of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// What clients may take.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    connections: usize,
    reserve: usize,
    header_timeout: Duration,
    write_timeout: Duration,
}

/// Serves until `cancel`, and gives the listener back.
pub(super) async fn serve(
    listener: TcpListener,
    routes: Router,
    cancel: CancellationToken,
    limits: Limits,
) -> TcpListener {
    let slots = Arc::new(Semaphore::new(limits.connections));
    let room_wanted = Arc::new(Notify::new());
    let mut connections = JoinSet::new();
    // Oldest first.
    let mut reserve: VecDeque<AbortHandle> = VecDeque::new();
    let accept = async {
        loop {
            while connections.try_join_next().is_some() {}
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            let connection = Connection {
                stream,
                routes: routes.clone(),
                limits,
                cancel: cancel.clone(),
                room_wanted: Arc::clone(&room_wanted),
            };
            if let Ok(slot) = Arc::clone(&slots).try_acquire_owned() {
                connections.spawn(async move {
                    connection.serve(true).await;
                    drop(slot);
                });
                continue;
            }
            room_wanted.notify_waiters();
            reserve.retain(|served| !served.is_finished());
            if reserve.len() >= limits.reserve
                && let Some(oldest) = reserve.pop_front()
            {
                oldest.abort();
            }
            reserve.push_back(connections.spawn(connection.serve(false)));
        }
    };
    cancel.run_until_cancelled(accept).await;
    let finish = async { while connections.join_next().await.is_some() {} };
    // Whoever is still not done is cut off when the set is dropped.
    drop(tokio::time::timeout(GRACE, finish).await);
    listener
}

/// A connection, and what ends it.
struct Connection {
    stream: TcpStream,
    routes: Router,
    limits: Limits,
    cancel: CancellationToken,
    room_wanted: Arc<Notify>,
}

// === impl Connection ===

impl Connection {
    /// Answers request after request, or one only, until its client goes or it is to end.
    async fn serve(self, keep: bool) {
        let stream = WriteDeadline::new(self.stream, self.limits.write_timeout);
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.header_timeout)
            .max_buf_size(MAX_HEAD_BYTES)
            .keep_alive(keep)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(self.routes));
        let mut connection = pin!(connection);
        let to_end = async {
            tokio::select! {
                () = self.cancel.cancelled() => {}
                () = self.room_wanted.notified() => {}
            }
        };
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = to_end => {
                // An idle one ends at once, another with the answer that is under way.
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = result {
            // Clients go away as they like.
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
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const ENOUGH: Duration = Duration::from_secs(20);

    async fn start(limits: Limits) -> (SocketAddr, CancellationToken) {
        start_with(Router::new().route("/", get(async || "hello")), limits).await
    }

    async fn start_with(routes: Router, limits: Limits) -> (SocketAddr, CancellationToken) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cancel = CancellationToken::new();
        tokio::spawn(serve(listener, routes, cancel.clone(), limits));
        (address, cancel)
    }

    async fn read_all(stream: &mut TcpStream) -> String {
        let mut text = Vec::new();
        // A connection that is cut may end in a reset.
        drop(
            tokio::time::timeout(ENOUGH, stream.read_to_end(&mut text))
                .await
                .expect("it ends"),
        );
        String::from_utf8(text).unwrap()
    }

    #[tokio::test]
    async fn who_does_not_finish_his_head_is_cut_off() {
        let limits = Limits {
            header_timeout: Duration::from_millis(200),
            ..Limits::default()
        };
        let (address, cancel) = start(limits).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: ").await.unwrap();
        assert!(!read_all(&mut stream).await.contains("hello"));
        cancel.cancel();
    }

    #[tokio::test]
    async fn beyond_the_limit_there_is_one_answer_and_the_oldest_gives_way() {
        let limits = Limits {
            connections: 1,
            reserve: 2,
            ..Limits::default()
        };
        let (address, cancel) = start(limits).await;
        let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        // Half a head: it is not idle.
        let half = b"GET / HTTP/1.1\r\nHo";
        let mut kept = TcpStream::connect(address).await.unwrap();
        kept.write_all(half).await.unwrap();
        let mut silent = Vec::new();
        for _ in 0..3 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(half).await.unwrap();
            silent.push(stream);
        }
        let mut probe = TcpStream::connect(address).await.unwrap();
        probe.write_all(request).await.unwrap();
        let answer = read_all(&mut probe).await;
        assert!(answer.ends_with("hello"), "{answer}");
        assert!(answer.contains("connection: close"), "{answer}");
        for oldest in &mut silent[..2] {
            assert_eq!(read_all(oldest).await, "");
        }
        // Who was within the limit gets its answer, and then makes room.
        kept.write_all(b"st: localhost\r\n\r\n").await.unwrap();
        assert!(read_all(&mut kept).await.ends_with("hello"));
        cancel.cancel();
    }

    #[tokio::test]
    async fn the_idle_are_let_go_where_room_is_wanted() {
        let limits = Limits {
            connections: 1,
            header_timeout: 2 * ENOUGH,
            ..Limits::default()
        };
        let (address, cancel) = start(limits).await;
        let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(request).await.unwrap();
        let mut head = [0; 8];
        idle.read_exact(&mut head).await.unwrap();
        let mut next = TcpStream::connect(address).await.unwrap();
        next.write_all(request).await.unwrap();
        assert!(read_all(&mut next).await.ends_with("hello"));
        assert!(read_all(&mut idle).await.ends_with("hello"));
        cancel.cancel();
    }

    #[tokio::test]
    async fn who_takes_nothing_is_cut_off() {
        let held = Arc::new(Semaphore::new(1));
        let holds = Arc::clone(&held);
        let routes = Router::new().route(
            "/",
            get(async move || {
                let place = holds.acquire_owned().await.unwrap();
                let endless = futures::stream::unfold(place, async |place| {
                    let chunk = bytes::Bytes::from(vec![b'x'; 1024 * 1024]);
                    Some((Ok::<_, std::convert::Infallible>(chunk), place))
                });
                axum::body::Body::from_stream(endless)
            }),
        );
        let limits = Limits {
            write_timeout: Duration::from_millis(200),
            ..Limits::default()
        };
        let (address, cancel) = start_with(routes, limits).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut head = [0; 8];
        stream.read_exact(&mut head).await.unwrap();
        // The answer, and with it what it holds, is let go of while the client is still there.
        let let_go = tokio::time::timeout(ENOUGH, held.acquire()).await;
        assert!(let_go.is_ok());
        cancel.cancel();
    }

    #[tokio::test]
    async fn too_long_a_head_is_refused() {
        let (address, cancel) = start(Limits::default()).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!(
            "GET / HTTP/1.1\r\nHost: {}\r\n\r\n",
            "x".repeat(2 * MAX_HEAD_BYTES)
        );
        // The server may hang up before it has read everything.
        drop(stream.write_all(head.as_bytes()).await);
        assert!(!read_all(&mut stream).await.contains("hello"));
        cancel.cancel();
    }
}
