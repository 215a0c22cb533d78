//! Clients that exhaust resources: many connections, and responses that they do not read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use contract::HealthEvent;
use jiff::Timestamp;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::server::{ENOUGH, Server, xid};

/// Most bytes of held responses: `MAX_HELD_BYTES` of `console/src/http/room.rs`.
const HELD: u64 = 32 * 1024 * 1024;

/// Foreign connections: above the connection limit and its reserve.
const OTHERS: usize = 350;
/// Longest wait of a probe: shorter than the idle timeout of a connection.
const PATIENCE: Duration = Duration::from_secs(8);

const EVENTS: &[u8] = b"GET /api/v1/events?limit=10000 HTTP/1.1\r\nHost: localhost\r\n\r\n";
const FOLLOW: &[u8] = b"GET /api/v1/events?follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n";
const STREAM: &[u8] = b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n";
const STATUS: &[u8] = b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n";
const HALF: &[u8] = b"GET /healthz HTTP/1.1\r\nHo";

/// Returns an event of about a megabyte.
fn large(number: usize) -> HealthEvent {
    let value = "x".repeat(4096);
    let pairs = (0..128).map(|key| (format!("{key:04096}"), value.clone()));
    HealthEvent {
        metadata: pairs.collect(),
        ..xid("gpu-a-01", "79", &format!("{number}"), Timestamp::now())
    }
}

async fn open(server: &Server, request: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(request).await.unwrap();
    stream
}

async fn held(server: &Server) -> u64 {
    let text = server.get("/metrics").await.text;
    let mut lines = text.lines();
    let held = lines.find_map(|line| line.strip_prefix("gpuwarden_http_held_bytes "));
    held.unwrap().parse().unwrap()
}

#[tokio::test]
async fn readers_that_do_not_read_hold_what_they_are_allowed_and_no_more() {
    let server = Server::start().await;
    for batch in 0..5 {
        let events = (0..10).map(|number| large(batch * 10 + number));
        server.store(events.collect()).await;
    }
    let requests = [
        EVENTS,
        EVENTS,
        EVENTS,
        EVENTS,
        EVENTS,
        b"GET /api/v1/events?limit=10000&follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /api/v1/nodes/gpu-a-01/explain HTTP/1.1\r\nHost: localhost\r\n\r\n",
        STATUS,
    ];
    let mut readers = Vec::new();
    for request in requests {
        readers.push(open(&server, request).await);
    }
    // Each of the first clients holds a page that it does not read.
    let most = AtomicU64::new(0);
    testkit::wait_for("pages that are held", ENOUGH, async || {
        let held = held(&server).await;
        most.fetch_max(held, Ordering::Relaxed);
        if held >= 5 * 1024 * 1024 {
            Ok(())
        } else {
            Err(held)
        }
    })
    .await
    .unwrap();
    let most = most.into_inner();
    assert!(most <= HELD, "{most}");
    // A client that reads gets its whole response meanwhile.
    let answer = server.get("/api/v1/events?limit=12").await;
    assert!(answer.text.len() > 12 * 1024 * 1024 && answer.text.ends_with(']'));
    assert!(held(&server).await <= HELD);
    drop(readers);
    testkit::wait_for("nothing to be held", ENOUGH, async || {
        match held(&server).await {
            0 => Ok(()),
            held => Err(held),
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn probes_and_metrics_answer_whatever_others_do_with_their_connections() {
    runtime::descriptors::raise().unwrap();
    let server = Server::start().await;
    // More than the kernel buffers for a connection.
    let events = (0..500).map(|number| {
        let message = format!("{number}: {}", "x".repeat(16_000));
        xid("gpu-a-01", "79", &message, Timestamp::now())
    });
    server.store(events.collect()).await;
    for request in [EVENTS, FOLLOW, STREAM, STATUS, HALF, b""] {
        let mut others = Vec::new();
        for _ in 0..OTHERS {
            // The server may have closed a connection to make room for another.
            let mut stream = TcpStream::connect(server.address).await.unwrap();
            drop(stream.write_all(request).await);
            others.push(stream);
        }
        for path in ["/healthz", "/readyz", "/metrics"] {
            let beside = String::from_utf8_lossy(request);
            let answer = tokio::time::timeout(PATIENCE, server.get(path)).await;
            let answer = answer.unwrap_or_else(|_| panic!("{path} beside {beside}"));
            assert_eq!(answer.status, 200, "{path} beside {beside}");
        }
    }
}
