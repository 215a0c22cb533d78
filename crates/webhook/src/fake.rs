//! Fake API server with `ConfigMap`s, pods and tokens, which counts the requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use cluster::Cluster;
use futures::StreamExt as _;
use preflight::roster::{MANAGED_BY, MANAGED_BY_LABEL};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::broadcast;

type Name = (String, String);

/// Handle of the fake API server.
#[derive(Clone)]
pub(crate) struct FakeApi {
    state: Arc<Mutex<Objects>>,
    changes: broadcast::Sender<Bytes>,
}

#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) maps: BTreeMap<Name, Value>,
    pub(crate) pods: BTreeMap<Name, Value>,
    version: u64,
    /// Numbers of created and replaced objects.
    pub(crate) created: usize,
    pub(crate) replaced: usize,
    /// Number of reads of a single `ConfigMap`.
    pub(crate) read: usize,
    /// Number of lists of whole `ConfigMap`s.
    pub(crate) whole_lists: usize,
    /// Largest page size requested in a list.
    pub(crate) page: usize,
    /// Number of lists of a namespace's pods.
    pub(crate) pod_lists: usize,
    /// Namespaces with an exhausted quota of `ConfigMap`s.
    pub(crate) full: BTreeSet<String>,
}

// === impl FakeApi ===

impl FakeApi {
    /// Starts the server, and returns it with a client.
    pub(crate) async fn start() -> (Self, Arc<Cluster>) {
        let api = Self {
            state: Arc::default(),
            changes: broadcast::Sender::new(1024),
        };
        let in_namespace = "/api/v1/namespaces/{namespace}";
        let routes = Router::new()
            .route("/api/v1/configmaps", get(list))
            .route("/api/v1/pods", get(pods))
            .route(&format!("{in_namespace}/pods"), get(pods_of))
            .route(&format!("{in_namespace}/configmaps"), post(create))
            .route(
                &format!("{in_namespace}/configmaps/{{name}}"),
                get(read).put(replace),
            )
            .route(&format!("{in_namespace}/pods/{{name}}"), get(pod))
            .route("/apis/authentication.k8s.io/v1/tokenreviews", post(review))
            .fallback(async || not_found())
            .with_state(api.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        tokio::spawn(async move { axum::serve(listener, routes).await });
        (api, crate::server::tests::at(&address).await)
    }

    /// Returns the objects and counters.
    pub(crate) fn objects(&self) -> std::sync::MutexGuard<'_, Objects> {
        self.state.lock().expect("no panic elsewhere")
    }

    /// Returns the number of watches on `ConfigMap`s.
    pub(crate) fn watchers(&self) -> usize {
        self.changes.receiver_count()
    }

    /// Stores a `ConfigMap` with this data, and sends a watch event.
    pub(crate) fn put_map(&self, namespace: &str, name: &str, data: &Value) -> Value {
        let metadata = json!({
            "namespace": namespace, "name": name, "uid": format!("uid of {name}"),
            "labels": {MANAGED_BY_LABEL: MANAGED_BY},
        });
        self.store(json!({"metadata": metadata, "data": data}))
    }

    fn store(&self, mut map: Value) -> Value {
        let mut objects = self.objects();
        objects.version += 1;
        map["metadata"]["resourceVersion"] = objects.version.to_string().into();
        let text = |key: &str| map["metadata"][key].as_str().unwrap_or_default().to_owned();
        objects
            .maps
            .insert((text("namespace"), text("name")), map.clone());
        drop(objects);
        let line = json!({"type": "MODIFIED", "object": {"metadata": map["metadata"]}});
        // There may be no watch yet.
        drop(self.changes.send(format!("{line}\n").into()));
        map
    }
}

fn not_found() -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
        "reason": "NotFound", "message": "not found",
    });
    (StatusCode::NOT_FOUND, axum::Json(status)).into_response()
}

async fn list(
    State(api): State<FakeApi>,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    if query.contains_key("watch") {
        let changes = api.changes.subscribe();
        let lines = futures::stream::unfold(changes, async |mut changes| {
            let line = changes.recv().await.ok()?;
            Some((Ok::<_, std::convert::Infallible>(line), changes))
        });
        return Body::from_stream(lines.boxed()).into_response();
    }
    let accept = headers.get(header::ACCEPT).map(|value| value.to_str());
    let is_whole =
        !matches!(accept, Some(Ok(accept)) if accept.contains("as=PartialObjectMetadata"));
    let mut objects = api.objects();
    objects.whole_lists += usize::from(is_whole);
    let limit = query.get("limit").and_then(|limit| limit.parse().ok());
    let limit: usize = limit.unwrap_or(usize::MAX);
    objects.page = objects.page.max(limit);
    let from = query.get("continue").and_then(|from| from.parse().ok());
    let from: usize = from.unwrap_or_default();
    let items: Vec<Value> = objects
        .maps
        .values()
        .skip(from)
        .take(limit)
        .map(|map| {
            if is_whole {
                map.clone()
            } else {
                json!({"metadata": map["metadata"]})
            }
        })
        .collect();
    let next = from + items.len();
    let next = (next < objects.maps.len()).then(|| next.to_string());
    let metadata = json!({"resourceVersion": objects.version.to_string(), "continue": next});
    axum::Json(json!({"metadata": metadata, "items": items})).into_response()
}

async fn read(State(api): State<FakeApi>, Path(name): Path<Name>) -> Response {
    let mut objects = api.objects();
    objects.read += 1;
    match objects.maps.get(&name) {
        Some(map) => axum::Json(map).into_response(),
        None => not_found(),
    }
}

async fn create(
    State(api): State<FakeApi>,
    Path(namespace): Path<String>,
    body: Bytes,
) -> Response {
    let mut map: Value = serde_json::from_slice(&body).expect("an object");
    if api.objects().full.contains(&namespace) {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403,
            "reason": "Forbidden", "message": "exceeded quota",
        });
        return (StatusCode::FORBIDDEN, axum::Json(status)).into_response();
    }
    api.objects().created += 1;
    map["metadata"]["uid"] = format!("uid of {namespace}").into();
    (StatusCode::CREATED, axum::Json(api.store(map))).into_response()
}

async fn replace(State(api): State<FakeApi>, body: Bytes) -> Response {
    let map: Value = serde_json::from_slice(&body).expect("an object");
    api.objects().replaced += 1;
    axum::Json(api.store(map)).into_response()
}

/// Lists all pods; a watch on them never reports a change.
async fn pods(
    State(api): State<FakeApi>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    if query.contains_key("watch") {
        return unchanging();
    }
    let items: Vec<Value> = api.objects().pods.values().cloned().collect();
    axum::Json(json!({"metadata": {"resourceVersion": "1"}, "items": items})).into_response()
}

/// Returns a watch without events.
fn unchanging() -> Response {
    let nothing = futures::stream::pending::<Result<Bytes, std::convert::Infallible>>();
    Body::from_stream(nothing).into_response()
}

async fn pods_of(
    State(api): State<FakeApi>,
    Path(namespace): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    if query.contains_key("watch") {
        return unchanging();
    }
    let mut objects = api.objects();
    objects.pod_lists += 1;
    let pods = objects.pods.iter().filter(|((of, _), _)| *of == namespace);
    let items: Vec<Value> = pods.map(|(_, pod)| pod.clone()).collect();
    axum::Json(json!({"metadata": {"resourceVersion": "1"}, "items": items})).into_response()
}

async fn pod(State(api): State<FakeApi>, Path(name): Path<Name>) -> Response {
    match api.objects().pods.get(&name) {
        Some(pod) => axum::Json(pod).into_response(),
        None => not_found(),
    }
}

/// Reviews a token of the form `NAMESPACE/POD`.
async fn review(body: Bytes) -> Response {
    let mut review: Value = serde_json::from_slice(&body).expect("a review");
    let token = review["spec"]["token"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let audiences = review["spec"]["audiences"].clone();
    review["status"] = match token.split_once('/') {
        Some((namespace, pod)) => json!({
            "authenticated": true,
            "audiences": audiences,
            "user": {
                "username": format!("system:serviceaccount:{namespace}:default"),
                "extra": {
                    "authentication.kubernetes.io/pod-name": [pod],
                    "authentication.kubernetes.io/node-name": ["n"],
                },
            },
        }),
        None => json!({"authenticated": false, "error": "it is not a token"}),
    };
    (StatusCode::CREATED, axum::Json(review)).into_response()
}
