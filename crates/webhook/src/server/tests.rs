//! Answers of the server, also to malformed reviews, while the cluster is unreachable.

use std::net::SocketAddr;

use cluster::{Cluster, ConnectOptions};
use futures::FutureExt;
use preflight::config::{Config, Discovery};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::*;
use crate::discoveries::Discoveries;
use crate::facts::Facts;

/// Kubeconfig of an API server that does not exist.
const KUBECONFIG: &str = r"
apiVersion: v1
kind: Config
current-context: away
contexts: [{name: away, context: {cluster: away, user: nobody}}]
clusters: [{name: away, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: nobody, user: {}}]
";

/// Returns a cluster with an unreachable API server.
pub(crate) async fn away() -> Arc<Cluster> {
    at("127.0.0.1:1").await
}

/// Returns a cluster with its API server at `address`.
pub(crate) async fn at(address: &str) -> Arc<Cluster> {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let kubeconfig = KUBECONFIG.replace("127.0.0.1:1", address);
    std::fs::write(file.path(), kubeconfig).expect("a kubeconfig");
    let options = ConnectOptions {
        kubeconfig: Some(file.path().to_owned()),
        ..ConnectOptions::default()
    };
    Arc::new(Cluster::connect(options).await.expect("a client"))
}

/// Longest wait for an answer.
const ENOUGH: Duration = Duration::from_secs(120);

/// Server under test; it ends when this is dropped.
struct Server {
    under_test: WebhookServer,
    address: SocketAddr,
    metrics: SocketAddr,
    _over: tokio_util::sync::DropGuard,
}

impl Server {
    async fn start() -> Self {
        Self::with("").await
    }

    async fn with(more: &str) -> Self {
        Self::of(away().await, more).await
    }

    async fn of(cluster: Arc<Cluster>, more: &str) -> Self {
        let over = CancellationToken::new();
        // The device classes are not watched, so they stay unknown.
        let (facts, _following) = Facts::new(cluster, over.clone());
        let config = format!("image: registry.example/gpuwarden:1\n{more}");
        let config = Config::parse(&config, "config.yaml");
        let metrics = Metrics::default();
        let admission = Admission::new(
            Arc::new(config.expect("a configuration")),
            Discoveries::new(Discovery::Native),
            facts,
            &metrics,
        );
        let port = async || TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let (listener, open) = (port().await, port().await);
        let address = listener.local_addr().expect("an address");
        let metrics_at = open.local_addr().expect("an address");
        let mut server = WebhookServer::new(admission, metrics);
        server.body_timeout = Duration::from_secs(600);
        server.answer_timeout = Duration::from_secs(600);
        let routes = server.routes();
        tokio::spawn(http_server::serve(listener, None, routes, over.clone()));
        let probes = server.clone().serve_metrics(open, over.clone());
        tokio::spawn(probes.expect("a thread"));
        Self {
            under_test: server,
            address,
            metrics: metrics_at,
            _over: over.drop_guard(),
        }
    }

    /// Sends a request, and returns status and body of the answer.
    async fn ask(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let at = if path == "/metrics" || path == "/readyz" {
            self.metrics
        } else {
            self.address
        };
        let mut connection = TcpStream::connect(at).await.expect("a server");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: \
             application/json\r\nContent-Length: {}\r\n\r\n",
            at,
            body.len()
        );
        connection.write_all(head.as_bytes()).await.expect("a head");
        connection
            .write_all(body)
            .await
            .expect("somebody who reads");
        let mut answer = Vec::new();
        connection
            .read_to_end(&mut answer)
            .await
            .expect("an answer");
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        (status.unwrap_or_default(), body.to_owned())
    }

    async fn answer(&self, review: &Value) -> Value {
        let (status, body) = self
            .ask("POST", "/mutate", review.to_string().as_bytes())
            .await;
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("an answer")
    }
}

/// Returns a review of a new pod, with `more` fields in its request.
fn review(more: &Value) -> Value {
    let mut request = json!({
        "uid": "u-1",
        "namespace": "training",
        "operation": "CREATE",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "object": {
            "metadata": {"name": "p"},
            "spec": {"containers": [
                {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
            ]},
        },
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        request[key] = value.clone();
    }
    json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
}

#[tokio::test]
async fn what_is_no_question_is_refused_with_the_reason() {
    let server = Server::start().await;
    let with = |key: &str, value: Value| {
        let mut review = review(&json!({}));
        review[key] = value;
        review.to_string()
    };
    let deep = format!("{{\"request\":{{\"object\":{}", "[".repeat(100_000));
    for (body, part) in [
        (String::new(), "EOF"),
        ("{".to_owned(), "EOF"),
        ("pod".to_owned(), "expected value"),
        ("[]".to_owned(), "invalid length"),
        ("null".to_owned(), "invalid type: null"),
        ("{}".to_owned(), "missing field"),
        (with("kind", json!("Pod")), "it is a Pod"),
        (with("kind", json!(7)), "invalid type"),
        (
            with("apiVersion", json!("admission.k8s.io/v1beta1")),
            "of admission.k8s.io/v1beta1",
        ),
        (with("request", Value::Null), "invalid type: null"),
        (with("request", json!({})), "missing field `uid`"),
        (with("request", json!({"uid": ""})), "has no uid"),
        (with("request", json!({"uid": 7})), "invalid type"),
        (review(&json!({"operation": 7})).to_string(), "invalid type"),
        (deep, "recursion limit"),
    ] {
        for path in ["/mutate", "/mutate-pod"] {
            let (status, text) = server.ask("POST", path, body.as_bytes()).await;
            let body = &body[..body.len().min(200)];
            assert_eq!(status, 400, "{body}: {text}");
            assert!(text.contains(part), "{body}: {text}");
        }
    }
    let not_utf_8 = b"{\"kind\": \"\xff\"}";
    assert_eq!(server.ask("POST", "/mutate", not_utf_8).await.0, 400);
    // A body that is too large is read to its end, so that the client receives the reason.
    let huge = vec![b' '; MAX_REVIEW_BYTES + 1];
    let (status, text) = server.ask("POST", "/mutate", &huge).await;
    assert_eq!(
        (status, &*text),
        (413, "the request has more than 10485760 bytes\n")
    );
    // A quoted text is truncated.
    let long = with("kind", json!("x".repeat(1_000_000)));
    let (status, text) = server.ask("POST", "/mutate", long.as_bytes()).await;
    assert!(status == 400 && text.len() < 1200, "{status}: {text}");
    assert_eq!(server.ask("GET", "/mutate", b"").await.0, 405);
    assert_eq!(server.ask("POST", "/validate", b"{}").await.0, 404);
    // The server still works.
    assert_eq!(server.ask("GET", "/healthz", b"").await.0, 200);
}

#[tokio::test]
async fn what_gets_no_checks_may_be_created_as_it_is() {
    let server = Server::start().await;
    let config_maps = json!({"group": "", "version": "v1", "resource": "configmaps"});
    let other_pods = json!({"group": "metrics.k8s.io", "version": "v1", "resource": "pods"});
    for more in [
        json!({"object": null}),
        json!({"object": "pod"}),
        json!({"object": []}),
        json!({"object": {"spec": {"containers": 7}}}),
        json!({"object": {"spec": {"containers": [null, {"resources": []}]}}}),
        json!({"operation": "UPDATE"}),
        json!({"operation": "DELETE", "object": null}),
        json!({"operation": "LATER"}),
        json!({"subResource": "ephemeralcontainers"}),
        json!({"resource": config_maps}),
        json!({"resource": other_pods}),
        json!({"resource": {}}),
        json!({"namespace": "kube-system"}),
    ] {
        let answer = server.answer(&review(&more)).await;
        let expected = json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": {"uid": "u-1", "allowed": true},
        });
        assert_eq!(answer, expected, "{more}");
    }
}

/// Also in a dry run, and with unknown fields.
#[tokio::test]
async fn a_pod_starts_unchecked_while_the_cluster_does_not_say_what_it_may_have() {
    let server = Server::start().await;
    for more in [
        json!({}),
        json!({"dryRun": true}),
        json!({"of-tomorrow": {"a": [1]}, "oldObject": null, "options": {}}),
    ] {
        let answer = server.answer(&review(&more)).await;
        let response = &answer["response"];
        assert_eq!(response["allowed"], true, "{answer}");
        assert_eq!(response["patch"], json!(null), "{answer}");
        let warning = response["warnings"][0].as_str().unwrap_or_default();
        assert!(
            warning.starts_with("no preflight checks: namespaces "),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn namespaces_are_chosen_and_left_out_by_name() {
    let server = Server::with("namespaces: [training, both]\nexcludeNamespaces: [both]\n").await;
    for (namespace, gets_checks) in [("training", true), ("another", false), ("both", false)] {
        let answer = server
            .answer(&review(&json!({"namespace": namespace})))
            .await;
        // The cluster is unreachable: a namespace that gets checks is warned about their
        // absence.
        let response = &answer["response"];
        let is_told = response.get("warnings").is_some();
        assert_eq!(is_told, gets_checks, "{namespace}");
    }
}

#[tokio::test]
async fn probes_and_metrics_say_how_it_does() {
    let server = Server::start().await;
    server.answer(&review(&json!({}))).await;
    server.answer(&review(&json!({"object": {}}))).await;
    assert_eq!(server.ask("POST", "/mutate", b"{").await.0, 400);
    let (status, metrics) = server.ask("GET", "/metrics", b"").await;
    assert_eq!(status, 200);
    for line in [
        "preflight_injection_total{result=\"unknown\"} 1",
        "preflight_injection_total{result=\"skipped\"} 1",
        "preflight_injection_total{result=\"bad_request\"} 1",
        "preflight_webhook_latency_seconds_count 3",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert_eq!(server.ask("GET", "/healthz", b"").await.0, 200);
    // The process is alive, but has not listed what it watches.
    let (status, text) = server.ask("GET", "/readyz", b"").await;
    assert_eq!(status, 503);
    for what in ["device classes", "PreflightConfigs"] {
        assert!(text.contains(what), "{text}");
    }
}

/// Returns a cluster that has all namespaces and no other objects.
async fn with_namespaces() -> Arc<Cluster> {
    let namespace = async || axum::Json(json!({"metadata": {"name": "training"}}));
    let routes = Router::new().route("/api/v1/namespaces/{name}", get(namespace));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let never = CancellationToken::new();
    tokio::spawn(http_server::serve(listener, None, routes, never));
    at(&address).await
}

/// Returns a pod of the largest size that an API server accepts, with its `managedFields`.
fn largest() -> Value {
    let volumes: Vec<Value> = (0..12_000)
        .map(|at| json!({"name": format!("nccl-{at}"), "emptyDir": {}}))
        .collect();
    let mounts: Vec<Value> = (0..12_000)
        .map(|at| json!({"name": format!("nccl-{at}"), "mountPath": format!("/m/{at}")}))
        .collect();
    let mut managed = serde_json::Map::new();
    for at in 0..12_000 {
        let key = format!("k:{{\"name\":\"nccl-{at}\"}}");
        managed.insert(key, json!({".": {}, "f:emptyDir": {}, "f:name": {}}));
        let key = format!("k:{{\"mountPath\":\"/m/{at}\"}}");
        managed.insert(key, json!({".": {}, "f:mountPath": {}, "f:name": {}}));
    }
    // Fields that are not read fill the pod up to the limit.
    let annotations = json!({"filled": "x".repeat(2 * 1024 * 1024)});
    json!({
        "metadata": {
            "name": "p", "annotations": annotations,
            "managedFields": [{"manager": "kubectl", "fieldsV1": managed}],
        },
        "spec": {
            "volumes": volumes,
            "containers": [{
                "name": "main", "volumeMounts": mounts,
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
            }],
        },
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_largest_pod_gets_its_checks() {
    let server = Server::of(with_namespaces().await, "").await;
    let question = review(&json!({"object": largest()}));
    assert!(question.to_string().len() > 4 * 1024 * 1024);
    let answer = server.answer(&question).await;
    let response = &answer["response"];
    assert_eq!(response["patchType"], "JSONPatch", "{answer}");
    let warning = response["warnings"][0].as_str().unwrap_or_default();
    assert!(
        warning.contains("volume mounts and leave out 11936"),
        "{warning}"
    );
    // Larger pods are refused with a reason.
    let many: Vec<Value> = (0..200_000).map(|_| json!({"name": "v"})).collect();
    let question = review(&json!({"object": {"spec": {"volumes": many}}}));
    let (status, text) = server
        .ask("POST", "/mutate", question.to_string().as_bytes())
        .await;
    assert_eq!(status, 413, "{text}");
    assert!(text.contains("too many parts"), "{text}");
}

/// Sends the head of a review and a part of its body, and then nothing.
async fn begin(address: SocketAddr, from: [u8; 4], part: usize) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.bind((from, 0).into()).expect("an address");
    let mut stream = socket.connect(address).await.expect("a server");
    let head = "POST /mutate HTTP/1.1\r\nHost: h\r\nContent-Length: 9000000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("a head");
    // The write fails if the server has no room and closes the connection.
    drop(stream.write_all(&vec![b' '; part]).await);
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn questions_that_trickle_hold_up_no_other() {
    let server = Server::start().await;
    // More than the connection limit and the memory limit.
    let mut slow = Vec::new();
    for _ in 0..5 {
        slow.push(begin(server.address, [127, 0, 0, 3], 8_000_000).await);
    }
    for _ in 0..400 {
        slow.push(begin(server.address, [127, 0, 0, 2], 1).await);
    }
    // The slow bodies would take ten minutes or longer.
    let question = review(&json!({"filled": "x".repeat(1_000_000)}));
    for _ in 0..10 {
        let asked = tokio::time::timeout(ENOUGH, server.answer(&question));
        let answer = asked.await.expect("an answer");
        assert_eq!(answer["response"]["allowed"], true, "{answer}");
    }
    drop(slow);
}

#[tokio::test]
async fn who_waits_for_a_turn_with_most_bytes_makes_room_for_another() {
    let server = Server::start().await;
    let ask = |from: [u8; 4], bytes: usize| {
        let question = review(&json!({"filled": "x".repeat(bytes)}));
        let body = axum::body::Body::from(question.to_string());
        let (server, peer) = (server.under_test.clone(), Peer::of(from.into()));
        mutate(State(server), Extension(peer), Request::new(body))
    };
    let large = vec![b' '; 2_000_000];
    let turns = server.under_test.admission.turns();
    let own = Peer::of([10, 0, 0, 3].into());
    let turn = turns.take(own, &large).await.expect("a turn");
    let mut waiting = Vec::new();
    for _ in 0..4 {
        let mut one = Box::pin(ask([10, 0, 0, 3], 8_300_000));
        assert!(one.as_mut().now_or_never().is_none(), "it has no turn");
        waiting.push(one);
    }
    // There is no room for this one beside the others, but it does not wait for them.
    let answer = ask([10, 0, 0, 4], 1_000_000).await;
    assert_eq!(answer.status(), StatusCode::OK);
    let ended = waiting.iter_mut().filter_map(FutureExt::now_or_never);
    let ended: Vec<StatusCode> = ended.map(|answer| answer.status()).collect();
    assert_eq!(ended, [StatusCode::SERVICE_UNAVAILABLE]);
    drop(turn);
}

#[tokio::test]
async fn a_question_that_is_not_answered_in_time_is_answered_with_a_reason() {
    let server = Server::start().await;
    let whole = Bodies::new(MAX_READ_BYTES);
    let peer = Peer::of([127, 0, 0, 1].into());
    let question = review(&json!({"filled": "x".repeat(2_000_000)})).to_string();
    let admission = &server.under_test.admission;
    // The review waits for its turn.
    let turn = admission.turns().take(peer, question.as_bytes()).await;
    let _turn = turn.expect("a turn");
    let body = axum::body::Body::from(question);
    let body = whole.read(peer, body, MAX_REVIEW_BYTES, BODY_TIMEOUT).await;
    let past = tokio::time::Instant::now().checked_sub(Duration::from_secs(1));
    let late = admission
        .answer(body.expect("a body"), past.expect("a time"))
        .await;
    let late = late.expect_err("it is late").into_response();
    assert_eq!(late.status(), 500);
    let text = axum::body::to_bytes(late.into_body(), 1024).await;
    let text = String::from_utf8_lossy(&text.expect("a text")).into_owned();
    assert!(text.contains("not answered within"), "{text}");
}

/// Returns an API server that accepts connections and never answers, and its cluster.
async fn silent() -> (TcpListener, Arc<Cluster>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    (listener, at(&address).await)
}

/// Returns a review of a pod with a GPU, in a gang whose size is specified by an object.
fn of_a_gang() -> Value {
    let main = json!({"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}});
    let spec = json!({"schedulingGroup": {"podGroupName": "g"}, "containers": [main]});
    review(&json!({"object": {"metadata": {"name": "p"}, "spec": spec}}))
}

/// The clock is paused, so the test does not wait.
#[tokio::test(start_paused = true)]
async fn all_that_the_cluster_is_asked_about_a_pod_has_one_deadline() {
    let (_listener, cluster) = silent().await;
    let server = Server::of(cluster, "").await;
    let peer = Extension(Peer::of([127, 0, 0, 1].into()));
    let request = Request::new(of_a_gang().to_string().into());
    let began = tokio::time::Instant::now();
    let answer = mutate(State(server.under_test.clone()), peer, request).await;
    // Neither the size of the gang nor the restrictions of the namespace are known.
    let took = began.elapsed();
    assert!(
        took < crate::facts::DEADLINE + Duration::from_secs(1),
        "{took:?}"
    );
    assert_eq!(answer.status(), 200);
}

/// Strangers may ask about claims that do not exist, and the API server may be slow.
#[tokio::test]
async fn a_question_that_waits_for_the_cluster_has_no_turn() {
    let (listener, cluster) = silent().await;
    let server = Server::of(cluster, "").await;
    let mut question = of_a_gang();
    question["request"]["filled"] = "x".repeat(2_000_000).into();
    let peer = Peer::of([127, 0, 0, 1].into());
    let (state, request) = (server.under_test.clone(), question.to_string());
    let request = Request::new(request.into());
    let asking = tokio::spawn(mutate(State(state), Extension(peer), request));
    let _asked = listener.accept().await.expect("it asks the API server");
    let turns = server.under_test.admission.turns();
    let large = vec![b' '; 2_000_000];
    let taking = tokio::time::timeout(ENOUGH, turns.take(peer, &large));
    let _turn = taking.await.expect("a turn").expect("a turn");
    assert!(!asking.is_finished(), "it waits still");
    // Answering after the deadline needs no turn.
    let answer = asking.await.expect("no panic");
    assert_eq!(answer.status(), 200);
}

/// Sends a request without an async runtime, from the test's thread.
fn probe(address: SocketAddr, path: &str) -> String {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(address).expect("a server");
    let wait = Some(Duration::from_secs(20));
    stream.set_read_timeout(wait).expect("a deadline");
    let head = format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).expect("a head");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// The test has a single thread and keeps it busy.
#[tokio::test]
async fn a_probe_is_answered_while_the_threads_of_questions_are_busy() {
    let server = Server::start().await;
    let answer = probe(server.metrics, "/healthz");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // No work takes this long.
    let long_ago = Instant::now().checked_sub(MAX_SILENCE);
    *server.under_test.alive.lock().expect("a time") = long_ago.expect("a time");
    let answer = probe(server.metrics, "/healthz");
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(
        answer.ends_with("the webhook does not answer\n"),
        "{answer}"
    );
}
