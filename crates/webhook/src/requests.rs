//! Admission of the janitor's requests: refuses a request that could not be carried out, with a
//! reason. Without admission, it would fail later without any effect. If the cluster does not
//! answer, the request is allowed: the janitor checks it again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, ObjectKind};
use maintenance::janitor::{AdmissionRequest, RequestedNode};
use maintenance::{Maintenance, MaintenanceResource};
use preflight::inject::Injection;
use runtime::http_server::ReadBody;
use runtime::logging::{Seldom, chain};
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::facts::known_by;
use crate::review::{Review, Unanswered};
use crate::turns::{Turns, Work};

/// Shortest time between two lists of one kind, since anybody who reaches the port can cause
/// them.
const APART: Duration = Duration::from_millis(100);

/// Requests that have not ended.
type Open = Arc<Vec<Value>>;

/// Answers reviews of requests. Cheap to clone.
#[derive(Clone)]
pub struct RequestAdmission {
    cluster: Arc<Cluster>,
    turns: Turns,
    /// Last list of each kind, by plural, and when it began. The lock is held while listing.
    lists: Arc<Mutex<BTreeMap<&'static str, (Instant, Open)>>>,
    /// Rate limit of the log line about unchecked requests.
    unchecked: Arc<Seldom>,
}

// === impl RequestAdmission ===

impl RequestAdmission {
    /// Creates an admission that reads from `cluster`.
    pub fn new(cluster: Arc<Cluster>) -> Self {
        Self {
            cluster,
            turns: Turns::default(),
            lists: Arc::default(),
            unchecked: Arc::default(),
        }
    }

    /// Answers a review, or fails at `until`.
    pub(crate) async fn answer(&self, body: ReadBody, until: Instant) -> Result<Value, Unanswered> {
        let began = Instant::now();
        let answering = tokio::time::timeout_at(until, self.judge(body, until));
        let late = |_| Err(Unanswered::Late(began.elapsed()));
        answering.await.unwrap_or_else(late)
    }

    async fn judge(&self, body: ReadBody, until: Instant) -> Result<Value, Unanswered> {
        let mut work = Work::new(&self.turns, body);
        let named = work.part(|review| (review.bare(), named(review)));
        let (about, named) = named.await?;
        let (kind, node) = match named {
            Some(Ok(named)) => named,
            Some(Err(why)) => return Ok(about.denied(&why)),
            None => return Ok(about.changed(&Injection::default())),
        };
        let listing = tokio::time::timeout_at(known_by(until), self.open_for(kind, &node));
        let others = match work.meanwhile(listing).await? {
            Ok(Ok(others)) => others,
            Ok(Err(error)) => return Ok(self.unchecked(&about, &chain(&error))),
            Err(_) => return Ok(self.unchecked(&about, "the API server did not answer in time")),
        };
        let judging = work.last(move |review| {
            let others = others.as_ref().map(|others| others.as_slice());
            let refusal = request(review).and_then(|request| {
                request.refusal(&node, others.is_some(), others.unwrap_or_default())
            });
            match refusal {
                Some(why) => review.denied(&why),
                None => review.changed(&Injection::default()),
            }
        });
        judging.await
    }

    /// Returns the requests of a kind that have not ended, or `None` if the node does not
    /// exist.
    async fn open_for(&self, kind: Maintenance, node: &str) -> Result<Option<Open>, ApiError> {
        let nodes = ObjectKind::new("", "v1", "nodes");
        // Any other character would change the path of the API request.
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        if node.chars().all(is_name) && self.cluster.object(&nodes, None, node).await?.is_some() {
            return self.open(kind).await.map(Some);
        }
        Ok(None)
    }

    /// Returns the requests of a kind that have not ended, from a list that began after the
    /// call. Concurrent callers share a list.
    async fn open(&self, kind: Maintenance) -> Result<Open, ApiError> {
        let asked = Instant::now();
        let (group, version, plural) = kind.resource();
        let mut lists = self.lists.lock().await;
        if let Some((begun, open)) = lists.get(plural) {
            if *begun >= asked {
                return Ok(Arc::clone(open));
            }
            tokio::time::sleep_until(*begun + APART).await;
        }
        let begun = Instant::now();
        let kinds = ObjectKind::new(group, version, plural);
        let mut open = self.cluster.list_objects(&kinds, None).await?;
        open.retain(|one| MaintenanceResource::read(kind, one).is_ok_and(|one| !one.is_over()));
        let open = Arc::new(open);
        lists.insert(plural, (begun, Arc::clone(&open)));
        Ok(open)
    }

    /// Returns an answer that allows the request, with a warning that it could not be checked.
    fn unchecked(&self, review: &Review, why: &str) -> Value {
        if let Some(not_logged_before) = self.unchecked.now() {
            tracing::warn!(
                not_logged_before,
                "a request of the janitor is allowed without a check: {why}"
            );
        }
        let warning = format!("could not check whether the request can be carried out: {why}");
        review.changed(&Injection {
            warnings: vec![warning],
            ..Injection::default()
        })
    }
}

/// Returns the janitor's request in a review; `None` if there is nothing to check.
fn request(review: &Review) -> Option<AdmissionRequest<'_>> {
    let resource = &review.resource;
    let kind = Maintenance::of_resource(&resource.group, &resource.resource)?;
    let before = match &*review.operation {
        "CREATE" => None,
        "UPDATE" => Some(&review.old_object),
        _ => return None,
    };
    Some(AdmissionRequest {
        kind,
        object: &review.object,
        before,
    })
}

/// Returns the kind and the node of the request in a review; `None` if there is nothing to
/// check. The error is the reason for a refusal.
fn named(review: &Review) -> Option<Result<(Maintenance, String), String>> {
    let request = request(review)?;
    match request.node() {
        Ok(RequestedNode::Node(node)) => Some(Ok((request.kind, node.to_owned()))),
        Ok(RequestedNode::Changed) => None,
        Err(why) => Some(Err(why)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

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

    const ENOUGH: Duration = Duration::from_secs(60);

    /// Starts an API server with the node `gpu-1` and an unfinished `RebootNode` for it. Also
    /// returns the number of lists of `RebootNode`s so far.
    async fn api() -> (Arc<AtomicUsize>, Arc<Cluster>) {
        let node = async |Path(name): Path<String>| -> Response {
            if name == "gpu-1" || name == "gpu-2" {
                return axum::Json(json!({"metadata": {"name": name}})).into_response();
            }
            let status = json!({
                "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": "no",
            });
            (StatusCode::NOT_FOUND, axum::Json(status)).into_response()
        };
        let lists = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&lists);
        let reboots = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            let reboot =
                json!({"metadata": {"name": "first", "uid": "u"}, "spec": {"nodeName": "gpu-1"}});
            let list = json!({"metadata": {}, "items": [reboot]});
            async { axum::Json(list) }
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
        (lists, crate::server::tests::at(&address).await)
    }

    async fn answer(requests: &RequestAdmission, review: &Value) -> Value {
        let body = Body::from(review.to_string());
        let peer = Peer::of([127, 0, 0, 1].into());
        let room = Bodies::new(1024 * 1024);
        let body = room.read(peer, body, 1024 * 1024, ENOUGH).await;
        let until = Instant::now() + ENOUGH;
        let answer = requests.answer(body.expect("a body"), until).await;
        answer.expect("an answer")["response"].clone()
    }

    fn review(operation: &str, node: &str, before: Option<&str>) -> Value {
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
        let (_, cluster) = api().await;
        let requests = RequestAdmission::new(cluster);
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
            let response = answer(&requests, &review(operation, node, before)).await;
            assert_eq!(
                response["allowed"],
                refusal.is_none(),
                "{operation} {node}: {response}"
            );
            let message = response["status"]["message"].as_str().unwrap_or_default();
            assert!(
                message.starts_with(refusal.unwrap_or_default()),
                "{message}"
            );
        }
    }

    #[tokio::test]
    async fn who_asks_while_others_do_shares_a_list_with_them() {
        let (lists, cluster) = api().await;
        let requests = RequestAdmission::new(cluster);
        let questions: Vec<Value> = (0..60)
            .map(|at| review("CREATE", if at == 0 { "gpu-1" } else { "gpu-2" }, None))
            .collect();
        let asking = questions.iter().map(|one| answer(&requests, one));
        let responses = futures::future::join_all(asking).await;
        for (at, response) in responses.iter().enumerate() {
            assert_eq!(response["allowed"], at != 0, "{at}: {response}");
            assert_eq!(response.get("warnings"), None, "it was looked at");
        }
        let lists = lists.load(Ordering::Relaxed);
        assert!(lists < 30, "{lists} lists");
    }

    #[tokio::test]
    async fn while_the_cluster_does_not_say_it_is_let_in_with_a_warning() {
        let requests = RequestAdmission::new(crate::server::tests::away().await);
        let response = answer(&requests, &review("CREATE", "gpu-1", None)).await;
        assert_eq!(response["allowed"], true, "{response}");
        let warning = response["warnings"][0].as_str().unwrap_or_default();
        assert!(warning.starts_with("could not check whether"), "{response}");
    }
}
