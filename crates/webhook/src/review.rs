//! `AdmissionReview` (`admission.k8s.io/v1`): the request of an API server, and the response.

use std::borrow::Cow;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use preflight::inject::Injection;
use serde::Deserialize;
use serde_json::{Value, json};

/// API version of request and response.
const API_VERSION: &str = "admission.k8s.io/v1";
/// Most warnings in a response; the API server truncates them at 4096 bytes in total.
const MAX_WARNINGS: usize = 10;
/// Most bytes of a reason in a response or log line: names in it may be as long as the request.
const MAX_REASON_BYTES: usize = 1024;

/// Error for a body that is not an admission review.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the body is not an AdmissionReview of {API_VERSION} with a request: {0}")]
pub(crate) struct BadReview(String);

/// Reason why a review gets no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unanswered {
    /// The body is not an admission review.
    #[error(transparent)]
    Bad(#[from] BadReview),
    /// The review needs more memory than allowed.
    #[error("the object has too many parts to be processed")]
    TooLarge,
    /// Other reviews, or the cluster, took too long.
    #[error("the webhook has not answered within {} s; create the object again", .0.as_secs())]
    Late(Duration),
    /// Bug in this program.
    #[error("the webhook failed to process the object; see its log")]
    Failed,
}

/// Review of an object that is created or changed.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Review {
    uid: String,
    #[serde(default)]
    pub(crate) namespace: String,
    #[serde(default)]
    pub(crate) operation: String,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    pub(crate) resource: Resource,
    /// Object after the change.
    #[serde(default)]
    pub(crate) object: Value,
    /// Object before the change; null at creation.
    #[serde(default)]
    pub(crate) old_object: Value,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct Resource {
    #[serde(default)]
    pub(crate) group: String,
    #[serde(default)]
    pub(crate) resource: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    api_version: String,
    kind: String,
    request: Review,
}

// === impl BadReview ===

impl BadReview {
    fn new(why: &str) -> Self {
        Self(shortened(why).into_owned())
    }
}

// === impl Unanswered ===

impl Unanswered {
    /// Returns the value of the metrics' label `result`.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Bad(_) => "bad_request",
            Self::TooLarge => "too_large",
            Self::Late(_) => "late",
            Self::Failed => "failed",
        }
    }
}

// === impl Review ===

impl Review {
    /// Parses the body of a review.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, BadReview> {
        let envelope: Envelope =
            serde_json::from_slice(body).map_err(|error| BadReview::new(&error.to_string()))?;
        let (kind, version) = (envelope.kind, envelope.api_version);
        if kind != "AdmissionReview" || version != API_VERSION {
            return Err(BadReview::new(&format!("it is a {kind} of {version}")));
        }
        if envelope.request.uid.is_empty() {
            return Err(BadReview::new("the request has no uid"));
        }
        Ok(envelope.request)
    }

    /// Returns the review without its objects, for an answer that does not need them.
    pub(crate) fn bare(&self) -> Self {
        Self {
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            ..Self::default()
        }
    }

    /// Returns true for the creation of a pod, but not of its subresources.
    pub(crate) fn is_new_pod(&self) -> bool {
        self.operation == "CREATE"
            && self.resource.group.is_empty()
            && self.resource.resource == "pods"
            && self.sub_resource.is_empty()
    }

    /// Returns an answer that allows the object, with a patch and warnings.
    pub(crate) fn changed(&self, injection: &Injection) -> Value {
        let mut response = json!({"uid": self.uid, "allowed": true});
        let mut add = |key: &str, value: Value| {
            if let Some(response) = response.as_object_mut() {
                response.insert(key.to_owned(), value);
            }
        };
        if !injection.patch.is_empty() {
            let patch = Value::from(injection.patch.clone()).to_string();
            add("patchType", "JSONPatch".into());
            add("patch", BASE64_STANDARD.encode(patch).into());
        }
        let warnings: Vec<_> = injection.warnings.iter().take(MAX_WARNINGS).collect();
        if !warnings.is_empty() {
            add("warnings", json!(warnings));
        }
        answer(&response)
    }

    /// Returns an answer that refuses the object, with a reason for its creator.
    pub(crate) fn denied(&self, why: &str) -> Value {
        let status = json!({"code": 422, "reason": "Invalid", "message": why});
        answer(&json!({"uid": self.uid, "allowed": false, "status": status}))
    }
}

/// Truncates a reason that is too long.
pub(crate) fn shortened(why: &str) -> Cow<'_, str> {
    let mut ends = why.char_indices().map(|(at, _)| at);
    match ends.find(|at| *at >= MAX_REASON_BYTES) {
        Some(end) => Cow::Owned(format!("{}...", why.get(..end).unwrap_or_default())),
        None => Cow::Borrowed(why),
    }
}

fn answer(response: &Value) -> Value {
    json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})
}
