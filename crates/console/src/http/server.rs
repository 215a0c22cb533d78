//! Accepts connections, as many as are allowed, and ends them in order.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Most connections that are served at a time.
pub const MAX_CONNECTIONS: usize = 256;
/// How long a client may take for the head of a request, and how long an idle
/// connection is kept.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of a request's head.
const MAX_HEAD_BYTES: usize = 32 * 1024;
/// How long requests under way may take after the end was asked for.
const GRACE: Duration = Duration::from_millis(500);
/// Wait after a failed accept: mostly the process has run out of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// What a client may take.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    connections: usize,
    header_timeout: Duration,
}

/// Serves until `cancel`, and gives the listener back.
pub(super) async fn serve(
    listener: TcpListener,
    routes: Router,
    cancel: CancellationToken,
    limits: Limits,
) -> TcpListener {
    let slots = Arc::new(Semaphore::new(limits.connections));
    let mut connections = JoinSet::new();
    let accept = async {
        // The semaphore is never closed.
        while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
            while connections.try_join_next().is_some() {}
            match listener.accept().await {
                Ok((stream, _)) => {
                    let served = connection(stream, routes.clone(), cancel.clone(), limits);
                    connections.spawn(async move {
                        served.await;
                        drop(slot);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
    };
    cancel.run_until_cancelled(accept).await;
    let finish = async { while connections.join_next().await.is_some() {} };
    // Whoever is still not done is cut off when the set is dropped.
    drop(tokio::time::timeout(GRACE, finish).await);
    listener
}

async fn connection(stream: TcpStream, routes: Router, cancel: CancellationToken, limits: Limits) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let mut connection = pin!(connection);
    let mut result = cancel.run_until_cancelled(connection.as_mut()).await;
    if result.is_none() {
        connection.as_mut().graceful_shutdown();
        result = Some(connection.await);
    }
    if let Some(Err(error)) = result {
        // Clients go away as they like.
        tracing::debug!(%error, "connection ended");
    }
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: MAX_CONNECTIONS,
            header_timeout: HEADER_TIMEOUT,
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
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cancel = CancellationToken::new();
        let routes = Router::new().route("/", get(async || "hello"));
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
    async fn beyond_the_limit_connections_wait_and_the_next_one_takes_a_free_place() {
        let limits = Limits {
            connections: 1,
            ..Limits::default()
        };
        let (address, cancel) = start(limits).await;
        let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        let mut first = TcpStream::connect(address).await.unwrap();
        first.write_all(request).await.unwrap();
        let mut head = [0; 8];
        first.read_exact(&mut head).await.unwrap();
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(request).await.unwrap();
        let waits = tokio::time::timeout(Duration::from_millis(200), second.read_exact(&mut head));
        assert!(
            waits.await.is_err(),
            "the second connection was served beside the first"
        );
        drop(first);
        tokio::time::timeout(ENOUGH, second.read_exact(&mut head))
            .await
            .unwrap()
            .unwrap();
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
