//! The node object of the benchmark, and a watch on it.

use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, bail};
use futures::StreamExt as _;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Request;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::millis;
use crate::args::BenchArgs;

/// Path of the nodes in the API.
const NODES: &str = "/api/v1/nodes";
/// Longest wait for a change.
const LIMIT: Duration = Duration::from_secs(15);
/// Seconds after which the API server ends a watch, which is then started again.
const WATCH_SECONDS: u32 = 290;

/// Node object of a benchmark, to be deleted by [`TestNode::delete`].
pub(in crate::commands::bench) struct TestNode {
    client: Client,
    name: String,
    seen: watch::Receiver<Seen>,
    watching: JoinHandle<()>,
}

/// State of the node in the watch.
#[derive(Clone, Debug)]
struct Seen {
    unschedulable: bool,
    /// Time of the last change of `unschedulable`.
    at: Instant,
    /// Error that ended the watch.
    ended: Option<String>,
}

// === impl TestNode ===

impl TestNode {
    /// Creates the node in the cluster that `args` name, and watches it.
    pub(in crate::commands::bench) async fn create(args: &BenchArgs) -> anyhow::Result<Self> {
        let client = client_of(args).await?;
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let name = format!("gpuwarden-bench-{:x}", since.as_micros());
        let made = make(&client, &name).await?;
        let version = version(&made).context("the new node has no version")?;
        let (sender, seen) = watch::channel(Seen {
            unschedulable: false,
            at: Instant::now(),
            ended: None,
        });
        let watching = tokio::spawn(keep_watching(client.clone(), name.clone(), version, sender));
        Ok(Self {
            client,
            name,
            seen,
            watching,
        })
    }

    pub(in crate::commands::bench) fn name(&self) -> &str {
        &self.name
    }

    /// Waits until the watch shows the state. Returns the time of the change.
    pub(super) async fn wait(&mut self, unschedulable: bool) -> anyhow::Result<Instant> {
        let shown = |seen: &Seen| seen.ended.is_some() || seen.unschedulable == unschedulable;
        let seen = tokio::time::timeout(LIMIT, self.seen.wait_for(shown)).await;
        let wanted = if unschedulable {
            "cordoned"
        } else {
            "returned"
        };
        let Ok(seen) = seen else {
            bail!("the node was not {wanted} within {} s", LIMIT.as_secs());
        };
        let seen = seen.context("the watch has ended")?.clone();
        match seen.ended {
            Some(why) => bail!("the node can no longer be watched: {why}"),
            None => Ok(seen.at),
        }
    }

    /// Cordons the node like `kubectl cordon`, and uncordons it. Returns the time until the watch
    /// showed the cordon (ms).
    pub(super) async fn bare_round(&mut self) -> anyhow::Result<f64> {
        let began = Instant::now();
        self.patch(true).await?;
        let seen = self.wait(true).await?;
        self.patch(false).await?;
        self.wait(false).await?;
        Ok(millis(seen.duration_since(began)))
    }

    async fn patch(&self, unschedulable: bool) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({
            "spec": {"unschedulable": unschedulable.then_some(true)},
        }));
        let request = Request::new(NODES).patch(&self.name, &PatchParams::default(), &patch)?;
        let answer = self.client.request::<Value>(request).await;
        answer.map(drop).context("cordon the node")
    }

    /// Creates the node anew: a node that returns twice within an hour waits before it returns.
    pub(super) async fn renew(&self) -> anyhow::Result<()> {
        let request = Request::new(NODES).delete(&self.name, &DeleteParams::default())?;
        let answer = self.client.request::<Value>(request).await;
        answer.with_context(|| format!("delete the node {}", self.name))?;
        make(&self.client, &self.name).await.map(drop)
    }

    /// Opens a new connection for the next call, like the first call of a started product.
    pub(super) async fn connect_anew(&mut self, args: &BenchArgs) -> anyhow::Result<()> {
        self.client = client_of(args).await?;
        Ok(())
    }

    /// Stops the watch and deletes the node.
    pub(in crate::commands::bench) async fn delete(self) -> anyhow::Result<()> {
        self.watching.abort();
        let request = Request::new(NODES).delete(&self.name, &DeleteParams::default())?;
        let answer = self.client.request::<Value>(request).await;
        answer
            .map(drop)
            .with_context(|| format!("delete the node {}: delete it by hand", self.name))
    }
}

async fn make(client: &Client, name: &str) -> anyhow::Result<Value> {
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
    let request = Request::new(NODES).create(&PostParams::default(), serde_json::to_vec(&node)?)?;
    let made = client.request(request).await;
    made.with_context(|| format!("create the node {name}"))
}

/// Creates a client of the cluster that a kubeconfig names, in its current context or another.
pub async fn client(kubeconfig: &Path, context: Option<&str>) -> anyhow::Result<Client> {
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    let config = Config::from_custom_kubeconfig(Kubeconfig::read_from(kubeconfig)?, &options)
        .await
        .with_context(|| format!("use the kubeconfig {}", kubeconfig.display()))?;
    Ok(Client::try_from(config)?)
}

async fn client_of(args: &BenchArgs) -> anyhow::Result<Client> {
    let path = args.kubeconfig.as_ref().context("no kubeconfig is named")?;
    client(path, args.context.as_deref()).await
}

/// Follows the node until the watch fails.
async fn keep_watching(
    client: Client,
    name: String,
    mut version: String,
    seen: watch::Sender<Seen>,
) {
    loop {
        if let Err(error) = watch_once(&client, &name, &mut version, &seen).await {
            seen.send_modify(|seen| seen.ended = Some(format!("{error:#}")));
            return;
        }
    }
}

async fn watch_once(
    client: &Client,
    name: &str,
    version: &mut String,
    seen: &watch::Sender<Seen>,
) -> anyhow::Result<()> {
    let params = WatchParams::default()
        .fields(&format!("metadata.name={name}"))
        .timeout(WATCH_SECONDS);
    let request = Request::new(NODES).watch(&params, version)?;
    let mut stream = pin!(client.request_events::<Value>(request).await?);
    while let Some(event) = stream.next().await {
        let at = Instant::now();
        match event? {
            WatchEvent::Added(node) | WatchEvent::Modified(node) => {
                let unschedulable = node["spec"]["unschedulable"] == json!(true);
                seen.send_if_modified(|seen| {
                    let changed = seen.unschedulable != unschedulable;
                    if changed {
                        (seen.unschedulable, seen.at) = (unschedulable, at);
                    }
                    changed
                });
                if let Some(newer) = self::version(&node) {
                    *version = newer;
                }
            }
            WatchEvent::Bookmark(bookmark) => *version = bookmark.metadata.resource_version,
            // The node is created anew between two rounds.
            WatchEvent::Deleted(_) => {}
            WatchEvent::Error(status) => bail!("{}", status.message),
        }
    }
    Ok(())
}

fn version(node: &Value) -> Option<String> {
    node["metadata"]["resourceVersion"]
        .as_str()
        .map(str::to_owned)
}
