//! HTTP server of the tests on loopback, whose answers a function gives, and keys for its clients.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "only for tests"
)]

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{HeaderMap, Method};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A request as the server got it.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: Method,
    /// Path with the query.
    pub target: String,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

/// Answer of the server.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

/// A server that ends when dropped.
pub struct Server {
    /// URL of the server, without a path.
    pub url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    task: JoinHandle<()>,
}

// === impl Server ===

impl Server {
    /// Starts a server on a free port.
    pub async fn start(answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), answer)
    }

    /// Starts a server on this socket.
    pub fn on(
        listener: TcpListener,
        answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let (seen, answer) = (Arc::clone(&asked), Arc::new(answer));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
                tokio::spawn(async move {
                    let serve = service_fn(|request| {
                        let (seen, answer) = (Arc::clone(&seen), Arc::clone(&answer));
                        async move { Ok::<_, Infallible>(serve(request, &seen, &*answer).await) }
                    });
                    let connection = hyper::server::conn::http1::Builder::new();
                    // A client that goes away is not the test's concern.
                    drop(
                        connection
                            .serve_connection(TokioIo::new(stream), serve)
                            .await,
                    );
                });
            }
        });
        Self { url, asked, task }
    }

    /// Returns all requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// === impl Asked ===

impl Asked {
    /// Returns the value of a header, empty if there is none.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

// === impl Reply ===

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
        }
    }

    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

/// Returns a new RSA key as a file of credentials has it: PKCS #8 in PEM.
pub fn private_key() -> String {
    crate::rsa::new_pem().unwrap()
}

async fn serve(
    request: hyper::Request<Incoming>,
    seen: &Mutex<Vec<Asked>>,
    answer: &(dyn Fn(&Asked) -> Reply + Send + Sync),
) -> hyper::Response<Full<Bytes>> {
    let (head, body) = request.into_parts();
    let target = head
        .uri
        .path_and_query()
        .map_or("", |target| target.as_str());
    let asked = Asked {
        method: head.method,
        target: target.to_owned(),
        headers: head.headers,
        body: body.collect().await.unwrap().to_bytes().to_vec(),
    };
    let reply = answer(&asked);
    seen.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(asked);
    let mut response = hyper::Response::builder().status(reply.status);
    for (name, value) in reply.headers {
        response = response.header(name, value);
    }
    response.body(Full::new(reply.body.into())).unwrap()
}
