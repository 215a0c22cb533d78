//! Table tests of the state machine.

mod endings;
mod kept;
mod simulator;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use contract::{Entity, HealthEvent, keys};
use serde_json::json;

use super::*;
use crate::assess::assess;
use crate::event::{Record, normalise};
use crate::fault::FaultBook;
use crate::node::{NodeTaint, Taint};
use crate::policy::Policy;

const POLICY: &str = r#"
label-prefix = "k8saas.nvidia.com/"
[[rule-sets]]
name = "fatal GPU"
cordon = { shouldCordon = true }
[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"
[[rule-sets]]
name = "memory"
taint = { key = "gpu-memory", value = "bad", effect = "NoSchedule" }
[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.checkName == 'GpuMemWatch'"
"#;

static PARSED: LazyLock<Policy> = LazyLock::new(|| Policy::parse(POLICY, "test").unwrap());
/// The same with another label prefix and the document's taint, without the second rule set.
static OTHER: LazyLock<Policy> = LazyLock::new(|| {
    let mut policy = PARSED.clone();
    policy.label_prefix = "other/".into();
    policy.unhealthy_taint = true;
    policy.rule_sets.pop();
    policy
});

/// One node, its faults, and the outside world around them.
#[derive(Clone)]
struct World {
    policy: Policy,
    book: FaultBook,
    node: NodeView,
    session: Session,
    now: Timestamp,
    seq: u64,
}

impl World {
    fn new() -> Self {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        Self {
            policy: PARSED.clone(),
            book: FaultBook::default(),
            node: NodeView::unknown("n1"),
            session: Session::idle(now),
            now,
            seq: 0,
        }
    }

    fn tick(&mut self) {
        self.now += SignedDuration::from_secs(1);
    }

    fn event(&mut self, check: &str, gpu: u8, fatal: bool, healthy: bool) {
        self.report(check, &[("GPU", &gpu.to_string())], fatal, healthy);
    }

    fn report(&mut self, check: &str, entities: &[(&str, &str)], fatal: bool, healthy: bool) {
        self.record(check, entities, fatal, healthy, BTreeMap::new());
    }

    /// A fatal fault with metadata.
    fn report_with(
        &mut self,
        check: &str,
        entities: &[(&str, &str)],
        metadata: BTreeMap<String, String>,
    ) {
        self.record(check, entities, true, false, metadata);
    }

    fn record(
        &mut self,
        check: &str,
        entities: &[(&str, &str)],
        fatal: bool,
        healthy: bool,
        metadata: BTreeMap<String, String>,
    ) {
        self.tick();
        self.record_of(self.now, check, entities, fatal, healthy, metadata);
    }

    /// What was accepted at `accepted` and comes now.
    fn record_of(
        &mut self,
        accepted: Timestamp,
        check: &str,
        entities: &[(&str, &str)],
        fatal: bool,
        healthy: bool,
        metadata: BTreeMap<String, String>,
    ) {
        self.seq += 1;
        let mut event = HealthEvent {
            agent: "gpu-health-monitor".into(),
            component_class: "GPU".into(),
            check_name: check.into(),
            node_name: "n1".into(),
            is_fatal: fatal && !healthy,
            is_healthy: healthy,
            message: format!("report {}", self.seq),
            metadata,
            entities_impacted: entities
                .iter()
                .map(|(kind, value)| Entity {
                    entity_type: (*kind).into(),
                    entity_value: (*value).into(),
                })
                .collect(),
            ..HealthEvent::default()
        };
        normalise(&mut event, accepted);
        let record = Record {
            seq: self.seq.into(),
            id: event.id.clone(),
            created_at: accepted,
            event,
        };
        self.book.record(&record);
    }

    /// A report that was accepted some seconds ago comes now.
    fn late(&mut self, gpu: u8, seconds: u8) {
        self.tick();
        let accepted = self.now - SignedDuration::from_secs(i64::from(seconds));
        let metadata = [(keys::META_COUNT.to_owned(), "2".to_owned())].into();
        let gpu = gpu.to_string();
        self.record_of(
            accepted,
            "GpuMemWatch",
            &[("GPU", &gpu)],
            true,
            false,
            metadata,
        );
    }

    fn fault(&mut self, gpu: u8) {
        self.event("GpuMemWatch", gpu, true, false);
    }

    fn recovery(&mut self, gpu: u8) {
        self.event("GpuMemWatch", gpu, false, true);
    }

    fn desired(&self) -> Desired {
        let released = dismissal(&self.node, None, &self.session.times);
        assess(self.book.faults("n1"), &self.policy, &self.node, released)
    }

    fn step(&mut self) -> Step {
        self.tick();
        let step = step(
            &self.session,
            &self.desired(),
            Some(&self.node),
            &Marks::of(&self.policy),
            None,
            self.now,
        );
        self.session = step.session.clone();
        step
    }

    /// Steps and applies until nothing is left to do.
    fn settle(&mut self) -> Vec<Intent> {
        let mut intents = Vec::new();
        for _ in 0..10 {
            let step = self.step();
            let waits = self.session.not_before.or(self.session.waits_until());
            if let Some(at) = waits {
                self.now = self.now.max(at);
            }
            match step.patch {
                Some(patch) => {
                    intents.push(patch.intent);
                    self.node = self.node.after(&patch.change);
                }
                None if waits.is_none() => return intents,
                None => {}
            }
        }
        panic!("does not settle: {intents:?} {:?}", self.session);
    }

    fn foreign_taint(&mut self, key: &str) {
        let taint = Taint {
            key: key.into(),
            value: String::new(),
            effect: "NoSchedule".into(),
        };
        if !self.node.has_taint(&taint) {
            self.node.taints.push(NodeTaint {
                raw: json!(taint),
                taint,
            });
        }
    }
}

fn taint_keys(node: &NodeView) -> Vec<&str> {
    node.taints.iter().map(|on| on.taint.key.as_str()).collect()
}

#[test]
fn a_fault_quarantines_in_one_change_and_recovery_restores() {
    let mut world = World::new();
    world.node.labels.insert("zone".into(), "a".into());
    world
        .node
        .labels
        .insert("k8saas.nvidia.com/cordon-by".into(), "somebody".into());
    world.foreign_taint("dedicated");
    let mut object = world.node.object();
    object["metadata"]["labels"] = json!(world.node.labels);
    object["spec"]["taints"] = json!([world.node.taints[0].raw]);
    world.node = NodeView::from_object(object).unwrap();
    let before = world.node.clone();

    world.fault(0);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    assert_eq!(world.session.phase, Phase::Quarantined);
    assert!(world.node.unschedulable);
    assert_eq!(taint_keys(&world.node), ["dedicated", "gpu-memory"]);
    let label = |name: &str| world.node.labels.get(name).map(String::as_str);
    assert_eq!(label("k8saas.nvidia.com/cordon-by"), Some("NVSentinel"));
    assert_eq!(
        label("k8saas.nvidia.com/cordon-reason"),
        Some("fatal-GPU-memory")
    );
    assert_eq!(label(keys::STATE_LABEL), Some("quarantined"));
    let stamp = label("k8saas.nvidia.com/cordon-timestamp").unwrap();
    assert_eq!(
        (stamp.len(), &stamp[10..11], &stamp[13..14]),
        (20, "T", "-")
    );
    let annotation = |key: &str| world.node.annotations[key].as_str();
    assert_eq!(annotation(keys::QUARANTINE_IS_CORDONED), "True");
    assert_eq!(annotation("nvsentinel.nvidia.com/quarantined"), "true");
    assert_eq!(
        annotation("nvsentinel.nvidia.com/quarantine-reason"),
        "GpuMemWatch"
    );
    let time = annotation("nvsentinel.nvidia.com/quarantine-timestamp");
    assert!(time.ends_with('Z') && time.len() == 20 && time.parse::<Timestamp>().is_ok());
    assert_eq!(
        annotation(keys::QUARANTINE_APPLIED_TAINTS),
        r#"[{"key":"gpu-memory","value":"bad","effect":"NoSchedule","preExisting":false}]"#
    );
    let events: Value = serde_json::from_str(annotation(keys::QUARANTINE_HEALTH_EVENT)).unwrap();
    assert_eq!(events[0]["checkName"], "GpuMemWatch");
    assert_eq!(events[0]["id"].as_str(), world.session.id.as_deref());

    world.recovery(0);
    assert_eq!(world.settle(), [Intent::Release]);
    assert_eq!(world.session.phase, Phase::Idle);
    assert_eq!(world.node, before);
}

#[test]
fn what_was_there_before_stays() {
    let mut world = World::new();
    world.node.unschedulable = true;
    world.node.taints.push(NodeTaint {
        taint: Taint {
            key: "gpu-memory".into(),
            value: "bad".into(),
            effect: "NoSchedule".into(),
        },
        raw: json!({"key": "gpu-memory", "value": "bad", "effect": "NoSchedule"}),
    });
    let before = world.node.clone();
    world.fault(0);
    world.settle();
    assert_eq!(
        world.node.annotations[keys::QUARANTINE_CORDON_PRE_EXISTING],
        "True"
    );
    assert!(
        world.node.annotations[keys::QUARANTINE_APPLIED_TAINTS].contains("\"preExisting\":true")
    );
    assert!(
        !world
            .node
            .labels
            .contains_key("k8saas.nvidia.com/cordon-by")
    );
    world.recovery(0);
    world.settle();
    assert_eq!(world.node, before);
}

#[test]
fn an_uncordon_by_hand_ends_the_session_and_the_old_fault_does_not_start_it_again() {
    let mut world = World::new();
    world.fault(0);
    world.settle();
    world.node.unschedulable = false;
    assert_eq!(world.settle(), [Intent::StandDown]);
    assert_eq!(world.session.phase, Phase::Idle);
    assert!(
        !world.node.unschedulable && world.node.taints.is_empty() && world.node.labels.is_empty()
    );
    assert_eq!(world.node.annotations[keys::UNCORDONED_MANUALLY], "True");

    // Restarted, with the fault still open: nothing.
    world.session = Session::idle(world.now);
    assert_eq!(world.settle(), []);
    // Another fault, or the same one reported anew, is another matter.
    world.fault(1);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    assert!(
        !world
            .node
            .annotations
            .contains_key(keys::UNCORDONED_MANUALLY)
    );
    let events: Value =
        serde_json::from_str(&world.node.annotations[keys::QUARANTINE_HEALTH_EVENT]).unwrap();
    assert_eq!(
        events.as_array().unwrap().len(),
        1,
        "the dismissed fault does not count"
    );
    world.recovery(1);
    assert_eq!(world.settle(), [Intent::Release]);
    assert!(!world.node.unschedulable);
}

#[test]
fn a_fault_that_comes_with_the_uncordon_is_not_dismissed() {
    let mut world = World::new();
    world.fault(0);
    world.settle();
    world.node.unschedulable = false;
    world.fault(1);
    assert_eq!(world.settle(), [Intent::StandDown, Intent::Quarantine]);
    assert!(world.node.unschedulable);
}

/// Repeats are counted for a minute, and told then.
#[test]
fn what_was_seen_before_a_node_was_given_back_by_hand_and_is_told_later_is_dismissed() {
    for by_request in [false, true] {
        let mut world = World::new();
        world.fault(0);
        world.settle();
        let seen = world.now;
        world.now += SignedDuration::from_secs(5);
        let mut asked = world.now;
        if by_request {
            // Their clock is behind ours.
            asked -= SignedDuration::from_secs(60);
            let text = json!({"by": "alice", "reason": "r", "at": asked}).to_string();
            world.node.annotations.insert(keys::RELEASE.into(), text);
        } else {
            world.node.unschedulable = false;
        }
        assert_eq!(world.settle(), [Intent::StandDown]);
        world.now += SignedDuration::from_secs(60);
        let late = |world: &mut World| {
            let age = u8::try_from(world.now.duration_since(seen).as_secs()).unwrap();
            world.late(0, age);
            world.settle()
        };
        assert_eq!(late(&mut world), [], "{by_request}");
        // Another fault of then, too; one of now is another matter.
        world.late(1, 80);
        assert_eq!(world.settle(), []);
        world.late(0, 1);
        assert_eq!(world.settle(), [Intent::Quarantine]);
    }
}

/// Nobody knows when it was done, and what was reported since may be new.
#[test]
fn of_an_uncordon_that_nobody_saw_only_what_was_listed_is_dismissed() {
    let mut world = World::new();
    world.fault(0);
    world.settle();
    world.session = Session::idle(world.now);
    world.node.unschedulable = false;
    world.now += SignedDuration::from_secs(100);
    assert_eq!(world.settle(), [Intent::StandDown]);
    world.late(1, 50);
    assert_eq!(world.settle(), [Intent::Quarantine]);
}

#[test]
fn a_taint_removed_by_hand_ends_the_session_and_leaves_the_cordon() {
    let mut world = World::new();
    world.fault(0);
    world.settle();
    world.node.taints.clear();
    assert_eq!(world.settle(), [Intent::StandDown]);
    assert!(world.node.unschedulable);
    assert_eq!(world.node.annotations[keys::UNTAINTED_MANUALLY], "True");
    assert!(world.node.labels.is_empty(), "{:?}", world.node.labels);
}

#[test]
fn the_labels_that_the_reference_leaves_come_by_the_policys_switch() {
    let mut world = World::new();
    world.policy.uncordon_labels = true;
    world.policy.rule_sets[0].name = "n".repeat(80);
    world.fault(0);
    world.settle();
    world.recovery(0);
    world.settle();
    let label = |name: &str| world.node.labels[&format!("k8saas.nvidia.com/{name}")].as_str();
    assert_eq!(world.node.labels.len(), 3);
    assert_eq!(label("uncordon-by"), "NVSentinel");
    assert_eq!(label("uncordon-reason"), "n".repeat(55) + "-removed");
    assert_eq!(label("uncordon-timestamp").len(), 20);
    // Not where the cordon was there before, and stays.
    let mut world = World::new();
    world.policy.uncordon_labels = true;
    world.node.unschedulable = true;
    world.fault(0);
    world.settle();
    world.recovery(0);
    world.settle();
    assert!(world.node.labels.is_empty() && world.node.unschedulable);
}

#[test]
fn the_documents_taint_follows_the_gravest_fault() {
    let mut world = World::new();
    world.policy = OTHER.clone();
    world.event("XidCheck", 0, true, false);
    world.fault(1);
    world.settle();
    let taints = |world: &World| -> Vec<String> {
        let shown = world.node.taints.iter().map(|on| on.taint.to_string());
        shown.collect()
    };
    assert_eq!(
        taints(&world),
        ["nvsentinel.nvidia.com/unhealthy=XidCheck:NoSchedule"]
    );
    world.event("XidCheck", 0, false, true);
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(
        taints(&world),
        ["nvsentinel.nvidia.com/unhealthy=GpuMemWatch:NoSchedule"]
    );
    world.recovery(1);
    world.settle();
    assert_eq!(world.node, NodeView::unknown("n1"));
}

#[test]
fn another_policy_changes_what_is_on_the_node() {
    let mut world = World::new();
    world.fault(0);
    world.settle();
    world.policy = OTHER.clone();
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(taint_keys(&world.node), ["nvsentinel.nvidia.com/unhealthy"]);
    world.policy.rule_sets.clear();
    assert_eq!(world.settle(), [Intent::Release]);
    assert_eq!(world.node, NodeView::unknown("n1"));
}

#[test]
fn a_second_fault_is_taken_in_and_the_recovery_of_one_trims() {
    let mut world = World::new();
    world.event("XidCheck", 0, true, false);
    world.settle();
    assert!(world.node.taints.is_empty());
    world.fault(1);
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(taint_keys(&world.node), ["gpu-memory"]);
    world.recovery(1);
    assert_eq!(world.settle(), [Intent::Update]);
    assert!(world.node.taints.is_empty() && world.node.unschedulable);
    world.event("XidCheck", 0, false, true);
    assert_eq!(world.settle(), [Intent::Release]);
    assert_eq!(world.node, NodeView::unknown("n1"));
}

#[test]
fn failures_back_off_a_person_is_asked_once_and_recovery_is_not_held_back() {
    let mut world = World::new();
    world.fault(0);
    let mut asked = 0;
    let mut attempts = 0;
    for _ in 0..200 {
        let step = world.step();
        asked += step
            .notes
            .iter()
            .filter(|note| note.kind == EntryKind::Attention)
            .count();
        if step.patch.is_some() {
            attempts += 1;
            world
                .session
                .failed(Failure::Error { retry_after: None }, world.now);
        }
    }
    assert_eq!(asked, 1);
    assert!((10..25).contains(&attempts), "{attempts} attempts in 200 s");
    assert!(world.session.awaits(true).contains("a person"));
    // The fault closes before the quarantine ever got through: nothing to take back.
    world.recovery(0);
    assert_eq!(world.settle(), []);
    assert_eq!(world.session.phase, Phase::Idle);
}

#[test]
fn the_server_s_wish_to_wait_is_honoured_within_bounds() {
    let now = Timestamp::from_second(1_000).unwrap();
    let mut session = Session::idle(now);
    let wish = |seconds| Failure::Error {
        retry_after: Some(SignedDuration::from_secs(seconds)),
    };
    session.failed(wish(5), now);
    assert_eq!(session.not_before, Some(now + SignedDuration::from_secs(5)));
    session.failed(wish(3_600), now);
    assert_eq!(session.not_before, Some(now + LONGEST_RETRY));
    for _ in 0..100 {
        session.failed(Failure::Conflict, now);
    }
    assert_eq!(session.not_before, Some(now + SignedDuration::from_secs(1)));
}

#[test]
fn a_node_that_the_cluster_does_not_know_is_awaited() {
    let mut world = World::new();
    world.fault(0);
    let waiting = step(
        &world.session,
        &world.desired(),
        None,
        &Marks::default(),
        None,
        world.now,
    );
    assert_eq!(
        (waiting.session.phase, waiting.patch),
        (Phase::Quarantining, None)
    );
    assert_eq!(waiting.session.wake_at(), None);
    world.session = waiting.session;
    assert_eq!(world.settle(), [Intent::Quarantine]);
    // Deleted while quarantined, and the fault recovers.
    world.recovery(0);
    let gone = step(
        &world.session,
        &world.desired(),
        None,
        &Marks::default(),
        None,
        world.now,
    );
    assert_eq!((gone.session.phase, gone.session.id), (Phase::Idle, None));
}

#[test]
fn a_node_quarantined_by_the_reference_is_taken_over_and_released() {
    let mut world = World::new();
    world.node.unschedulable = true;
    world.fault(0);
    let event = world.book.faults("n1")[0].event.clone();
    let mut listed = contract::json::annotation::to_value(&event);
    listed.as_object_mut().unwrap().remove("processingStrategy");
    for (key, value) in [
        (keys::QUARANTINE_HEALTH_EVENT, json!([listed]).to_string()),
        (keys::QUARANTINE_IS_CORDONED, "True".into()),
        (
            keys::QUARANTINE_APPLIED_TAINTS,
            r#"[{"key":"gpu-memory","value":"bad","effect":"NoSchedule"}]"#.into(),
        ),
    ] {
        world.node.annotations.insert(key.into(), value);
    }
    let taint = Taint {
        key: "gpu-memory".into(),
        value: "bad".into(),
        effect: "NoSchedule".into(),
    };
    world.node.taints.push(NodeTaint {
        raw: json!(taint),
        taint,
    });
    for name in ["cordon-by", "cordon-reason", "cordon-timestamp"] {
        world
            .node
            .labels
            .insert(format!("k8saas.nvidia.com/{name}"), "x".into());
    }
    world
        .node
        .labels
        .insert(keys::STATE_LABEL.into(), "draining".into());
    world.settle();
    assert_eq!(world.session.phase, Phase::Quarantined);
    assert_eq!(world.node.labels[keys::STATE_LABEL], "draining");
    world.recovery(0);
    assert_eq!(world.settle(), [Intent::Release]);
    assert_eq!(world.node, NodeView::unknown("n1"));
}

#[test]
fn annotations_that_cannot_be_read_do_not_hold_a_node_for_ever() {
    let mut world = World::new();
    world.node.unschedulable = true;
    world
        .node
        .annotations
        .insert(keys::QUARANTINE_HEALTH_EVENT.into(), "{broken".into());
    world
        .node
        .annotations
        .insert(keys::QUARANTINE_IS_CORDONED.into(), "True".into());
    assert_eq!(world.settle(), [Intent::Release]);
    assert_eq!(world.node, NodeView::unknown("n1"));
}

#[test]
fn the_events_annotation_is_bounded() {
    let mut world = World::new();
    for seq in 0..1_000_u64 {
        world.event(&format!("Check{seq}"), 0, true, false);
    }
    world.settle();
    let text = &world.node.annotations[keys::QUARANTINE_HEALTH_EVENT];
    assert!(
        text.len() <= 128 * 1024 && text.len() > 100 * 1024,
        "{}",
        text.len()
    );
    assert!(serde_json::from_str::<Value>(text).is_ok());
}

/// The API server refuses a node with too large annotations: it would never be taken out.
#[test]
fn one_event_alone_does_not_fill_the_annotation() {
    let metadata: BTreeMap<String, String> = (0..40)
        .map(|index| (format!("key-{index}"), "v".repeat(4_000)))
        .collect();
    let names: Vec<String> = (0..140)
        .map(|index| format!("{index:04}{}", "e".repeat(1_000)))
        .collect();
    for (metadata, entities) in [(metadata, 1), (BTreeMap::new(), 140)] {
        let mut world = World::new();
        let entities: Vec<_> = names.iter().take(entities).collect();
        let entities: Vec<_> = entities.iter().map(|name| ("NIC", name.as_str())).collect();
        world.report_with("GpuMemWatch", &entities, metadata);
        assert_eq!(world.settle(), [Intent::Quarantine]);
        let text = &world.node.annotations[keys::QUARANTINE_HEALTH_EVENT];
        assert!(text.len() <= 128 * 1024, "{}", text.len());
        let listed = Ownership::read(&world.node).unwrap().events;
        assert_eq!(listed.len(), 1);
        assert!(!listed[0].entities_impacted.is_empty());
        world.report("GpuMemWatch", &[], false, true);
        assert_eq!(world.settle(), [Intent::Release]);
        assert_eq!(world.node, NodeView::unknown("n1"));
    }
}
