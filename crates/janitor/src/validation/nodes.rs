//! Nodes of validation requests: each is watched individually, and its readiness is evaluated
//! by the configured criteria.

use std::collections::{BTreeMap, BTreeSet};

use cluster::{ServiceEvent, ServiceWatches};
use jiff::{SignedDuration, Timestamp};
use maintenance::is_older;
use maintenance::validation_request::{NodeState, Readiness, ValidationConfiguration};
use model::node::NodeView;
use runtime::logging::chain;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

/// Interval for evaluating criteria that depend on the time.
const INTERVAL: SignedDuration = SignedDuration::from_mins(1);

/// Nodes of unfinished requests.
pub(super) struct Nodes {
    watches: ServiceWatches,
    followed: BTreeSet<String>,
    /// States of the nodes, as last evaluated.
    states: BTreeMap<String, NodeState>,
    /// Objects that the criteria read.
    observed: BTreeMap<String, Observed>,
    /// Time of the next evaluation of criteria that depend on the time.
    evaluate_at: Option<Timestamp>,
}

/// Objects of a node that the criteria read.
#[derive(Debug, Default)]
struct Observed {
    object: Option<Value>,
    /// `ResourceSlice`s of the node.
    slices: Option<Vec<Value>>,
}

// === impl Nodes ===

impl Nodes {
    pub(super) fn new(watches: ServiceWatches) -> Self {
        Self {
            watches,
            followed: BTreeSet::new(),
            states: BTreeMap::new(),
            observed: BTreeMap::new(),
            evaluate_at: None,
        }
    }

    pub(super) fn states(&self) -> &BTreeMap<String, NodeState> {
        &self.states
    }

    /// Starts to watch these nodes.
    pub(super) fn follow(
        &mut self,
        nodes: BTreeSet<String>,
        config: &ValidationConfiguration,
        cancel: &CancellationToken,
    ) {
        for node in nodes {
            let mut followed = self.watches.follow(&node, cancel);
            if config.reads_slices() {
                let slices = self.watches.follow_slices(&node, cancel);
                followed = followed.and(slices);
            }
            if let Err(error) = followed {
                tracing::warn!(node, err = chain(&error), "a node cannot be watched");
            }
            self.followed.insert(node);
        }
    }

    /// Stops watching all nodes except `wanted`.
    pub(super) fn keep_only(&mut self, wanted: &BTreeSet<String>) {
        let left: Vec<String> = self.followed.difference(wanted).cloned().collect();
        for node in left {
            self.watches.leave(&node);
            self.followed.remove(&node);
            self.states.remove(&node);
            self.observed.remove(&node);
        }
    }

    /// Handles a watch event. Returns the node if its requests must be reconciled.
    pub(super) fn handle(
        &mut self,
        event: ServiceEvent,
        config: &ValidationConfiguration,
        now: Timestamp,
    ) -> Option<String> {
        let (node, is_changed) = match event {
            ServiceEvent::Node(node, object) => {
                let is_changed = self.update(&node, object, config, now);
                (node, is_changed)
            }
            ServiceEvent::Slices(node, _) if !self.followed.contains(&node) => return None,
            ServiceEvent::Slices(node, slices) => {
                let observed = self.observed.entry(node.clone()).or_default();
                observed.slices = Some(slices);
                let is_changed = self.evaluate(&node, config, now);
                (node, is_changed)
            }
            ServiceEvent::Pods(..) => return None,
        };
        is_changed.then_some(node)
    }

    /// Stores a node; `None` means that it was deleted. Returns true if its requests must be
    /// reconciled.
    pub(super) fn update(
        &mut self,
        node: &str,
        object: Option<Value>,
        config: &ValidationConfiguration,
        now: Timestamp,
    ) -> bool {
        // The state of an unwatched node would be outdated by the time that a request names it.
        if !self.followed.contains(node) {
            return false;
        }
        let observed = self.observed.entry(node.to_owned()).or_default();
        let Some(mut object) = object else {
            observed.object = None;
            self.states.insert(node.to_owned(), NodeState::Gone);
            return true;
        };
        let version = |object: &Value| {
            let version = object["metadata"]["resourceVersion"].as_str();
            version.unwrap_or_default().to_owned()
        };
        let known = observed.object.as_ref().map(version);
        if known.is_some_and(|known| is_older(&version(&object), &known)) {
            return false;
        }
        // Large fields that no criterion reads.
        for (of, what) in [("metadata", "managedFields"), ("status", "images")] {
            if let Some(part) = object[of].as_object_mut() {
                part.remove(what);
            }
        }
        observed.object = Some(object);
        self.evaluate(node, config, now)
    }

    /// Evaluates the criteria for a node. Returns true if its requests must be reconciled.
    fn evaluate(&mut self, node: &str, config: &ValidationConfiguration, now: Timestamp) -> bool {
        let Some(observed) = self.observed.get(node) else {
            return false;
        };
        let view = observed.object.clone().and_then(NodeView::from_object);
        let Some((object, view)) = observed.object.as_ref().zip(view) else {
            return false;
        };
        let readiness = match &observed.slices {
            None if config.reads_slices() => {
                Readiness::Unknown("its ResourceSlices are not listed yet")
            }
            slices => config.readiness(object, slices.as_deref().unwrap_or_default(), now),
        };
        let state = NodeState::There {
            view: Box::new(view),
            readiness,
        };
        let before = self.states.get(node);
        let is_changed = before.is_none_or(|before| before.differs_from(&state));
        self.states.insert(node.to_owned(), state);
        is_changed
    }

    /// Evaluates time-dependent criteria for all nodes, at most once a minute. Returns the
    /// nodes whose requests must be reconciled.
    pub(super) fn reevaluate(
        &mut self,
        config: &ValidationConfiguration,
        now: Timestamp,
    ) -> Vec<String> {
        if !config.reads_time() || self.evaluate_at.is_some_and(|at| now < at) {
            return Vec::new();
        }
        self.evaluate_at = Some(now + INTERVAL);
        let mut nodes: Vec<String> = self.observed.keys().cloned().collect();
        nodes.retain(|node| self.evaluate(node, config, now));
        nodes
    }
}
