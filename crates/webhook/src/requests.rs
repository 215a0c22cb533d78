//! Admission of the requests that the janitor carries out: one that cannot be carried out is refused with a sentence,
//! where it would end without having done anything. What the cluster does not say now is let in: the janitor looks at
//! it once more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, Kind};
use maintenance::janitor::{Named, Request};
use maintenance::{Maintenance, Resource};
use preflight::inject::Injection;
use runtime::http_server::ReadBody;
use runtime::logging::{Seldom, chain};
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::facts::known_by;
use crate::review::{Question, Unanswered};
use crate::turns::{Turns, Work};

/// Time between the beginnings of two lists of one kind: whoever reaches the port can have them made.
const APART: Duration = Duration::from_millis(100);

/// Requests that have not ended.
type Open = Arc<Vec<Value>>;

/// Answers questions about requests. Cheap to clone.
#[derive(Clone)]
pub struct Requests {
    cluster: Arc<Cluster>,
    turns: Turns,
    /// The last list of each kind, by its plural, and when it began. Who makes one holds it.
    lists: Arc<Mutex<BTreeMap<&'static str, (Instant, Open)>>>,
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
            lists: Arc::default(),
            unseen: Arc::default(),
        }
    }

    /// Returns the answer to a question, if there is one by `until`.
    pub(crate) async fn answer(&self, body: ReadBody, until: Instant) -> Result<Value, Unanswered> {
        let began = Instant::now();
        let answering = tokio::time::timeout_at(until, self.judge(body, until));
        let late = |_| Err(Unanswered::Late(began.elapsed()));
        answering.await.unwrap_or_else(late)
    }

    async fn judge(&self, body: ReadBody, until: Instant) -> Result<Value, Unanswered> {
        let mut work = Work::new(&self.turns, body);
        let named = work.part(|question| (question.bare(), named(question)));
        let (about, named) = named.await?;
        let (kind, node) = match named {
            Some(Ok(named)) => named,
            Some(Err(why)) => return Ok(about.denied(&why)),
            None => return Ok(about.changed(&Injection::default())),
        };
        let said = tokio::time::timeout_at(known_by(until), self.said_of(kind, &node));
        let others = match work.meanwhile(said).await? {
            Ok(Ok(others)) => others,
            Ok(Err(error)) => return Ok(self.unseen(&about, &chain(&error))),
            Err(_) => return Ok(self.unseen(&about, "the API server did not answer in time")),
        };
        let judging = work.last(move |question| {
            let others = others.as_ref().map(|others| others.as_slice());
            let refusal = request(question).and_then(|request| {
                request.refusal(&node, others.is_some(), others.unwrap_or_default())
            });
            match refusal {
                Some(why) => question.denied(&why),
                None => question.changed(&Injection::default()),
            }
        });
        judging.await
    }

    /// Returns the requests of a kind that have not ended, if there is such a node.
    async fn said_of(&self, kind: Maintenance, node: &str) -> Result<Option<Open>, ApiError> {
        let nodes = Kind::new("", "v1", "nodes");
        // A name that is none would be another path.
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        if node.chars().all(is_name) && self.cluster.object(&nodes, None, node).await?.is_some() {
            return self.open(kind).await.map(Some);
        }
        Ok(None)
    }

    /// Returns the requests of a kind that have not ended, as they are now or after that: who asks while others do
    /// shares a list with them.
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
        let kinds = Kind::new(group, version, plural);
        let mut open = self.cluster.list_objects(&kinds).await?;
        open.retain(|one| Resource::read(kind, one).is_ok_and(|one| !one.is_over()));
        let open = Arc::new(open);
        lists.insert(plural, (begun, Arc::clone(&open)));
        Ok(open)
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
}

/// Returns the request that a question is about; `None` where there is nothing to look at.
fn request(question: &Question) -> Option<Request<'_>> {
    let resource = &question.resource;
    let kind = Maintenance::of_resource(&resource.group, &resource.resource)?;
    let before = match &*question.operation {
        "CREATE" => None,
        "UPDATE" => Some(&question.old_object),
        _ => return None,
    };
    Some(Request {
        kind,
        object: &question.object,
        before,
    })
}

/// Returns the kind of the request that a question is about, and its node; `None` where there is nothing to look at. The
/// error is the reason for which it is refused.
fn named(question: &Question) -> Option<Result<(Maintenance, String), String>> {
    let request = request(question)?;
    match request.node() {
        Ok(Named::Node(node)) => Some(Ok((request.kind, node.to_owned()))),
        Ok(Named::Changed) => None,
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

    /// An API server with the node `gpu-1`, and a `RebootNode` for it that has not ended. Returns how often those were
    /// listed.
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

    async fn answer(requests: &Requests, question: &Value) -> Value {
        let body = Body::from(question.to_string());
        let peer = Peer::of([127, 0, 0, 1].into());
        let room = Bodies::new(1024 * 1024);
        let body = room.read(peer, body, 1024 * 1024, ENOUGH).await;
        let until = Instant::now() + ENOUGH;
        let answer = requests.answer(body.expect("a body"), until).await;
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
        let (_, cluster) = api().await;
        let requests = Requests::new(cluster);
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
    async fn who_asks_while_others_do_shares_a_list_with_them() {
        let (lists, cluster) = api().await;
        let requests = Requests::new(cluster);
        let questions: Vec<Value> = (0..60)
            .map(|at| question("CREATE", if at == 0 { "gpu-1" } else { "gpu-2" }, None))
            .collect();
        let asking = questions.iter().map(|one| answer(&requests, one));
        let said = futures::future::join_all(asking).await;
        for (at, said) in said.iter().enumerate() {
            assert_eq!(said["allowed"], at != 0, "{at}: {said}");
            assert_eq!(said.get("warnings"), None, "it was looked at");
        }
        let lists = lists.load(Ordering::Relaxed);
        assert!(lists < 30, "{lists} lists");
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
