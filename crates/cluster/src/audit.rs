//! Audit log of writes: one JSON line for each POST, PUT, PATCH and DELETE to the API server,
//! with its result and the reason for it.
//!
//! The layer is the lowest one, directly above the connection, so that no write can miss it:
//! repeated attempts, the Lease, and writes whose answer nobody awaits any longer have lines of
//! their own. A line is written after the answer; where it goes decides an [`AuditSink`], which
//! never makes the caller wait.

use std::fmt;
use std::sync::Arc;

use http::{Method, Request, Response};
use jiff::Timestamp;
use kube::client::Body;
use serde::Serialize;
use tower::{BoxError, Service, ServiceExt as _, service_fn};

/// Longest part of a request's body in a line (bytes). Patches are far shorter.
const BODY_BYTES: usize = 64 * 1024;
/// Resources whose bodies hold keys or tokens, and are never in a line.
const SECRETS: [&str; 2] = ["secrets", "tokenreviews"];

/// Writer of lines. Each call gets one line with its newline, and returns at once.
pub type AuditSink = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// Audit log of a process.
#[derive(Clone)]
pub struct Audit {
    /// Name of the command, such as `controller`.
    pub component: &'static str,
    /// Name of the pod, else of the machine.
    pub instance: String,
    /// True if lines contain the bodies of requests.
    pub with_bodies: bool,
    /// Writer of the lines.
    pub sink: AuditSink,
}

/// Reason for writes, for the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// Name of the node that the write is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    /// Id of the session that the write belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<String>,
    /// Purpose of the write, such as `quarantine`.
    #[serde(rename = "reason", skip_serializing_if = "String::is_empty")]
    purpose: String,
}

tokio::task_local! {
    /// Reason for the writes of the current task.
    static REASON: Reason;
}

/// A line of the audit log. The first six fields are NVSentinel's.
#[derive(Serialize)]
struct Line<'a> {
    timestamp: String,
    component: &'a str,
    method: &'a str,
    url: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_code: Option<u16>,
    #[serde(rename = "requestBody", skip_serializing_if = "Option::is_none")]
    request_body: Option<&'a str>,
    instance: &'a str,
    #[serde(flatten)]
    reason: Reason,
}

/// A write in flight. Its line is written when it is dropped, with or without an answer.
struct Write {
    audit: Audit,
    method: Method,
    url: http::Uri,
    body: Option<String>,
    reason: Reason,
    response_code: Option<u16>,
}

// === impl Audit ===

impl fmt::Debug for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Audit")
            .field("component", &self.component)
            .finish_non_exhaustive()
    }
}

// === impl Reason ===

impl Reason {
    /// Creates a reason that is not about a node.
    pub fn new(purpose: impl Into<String>) -> Self {
        Self {
            purpose: purpose.into(),
            ..Self::default()
        }
    }

    /// Creates a reason about a node, and about its session if the write belongs to one.
    pub fn of_node(node: &str, session: Option<&str>, purpose: impl Into<String>) -> Self {
        Self {
            node: Some(node.to_owned()),
            session: session.map(str::to_owned),
            purpose: purpose.into(),
        }
    }

    /// Returns the future with this reason for its writes. Tasks that it spawns do not inherit
    /// the reason.
    pub fn scope<F: Future>(self, future: F) -> impl Future<Output = F::Output> {
        REASON.scope(self, future)
    }
}

// === impl Write ===

impl Drop for Write {
    fn drop(&mut self) {
        let line = Line {
            timestamp: format!("{:.3}", Timestamp::now()),
            component: self.audit.component,
            method: self.method.as_str(),
            url: self.url.to_string(),
            response_code: self.response_code,
            request_body: self.body.as_deref(),
            instance: &self.audit.instance,
            reason: std::mem::take(&mut self.reason),
        };
        // A line of strings and numbers can always be serialised.
        if let Ok(mut line) = serde_json::to_vec(&line) {
            line.push(b'\n');
            (self.audit.sink)(&line);
        }
    }
}

/// Returns `below` with a line in the audit log for each write.
pub(crate) fn audited<S, B>(
    below: S,
    audit: Option<Audit>,
) -> impl Service<
    Request<Body>,
    Response = Response<B>,
    Error = BoxError,
    Future = impl Future<Output = Result<Response<B>, BoxError>> + Send,
> + Clone
+ Send
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    service_fn(move |request: Request<Body>| {
        let (below, audit) = (below.clone(), audit.clone());
        async move {
            let is_write = !matches!(
                *request.method(),
                Method::GET | Method::HEAD | Method::OPTIONS
            );
            let Some(audit) = audit.filter(|_| is_write) else {
                return below.oneshot(request).await;
            };
            let (head, mut body) = request.into_parts();
            let mut shown = None;
            if audit.with_bodies && !is_secret(head.uri.path()) {
                // The whole body is in memory already.
                let bytes = body.collect_bytes().await?;
                let start = bytes.get(..BODY_BYTES).unwrap_or(&bytes);
                shown = Some(String::from_utf8_lossy(start).into_owned());
                body = Body::from(bytes);
            }
            let mut write = Write {
                audit,
                method: head.method.clone(),
                url: head.uri.clone(),
                body: shown,
                reason: REASON.try_with(Clone::clone).unwrap_or_default(),
                response_code: None,
            };
            let answer = below.oneshot(Request::from_parts(head, body)).await;
            write.response_code = answer.as_ref().ok().map(|it| it.status().as_u16());
            answer
        }
    })
}

/// Returns true for a path of a resource whose body is secret.
fn is_secret(path: &str) -> bool {
    path.split('/').any(|part| SECRETS.contains(&part))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::{Value, json};

    use super::*;

    type Lines = Arc<Mutex<Vec<Value>>>;

    /// Returns an audited service that answers 201, or never if the path ends with `never`, and
    /// its lines.
    fn service(
        with_bodies: bool,
    ) -> (
        impl Service<Request<Body>, Response = Response<Body>, Error = BoxError> + Clone,
        Lines,
    ) {
        let lines: Lines = Arc::default();
        let written = Arc::clone(&lines);
        let sink: AuditSink = Arc::new(move |line| {
            let line = serde_json::from_slice(line).unwrap();
            written.lock().unwrap().push(line);
        });
        let below = service_fn(|request: Request<Body>| async move {
            if request.uri().path().ends_with("never") {
                return std::future::pending().await;
            }
            let body = request.into_body().collect_bytes().await?;
            let answer = Response::builder().status(201).body(Body::from(body));
            Ok::<_, BoxError>(answer.unwrap())
        });
        let audit = Audit {
            component: "controller",
            instance: "pod-0".to_owned(),
            with_bodies,
            sink,
        };
        (audited(below, Some(audit)), lines)
    }

    fn request(method: &str, path: &str) -> Request<Body> {
        let url = format!("https://api:6443{path}");
        let request = Request::builder().method(method).uri(url);
        request.body(Body::from(b"{\"a\":1}".to_vec())).unwrap()
    }

    #[tokio::test]
    async fn each_write_has_a_line_after_its_answer_and_reads_have_none() {
        let (service, lines) = service(false);
        for method in ["GET", "HEAD"] {
            service
                .clone()
                .oneshot(request(method, "/x"))
                .await
                .unwrap();
        }
        assert!(lines.lock().unwrap().is_empty());
        let patch = service
            .clone()
            .oneshot(request("PATCH", "/api/v1/nodes/n?timeout=10s"));
        let why = Reason::of_node("n", Some("s1"), "quarantine");
        why.scope(patch).await.unwrap();
        for method in ["POST", "PUT", "DELETE"] {
            service
                .clone()
                .oneshot(request(method, "/x"))
                .await
                .unwrap();
        }
        let mut lines = lines.lock().unwrap().clone();
        let time = lines[0]["timestamp"].take();
        time.as_str().unwrap().parse::<Timestamp>().unwrap();
        let expected = json!({
            "timestamp": null, "component": "controller", "method": "PATCH",
            "url": "https://api:6443/api/v1/nodes/n?timeout=10s", "response_code": 201,
            "instance": "pod-0", "node": "n", "session": "s1", "reason": "quarantine",
        });
        assert_eq!(lines[0], expected);
        let methods: Vec<_> = lines.iter().map(|line| line["method"].clone()).collect();
        assert_eq!(methods, ["PATCH", "POST", "PUT", "DELETE"]);
        assert!(lines[1].get("node").is_none() && lines[1].get("reason").is_none());
    }

    #[tokio::test]
    async fn a_write_that_is_given_up_has_a_line_without_a_code() {
        let (service, lines) = service(false);
        let call = service.oneshot(request("POST", "/never"));
        let limit = std::time::Duration::from_millis(10);
        tokio::time::timeout(limit, call).await.unwrap_err();
        let lines = lines.lock().unwrap();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].get("response_code").is_none(), "{lines:?}");
    }

    #[tokio::test]
    async fn bodies_are_shown_if_wanted_and_never_those_with_secrets() {
        let (service, lines) = service(true);
        let nodes = "/api/v1/nodes/n";
        let secrets = "/api/v1/namespaces/gpuwarden/secrets/x";
        let tokens = "/apis/authentication.k8s.io/v1/tokenreviews";
        for path in [nodes, secrets, tokens] {
            let answer = service.clone().oneshot(request("PUT", path)).await.unwrap();
            // The request still has its body.
            let body = answer.into_body().collect_bytes().await.unwrap();
            assert_eq!(body, b"{\"a\":1}".as_slice());
        }
        let lines = lines.lock().unwrap();
        assert_eq!(lines[0]["requestBody"], "{\"a\":1}");
        for line in &lines[1..] {
            assert!(line.get("requestBody").is_none(), "{line}");
        }
    }
}
