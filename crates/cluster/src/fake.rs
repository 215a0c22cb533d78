//! API server with scripted answers, for cases that a real one cannot be brought into.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{RETRY_AFTER, USER_AGENT, WARNING};
use axum::http::{Request, Response};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::connect::{Cluster, ConnectOptions};

/// An answer to one request.
pub(crate) enum FakeAnswer {
    /// An answer with this status and body.
    Now(u16, String),
    /// Status 429 with this `Retry-After`.
    Later(&'static str),
    /// An answer with this status and a warning.
    Warned(u16, &'static str),
    /// A request that never gets an answer.
    Never,
    /// Lines of a watch, and its end.
    Lines(Vec<String>),
    /// A body that never ends: one byte every ten seconds.
    Trickle,
    /// Lines of a watch that stays open.
    Open(Vec<String>),
}

/// Requests that the server received, oldest first: method, path with query, user agent.
pub(crate) type ReceivedRequests = mpsc::UnboundedReceiver<[String; 3]>;

type Script = Arc<Mutex<VecDeque<FakeAnswer>>>;

/// Starts a server that gives `answers` in turn, and then leaves every request unanswered.
pub(crate) async fn serve(answers: Vec<FakeAnswer>) -> (Cluster, ReceivedRequests) {
    let script: Script = Arc::new(Mutex::new(answers.into()));
    let (seen, requests) = mpsc::unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().fallback(answer).with_state((script, seen));
    tokio::spawn(async move { axum::serve(listener, router).await });

    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": server}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
    });
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kubeconfig");
    std::fs::write(&path, kubeconfig.to_string()).unwrap();
    let options = ConnectOptions {
        kubeconfig: Some(path),
        ..ConnectOptions::default()
    };
    (Cluster::connect(options).await.unwrap(), requests)
}

/// Returns the object of a node.
pub(crate) fn node(name: &str, version: u32) -> Value {
    json!({
        "metadata": {
            "name": name,
            "uid": format!("uid of {name}"),
            "resourceVersion": version.to_string(),
            "managedFields": [{}],
        },
        "spec": {},
        "status": {"images": [{}]},
    })
}

async fn answer(
    State((script, seen)): State<(Script, mpsc::UnboundedSender<[String; 3]>)>,
    request: Request<Body>,
) -> Response<Body> {
    let agent = request
        .headers()
        .get(USER_AGENT)
        .map(|agent| agent.to_str().unwrap().to_owned());
    let line = [
        request.method().to_string(),
        // kube leaves the question mark of an empty query.
        request.uri().to_string().trim_end_matches('?').to_owned(),
        agent.unwrap_or_default(),
    ];
    let _ = seen.send(line);
    let lines = |lines: Vec<String>| {
        stream::iter(
            lines
                .into_iter()
                .map(|line| Ok::<_, std::io::Error>(Bytes::from(line + "\n"))),
        )
    };
    let next = script.lock().unwrap().pop_front();
    let response = Response::builder();
    let response = match next {
        Some(FakeAnswer::Now(status, body)) => response.status(status).body(Body::from(body)),
        Some(FakeAnswer::Later(when)) => response
            .status(429)
            .header(RETRY_AFTER, when)
            .body(Body::from("Too many requests, please try again later.\n")),
        Some(FakeAnswer::Warned(status, warning)) => response
            .status(status)
            .header(WARNING, warning)
            .body(Body::from(node("n", 1).to_string())),
        Some(FakeAnswer::Lines(all)) => response.body(Body::from_stream(lines(all))),
        Some(FakeAnswer::Open(all)) => {
            response.body(Body::from_stream(lines(all).chain(stream::pending())))
        }
        Some(FakeAnswer::Trickle) => {
            let bytes = stream::repeat(()).then(async |()| {
                tokio::time::sleep(Duration::from_secs(10)).await;
                Ok::<_, std::io::Error>(Bytes::from_static(b" "))
            });
            response.body(Body::from_stream(bytes))
        }
        Some(FakeAnswer::Never) | None => return std::future::pending().await,
    };
    response.unwrap()
}
