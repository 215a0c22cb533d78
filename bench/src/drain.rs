//! Faults on many nodes with pods at once, on a real cluster: the time until all nodes are
//! cordoned and empty, and until a reboot is requested for each. Then a maintenance of one node, which begins
//! at once: the time until that node is empty.
//!
//! Kwok plays the kubelets. The faults are sent to a `gpuwarden run --drain --remediate` in one
//! batch. The baseline, earlier in the same run, is a loop over 32 connections that makes the
//! same calls: one patch of each node, one eviction of each of its pods, and a `RebootNode` each
//! once all pods are gone. The same watches observe both.

use std::collections::BTreeMap;
use std::fs;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cli::bench::{Figure, Usage, cluster_client, median, percentile, progress};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, EvictParams, GroupVersionKind, ListParams,
    PostParams, WatchEvent, WatchParams,
};
use kube::{Client, Resource, ResourceExt as _};
use serde_json::json;
use testkit::Product;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::Args;
use crate::burst::report;
use crate::nodes::{Nodes, with_nodes};
use crate::product;

/// Pods of each node.
const PODS: usize = 15;
/// Connections of the loop, and for creating the pods.
const WIDTH: usize = 32;
const BASELINE: &str = "bare loop of 32";
/// Longest time until all pods run, or all are gone.
const LIMIT: Duration = Duration::from_secs(900);
/// Interval between two checks whether all pods run.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Pause after the pods are created, for the work of the other components on them.
const QUIET: Duration = Duration::from_secs(3);
/// Timeout of a watch on the server, in seconds. The watch is then restarted.
const WATCH_SECONDS: u32 = 290;
/// Label of a pod with the name of its node.
const NODE: &str = "gpuwarden-bench-node";
const STATE: &str = contract::keys::STATE_LABEL;
/// States of a node without pods.
const EMPTY: [&str; 2] = [
    contract::keys::STATE_DRAINED,
    contract::keys::STATE_REMEDIATING,
];
/// Label by which GKE announces a maintenance, with its begin in seconds.
const SCHEDULED: &str = "cloud.google.com/scheduled-maintenance-time";
const REBOOT_KIND: &str = include_str!("../../deploy/helm/gpuwarden/crds/rebootnodes.yaml");

pub(crate) async fn run(args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    let count = args.nodes.iter().copied().map(usize::from).max();
    let count = count.unwrap_or_default();
    with_nodes(args, "drain", count, async |nodes| {
        let space = Space::new(args, nodes).await?;
        let measured = measure(args, nodes, &space, count).await;
        space.clean_up().await?;
        rows.extend(measured?);
        Ok(())
    })
    .await
}

/// Objects that the benchmark creates in addition to its nodes.
struct Space {
    client: Client,
    /// Namespace of the pods.
    name: String,
    /// Label selector of all nodes and reboots of the run.
    selector: String,
    /// True if the run has defined the kind `RebootNode`.
    defined: bool,
}

/// Times until the last pod was gone, and until the last reboot was requested.
#[derive(Clone, Copy)]
struct Took {
    empty: Duration,
    asked: Duration,
}

/// State that the watches have shown.
#[derive(Default)]
struct Seen {
    /// Number of pods left, by node.
    left: BTreeMap<String, usize>,
    /// Time of the last pod's deletion, by node.
    empty_at: BTreeMap<String, Instant>,
    /// Time when the node's label reported the drain as complete, by node.
    drained_at: BTreeMap<String, Instant>,
    /// Number of reboots requested.
    reboots: usize,
    /// Error that has ended a watch, if any.
    ended: Option<String>,
}

/// State and notifications of both watches.
#[derive(Clone, Default)]
struct Watched {
    seen: Arc<Mutex<Seen>>,
    changed: Arc<Notify>,
}

async fn measure(
    args: &Args,
    nodes: &mut Nodes,
    space: &Space,
    count: usize,
) -> anyhow::Result<Vec<Figure>> {
    let names = nodes.names(count);
    let pods = space.fill(&names, "bare").await?;
    progress(&format!("drain of {count} nodes, a bare loop ..."));
    let bare = space.bare(nodes, &names, &pods).await?;
    nodes.uncordon(count, WIDTH).await?;
    space.delete_reboots().await?;

    space.fill(&names, "drain").await?;
    progress(&format!("drain of {count} nodes ..."));
    let config = tempfile::tempdir()?;
    let [drain, remediation, maintenance] =
        ["drain", "remediation", "maintenance"].map(|name| config.path().join(name));
    let mode = format!(
        "[[userNamespaces]]\nname = \"{}\"\nmode = \"Immediate\"\n",
        space.name
    );
    fs::write(&drain, mode)?;
    fs::write(&remediation, space.remediation())?;
    fs::write(&maintenance, "clusterName = 'bench'\n")?;
    let launch = product::run(args, nodes.first())?
        .arg("--drain")
        .option("--drain-config", &drain)
        .arg("--remediate")
        .option("--remediate-config", &remediation)
        .option("--maintenance", &maintenance);
    let product = product::start(launch).await?;
    let measured = async {
        let (watched, _tasks) = space.watch().await?;
        let mut rows = drained(&product, &watched, nodes, names, bare).await?;
        rows.push(noticed(space, nodes).await?);
        Ok(rows)
    };
    let measured: anyhow::Result<_> = measured.await;
    measured.map_err(|error| product.failure(&format!("{error:#}")))
}

/// Announces a maintenance of one node, which begins now, and waits until the node is empty.
async fn noticed(space: &Space, nodes: &mut Nodes) -> anyhow::Result<Figure> {
    space.fill(&nodes.names(1), "notice").await?;
    progress("a notice ...");
    let (watched, _tasks) = space.watch().await?;
    let begin = Timestamp::now().as_second().to_string();
    let notice = json!({"metadata": {"labels": {SCHEDULED: begin}}});
    let began = Instant::now();
    let form = "application/merge-patch+json";
    nodes.send(1, 1, form, &notice).await?;
    let cordoned = nodes.wait(1).await?.duration_since(began);
    let empty = watched.wait(|seen| seen.empty_at.len() == 1).await?;
    let empty = empty.duration_since(began);
    Ok(
        Figure::new("drain.notice", empty.as_secs_f64(), "s").note(format!(
            "one node with {PODS} pods, from the notice until the last pod was gone; cordoned after {:.2} s",
            cordoned.as_secs_f64()
        )),
    )
}

/// Makes all nodes fail, and recover once a reboot is requested for each.
async fn drained(
    product: &Product,
    watched: &Watched,
    nodes: &mut Nodes,
    names: Vec<String>,
    bare: Took,
) -> anyhow::Result<Vec<Figure>> {
    let count = names.len();
    let began = Instant::now();
    report(product, names.clone(), true).await?;
    let empty = watched.wait(|seen| seen.empty_at.len() == count).await?;
    let asked = watched
        .wait(|seen| seen.drained_at.len() == count && seen.reboots == count)
        .await?;
    let usage = Usage::read(product.pid())?;
    let waits: Vec<f64> = {
        let seen = watched.lock();
        let both = names.iter().filter_map(|name| {
            let (empty, drained) = (seen.empty_at.get(name)?, seen.drained_at.get(name)?);
            Some(drained.saturating_duration_since(*empty).as_secs_f64() * 1_000.0)
        });
        both.collect()
    };
    report(product, names, false).await?;
    nodes.wait(0).await?;
    let ours = Took {
        empty: empty.duration_since(began),
        asked: asked.duration_since(began),
    };
    let memory = Figure::new(format!("drain-{count}.memory"), usage.rss, "MiB").note(format!(
        "of this {:.1} MiB are its own; {:.1} MiB at most",
        usage.own, usage.peak
    ));
    let mut rows = figures(count, bare, ours, &waits);
    rows.push(memory);
    Ok(rows)
}

#[allow(clippy::cast_precision_loss)] // Thousands at most.
fn figures(count: usize, bare: Took, ours: Took, waits: &[f64]) -> Vec<Figure> {
    let name = |figure: &str| format!("drain-{count}.{figure}");
    let pods = (count * PODS) as f64;
    let (ours_empty, bare_empty) = (ours.empty.as_secs_f64(), bare.empty.as_secs_f64());
    vec![
        Figure::new(name("empty"), ours_empty, "s")
            .beside(BASELINE, bare_empty)
            .note(format!(
                "{count} nodes with {PODS} pods each, until the last pod was gone: {:.0} pods/s, the loop \
                 {:.0}/s",
                pods / ours_empty,
                pods / bare_empty
            )),
        Figure::new(name("reboots"), ours.asked.as_secs_f64(), "s")
            .beside(BASELINE, bare.asked.as_secs_f64())
            .note(format!(
                "until the last reboot was asked for; the loop took {:.2} s of it for {count} reboots alone",
                bare.asked.saturating_sub(bare.empty).as_secs_f64()
            )),
        Figure::new(name("drained"), median(waits), "ms").note(format!(
            "of one node, from its last pod to its label that says so: the median; 99 of 100 in {:.0} ms",
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
        let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
        let params = PostParams::default();
        Api::all(client.clone()).create(&params, &namespace).await?;
        let kind: CustomResourceDefinition = serde_saphyr::from_str(REBOOT_KIND)?;
        let defined = match Api::all(client.clone()).create(&params, &kind).await {
            Ok(_) => true,
            Err(kube::Error::Api(error)) if error.code == 409 => false,
            Err(error) => return Err(error.into()),
        };
        // Pods are refused until the namespace has a service account, and the kind is served
        // with a delay.
        tokio::time::sleep(QUIET).await;
        Ok(Self {
            client,
            name,
            selector: nodes.selector(),
            defined,
        })
    }

    fn reboots(&self) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("janitor.dgxc.nvidia.com", "v1alpha1", "RebootNode");
        let resource = ApiResource::from_gvk_with_plural(&kind, "rebootnodes");
        Api::all_with(self.client.clone(), &resource)
    }

    /// Returns the label of a reboot, for the template.
    fn label(&self) -> (&str, &str) {
        self.selector.split_once('=').unwrap_or_default()
    }

    /// Returns the remediation configuration: reboots, with the label of the run.
    fn remediation(&self) -> String {
        let (label, run) = self.label();
        format!(
            r#"[template]
mountPath = "/etc/gpuwarden/templates"

[remediationActions.RESTART_BM]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
scope = "Cluster"
completeConditionType = "NodeReady"
templateFileName = "reboot.yaml"
equivalenceGroup = "restart"

[templates]
"reboot.yaml" = """
apiVersion: {{{{ .ApiGroup }}}}/{{{{ .Version }}}}
kind: {{{{ .Kind }}}}
metadata:
  name: maintenance-{{{{ .NodeName }}}}-{{{{ .HealthEventID }}}}
  labels:
    {label}: "{run}"
spec:
  nodeName: {{{{ .NodeName }}}}
"""
"#
        )
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.name)
    }

    /// Creates the pods of each node, and waits until they run. Returns their names by node. The
    /// names differ between rounds: kwok may delete a pod late, and deletes by name.
    async fn fill(&self, nodes: &[String], round: &str) -> anyhow::Result<Vec<Vec<String>>> {
        progress(&format!("making {} pods ...", nodes.len() * PODS));
        let pods = self.pods();
        let name = |node: &String, index| format!("{node}-{round}-{index}");
        let names = nodes
            .iter()
            .map(|node| (0..PODS).map(|index| name(node, index)).collect())
            .collect::<Vec<Vec<String>>>();
        let each = nodes.iter().zip(&names);
        let each = each.flat_map(|(node, names)| names.iter().map(move |name| (node, name)));
        let made = each.map(|(node, name)| {
            let pods = pods.clone();
            let pod = json!({
                "metadata": {"name": name, "labels": {NODE: node}},
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
                Ok(())
            }
        });
        at_once(made).await.context("make a pod")?;
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
        let (there, made) = (
            pods.list_metadata(&ListParams::default())
                .await?
                .items
                .len(),
            nodes.len() * PODS,
        );
        if there != made {
            bail!("{made} pods were made and {there} are there");
        }
        Ok(names)
    }

    /// Runs the baseline: cordons each node, evicts its pods, and then requests the reboots.
    async fn bare(
        &self,
        nodes: &Nodes,
        names: &[String],
        pods_of: &[Vec<String>],
    ) -> anyhow::Result<Took> {
        let (pods, reboots, count) = (self.pods(), self.reboots(), names.len());
        let (watched, _tasks) = self.watch().await?;
        let began = Instant::now();
        at_once(names.iter().zip(pods_of).map(|(node, pods_of_node)| {
            let (pods, cordon) = (pods.clone(), nodes.cordon(node));
            async move {
                cordon.await?;
                for pod in pods_of_node {
                    pods.evict(pod, &EvictParams::default()).await?;
                }
                Ok(())
            }
        }))
        .await
        .context("cordon a node and evict its pods")?;
        let empty = watched.wait(|seen| seen.empty_at.len() == count).await?;
        let (label, run) = self.label();
        at_once(names.iter().map(|node| {
            let reboots = reboots.clone();
            let reboot = json!({
                "apiVersion": "janitor.dgxc.nvidia.com/v1alpha1",
                "kind": "RebootNode",
                "metadata": {"name": node, "labels": {label: run}},
                "spec": {"nodeName": node},
            });
            async move {
                let reboot = serde_json::from_value(reboot)?;
                reboots.create(&PostParams::default(), &reboot).await?;
                Ok(())
            }
        }))
        .await
        .context("make a RebootNode")?;
        let asked = watched.wait(|seen| seen.reboots == count).await?;
        Ok(Took {
            empty: empty.duration_since(began),
            asked: asked.duration_since(began),
        })
    }

    /// Watches the pods, the nodes and the reboots from now on, until the tasks are dropped.
    async fn watch(&self) -> anyhow::Result<(Watched, JoinSet<()>)> {
        let (watched, mut tasks) = (Watched::default(), JoinSet::new());
        let pods = self.pods();
        let listed = pods.list_metadata(&ListParams::default()).await?;
        for pod in &listed.items {
            watched.pod(pod.labels().get(NODE), true);
        }
        let version = listed.metadata.resource_version.unwrap_or_default();
        let here = watched.clone();
        tasks.spawn(follow(
            pods,
            WatchParams::default(),
            version,
            watched.clone(),
            move |event| {
                if let Change::Deleted(labels) = event {
                    here.pod(labels.get(NODE), false);
                }
            },
        ));
        let nodes: Api<Node> = Api::all(self.client.clone());
        let mine = ListParams::default().labels(&self.selector);
        let params = WatchParams::default().labels(&self.selector);
        let version = nodes.list_metadata(&mine).await?.metadata.resource_version;
        let here = watched.clone();
        tasks.spawn(follow(
            nodes,
            params.clone(),
            version.unwrap_or_default(),
            watched.clone(),
            move |event| {
                if let Change::Modified(name, labels) = event
                    && labels
                        .get(STATE)
                        .is_some_and(|state| EMPTY.contains(&state.as_str()))
                {
                    here.drained(name);
                }
            },
        ));
        let reboots = self.reboots();
        let version = reboots
            .list_metadata(&mine)
            .await?
            .metadata
            .resource_version;
        let here = watched.clone();
        tasks.spawn(follow(
            reboots,
            params,
            version.unwrap_or_default(),
            watched.clone(),
            move |event| {
                if let Change::Created = event {
                    here.reboot();
                }
            },
        ));
        Ok((watched, tasks))
    }

    async fn delete_reboots(&self) -> anyhow::Result<()> {
        let mine = ListParams::default().labels(&self.selector);
        self.reboots()
            .delete_collection(&DeleteParams::default(), &mine)
            .await?;
        Ok(())
    }

    async fn clean_up(&self) -> anyhow::Result<()> {
        let params = DeleteParams::default();
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let deleted = namespaces.delete(&self.name, &params).await.map(drop);
        deleted.with_context(|| format!("delete the namespace {} by hand", self.name))?;
        self.delete_reboots().await?;
        if self.defined {
            let kinds: Api<CustomResourceDefinition> = Api::all(self.client.clone());
            kinds
                .delete("rebootnodes.janitor.dgxc.nvidia.com", &params)
                .await?;
        }
        Ok(())
    }
}

/// Runs the calls, at most [`WIDTH`] at once.
async fn at_once(
    calls: impl Iterator<Item = impl Future<Output = anyhow::Result<()>>>,
) -> anyhow::Result<()> {
    stream::iter(calls.collect::<Vec<_>>())
        .buffer_unordered(WIDTH)
        .try_collect()
        .await
}

/// Event of a watch.
enum Change {
    /// An object was created.
    Created,
    /// An object with this name was modified; with its new labels.
    Modified(String, BTreeMap<String, String>),
    /// An object with these labels was deleted.
    Deleted(BTreeMap<String, String>),
}

/// Watches the metadata of objects.
async fn follow<K>(
    api: Api<K>,
    params: WatchParams,
    mut version: String,
    watched: Watched,
    on_change: impl Fn(Change),
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
                    WatchEvent::Added(one) => {
                        newest = one.resource_version().unwrap_or(newest);
                        on_change(Change::Created);
                    }
                    WatchEvent::Modified(one) => {
                        newest = one.resource_version().unwrap_or(newest);
                        on_change(Change::Modified(one.name_any(), one.labels().clone()));
                    }
                    WatchEvent::Deleted(one) => {
                        newest = one.resource_version().unwrap_or(newest);
                        on_change(Change::Deleted(one.labels().clone()));
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
                watched.changed.notify_waiters();
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

    /// Records that a pod of a node was created or is gone.
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
        self.changed.notify_waiters();
    }

    /// Records that a node is reported as drained.
    fn drained(&self, node: String) {
        let now = Instant::now();
        self.lock().drained_at.entry(node).or_insert(now);
        self.changed.notify_waiters();
    }

    /// Records that a reboot was requested.
    fn reboot(&self) {
        self.lock().reboots += 1;
        self.changed.notify_waiters();
    }

    /// Waits until the state meets `shown`. Returns the time when it did.
    async fn wait(&self, shown: impl Fn(&Seen) -> bool) -> anyhow::Result<Instant> {
        let until = Instant::now() + LIMIT;
        loop {
            let changed = self.changed.notified();
            {
                let seen = self.lock();
                if let Some(why) = &seen.ended {
                    bail!("the cluster can no longer be watched: {why}");
                }
                if shown(&seen) {
                    return Ok(Instant::now());
                }
            }
            if tokio::time::timeout(until - Instant::now(), changed)
                .await
                .is_err()
            {
                let seen = self.lock();
                bail!(
                    "after {} s {} nodes are empty, {} drained, and {} reboots asked for",
                    LIMIT.as_secs(),
                    seen.empty_at.len(),
                    seen.drained_at.len(),
                    seen.reboots
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
        let took = |empty, asked| Took {
            empty: second(empty),
            asked: second(asked),
        };
        let rows = figures(10, took(3, 4), took(6, 8), &[10.0, 30.0, 20.0]);
        let told: Vec<_> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.value, row.ratio))
            .collect();
        assert_eq!(
            told,
            [
                ("drain-10.empty", Some(6.0), Some(2.0)),
                ("drain-10.reboots", Some(8.0), Some(2.0)),
                ("drain-10.drained", Some(20.0), None)
            ]
        );
    }
}
