//! Carrying a change to a node out: one conditional patch, and what its answer means.

use std::error::Error;
use std::time::Duration;

use domain::node::{NodeChange, NodeView};
use http::Request;
use http::header::CONTENT_TYPE;
use kube::core::Status;

use crate::connect::Cluster;
use crate::pace::Urgency;
use crate::patch;
use crate::request::Reply;

/// Longest text of an answer without a `Status` that an error keeps, in characters.
const MESSAGE_CHARS: usize = 300;
/// What the API server says of a JSON patch that does not apply, and of nothing else.
const PATCH_DOES_NOT_APPLY: &str = "the server rejected our request due to an error in our request";

/// Why a change was not made. Nothing of it was.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The node is not what the view shows any more. Look again and decide anew.
    #[error("the node has changed since it was looked at")]
    Conflict {
        /// HTTP status: 422 or 409.
        status: u16,
    },
    /// There is no such node.
    #[error("the node does not exist")]
    NotFound,
    /// Credentials or permissions do not suffice.
    #[error("not allowed: {message}")]
    Forbidden {
        /// HTTP status: 401 or 403.
        status: u16,
        /// What the API server says.
        message: String,
    },
    /// The API server asks to slow down.
    #[error("the API server asks to try later")]
    Throttled {
        /// When to try again, if it says so.
        retry_after: Option<Duration>,
    },
    /// The API server, or an admission webhook, does not accept the change.
    #[error("the API server refuses the change: {message}")]
    Invalid {
        /// HTTP status, a 4xx.
        status: u16,
        /// What it says.
        message: String,
    },
    /// The API server cannot be reached, did not answer in time, or is in trouble itself.
    /// Unlike with the other errors the change may have been made all the same: then a
    /// second try ends as [`ApplyError::Conflict`].
    #[error("the API server does not answer")]
    Unavailable {
        /// HTTP status if there was an answer, a 5xx.
        status: Option<u16>,
        /// What happened.
        source: Box<dyn Error + Send + Sync>,
    },
}

// === impl ApplyError ===

impl ApplyError {
    /// Whether the same intention may succeed later: after [`ApplyError::Conflict`] with a
    /// fresh view, otherwise after waiting.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Conflict { .. } | Self::Throttled { .. } | Self::Unavailable { .. } => true,
            Self::NotFound | Self::Forbidden { .. } | Self::Invalid { .. } => false,
        }
    }

    /// HTTP status of the answer; `None` where there was none.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::NotFound => Some(404),
            Self::Throttled { .. } => Some(429),
            Self::Conflict { status }
            | Self::Forbidden { status, .. }
            | Self::Invalid { status, .. } => Some(*status),
            Self::Unavailable { status, .. } => *status,
        }
    }

    pub(crate) fn unavailable(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Unavailable {
            status: None,
            source: source.into(),
        }
    }

    /// What an answer other than success means for `change`.
    fn from_answer(answer: &Reply, view: &NodeView, change: &NodeChange) -> Self {
        Self::from_reply(answer, |told| lost_race_for_taint(told, view, change))
    }

    /// What an answer other than success means; `lost_race` knows the 422s that are conflicts.
    pub(crate) fn from_reply(answer: &Reply, lost_race: impl Fn(&Status) -> bool) -> Self {
        let status = answer.status.as_u16();
        // Proxies, and the API server when it sheds load, answer with plain text.
        let told: Option<Status> = serde_json::from_slice(&answer.body).ok();
        let message = told.as_ref().map_or_else(
            || {
                let text = String::from_utf8_lossy(&answer.body);
                text.trim().chars().take(MESSAGE_CHARS).collect()
            },
            |told| told.message.clone(),
        );
        match status {
            401 | 403 => Self::Forbidden { status, message },
            404 => Self::NotFound,
            409 => Self::Conflict { status },
            422 if message == PATCH_DOES_NOT_APPLY => Self::Conflict { status },
            422 if told.as_ref().is_some_and(lost_race) => Self::Conflict { status },
            429 => {
                let in_body = told
                    .and_then(|told| told.details)
                    .map(|it| it.retry_after_seconds);
                let in_body = in_body.filter(|&seconds| seconds > 0);
                Self::Throttled {
                    retry_after: answer
                        .retry_after
                        .or(in_body.map(|seconds| Duration::from_secs(seconds.into()))),
                }
            }
            400..=499 => Self::Invalid { status, message },
            _ => Self::Unavailable {
                status: Some(status),
                source: format!("HTTP status {status}: {message}").into(),
            },
        }
    }
}

/// Whether the API server complains of nothing but a second taint of one key and effect,
/// and the view shows no first one: somebody was faster.
fn lost_race_for_taint(told: &Status, view: &NodeView, change: &NodeChange) -> bool {
    let causes = told
        .details
        .as_ref()
        .map(|details| details.causes.as_slice())
        .unwrap_or_default();
    let only_duplicates = !causes.is_empty()
        && causes.iter().all(|cause| {
            // The field is called `metadata.taints[n]`, though it is `spec.taints[n]`.
            cause.reason == "FieldValueDuplicate" && cause.field.contains(".taints[")
        });
    let after = view.after(change);
    let mut slots: Vec<_> = after
        .taints
        .iter()
        .map(|on_node| (&on_node.taint.key, &on_node.taint.effect))
        .collect();
    slots.sort_unstable();
    let doubled_by_us = slots.windows(2).any(|pair| pair.first() == pair.last());
    only_duplicates && !doubled_by_us
}

/// JSON with the escapes that Go's encoder makes beyond those of JSON itself.
///
/// The API server compares the value of a `test` with the node's as it encodes it, text
/// against text: an annotation that holds `<` is `\u003c` there, and the plain character,
/// though it means the same, does not match. XID lines hold `pid='<unknown>'`.
fn as_go_writes_it(patch: &json_patch::Patch) -> serde_json::Result<String> {
    // Outside of strings none of these characters occurs in JSON.
    Ok(serde_json::to_string(patch)?
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029"))
}

// === impl Cluster ===

impl Cluster {
    /// Makes `change` to the node that `view` shows, if it still is as the decision saw it
    /// ([`patch::render`] has what that means). Returns the node after it.
    ///
    /// One request, which waits for its turn and then takes 10 s at most; it is not repeated
    /// here, and there is none where nothing changes.
    pub async fn apply(
        &self,
        view: &NodeView,
        change: &NodeChange,
    ) -> Result<NodeView, ApplyError> {
        let call = patch::describe(view, change);
        if call.patch.is_empty() {
            return Ok(view.clone());
        }
        if !is_node_name(&view.name) {
            let message = format!("{:?} is not the name of a node", view.name);
            return Err(ApplyError::Invalid {
                status: 400,
                message,
            });
        }
        let body = as_go_writes_it(&call.patch).map_err(ApplyError::unavailable)?;
        let request = Request::builder()
            .method(call.verb)
            .uri(call.path)
            .header(CONTENT_TYPE, "application/json-patch+json")
            .body(body.into_bytes())
            .map_err(ApplyError::unavailable)?;
        let answer = self
            .exchange(Urgency::Act, request)
            .await
            .map_err(ApplyError::unavailable)?;
        if !answer.status.is_success() {
            return Err(ApplyError::from_answer(&answer, view, change));
        }
        let object = serde_json::from_slice(&answer.body).map_err(ApplyError::unavailable)?;
        NodeView::from_object(object)
            .ok_or_else(|| ApplyError::unavailable("the answer is not a node"))
    }
}

/// Whether `name` can be a node's: a DNS subdomain. Anything else would be another path.
pub(crate) fn is_node_name(name: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-' || c == b'.';
    name.len() <= 253
        && name
            .as_bytes()
            .first()
            .is_some_and(u8::is_ascii_alphanumeric)
        && name.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use domain::node::Taint;
    use http::StatusCode;
    use serde_json::{Value, json};

    use super::*;
    use crate::fake::{self, Answer};
    use crate::request::ANSWER_BYTES;

    #[test]
    fn patches_are_escaped_as_the_api_server_stores_text() {
        let value = "pid='<unknown>' & \u{2028}\"";
        let patch = json!([{"op": "test", "path": "/a", "value": value}]);
        let patch: json_patch::Patch = serde_json::from_value(patch).unwrap();
        let text = as_go_writes_it(&patch).unwrap();
        assert!(
            text.contains(r#"pid='\u003cunknown\u003e' \u0026 \u2028\""#),
            "{text}"
        );
        // The same value all the same.
        assert_eq!(
            serde_json::from_str::<json_patch::Patch>(&text).unwrap(),
            patch
        );
    }

    fn node(taints: &Value) -> NodeView {
        let object = json!({"metadata": {"name": "n"}, "spec": {"taints": taints}});
        NodeView::from_object(object).unwrap()
    }

    fn adding(key: &str) -> NodeChange {
        let taint = Taint {
            key: key.into(),
            value: "bad".into(),
            effect: "NoSchedule".into(),
        };
        NodeChange {
            add_taints: vec![taint],
            ..NodeChange::default()
        }
    }

    fn error(status: u16, body: impl Into<Vec<u8>>) -> ApplyError {
        let status = StatusCode::from_u16(status).unwrap();
        let answer = Reply {
            status,
            retry_after: None,
            date: None,
            body: body.into(),
        };
        ApplyError::from_answer(&answer, &node(&json!([])), &adding("gpu"))
    }

    fn status(code: u16, message: &str, details: &Value) -> String {
        let status = "Failure";
        json!({"kind": "Status", "status": status, "code": code, "message": message, "details": details})
            .to_string()
    }

    #[test]
    fn answers_are_told_apart() {
        let invalid = "Node \"n\" is invalid: metadata.labels: Invalid value: \"a b\"";
        let causes =
            json!({"causes": [{"reason": "FieldValueInvalid", "field": "metadata.labels"}]});
        let wait = json!({"retryAfterSeconds": 7});
        let cases = [
            (
                401,
                status(401, "Unauthorized", &json!({})),
                "not allowed: Unauthorized",
                false,
            ),
            (403, status(403, "no", &json!({})), "not allowed: no", false),
            (
                404,
                status(404, "gone", &json!({})),
                "the node does not exist",
                false,
            ),
            (
                409,
                status(409, "x", &json!({})),
                "the node has changed",
                true,
            ),
            (
                422,
                status(422, PATCH_DOES_NOT_APPLY, &json!({})),
                "the node has changed",
                true,
            ),
            (
                422,
                status(422, invalid, &causes),
                "metadata.labels: Invalid value",
                false,
            ),
            (
                422,
                "admission webhook denied".into(),
                "admission webhook denied",
                false,
            ),
            (415, "what?".into(), "refuses the change: what?", false),
            (429, "Too many requests".into(), "try later", true),
            (429, status(429, "wait", &wait), "try later", true),
            (
                500,
                status(500, "etcd", &json!({})),
                "does not answer",
                true,
            ),
            (503, String::new(), "does not answer", true),
            (504, "<html>".into(), "does not answer", true),
        ];
        for (code, body, text, retryable) in cases {
            let error = error(code, body.clone());
            assert!(error.to_string().contains(text), "{code} {body}: {error}");
            assert_eq!(error.is_retryable(), retryable, "{code} {body}");
            assert_eq!(error.status(), Some(code), "{code} {body}");
        }
        let ApplyError::Throttled { retry_after } = error(429, status(429, "", &wait)) else {
            panic!("not throttled")
        };
        assert_eq!(retry_after, Some(Duration::from_secs(7)));
        let ApplyError::Unavailable { source, .. } = error(500, status(500, "etcd", &json!({})))
        else {
            panic!("not unavailable")
        };
        assert_eq!(source.to_string(), "HTTP status 500: etcd");
    }

    #[test]
    fn a_duplicate_taint_is_a_conflict_unless_we_double_it_ourselves() {
        let cause = |reason: &str, field: &str| json!({"reason": reason, "field": field});
        let duplicate = cause("FieldValueDuplicate", "metadata.taints[1]");
        let other = cause("FieldValueInvalid", "metadata.taints[1]");
        let label = cause("FieldValueDuplicate", "metadata.labels");
        let held = json!([{"key": "gpu", "effect": "NoSchedule"}]);
        let cases = [
            ("somebody was faster", json!([]), json!([duplicate]), true),
            ("the view has it", held, json!([duplicate]), false),
            ("more is wrong", json!([]), json!([duplicate, other]), false),
            ("not a taint", json!([]), json!([label]), false),
            ("no causes", json!([]), json!([]), false),
        ];
        for (what, taints, causes, conflict) in cases {
            let body = status(422, "taints must be unique", &json!({"causes": causes}));
            let status = StatusCode::UNPROCESSABLE_ENTITY;
            let answer = Reply {
                status,
                retry_after: None,
                date: None,
                body: body.into_bytes(),
            };
            let error = ApplyError::from_answer(&answer, &node(&taints), &adding("gpu"));
            assert_eq!(
                matches!(error, ApplyError::Conflict { .. }),
                conflict,
                "{what}: {error}"
            );
        }
    }

    #[test]
    fn long_answers_are_cut() {
        let ApplyError::Invalid { message, .. } = error(400, "x".repeat(10_000)) else {
            panic!("not invalid")
        };
        assert_eq!(message.len(), MESSAGE_CHARS);
    }

    #[tokio::test]
    async fn one_call_is_one_request() {
        let nodes = fake::node("n", 2).to_string();
        let answers = vec![
            Answer::Now(200, nodes),
            Answer::Later("3"),
            Answer::Later("Sat, 21 Nov 2026 12:00:00 GMT"),
            Answer::Now(503, "overloaded".into()),
            Answer::Now(200, "[]".into()),
            Answer::Now(200, "<html>".into()),
            Answer::Now(200, " ".repeat(ANSWER_BYTES + 1)),
        ];
        let count = answers.len();
        let (cluster, mut requests) = fake::serve(answers).await;
        let node = node(&json!([]));
        let mut results = Vec::new();
        for _ in 0..count {
            results.push(cluster.apply(&node, &adding("gpu")).await);
            let [method, path, agent] = requests.try_recv().unwrap();
            assert_eq!(
                (method.as_str(), path.as_str()),
                ("PATCH", "/api/v1/nodes/n")
            );
            assert!(agent.starts_with("gpuwarden/"), "{agent}");
            assert!(requests.try_recv().is_err());
        }
        let mut results = results.into_iter();
        let mut next = || results.next().unwrap();
        assert_eq!(next().unwrap().resource_version, "2");
        for expected in [Some(Duration::from_secs(3)), None] {
            let Err(ApplyError::Throttled { retry_after }) = next() else {
                panic!("not throttled")
            };
            assert_eq!(retry_after, expected);
        }
        for expected in [Some(503), None, None, None] {
            let Err(ApplyError::Unavailable { status, .. }) = next() else {
                panic!("available")
            };
            assert_eq!(status, expected);
        }
    }

    #[tokio::test]
    async fn no_answer_is_not_waited_for() {
        let (cluster, mut requests) = fake::serve(vec![]).await;
        let node = node(&json!([]));
        let change = adding("gpu");
        let mut call = pin!(cluster.apply(&node, &change));
        tokio::select! {
            _ = &mut call => panic!("an answer"),
            _ = requests.recv() => tokio::time::pause(),
        }
        let Err(error) = call.await else {
            panic!("an answer")
        };
        let ApplyError::Unavailable {
            status: None,
            source,
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(source.to_string(), "no answer within 10 s");
    }

    #[tokio::test]
    async fn nothing_to_change_is_not_asked() {
        let (cluster, mut requests) = fake::serve(vec![]).await;
        let node = node(&json!([]));
        assert_eq!(
            cluster.apply(&node, &NodeChange::default()).await.unwrap(),
            node
        );
        assert!(requests.try_recv().is_err());
    }

    #[tokio::test]
    async fn names_that_are_paths_are_not_asked() {
        let (cluster, mut requests) = fake::serve(vec![]).await;
        let error = cluster
            .apply(&NodeView::unknown("../pods"), &adding("gpu"))
            .await;
        assert!(
            matches!(error, Err(ApplyError::Invalid { status: 400, .. })),
            "{error:?}"
        );
        assert!(requests.try_recv().is_err());
    }

    #[test]
    fn names_that_are_paths_are_refused() {
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "a?x=1",
            "a#b",
            "A",
            "-a",
            "a b",
            "ä",
            &"a".repeat(254),
        ] {
            assert!(!is_node_name(name), "{name:?}");
        }
        for name in ["a", "gpu-node-17.lab.example.com", "10.0.0.1"] {
            assert!(is_node_name(name), "{name:?}");
        }
    }
}
