//! The nodes of requests: watched one by one, and asked by the criteria whether they are ready.

use std::collections::{BTreeMap, BTreeSet};

use cluster::{ServiceEvent, ServiceWatches};
use jiff::{SignedDuration, Timestamp};
use maintenance::is_older;
use maintenance::validation_request::{NodeState, Readiness, ValidationConfiguration};
use model::node::NodeView;
use runtime::logging::chain;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

/// Wait before criteria that read the clock are asked again.
const ASK_AGAIN: SignedDuration = SignedDuration::from_mins(1);

/// The nodes of requests that are not over.
pub(super) struct Nodes {
    watches: ServiceWatches,
    followed: BTreeSet<String>,
    /// How they are, as far as they were seen.
    states: BTreeMap<String, NodeState>,
    /// What criteria look at.
    seen: BTreeMap<String, Seen>,
    /// When criteria that read the clock are asked again.
    ask_again: Option<Timestamp>,
}

/// A node as criteria look at it.
#[derive(Debug, Default)]
struct Seen {
    object: Option<Value>,
    /// Its `ResourceSlice`s.
    slices: Option<Vec<Value>>,
}

// === impl Nodes ===

impl Nodes {
    pub(super) fn new(watches: ServiceWatches) -> Self {
        Self {
            watches,
            followed: BTreeSet::new(),
            states: BTreeMap::new(),
            seen: BTreeMap::new(),
            ask_again: None,
        }
    }

    pub(super) fn states(&self) -> &BTreeMap<String, NodeState> {
        &self.states
    }

    /// Watches these nodes from now on.
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

    /// Watches no others any more.
    pub(super) fn leave_all_but(&mut self, wanted: &BTreeSet<String>) {
        let left: Vec<String> = self.followed.difference(wanted).cloned().collect();
        for node in left {
            self.watches.leave(&node);
            self.followed.remove(&node);
            self.states.remove(&node);
            self.seen.remove(&node);
        }
    }

    /// Takes news in. Returns the node, where they may change what is done for its requests.
    pub(super) fn take(
        &mut self,
        event: ServiceEvent,
        config: &ValidationConfiguration,
        now: Timestamp,
    ) -> Option<String> {
        let (node, is_news) = match event {
            ServiceEvent::Node(node, object) => {
                let is_news = self.see(&node, object, config, now);
                (node, is_news)
            }
            ServiceEvent::Slices(node, _) if !self.followed.contains(&node) => return None,
            ServiceEvent::Slices(node, slices) => {
                let seen = self.seen.entry(node.clone()).or_default();
                seen.slices = Some(slices);
                let is_news = self.judge(&node, config, now);
                (node, is_news)
            }
            ServiceEvent::Pods(..) => return None,
        };
        is_news.then_some(node)
    }

    /// Takes in how a node is; `None`: it is gone. Returns whether that may change what is done.
    pub(super) fn see(
        &mut self,
        node: &str,
        object: Option<Value>,
        config: &ValidationConfiguration,
        now: Timestamp,
    ) -> bool {
        // What is told of one that nobody names any more would be out of date once somebody does.
        if !self.followed.contains(node) {
            return false;
        }
        let seen = self.seen.entry(node.to_owned()).or_default();
        let Some(mut object) = object else {
            seen.object = None;
            self.states.insert(node.to_owned(), NodeState::Gone);
            return true;
        };
        let version = |object: &Value| {
            let version = object["metadata"]["resourceVersion"].as_str();
            version.unwrap_or_default().to_owned()
        };
        let known = seen.object.as_ref().map(version);
        if known.is_some_and(|known| is_older(&version(&object), &known)) {
            return false;
        }
        // They are large, and no criterion is about them.
        for (of, what) in [("metadata", "managedFields"), ("status", "images")] {
            if let Some(part) = object[of].as_object_mut() {
                part.remove(what);
            }
        }
        seen.object = Some(object);
        self.judge(node, config, now)
    }

    /// Asks the criteria about a node. Returns whether that may change what is done.
    fn judge(&mut self, node: &str, config: &ValidationConfiguration, now: Timestamp) -> bool {
        let Some(seen) = self.seen.get(node) else {
            return false;
        };
        let view = seen.object.clone().and_then(NodeView::from_object);
        let Some((object, view)) = seen.object.as_ref().zip(view) else {
            return false;
        };
        let readiness = match &seen.slices {
            None if config.reads_slices() => {
                Readiness::Unknown("its ResourceSlices have not been seen")
            }
            slices => config.readiness(object, slices.as_deref().unwrap_or_default(), now),
        };
        let state = NodeState::There {
            view: Box::new(view),
            readiness,
        };
        let before = self.states.get(node);
        let is_news = before.is_none_or(|before| before.differs_from(&state));
        self.states.insert(node.to_owned(), state);
        is_news
    }

    /// Asks the criteria about all nodes once a minute, where time alone may change what they say. Returns the
    /// nodes of which it has.
    pub(super) fn ask_again(
        &mut self,
        config: &ValidationConfiguration,
        now: Timestamp,
    ) -> Vec<String> {
        if !config.reads_time() || self.ask_again.is_some_and(|at| now < at) {
            return Vec::new();
        }
        self.ask_again = Some(now + ASK_AGAIN);
        let mut nodes: Vec<String> = self.seen.keys().cloned().collect();
        nodes.retain(|node| self.judge(node, config, now));
        nodes
    }
}
