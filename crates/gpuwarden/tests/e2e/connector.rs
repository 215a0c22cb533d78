//! What the connector makes of events on their way: NVSentinel's files, the product as a
//! process.

use std::path::{Path, PathBuf};

use serde_json::Value;
use testkit::{ControlPlane, Launch, Product, Version};

use crate::support::{SOON, Scene, xid};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/connector/config.json")
}

/// The events of a product, oldest first, once there are so many.
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
    // A recovery makes the next report a first one.
    product.client(["inject", "recovery"]).await?.expect(0)?;
    product.client(inject).await?.expect(0)?;
    assert_eq!(strategies(&events(&product, 5).await?)[4], first);
    // Why what the files say about Kubernetes and databases is not used is in the log.
    assert!(product.stderr().contains("StoreConnectorMaxRetries"));
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
    // Once it has acted on the node it has seen it.
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
