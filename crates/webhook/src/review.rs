//! `AdmissionReview`, the question of an API server and the answer to it (`admission.k8s.io/v1`).

use std::borrow::Cow;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use preflight::inject::Injection;
use serde::Deserialize;
use serde_json::{Value, json};

/// The version of question and answer.
const API_VERSION: &str = "admission.k8s.io/v1";
/// Most warnings of an answer; the API server cuts what has more than 4096 bytes.
const MAX_WARNINGS: usize = 10;
/// Most bytes of a reason that somebody is told, or that is logged: the names in it may be as long as the question.
const MAX_REASON_BYTES: usize = 1024;

/// A question that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the body is no AdmissionReview of {API_VERSION} with a request: {0}")]
pub(crate) struct BadReview(String);

/// A reason why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unanswered {
    /// The text is no question.
    #[error(transparent)]
    Bad(#[from] BadReview),
    /// The question takes more memory than one may have.
    #[error("the object has too many parts to be looked at")]
    TooLarge,
    /// Other questions took too long, or the cluster did.
    #[error("the webhook has not answered within {} s; create the object again", .0.as_secs())]
    Late(Duration),
    /// A fault of ours.
    #[error("the webhook failed at the object; its log says why")]
    Failed,
}

/// A question: may this object be created?
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Question {
    uid: String,
    #[serde(default)]
    pub(crate) namespace: String,
    #[serde(default)]
    pub(crate) operation: String,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    pub(crate) resource: Resource,
    /// The object as it is to be.
    #[serde(default)]
    pub(crate) object: Value,
    /// The object as it is, where it is changed.
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
struct Review {
    api_version: String,
    kind: String,
    request: Question,
}

// === impl BadReview ===

impl BadReview {
    fn new(why: &str) -> Self {
        Self(shortened(why).into_owned())
    }
}

// === impl Unanswered ===

impl Unanswered {
    /// Returns what the metrics call it.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Bad(_) => "bad_request",
            Self::TooLarge => "too_large",
            Self::Late(_) => "late",
            Self::Failed => "failed",
        }
    }
}

// === impl Question ===

impl Question {
    /// Reads a question.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, BadReview> {
        let review: Review =
            serde_json::from_slice(body).map_err(|error| BadReview::new(&error.to_string()))?;
        let (kind, version) = (review.kind, review.api_version);
        if kind != "AdmissionReview" || version != API_VERSION {
            return Err(BadReview::new(&format!("it is a {kind} of {version}")));
        }
        if review.request.uid.is_empty() {
            return Err(BadReview::new("the request has no uid"));
        }
        Ok(review.request)
    }

    /// Returns the question without its object, for an answer that takes no look at it.
    pub(crate) fn bare(&self) -> Self {
        Self {
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            ..Self::default()
        }
    }

    /// Returns whether a pod is to be created, and no part of one.
    pub(crate) fn is_new_pod(&self) -> bool {
        self.operation == "CREATE"
            && self.resource.group.is_empty()
            && self.resource.resource == "pods"
            && self.sub_resource.is_empty()
    }

    /// Returns the answer that changes the object.
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

    /// Returns the answer that the object may not be created, with a reason for whoever tries.
    pub(crate) fn denied(&self, why: &str) -> Value {
        let status = json!({"code": 422, "reason": "Invalid", "message": why});
        answer(&json!({"uid": self.uid, "allowed": false, "status": status}))
    }
}

/// Returns a reason, or the beginning of one that is too long.
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
