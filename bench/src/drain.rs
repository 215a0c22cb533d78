//! Many nodes with pods fail at once, on a real cluster: until all are cordoned and empty, and each says
//! that it is drained.
//!
//! Kwok plays the kubelets. The faults are sent to a `gpuwarden run --drain` in one batch. Before it, in the
//! same run, a bare loop over 32 connections makes the same calls for as many pods: one patch of each
//! node, then one eviction of each of its pods. Both are seen by the same two watches.

use std::collections::BTreeMap;
use std::fs;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cli::bench::{Figure, cluster_client, median, percentile, progress};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::api::{Api, DeleteParams, EvictParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Client, Resource, ResourceExt as _};
use serde_json::json;
use testkit::Product;
use tokio::sync::Notify;

use crate::Args;
use crate::burst::report;
use crate::nodes::{Nodes, with_nodes};
use crate::product;

/// Pods of each node.
const PODS: usize = 15;
/// Connections of the bare loop, and of what makes the pods.
const WIDTH: usize = 32;
const BASELINE: &str = "bare loop of 32";
/// Longest time until all pods run, or all are gone.
const LIMIT: Duration = Duration::from_secs(900);
/// Pause between two looks whether all pods run.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Pause after pods were made, for what others have to do with them.
const QUIET: Duration = Duration::from_secs(3);
/// The API server ends a watch after so many seconds; it is then started anew.
const WATCH_SECONDS: u32 = 290;
/// Label of a pod: its node.
const NODE: &str = "gpuwarden-bench-node";
const STATE: &str = contract::keys::STATE_LABEL;

pub(crate) async fn run(args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    let count = args.nodes.iter().copied().map(usize::from).max();
    let count = count.unwrap_or_default();
    with_nodes(args, "drain", count, async |nodes| {
        let space = Space::new(args, nodes).await?;
        let measured = measure(args, nodes, &space, count).await;
        space.delete().await?;
        rows.extend(measured?);
        Ok(())
    })
    .await
}

/// The namespace of the pods.
struct Space {
    client: Client,
    name: String,
}

/// What the watches show.
#[derive(Default)]
struct Seen {
    /// Pods that are left on each node.
    left: BTreeMap<String, usize>,
    /// The time at which the last one of a node was gone.
    empty_at: BTreeMap<String, Instant>,
    /// The time at which a node said that it is drained.
    drained_at: BTreeMap<String, Instant>,
    /// The reason why a watch has ended, if one has.
    ended: Option<String>,
}

/// Both watches.
#[derive(Clone, Default)]
struct Watched {
    seen: Arc<Mutex<Seen>>,
    news: Arc<Notify>,
}

async fn measure(
    args: &Args,
    nodes: &mut Nodes,
    space: &Space,
    count: usize,
) -> anyhow::Result<Vec<Figure>> {
    let names = nodes.names(count);
    space.fill(&names).await?;
    progress(&format!("drain of {count} nodes, a bare loop ..."));
    let watched = space.watch(nodes).await?;
    let began = Instant::now();
    space.bare(nodes, &names).await?;
    let bare = watched.wait(|seen| seen.empty_at.len() == count).await?;
    let bare = bare.duration_since(began);
    nodes.uncordon(count, WIDTH).await?;

    space.fill(&names).await?;
    progress(&format!("drain of {count} nodes ..."));
    let config = tempfile::tempdir()?;
    let path = config.path().join("drain.toml");
    let mode = format!(
        "[[userNamespaces]]\nname = \"{}\"\nmode = \"Immediate\"\n",
        space.name
    );
    fs::write(&path, mode)?;
    let launch = product::run(args, nodes.first())?;
    let launch = launch.arg("--drain").option("--drain-config", &path);
    let product = product::start(launch).await?;
    let watched = space.watch(nodes).await?;
    let drained = drained(&product, &watched, nodes, names).await;
    drained
        .map(|(empty, waits)| figures(count, bare, empty, &waits))
        .map_err(|error| product.failure(&format!("{error:#}")))
}

/// Has all nodes fail. Returns the time until all their pods were gone, and for each node the time from
/// its last pod to its word that it is drained.
async fn drained(
    product: &Product,
    watched: &Watched,
    nodes: &mut Nodes,
    names: Vec<String>,
) -> anyhow::Result<(Duration, Vec<f64>)> {
    let count = names.len();
    let began = Instant::now();
    report(product, names.clone(), true).await?;
    let empty = watched.wait(|seen| seen.empty_at.len() == count).await?;
    watched.wait(|seen| seen.drained_at.len() == count).await?;
    let waits = {
        let seen = watched.lock();
        let both = names.iter().filter_map(|name| {
            let (empty, drained) = (seen.empty_at.get(name)?, seen.drained_at.get(name)?);
            Some(drained.saturating_duration_since(*empty).as_secs_f64() * 1_000.0)
        });
        both.collect()
    };
    report(product, names, false).await?;
    nodes.wait(0).await?;
    Ok((empty.duration_since(began), waits))
}

#[allow(clippy::cast_precision_loss)] // Thousands at most.
fn figures(count: usize, bare: Duration, ours: Duration, waits: &[f64]) -> Vec<Figure> {
    let name = |figure: &str| format!("drain-{count}.{figure}");
    let pods = (count * PODS) as f64;
    vec![
        Figure::new(name("empty"), ours.as_secs_f64(), "s")
            .beside(BASELINE, bare.as_secs_f64())
            .note(format!(
                "{count} nodes with {PODS} pods each, until the last pod was gone: {:.0} pods/s, the loop \
                 {:.0}/s",
                pods / ours.as_secs_f64(),
                pods / bare.as_secs_f64()
            )),
        Figure::new(name("drained"), median(waits), "ms").note(format!(
            "of one node, from its last pod to drain-succeeded: the median; 99 of 100 in {:.0} ms",
            percentile(waits, 99)
        )),
    ]
}

// === impl Space ===

impl Space {
    async fn new(args: &Args, nodes: &Nodes) -> anyhow::Result<Self> {
        let path = args.kubeconfig.as_ref().context("no kubeconfig is named")?;
        let client = cluster_client(path, args.context.as_deref()).await?;
        let name = format!("{}-pods", nodes.first());
        let namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces
            .create(&PostParams::default(), &namespace)
            .await?;
        // Without its service account no pod is admitted; a controller makes that.
        tokio::time::sleep(QUIET).await;
        Ok(Self { client, name })
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    /// Gives each node its pods, and waits until they run.
    async fn fill(&self, nodes: &[String]) -> anyhow::Result<()> {
        progress(&format!("making {} pods ...", nodes.len() * PODS));
        let pods = self.pods();
        let each = nodes
            .iter()
            .flat_map(|node| (0..PODS).map(move |index| (node, index)));
        let made = each.map(|(node, index)| {
            let pods = pods.clone();
            let pod = json!({
                "metadata": {"name": format!("{node}-{index}"), "labels": {NODE: node}},
                "spec": {
                    "nodeName": node,
                    "automountServiceAccountToken": false,
                    "terminationGracePeriodSeconds": 1,
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{"name": "work", "image": "work"}],
                },
            });
            async move {
                let pod = serde_json::from_value(pod)?;
                pods.create(&PostParams::default(), &pod).await?;
                anyhow::Ok(())
            }
        });
        stream::iter(made.collect::<Vec<_>>())
            .buffer_unordered(WIDTH)
            .try_collect::<Vec<()>>()
            .await
            .context("make a pod")?;
        let began = Instant::now();
        let waiting = ListParams::default()
            .fields("status.phase!=Running")
            .limit(1);
        while !pods.list_metadata(&waiting).await?.items.is_empty() {
            if began.elapsed() > LIMIT {
                bail!("not all pods run after {} s: does kwok?", LIMIT.as_secs());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        tokio::time::sleep(QUIET).await;
        Ok(())
    }

    /// Cordons each node and evicts its pods, and does nothing else.
    async fn bare(&self, nodes: &mut Nodes, names: &[String]) -> anyhow::Result<()> {
        let pods = self.pods();
        let each = names.iter().map(|node| {
            let (pods, cordon) = (pods.clone(), nodes.cordon(node));
            async move {
                cordon.await?;
                for index in 0..PODS {
                    pods.evict(&format!("{node}-{index}"), &EvictParams::default())
                        .await?;
                }
                anyhow::Ok(())
            }
        });
        stream::iter(each.collect::<Vec<_>>())
            .buffer_unordered(WIDTH)
            .try_collect::<Vec<()>>()
            .await
            .context("cordon a node and evict its pods")?;
        Ok(())
    }

    /// Watches the pods and the nodes from now on.
    async fn watch(&self, nodes: &Nodes) -> anyhow::Result<Watched> {
        let watched = Watched::default();
        let pods = self.pods();
        let listed = pods.list_metadata(&ListParams::default()).await?;
        for pod in &listed.items {
            watched.pod(pod.labels().get(NODE), true);
        }
        let version = listed.metadata.resource_version.unwrap_or_default();
        let here = watched.clone();
        tokio::spawn(follow(
            pods,
            WatchParams::default(),
            version,
            watched.clone(),
            move |event| {
                if let Told::Gone(labels) = event {
                    here.pod(labels.get(NODE), false);
                }
            },
        ));
        let api: Api<Node> = Api::all(self.client.clone());
        let selector = nodes.selector();
        let listed = api
            .list_metadata(&ListParams::default().labels(&selector))
            .await?;
        let version = listed.metadata.resource_version.unwrap_or_default();
        let (params, here) = (WatchParams::default().labels(&selector), watched.clone());
        tokio::spawn(follow(
            api,
            params,
            version,
            watched.clone(),
            move |event| {
                if let Told::Seen(name, labels) = event
                    && labels
                        .get(STATE)
                        .is_some_and(|state| state == contract::keys::STATE_DRAINED)
                {
                    here.lock()
                        .drained_at
                        .entry(name)
                        .or_insert_with(Instant::now);
                    here.news.notify_waiters();
                }
            },
        ));
        Ok(watched)
    }

    async fn delete(&self) -> anyhow::Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let deleted = namespaces
            .delete(&self.name, &DeleteParams::default())
            .await;
        deleted
            .map(drop)
            .with_context(|| format!("delete the namespace {} by hand", self.name))
    }
}

/// One thing that a watch tells.
enum Told {
    /// An object is there, of this name and with these labels.
    Seen(String, BTreeMap<String, String>),
    /// It is gone.
    Gone(BTreeMap<String, String>),
}

/// Follows the metadata of objects for as long as the process lives.
async fn follow<K>(
    api: Api<K>,
    params: WatchParams,
    mut version: String,
    watched: Watched,
    tell: impl Fn(Told),
) where
    K: Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let params = params.timeout(WATCH_SECONDS);
    loop {
        let turn = async {
            let mut events = pin!(api.watch_metadata(&params, &version).await?);
            let mut newest = version.clone();
            while let Some(event) = events.try_next().await? {
                match event {
                    WatchEvent::Added(one) | WatchEvent::Modified(one) => {
                        newest = one.resource_version().unwrap_or(newest);
                        tell(Told::Seen(one.name_any(), one.labels().clone()));
                    }
                    WatchEvent::Deleted(one) => {
                        newest = one.resource_version().unwrap_or(newest);
                        tell(Told::Gone(one.labels().clone()));
                    }
                    WatchEvent::Bookmark(one) => newest = one.metadata.resource_version,
                    WatchEvent::Error(status) => bail!("{}", status.message),
                }
            }
            anyhow::Ok(newest)
        };
        match turn.await {
            Ok(newest) => version = newest,
            Err(error) => {
                watched.lock().ended = Some(format!("{error:#}"));
                watched.news.notify_waiters();
                return;
            }
        }
    }
}

// === impl Watched ===

impl Watched {
    fn lock(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in that a pod of a node is there, or gone.
    fn pod(&self, node: Option<&String>, there: bool) {
        let Some(node) = node else {
            return;
        };
        let mut seen = self.lock();
        let left = seen.left.entry(node.clone()).or_default();
        *left = if there {
            *left + 1
        } else {
            left.saturating_sub(1)
        };
        if *left == 0 {
            seen.empty_at.insert(node.clone(), Instant::now());
        }
        drop(seen);
        self.news.notify_waiters();
    }

    /// Waits until it is seen so. Returns when it was.
    async fn wait(&self, shown: impl Fn(&Seen) -> bool) -> anyhow::Result<Instant> {
        let until = Instant::now() + LIMIT;
        loop {
            let news = self.news.notified();
            {
                let seen = self.lock();
                if let Some(why) = &seen.ended {
                    bail!("the cluster can no longer be watched: {why}");
                }
                if shown(&seen) {
                    return Ok(Instant::now());
                }
            }
            if tokio::time::timeout(until - Instant::now(), news)
                .await
                .is_err()
            {
                let seen = self.lock();
                let (empty, drained) = (seen.empty_at.len(), seen.drained_at.len());
                bail!(
                    "after {} s {empty} nodes are empty and {drained} drained",
                    LIMIT.as_secs()
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_empty_when_its_last_pod_is_gone() {
        let watched = Watched::default();
        let node = "n1".to_owned();
        for there in [true, true, false] {
            watched.pod(Some(&node), there);
        }
        assert!(watched.lock().empty_at.is_empty());
        watched.pod(Some(&node), false);
        assert_eq!(watched.lock().empty_at.len(), 1);
    }

    #[test]
    fn figures_stand_beside_the_loop() {
        let second = Duration::from_secs;
        let rows = figures(10, second(3), second(6), &[10.0, 30.0, 20.0]);
        let told: Vec<_> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.value, row.ratio))
            .collect();
        assert_eq!(
            told,
            [
                ("drain-10.empty", Some(6.0), Some(2.0)),
                ("drain-10.drained", Some(20.0), None)
            ]
        );
    }
}
