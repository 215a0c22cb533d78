//! Applies a change to a node by one conditional patch, and interprets the answer. Reads a
//! single node.

use contract::names;
use http::Request;
use http::header::CONTENT_TYPE;
use kube::core::params::GetParams;
use kube::core::{self, Status};
use model::node::{NodeChange, NodeView};

use crate::connect::Cluster;
use crate::error::{ApiError, found};
use crate::pace::Urgency;
use crate::patch;
use crate::request::ask;

/// Path of the nodes.
pub(crate) const NODES: &str = "/api/v1/nodes";
/// Message of the API server for a JSON patch that does not apply, and for no other error.
pub(crate) const PATCH_DOES_NOT_APPLY: &str =
    "the server rejected our request due to an error in our request";

/// Returns true if an answer means that the node has changed since `view`.
fn lost_race(answer: &Status, view: &NodeView, change: &NodeChange) -> bool {
    answer.code == 422
        && (answer.message == PATCH_DOES_NOT_APPLY || lost_race_for_taint(answer, view, change))
}

/// Returns true if the API server only reports a second taint of one key and effect, and the
/// view has no first one: another client added it meanwhile.
fn lost_race_for_taint(answer: &Status, view: &NodeView, change: &NodeChange) -> bool {
    let causes = answer
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

/// Returns the patch as JSON with the escapes that Go's encoder adds to those of JSON itself.
///
/// The API server compares the value of a `test` with the node's value as encoded text. An
/// annotation with a `<` is `\u003c` there, and the plain character does not match, although it
/// means the same. XID lines contain `pid='<unknown>'`.
pub(crate) fn as_go_writes_it(patch: &json_patch::Patch) -> serde_json::Result<String> {
    // Outside of strings JSON has none of these characters.
    Ok(serde_json::to_string(patch)?
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029"))
}

// === impl Cluster ===

impl Cluster {
    /// Applies `change` to the node that `view` shows, if the node still matches the view in the
    /// fields that [`patch::render`] lists. Returns the node afterwards.
    ///
    /// One request, which waits for its turn and then takes at most 10 s, without retries; none
    /// if nothing changes.
    pub async fn apply(&self, view: &NodeView, change: &NodeChange) -> Result<NodeView, ApiError> {
        self.apply_at(Urgency::Act, view, change).await
    }

    /// Like [`Self::apply`], for a change that may have to wait for others.
    pub async fn apply_at(
        &self,
        urgency: Urgency,
        view: &NodeView,
        change: &NodeChange,
    ) -> Result<NodeView, ApiError> {
        let call = patch::describe(view, change);
        if call.patch.is_empty() {
            return Ok(view.clone());
        }
        check_node_name(&view.name)?;
        let body = as_go_writes_it(&call.patch).map_err(ApiError::unavailable)?;
        let request = Request::builder()
            .method(call.verb)
            .uri(call.path)
            .header(CONTENT_TYPE, "application/json-patch+json")
            .body(body.into_bytes())
            .map_err(core::request::Error::BuildRequest);
        match ask(&self.client(urgency), request).await {
            Err(kube::Error::Api(answer)) if lost_race(&answer, view, change) => {
                Err(ApiError::Conflict {
                    status: answer.code,
                })
            }
            result => Ok(result?),
        }
    }

    /// Returns the current state of a node; `None` if it does not exist. One request.
    pub async fn node(&self, name: &str) -> Result<Option<NodeView>, ApiError> {
        if check_node_name(name).is_err() {
            return Ok(None);
        }
        let request = core::Request::new(NODES).get(name, &GetParams::default());
        found(ask(&self.client(Urgency::Act), request).await)
    }
}

/// Fails for a name that would change the path.
pub(crate) fn check_node_name(name: &str) -> Result<(), ApiError> {
    names::object_name(name).map_err(|error| ApiError::Invalid {
        status: 400,
        message: format!("{name:?} is not the name of a node: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::time::Duration;

    use model::node::Taint;
    use serde_json::{Value, json};

    use super::*;
    use crate::fake::{self, FakeAnswer};
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
        // The text stands for the same value.
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

    fn refused(message: &str, causes: &Value) -> Status {
        let details = json!({ "causes": causes });
        let status = json!({"code": 422, "message": message, "details": details});
        serde_json::from_value(status).unwrap()
    }

    #[tokio::test]
    async fn a_patch_that_does_not_apply_is_a_conflict() {
        let answers = [
            PATCH_DOES_NOT_APPLY,
            "metadata.labels: Invalid value: \"a b\"",
        ]
        .map(|message| FakeAnswer::Now(422, json!({"code": 422, "message": message}).to_string()));
        let (cluster, _requests) = fake::serve(answers.into()).await;
        let node = node(&json!([]));
        for expected in [
            "it has changed since",
            "refuses it: metadata.labels: Invalid value",
        ] {
            let error = cluster.apply(&node, &adding("gpu")).await.unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(error.status(), Some(422));
        }
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
            let answer = refused("taints must be unique", &causes);
            let lost = lost_race(&answer, &node(&taints), &adding("gpu"));
            assert_eq!(lost, conflict, "{what}");
        }
    }

    #[tokio::test]
    async fn one_call_is_one_request() {
        let nodes = fake::node("n", 2).to_string();
        let answers = vec![
            FakeAnswer::Now(200, nodes),
            FakeAnswer::Later("3"),
            FakeAnswer::Later("Sat, 21 Nov 2026 12:00:00 GMT"),
            FakeAnswer::Now(503, "overloaded".into()),
            FakeAnswer::Now(200, "[]".into()),
            FakeAnswer::Now(200, "<html>".into()),
            FakeAnswer::Now(200, " ".repeat(ANSWER_BYTES + 1)),
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
            let Err(ApiError::Throttled { retry_after }) = next() else {
                panic!("not throttled")
            };
            assert_eq!(retry_after, expected);
        }
        for expected in [Some(503), None, None, None] {
            let Err(ApiError::Unavailable { status, .. }) = next() else {
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
        let ApiError::Unavailable {
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
            matches!(error, Err(ApiError::Invalid { status: 400, .. })),
            "{error:?}"
        );
        assert!(requests.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_node_is_there_or_not_or_cannot_be_asked_for() {
        let refused = r#"{"kind":"Status","code":403,"message":"not yours"}"#;
        let answers = vec![
            FakeAnswer::Now(200, fake::node("n1", 7).to_string()),
            FakeAnswer::Now(404, String::new()),
            FakeAnswer::Now(403, refused.to_owned()),
            FakeAnswer::Now(200, "[]".to_owned()),
        ];
        let (cluster, mut requests) = fake::serve(answers).await;
        let node = cluster.node("n1").await.unwrap().unwrap();
        assert_eq!(
            (node.name.as_str(), node.resource_version.as_str()),
            ("n1", "7")
        );
        let asked = requests.recv().await.unwrap();
        assert_eq!(
            asked[..2],
            ["GET".to_owned(), "/api/v1/nodes/n1".to_owned()]
        );
        assert_eq!(cluster.node("n1").await.unwrap(), None);
        for expected in ["not allowed: not yours", "the API server does not answer"] {
            assert_eq!(cluster.node("n1").await.unwrap_err().to_string(), expected);
        }
        // No request is sent for a name that would change the path.
        assert_eq!(cluster.node("../pods").await.unwrap(), None);
        while let Ok([_, path, _]) = requests.try_recv() {
            assert_eq!(path, "/api/v1/nodes/n1");
        }
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
            assert!(check_node_name(name).is_err(), "{name:?}");
        }
        for name in ["a", "gpu-node-17.lab.example.com", "10.0.0.1"] {
            assert!(check_node_name(name).is_ok(), "{name:?}");
        }
    }
}
