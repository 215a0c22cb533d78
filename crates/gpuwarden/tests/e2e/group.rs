//! A group of nodes, the product that watches it and is killed at every step of a story, and the record of
//! every time that one of the nodes went out of service.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use contract::{Entity, HealthEvent, RecommendedAction, keys};
use futures::{TryStreamExt as _, future};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, NodeBuilder, Product, unique};

use crate::support::{SOON, send_to};

/// Label that all nodes of a group have in common.
const GROUP: &str = "example.com/group";
/// Annotation that ends a part of the record.
const MARK: &str = "example.com/mark";

/// Nodes of one test, and the product that is responsible for them.
pub(crate) struct Group {
    /// Names of the nodes.
    pub(crate) names: Vec<String>,
    pub(crate) nodes: Api<Node>,
    pub(crate) product: Product,
    record: Arc<Mutex<Record>>,
}

/// Record of the nodes, as they were seen.
#[derive(Default)]
struct Record {
    /// Nodes that are out of service.
    out: BTreeSet<String>,
    /// Number of times that each node went out of service.
    outages: BTreeMap<String, usize>,
    /// Latest value of [`MARK`].
    mark: String,
}

/// Conclusion or its end, as an event reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) rule: String,
    pub(crate) node: String,
    pub(crate) is_healthy: bool,
}

// === impl Group ===

impl Group {
    /// Creates `number` nodes, each described by its number, and starts a product for them.
    pub(crate) async fn new(
        plane: &ControlPlane,
        number: usize,
        describe: impl Fn(usize, NodeBuilder) -> NodeBuilder,
        arrange: impl FnOnce(Launch) -> Launch,
    ) -> anyhow::Result<Self> {
        let client = plane.client().await?;
        let group = unique("group");
        let names: Vec<String> = (0..number).map(|_| unique("e2e")).collect();
        let made = names.iter().enumerate().map(|(number, name)| {
            let node = testkit::node(name).label(GROUP, &group);
            describe(number, node).create(&client)
        });
        future::try_join_all(made).await?;
        let nodes: Api<Node> = Api::all(client);
        let record = Arc::default();
        keep(&record, nodes.clone(), format!("{GROUP}={group}")).await?;
        let launch = Launch::new()?
            .node_name(&names[0])
            .kubeconfig(plane.kubeconfig())
            .option("--accept-nodes", "any");
        Ok(Self {
            product: arrange(launch).start().await?,
            names,
            nodes,
            record,
        })
    }

    /// Kills the product, and starts it again.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        self.product.restart().await
    }

    /// Sends events, which are stored then, and kills the product.
    pub(crate) async fn send_and_kill(&mut self, events: Vec<HealthEvent>) -> anyhow::Result<()> {
        let product = &self.product;
        let sent = || send_to(product, events.clone());
        product.wait_for("the socket", SOON, sent).await?;
        self.kill().await
    }

    /// Returns the answer of a command in JSON.
    pub(crate) async fn shown(&self, args: &[&str]) -> anyhow::Result<Value> {
        let args = args.iter().chain(&["-o", "json"]);
        // The exit code of `status` says how the nodes are.
        let output = self.product.client(args).await?.stdout;
        Ok(serde_json::from_str(&output)?)
    }

    /// Waits until the nodes that are out of service are these. A node that has returned twice within
    /// the hour waits for a minute.
    pub(crate) async fn until_out(&self, names: &[String]) -> anyhow::Result<()> {
        let names: BTreeSet<String> = names.iter().cloned().collect();
        let are_out = || async {
            let out = self.record.lock().unwrap().out.clone();
            if out == names {
                Ok(())
            } else {
                Err(format!("out of service are {out:?}"))
            }
        };
        let what = format!("{names:?} to be out of service");
        self.product.wait_for(&what, SOON * 2, are_out).await
    }

    /// Waits until these nodes of the group, and no others, are in a state of the status.
    pub(crate) async fn until_state(&self, state: &str, names: &[String]) -> anyhow::Result<()> {
        let names: BTreeSet<String> = names.iter().cloned().collect();
        let are = || async {
            let status = self.shown(&["status"]).await?;
            let nodes = status["fleet"]["nodes"].as_array().into_iter().flatten();
            let nodes = nodes.filter(|node| node["state"] == state);
            let found = nodes.map(|node| text(&node["name"]));
            // Other tests use the same control plane.
            let found: BTreeSet<String> = found.filter(|name| self.names.contains(name)).collect();
            anyhow::ensure!(found == names, "{state} are {found:?}: {}", status["fleet"]);
            Ok(())
        };
        let what = format!("{names:?} to be {state}");
        self.product.wait_for(&what, SOON, are).await
    }

    /// Waits until there is one incident, of `nodes` nodes with `explained` explained faults. Returns
    /// it.
    pub(crate) async fn incident(&self, nodes: usize, explained: usize) -> anyhow::Result<Value> {
        let found = || async {
            let shown = self.shown(&["incidents"]).await?;
            let all = shown["incidents"].as_array().cloned().unwrap_or_default();
            let [incident] = all.as_slice() else {
                anyhow::bail!("{} incidents: {shown}", all.len());
            };
            let of = incident["nodes"].as_array().cloned().unwrap_or_default();
            let faults = of
                .iter()
                .filter_map(|node| node["faults"].as_array())
                .flatten();
            let followers = faults
                .filter(|fault| fault["explainedBy"].is_object())
                .count();
            anyhow::ensure!(
                (of.len(), followers) == (nodes, explained),
                "{} nodes, {followers} explained faults",
                of.len()
            );
            Ok(incident.clone())
        };
        self.product.wait_for("the incident", SOON, found).await
    }

    /// Returns all stored events, oldest first.
    pub(crate) async fn events(&self) -> anyhow::Result<Vec<Value>> {
        let events = self.shown(&["events", "--limit", "10000"]).await?;
        let events = events.as_array().cloned().unwrap_or_default();
        Ok(events
            .into_iter()
            .map(|mut one| one["event"].take())
            .collect())
    }

    /// Returns all events in the name of the analyzer, oldest first.
    pub(crate) async fn said(&self) -> anyhow::Result<Vec<Said>> {
        let events = self.events().await?.into_iter();
        let said = events.filter(|event| event["agent"] == keys::ANALYZER_AGENT);
        let said = said.map(|event| Said {
            rule: text(&event["checkName"]),
            node: text(&event["nodeName"]),
            is_healthy: event["isHealthy"] == true,
        });
        Ok(said.collect())
    }

    /// Waits until the analyzer has reported exactly these conclusions and ends, of these nodes, in
    /// this order.
    pub(crate) async fn until_said(&self, wanted: &[Said]) -> anyhow::Result<()> {
        let is_said = || async {
            let said = self.said().await?;
            anyhow::ensure!(said == wanted, "{said:?}");
            Ok(())
        };
        self.product
            .wait_for("the conclusions", SOON, is_said)
            .await
    }

    /// Returns how often each node has gone out of service until now; those that never have are left
    /// out.
    pub(crate) async fn outages(&self) -> anyhow::Result<BTreeMap<String, usize>> {
        let mark = unique("mark");
        let patch = Patch::Merge(json!({"metadata": {"annotations": {MARK: mark}}}));
        let name = &self.names[0];
        (self.nodes)
            .patch(name, &PatchParams::default(), &patch)
            .await?;
        let is_complete = || async {
            let record = self.record.lock().unwrap();
            if record.mark == mark {
                Ok(record.outages.clone())
            } else {
                Err("not the mark")
            }
        };
        testkit::wait_for("the record to be complete", SOON, is_complete).await
    }
}

// === impl Record ===

impl Record {
    fn note(&mut self, node: Node) {
        let annotations = node.metadata.annotations.unwrap_or_default();
        if let Some(mark) = annotations.get(MARK) {
            self.mark.clone_from(mark);
        }
        let name = node.metadata.name.unwrap_or_default();
        if node.spec.unwrap_or_default().unschedulable != Some(true) {
            self.out.remove(&name);
        } else if self.out.insert(name.clone()) {
            *self.outages.entry(name).or_default() += 1;
        }
    }
}

/// Keeps the record of the nodes with a label from now on. A watch passes on every version of a node, in
/// order, and the next watch goes on where it ended. Where versions are missing the record ends, and
/// [`Group::outages`] fails.
async fn keep(record: &Arc<Mutex<Record>>, nodes: Api<Node>, label: String) -> anyhow::Result<()> {
    let list = nodes.list(&ListParams::default().labels(&label)).await?;
    let mut version = list.metadata.resource_version.unwrap_or_default();
    let record = Arc::clone(record);
    tokio::spawn(async move {
        let params = WatchParams::default().labels(&label);
        loop {
            let Ok(changes) = nodes.watch(&params, &version).await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let mut changes = Box::pin(changes);
            while let Ok(Some(change)) = changes.try_next().await {
                match change {
                    WatchEvent::Added(node) | WatchEvent::Modified(node) => {
                        version = node.metadata.resource_version.clone().unwrap_or_default();
                        record.lock().unwrap().note(node);
                    }
                    WatchEvent::Bookmark(mark) => version = mark.metadata.resource_version,
                    WatchEvent::Deleted(_) => {}
                    // The version is no longer there: changes were missed.
                    WatchEvent::Error(_) => return,
                }
            }
        }
    });
    Ok(())
}

/// Returns the conclusion of a rule about a node, as [`Group::said`] returns it.
pub(crate) fn concluded(rule: &str, node: &str) -> Said {
    Said {
        rule: rule.to_owned(),
        node: node.to_owned(),
        is_healthy: false,
    }
}

/// Returns the event of an XID of a node's GPU, which asks for a reset if it is fatal.
pub(crate) fn xid(node: &str, code: &str, fatal: bool) -> HealthEvent {
    let action = if fatal {
        RecommendedAction::ComponentReset
    } else {
        RecommendedAction::None
    };
    HealthEvent {
        version: 1,
        agent: keys::SYSLOG_AGENT.into(),
        component_class: "GPU".into(),
        check_name: keys::CHECK_XID.into(),
        is_fatal: fatal,
        error_code: vec![code.into()],
        recommended_action: action.into(),
        message: format!("XID {code}"),
        entities_impacted: vec![Entity {
            entity_type: keys::ENTITY_PCI.into(),
            entity_value: "0000:b3:00".into(),
        }],
        node_name: node.into(),
        ..HealthEvent::default()
    }
}

/// Returns an event with the names of a GPU of a node.
pub(crate) fn of_gpu(event: HealthEvent, gpu: usize) -> HealthEvent {
    let uuid = format!("GPU-{}-{gpu}", event.node_name);
    let entities = [
        (keys::ENTITY_PCI, format!("0000:{gpu:02x}:00")),
        (keys::ENTITY_GPU_UUID, uuid),
    ];
    let entity = |(kind, value): (&str, String)| Entity {
        entity_type: kind.to_owned(),
        entity_value: value,
    };
    HealthEvent {
        entities_impacted: entities.map(entity).into(),
        ..event
    }
}

/// Returns events with the times that follow `first`, a millisecond apart.
pub(crate) fn from(
    first: Timestamp,
    events: impl IntoIterator<Item = HealthEvent>,
) -> Vec<HealthEvent> {
    let later = |number: usize| first + SignedDuration::from_millis(i64::try_from(number).unwrap());
    let events = events.into_iter().enumerate();
    let dated = events.map(|(number, event)| HealthEvent {
        generated_timestamp: Some(contract::json::proto_timestamp(later(number))),
        ..event
    });
    dated.collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
