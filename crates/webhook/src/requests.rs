//! Admission of the requests that the janitor carries out: one that cannot be carried out is refused with a sentence,
//! where it would end without having done anything. What the cluster does not say now is let in: the janitor looks at
//! it once more.

use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, Kind};
use domain::janitor::{Named, Request};
use domain::maintenance::Maintenance;
use preflight::inject::Injection;
use runtime::http_server::ReadBody;
use runtime::logging::{Seldom, chain};
use serde_json::Value;

use crate::review::{Question, Unanswered};
use crate::turns::Turns;

/// Longest wait for what the cluster says.
const DEADLINE: Duration = Duration::from_secs(3);

/// Answers questions about requests. Cheap to clone.
#[derive(Clone)]
pub struct Requests {
    cluster: Arc<Cluster>,
    turns: Turns,
    /// The line of requests that are let in unseen.
    unseen: Arc<Seldom>,
}

// === impl Requests ===

impl Requests {
    /// Returns who answers by what a cluster says.
    pub fn new(cluster: Arc<Cluster>) -> Self {
        Self {
            cluster,
            turns: Turns::default(),
            unseen: Arc::default(),
        }
    }

    /// Returns the answer to a question.
    pub(crate) async fn answer(&self, body: ReadBody) -> Result<Value, Unanswered> {
        let taking = self.turns.take(body.peer(), &body);
        let waiting = tokio::time::timeout(DEADLINE, taking);
        let turn = waiting.await.map_err(|_| Unanswered::Late(DEADLINE))??;
        let question = turn.work(move || Question::parse(&body)).await??;
        let judged = tokio::time::timeout(DEADLINE, self.judge(&question)).await;
        let unchanged = Injection::default();
        Ok(match judged {
            Ok(Ok(None)) => question.changed(&unchanged),
            Ok(Ok(Some(why))) => question.denied(&why),
            Ok(Err(error)) => self.unseen(&question, &chain(&error)),
            Err(_) => self.unseen(&question, "the API server did not answer in time"),
        })
    }

    /// Returns the answer where the cluster does not say what it takes.
    fn unseen(&self, question: &Question, why: &str) -> Value {
        if let Some(not_logged_before) = self.unseen.now() {
            tracing::warn!(
                not_logged_before,
                "a request of the janitor is let in unseen: {why}"
            );
        }
        let warning = format!("it is not known whether the request can be carried out: {why}");
        question.changed(&Injection {
            warnings: vec![warning],
            ..Injection::default()
        })
    }

    /// Returns why a request is refused; `None`: it is not.
    async fn judge(&self, question: &Question) -> Result<Option<String>, ApiError> {
        let resource = &question.resource;
        let kind = Maintenance::of_resource(&resource.group, &resource.resource);
        let before = match &*question.operation {
            "CREATE" => None,
            "UPDATE" => Some(&question.old_object),
            _ => return Ok(None),
        };
        let Some(kind) = kind else {
            return Ok(None);
        };
        let request = Request {
            kind,
            object: &question.object,
            before,
        };
        let node = match request.node() {
            Ok(Named::Node(node)) => node,
            Ok(Named::Changed) => return Ok(None),
            Err(why) => return Ok(Some(why)),
        };
        let nodes = Kind::new("", "v1", "nodes");
        // A name that is none would be another path.
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        let exists =
            node.chars().all(is_name) && self.cluster.object(&nodes, None, node).await?.is_some();
        let others = if exists {
            self.all(kind).await?
        } else {
            Vec::new()
        };
        Ok(request.refusal(node, exists, &others))
    }

    /// Returns all requests of a kind.
    async fn all(&self, kind: Maintenance) -> Result<Vec<Value>, ApiError> {
        let (group, version, plural) = kind.resource();
        self.cluster
            .list_objects(&Kind::new(group, version, plural))
            .await
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::extract::Path;
    use axum::http::StatusCode;
    use axum::response::{IntoResponse as _, Response};
    use axum::routing::get;
    use runtime::http_server::{Bodies, Peer};
    use serde_json::json;
    use tokio::net::TcpListener;

    use super::*;

    /// An API server with the node `gpu-1`, and a `RebootNode` for it that has not ended.
    async fn api() -> Arc<Cluster> {
        let node = async |Path(name): Path<String>| -> Response {
            if name == "gpu-1" || name == "gpu-2" {
                return axum::Json(json!({"metadata": {"name": name}})).into_response();
            }
            let status = json!({
                "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": "no",
            });
            (StatusCode::NOT_FOUND, axum::Json(status)).into_response()
        };
        let reboots = async || {
            let reboot =
                json!({"metadata": {"name": "first", "uid": "u"}, "spec": {"nodeName": "gpu-1"}});
            axum::Json(json!({"metadata": {}, "items": [reboot]}))
        };
        let routes = Router::new()
            .route("/api/v1/nodes/{name}", get(node))
            .route(
                "/apis/janitor.dgxc.nvidia.com/v1alpha1/rebootnodes",
                get(reboots),
            );
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        tokio::spawn(async move { axum::serve(listener, routes).await });
        crate::server::tests::at(&address).await
    }

    async fn answer(requests: &Requests, question: &Value) -> Value {
        let body = Body::from(question.to_string());
        let peer = Peer::of([127, 0, 0, 1].into());
        let room = Bodies::new(1024 * 1024);
        let body = room.read(peer, body, 1024 * 1024, DEADLINE).await;
        let answer = requests.answer(body.expect("a body")).await;
        answer.expect("an answer")["response"].clone()
    }

    fn question(operation: &str, node: &str, before: Option<&str>) -> Value {
        let of = |node: &str| json!({"metadata": {"name": "second"}, "spec": {"nodeName": node}});
        let resource = json!({
            "group": "janitor.dgxc.nvidia.com", "version": "v1alpha1", "resource": "rebootnodes",
        });
        let request = json!({
            "uid": "u-1", "operation": operation, "resource": resource, "object": of(node),
            "oldObject": before.map(of),
        });
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
    }

    #[tokio::test]
    async fn what_cannot_be_carried_out_is_refused_with_a_sentence() {
        let requests = Requests::new(api().await);
        for (operation, node, before, refusal) in [
            ("CREATE", "gpu-2", None, None),
            ("CREATE", "gpu-9", None, Some("there is no node gpu-9")),
            (
                "CREATE",
                "../secrets",
                None,
                Some("there is no node ../secrets"),
            ),
            ("CREATE", "", None, Some("spec.nodeName is required")),
            (
                "CREATE",
                "gpu-1",
                None,
                Some("the RebootNode first asks for the node gpu-1 already"),
            ),
            ("UPDATE", "gpu-1", Some("gpu-1"), None),
            (
                "UPDATE",
                "gpu-1",
                Some("gpu-2"),
                Some("spec.nodeName cannot be changed"),
            ),
            ("DELETE", "gpu-9", None, None),
        ] {
            let said = answer(&requests, &question(operation, node, before)).await;
            assert_eq!(
                said["allowed"],
                refusal.is_none(),
                "{operation} {node}: {said}"
            );
            let message = said["status"]["message"].as_str().unwrap_or_default();
            assert!(
                message.starts_with(refusal.unwrap_or_default()),
                "{message}"
            );
        }
    }

    #[tokio::test]
    async fn while_the_cluster_does_not_say_it_is_let_in_with_a_warning() {
        let requests = Requests::new(crate::server::tests::away().await);
        let said = answer(&requests, &question("CREATE", "gpu-1", None)).await;
        assert_eq!(said["allowed"], true, "{said}");
        let warning = said["warnings"][0].as_str().unwrap_or_default();
        assert!(warning.starts_with("it is not known whether"), "{said}");
    }
}
