//! Lets the provider begin a maintenance once the node is drained, where the configuration says so:
//! by a label on a node of GKE, by the agent where the metadata service takes the word.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cluster::Cluster;
use fleet::view::FleetView;
use model::node::NodeChange;
use model::status::eviction::EvictionStatus;
use notices::{Phase, Record, node_object};
use runtime::logging::chain;

use super::{MaintenanceMonitor, machines};

/// Most nodes that are marked in one look.
const MOST_MARKS: usize = 16;
const TRUE: &str = "true";

/// A mark that is to be written.
struct Mark {
    id: String,
    node: String,
    /// True to set the label, false to remove it.
    set: bool,
}

// === impl MaintenanceMonitor ===

impl MaintenanceMonitor {
    /// Marks the nodes whose maintenance may begin, and takes marks back once it is over, or put off.
    /// A patch that fails is tried again at the next look.
    pub(super) async fn let_begin(&mut self) {
        // A dry run lets nobody begin.
        let Some(cluster) = self.marks.clone() else {
            return;
        };
        let records = Arc::clone(&self.records.borrow());
        let fleet = Arc::clone(&self.fleet.borrow());
        let drained = drained(&fleet);
        let due = |record: &&Record| record.may_begin() && drained.contains(record.node.as_str());
        let mut by_agents: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let told = records.iter().filter(|one| one.source == machines::SOURCE);
        for record in told.filter(due).filter(|one| !one.event.is_empty()) {
            let events = by_agents.entry(record.node.clone()).or_default();
            events.insert(record.event.clone());
        }
        self.machines.set_may_begin(by_agents);

        let of_gke = |record: &&Record| {
            record.source == node_object::SOURCE && record.provider == node_object::GCP
        };
        let marks = records.iter().filter(of_gke).filter_map(|record| {
            let was_told = record.told_to_begin.is_some();
            let set = due(&record) && !was_told;
            // One that is over, or whose node is in service again before its begin.
            let has_begun = !record.state.is_over() && record.phase == Phase::Ongoing;
            let take_back = was_told && !due(&record) && !has_begun;
            let is_here = (set || take_back) && self.nodes.get(&record.node).is_some();
            is_here.then(|| Mark {
                id: record.id.clone(),
                node: record.node.clone(),
                set,
            })
        });
        let marks: Vec<Mark> = marks.take(MOST_MARKS).collect();
        for mark in marks {
            self.write(&cluster, mark).await;
        }
    }

    async fn write(&mut self, cluster: &Cluster, mark: Mark) {
        let Some(view) = self.nodes.get(&mark.node) else {
            return;
        };
        let value = mark.set.then(|| TRUE.to_owned());
        if view.labels.get(node_object::GKE_PERFORM) == value.as_ref() {
            // A person has set it, and keeps it.
            if mark.set {
                return;
            }
        } else {
            let change = NodeChange {
                labels: [(node_object::GKE_PERFORM.to_owned(), value)].into(),
                ..NodeChange::default()
            };
            if let Err(error) = cluster.apply(&view, &change).await {
                tracing::warn!(
                    node = mark.node,
                    err = %chain(&error),
                    "the label that lets the maintenance of a node begin cannot be written; trying again"
                );
                return;
            }
        }
        let now = self.reporter.now();
        let told = mark.set.then_some(now);
        (self.reporter.memory_mut()).set_told_to_begin(&mark.id, told);
        if mark.set {
            tracing::info!(
                node = mark.node,
                maintenance = mark.id,
                "the provider was told that the maintenance may begin: the node is drained"
            );
        }
    }
}

/// Returns the nodes that are out of service, and that all pods have left.
fn drained(fleet: &FleetView) -> BTreeSet<&str> {
    let is_drained = |status| {
        matches!(
            status,
            EvictionStatus::Succeeded | EvictionStatus::AlreadyDrained
        )
    };
    let nodes = fleet.nodes.iter().filter(|node| {
        let session = node.session.as_ref().filter(|one| one.phase.is_out());
        let drain = session.and_then(|session| session.drain.as_ref());
        drain.is_some_and(|drain| is_drained(drain.status))
    });
    nodes.map(|node| node.name.as_str()).collect()
}
