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

/// Step with the label of one maintenance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The book notes that the provider is told. The label is set at the next look, once that is saved: a
    /// process that ended between the two would leave a label that nobody takes back.
    Note,
    Set,
    TakeBack,
}

/// Step that is to be taken.
struct Mark {
    id: String,
    node: String,
    step: Step,
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
            let step = step(record, due(&record), self.noted.contains(&record.id))?;
            self.nodes.get(&record.node)?;
            Some(Mark {
                id: record.id.clone(),
                node: record.node.clone(),
                step,
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
        let now = self.reporter.now();
        let (label, set) = (view.labels.get(node_object::GKE_PERFORM), TRUE.to_owned());
        if mark.step == Step::Note {
            // A label that a person has set stays.
            if label != Some(&set) {
                (self.reporter.memory_mut()).set_told_to_begin(&mark.id, Some(now));
                self.noted.insert(mark.id);
            }
            return;
        }
        let value = (mark.step == Step::Set).then_some(set);
        if label != value.as_ref() {
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
        self.noted.remove(&mark.id);
        if mark.step == Step::TakeBack {
            (self.reporter.memory_mut()).set_told_to_begin(&mark.id, None);
        } else {
            tracing::info!(
                node = mark.node,
                maintenance = mark.id,
                "the provider was told that the maintenance may begin: the node is drained"
            );
        }
    }
}

/// Returns the next step. `is_noted`: this process has noted that the provider is told, and has not set the
/// label yet.
fn step(record: &Record, is_due: bool, is_noted: bool) -> Option<Step> {
    let has_begun = !record.state.is_over() && record.phase == Phase::Ongoing;
    match record.told_to_begin {
        None => is_due.then_some(Step::Note),
        Some(_) if is_due => is_noted.then_some(Step::Set),
        // One that is over, or whose node is in service again before its begin.
        Some(_) => (!has_begun).then_some(Step::TakeBack),
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

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use notices::{Book, Kind, Notice, Reading};

    use super::*;

    #[test]
    fn a_label_is_noted_before_it_is_set_and_taken_back_whenever_the_process_ends() {
        let notice = Notice {
            node: "n".to_owned(),
            event: "e".to_owned(),
            provider: "gcp".to_owned(),
            resource: (String::new(), String::new()),
            kind: Kind::Reboot,
            phase: Phase::Scheduled,
            word: String::new(),
            start: None,
            end: None,
            emergency: false,
            updated: None,
        };
        let mut book = Book::default();
        let reading = Reading {
            notices: vec![notice],
            ..Reading::default()
        };
        book.read("s", &reading, Timestamp::UNIX_EPOCH);
        let next = |book: &Book, is_due, is_noted| step(&book.records()[0], is_due, is_noted);
        assert_eq!(next(&book, false, false), None);
        assert_eq!(next(&book, true, false), Some(Step::Note));
        book.set_told_to_begin("e", Some(Timestamp::UNIX_EPOCH));
        assert_eq!(next(&book, true, true), Some(Step::Set));
        // After a restart nobody knows whether the label was set: the provider waits for its time.
        assert_eq!(next(&book, true, false), None);
        assert_eq!(next(&book, false, false), Some(Step::TakeBack));
        book.set_told_to_begin("e", None);
        assert_eq!(next(&book, false, false), None);
    }
}
