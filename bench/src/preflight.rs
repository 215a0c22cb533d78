//! Preflight: the start of a check; admission requests sent straight to the webhook at a fixed
//! rate; and gangs on a real control plane, from the last address to the complete `ConfigMap`.
//!
//! All but the first need a cluster. They create two namespaces, a kind `PodGroup` and a webhook
//! registration, and delete them. Their pods are never scheduled.

mod admission;
mod start;

use std::fs;
use std::net::TcpListener;
use std::pin::Pin;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cli::bench::{Figure, Usage, cluster_client, median, percentile, progress};
use futures::{Stream, TryStreamExt as _};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::{Args, NO_CLUSTER};

/// Namespace of the webhook; pods in it get no checks.
const NAME: &str = "gpuwarden-bench-preflight";
/// Namespace of the pods.
const PODS: &str = "gpuwarden-bench-gangs";
/// Name of the webhook's registration.
const REGISTRATION: &str = "gpuwarden-preflight";
const GROUP: &str = "bench.gpuwarden.dev";
/// Annotation of a pod with the name of its gang.
const GANG: &str = "bench.gpuwarden.dev/gang";
/// New addresses of the last member of each gang.
const ROUNDS: usize = 50;
/// Pause between two of them.
const QUIET: Duration = Duration::from_millis(40);
/// Longest time until a change is observed, and until the webhook is ready.
const LIMIT: Duration = Duration::from_secs(30);
const BASELINE: &str = "bare PATCH";
const CONFIG: &str = "image: registry.example/gpuwarden:1
gangDiscovery:
  name: bench
  annotationKeys: [bench.gpuwarden.dev/gang]
  podGroupGVR: {group: bench.gpuwarden.dev, version: v1, resource: podgroups}
";

pub(crate) async fn run(args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    rows.push(start::run().await?);
    let Some(path) = &args.kubeconfig else {
        rows.push(Figure::absent("preflight", NO_CLUSTER.to_owned()));
        return Ok(());
    };
    let client = cluster_client(path, args.context.as_deref()).await?;
    let made = prepare(&client).await;
    let measured = match made {
        Ok(()) => measure(args, &client, rows).await,
        Err(error) => Err(error),
    };
    clean_up(&client).await?;
    measured
}

async fn measure(args: &Args, client: &Client, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    let webhook = Webhook::start(args, client).await?;
    rows.extend(admission::run(&webhook, client).await?);
    let mut maps = Maps::watch(client).await?;
    for size in &args.gangs {
        progress(&format!("gang of {size} ..."));
        rows.extend(gang(client, &mut maps, usize::from(*size)).await?);
        let usage = Usage::read(webhook.pid)?;
        let memory = Figure::new(format!("preflight.gang-{size}-memory"), usage.rss, "MiB");
        rows.push(memory.note(format!("RSS after it, {:.1} MiB at most", usage.peak)));
    }
    webhook.end().await
}

// === The cluster ===

fn definition() -> anyhow::Result<CustomResourceDefinition> {
    Ok(serde_json::from_value(json!({
        "metadata": {"name": format!("podgroups.{GROUP}")},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"},
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {
                    "type": "object", "x-kubernetes-preserve-unknown-fields": true,
                }},
            }],
        },
    }))?)
}

async fn prepare(client: &Client) -> anyhow::Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let params = PostParams::default();
    for (name, labels) in [
        (NAME, json!({})),
        (PODS, json!({"nvsentinel.nvidia.com/preflight": "enabled"})),
    ] {
        let namespace = json!({"metadata": {"name": name, "labels": labels}});
        let namespace: Namespace = serde_json::from_value(namespace)?;
        Api::all(client.clone()).create(&params, &namespace).await?;
    }
    definitions.create(&params, &definition()?).await?;
    Ok(())
}

async fn clean_up(client: &Client) -> anyhow::Result<()> {
    let params = DeleteParams::default();
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let kind = format!("podgroups.{GROUP}");
    // The webhook removes its registration, unless it has failed.
    let registrations: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    for result in [
        registrations.delete(REGISTRATION, &params).await.map(drop),
        definitions.delete(&kind, &params).await.map(drop),
        namespaces.delete(PODS, &params).await.map(drop),
        namespaces.delete(NAME, &params).await.map(drop),
    ] {
        match result {
            Err(kube::Error::Api(error)) if error.code == 404 => {}
            other => other?,
        }
    }
    Ok(())
}

/// Creates the object with the size of a gang. Its kind is served with a delay after its
/// definition.
async fn make_group(client: &Client, name: &str, members: usize) -> anyhow::Result<()> {
    let kind = GroupVersionKind::gvk(GROUP, "v1", "PodGroup");
    let kind = ApiResource::from_gvk_with_plural(&kind, "podgroups");
    let groups: Api<DynamicObject> = Api::namespaced_with(client.clone(), PODS, &kind);
    let group: DynamicObject = serde_json::from_value(json!({
        "apiVersion": format!("{GROUP}/v1"),
        "kind": "PodGroup",
        "metadata": {"name": name},
        "spec": {"minMember": members},
    }))?;
    let began = Instant::now();
    loop {
        match groups.create(&PostParams::default(), &group).await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(error)) if error.code == 404 && began.elapsed() < LIMIT => {
                tokio::time::sleep(QUIET).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns a pod of a gang with eight GPUs and their network devices.
fn member(gang: &str, name: &str) -> Value {
    let limits = json!({
        "cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8", "nvidia.com/mlnxnics": "8",
    });
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": PODS,
            "labels": {"app": gang},
            "annotations": {GANG: gang},
        },
        "spec": {
            "schedulerName": NAME,
            "containers": [{
                "name": "main",
                "image": "registry.example/training:1",
                "env": [
                    {"name": "NCCL_DEBUG", "value": "WARN"},
                    {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"},
                    {"name": "EPOCHS", "value": "10"},
                ],
                "volumeMounts": [
                    {"name": "dev-shm", "mountPath": "/dev/shm"},
                    {"name": "data", "mountPath": "/data"},
                ],
                "resources": {"limits": limits},
            }],
            "volumes": [
                {"name": "dev-shm", "emptyDir": {"medium": "Memory"}},
                {"name": "data", "emptyDir": {}},
            ],
        },
    })
}

// === The webhook ===

/// A `gpuwarden webhook` that is registered by its URL.
struct Webhook {
    child: Child,
    pid: u32,
    port: u16,
    home: TempDir,
}

impl Webhook {
    /// Starts a webhook and waits until API servers call it.
    async fn start(args: &Args, client: &Client) -> anyhow::Result<Self> {
        let home = tempfile::tempdir()?;
        let config = home.path().join("preflight.yaml");
        fs::write(&config, CONFIG)?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let log = fs::File::create(home.path().join("log"))?;
        let kubeconfig = args.kubeconfig.as_ref().context("no cluster is named")?;
        let mut command = Command::new(testkit::binary()?);
        command.arg("webhook").arg("--config").arg(&config);
        command.arg("--kubeconfig").arg(kubeconfig);
        command.args(args.context.iter().flat_map(|name| ["--context", name]));
        command.args([
            "--namespace",
            NAME,
            "--listen",
            &format!("127.0.0.1:{port}"),
        ]);
        for flag in ["--metrics-listen", "--rendezvous-listen"] {
            command.args([flag, "127.0.0.1:0"]);
        }
        command.args(["--register-url", &format!("https://127.0.0.1:{port}")]);
        command.stdin(Stdio::null()).stdout(log.try_clone()?);
        let child = command.stderr(log).kill_on_drop(true).spawn()?;
        let pid = child.id().context("the webhook has ended")?;
        let webhook = Self {
            child,
            pid,
            port,
            home,
        };
        let asked = webhook.is_asked(client).await;
        asked.with_context(|| webhook.log())?;
        Ok(webhook)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.home.path().join("log")).unwrap_or_default()
    }

    /// Waits until a new pod gets checks.
    async fn is_asked(&self, client: &Client) -> anyhow::Result<()> {
        make_group(client, "probe", 1).await?;
        let pods: Api<Pod> = Api::namespaced(client.clone(), PODS);
        let params = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let probe: Pod = serde_json::from_value(member("probe", "probe"))?;
        let began = Instant::now();
        loop {
            let made = pods.create(&params, &probe).await;
            let spec = made.as_ref().ok().and_then(|pod| pod.spec.as_ref());
            if spec.is_some_and(|spec| spec.init_containers.is_some()) {
                return Ok(());
            }
            if began.elapsed() > LIMIT {
                let made = made.map(drop);
                bail!("no pod gets checks after {} s: {made:?}", LIMIT.as_secs());
            }
            tokio::time::sleep(QUIET).await;
        }
    }

    /// Ends the webhook, which removes its registration.
    async fn end(mut self) -> anyhow::Result<()> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        kill_process(pid.context("no process")?, Signal::TERM)?;
        let ended = tokio::time::timeout(LIMIT, self.child.wait());
        ended.await.context("the webhook does not end")??;
        Ok(())
    }
}

// === Gangs ===

type Seen = Pin<Box<dyn Stream<Item = kube::Result<WatchEvent<ConfigMap>>> + Send>>;

/// `ConfigMap`s of the namespace, and their watch.
struct Maps {
    api: Api<ConfigMap>,
    seen: Seen,
}

impl Maps {
    async fn watch(client: &Client) -> anyhow::Result<Self> {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), PODS);
        let bare = json!({"metadata": {"name": "bare"}, "data": {}});
        let bare: ConfigMap = serde_json::from_value(bare)?;
        let bare = api.create(&PostParams::default(), &bare).await?;
        let version = bare.metadata.resource_version.unwrap_or_default();
        let seen = api.watch(&WatchParams::default(), &version).await?;
        Ok(Self {
            api,
            seen: Box::pin(seen),
        })
    }

    /// Waits until a map has this number of peers, one of them with this address.
    async fn wait(&mut self, map: &str, peers: usize, address: &str) -> anyhow::Result<()> {
        let seeing = async {
            while let Some(event) = self.seen.try_next().await? {
                let (WatchEvent::Added(seen) | WatchEvent::Modified(seen)) = event else {
                    continue;
                };
                let data = seen.data.unwrap_or_default();
                let told = data.get("peers").map(String::as_str).unwrap_or_default();
                let is_map = seen.metadata.name.as_deref() == Some(map);
                if is_map && told.lines().count() == peers && told.contains(address) {
                    return Ok(());
                }
            }
            bail!("the watch of the ConfigMaps has ended")
        };
        let seen = tokio::time::timeout(LIMIT, seeing).await;
        seen.with_context(|| format!("{map} has no {peers} peers with {address}"))?
    }

    /// Runs the baseline: writes `peers` peers with one PATCH. Returns the time until the watch
    /// shows it.
    async fn bare(&mut self, peers: usize, address: &str) -> anyhow::Result<f64> {
        let lines: Vec<String> = (0..peers)
            .map(|rank| format!("member-{rank};{address};{rank};preflight-dcgm-diag"))
            .collect();
        let patch = Patch::Merge(json!({"data": {"peers": lines.join("\n")}}));
        let began = Instant::now();
        self.api
            .patch("bare", &PatchParams::default(), &patch)
            .await?;
        self.wait("bare", peers, address).await?;
        Ok(millis(began))
    }
}

/// Creates a gang, and gives its last member one address after the other.
async fn gang(client: &Client, maps: &mut Maps, size: usize) -> anyhow::Result<Vec<Figure>> {
    let name = format!("gang-{size}");
    let map = format!("preflight-bench-{PODS}-{name}");
    make_group(client, &name, size).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), PODS);
    let member_name = |number: usize| format!("{name}-{number:04}");
    for number in 0..size {
        let pod: Pod = serde_json::from_value(member(&name, &member_name(number)))?;
        pods.create(&PostParams::default(), &pod).await?;
    }
    let give = async |number: usize, address: &str| {
        let status = json!({"status": {"podIP": address, "podIPs": [{"ip": address}]}});
        let patch = Patch::Merge(status);
        let params = PatchParams::default();
        pods.patch_status(&member_name(number), &params, &patch)
            .await
    };
    for number in 0..size - 1 {
        let address = format!("10.1.{}.{}", number / 250, number % 250 + 1);
        give(number, &address).await?;
    }
    maps.wait(&map, size - 1, "10.1.0.1;").await?;
    let (mut whole, mut bare) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        let address = format!("10.2.{}.{round}", size % 250);
        bare.push(maps.bare(size, &format!("{address};")).await?);
        tokio::time::sleep(QUIET).await;
        let began = Instant::now();
        give(size - 1, &address).await?;
        maps.wait(&map, size, &format!("{address};")).await?;
        whole.push(millis(began));
        tokio::time::sleep(QUIET).await;
    }
    let figure = |kind: &str, of: &dyn Fn(&[f64]) -> f64| {
        let figure = Figure::new(format!("preflight.{name}-{kind}"), of(&whole), "ms");
        figure.beside(BASELINE, of(&bare))
    };
    let first = whole.first().copied().unwrap_or_default();
    let note = format!(
        "from the patch of the last address until a watch shows the whole ConfigMap; the first time \
         {first:.1} ms"
    );
    Ok(vec![
        figure("p50", &median).note(note),
        figure("p99", &|values| percentile(values, 99)),
    ])
}

fn millis(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1_000.0
}
