//! The connector's transformers, with NVSentinel's configuration files and the product as a
//! process.

use std::path::{Path, PathBuf};

use contract::HealthEvent;
use serde_json::Value;
use testkit::{ControlPlane, Launch, Product, Version};

use crate::support::{SOON, Scene, event, send_to, taken_in, xid};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/connector/config.json")
}

/// Returns the events of a product, oldest first, once it has `count` of them.
async fn events(product: &Product, count: usize) -> anyhow::Result<Vec<Value>> {
    product
        .wait_for("events", SOON, || async {
            let output = product.client(["events", "-o", "json"]).await;
            let found = output.and_then(|output| output.json(0));
            let found = found.map_err(|error| error.to_string())?;
            let mut found = found.as_array().cloned().unwrap_or_default();
            found.sort_by_key(|record| record["seq"].as_u64());
            let events = found.iter().map(|record| record["event"].clone());
            if found.len() == count {
                Ok(events.collect::<Vec<_>>())
            } else {
                Err(format!("{found:?}"))
            }
        })
        .await
}

#[tokio::test]
async fn repeats_are_kept_from_the_reactions_over_a_restart() -> anyhow::Result<()> {
    let launch = Launch::new()?.option("--connector-config", examples());
    let mut product = launch.start().await?;
    let strategies = |events: &[Value]| {
        let strategies = events.iter().map(|event| &event["processingStrategy"]);
        strategies.map(ToString::to_string).collect::<Vec<_>>()
    };
    let (first, repeat) = ("\"EXECUTE_REMEDIATION\"", "\"STORE_AND_ANALYSE\"");
    let inject = ["inject", "xid", "79"];
    product.client(inject).await?.expect(0)?;
    product.client(inject).await?.expect(0)?;
    assert_eq!(strategies(&events(&product, 2).await?), [first, repeat]);
    product.restart().await?;
    product.client(inject).await?.expect(0)?;
    let after = strategies(&events(&product, 3).await?);
    assert_eq!(after, [first, repeat, repeat]);
    taken_in(&product, 3).await?;
    // After a recovery, the next report counts as the first.
    product.client(["inject", "recovery"]).await?.expect(0)?;
    product.client(inject).await?.expect(0)?;
    assert_eq!(strategies(&events(&product, 5).await?)[4], first);
    // The log names the ignored keys for Kubernetes and databases.
    assert!(product.stderr().contains("StoreConnectorMaxRetries"));
    Ok(())
}

/// NVSentinel logs each event in full, once per connector.
#[tokio::test]
async fn events_are_in_the_store_and_not_in_the_log() -> anyhow::Result<()> {
    let product = Launch::new()?.start().await?;
    let inject = ["inject", "xid", "79"];
    product.client(inject).await?.expect(0)?;
    let stored = events(&product, 1).await?;
    let message = stored[0]["message"].as_str().unwrap_or_default();
    assert!(message.contains("Xid"), "{message}");
    let log = product.stderr();
    assert!(!log.is_empty() && !log.contains(message), "{log}");
    Ok(())
}

#[tokio::test]
async fn events_carry_what_the_cluster_knows_of_the_node() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let zone = "topology.kubernetes.io/zone";
    let scene = Scene::new(
        &plane,
        |node| node.label(zone, "zone-7").label("private", "p"),
        |launch| launch.option("--connector-config", examples()),
    )
    .await?;
    // Acting on the node implies that the product has observed it.
    let fallen = xid(79, "GPU has fallen off the bus.");
    scene.product.append_kernel_log(&fallen)?;
    scene.cordoned().await?;
    let inject = ["inject", "xid", "48", "--pci", "0000:3b:00"];
    scene.product.client(inject).await?.expect(0)?;
    let events = events(&scene.product, 2).await?;
    let metadata = &events[1]["metadata"];
    assert_eq!(metadata[zone], "zone-7", "{metadata}");
    assert_eq!(metadata["private"], Value::Null);
    Ok(())
}

/// Returns the prefixes of the metric samples of NVSentinel's connector, according to its
/// contract. Those of its gRPC sink exist only with a sink, and Events have no label `node_name`
/// here (compatibility.md).
fn sample_names() -> Vec<String> {
    let mut names: Vec<String> = [
        "platform_connector_health_events_received_total ",
        "k8s_platform_connector_node_condition_update_total{status=\"success\"} ",
        "k8s_platform_connector_node_condition_update_total{status=\"failed\"} ",
        "k8s_platform_connector_node_condition_update_duration_milliseconds_bucket{le=\"10.0\"} ",
        "k8s_platform_connector_node_event_operations_total{operation=\"create\",status=\"success\"} ",
        "k8s_platform_connector_node_event_operations_total{operation=\"update\",status=\"failed\"} ",
        "k8s_platform_connector_node_event_update_create_duration_milliseconds_bucket{le=\"10.0\"} ",
        "nvsentinel_platform_connector_dedup_store_and_analyse_total{check=\"SysLogsXIDError\",node=",
        "nvsentinel_overrides_applied_total{rule_name=\"row-remap-waits\",field=\"isFatal\"} ",
        "nvsentinel_override_evaluation_errors_total ",
    ]
    .map(str::to_owned)
    .into();
    for queue in ["kubernetes", "databaseStore"] {
        for (metric, kind) in [
            ("depth", ""),
            ("adds_total", ""),
            ("latency_seconds", "_bucket"),
            ("work_duration_seconds", "_bucket"),
            ("retries_total", ""),
            ("longest_running_processor_seconds", ""),
            ("unfinished_work_seconds", ""),
        ] {
            names.push(format!(
                "platform_connector_workqueue_{metric}_{queue}{kind}{{workqueue=\"{queue}\""
            ));
        }
    }
    names
}

#[tokio::test]
async fn the_metrics_of_the_references_connector_are_shown() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let configured = |launch: Launch| launch.option("--connector-config", examples());
    let scene = Scene::new(&plane, |node| node, configured).await?;
    let inject = ["inject", "xid", "79"];
    scene.product.client(inject).await?.expect(0)?;
    scene.product.client(inject).await?.expect(0)?;
    let overridden = HealthEvent {
        check_name: "SysLogsXIDError".into(),
        error_code: vec!["63".into()],
        ..event(&scene.node, "0")
    };
    send_to(&scene.product, vec![overridden]).await?;
    scene.condition("SysLogsXIDError", "True").await?;
    scene
        .product
        .wait_for("the metrics", SOON, || async {
            let text = scene.product.get("/metrics").await;
            let text = text.map_err(|error| error.to_string())?;
            let mut missing = sample_names();
            missing.retain(|name| !text.lines().any(|line| line.starts_with(name)));
            // All events have been processed.
            let idle = "depth_kubernetes{workqueue=\"kubernetes\"} 0";
            if missing.is_empty() && text.contains(idle) {
                Ok(())
            } else {
                Err(format!("{missing:?} missing in\n{text}"))
            }
        })
        .await
}
