//! The ledger of GPUs: a marked GPU that turns up in another node, and the evidence about it.

use contract::{Entity, HealthEvent, ProcessingStrategy};
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use testkit::{ControlPlane, Launch, Options, Output, Product, Version, unique};

use crate::support::{SOON, event, object, send_to, shape};

const UUID: &str = "GPU-5a1f0c2e-7b6d-4e1a-9c3f-2d8e4b7a6c10";
const SERIAL: &str = "1654921000123";

/// Returns an event that names the GPU in its slot of a node.
fn naming(event: HealthEvent) -> HealthEvent {
    let entities = [("PCI", "0000:3b:00"), ("GPU_UUID", UUID)];
    let entity = |(kind, value): (&str, &str)| Entity {
        entity_type: kind.to_owned(),
        entity_value: value.to_owned(),
    };
    let serial = ("gpu_serial".to_owned(), SERIAL.to_owned());
    HealthEvent {
        entities_impacted: entities.map(entity).into(),
        metadata: [serial].into(),
        ..event
    }
}

/// Returns the event of a machine that has the GPU.
fn inventory(node: &str) -> HealthEvent {
    naming(HealthEvent {
        check_name: "GpuInventory".to_owned(),
        is_healthy: true,
        is_fatal: false,
        error_code: Vec::new(),
        recommended_action: 0,
        processing_strategy: ProcessingStrategy::StoreOnly as i32,
        message: "NVIDIA H100 is in this machine".to_owned(),
        ..event(node, "0")
    })
}

struct Tests {
    nodes: Api<Node>,
    product: Product,
}

impl Tests {
    async fn cordoned(&self, name: &str, cordoned: bool) -> anyhow::Result<()> {
        self.product
            .wait_for(&format!("cordoned {cordoned}"), SOON, || async {
                let node = object(&self.nodes, name).await;
                let node = node.map_err(|error| error.to_string())?;
                if (node["spec"]["unschedulable"] == true) == cordoned {
                    Ok(())
                } else {
                    Err(shape(&node).to_string())
                }
            })
            .await
    }

    /// Sends an event once the controller leads, and so has its socket.
    async fn send(&self, event: HealthEvent) -> anyhow::Result<()> {
        self.product
            .wait_for("the socket", SOON, || async {
                let sent = send_to(&self.product, vec![event.clone()]).await;
                sent.map_err(|error| format!("{error:#}"))
            })
            .await
    }

    /// Returns the health of each stored report that a known-bad GPU is in a node.
    async fn reported(&self, node: &str) -> anyhow::Result<Vec<bool>> {
        let events = ["events", "--node", node, "-o", "json"];
        let events = self.product.client(events).await?.json(0)?;
        let events = events.as_array().unwrap().iter();
        let reports = events.filter(|event| event["event"]["checkName"] == "KnownBadGPU");
        Ok(reports
            .map(|event| event["event"]["isHealthy"] == true)
            .collect())
    }

    async fn mark(&self, mark: &str, reason: &str) -> anyhow::Result<Output> {
        let socket = self.product.socket().to_str().unwrap();
        let args = ["ledger", "mark", SERIAL, mark, "--reason", reason];
        let args = args.into_iter().chain(["--socket", socket]);
        self.product.client(args).await
    }

    /// Returns the evidence, after it has been compared with its hash.
    async fn evidence(&self, name: &str, format: &str) -> anyhow::Result<String> {
        let args = ["report", "evidence", name, "-o", format];
        let output = self.product.client(args).await?;
        output.expect(0)?;
        let sum = Sha256::digest(&output.stdout);
        assert_eq!(output.stderr, format!("sha256 {sum:x}\n"));
        Ok(output.stdout)
    }
}

#[tokio::test]
async fn a_gpu_that_was_marked_takes_its_next_node_out_whatever_is_killed() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    let (first, second) = (unique("ledger"), unique("ledger"));
    for name in [&first, &second] {
        testkit::node(name).create(&client).await?;
    }
    let launch = Launch::controller()?
        .kubeconfig(plane.kubeconfig())
        .quarantine()
        .arg("--grpc-insecure")
        .option("--leader-elect", "false")
        .option("--grpc-listen", "127.0.0.1:0");
    let mut tests = Tests {
        nodes: Api::all(client),
        product: launch.start().await?,
    };
    let fault = naming(event(&first, "0"));
    tests.send(fault.clone()).await?;
    tests.product.restart().await?;
    // As a monitor that was left without an answer does.
    tests.send(fault).await?;
    tests.cordoned(&first, true).await?;

    tests.mark("bad", "").await?.expect(2)?;
    tests.mark("bad", "memory, twice").await?.expect(0)?;
    tests.product.restart().await?;
    tests.send(inventory(&second)).await?;
    tests.product.restart().await?;
    tests.cordoned(&second, true).await?;
    tests.product.restart().await?;
    let shown = ["ledger", UUID, "-o", "json"];
    let wait = || async {
        let output = tests.product.client(shown).await;
        let entry = output.and_then(|output| output.json(0));
        let entry = entry.map_err(|error| error.to_string())?;
        let gpu = &entry["gpu"];
        if gpu["row"]["reported"][&second].is_object() {
            Ok(gpu.clone())
        } else {
            Err(entry.to_string())
        }
    };
    let gpu: Value = tests.product.wait_for("the report", SOON, wait).await?;
    assert_eq!(gpu["short"]["id"], SERIAL);
    assert_eq!(gpu["row"]["mark"]["reason"], "memory, twice");
    let places: Vec<&Value> = gpu["row"]["places"].as_array().unwrap().iter().collect();
    assert_eq!(places.len(), 2, "{gpu}");
    assert_eq!(
        (&places[0]["node"], &places[1]["node"]),
        (&first.as_str().into(), &second.as_str().into())
    );
    assert_eq!(tests.reported(&second).await?, [false]);
    let text = tests.product.client(["ledger"]).await?;
    assert!(text.expect(0)?.contains(SERIAL), "{text:?}");

    tests
        .mark("good", "passed the field diagnostic")
        .await?
        .expect(0)?;
    tests.product.restart().await?;
    tests.cordoned(&second, false).await?;
    tests.cordoned(&first, true).await?;
    assert_eq!(tests.reported(&second).await?, [false, true]);

    // A session ends once its node is seen in service, shortly after the uncordon.
    let ended = || async {
        let evidence = tests.evidence(SERIAL, "json").await;
        let evidence = evidence.map_err(|error| format!("{error:#}"))?;
        let evidence: Value = serde_json::from_str(&evidence).unwrap();
        let tickets = evidence["tickets"].as_array().unwrap().clone();
        let ended = tickets
            .get(1)
            .is_some_and(|ticket| ticket["closedAt"].is_string());
        ended.then_some(tickets).ok_or(format!("{evidence:#}"))
    };
    let tickets: Vec<Value> = (tests.product)
        .wait_for("the end of the session", SOON, ended)
        .await?;
    assert_eq!(tickets.len(), 2, "{tickets:#?}");
    assert_eq!(tickets[0]["node"], first.as_str());
    assert_eq!(tickets[0]["hardwareId"], SERIAL);
    assert!(tickets[0]["outOfServiceAt"].is_string() && tickets[0]["closedAt"].is_null());
    assert_eq!(tickets[1]["fault"], "KnownBadGPU");
    let times = ["openedAt", "outOfServiceAt", "backInServiceAt", "closedAt"];
    let times: Vec<&str> = times
        .iter()
        .filter_map(|key| tickets[1][key].as_str())
        .collect();
    assert_eq!(times.len(), 4, "{}", tickets[1]);
    assert!(times.is_sorted(), "{times:?}");
    let page = tests.evidence(&second, "html").await?;
    for part in [SERIAL, "memory, twice", "KnownBadGPU"] {
        assert!(page.contains(part), "{part}");
    }
    Ok(())
}
