use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;
use crate::fake::{self, FakeAnswer, node};

fn list(names: &[&str], version: &str, more: &str) -> FakeAnswer {
    let items: Vec<Value> = names.iter().map(|name| node(name, 1)).collect();
    let metadata = json!({"resourceVersion": version, "continue": more});
    FakeAnswer::Now(
        200,
        json!({"kind": "NodeList", "metadata": metadata, "items": items}).to_string(),
    )
}

fn failure(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason})
}

fn line(kind: &str, object: &Value) -> String {
    json!({"type": kind, "object": object}).to_string()
}

fn bookmark(version: &str) -> String {
    let metadata = json!({"resourceVersion": version});
    line(
        "BOOKMARK",
        &json!({"kind": "Node", "apiVersion": "v1", "metadata": metadata}),
    )
}

/// Returns an event as one word.
fn word(event: &NodeEvent) -> String {
    match event {
        NodeEvent::Restarted => "restarted".to_owned(),
        NodeEvent::Listed => "listed".to_owned(),
        NodeEvent::Applied(node) => format!("+{}", node.name),
        NodeEvent::Deleted(name) => format!("-{name}"),
        NodeEvent::Failing { .. } => "failing".to_owned(),
        NodeEvent::Recovered => "recovered".to_owned(),
    }
}

/// Plays `answers`. Checks the events, and the version or page of each request.
async fn plays(what: &str, answers: Vec<FakeAnswer>, events: &str, asked: &[&str]) {
    let (cluster, mut requests) = fake::serve(answers).await;
    let mut receiver = cluster.watch_nodes(CancellationToken::new());
    for expected in events.split_whitespace() {
        assert_eq!(word(&receiver.recv().await.unwrap()), expected, "{what}");
    }
    for expected in asked {
        let [method, uri, agent] = requests.recv().await.unwrap();
        assert_eq!(method, "GET", "{what}");
        assert!(agent.starts_with("gpuwarden/"), "{what}: {agent}");
        let query: Vec<&str> = uri.split(['?', '&']).collect();
        let parameter = |name: &str| {
            query
                .iter()
                .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
                .unwrap_or("")
        };
        let seen = match parameter("watch") {
            "true" => format!("watch {}", parameter("resourceVersion")),
            _ => format!("list {}", parameter("continue")),
        };
        assert_eq!(seen.trim(), *expected, "{what}: {uri}");
    }
}

#[tokio::test]
async fn lists_then_watches() {
    let changes = vec![
        line("ADDED", &node("c", 11)),
        line("MODIFIED", &node("a", 12)),
        line("DELETED", &node("b", 13)),
    ];
    let answers = vec![
        list(&["a"], "9", "next"),
        list(&["b"], "10", ""),
        FakeAnswer::Lines(changes),
    ];
    let events = "restarted +a +b listed +c +a -b";
    plays(
        "pages",
        answers,
        events,
        &["list", "list next", "watch 10", "watch 13"],
    )
    .await;

    let answers = vec![list(&[], "10", ""), FakeAnswer::Lines(vec![bookmark("20")])];
    plays(
        "a bookmark",
        answers,
        "restarted listed",
        &["list", "watch 10", "watch 20"],
    )
    .await;
}

/// Processes that were cut off together neither return nor continue in step.
#[tokio::test]
async fn many_watches_do_not_keep_in_step() {
    let mut lengths = std::collections::BTreeSet::new();
    for _ in 0..8 {
        let answers = vec![
            list(&[], "10", ""),
            FakeAnswer::Lines(vec![bookmark("20")]),
            FakeAnswer::Lines(vec![bookmark("30")]),
        ];
        let (cluster, mut requests) = fake::serve(answers).await;
        let _events = cluster.watch_nodes(CancellationToken::new());
        requests.recv().await.unwrap();
        for _ in 0..3 {
            let [_, uri, _] = requests.recv().await.unwrap();
            let seconds = uri.split_once("timeoutSeconds=").unwrap().1;
            let seconds: u32 = seconds.split('&').next().unwrap().parse().unwrap();
            assert!((20..=WATCH_SECONDS).contains(&seconds), "{uri}");
            lengths.insert(seconds);
        }
    }
    assert!(lengths.len() > 1, "24 times the same: {lengths:?}");
}

#[tokio::test]
async fn malformed_objects_are_skipped() {
    let items = [
        json!(5),
        json!({"metadata": {"uid": "nameless"}}),
        node("a", 1),
        json!(null),
    ];
    let metadata = json!({"resourceVersion": "10"});
    let list = json!({"metadata": metadata, "items": items}).to_string();
    let changes = vec![
        line("ADDED", &json!("text")),
        line("ADDED", &json!({"metadata": {"name": 7}})),
        line("DELETED", &json!({})),
        line("ADDED", &node("b", 11)),
    ];
    let answers = vec![FakeAnswer::Now(200, list), FakeAnswer::Open(changes)];
    plays(
        "malformed",
        answers,
        "restarted +a listed +b",
        &["list", "watch 10"],
    )
    .await;
}

/// A damaged line may be any change, so nothing after it is read before it has arrived whole.
#[tokio::test]
async fn a_line_that_cannot_be_read_is_asked_for_again_and_then_listed() {
    let unreadable = ["{", "not JSON", r#"{"type": "WHAT", "object": {}}"#, "[]"];
    for text in unreadable {
        let change = line("MODIFIED", &node("a", 12));
        let damaged = || {
            vec![
                line("ADDED", &node("b", 11)),
                text.to_owned(),
                change.clone(),
            ]
        };
        let answers = vec![
            list(&["a"], "10", ""),
            FakeAnswer::Open(damaged()),
            FakeAnswer::Open(damaged()[1..].to_vec()),
            list(&["a", "b"], "20", ""),
            FakeAnswer::Open(vec![]),
        ];
        plays(
            text,
            answers,
            "restarted +a listed +b failing recovered failing recovered restarted +a +b listed",
            &["list", "watch 10", "watch 11", "list", "watch 20"],
        )
        .await;
    }
}

#[tokio::test]
async fn failures_are_told_and_survived() {
    let text = |code, reason: &str| FakeAnswer::Now(code, failure(code, reason).to_string());
    let listed = || list(&["a"], "10", "");
    let change = || FakeAnswer::Lines(vec![line("ADDED", &node("b", 11))]);
    let cases = [
        (
            "the list fails",
            vec![
                text(500, ""),
                FakeAnswer::Later("1"),
                FakeAnswer::Now(200, "{".into()),
                listed(),
                change(),
            ],
            "failing failing failing recovered restarted +a listed +b",
            vec!["list", "list", "list", "list", "watch 10"],
        ),
        (
            "a later page fails",
            vec![
                list(&["x"], "9", "next"),
                text(410, "Expired"),
                listed(),
                change(),
            ],
            "restarted +x failing recovered restarted +a listed +b",
            vec!["list", "list next", "list", "watch 10"],
        ),
        (
            "a list without version",
            vec![list(&["a"], "", ""), listed()],
            "restarted +a failing recovered restarted +a listed",
            vec!["list", "list"],
        ),
        (
            "the watch does not start",
            vec![
                listed(),
                text(503, ""),
                text(429, ""),
                text(403, "Forbidden"),
                change(),
            ],
            "restarted +a listed failing failing failing recovered +b",
            vec![
                "list", "watch 10", "watch 10", "watch 10", "watch 10", "watch 11",
            ],
        ),
        (
            "the watch ends at once",
            vec![listed(), FakeAnswer::Lines(vec![]), change()],
            "restarted +a listed failing recovered +b",
            vec!["list", "watch 10", "watch 10"],
        ),
        (
            "an error within the watch",
            vec![
                listed(),
                FakeAnswer::Lines(vec![line("ERROR", &failure(500, ""))]),
                change(),
            ],
            "restarted +a listed failing recovered +b",
            vec!["list", "watch 10", "watch 10"],
        ),
        (
            "the version is forgotten, told within the watch",
            vec![
                listed(),
                FakeAnswer::Lines(vec![line("ERROR", &failure(410, "Expired"))]),
                listed(),
                change(),
            ],
            "restarted +a listed restarted +a listed +b",
            vec!["list", "watch 10", "list", "watch 10"],
        ),
        (
            "the version is forgotten, told at the start",
            vec![listed(), text(410, "Gone"), listed(), change()],
            "restarted +a listed restarted +a listed +b",
            vec!["list", "watch 10", "list", "watch 10"],
        ),
        (
            "the version is not of this server",
            vec![listed(), text(400, "BadRequest"), listed(), change()],
            "restarted +a listed failing recovered restarted +a listed +b",
            vec!["list", "watch 10", "list", "watch 10"],
        ),
    ];
    for (what, answers, events, asked) in cases {
        plays(what, answers, events, &asked).await;
    }
}

#[tokio::test]
async fn a_version_of_the_future_is_listed_anew() {
    let mut status = failure(504, "Timeout");
    status["details"] = json!({"causes": [{"reason": "ResourceVersionTooLarge", "message": "x"}]});
    let answers = vec![
        list(&[], "10", ""),
        FakeAnswer::Now(504, status.to_string()),
        list(&[], "5", ""),
    ];
    let events = "restarted listed failing recovered restarted listed";
    plays(
        "restored",
        answers,
        events,
        &["list", "watch 10", "list", "watch 5"],
    )
    .await;
}

#[tokio::test]
async fn nodes_are_trimmed() {
    let (cluster, _requests) = fake::serve(vec![list(&["a"], "10", "")]).await;
    let mut events = cluster.watch_nodes(CancellationToken::new());
    assert_eq!(events.recv().await, Some(NodeEvent::Restarted));
    let Some(NodeEvent::Applied(node)) = events.recv().await else {
        panic!("no node")
    };
    let object = node.object();
    assert_eq!(object["metadata"].get("managedFields"), None);
    assert_eq!(object["status"].get("images"), None);
}

#[tokio::test]
async fn objects_of_any_kind_are_followed_and_one_that_cannot_be_read_is_skipped() {
    let pod = |name: &str, containers: Value| {
        let metadata = json!({"namespace": "ns", "name": name, "resourceVersion": "11"});
        json!({"metadata": metadata, "spec": {"containers": containers}})
    };
    let changes = vec![
        line("ADDED", &pod("a", json!(7))),
        line("ADDED", &pod("b", json!([]))),
        line("DELETED", &pod("a", json!(7))),
    ];
    let answers = vec![list(&[], "10", ""), FakeAnswer::Open(changes)];
    let (cluster, mut requests) = fake::serve(answers).await;
    let pods = Selection::of::<Pod>(&(), Some("ns"));
    let mut signals = cluster.watch::<Pod>(pods, CancellationToken::new());
    for expected in [Signal::Restarted, Signal::Listed] {
        assert_eq!(signals.recv().await, Some(expected));
    }
    let Some(Signal::Applied(pod)) = signals.recv().await else {
        panic!("no pod")
    };
    assert_eq!(pod.metadata.name.as_deref(), Some("b"));
    let deleted = Signal::Deleted("ns/a".to_owned());
    assert_eq!(signals.recv().await, Some(deleted));
    let [_, uri, _] = requests.recv().await.unwrap();
    assert!(uri.starts_with("/api/v1/namespaces/ns/pods?"), "{uri}");
}

/// Only silence shows that a connection is dead.
#[tokio::test]
async fn a_dead_connection_is_noticed() {
    let answers = vec![list(&[], "10", ""), FakeAnswer::Open(vec![bookmark("20")])];
    let (cluster, mut requests) = fake::serve(answers).await;
    let mut events = cluster.watch_nodes(CancellationToken::new());
    for expected in ["list", "watch"] {
        requests.recv().await.expect(expected);
    }
    for expected in [NodeEvent::Restarted, NodeEvent::Listed] {
        assert_eq!(events.recv().await, Some(expected));
    }
    let first = events.recv();
    tokio::time::pause();
    let begin = Instant::now();
    let Some(NodeEvent::Failing { error, .. }) = first.await else {
        panic!("not noticed")
    };
    assert!(
        begin.elapsed() <= Duration::from_mins(1),
        "{:?}: {error}",
        begin.elapsed()
    );
    assert!(
        begin.elapsed() > Duration::from_secs(WATCH_SECONDS.into()),
        "{error}"
    );
}

/// A proxy keeps the connection alive without data.
#[tokio::test]
async fn an_answer_that_does_not_end_is_given_up() {
    let answers = vec![
        FakeAnswer::Trickle,
        list(&[], "10", ""),
        FakeAnswer::Trickle,
    ];
    let (cluster, mut requests) = fake::serve(answers).await;
    let mut events = cluster.watch_nodes(CancellationToken::new());
    requests.recv().await.expect("list");
    given_up(&mut events, PAGE_TIMEOUT).await;
    for expected in [
        NodeEvent::Recovered,
        NodeEvent::Restarted,
        NodeEvent::Listed,
    ] {
        assert_eq!(events.recv().await, Some(expected));
    }
    for expected in ["list", "watch"] {
        requests.recv().await.expect(expected);
    }
    let watch = Duration::from_secs(WATCH_SECONDS.into());
    given_up(&mut events, watch + WATCH_GRACE).await;
}

async fn given_up(events: &mut mpsc::Receiver<NodeEvent>, longest: Duration) {
    tokio::time::pause();
    let event = tokio::time::timeout(longest * 2, events.recv()).await;
    tokio::time::resume();
    let failing = matches!(event, Ok(Some(NodeEvent::Failing { .. })));
    assert!(failing, "{event:?}");
}

#[tokio::test]
async fn ends_when_cancelled() {
    let (cluster, _requests) = fake::serve(vec![list(&[], "10", "")]).await;
    let cancel = CancellationToken::new();
    let mut events = cluster.watch_nodes(cancel.clone());
    assert_eq!(events.recv().await, Some(NodeEvent::Restarted));
    assert_eq!(events.recv().await, Some(NodeEvent::Listed));
    cancel.cancel();
    assert_eq!(events.recv().await, None);
}

#[tokio::test]
async fn ends_when_nobody_listens() {
    let (cluster, mut requests) = fake::serve(vec![list(&[], "10", "")]).await;
    let cancel = CancellationToken::new();
    drop(cluster.watch_nodes(cancel));
    drop(cluster);
    requests.recv().await.expect("one list");
    // The server keeps a sender of its own, so only the absence of requests shows the end.
    assert!(requests.try_recv().is_err());
}

#[test]
fn an_error_of_the_connection_is_told_without_the_name_of_its_type() {
    let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
    match WatchEnd::failed(kube::Error::Service(Box::new(refused))) {
        WatchEnd::Failed(text, false) => assert_eq!(text, "connection refused"),
        _ => panic!("another stop"),
    }
}
