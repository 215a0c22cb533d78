//! Page in a real browser.
//!
//! `GPUWARDEN_SCREENSHOTS=DIR` saves screenshots for inspection, as PNG in base64 (decode with
//! `base64 -d`).

use std::path::PathBuf;
use std::sync::Arc;

use contract::HealthEvent;
use contract::device::ConditionStatus;
use devices::board::{Own, Said};
use diagnosis::gpu::{Gpu, Inventory};
use fleet::view::{BrakeView, ClusterView, FaultView, FleetView, LimitView};
use gpuwarden_console::api::{LeadershipView, Role};
use jiff::{SignedDuration, Timestamp};
use model::journal::{EntryKind, JournalEntry};
use model::proposal::Proposal;
use runtime::sources::SourceState;
use serde_json::json;
use store::Journal as _;
use testkit::components::Component;

use crate::browser::Browser;
use crate::server::{Server, xid};

const MESSAGE: &str = "NVRM: Xid (PCI:0000:b3:00): 79, pid='<unknown>', name=<unknown>, GPU has \
                       fallen off the bus.";
const HOSTILE: &str =
    "<script>document.title='owned'</script><img src=x onerror=alert(1)> \u{202e}";
const HOSTILE_NODE: &str = "<b>evil</b>\"'&node";

async fn picture(browser: &mut Browser, name: &str) {
    if let Some(dir) = std::env::var_os("GPUWARDEN_SCREENSHOTS") {
        browser
            .screenshot(&PathBuf::from(dir).join(format!("{name}.png.base64")))
            .await;
    }
}

fn has(text: &str) -> String {
    format!("document.body.innerText.includes({})", json!(text))
}

/// Shows two nodes: one quarantined in a cluster, with its timeline, and one with hostile
/// texts.
async fn two_nodes(server: &Server) {
    let now = Timestamp::now();
    let ago = |seconds| now - SignedDuration::from_secs(seconds);
    let ecc = HealthEvent {
        recommended_action: 2,
        ..xid(
            "gpu-a-01",
            "48",
            "NVRM: Xid (PCI:0000:b3:00): 48, pid=4711, name=python3, DBE",
            ago(95),
        )
    };
    let in_rack = |mut event: HealthEvent| {
        let rack = "topology.kubernetes.io/rack".to_owned();
        event.metadata.insert(rack, "r1".to_owned());
        event
    };
    let mut hostile = in_rack(xid(HOSTILE_NODE, "<i>31</i>", HOSTILE, ago(40)));
    hostile.is_fatal = false;
    let repeats = (0..12).map(|n| xid("gpu-a-01", "79", MESSAGE, ago(60 - n)));
    let events = [in_rack(xid("gpu-a-01", "79", MESSAGE, ago(90))), ecc]
        .into_iter()
        .chain(repeats);
    server.take(events.chain([hostile]).collect()).await;
    let entry = |milliseconds: i64, kind, text: &str, detail| JournalEntry {
        at: now + SignedDuration::from_millis(milliseconds),
        node: "gpu-a-01".into(),
        session: Some("0123456789abcdef01234567".into()),
        kind,
        text: text.into(),
        detail,
    };
    let journal = vec![
        entry(
            3,
            EntryKind::Rules,
            "SysLogsXIDError 79 on PCI 0000:b3:00: rule set 'fatal-fault' matches",
            json!(null),
        ),
        entry(
            3,
            EntryKind::Decision,
            "quarantine: cordon, set 4 labels, set 3 annotations",
            json!({"unschedulable": true}),
        ),
        entry(
            4,
            EntryKind::Call,
            "PATCH /api/v1/nodes/gpu-a-01",
            json!([{"op": "test", "path": "/spec/unschedulable", "value": null}]),
        ),
        entry(9, EntryKind::Answer, "200 OK in 5 ms", json!(null)),
        entry(
            11,
            EntryKind::Session,
            "quarantining -> quarantined: seen on the node",
            json!(null),
        ),
    ];
    server.store.journal(&journal).await.unwrap();
    server.kernel_log.update(now, |status| {
        status.records = 48_211;
        status.faults = 14;
        status.last_record_at = Some(now);
    });
    let connector = server
        .sources
        .add("connector", "/var/run/nvsentinel.sock", now);
    connector.update(now, |status| {
        status.state = SourceState::Following;
        status.records = 1;
    });
    server.quarantine("gpu-a-01");
    lost_gpu(server);
    server.fleet.send_modify(|view| {
        let view = Arc::make_mut(view);
        let node = view.nodes.first_mut().unwrap();
        node.notices = vec![FaultView {
            code: "13".into(),
            ..node.faults[0].clone()
        }];
        let quarantined = view.nodes.last_mut().unwrap();
        quarantined.session.as_mut().unwrap().proposal = Some(Proposal {
            since: now,
            actions: ["RESTART_BM".to_owned()].into(),
            approved: None,
        });
        view.cluster = Some(ClusterView {
            server: "https://10.0.0.1:6443".into(),
            connected: true,
            error: None,
            nodes: 2,
        });
        view.brake = Some(BrakeView {
            enabled: true,
            state: "TRIPPED".into(),
            limits: vec![LimitView {
                limit: "20%".into(),
                of_which: "GPU nodes".into(),
                used: 1,
                allowed: 1,
                of: 2,
                by: vec!["gpu-a-01".into()],
            }],
            unknown: None,
            held: 1,
            paused: Some(format!("paused by alice: {HOSTILE}")),
            notes: vec!["to go on: kubectl patch".into()],
        });
    });
}

/// Shows a healthy GPU and a lost one.
fn lost_gpu(server: &Server) {
    let gpu = |index: u32| Gpu {
        index,
        uuid: format!("GPU-{index}"),
        product: "NVIDIA H100".into(),
        ..Gpu::default()
    };
    server.devices.set_inventory(&Inventory {
        gpus: vec![gpu(0), gpu(1)],
        ..Inventory::default()
    });
    for (gpu, status, reason, message) in [
        ("GPU-0", ConditionStatus::True, "Fine", ""),
        ("GPU-1", ConditionStatus::False, "GPULost", "it is gone"),
    ] {
        let (reason, message) = (reason.into(), message.into());
        let said = Said {
            status,
            reason,
            message,
        };
        server.devices.set_condition(Own::Nvml, gpu, said).unwrap();
    }
}

#[tokio::test]
async fn the_page_shows_the_state_and_hostile_text_as_text() {
    let Some(program) = testkit::require(Component::Chromium) else {
        return;
    };
    let server = Server::start().await;
    two_nodes(&server).await;
    let mut browser = Browser::start(&program).await;
    browser.open(&server.url("/")).await;
    browser
        .wait_until(&has("quarantining -> quarantined: seen on the node"))
        .await;
    for text in [
        "gpu-a-01 is out of service",
        "1 of 1 out of service (20% of 2 GPU nodes)",
        "The circuit breaker is TRIPPED",
        "New quarantines are paused by alice",
        "1 node held back from quarantine",
        "SysLogsXIDError 48 on PCI 0000:b3:00",
        "4 faults on 2 nodes",
        "1 node awaits an approval: gpuwarden approve",
        "to go on: kubectl patch",
        "quarantined",
        "cordoned",
        "XID 79",
        "The GPU no longer answers on PCI Express",
        "restart the machine (RESTART_BM)",
        "... and 12 more until",
        "the recovery of its faults, or a release by hand",
        "gpuwarden inject recovery --node-name gpu-a-01 --code 79 --pci 0000:b3:00",
        "kubectl uncordon gpu-a-01",
        "Notices",
        "GPUs of this machine",
        "NVIDIA H100",
        "NVMLReady GPULost: it is gone",
        "XID 13",
        "https://10.0.0.1:6443",
        "48211 records",
        "/var/lib/gpuwarden",
        "fatal-fault",
        MESSAGE,
        HOSTILE,
        HOSTILE_NODE,
    ] {
        assert_eq!(browser.evaluate(&has(text)).await, true, "{text}");
    }
    // Opens the timeline of the other node by its link.
    let click = "[...document.querySelectorAll('#nodes a')]
        .find((link) => link.textContent.includes('evil')).click()";
    browser.evaluate(click).await;
    browser
        .wait_until(&format!(
            "document.getElementById('timeline-title').textContent === {}",
            json!(format!("Timeline of {HOSTILE_NODE}"))
        ))
        .await;
    browser
        .wait_until(&format!(
            "document.getElementById('timeline').innerText.includes({})",
            json!(HOSTILE.trim_end())
        ))
        .await;
    // No part of the hostile text became an element.
    let count = "[document.scripts.length, document.images.length,
        document.querySelectorAll('b, i, img, iframe').length]";
    assert_eq!(browser.evaluate(count).await, json!([1, 0, 0]));
    assert_ne!(browser.evaluate("document.title").await, "owned");
    // Tables are tables for screen readers, and the state is announced.
    let semantics = "document.querySelectorAll('table[aria-label] th[scope=col]').length > 0
        && document.querySelector('[role=status][aria-live=polite] #headline') !== null";
    assert_eq!(browser.evaluate(semantics).await, true);
    // Nothing is wider than a phone.
    browser.size(390, 844).await;
    let overflow = "document.documentElement.scrollWidth <= window.innerWidth";
    assert_eq!(browser.evaluate(overflow).await, true);
    assert_eq!(browser.complaints, [""; 0]);

    browser.evaluate("location.hash = 'node=gpu-a-01'").await;
    browser
        .wait_until(&has("quarantining -> quarantined: seen on the node"))
        .await;
    picture(&mut browser, "phone").await;
    browser.size(1280, 900).await;
    for scheme in ["light", "dark"] {
        browser.colours(scheme).await;
        picture(&mut browser, scheme).await;
    }
    browser.close().await;
}

#[tokio::test]
async fn the_page_follows_what_happens_and_says_when_nobody_answers() {
    let Some(program) = testkit::require(Component::Chromium) else {
        return;
    };
    let server = Server::start().await;
    let mut browser = Browser::start(&program).await;
    browser.open(&server.url("/")).await;
    browser.wait_until(&has("gpuwarden inject xid 79")).await;
    browser
        .wait_until("document.getElementById('live').textContent.startsWith('live')")
        .await;
    // The dot is green only in this state.
    let dot = "[document.getElementById('live').className,
        getComputedStyle(document.getElementById('live'), '::before').backgroundColor !==
        (document.getElementById('live').className = '',
         getComputedStyle(document.getElementById('live'), '::before').backgroundColor)]";
    assert_eq!(browser.evaluate(dot).await, json!(["live", true]));
    assert_eq!(
        browser
            .evaluate("document.getElementById('headline').textContent")
            .await,
        "No open fault"
    );
    picture(&mut browser, "empty").await;

    // A fault appears without any interaction. The page's clock is stopped, so it refreshes
    // only on a message.
    let stop = "const { now } = Date; const at = now(); Date.now = () => at; Date.goOn = now;";
    browser.evaluate(stop).await;
    server
        .take(vec![xid("gpu-a-01", "79", MESSAGE, Timestamp::now())])
        .await;
    browser.wait_until(&has("gpu-a-01 has a fatal fault")).await;
    browser.wait_until(&has(MESSAGE)).await;
    browser.evaluate("Date.now = Date.goOn;").await;

    // A journal entry that is written after the state was shown is not missed.
    let entry = JournalEntry {
        at: Timestamp::now(),
        node: "gpu-a-01".into(),
        session: None,
        kind: EntryKind::Attention,
        text: "a person is asked to look".into(),
        detail: json!(null),
    };
    server.store.journal(&[entry]).await.unwrap();
    browser.wait_until(&has("a person is asked to look")).await;

    // A failing source must not be shown as "no fault".
    server.fleet.send_replace(Arc::new(FleetView {
        applied: 2.into(),
        ready: true,
        ..FleetView::default()
    }));
    server.kernel_log.update(Timestamp::now(), |status| {
        status.state = SourceState::Failing;
        status.detail = "cannot open /dev/kmsg: permission denied".into();
    });
    browser
        .wait_until(&has(
            "No open fault known, but gpuwarden does not see everything",
        ))
        .await;
    assert_eq!(browser.complaints, [""; 0]);
    picture(&mut browser, "blind").await;

    server.cancel.cancel();
    server.task.await.unwrap();
    browser
        .wait_until("!document.getElementById('stale').hidden")
        .await;
    assert_eq!(
        browser
            .evaluate(&has(
                "gpuwarden does not answer. What is shown here is as of"
            ))
            .await,
        true
    );
    picture(&mut browser, "gone").await;
    browser.close().await;
}

#[tokio::test]
async fn a_controller_tells_no_story_of_its_host_and_says_who_leads() {
    let Some(program) = testkit::require(Component::Chromium) else {
        return;
    };
    let leadership = LeadershipView {
        lease: "gpuwarden/gpuwarden-controller".into(),
        identity: "c-1_x".into(),
        leader: "c-1_x".into(),
        leads: true,
        error: None,
    };
    let server =
        Server::start_as(Role::Controller, Some(Arc::new(move || leadership.clone()))).await;
    server.fleet.send_replace(Arc::new(FleetView {
        ready: true,
        cluster: Some(ClusterView {
            server: "https://k8s".into(),
            connected: true,
            error: None,
            nodes: 2,
        }),
        ..FleetView::default()
    }));
    let mut browser = Browser::start(&program).await;
    browser.open(&server.url("/")).await;
    browser.wait_until(&has("No node is selected.")).await;
    browser.wait_until(&has("No node has an open fault.")).await;
    browser.wait_until(&has("this process")).await;
    // The controller appears neither as a node nor in a timeline, and no request failed.
    let machine = "document.getElementById('nodes').textContent.includes('gpu-a-01')";
    assert_eq!(browser.evaluate(machine).await, false);
    assert_eq!(browser.evaluate(&has("Timeline of")).await, false);
    assert_eq!(browser.complaints, [""; 0]);
    // A node with a fault has a timeline.
    server
        .take(vec![xid("gpu-b-01", "79", MESSAGE, Timestamp::now())])
        .await;
    browser.wait_until(&has("Timeline of gpu-b-01")).await;
    browser.close().await;
}

#[tokio::test]
async fn the_page_asks_by_itself_where_the_stream_is_refused() {
    let Some(program) = testkit::require(Component::Chromium) else {
        return;
    };
    let server = Server::start().await;
    let mut others = Vec::new();
    for _ in 0..gpuwarden_console::MAX_SUBSCRIBERS {
        others.push(server.stream("/api/v1/stream").await);
    }
    let mut browser = Browser::start(&program).await;
    browser.open(&server.url("/")).await;
    browser
        .wait_until("document.getElementById('live').textContent.startsWith('asking every 5 s')")
        .await;
    server
        .take(vec![xid("gpu-a-01", "79", MESSAGE, Timestamp::now())])
        .await;
    browser.wait_until(&has("gpu-a-01 has a fatal fault")).await;
    browser.close().await;
}
