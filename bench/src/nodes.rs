//! Nodes that a benchmark creates, and one watch on all of them.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, anyhow, bail};
use cli::bench::{cluster_client, progress};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kube::Client;
use kube::api::{DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::core::Request;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::Args;

/// API path of nodes.
const NODES: &str = "/api/v1/nodes";
/// Label of all nodes of one run.
const LABEL: &str = "gpuwarden-bench";
/// Concurrent requests while nodes are created.
const WIDTH: usize = 8;
/// Longest time until the watch shows a burst.
const LIMIT: Duration = Duration::from_secs(300);
/// Pause between two questions for nodes without a label.
const POLL: Duration = Duration::from_millis(50);
/// Timeout of a watch on the server, in seconds. The watch is then restarted.
const WATCH_SECONDS: u32 = 290;
/// Number of attempts to delete all nodes: with thousands, the API server times out, and the
/// next request deletes the rest.
const DELETE_TRIES: usize = 10;
/// Labels and annotations that a quarantine sets on a node.
const LABELS: usize = 4;
const ANNOTATIONS: usize = 6;
/// Size of the annotation that lists the events, and of each other (bytes).
const TEXT: usize = 600;
const SHORT_TEXT: usize = 40;

/// Nodes of a run.
pub(crate) struct Nodes {
    client: Client,
    run: String,
    names: Vec<String>,
    seen: watch::Receiver<Seen>,
    watching: JoinHandle<()>,
}

/// State of the nodes that the watch has shown.
#[derive(Clone, Debug)]
struct Seen {
    cordoned: BTreeSet<String>,
    at: Instant,
    /// Error that has ended the watch, if any.
    ended: Option<String>,
}

/// Creates nodes in the cluster, measures with them, and deletes them, also after an error.
pub(crate) async fn with_nodes<T>(
    args: &Args,
    name: &str,
    count: usize,
    measure: impl AsyncFnOnce(&mut Nodes) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    progress(&format!("{name}, making {count} nodes ..."));
    let mut nodes = Nodes::create(args, count).await?;
    let measured = tokio::select! {
        measured = measure(&mut nodes) => measured,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
    };
    let deleted = nodes.delete().await;
    let measured = measured?;
    deleted.map(|()| measured)
}

// === impl Nodes ===

impl Nodes {
    async fn create(args: &Args, count: usize) -> anyhow::Result<Self> {
        let path = args.kubeconfig.as_ref().context("no kubeconfig is named")?;
        let client = cluster_client(path, args.context.as_deref()).await?;
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let run = format!("{:x}", since.as_micros());
        let names: Vec<String> = (0..count)
            .map(|index| format!("{LABEL}-{run}-{index}"))
            .collect();
        let version = list_version(&client, &run).await?;
        let (sender, seen) = watch::channel(Seen {
            cordoned: BTreeSet::new(),
            at: Instant::now(),
            ended: None,
        });
        let watching = tokio::spawn(keep_watching(client.clone(), run.clone(), version, sender));
        let nodes = Self {
            client,
            run,
            names,
            seen,
            watching,
        };
        if let Err(error) = nodes.make().await {
            // The nodes created before the error are deleted.
            drop(nodes.delete().await);
            return Err(error);
        }
        Ok(nodes)
    }

    /// Returns the name of the first node.
    pub(crate) fn first(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// Returns the label selector of all nodes of the run.
    pub(crate) fn selector(&self) -> String {
        format!("{LABEL}={}", self.run)
    }

    /// Cordons one node as [`Self::bare`] does.
    pub(crate) fn cordon(&self, name: &str) -> impl Future<Output = anyhow::Result<()>> + use<> {
        let (client, patch) = (self.client.clone(), quarantine(&self.run, true));
        let request = http::Request::patch(format!("{NODES}/{name}"))
            .header(http::header::CONTENT_TYPE, "application/json-patch+json");
        async move {
            let request = request.body(serde_json::to_vec(&patch)?)?;
            client.request::<Value>(request).await?;
            Ok(())
        }
    }

    /// Returns the names of the first `count` nodes.
    pub(crate) fn names(&self, count: usize) -> Vec<String> {
        self.names.iter().take(count).cloned().collect()
    }

    /// Cordons or uncordons the first `count` nodes with one patch each, of the form and the
    /// size of a quarantine's, `width` at once, and waits until the watch shows it. Returns the
    /// time.
    pub(crate) async fn bare(
        &mut self,
        count: usize,
        width: usize,
        cordon: bool,
    ) -> anyhow::Result<Duration> {
        let patch = quarantine(&self.run, cordon);
        self.patch(count, width, "application/json-patch+json", &patch, cordon)
            .await
    }

    /// Uncordons the first `count` nodes as a person would, with the concurrency of
    /// [`Self::bare`].
    pub(crate) async fn uncordon(&mut self, count: usize, width: usize) -> anyhow::Result<()> {
        let patch = json!({"spec": {"unschedulable": null}});
        self.patch(count, width, "application/merge-patch+json", &patch, false)
            .await?;
        Ok(())
    }

    async fn patch(
        &mut self,
        count: usize,
        width: usize,
        form: &str,
        patch: &Value,
        cordon: bool,
    ) -> anyhow::Result<Duration> {
        let began = Instant::now();
        self.send(count, width, form, patch).await?;
        let seen = self.wait(if cordon { count } else { 0 }).await?;
        Ok(seen.duration_since(began))
    }

    /// Sends a patch for each of the first `count` nodes, `width` at once.
    pub(crate) async fn send(
        &self,
        count: usize,
        width: usize,
        form: &str,
        patch: &Value,
    ) -> anyhow::Result<()> {
        let body = serde_json::to_vec(patch)?;
        let patches = self.names(count).into_iter().map(|name| {
            let request = http::Request::patch(format!("{NODES}/{name}"))
                .header(http::header::CONTENT_TYPE, form)
                .body(body.clone());
            let client = self.client.clone();
            async move {
                client.request::<Value>(request?).await?;
                anyhow::Ok(())
            }
        });
        stream::iter(patches.collect::<Vec<_>>())
            .buffer_unordered(width)
            .try_collect::<Vec<()>>()
            .await
            .context("patch a node")?;
        Ok(())
    }

    /// Waits until all nodes have a label.
    pub(crate) async fn labelled(&self, key: &str) -> anyhow::Result<Instant> {
        let lacking = format!("{},!{key}", self.selector());
        let lacking = ListParams::default().labels(&lacking).limit(1);
        let deadline = Instant::now() + LIMIT;
        loop {
            let request = Request::new(NODES).list_metadata(&lacking)?;
            let found = self.client.request::<Value>(request).await?;
            if found["items"].as_array().is_none_or(Vec::is_empty) {
                return Ok(Instant::now());
            }
            if Instant::now() > deadline {
                bail!(
                    "after {} s not all nodes have the label {key}",
                    LIMIT.as_secs()
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits until the watch shows this number of cordoned nodes. Returns the time when it did.
    pub(crate) async fn wait(&mut self, cordoned: usize) -> anyhow::Result<Instant> {
        let shown = |seen: &Seen| seen.ended.is_some() || seen.cordoned.len() == cordoned;
        let Ok(seen) = tokio::time::timeout(LIMIT, self.seen.wait_for(shown)).await else {
            let now = self.seen.borrow().cordoned.len();
            bail!(
                "after {} s {now} nodes are cordoned, not {cordoned}",
                LIMIT.as_secs()
            );
        };
        let seen = seen.context("the watch has ended")?.clone();
        match seen.ended {
            Some(why) => bail!("the nodes can no longer be watched: {why}"),
            None => Ok(seen.at),
        }
    }

    /// Ends the watch and deletes the nodes.
    async fn delete(self) -> anyhow::Result<()> {
        self.watching.abort();
        let mine = ListParams::default().labels(&format!("{LABEL}={}", self.run));
        let mut answer = Ok(());
        for _ in 0..DELETE_TRIES {
            let request = Request::new(NODES).delete_collection(&DeleteParams::default(), &mine)?;
            answer = self.client.request::<Value>(request).await.map(drop);
            if answer.is_ok() {
                break;
            }
        }
        answer.with_context(|| {
            format!(
                "delete the nodes: delete those with the label {LABEL}={} by hand",
                self.run
            )
        })
    }

    async fn make(&self) -> anyhow::Result<()> {
        let made = self.names.iter().map(|name| {
            let node = json!({
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "labels": {LABEL: self.run},
                    // Kwok, if it runs, keeps the node alive.
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                },
            });
            let client = self.client.clone();
            async move {
                let body = serde_json::to_vec(&node)?;
                let request = Request::new(NODES).create(&PostParams::default(), body)?;
                client.request::<Value>(request).await?;
                anyhow::Ok(())
            }
        });
        stream::iter(made.collect::<Vec<_>>())
            .buffer_unordered(WIDTH)
            .try_collect::<Vec<()>>()
            .await
            .context("make a node")?;
        Ok(())
    }
}

/// Returns a patch like that of a quarantine, or of its release. It tests the current state of
/// the node, and sets [`LABELS`] labels and [`ANNOTATIONS`] annotations.
fn quarantine(run: &str, cordon: bool) -> Value {
    let label = |index| (format!("/metadata/labels/bench-{index}"), json!("bench"));
    let text = |index| {
        let bytes = if index == 0 { TEXT } else { SHORT_TEXT };
        let path = format!("/metadata/annotations/bench-{index}");
        (path, json!("x".repeat(bytes)))
    };
    let fields: Vec<(String, Value)> = (0..LABELS)
        .map(label)
        .chain((0..ANNOTATIONS).map(text))
        .chain([("/spec/unschedulable".to_owned(), json!(true))])
        .collect();
    let is_ours = json!({"op": "test", "path": format!("/metadata/labels/{LABEL}"), "value": run});
    let tests = fields.iter().map(|(path, value)| {
        let before = if cordon { &Value::Null } else { value };
        json!({"op": "test", "path": path, "value": before})
    });
    let edits = fields.iter().map(|(path, value)| {
        if cordon {
            json!({"op": "add", "path": path, "value": value})
        } else {
            json!({"op": "remove", "path": path})
        }
    });
    [is_ours].into_iter().chain(tests).chain(edits).collect()
}

async fn list_version(client: &Client, run: &str) -> anyhow::Result<String> {
    let mine = ListParams::default().labels(&format!("{LABEL}={run}"));
    let list: Value = client.request(Request::new(NODES).list(&mine)?).await?;
    let version = list["metadata"]["resourceVersion"].as_str();
    version
        .map(str::to_owned)
        .context("the list of nodes has no version")
}

async fn keep_watching(
    client: Client,
    run: String,
    mut version: String,
    seen: watch::Sender<Seen>,
) {
    loop {
        if let Err(error) = follow(&client, &run, &mut version, &seen).await {
            seen.send_modify(|seen| seen.ended = Some(format!("{error:#}")));
            return;
        }
    }
}

/// Watches the nodes until the API server ends the watch.
async fn follow(
    client: &Client,
    run: &str,
    version: &mut String,
    seen: &watch::Sender<Seen>,
) -> anyhow::Result<()> {
    let params = WatchParams::default()
        .labels(&format!("{LABEL}={run}"))
        .timeout(WATCH_SECONDS);
    let request = Request::new(NODES).watch(&params, version)?;
    let mut events = pin!(client.request_events::<Value>(request).await?);
    while let Some(event) = events.next().await {
        let at = Instant::now();
        match event? {
            WatchEvent::Added(node) | WatchEvent::Modified(node) => {
                let metadata = &node["metadata"];
                let name = metadata["name"].as_str().context("a node without name")?;
                let cordoned = node["spec"]["unschedulable"] == json!(true);
                seen.send_if_modified(|seen| {
                    let changed = if cordoned {
                        seen.cordoned.insert(name.to_owned())
                    } else {
                        seen.cordoned.remove(name)
                    };
                    if changed {
                        seen.at = at;
                    }
                    changed
                });
                if let Some(newer) = metadata["resourceVersion"].as_str() {
                    newer.clone_into(version);
                }
            }
            WatchEvent::Bookmark(bookmark) => *version = bookmark.metadata.resource_version,
            WatchEvent::Deleted(_) => {}
            WatchEvent::Error(status) => bail!("{}", status.message),
        }
    }
    Ok(())
}
