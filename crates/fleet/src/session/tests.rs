//! Tests of sessions, as driven by the fleet.

mod dropped;
mod endings;
mod kept;
mod simulator;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use contract::{HealthEvent, keys};
use policy::Policy;
use serde_json::json;

use super::*;
use crate::FleetInput;
use crate::view::NodeState;
use crate::world::{Fate, Restart, World, event};

const POLICY: &str = r#"
label-prefix = "k8saas.nvidia.com/"
protect-from = ["cluster-autoscaler", "karpenter", "gpu-driver-upgrade"]
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
/// The parsed policy with another label prefix and the document's taint, without the second rule
/// set.
static OTHER: LazyLock<Policy> = LazyLock::new(|| {
    let mut policy = PARSED.clone();
    policy.label_prefix = "other/".into();
    policy.unhealthy_taint = true;
    policy.protect_from.clear();
    policy.rule_sets.pop();
    policy
});

fn taint_keys(node: &NodeView) -> Vec<&str> {
    node.taints.iter().map(|on| on.taint.key.as_str()).collect()
}

#[test]
fn a_fault_quarantines_in_one_change_and_recovery_restores() {
    let mut world = World::new(&PARSED);
    world["n1"].labels.insert("zone".into(), "a".into());
    world["n1"]
        .labels
        .insert("k8saas.nvidia.com/cordon-by".into(), "somebody".into());
    world.foreign_taint("dedicated");
    let mut object = world["n1"].object();
    object["metadata"]["labels"] = json!(world["n1"].labels);
    object["spec"]["taints"] = json!([world["n1"].taints[0].raw]);
    world["n1"] = NodeView::from_object(object).unwrap();
    let before = world["n1"].clone();

    world.fault(0);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    assert_eq!(world.phase(), Phase::Quarantined);
    assert!(world["n1"].unschedulable);
    assert_eq!(taint_keys(&world["n1"]), ["dedicated", "gpu-memory"]);
    let label = |name: &str| world["n1"].labels.get(name).map(String::as_str);
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
    let annotation = |key: &str| world["n1"].annotations[key].as_str();
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
    assert_eq!(events[0]["id"].as_str(), world.session().id.as_deref());

    world.recovery(0);
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world.phase(), Phase::Idle);
    assert_eq!(world["n1"], before);
}

#[test]
fn other_programs_leave_a_node_alone_while_it_is_out() {
    const SCALE_DOWN: &str = "cluster-autoscaler.kubernetes.io/scale-down-disabled";
    const DISRUPT: &str = "karpenter.sh/do-not-disrupt";
    const UPGRADE: &str = "nvidia.com/gpu-driver-upgrade.skip";
    let mut world = World::new(&PARSED);
    world.annotate(SCALE_DOWN, "false");
    world.annotate(DISRUPT, "true");
    let before = world["n1"].clone();
    world.fault(0);
    world.settle();
    let marks = [SCALE_DOWN, DISRUPT].map(|key| world["n1"].annotations[key].clone());
    assert_eq!(marks, ["true", "true"]);
    assert_eq!(world["n1"].labels[UPGRADE], "true");
    // Another policy meanwhile, and a restart, change nothing about what is taken back.
    world.set_policy(&OTHER);
    world.restart(Restart::All);
    world.settle();
    assert_eq!(world["n1"].labels[UPGRADE], "true");
    world.recovery(0);
    world.settle();
    assert_eq!(world["n1"].labels, before.labels);
    assert_eq!(world["n1"].annotations, before.annotations);
}

#[test]
fn what_was_there_before_stays() {
    let mut world = World::new(&PARSED);
    world["n1"].unschedulable = true;
    world.taint("gpu-memory", "bad");
    let before = world["n1"].clone();
    world.fault(0);
    world.settle();
    assert_eq!(
        world["n1"].annotations[keys::QUARANTINE_CORDON_PRE_EXISTING],
        "True"
    );
    assert!(
        world["n1"].annotations[keys::QUARANTINE_APPLIED_TAINTS].contains("\"preExisting\":true")
    );
    assert!(
        !world["n1"]
            .labels
            .contains_key("k8saas.nvidia.com/cordon-by")
    );
    world.recovery(0);
    world.settle();
    assert_eq!(world["n1"], before);
}

#[test]
fn an_uncordon_by_hand_ends_the_session_and_the_old_fault_does_not_start_it_again() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    world["n1"].unschedulable = false;
    assert_eq!(world.settle(), [Intent::StandDown]);
    assert_eq!(world.phase(), Phase::Idle);
    assert!(
        !world["n1"].unschedulable
            && world["n1"].taints.is_empty()
            && world["n1"].labels.is_empty()
    );
    assert_eq!(world["n1"].annotations[keys::UNCORDONED_MANUALLY], "True");

    // After a restart with the fault still open nothing happens.
    world.restart(Restart::Events);
    assert_eq!(world.settle(), []);
    // Another fault, or a new report of the same one, counts.
    world.fault(1);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    assert!(
        !world["n1"]
            .annotations
            .contains_key(keys::UNCORDONED_MANUALLY)
    );
    let events: Value =
        serde_json::from_str(&world["n1"].annotations[keys::QUARANTINE_HEALTH_EVENT]).unwrap();
    assert_eq!(
        events.as_array().unwrap().len(),
        1,
        "the dismissed fault does not count"
    );
    world.recovery(1);
    assert_eq!(world.settle(), [Intent::Return]);
    assert!(!world["n1"].unschedulable);
}

#[test]
fn a_fault_that_comes_with_the_uncordon_is_not_dismissed() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    world["n1"].unschedulable = false;
    world.fault(1);
    assert_eq!(world.settle(), [Intent::StandDown, Intent::Quarantine]);
    assert!(world["n1"].unschedulable);
}

/// Repeats are counted for a minute, and reported then.
#[test]
fn what_was_seen_before_a_node_was_given_back_by_hand_and_is_told_later_is_dismissed() {
    for by_request in [false, true] {
        let mut world = World::new(&PARSED);
        world.fault(0);
        world.settle();
        let seen = world.now;
        world.now += SignedDuration::from_secs(5);
        let mut asked = world.now;
        if by_request {
            // The person's clock is behind ours.
            asked -= SignedDuration::from_secs(60);
            let text = json!({"by": "alice", "reason": "r", "at": asked}).to_string();
            world["n1"].annotations.insert(keys::RELEASE.into(), text);
        } else {
            world["n1"].unschedulable = false;
        }
        assert_eq!(world.settle(), [Intent::StandDown]);
        world.now += SignedDuration::from_secs(60);
        let late = |world: &mut World| {
            let age = u8::try_from(world.now.duration_since(seen).as_secs()).unwrap();
            world.late(0, age);
            world.settle()
        };
        assert_eq!(late(&mut world), [], "{by_request}");
        // Another fault of that time is dismissed, too; one of now is not.
        world.late(1, 80);
        assert_eq!(world.settle(), []);
        world.late(0, 1);
        assert_eq!(world.settle(), [Intent::Quarantine]);
    }
}

/// The time of the uncordon is unknown, and reports since then may be new.
#[test]
fn of_an_uncordon_that_nobody_saw_only_what_was_listed_is_dismissed() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    world.restart(Restart::Events);
    world["n1"].unschedulable = false;
    world.now += SignedDuration::from_secs(100);
    assert_eq!(world.settle(), [Intent::StandDown]);
    world.late(1, 50);
    assert_eq!(world.settle(), [Intent::Quarantine]);
}

#[test]
fn a_taint_removed_by_hand_ends_the_session_and_leaves_the_cordon() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    world["n1"].taints.clear();
    assert_eq!(world.settle(), [Intent::StandDown]);
    assert!(world["n1"].unschedulable);
    assert_eq!(world["n1"].annotations[keys::UNTAINTED_MANUALLY], "True");
    assert!(world["n1"].labels.is_empty(), "{:?}", world["n1"].labels);
}

#[test]
fn the_labels_that_the_reference_leaves_come_by_the_policys_switch() {
    let mut policy = PARSED.clone();
    policy.uncordon_labels = true;
    policy.rule_sets[0].name = "n".repeat(80);
    let mut world = World::new(&policy);
    world.fault(0);
    world.settle();
    world.recovery(0);
    world.settle();
    let label = |name: &str| world["n1"].labels[&format!("k8saas.nvidia.com/{name}")].as_str();
    assert_eq!(world["n1"].labels.len(), 3);
    assert_eq!(label("uncordon-by"), "NVSentinel");
    assert_eq!(label("uncordon-reason"), "n".repeat(55) + "-removed");
    assert_eq!(label("uncordon-timestamp").len(), 20);
    // A cordon from before the session stays.
    let mut world = World::new(&policy);
    world["n1"].unschedulable = true;
    world.fault(0);
    world.settle();
    world.recovery(0);
    world.settle();
    assert!(world["n1"].labels.is_empty() && world["n1"].unschedulable);
}

#[test]
fn the_documents_taint_follows_the_gravest_fault() {
    let mut world = World::new(&OTHER);
    world.event("XidCheck", 0, true, false);
    world.fault(1);
    world.settle();
    let taints = |world: &World| -> Vec<String> {
        let shown = world["n1"].taints.iter().map(|on| on.taint.to_string());
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
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn another_policy_changes_what_is_on_the_node() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.settle();
    world.set_policy(&OTHER);
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(
        taint_keys(&world["n1"]),
        ["nvsentinel.nvidia.com/unhealthy"]
    );
    let mut empty = OTHER.clone();
    empty.rule_sets.clear();
    world.set_policy(&empty);
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn a_second_fault_is_taken_in_and_the_recovery_of_one_trims() {
    let mut world = World::new(&PARSED);
    world.event("XidCheck", 0, true, false);
    world.settle();
    assert!(world["n1"].taints.is_empty());
    world.fault(1);
    assert_eq!(world.settle(), [Intent::Update]);
    assert_eq!(taint_keys(&world["n1"]), ["gpu-memory"]);
    world.recovery(1);
    assert_eq!(world.settle(), [Intent::Update]);
    assert!(world["n1"].taints.is_empty() && world["n1"].unschedulable);
    world.event("XidCheck", 0, false, true);
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn failures_back_off_a_person_is_asked_once_and_recovery_is_not_held_back() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    let mut asked = 0;
    let mut attempts = 0;
    for _ in 0..200 {
        let looked = world.look(Fate::Refused);
        let mut notes = looked.notes.iter();
        asked += u32::from(notes.any(|note| note.kind == EntryKind::Attention));
        attempts += u32::from(looked.patch().is_some());
    }
    assert_eq!(asked, 1);
    assert!((10..25).contains(&attempts), "{attempts} attempts in 200 s");
    assert!(world.session().awaits(true).contains("a person"));
    // The fault closes before the quarantine was made: there is nothing to take back.
    world.recovery(0);
    assert_eq!(world.settle(), []);
    assert_eq!(world.phase(), Phase::Idle);
}

#[test]
fn the_server_s_wish_to_wait_is_honoured_within_bounds() {
    let now = Timestamp::from_second(1_000).unwrap();
    let mut session = Session::idle(now);
    let wish = |seconds| RequestFailure::Error {
        retry_after: Some(SignedDuration::from_secs(seconds)),
    };
    session.failed(wish(5), now);
    assert_eq!(session.not_before, Some(now + SignedDuration::from_secs(5)));
    session.failed(wish(3_600), now);
    assert_eq!(session.not_before, Some(now + LONGEST_RETRY));
    for _ in 0..100 {
        session.failed(RequestFailure::Conflict, now);
    }
    assert_eq!(session.not_before, Some(now + SignedDuration::from_secs(1)));
}

#[test]
fn a_node_that_the_cluster_does_not_know_is_awaited() {
    let mut world = World::new(&PARSED);
    let gone = |world: &mut World| {
        world.handle(FleetInput::NodeGone("n1".to_owned()));
        assert_eq!(world.look_without_watch(Fate::Made).patch(), None);
    };
    world.fault(0);
    gone(&mut world);
    assert_eq!(world.phase(), Phase::Quarantining);
    assert_eq!(world.session().wake_at(world.now), None);
    assert_eq!(world.settle(), [Intent::Quarantine]);
    // The node is deleted while quarantined, and the fault recovers.
    world.recovery(0);
    gone(&mut world);
    assert!(!world.fleet.knows("n1"));
}

#[test]
fn a_node_quarantined_by_the_reference_is_taken_over_and_released() {
    let mut world = World::new(&PARSED);
    world["n1"].unschedulable = true;
    world.fault(0);
    let event = world.fleet.book().faults("n1")[0].event.clone();
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
        world["n1"].annotations.insert(key.into(), value);
    }
    world.taint("gpu-memory", "bad");
    for name in ["cordon-by", "cordon-reason", "cordon-timestamp"] {
        world["n1"]
            .labels
            .insert(format!("k8saas.nvidia.com/{name}"), "x".into());
    }
    world["n1"]
        .labels
        .insert(keys::STATE_LABEL.into(), "draining".into());
    world.settle();
    assert_eq!(world.phase(), Phase::Quarantined);
    assert_eq!(world["n1"].labels[keys::STATE_LABEL], "draining");
    world.recovery(0);
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn annotations_that_cannot_be_read_do_not_hold_a_node_for_ever() {
    let mut world = World::new(&PARSED);
    world["n1"].unschedulable = true;
    world["n1"]
        .annotations
        .insert(keys::QUARANTINE_HEALTH_EVENT.into(), "{broken".into());
    world["n1"]
        .annotations
        .insert(keys::QUARANTINE_IS_CORDONED.into(), "True".into());
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn the_events_annotation_is_bounded() {
    let mut world = World::new(&PARSED);
    for seq in 0..1_000_u64 {
        world.event(&format!("Check{seq}"), 0, true, false);
    }
    world.settle();
    let text = &world["n1"].annotations[keys::QUARANTINE_HEALTH_EVENT];
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
        let mut world = World::new(&PARSED);
        let entities: Vec<_> = names.iter().take(entities).collect();
        let entities: Vec<_> = entities.iter().map(|name| ("NIC", name.as_str())).collect();
        world.tick();
        let event = HealthEvent {
            metadata,
            ..event("GpuMemWatch", &entities, true, false)
        };
        world.store(event, world.now);
        assert_eq!(world.settle(), [Intent::Quarantine]);
        let text = &world["n1"].annotations[keys::QUARANTINE_HEALTH_EVENT];
        assert!(text.len() <= 128 * 1024, "{}", text.len());
        let listed = Ownership::read(&world["n1"]).unwrap().events;
        assert_eq!(listed.len(), 1);
        assert!(!listed[0].entities_impacted.is_empty());
        world.report("GpuMemWatch", &[], false, true);
        assert_eq!(world.settle(), [Intent::Return]);
        assert_eq!(world["n1"], NodeView::unknown("n1"));
    }
}

#[test]
fn a_deadline_that_is_over_hides_no_other_wait() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    let mut session = world.session().clone();
    let (now, later) = (world.now, world.now + SignedDuration::from_mins(10));
    session.pending_since = Some(now - SignedDuration::from_hours(5));
    session.not_before = Some(later);
    assert_eq!(session.wake_at(now), Some(later));
    assert_eq!(session.wake_at(later), None);
}

#[test]
fn phases_states_and_intents_are_stored_under_names_that_do_not_change() {
    for (phase, name) in [
        (Phase::Idle, "idle"),
        (Phase::Held, "held"),
        (Phase::Quarantining, "quarantining"),
        (Phase::Quarantined, "quarantined"),
        (Phase::Draining, "draining"),
        (Phase::Drained, "drained"),
        (Phase::Remediating, "remediating"),
        (Phase::Remediated, "remediated"),
        (Phase::RemediationFailed, "remediation-failed"),
        (Phase::Returning, "releasing"),
    ] {
        assert_eq!((json!(phase), phase.name()), (json!(name), name));
        let state = NodeState::Session(phase);
        assert_eq!((json!(state), state.name()), (json!(name), name));
        assert_eq!(serde_json::from_value(json!(name)).ok(), Some(state));
    }
    for state in [
        NodeState::Healthy,
        NodeState::Degraded,
        NodeState::Unhealthy,
        NodeState::PartlyQuarantined,
    ] {
        assert_eq!(json!(state), json!(state.name()));
        assert_eq!(serde_json::from_value(json!(state)).ok(), Some(state));
    }
    for (intent, name) in [
        (Intent::Quarantine, "quarantine"),
        (Intent::Update, "update"),
        (Intent::Return, "release"),
        (Intent::StandDown, "stand-down"),
    ] {
        assert_eq!((json!(intent), intent.name()), (json!(name), name));
    }
}
