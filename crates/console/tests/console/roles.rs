//! Console of an agent and of a standby controller: the same status document, and pointers to
//! the process that has the rest.

use std::sync::Arc;

use connector::DeliveryStatus;
use connector::outbox::{Outbox, OutboxLimits};
use gpuwarden_console::api::{LeadershipView, Role};
use gpuwarden_console::{AgentPart, Console, serve};
use jiff::Timestamp;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::server::process;

fn console(role: Role) -> Console {
    Console {
        process: process(role, Timestamp::UNIX_EPOCH),
        sources: Sources::default(),
        places: watch::Sender::default().subscribe(),
        leadership: None,
        controller: None,
        agent: None,
        devices: None,
        metrics: Metrics::default(),
        clock: || Timestamp::UNIX_EPOCH,
    }
}

/// Returns status and text of the response for each path.
async fn answers<const N: usize>(console: Console, paths: [&str; N]) -> [(u16, String); N] {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let cancel = CancellationToken::new();
    let task = tokio::spawn(serve(listener, console, cancel.clone()));
    let mut answers = Vec::new();
    for path in paths {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        answers.push((status, body.to_owned()));
    }
    cancel.cancel();
    // The listener is kept for the next leader.
    assert_eq!(task.await.unwrap().local_addr().unwrap(), address);
    answers.try_into().unwrap()
}

fn document(role: &str, differing: Value) -> Value {
    let mut whole = json!({
        "version": "0.1.0", "nodeName": "gpu-a-01", "role": role, "mode": "observe",
        "startedAt": "1970-01-01T00:00:00Z", "now": "1970-01-01T00:00:00Z",
        "dataDir": "/var/lib/gpuwarden", "socket": "/var/run/nvsentinel.sock",
    });
    let whole_map = whole.as_object_mut().unwrap();
    let Value::Object(differing) = differing else {
        unreachable!()
    };
    whole_map.extend(differing);
    whole
}

#[tokio::test]
async fn an_agent_shows_what_waits_and_where_the_rest_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut console = console(Role::Agent);
    let outbox = Outbox::open(dir.path(), OutboxLimits::default(), &Metrics::default()).unwrap();
    let delivery = watch::Sender::new(DeliveryStatus {
        failing: Some("nobody is there".into()),
        ..DeliveryStatus::default()
    });
    console.agent = Some(AgentPart {
        controller: "https://c:50051".into(),
        outbox,
        delivery: delivery.subscribe(),
    });
    let paths = [
        "/",
        "/healthz",
        "/readyz",
        "/api/v1/status",
        "/api/v1/nodes/n/explain",
        "/page.js",
    ];
    let [page, healthz, readyz, status, elsewhere, unknown] = answers(console, paths).await;
    assert_eq!(
        page,
        (
            200,
            "gpuwarden agent on gpu-a-01, for the controller at https://c:50051\n\n\
             /api/v1/status\n/metrics\n/healthz\n/readyz\n"
                .to_owned()
        )
    );
    assert_eq!(healthz, (200, "ok\n".to_owned()));
    let reason = "the controller at https://c:50051 does not take events, 0 wait: nobody is there";
    assert_eq!(readyz, (503, format!("{reason}\n")));
    let status: Value = serde_json::from_str(&status.1).unwrap();
    for (key, value) in document("agent", json!({"ready": false, "notReady": [reason]}))
        .as_object()
        .unwrap()
    {
        assert_eq!(&status[key], value, "{key}");
    }
    assert_eq!(status["fleet"]["ready"], true);
    assert_eq!(status["delivery"]["controller"], "https://c:50051");
    assert_eq!(elsewhere.0, 404);
    assert!(elsewhere.1.contains("this is an agent"), "{}", elsewhere.1);
    assert_eq!(unknown.0, 404);
    assert!(
        unknown
            .1
            .contains("There are /, /api/v1/status, /metrics, /healthz and /readyz."),
        "{}",
        unknown.1
    );
}

#[tokio::test]
async fn who_stands_by_says_who_leads() {
    let mut console = console(Role::Controller);
    console.leadership = Some(Arc::new(|| LeadershipView {
        lease: "g/c".into(),
        identity: "me".into(),
        leader: "other".into(),
        leads: false,
        error: None,
    }));
    let paths = [
        "/",
        "/healthz",
        "/readyz",
        "/api/v1/status",
        "/api/v1/events?limit=none",
    ];
    let [page, healthz, readyz, status, elsewhere] = answers(console, paths).await;
    assert!(
        page.1
            .starts_with("gpuwarden controller on gpu-a-01\nstandby: other leads\n\n/api"),
        "{}",
        page.1
    );
    assert_eq!(healthz, (200, "ok\n".to_owned()));
    assert_eq!(readyz, (503, "standby: other leads\n".to_owned()));
    let status: Value = serde_json::from_str(&status.1).unwrap();
    let expected = json!({"ready": false, "notReady": ["standby: other leads"], "sources": []});
    for (key, value) in document("controller", expected).as_object().unwrap() {
        assert_eq!(&status[key], value, "{key}");
    }
    assert_eq!(status["leadership"]["leader"], "other");
    assert_eq!(elsewhere.0, 404);
    assert!(
        elsewhere
            .1
            .contains("this controller does not act, standby: other leads"),
        "{}",
        elsewhere.1
    );
}
