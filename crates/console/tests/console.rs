//! Console over a real TCP port and a real store, and its page in a real browser.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "console/browser.rs"]
mod browser;
#[path = "console/hostile.rs"]
mod hostile;
#[path = "console/ledger.rs"]
mod ledger;
#[path = "console/page.rs"]
mod page;
#[path = "console/roles.rs"]
mod roles;
#[path = "console/rules.rs"]
mod rules;
#[path = "console/server.rs"]
mod server;

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::HealthEvent;
use fleet::view::{ClusterView, FleetView};
use gpuwarden_console::api::{ErrorBody, EventView, Explain, StatusView, TimelineKind};
use gpuwarden_console::{MAX_FOLLOWERS, MAX_SUBSCRIBERS};
use jiff::{SignedDuration, Timestamp};
use model::journal::{EntryKind, JournalEntry};
use prometheus_client::metrics::counter::Counter;
use runtime::metrics::{Description, Kind};
use runtime::sources::{STUCK_AFTER, SourceState};
use serde_json::Value;
use server::{ENOUGH, Server, xid};
use store::{Journal as _, Upkeep as _};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use trial::why_not::WhyNot;

const HOSTILE: &str = "NVRM: Xid (PCI:0000:b3:00): 79, name=<script>alert(1)</script>, GPU lost";

/// Returns `count` XIDs of a node, each at another second.
fn xids(node: &str, count: i64) -> Vec<HealthEvent> {
    let now = Timestamp::now();
    (0..count)
        .map(|n| {
            let at = now - SignedDuration::from_secs(count - n);
            xid(
                node,
                "79",
                &format!("NVRM: Xid (PCI:0000:b3:00): 79, pid={n}"),
                at,
            )
        })
        .collect()
}

fn seqs(events: &[EventView]) -> Vec<u64> {
    events.iter().map(|event| event.seq.number()).collect()
}

#[tokio::test]
async fn status_says_all_that_is_known() {
    let server = Server::start().await;
    server
        .take(vec![xid("gpu-a-01", "79", HOSTILE, Timestamp::now())])
        .await;
    server
        .kernel_log
        .update(Timestamp::now(), |status| status.records = 17);
    let status: StatusView = server.get("/api/v1/status").await.json();
    assert_eq!(status.process.node_name, "gpu-a-01");
    assert_eq!(status.process.mode.name(), "observe");
    assert_eq!(status.policy.rule_sets, ["fatal-fault"]);
    assert_eq!(status.fleet, **server.fleet.borrow());
    assert_eq!(status.fleet.nodes[0].faults[0].message, HOSTILE);
    assert_eq!(
        status.xids["79"].mnemonic,
        "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS"
    );
    assert_eq!(status.sources[0].records, 17);
    assert_eq!((status.store.events, status.store.latest), (1, 1.into()));
    assert!(status.store.bytes > 0 && status.store.error.is_none());
    assert!(status.ready && status.not_ready.is_empty());

    let raw: Value = server.get("/api/v1/status").await.json();
    for field in ["nodeName", "startedAt", "dataDir", "notReady"] {
        assert!(!raw[field].is_null(), "{field} in {raw}");
    }
}

#[tokio::test]
async fn status_waits_until_the_newest_event_shows_but_not_for_ever() {
    let server = Server::start().await;
    let at = Timestamp::now();
    server.take(xids("gpu-a-01", 1)).await;
    // The event is stored, but the controller has not published the state yet.
    let shown = server.fleet.send_replace(Arc::new(FleetView::default()));
    let asked = server.get("/api/v1/status");
    let published = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        server.fleet.send_replace(shown);
    };
    let (answer, ()) = tokio::join!(asked, published);
    let status: StatusView = serde_json::from_str(&answer.text).unwrap();
    assert_eq!(status.fleet.nodes.len(), 1, "{answer:?}");

    server.fleet.send_replace(Arc::new(FleetView::default()));
    let answer = server.get("/api/v1/status").await;
    let status: StatusView = serde_json::from_str(&answer.text).unwrap();
    assert!(status.fleet.nodes.is_empty() && status.now > at);
}

#[tokio::test]
async fn every_answer_forbids_what_the_page_does_not_need() {
    let server = Server::start().await;
    for (path, content_type) in [
        ("/", "text/html; charset=utf-8"),
        ("/style.css", "text/css; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
        ("/view.js", "text/javascript; charset=utf-8"),
        ("/dom.js", "text/javascript; charset=utf-8"),
        ("/icon.svg", "image/svg+xml"),
        ("/api/v1/status", "application/json"),
        ("/api/v1/events", "application/json"),
        ("/nothing/here", "application/json"),
        (
            "/metrics",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
    ] {
        let answer = server.get(path).await;
        assert_eq!(answer.header("content-type"), content_type, "{path}");
        assert_eq!(answer.header("x-content-type-options"), "nosniff", "{path}");
        assert_eq!(answer.header("referrer-policy"), "no-referrer", "{path}");
        assert_eq!(answer.header("cache-control"), "no-store", "{path}");
        let policy = answer.header("content-security-policy");
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self';"),
            "{path}: {policy}"
        );
        assert!(!policy.contains("unsafe"), "{path}: {policy}");
    }
}

#[tokio::test]
async fn what_is_not_served_is_refused_with_a_reason_and_a_hint() {
    let server = Server::start().await;
    let long = format!("/api/v1/nodes/{}/explain", "x".repeat(300));
    for (method, path, host, status, named) in [
        ("GET", "/nothing", "localhost", 404, "nothing at this path"),
        (
            "GET",
            "/api/v1/nodes/a",
            "localhost",
            404,
            "nothing at this path",
        ),
        (
            "GET",
            "/api/v1/nodes/%ff/explain",
            "localhost",
            400,
            "UTF-8",
        ),
        ("GET", &long, "localhost", 400, "300 bytes"),
        ("POST", "/api/v1/status", "localhost", 405, "POST"),
        ("DELETE", "/api/v1/events", "localhost", 405, "DELETE"),
        (
            "GET",
            "/api/v1/status",
            "attacker.example",
            403,
            "attacker.example",
        ),
        ("GET", "/", "attacker.example:80", 403, "attacker.example"),
        (
            "GET",
            "/metrics",
            "attacker.example",
            403,
            "attacker.example",
        ),
        (
            "GET",
            "/api/v1/events?limit=x",
            "localhost",
            400,
            "\"limit\" is \"x\"",
        ),
        (
            "GET",
            "/api/v1/events?limit=0",
            "localhost",
            400,
            "\"limit\" is \"0\"",
        ),
        (
            "GET",
            "/api/v1/events?limit=10001",
            "localhost",
            400,
            "\"limit\" is \"10001\"",
        ),
        (
            "GET",
            "/api/v1/events?before=-1",
            "localhost",
            400,
            "\"before\" is \"-1\"",
        ),
        (
            "GET",
            "/api/v1/events?after=1.5",
            "localhost",
            400,
            "\"after\" is \"1.5\"",
        ),
        (
            "GET",
            "/api/v1/events?follow=1",
            "localhost",
            400,
            "\"follow\" is \"1\"",
        ),
        ("GET", "/api/v1/events?node=", "localhost", 400, "\"node\""),
        (
            "GET",
            "/api/v1/events?nodes=a",
            "localhost",
            400,
            "\"nodes\" (value \"a\")",
        ),
        (
            "GET",
            "/api/v1/events?follow=true&before=7",
            "localhost",
            400,
            "\"before\" is \"7\"",
        ),
    ] {
        let answer = server.read(server.send(method, path, host).await).await;
        assert_eq!(
            answer.status, status,
            "{method} {path} {host}: {}",
            answer.text
        );
        let body: ErrorBody = answer.json();
        assert!(body.error.contains(named), "{path}: {}", body.error);
        assert!(!body.hint.is_empty());
        if status == 405 {
            assert_eq!(answer.header("allow"), "GET, HEAD");
        }
    }
    let head = server
        .read(server.send("HEAD", "/api/v1/status", "[::1]:9000").await)
        .await;
    assert_eq!((head.status.as_u16(), head.text.as_str()), (200, ""));
}

#[tokio::test]
async fn events_are_listed_newest_first_over_many_pages() {
    let server = Server::start().await;
    server.take(xids("gpu-a-01", 250)).await;
    server.take(xids("gpu-a-02", 3)).await;
    let events = async |query: &str| -> Vec<EventView> {
        server.get(&format!("/api/v1/events{query}")).await.json()
    };
    assert_eq!(
        seqs(&events("").await),
        (154..=253).rev().collect::<Vec<_>>()
    );
    assert_eq!(
        seqs(&events("?limit=10000").await),
        (1..=253).rev().collect::<Vec<_>>()
    );
    assert_eq!(
        seqs(&events("?limit=200").await),
        (54..=253).rev().collect::<Vec<_>>()
    );
    assert_eq!(seqs(&events("?node=gpu-a-02").await), [253, 252, 251]);
    assert_eq!(seqs(&events("?node=gpu-a-01&limit=2").await), [250, 249]);
    assert_eq!(seqs(&events("?before=4&after=1").await), [3, 2]);
    assert_eq!(seqs(&events("?node=nobody").await), [0; 0]);
    let newest = &events("?limit=1").await[0];
    assert_eq!(newest.event["nodeName"], "gpu-a-02");
    assert_eq!(newest.event["recommendedAction"], "RESTART_BM");
    contract::json::from_value(newest.event.clone()).unwrap();
}

#[tokio::test]
async fn followed_events_come_once_each_and_in_order() {
    let server = Server::start().await;
    server.take(xids("gpu-a-01", 230)).await;
    let mut all = server.stream("/api/v1/events?follow=true&after=0").await;
    let mut newest = server.stream("/api/v1/events?follow=true&limit=2").await;
    let mut of_b = server.stream("/api/v1/events?follow=true&node=gpu-b").await;
    let next = async |lines: &mut server::Lines| -> EventView {
        serde_json::from_str(&lines.next().await.unwrap()).unwrap()
    };
    for seq in 1_u64..=230 {
        assert_eq!(next(&mut all).await.seq, seq.into());
    }
    assert_eq!(
        (next(&mut newest).await.seq, next(&mut newest).await.seq),
        (229.into(), 230.into())
    );
    // New events reach all matching followers.
    server.take(xids("gpu-b", 1)).await;
    server.take(xids("gpu-c", 1)).await;
    server.take(xids("gpu-b", 2)).await;
    for seq in 231_u64..=234 {
        assert_eq!(next(&mut all).await.seq, seq.into());
        assert_eq!(next(&mut newest).await.seq, seq.into());
    }
    let mut seen = Vec::new();
    for _ in 0..3 {
        let event = next(&mut of_b).await;
        assert_eq!(event.event["nodeName"], "gpu-b");
        seen.push(event.seq.number());
    }
    assert_eq!(seen, [231, 233, 234]);
    // The streams end with the process.
    server.cancel.cancel();
    tokio::time::timeout(ENOUGH, server.task)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(all.next().await, None);
}

#[tokio::test]
async fn a_follower_is_told_when_the_store_fails() {
    let server = Server::start().await;
    server.take(xids("gpu-a-01", 1)).await;
    let mut lines = server.stream("/api/v1/events?follow=true&after=0").await;
    lines.next().await.unwrap();
    server.store.close().await;
    // Closing the store either ends the feed or yields an error.
    if let Some(line) = lines.next().await {
        let body: ErrorBody = serde_json::from_str(&line).unwrap();
        assert!(body.error.contains("closed"), "{}", body.error);
        assert_eq!(lines.next().await, None);
    }
    let answer = server.get("/api/v1/events").await;
    assert_eq!(answer.status, 503);
    assert!(answer.json::<ErrorBody>().error.contains("closed"));
}

#[tokio::test]
async fn changes_are_told_at_most_five_times_a_second() {
    let server = Server::start().await;
    let mut lines = server.stream("/api/v1/stream").await;
    let next = async |lines: &mut server::Lines| {
        assert_eq!(lines.next().await.unwrap(), "event: changed");
        let data = lines.next().await.unwrap();
        data.strip_prefix("data: ").unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(next(&mut lines).await, 0, "the first comes at once");
    // A thousand changes are a few messages, and the last one has the latest state.
    let start = Instant::now();
    let mut told = 0;
    for applied in 1_u64..=1000 {
        let view = FleetView {
            applied: applied.into(),
            ready: true,
            ..FleetView::default()
        };
        server.fleet.send_replace(Arc::new(view));
        tokio::task::yield_now().await;
    }
    while next(&mut lines).await < 1000 {
        told += 1;
    }
    let most = start.elapsed().as_millis() / 200 + 2;
    assert!(told <= most, "{told} events, at most {most} expected");
    // A change of a source is sent, a heartbeat alone is not.
    server.kernel_log.beat(Timestamp::now());
    server.kernel_log.update(Timestamp::now(), |status| {
        status.state = SourceState::Failing;
    });
    assert_eq!(next(&mut lines).await, 1000);
    server.cancel.cancel();
    assert_eq!(lines.next().await, None);
}

#[tokio::test]
async fn streams_are_counted_and_a_place_that_is_left_is_free_again() {
    let server = Server::start().await;
    for (path, most) in [
        ("/api/v1/stream", MAX_SUBSCRIBERS),
        ("/api/v1/events?follow=true", MAX_FOLLOWERS),
    ] {
        let mut open = Vec::new();
        for _ in 0..most {
            open.push(server.stream(path).await);
        }
        let refused = server.get(path).await;
        assert_eq!(refused.status, 503, "{path}");
        assert!(
            refused
                .json::<ErrorBody>()
                .error
                .contains(&most.to_string())
        );
        assert_eq!(
            server.get("/healthz").await.status,
            200,
            "other requests are served"
        );
        drop(open.pop());
        testkit::wait_for("a free place", ENOUGH, async || {
            let response = server.send("GET", path, "localhost").await;
            if response.status() == 200 {
                Ok(())
            } else {
                Err(response.status())
            }
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn explain_tells_the_story_of_a_node() {
    use TimelineKind::{Decoded, Event, Journal, Line};
    let server = Server::start().await;
    let node = "<b>evil</b>/\"n\"";
    server
        .take(vec![xid(node, "79", HOSTILE, Timestamp::now())])
        .await;
    let entry = JournalEntry {
        at: Timestamp::now() + SignedDuration::from_millis(1),
        node: node.into(),
        session: Some("s1".into()),
        kind: EntryKind::Decision,
        text: "cordon".into(),
        detail: Value::Null,
    };
    server.store.journal(&[entry]).await.unwrap();
    let path = "/api/v1/nodes/%3Cb%3Eevil%3C%2Fb%3E%2F%22n%22/explain";
    let story: Explain = server.get(path).await.json();
    assert_eq!(story.node, node);
    let kinds: Vec<TimelineKind> = story.entries.iter().map(|entry| entry.kind).collect();
    assert_eq!(kinds, [Line, Decoded, Event, Journal(EntryKind::Decision)]);
    assert_eq!(story.entries[0].text, HOSTILE);
    assert!(
        story.awaits.contains("the recovery of SysLogsXIDError 79"),
        "{}",
        story.awaits
    );
    assert!(story.how_to_clear[0].contains("--code 79 --pci 0000:b3:00"));
    assert_eq!(story.status.unwrap().faults.len(), 1);

    let story: Explain = server.get("/api/v1/nodes/gpu-b-01/explain").await.json();
    assert!(story.entries.is_empty() && story.status.is_none());
    assert_eq!(story.in_cluster, Some(true));
    assert_eq!(story.awaits, "nothing: no fault is open on gpu-b-01");
}

#[tokio::test]
async fn a_node_that_nobody_knows_is_not_found_and_the_nearest_are_named() {
    let server = Server::start().await;
    for route in ["explain", "why-not"] {
        let answer = server.get(&format!("/api/v1/nodes/gpu-b-02/{route}")).await;
        assert_eq!(answer.status, 404);
        let body: ErrorBody = answer.json();
        assert!(body.error.contains("\"gpu-b-02\""), "{}", body.error);
        assert_eq!(body.hint, "Did you mean gpu-b-01?");
    }
    let why: WhyNot = server.get("/api/v1/nodes/gpu-b-01/why-not").await.json();
    assert!(why.known && why.answer.contains("no fault of it is open"));
    // Events without an open fault make a node known.
    let mut healthy = xid("gpu-b-02", "79", "", Timestamp::now());
    healthy.is_healthy = true;
    server.take(vec![healthy]).await;
    for route in ["explain", "why-not"] {
        let answer = server.get(&format!("/api/v1/nodes/gpu-b-02/{route}")).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
}

#[tokio::test]
async fn a_fault_older_than_the_shown_events_is_still_told() {
    let server = Server::start().await;
    let old = Timestamp::now() - SignedDuration::from_hours(1);
    server.take(vec![xid("n", "48", "the first", old)]).await;
    server.take(xids("n", 1000)).await;
    let story: Explain = server.get("/api/v1/nodes/n/explain").await.json();
    assert_eq!(story.entries[0].text, "the first");
    assert!(story.entries.len() < 20, "{}", story.entries.len());
}

#[tokio::test]
async fn ready_means_that_everything_is_seen() {
    let server = Server::start().await;
    let ready = async || {
        let answer = server.get("/readyz").await;
        let status: StatusView = server.get("/api/v1/status").await.json();
        assert_eq!(status.ready, answer.status == 200);
        assert_eq!(
            server.get("/healthz").await.text,
            "ok\n",
            "not ready is not dead"
        );
        (answer.status.as_u16(), answer.text)
    };
    assert_eq!(ready().await, (200, "ready\n".to_owned()));

    let now = Timestamp::now();
    for (silent_for, state, named) in [
        (
            2 * STUCK_AFTER,
            SourceState::Following,
            "source kernel-log is stuck",
        ),
        (
            Duration::ZERO,
            SourceState::Failing,
            "source kernel-log fails: /dev/kmsg",
        ),
        (
            Duration::ZERO,
            SourceState::CatchingUp,
            "source kernel-log is still catching up",
        ),
    ] {
        server.kernel_log.update(now, |status| status.state = state);
        server.pass(silent_for);
        let (status, text) = ready().await;
        assert!(status == 503 && text.contains(named), "{text}");
    }
    server
        .kernel_log
        .update(now, |status| status.state = SourceState::Ended);
    server.pass(2 * STUCK_AFTER);
    assert_eq!(ready().await.0, 200);

    let cluster = |connected| ClusterView {
        server: "https://10.0.0.1:6443".into(),
        connected,
        error: Some("connection refused".into()),
        nodes: 0,
    };
    for (view, named) in [
        (
            FleetView::default(),
            Some("not all events stored before the start are recorded"),
        ),
        (
            FleetView {
                ready: true,
                troubles: vec!["the stored events cannot be read".into()],
                ..FleetView::default()
            },
            Some("the stored events cannot be read"),
        ),
        (
            FleetView {
                ready: true,
                cluster: Some(cluster(false)),
                ..FleetView::default()
            },
            Some("no connection to the cluster at https://10.0.0.1:6443: connection refused"),
        ),
        (
            FleetView {
                ready: true,
                cluster: Some(cluster(true)),
                ..FleetView::default()
            },
            None,
        ),
    ] {
        server.fleet.send_replace(Arc::new(view));
        let (status, text) = ready().await;
        assert_eq!(status == 200, named.is_none(), "{text}");
        assert!(text.contains(named.unwrap_or("ready")), "{text}");
    }
}

#[tokio::test]
async fn ready_also_means_that_its_parts_are_alive() {
    let mut server = Server::start().await;
    // The publisher of the fleet's state is gone.
    let (other, _) = tokio::sync::watch::channel(Arc::new(FleetView::default()));
    drop(std::mem::replace(&mut server.fleet, other));
    let answer = server.get("/readyz").await;
    assert!(
        answer.status == 503 && answer.text.contains("has ended"),
        "{}",
        answer.text
    );
    assert_eq!(server.get("/healthz").await.status, 200);

    server.store.close().await;
    let answer = server.get("/readyz").await;
    assert!(
        answer.text.contains("the event store is closed"),
        "{}",
        answer.text
    );
    assert_eq!(server.get("/healthz").await.status, 503);
    let status: StatusView = server.get("/api/v1/status").await.json();
    assert!(status.store.error.unwrap().contains("closed"));
}

#[tokio::test]
async fn a_writer_that_hangs_is_not_alive() {
    let server = Server::start().await;
    let lock = rusqlite::Connection::open(server.dir().join("events.db")).unwrap();
    lock.execute_batch("begin immediate").unwrap();
    let answer = server.get("/readyz").await;
    assert!(
        answer.status == 503 && answer.text.contains("event store"),
        "{}",
        answer.text
    );
    lock.execute_batch("rollback").unwrap();
    testkit::wait_for("the writer", ENOUGH, async || {
        let answer = server.get("/readyz").await;
        if answer.status == 200 {
            Ok(())
        } else {
            Err(answer.text)
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn metrics_are_those_that_are_registered() {
    let server = Server::start().await;
    let events = Description::new(Kind::Counter, "events", &[], "Events");
    let counter: Counter = server.metrics.add(&events, Counter::default());
    counter.inc();
    let text = server.get("/metrics").await.text;
    assert!(
        text.contains("\nevents_total 1\n") && text.ends_with("# EOF\n"),
        "{text}"
    );
}

#[tokio::test]
async fn the_end_waits_for_nobody() {
    let server = Server::start().await;
    // One connection sends nothing, one stops within its head, and one is idle.
    let _silent = TcpStream::connect(server.address).await.unwrap();
    let mut half = TcpStream::connect(server.address).await.unwrap();
    half.write_all(b"GET / HTTP/1.1\r\nHo").await.unwrap();
    let mut lines = server.stream("/api/v1/stream").await;
    lines.next().await.unwrap();
    assert_eq!(server.get("/healthz").await.status, 200);
    server.cancel.cancel();
    tokio::time::timeout(ENOUGH, server.task)
        .await
        .unwrap()
        .unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}
