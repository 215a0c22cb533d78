//! Path of a request to the API server: turn, tenure, timeout, and the whole answer.
//!
//! ```text
//! kube::Client -- PaceLayer -- TenureLayer -- exchange --> connections (connect/transport.rs)
//!                 pace.rs      tenure.rs          |
//!                                                 `-- watches start here
//! ```
//!
//! Two clients share one stack, one for each [`Urgency`](crate::Urgency). Both take any request
//! that kube can make: of an `Api`, or one that `kube::core::Request` builds.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::header::RETRY_AFTER;
use http::{Request, Response};
use http_body_util::{BodyExt, Limited};
use kube::Client;
use kube::client::Body;
use kube::core::Status;
use kube::core::request::Error as BuildError;
use kube::core::response::StatusDetails;
use serde::de::DeserializeOwned;
use tower::layer::Layer as _;
use tower::service_fn;

use crate::counters::Counters;
use crate::layer::{Http, Limit, MESSAGE_CHARS, NoAnswer, REQUEST_TIMEOUT};
use crate::pace::PaceLayer;
use crate::tenure::TenureLayer;

/// Largest answer that is read (bytes). The API server stores objects up to about 1.5 MiB.
pub(crate) const ANSWER_BYTES: usize = 8 * 1024 * 1024;

/// Creates a client over the connections of `below`, with the layers of this module.
///
/// Under a tenure a write is made only while the tenure lasts. The write ends, here and in the
/// API server, before another process can lead.
pub(crate) fn client(
    below: Client,
    counters: Arc<Counters>,
    pace: Option<PaceLayer>,
    tenure: Option<TenureLayer>,
) -> Client {
    let namespace = below.default_namespace().to_owned();
    let mut http = exchange(below, counters);
    if let Some(tenure) = tenure {
        http = tenure.layer(http);
    }
    // Outermost, so that the tenure is checked when the turn comes, which may be late.
    if let Some(pace) = pace {
        http = pace.layer(http);
    }
    Client::new(http, namespace)
}

/// Sends a request that kube has built and reads the answer.
///
/// Unlike `Client::request`, this does not log an answer that cannot be read, which may be large
/// or secret.
pub(crate) async fn ask<T: DeserializeOwned>(
    client: &Client,
    request: Result<Request<Vec<u8>>, BuildError>,
) -> Result<T, kube::Error> {
    let request = request.map_err(kube::Error::BuildRequest)?;
    let text = client.request_text(request).await?;
    serde_json::from_str(&text).map_err(kube::Error::SerdeError)
}

/// Creates the service that sends requests, counts them, and reads each answer as a whole.
fn exchange(client: Client, counters: Arc<Counters>) -> Http {
    Http::new(service_fn(move |request: Request<Body>| {
        let (client, counters) = (client.clone(), Arc::clone(&counters));
        async move {
            let limit = request.extensions().get();
            let limit = limit.map_or(REQUEST_TIMEOUT, |Limit(limit)| *limit);
            counters.sent.fetch_add(1, Ordering::Relaxed);
            let result = tokio::time::timeout(limit, answer(&client, request, &counters))
                .await
                .unwrap_or_else(|_| Err(kube::Error::Service(NoAnswer(limit).into())));
            let counter = match &result {
                Err(kube::Error::Api(status)) if status.code == 429 => Some(&counters.throttled),
                Err(kube::Error::Api(status)) if status.code < 500 => None,
                Err(_) => Some(&counters.failed),
                Ok(_) => None,
            };
            counter.map(|counter| counter.fetch_add(1, Ordering::Relaxed));
            result
        }
    }))
}

async fn answer(
    client: &Client,
    request: Request<Body>,
    counters: &Counters,
) -> Result<Response<Body>, kube::Error> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let (head, body) = client.send(request).await?.into_parts();
    counters.warnings.read(&method, &path, &head.headers);
    let body = Limited::new(body, ANSWER_BYTES).collect().await;
    let body = body.map_err(kube::Error::Service)?.to_bytes();
    if head.status.is_success() {
        return Ok(Response::from_parts(head, Body::from(body)));
    }
    let status = status(&Response::from_parts(head, body));
    Err(kube::Error::Api(status.boxed()))
}

/// Reads an answer other than success. The status line and headers take precedence over the
/// body.
fn status(answer: &Response<impl AsRef<[u8]>>) -> Status {
    // Proxies, and the API server when it sheds load, answer with plain text.
    let body = answer.body().as_ref();
    let mut status: Status = serde_json::from_slice(body).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(body);
        let text: String = text.trim().chars().take(MESSAGE_CHARS).collect();
        Status::failure(&text, "")
    });
    status.code = answer.status().as_u16();
    if status.message.is_empty() {
        status.message = answer.status().to_string();
    }
    // The API server sends seconds, never a date.
    let wait = answer.headers().get(RETRY_AFTER);
    let wait = wait.and_then(|value| value.to_str().ok()?.parse().ok());
    if let Some(seconds) = wait {
        let details = status.details.get_or_insert_with(|| StatusDetails {
            name: String::new(),
            group: String::new(),
            kind: String::new(),
            uid: String::new(),
            causes: Vec::new(),
            retry_after_seconds: 0,
        });
        details.retry_after_seconds = seconds;
    }
    status
}

#[cfg(test)]
mod tests {
    use kube::core::params::GetParams;
    use model::node::{NodeChange, NodeView};
    use tokio::time::Instant;

    use super::*;
    use crate::fake::{self, FakeAnswer};
    use crate::{ApiError, Tenure, Urgency};

    #[tokio::test]
    async fn writes_are_made_only_while_we_lead() {
        let answers = vec![
            FakeAnswer::Now(200, fake::node("n", 2).to_string()),
            FakeAnswer::Never,
            FakeAnswer::Now(200, fake::node("n", 3).to_string()),
        ];
        let (cluster, mut requests) = fake::serve(answers).await;
        let tenure = Tenure::begin(Instant::now());
        let cluster = cluster.under(&tenure);
        let view = NodeView::unknown("n");
        let change = NodeChange {
            unschedulable: Some(true),
            ..NodeChange::default()
        };
        cluster.apply(&view, &change).await.unwrap();
        let [method, uri, _] = requests.recv().await.unwrap();
        // The API server has the same time limit.
        assert_eq!((&*method, &*uri), ("PATCH", "/api/v1/nodes/n?timeout=10s"));

        // The write in flight is cut off, and no other one begins.
        let mut call = Box::pin(cluster.apply(&view, &change));
        tokio::select! {
            _ = &mut call => panic!("an answer"),
            _ = requests.recv() => tenure.end(),
        }
        for error in [
            call.await.unwrap_err(),
            cluster.apply(&view, &change).await.unwrap_err(),
            cluster.create_event(&event()).await.unwrap_err(),
        ] {
            assert!(matches!(error, ApiError::NotLeading), "{error}");
        }
        assert!(requests.try_recv().is_err());
        // Reads need no lead.
        assert_eq!(
            cluster.node("n").await.unwrap().unwrap().resource_version,
            "3"
        );
        assert_eq!(requests.recv().await.unwrap()[1], "/api/v1/nodes/n");
    }

    /// The Lease must not be lost because its renewal waits for a turn.
    #[tokio::test]
    async fn a_connection_of_ones_own_is_never_slowed_down() {
        let mut answers: Vec<FakeAnswer> = (0..8).map(|_| FakeAnswer::Later("30")).collect();
        answers.push(FakeAnswer::Now(200, "{}".to_owned()));
        let (cluster, _requests) = fake::serve(answers).await;
        let own = cluster.with_own_connection().unwrap();
        let look = async || {
            let request = kube::core::Request::new("/api/v1/x").get("x", &GetParams::default());
            ask::<serde_json::Value>(&own.client(Urgency::Act), request).await
        };
        for _ in 0..8 {
            look().await.unwrap_err();
        }
        look().await.unwrap();
        assert_eq!((own.requests().sent, own.requests().throttled), (9, 8));
    }

    fn event() -> crate::Event {
        crate::Event {
            name: "e".into(),
            node: "n".into(),
            pod: None,
            kind: "Warning".into(),
            reason: "r".into(),
            message: "m".into(),
            agent: "a".into(),
            count: 1,
            first_seen: jiff::Timestamp::UNIX_EPOCH,
            last_seen: jiff::Timestamp::UNIX_EPOCH,
        }
    }
}
