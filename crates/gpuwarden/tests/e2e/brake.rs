//! Limits of new quarantines: budgets, the circuit breaker, a pause. Each test has a private
//! cluster, because the limits count nodes.

use std::collections::BTreeSet;

use contract::{BehaviourOverrides, HealthEvent};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Private, Product, Version};

use crate::runbook::Reader;
use crate::support::{SOON, event, recovery, send_to};

/// Namespace of the product's `ConfigMaps` in these tests.
const NAMESPACE: &str = "warden";

/// A cluster of GPU nodes, and one product that receives all their faults.
struct Fleet {
    plane: Private,
    pub nodes: Api<Node>,
    maps: Api<ConfigMap>,
    product: Product,
    /// Read at every start of the product.
    _policy: tempfile::NamedTempFile,
}

impl Fleet {
    async fn new(gpus: usize, policy: &str) -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
            return Ok(None);
        };
        plane.namespace(NAMESPACE).await?;
        let client = plane.client().await?;
        for gpu in 0..gpus {
            testkit::node(format!("n{gpu}"))
                .label("nvidia.com/gpu.present", "true")
                .create(&client)
                .await?;
        }
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), format!("{policy}\n{RULES}"))?;
        let product = Launch::new()?
            .node_name("n0")
            .kubeconfig(plane.kubeconfig())
            .option("--namespace", NAMESPACE)
            .option("--accept-nodes", "any")
            .option("--policy", file.path())
            .quarantine_with_brake()
            .start()
            .await?;
        Ok(Some(Self {
            nodes: Api::all(client.clone()),
            maps: Api::namespaced(client, NAMESPACE),
            plane,
            product,
            _policy: file,
        }))
    }

    async fn send(&self, events: impl IntoIterator<Item = HealthEvent>) -> anyhow::Result<()> {
        send_to(&self.product, events.into_iter().collect()).await
    }

    /// Returns the names of the cordoned nodes.
    async fn out(&self) -> anyhow::Result<BTreeSet<String>> {
        let nodes = self.nodes.list(&ListParams::default()).await?;
        let out = nodes.into_iter().filter(|node| {
            let spec = node.spec.as_ref();
            spec.is_some_and(|spec| spec.unschedulable == Some(true))
        });
        Ok(out.filter_map(|node| node.metadata.name).collect())
    }

    async fn status(&self) -> anyhow::Result<Value> {
        let output = self.product.client(["status", "-o", "json"]).await?;
        Ok(serde_json::from_str(&output.stdout)?)
    }

    /// Waits until these nodes are cordoned and those are held back, both in the product's
    /// status and in the cluster.
    async fn settles(&self, out: &[&str], held: &[&str]) -> anyhow::Result<()> {
        self.product
            .wait_for("the fleet to settle", SOON, || async {
                let status = self.status().await.map_err(|error| error.to_string())?;
                let cordoned = self.out().await.map_err(|error| error.to_string())?;
                let shown = |state: &str| -> Vec<&str> {
                    let nodes = status["fleet"]["nodes"].as_array().into_iter().flatten();
                    nodes
                        .filter(|node| node["state"] == state)
                        .filter_map(|node| node["name"].as_str())
                        .collect()
                };
                let said = (shown("quarantined"), shown("held"));
                let really: Vec<&str> = cordoned.iter().map(String::as_str).collect();
                if said == (out.to_vec(), held.to_vec()) && really == out {
                    Ok(())
                } else {
                    Err(format!(
                        "quarantined and held {said:?}, cordoned {really:?}, brake {}",
                        status["fleet"]["brake"]
                    ))
                }
            })
            .await
    }

    /// Waits until the `ConfigMap` of the circuit breaker has these values.
    async fn breaker(&self, status: &str, cursor: &str) -> anyhow::Result<()> {
        self.product
            .wait_for("the circuit breaker's ConfigMap", SOON, || async {
                let map = self.maps.get("circuit-breaker").await;
                let data = map.map_err(|error| error.to_string())?.data;
                let data = data.unwrap_or_default();
                let word = |key: &str| data.get(key).map(String::as_str).unwrap_or_default();
                if (word("status"), word("cursor")) == (status, cursor) {
                    Ok(())
                } else {
                    Err(format!("{data:?}"))
                }
            })
            .await
    }

    /// Edits the `ConfigMap` of the circuit breaker as a person would.
    async fn edit(&self, data: Value) -> anyhow::Result<()> {
        let patch = Patch::<Value>::Merge(json!({"data": data}));
        let name = "circuit-breaker";
        (self.maps)
            .patch(name, &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    /// Waits until the story of a node contains this text: the journal is written with a delay.
    async fn tells(&self, node: &str, text: &str) -> anyhow::Result<()> {
        let tells = || async {
            let story = self.product.client(["explain", node]).await;
            let story = story.map_err(|error| error.to_string())?.stdout;
            story.contains(text).then_some(()).ok_or(story)
        };
        self.product.wait_for(text, SOON, tells).await
    }

    async fn metric(&self, line: &str) -> anyhow::Result<()> {
        self.product
            .wait_for("the metric", SOON, || async {
                let text = self.product.get("/metrics").await;
                let text = text.map_err(|error| error.to_string())?;
                if text.lines().any(|one| one == line) {
                    Ok(())
                } else {
                    let like = |one: &&str| one.contains("breaker") || one.contains("held");
                    Err(text.lines().filter(like).collect::<Vec<_>>().join("\n"))
                }
            })
            .await
    }
}

/// Rule set that takes nodes with fatal faults out of service.
pub(crate) const RULES: &str = r#"
[[rule-sets]]
name = "fatal"
cordon = { shouldCordon = true }
[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"
"#;

fn faults<const N: usize>(nodes: [&str; N]) -> Vec<HealthEvent> {
    nodes.iter().map(|node| event(node, "0")).collect()
}

#[tokio::test]
async fn a_budget_holds_lets_go_when_there_is_room_and_survives_a_kill() -> anyhow::Result<()> {
    // The default limit: 20 % of ten nodes.
    let Some(mut fleet) = Fleet::new(10, "").await? else {
        return Ok(());
    };
    fleet.send(faults(["n1", "n2"])).await?;
    fleet.settles(&["n1", "n2"], &[]).await?;
    fleet.send(faults(["n3", "n4", "n5"])).await?;
    fleet.settles(&["n1", "n2"], &["n3", "n4", "n5"]).await?;
    fleet
        .tells(
            "n3",
            "2 of 10 nodes are out of service (n1, n2), and 2 (20%) may be",
        )
        .await?;
    fleet.metric("gpuwarden_quarantine_held_nodes 3").await?;
    let mut reader = Reader::beside(&fleet.product, Some(&fleet.plane))?;
    reader.runbook("GpuwardenQuarantineHeld", &[]).await?;
    fleet
        .metric("fault_quarantine_breaker_utilization 1.0")
        .await?;

    // The count is derived from the nodes, so it survives a restart.
    fleet.product.kill9()?;
    fleet.product.restart().await?;
    fleet.settles(&["n1", "n2"], &["n3", "n4", "n5"]).await?;

    // A held node that has recovered is dropped; the next one is quarantined once the limit
    // permits it.
    fleet.send([recovery("n3", "0")]).await?;
    fleet.settles(&["n1", "n2"], &["n4", "n5"]).await?;
    fleet.send([recovery("n1", "0")]).await?;
    fleet.settles(&["n2", "n4"], &["n5"]).await?;
    fleet
        .send([recovery("n2", "0"), recovery("n4", "0")])
        .await?;
    fleet.settles(&["n5"], &[]).await?;
    fleet.send([recovery("n5", "0")]).await?;
    fleet.settles(&[], &[]).await
}

#[tokio::test]
async fn the_circuit_breaker_trips_gives_back_and_follows_its_config_map() -> anyhow::Result<()> {
    let policy = "[circuitBreaker]\npercentage = 40\nduration = \"10m\"\n";
    let Some(mut fleet) = Fleet::new(5, policy).await? else {
        return Ok(());
    };
    fleet.breaker("CLOSED", "RESUME").await?;
    // 40 % of five nodes: the third quarantine trips the breaker.
    fleet.send(faults(["n0", "n1"])).await?;
    fleet.settles(&["n0", "n1"], &[]).await?;
    fleet.breaker("CLOSED", "RESUME").await?;
    // The window of the breaker is derived from the nodes as well, so it survives a restart.
    fleet.product.kill9()?;
    fleet.product.restart().await?;
    fleet.settles(&["n0", "n1"], &[]).await?;
    fleet.send(faults(["n2"])).await?;
    fleet.settles(&["n0", "n1"], &["n2"]).await?;
    fleet.breaker("TRIPPED", "RESUME").await?;
    fleet
        .metric("fault_quarantine_breaker_state{state=\"TRIPPED\"} 1")
        .await?;
    fleet
        .metric("fault_quarantine_breaker_state{state=\"CLOSED\"} 0")
        .await?;

    // The breaker stays tripped across a restart, and does not block recoveries and forced
    // quarantines.
    fleet.product.kill9()?;
    fleet.product.restart().await?;
    fleet.settles(&["n0", "n1"], &["n2"]).await?;
    fleet.send([recovery("n0", "0")]).await?;
    fleet.settles(&["n1"], &["n2"]).await?;
    let forced = HealthEvent {
        quarantine_overrides: Some(BehaviourOverrides {
            force: true,
            skip: false,
        }),
        ..event("n3", "0")
    };
    fleet.send([forced]).await?;
    fleet.settles(&["n1", "n3"], &["n2"]).await?;

    // A person closes the breaker: held nodes are quarantined, and the window restarts.
    fleet.edit(json!({"status": "CLOSED"})).await?;
    fleet.settles(&["n1", "n2", "n3"], &[]).await?;
    fleet.breaker("CLOSED", "RESUME").await?;

    // A person trips the breaker, and closes it dropping the held nodes.
    fleet.edit(json!({"status": "TRIPPED"})).await?;
    fleet
        .metric("fault_quarantine_breaker_state{state=\"TRIPPED\"} 1")
        .await?;
    fleet.send(faults(["n4"])).await?;
    fleet.settles(&["n1", "n2", "n3"], &["n4"]).await?;
    fleet
        .edit(json!({"status": "CLOSED", "cursor": "CREATE"}))
        .await?;
    fleet.breaker("CLOSED", "RESUME").await?;
    fleet.settles(&["n1", "n2", "n3"], &[]).await?;
    fleet
        .tells("n4", "dropped when the circuit breaker was reset")
        .await?;
    // Dropped nodes stay dropped across a restart, until they are reported again.
    fleet.product.restart().await?;
    fleet.settles(&["n1", "n2", "n3"], &[]).await?;
    let again = HealthEvent {
        message: "again".into(),
        ..event("n4", "0")
    };
    fleet.send([again]).await?;
    fleet.settles(&["n1", "n2", "n3", "n4"], &[]).await?;

    // A ConfigMap that is deleted and created anew, as NVSentinel's operators do it: the old
    // state holds in between, and the new one is applied.
    fleet.edit(json!({"status": "TRIPPED"})).await?;
    fleet
        .metric("fault_quarantine_breaker_state{state=\"TRIPPED\"} 1")
        .await?;
    fleet.send(faults(["n0"])).await?;
    fleet.settles(&["n1", "n2", "n3", "n4"], &["n0"]).await?;
    (fleet.maps)
        .delete("circuit-breaker", &DeleteParams::default())
        .await?;
    fleet
        .product
        .wait_for("the product to observe the deletion", SOON, || async {
            let status = fleet.status().await.map_err(|error| error.to_string())?;
            let brake = status["fleet"]["brake"].to_string();
            if brake.contains("circuit-breaker was deleted") {
                Ok(())
            } else {
                Err(brake)
            }
        })
        .await?;
    fleet.settles(&["n1", "n2", "n3", "n4"], &["n0"]).await?;
    let anew = json!({
        "metadata": {"name": "circuit-breaker"},
        "data": {"status": "CLOSED", "cursor": "CREATE"},
    });
    let anew: ConfigMap = serde_json::from_value(anew)?;
    fleet.maps.create(&PostParams::default(), &anew).await?;
    fleet.breaker("CLOSED", "RESUME").await?;
    fleet.settles(&["n1", "n2", "n3", "n4"], &[]).await?;
    fleet
        .tells("n0", "dropped when the circuit breaker was reset")
        .await
}

#[tokio::test]
async fn a_pause_holds_new_ones_only_and_ends_by_itself_or_by_hand() -> anyhow::Result<()> {
    let Some(fleet) = Fleet::new(4, "[brake]\nbudgets = []\n").await? else {
        return Ok(());
    };
    let kubeconfig = fleet.plane.kubeconfig().display().to_string();
    let client = |args: &[&str], namespace: &str| {
        let mut command = tokio::process::Command::new(testkit::binary()?);
        command
            .args(args)
            .args(["--kubeconfig", &kubeconfig, "--namespace", namespace]);
        anyhow::Ok(async move {
            let output = command.output().await?;
            anyhow::Ok(testkit::Output {
                code: output.status.code(),
                stdout: String::from_utf8(output.stdout)?,
                stderr: String::from_utf8(output.stderr)?,
            })
        })
    };
    fleet.send(faults(["n0"])).await?;
    fleet.settles(&["n0"], &[]).await?;
    let args = [
        "pause",
        "--for",
        "1h",
        "--reason",
        "driver roll-out",
        "--by",
        "alice",
    ];
    let said = client(&args, NAMESPACE)?.await?.expect(0)?.to_owned();
    assert!(said.contains("by alice: driver roll-out"), "{}", said);
    fleet
        .product
        .wait_for("the pause to be shown", SOON, || async {
            let output = fleet.product.client(["status"]).await;
            let output = output.map_err(|error| error.to_string())?.stdout;
            if output.contains("by alice: driver roll-out") {
                Ok(())
            } else {
                Err(output)
            }
        })
        .await?;
    fleet.send(faults(["n1"])).await?;
    fleet.settles(&["n0"], &["n1"]).await?;
    fleet.send([recovery("n0", "0")]).await?;
    fleet.settles(&[], &["n1"]).await?;
    let said = client(&["resume"], NAMESPACE)?.await?.expect(0)?.to_owned();
    assert!(said.contains("driver roll-out"), "{}", said);
    fleet.settles(&["n1"], &[]).await?;
    let said = client(&["resume"], NAMESPACE)?.await?.expect(0)?.to_owned();
    assert!(said.contains("Nothing is paused"), "{}", said);

    // The pause ends without a restart.
    client(
        &["pause", "--for", "30s", "--reason", "a short one"],
        NAMESPACE,
    )?
    .await?
    .expect(0)?;
    fleet
        .product
        .wait_for("the pause", SOON, || async {
            let status = fleet.status().await.map_err(|error| error.to_string())?;
            let paused = &status["fleet"]["brake"]["paused"];
            if paused.is_string() {
                Ok(())
            } else {
                Err(status["fleet"]["brake"].to_string())
            }
        })
        .await?;
    fleet.send(faults(["n2"])).await?;
    fleet.settles(&["n1", "n2"], &[]).await?;
    fleet
        .tells("n2", "held back: new quarantines are paused")
        .await?;

    // Invalid requests are refused with a reason.
    for (args, expected) in [
        (vec!["pause", "--reason", " "], "--reason"),
        (vec!["pause", "--for", "soon", "--reason", "x"], "--for"),
    ] {
        let refused = client(&args, NAMESPACE)?.await?;
        assert_eq!(refused.code, Some(2));
        assert!(refused.stderr.contains(expected), "{}", refused.stderr);
    }
    let refused = client(&["pause", "--reason", "x"], "nowhere")?.await?;
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("nowhere"), "{}", refused.stderr);
    Ok(())
}
