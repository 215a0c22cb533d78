//! Reports on nodes: conditions and Kubernetes Events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use contract::{Entity, HealthEvent};
use k8s_openapi::api::core::v1::{Event, Node};
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Version};

use crate::support::{SOON, Scene, condition, send_to, xid};

/// Returns a condition of another writer.
fn foreign(kind: &str, status: &str, reason: &str) -> Value {
    json!({
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "of another writer",
        "lastHeartbeatTime": "2026-01-01T00:00:00Z",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    })
}

async fn patch_status(nodes: &Api<Node>, name: &str, conditions: Value) -> anyhow::Result<()> {
    let patch = Patch::Strategic(json!({"status": {"conditions": conditions}}));
    nodes
        .patch_status(name, &PatchParams::default(), &patch)
        .await?;
    Ok(())
}

fn memory(node: &str, gpu: &str) -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        is_fatal: true,
        node_name: node.into(),
        recommended_action: 2,
        error_code: vec!["DCGM_FR_FAULTY_MEMORY".into()],
        message: "a page; could not be retired".into(),
        entities_impacted: vec![Entity {
            entity_type: "GPU".into(),
            entity_value: gpu.into(),
        }],
        ..HealthEvent::default()
    }
}

/// Returns the matching requests of the product in the API server's audit log.
fn requests(plane: &ControlPlane, wanted: impl Fn(&Value) -> bool) -> anyhow::Result<usize> {
    let log = std::fs::read_to_string(plane.dir().join("log/audit.json"))?;
    let entries = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let ours = entries.filter(|entry| {
        let agent = entry["userAgent"].as_str().unwrap_or_default();
        agent.starts_with("gpuwarden/") && entry["stage"] == "ResponseComplete" && wanted(entry)
    });
    Ok(ours.count())
}

#[tokio::test]
async fn conditions_come_and_go_beside_others_and_heartbeats_conflict_with_nothing()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    let others = [
        foreign(
            "FrequentKubeletRestart",
            "False",
            "NoFrequentKubeletRestart",
        ),
        // Conditions left by NVSentinel: a check that the product will report on, and one that
        // it will not.
        foreign("GpuMemWatch", "True", "GpuMemWatchIsNotHealthy"),
        foreign("GpuPcieWatch", "True", "GpuPcieWatchIsNotHealthy"),
    ];
    patch_status(&scene.nodes, &scene.node, json!(others)).await?;

    // A kubelet that keeps updating the node's status.
    let stop = Arc::new(AtomicBool::new(false));
    let beating = {
        let (nodes, node, stop) = (scene.nodes.clone(), scene.node.clone(), Arc::clone(&stop));
        tokio::spawn(async move {
            let mut beats = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                let beat =
                    json!([{"type": "Ready", "status": "True", "message": beats.to_string()}]);
                patch_status(&nodes, &node, beat).await?;
                beats += 1;
            }
            anyhow::Ok(beats)
        })
    };

    scene
        .product
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    scene.cordoned().await?;
    let first = scene.condition("SysLogsXIDError", "True").await?;
    assert_eq!(first["reason"], "SysLogsXIDErrorIsNotHealthy");
    let message = first["message"].as_str().unwrap();
    assert!(
        message.starts_with("ErrorCode:79 PCI:0000:b3:00 "),
        "{message}"
    );
    assert!(
        message.ends_with("Recommended Action=RESTART_BM;"),
        "{message}"
    );
    let sum = scene.condition("GPUHealthy", "False").await?;
    assert_eq!(sum["reason"], "SysLogsXIDError");

    // A second fault of the check changes the message, and is not a transition.
    scene
        .product
        .append_kernel_log(&xid(95, "Uncontained ECC error"))?;
    let second = scene
        .node_until("both codes in the message", |node| {
            let found = condition(node, "SysLogsXIDError");
            let text = found["message"].as_str().unwrap_or_default();
            if text.contains("ErrorCode:79") && text.contains("ErrorCode:95") {
                Ok(found.clone())
            } else {
                Err(text.to_owned())
            }
        })
        .await?;
    assert_eq!(second["lastTransitionTime"], first["lastTransitionTime"]);

    // NVSentinel's condition is replaced once the product receives an event of the check.
    send_to(&scene.product, vec![memory(&scene.node, "3")]).await?;
    scene
        .node_until("our text in NVSentinel's condition", |node| {
            let found = condition(node, "GpuMemWatch");
            let ours = "ErrorCode:DCGM_FR_FAULTY_MEMORY GPU:3 a page. could not be retired \
                        Recommended Action=COMPONENT_RESET;";
            if found["message"] == ours {
                Ok(())
            } else {
                Err(found.to_string())
            }
        })
        .await?;

    // `inject` reads the status, which may follow the conditions.
    scene.taken_in(3).await?;
    scene
        .product
        .client(["inject", "recovery"])
        .await?
        .expect(0)?;
    for check in ["SysLogsXIDError", "GpuMemWatch"] {
        let well = scene.condition(check, "False").await?;
        assert_eq!(well["reason"], format!("{check}IsHealthy"));
        assert_eq!(well["message"], "No Health Failures");
    }
    scene.condition("GPUHealthy", "True").await?;
    scene.restored().await?;
    stop.store(true, Ordering::Relaxed);
    let beats = beating.await??;
    assert!(beats > 10, "{beats} heartbeats");

    let node = scene
        .node_until("the node", |node| Ok(node.clone()))
        .await?;
    for before in [&others[0], &others[2]] {
        let kind = before["type"].as_str().unwrap();
        assert_eq!(condition(&node, kind), before, "left alone");
    }
    // The journal is written with a delay.
    let answered = || async {
        let story = scene.story().await.map_err(|error| error.to_string())?;
        let answers = story.into_iter().filter(|(kind, _)| kind == "answer");
        let answers: Vec<String> = answers.map(|(_, text)| text).collect();
        if answers.len() >= 2 {
            Ok(answers)
        } else {
            Err(format!("{answers:?}"))
        }
    };
    let product = &scene.product;
    for answer in product.wait_for("the answers", SOON, answered).await? {
        assert!(
            answer.starts_with("200 OK"),
            "a patch lost against a heartbeat: {answer}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn what_is_no_news_is_not_written() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    let writes = || {
        requests(&plane, |entry| {
            let object = &entry["objectRef"];
            object["resource"] == "nodes"
                && object["subresource"] == "status"
                && object["name"] == scene.node.as_str()
        })
    };
    send_to(&scene.product, vec![memory(&scene.node, "0")]).await?;
    scene.condition("GpuMemWatch", "True").await?;
    scene.condition("GPUHealthy", "False").await?;
    // Repeats, a healthy check, and events with the strategy STORE_ONLY.
    let mut events = 1;
    for round in 0..20_i64 {
        let at = prost_types::Timestamp {
            seconds: 1_800_000_000 + round,
            nanos: 0,
        };
        let repeat = HealthEvent {
            generated_timestamp: Some(at),
            ..memory(&scene.node, "0")
        };
        let well = HealthEvent {
            check_name: "GpuPcieWatch".into(),
            is_fatal: false,
            is_healthy: true,
            ..repeat.clone()
        };
        let stored = HealthEvent {
            check_name: "GpuNvlinkWatch".into(),
            processing_strategy: 2,
            ..repeat.clone()
        };
        for event in [repeat, well, stored] {
            send_to(&scene.product, vec![event]).await?;
            events += 1;
        }
    }
    scene.taken_in(events).await?;
    let recovery = HealthEvent {
        is_fatal: false,
        is_healthy: true,
        ..memory(&scene.node, "0")
    };
    send_to(&scene.product, vec![recovery]).await?;
    scene.condition("GpuMemWatch", "False").await?;
    scene.restored().await?;
    let node = scene
        .node_until("the node", |node| Ok(node.clone()))
        .await?;
    assert!(condition(&node, "GpuNvlinkWatch").is_null());
    assert!(condition(&node, "GpuPcieWatch").is_null());
    // One patch for the fault and one for its recovery, each with the summary.
    scene
        .product
        .wait_for("the audit log", SOON, || async {
            match writes() {
                Ok(2) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
}

#[tokio::test]
async fn faults_that_are_not_fatal_are_events_with_a_count() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    let events: Api<Event> = Api::namespaced(plane.client().await?, "default");
    let of_node = ListParams::default().fields(&format!("involvedObject.name={}", scene.node));
    let found = |reason: &'static str| {
        let (events, of_node) = (events.clone(), of_node.clone());
        async move {
            let list = events
                .list(&of_node)
                .await
                .map_err(|error| error.to_string())?;
            let mut found = list
                .items
                .into_iter()
                .filter(|event| event.reason.as_deref() == Some(reason));
            match (found.next(), found.next()) {
                (Some(event), None) => Ok(event),
                (None, _) => Err("none".to_owned()),
                (Some(_), Some(_)) => Err("more than one".to_owned()),
            }
        }
    };
    let mild = |second: i64| HealthEvent {
        is_fatal: false,
        generated_timestamp: Some(prost_types::Timestamp {
            seconds: 1_800_000_000 + second,
            nanos: 0,
        }),
        ..memory(&scene.node, "0")
    };
    send_to(&scene.product, vec![mild(0)]).await?;
    let first = scene
        .product
        .wait_for("the Event", SOON, || found("GpuMemWatchIsNotHealthy"))
        .await?;
    assert_eq!(first.type_.as_deref(), Some("Warning"));
    assert_eq!(
        first.involved_object.uid.as_deref(),
        Some(scene.node.as_str())
    );
    let text = "ErrorCode:DCGM_FR_FAULTY_MEMORY GPU:0 a page. could not be retired \
                Recommended Action=COMPONENT_RESET;";
    assert_eq!(first.message.as_deref(), Some(text));
    let shown = plane.kubectl(["describe", "node", &scene.node]).await?;
    assert!(shown.contains("GpuMemWatchIsNotHealthy"), "{shown}");

    for second in 1..=4 {
        send_to(&scene.product, vec![mild(second)]).await?;
    }
    scene
        .product
        .wait_for("the count of the repeats", SOON, || async {
            let event = found("GpuMemWatchIsNotHealthy").await?;
            if event.count == Some(5) && event.metadata.name == first.metadata.name {
                Ok(())
            } else {
                Err(format!("{:?}", event.count))
            }
        })
        .await?;
    let recovery = HealthEvent {
        is_healthy: true,
        ..mild(9)
    };
    send_to(&scene.product, vec![recovery]).await?;
    let last = scene
        .product
        .wait_for("the recovery", SOON, || found("GpuMemWatchIsHealthy"))
        .await?;
    assert_eq!(last.type_.as_deref(), Some("Normal"));
    let lists = requests(&plane, |entry| {
        entry["verb"] == "list" && entry["objectRef"]["resource"] == "events"
    })?;
    assert_eq!(lists, 0, "nobody lists the namespace");
    let node = scene
        .node_until("the node", |node| Ok(node.clone()))
        .await?;
    assert!(condition(&node, "GpuMemWatch").is_null());
    Ok(())
}
