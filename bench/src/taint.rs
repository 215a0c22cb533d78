//! From an XID to the taint of its device, on a real cluster.
//!
//! The driver is a fake with eight GPUs. Each GPU has one XID in turn; the next node follows,
//! with a process of its own. Watches observe the condition of the Device API and the
//! `DeviceTaintRule`; the health event is timed by its time of acceptance. The baseline before
//! each XID is one POST of such a rule, observed by the same watch.

use std::fs;
use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cli::bench::{Figure, cluster_client, median, percentile, progress};
use console::api::EventView;
use contract::device::WatchGpusRequest;
use contract::device::gpu_service_client::GpuServiceClient;
use contract::device::{ConditionStatus, WatchGpusResponse};
use futures::{Stream, TryStreamExt as _};
use jiff::Timestamp;
use kube::api::{Api, DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::json;
use testkit::Product;
use tonic::Streaming;
use tonic::transport::Endpoint;

use crate::Args;
use crate::nodes::{Nodes, with_nodes};
use crate::product;

/// Nodes, and the GPUs of each.
const NODES: usize = 8;
const GPUS: u32 = 8;
/// An XID whose action in the catalogue is a reset.
const XID: u32 = 48;
/// Longest time until a change is observed.
const LIMIT: Duration = Duration::from_secs(30);
/// Pause between an observed change and the next one.
const QUIET: Duration = Duration::from_millis(40);
const BASELINE: &str = "bare POST";
const DRIVER: &str = "gpu.nvidia.com";
/// A policy that quarantines no node.
const POLICY: &str = r#"
[device-taints]

[[rule-sets]]
name = "fatal"
taint-devices = 8
cordon = { shouldCordon = true }

[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"
"#;

pub(crate) async fn run(args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    let measured = with_nodes(args, "taint", NODES, async |nodes| {
        measure(args, nodes).await
    });
    rows.extend(measured.await?);
    Ok(())
}

/// Resource API of the cluster, and the watch of its device taint rules.
struct Devices {
    slices: Api<DynamicObject>,
    rules: Api<DynamicObject>,
    seen: Pin<Box<dyn Stream<Item = kube::Result<WatchEvent<DynamicObject>>> + Send>>,
}

/// Times since the XID, in ms.
#[derive(Default)]
struct Round {
    recorded: f64,
    condition: f64,
    taint: f64,
}

async fn measure(args: &Args, nodes: &Nodes) -> anyhow::Result<Vec<Figure>> {
    let mut devices = Devices::watch(args).await?;
    let (mut rounds, mut bare) = (Vec::new(), Vec::new());
    for node in nodes.names(NODES) {
        progress(&format!("taint, node {node} ..."));
        devices.publish(&node).await?;
        let measured = with_product(args, &node, &mut devices).await;
        devices.remove(&node).await?;
        let (of_node, beside) = measured?;
        rounds.extend(of_node);
        bare.extend(beside);
    }
    let of = |pick: fn(&Round) -> f64| rounds.iter().map(pick).collect::<Vec<_>>();
    let mut rows = Vec::new();
    for (name, values) in [
        ("recorded", of(|round| round.recorded)),
        ("condition", of(|round| round.condition)),
        ("taint", of(|round| round.taint)),
    ] {
        let figure =
            |kind: &str, value: f64| Figure::new(format!("taint.{name}-{kind}"), value, "ms");
        let (middle, late) = (figure("p50", median(&values)), percentile(&values, 99));
        let late = figure("p99", late);
        rows.extend(if name == "taint" {
            let note = "the fake driver tells an XID up to 10 ms late";
            let middle = middle.beside(BASELINE, median(&bare)).note(note);
            [middle, late.beside(BASELINE, percentile(&bare, 99))]
        } else {
            [middle, late]
        });
    }
    Ok(rows)
}

async fn with_product(
    args: &Args,
    node: &str,
    devices: &mut Devices,
) -> anyhow::Result<(Vec<Round>, Vec<f64>)> {
    let launch = product::run(args, node)?;
    let policy = launch.data_dir().with_extension("policy");
    fs::write(&policy, POLICY)?;
    let launch = launch
        .option("--policy", &policy)
        .option("--fake-gpus", GPUS.to_string());
    let product = product::start(launch).await?;
    let socket = product.data_dir().join("device-api.sock");
    let endpoint = Endpoint::try_from(format!("unix://{}", socket.display()))?;
    let mut client = GpuServiceClient::new(endpoint.connect().await?);
    let watched = client.watch_gpus(WatchGpusRequest::default()).await?;
    let mut conditions = watched.into_inner();
    let (mut rounds, mut bare) = (Vec::new(), Vec::new());
    for gpu in 0..GPUS {
        bare.push(devices.post(node, gpu).await?);
        tokio::time::sleep(QUIET).await;
        let round = round(&product, gpu, devices, &mut conditions).await;
        rounds.push(round.map_err(|error| product.failure(&format!("{error:#}")))?);
        tokio::time::sleep(QUIET).await;
    }
    Ok((rounds, bare))
}

async fn round(
    product: &Product,
    gpu: u32,
    devices: &mut Devices,
    conditions: &mut Streaming<WatchGpusResponse>,
) -> anyhow::Result<Round> {
    let (at, began) = (Timestamp::now(), Instant::now());
    fakes::tell_xid(&product.data_dir().join(fakes::DIRECTORY), gpu, XID)?;
    let device = device(gpu);
    let both = futures::future::try_join(
        async {
            failing(conditions, gpu).await?;
            anyhow::Ok(millis(began))
        },
        async {
            devices.wait(&device).await?;
            anyhow::Ok(millis(began))
        },
    );
    let (condition, taint) = tokio::time::timeout(LIMIT, both)
        .await
        .with_context(|| format!("no taint of {device} after {} s", LIMIT.as_secs()))??;
    let events = product.get("/api/v1/events?limit=1").await?;
    let events: Vec<EventView> = serde_json::from_str(&events)?;
    let newest = events.first().context("no event is stored")?;
    let recorded = newest.created_at.duration_since(at).as_secs_f64() * 1_000.0;
    Ok(Round {
        recorded,
        condition,
        taint,
    })
}

/// Waits until the driver's condition of a GPU is false.
async fn failing(conditions: &mut Streaming<WatchGpusResponse>, gpu: u32) -> anyhow::Result<()> {
    while let Some(event) = conditions.message().await? {
        let told = event.gpu.unwrap_or_default();
        if i64::from(told.spec.unwrap_or_default().index) != i64::from(gpu) {
            continue;
        }
        let said = told.status.unwrap_or_default().conditions;
        let mut said = said.into_iter();
        if said.any(|one| one.r#type == "NVMLReady" && one.status() == ConditionStatus::False) {
            return Ok(());
        }
    }
    bail!("the watch of the Device API has ended")
}

fn device(gpu: u32) -> String {
    format!("gpu-{gpu}")
}

fn millis(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1_000.0
}

// === impl Devices ===

impl Devices {
    async fn watch(args: &Args) -> anyhow::Result<Self> {
        let path = args.kubeconfig.as_ref().context("no kubeconfig is named")?;
        let client = cluster_client(path, args.context.as_deref()).await?;
        let of = |kind: &str, plural: &str| {
            let kind = GroupVersionKind::gvk("resource.k8s.io", "v1", kind);
            let resource = ApiResource::from_gvk_with_plural(&kind, plural);
            Api::<DynamicObject>::all_with(client.clone(), &resource)
        };
        let rules = of("DeviceTaintRule", "devicetaintrules");
        let listed = rules.list(&ListParams::default().limit(1)).await?;
        let version = listed.metadata.resource_version.unwrap_or_default();
        let seen = rules.watch(&WatchParams::default(), &version).await?;
        Ok(Self {
            slices: of("ResourceSlice", "resourceslices"),
            rules,
            seen: Box::pin(seen),
        })
    }

    /// Publishes the GPUs of a node as its driver would.
    async fn publish(&self, node: &str) -> anyhow::Result<()> {
        let devices: Vec<_> = (0..GPUS)
            .map(|gpu| {
                let uuid = format!("GPU-fa4e0000-0000-4000-8000-{gpu:012x}");
                json!({
                    "name": device(gpu),
                    "attributes": {"type": {"string": "gpu"}, "uuid": {"string": uuid}},
                })
            })
            .collect();
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": node},
            "spec": {
                "driver": DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": devices,
            },
        });
        let slice = serde_json::from_value(slice)?;
        self.slices.create(&PostParams::default(), &slice).await?;
        Ok(())
    }

    /// Runs the baseline: creates a rule with one POST, for a pool that does not exist. Returns
    /// the time until the watch shows it.
    async fn post(&mut self, node: &str, gpu: u32) -> anyhow::Result<f64> {
        let name = format!("{node}-bare-{gpu}");
        let rule = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceTaintRule",
            "metadata": {"name": name},
            "spec": {
                "deviceSelector": {"driver": DRIVER, "pool": name, "device": name},
                "taint": {"key": "gpu.nvidia.com/xid", "value": "48", "effect": "NoSchedule"},
            },
        });
        let rule = serde_json::from_value(rule)?;
        let began = Instant::now();
        self.rules.create(&PostParams::default(), &rule).await?;
        tokio::time::timeout(LIMIT, self.wait(&name)).await??;
        let took = millis(began);
        self.rules.delete(&name, &DeleteParams::default()).await?;
        Ok(took)
    }

    /// Waits until the watch shows a new rule for the device.
    async fn wait(&mut self, device: &str) -> anyhow::Result<()> {
        while let Some(event) = self.seen.try_next().await? {
            let WatchEvent::Added(rule) = event else {
                continue;
            };
            if rule.data["spec"]["deviceSelector"]["device"] == device {
                return Ok(());
            }
        }
        bail!("the watch of the rules has ended")
    }

    /// Deletes the node's GPUs and the remaining rules for them.
    async fn remove(&self, node: &str) -> anyhow::Result<()> {
        self.slices.delete(node, &DeleteParams::default()).await?;
        for rule in self.rules.list(&ListParams::default()).await? {
            let name = rule.metadata.name.unwrap_or_default();
            if rule.data["spec"]["deviceSelector"]["pool"] == node {
                self.rules.delete(&name, &DeleteParams::default()).await?;
            }
        }
        Ok(())
    }
}
