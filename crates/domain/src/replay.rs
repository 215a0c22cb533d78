//! What a policy would have done: the decisions of production (fault book, assessment,
//! session) on events of the past, with nodes that exist only here.
//!
//! Time is that of the events. A change that is decided is made on the simulated node at
//! once, and seen there at once: no API server is in the way, and nobody lends a hand, so
//! what a person did to a node in truth (an uncordon) is not in it.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::assess::{Desired, Verdict, assess};
use crate::event::Record;
use crate::fault::{Change, FaultBook};
use crate::node::{NodeView, Taint, scheduling};
use crate::policy::Policy;
use crate::session::ownership::dismissal;
use crate::session::{Intent, Patch, Session, step, without_ours};

/// Most looks at a node after one event: a change and its being seen are two.
const MAX_LOOKS: usize = 4;

/// A policy at work on events of the past.
#[derive(Debug)]
pub struct Replay {
    policy: Policy,
    book: FaultBook,
    nodes: BTreeMap<String, Simulated>,
    /// Only these nodes exist; `None`: every node that an event names.
    listed: Option<BTreeMap<String, NodeView>>,
    seq: u64,
    summary: Summary,
    taken_out: BTreeSet<String>,
    unlisted: BTreeSet<String>,
    now: Option<Timestamp>,
}

/// A node that exists only here.
#[derive(Debug)]
struct Simulated {
    view: NodeView,
    session: Session,
    out_since: Option<Timestamp>,
}

/// Something that would have been done to a node. Serialised names are part of the output
/// of `replay`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// When, by the clock of the events.
    pub at: Timestamp,
    /// To which node.
    pub node: String,
    /// What: `quarantine`, `update` or `release`.
    pub decision: Intent,
    /// The cordon that it sets (true) or takes back (false); absent where it does neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cordon: Option<bool>,
    /// Taints that it adds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub add_taints: Vec<Taint>,
    /// Taints that it removes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remove_taints: Vec<Taint>,
    /// Rule sets that ask for what the node then is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rule_sets: Vec<String>,
    /// For people: what the event did to the node's faults.
    pub because: Vec<String>,
}

/// How much was done, up to now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Events.
    pub events: u64,
    /// Nodes that were taken out of service at least once.
    pub taken_out: usize,
    /// How often a node was taken out of service.
    pub quarantines: u64,
    /// How often one was given back.
    pub releases: u64,
    /// Most nodes out of service at one time.
    pub most_at_once: usize,
    /// Nodes out of service at the end.
    pub still_out: usize,
    /// Seconds out of service, of all nodes together, up to the last event.
    pub seconds_out: i64,
    /// Nodes that events name and the list of nodes does not have: nothing is done to them.
    pub unlisted: usize,
}

// === impl Replay ===

impl Replay {
    /// A replay of `policy` before the first event. With `nodes`, only these exist, as they
    /// are there; without, every node that an event names does, and nothing else is known
    /// of it.
    pub fn new(policy: Policy, nodes: Option<Vec<NodeView>>) -> Self {
        let bare = |node: NodeView| (node.name.clone(), without_ours(&node, &policy.marks()));
        let listed = nodes.map(|nodes| nodes.into_iter().map(bare).collect());
        Self {
            policy,
            book: FaultBook::default(),
            nodes: BTreeMap::new(),
            listed,
            seq: 0,
            summary: Summary::default(),
            taken_out: BTreeSet::new(),
            unlisted: BTreeSet::new(),
            now: None,
        }
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Takes in an event, and says what would have been done. Its place in the feed is
    /// where it comes here; its time of acceptance never goes back.
    pub fn take(&mut self, record: &Record) -> Vec<Decision> {
        self.seq += 1;
        self.summary.events += 1;
        let now = self
            .now
            .map_or(record.created_at, |now| now.max(record.created_at));
        self.now = Some(now);
        let name = record.event.node_name.clone();
        let record = Record {
            seq: self.seq,
            created_at: now,
            ..record.clone()
        };
        let changes = self.book.record(&record);
        let Some(mut node) = self.node(&name, now) else {
            self.unlisted.insert(name);
            return Vec::new();
        };
        let mut decisions = Vec::new();
        for _ in 0..MAX_LOOKS {
            let Some((patch, desired)) = self.look(&name, &mut node, now) else {
                break;
            };
            node.view = node.view.after(&patch.change);
            self.count(&name, &mut node, patch.intent, now);
            let change = patch.change;
            let visible = change.unschedulable.is_some()
                || !change.add_taints.is_empty()
                || !change.remove_taints.is_empty();
            if visible || patch.intent != Intent::Update {
                decisions.push(Decision {
                    at: now,
                    node: name.clone(),
                    decision: patch.intent,
                    cordon: change.unschedulable,
                    add_taints: change.add_taints,
                    remove_taints: change.remove_taints,
                    rule_sets: desired.rule_sets,
                    because: changes.iter().filter_map(change_text).collect(),
                });
            }
        }
        // A node of which nothing is left is made anew when it is named again.
        if node.out_since.is_some() || !self.book.faults(&name).is_empty() || self.listed.is_some()
        {
            self.nodes.insert(name, node);
        }
        self.summary.most_at_once = self.summary.most_at_once.max(self.summary.still_out);
        decisions
    }

    /// What the rules say of the open faults of a node, gravest first.
    pub fn verdicts(&self, node: &str) -> Vec<Verdict> {
        self.desired(node).verdicts
    }

    /// What is wanted for a node now.
    pub fn desired(&self, node: &str) -> Desired {
        let simulated = self.nodes.get(node).map(|node| &node.view);
        let listed = || self.listed.as_ref()?.get(node);
        let unknown = NodeView::unknown(node);
        let view = simulated.or_else(listed).unwrap_or(&unknown);
        assess(
            self.book.faults(node),
            &self.policy,
            view,
            dismissal(view, None),
        )
    }

    /// How much was done up to now.
    pub fn summary(&self) -> Summary {
        let open = self.nodes.values().filter_map(|node| node.out_since);
        let until = self.now.unwrap_or(Timestamp::UNIX_EPOCH);
        let seconds: i64 = open
            .map(|since| until.duration_since(since).as_secs())
            .sum();
        Summary {
            taken_out: self.taken_out.len(),
            unlisted: self.unlisted.len(),
            seconds_out: self.summary.seconds_out + seconds,
            ..self.summary.clone()
        }
    }

    fn node(&mut self, name: &str, now: Timestamp) -> Option<Simulated> {
        if let Some(node) = self.nodes.remove(name) {
            return Some(node);
        }
        let view = match &self.listed {
            None => NodeView::unknown(name),
            Some(listed) => listed.get(name)?.clone(),
        };
        Some(Simulated {
            view,
            session: Session::idle(now),
            out_since: None,
        })
    }

    /// One look at a node: what to change, and what is wanted for it.
    fn look(&self, name: &str, node: &mut Simulated, now: Timestamp) -> Option<(Patch, Desired)> {
        let faults = self.book.faults(name);
        let desired = assess(
            faults,
            &self.policy,
            &node.view,
            dismissal(&node.view, None),
        );
        let step = step(
            &node.session,
            &desired,
            Some(&node.view),
            &self.policy.marks(),
            // The brake is not part of a replay: it shows what the policy asks for.
            None,
            now,
        );
        node.session = step.session;
        Some((step.patch?, desired))
    }

    fn count(&mut self, name: &str, node: &mut Simulated, intent: Intent, now: Timestamp) {
        match intent {
            Intent::Quarantine => {
                self.taken_out.insert(name.to_owned());
                self.summary.quarantines += 1;
                self.summary.still_out += 1;
                node.out_since = Some(now);
            }
            Intent::Release | Intent::StandDown => {
                let since = node.out_since.take();
                let out = since.map_or(SignedDuration::ZERO, |since| now.duration_since(since));
                self.summary.releases += 1;
                self.summary.still_out -= usize::from(since.is_some());
                self.summary.seconds_out += out.as_secs();
            }
            Intent::Update => {}
        }
    }
}

/// What an event did to a fault, where it did something.
fn change_text(change: &Change) -> Option<String> {
    match change {
        Change::Opened(title) => Some(title.clone()),
        Change::Escalated(title) => Some(format!("{title} became fatal")),
        Change::Closed(title) => Some(format!("{title} recovered")),
        Change::Refreshed(title) => Some(format!("{title}, again")),
        Change::Ignored(_) => None,
    }
}

// === impl Decision ===

impl Decision {
    /// Whether both do the same to the same node at the same time, whatever for.
    pub fn does_the_same(&self, other: &Self) -> bool {
        let does = |of: &Self| {
            let Self {
                decision,
                cordon,
                add_taints,
                remove_taints,
                ..
            } = of.clone();
            (
                of.at,
                of.node.clone(),
                decision,
                cordon,
                add_taints,
                remove_taints,
            )
        };
        does(self) == does(other)
    }

    /// What it does, for people: `cordon, add taint gpu=bad:NoSchedule`.
    pub fn change(&self) -> String {
        let mut parts = scheduling(self.cordon, &self.add_taints, &self.remove_taints);
        if parts.is_empty() {
            // It was so before, and stays so.
            parts.push("nothing that schedulers see".to_owned());
        }
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use contract::{HealthEvent, keys};
    use serde_json::json;

    use super::*;
    use crate::event::normalise;

    fn event(node: &str, second: i64, gpu: &str, healthy: bool) -> Record {
        let mut event = HealthEvent {
            agent: "gpu-health-monitor".into(),
            component_class: "GPU".into(),
            check_name: "GpuMemWatch".into(),
            node_name: node.into(),
            is_fatal: !healthy,
            is_healthy: healthy,
            entities_impacted: vec![contract::Entity {
                entity_type: "GPU".into(),
                entity_value: gpu.into(),
            }],
            ..HealthEvent::default()
        };
        let created_at = Timestamp::from_second(second).unwrap();
        normalise(&mut event, created_at);
        Record {
            seq: 0,
            id: event.id.clone(),
            created_at,
            event,
        }
    }

    fn run(replay: &mut Replay, events: &[Record]) -> Vec<String> {
        let decisions = events.iter().flat_map(|event| replay.take(event));
        decisions
            .map(|decision| {
                let (at, node) = (decision.at.as_second(), &decision.node);
                let (name, change) = (decision.decision.name(), decision.change());
                format!(
                    "{at} {node} {name}: {change} ({})",
                    decision.because.join("; ")
                )
            })
            .collect()
    }

    #[test]
    fn nodes_are_taken_out_and_given_back_by_the_clock_of_the_events() {
        let mut replay = Replay::new(Policy::builtin(), None);
        let said = run(
            &mut replay,
            &[
                event("a", 10, "0", false),
                event("b", 20, "0", false),
                event("a", 30, "1", false),
                event("a", 40, "0", true),
                // A clock that goes back: it is still second 40.
                event("b", 35, "0", true),
                event("a", 100, "1", true),
                event("c", 110, "0", false),
                event("c", 170, "0", false),
            ],
        );
        assert_eq!(
            said,
            [
                "10 a quarantine: cordon (GpuMemWatch on GPU 0)",
                "20 b quarantine: cordon (GpuMemWatch on GPU 0)",
                "40 b release: uncordon (GpuMemWatch on GPU 0 recovered)",
                "100 a release: uncordon (GpuMemWatch on GPU 1 recovered)",
                "110 c quarantine: cordon (GpuMemWatch on GPU 0)",
            ]
        );
        let expected = Summary {
            events: 8,
            taken_out: 3,
            quarantines: 3,
            releases: 2,
            most_at_once: 2,
            still_out: 1,
            seconds_out: 90 + 20 + 60,
            unlisted: 0,
        };
        assert_eq!(replay.summary(), expected);
        assert!(replay.desired("c").cordon && !replay.desired("a").wanted());
    }

    #[test]
    fn listed_nodes_are_what_the_rules_see_without_what_is_ours_on_them() {
        let node = |metadata: serde_json::Value, spec: serde_json::Value| {
            NodeView::from_object(json!({"metadata": metadata, "spec": spec})).unwrap()
        };
        let opted_out = json!({"name": "opted-out", "labels": {keys::MANAGED_LABEL: "false"}});
        let ours = json!({"name": "ours", "annotations": {
            keys::QUARANTINE_HEALTH_EVENT: r#"[{"agent":"x"}]"#,
            keys::QUARANTINE_IS_CORDONED: keys::TRUE,
            keys::RELEASED_AT: "2100-01-01T00:00:00Z",
        }});
        let nodes = vec![
            node(opted_out, json!({})),
            node(ours, json!({"unschedulable": true})),
            node(json!({"name": "cordoned"}), json!({"unschedulable": true})),
        ];
        let mut replay = Replay::new(Policy::builtin(), Some(nodes));
        let names = ["opted-out", "ours", "cordoned", "elsewhere"];
        let events: Vec<Record> = names
            .iter()
            .map(|name| event(name, 10, "0", false))
            .collect();
        assert_eq!(
            run(&mut replay, &events),
            [
                "10 ours quarantine: cordon (GpuMemWatch on GPU 0)",
                "10 cordoned quarantine: nothing that schedulers see (GpuMemWatch on GPU 0)",
            ]
        );
        assert_eq!(replay.summary().unlisted, 1);
    }

    #[test]
    fn a_rule_sees_the_node_as_the_decision_before_has_left_it() {
        let policy = "[[rule-sets]]\nname = \"second\"\n\
            taint = { key = \"k\", value = \"v\", effect = \"NoSchedule\" }\n\
            [[rule-sets.match.all]]\nkind = \"Node\"\n\
            expression = \"has(node.spec.unschedulable) && node.spec.unschedulable\"\n\
            [[rule-sets]]\nname = \"first\"\ncordon = { shouldCordon = true }\n\
            [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n";
        let mut replay = Replay::new(Policy::parse(policy, "p").unwrap(), None);
        let said = run(&mut replay, &[event("a", 10, "0", false)]);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[1].contains("update: add taint k=v:NoSchedule"),
            "{said:?}"
        );
    }
}
