//! Faults that change their meaning on the way: every change in every stage, and what follows.

use super::*;

/// A reboot, a replacement, and a validation after each remediation.
const CONFIG: &str = r#"
[remediationActions.RESTART_BM]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
scope = "Cluster"
completeConditionType = "NodeReady"
templateFileName = "one"
equivalenceGroup = "restart"

[remediationActions.REPLACE_VM]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "TerminateNode"
scope = "Cluster"
completeConditionType = "NodeReady"
templateFileName = "one"
equivalenceGroup = "terminate"

[remediationActions.VALIDATE]
apiGroup = "batch"
version = "v1"
kind = "Job"
namespace = "gpuwarden"
completeConditionType = "Complete"
templateFileName = "one"
equivalenceGroup = "validation"

[templates]
one = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "{{ .NodeName }}-{{ .HealthEventID }}"}
"""

[validation]
action = "VALIDATE"
"#;

/// Result of each change, and if something is under way in the stage, the result after its end:
/// the phase, and the resource created.
const TABLE: &[(Stage, Change, &str, &str)] = &[
    (Stage::Draining, Change::None, "draining", "drained"),
    (
        Stage::Draining,
        Change::Support,
        "draining",
        "remediation-failed",
    ),
    (
        Stage::Draining,
        Change::Replace,
        "draining",
        "remediating TerminateNode",
    ),
    (
        Stage::Draining,
        Change::Reboot,
        "draining",
        "remediating RebootNode",
    ),
    (
        Stage::Draining,
        Change::Entity,
        "draining",
        "remediating RebootNode",
    ),
    (
        Stage::Draining,
        Change::Milder,
        "draining",
        "remediating RebootNode",
    ),
    // The fault of the node asks for no remediation.
    (Stage::Drained, Change::None, "drained", ""),
    (Stage::Drained, Change::Support, "remediation-failed", ""),
    (
        Stage::Drained,
        Change::Replace,
        "remediating TerminateNode",
        "",
    ),
    (Stage::Drained, Change::Reboot, "remediating RebootNode", ""),
    (Stage::Drained, Change::Entity, "remediating RebootNode", ""),
    (Stage::Drained, Change::Milder, "drained", ""),
    // Begun work comes to its end.
    (
        Stage::Remediating,
        Change::None,
        "remediating",
        "remediated",
    ),
    (
        Stage::Remediating,
        Change::Support,
        "remediating",
        "remediation-failed",
    ),
    (
        Stage::Remediating,
        Change::Replace,
        "remediating",
        "remediating TerminateNode",
    ),
    (
        Stage::Remediating,
        Change::Reboot,
        "remediating",
        "remediated",
    ),
    (
        Stage::Remediating,
        Change::Entity,
        "remediating",
        "remediated",
    ),
    (
        Stage::Remediating,
        Change::Milder,
        "remediating",
        "remediated",
    ),
    (Stage::Recovering, Change::None, "remediated", ""),
    (Stage::Recovering, Change::Support, "remediation-failed", ""),
    (
        Stage::Recovering,
        Change::Replace,
        "remediating TerminateNode",
        "",
    ),
    (Stage::Recovering, Change::Reboot, "remediated", ""),
    // The fault came after the reboot.
    (
        Stage::Recovering,
        Change::Entity,
        "remediating RebootNode",
        "",
    ),
    (Stage::Recovering, Change::Milder, "remediated", ""),
    (Stage::Retrying, Change::None, "drained", ""),
    (Stage::Retrying, Change::Support, "remediation-failed", ""),
    (
        Stage::Retrying,
        Change::Replace,
        "remediating TerminateNode",
        "",
    ),
    (Stage::Retrying, Change::Reboot, "remediating", ""),
    (Stage::Retrying, Change::Entity, "remediating", ""),
    (Stage::Retrying, Change::Milder, "remediating", ""),
    (Stage::Failed, Change::None, "drained", ""),
    (Stage::Failed, Change::Support, "remediation-failed", ""),
    (
        Stage::Failed,
        Change::Replace,
        "remediating TerminateNode",
        "",
    ),
    (Stage::Failed, Change::Reboot, "remediation-failed", ""),
    (Stage::Failed, Change::Entity, "remediation-failed", ""),
    (Stage::Failed, Change::Milder, "remediation-failed", ""),
    // A fault that comes meanwhile is remediated first, and then validated anew; one that is not
    // fatal takes no node out.
    (Stage::Validating, Change::None, "remediating", "remediated"),
    (
        Stage::Validating,
        Change::Support,
        "remediating",
        "remediation-failed",
    ),
    (
        Stage::Validating,
        Change::Replace,
        "remediating",
        "remediating TerminateNode",
    ),
    (
        Stage::Validating,
        Change::Reboot,
        "remediating",
        "remediating RebootNode",
    ),
    (
        Stage::Validating,
        Change::Entity,
        "remediating",
        "remediating RebootNode",
    ),
    (Stage::Validating, Change::Milder, "remediating", "idle"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Draining,
    Drained,
    Remediating,
    Recovering,
    Retrying,
    Failed,
    Validating,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// The fault asks for nothing, for a person, for another machine, or for a reboot.
    None,
    Support,
    Replace,
    Reboot,
    /// The fault moves to another GPU.
    Entity,
    /// The fault is reported as not fatal.
    Milder,
}

impl Stage {
    /// Returns a node that has reached this stage because of a fault of GPU 0.
    fn reached(self) -> World {
        let none = |_: &str| Err("there are no files".to_owned());
        let config = RemediationConfig::parse(CONFIG, "test", none).unwrap();
        let mut world = world_with(Settings {
            remediation: Some(Arc::new(config)),
            ..remediates()
        });
        match self {
            Self::Draining => {
                let pod = crate::drain::PodView {
                    namespace: "jobs".into(),
                    name: "a".into(),
                    uid: "u".into(),
                    ..Default::default()
                };
                world.pods.insert("jobs/a".into(), pod);
                fault(&mut world, 0, 24);
            }
            Self::Drained => drop(fault(&mut world, 0, 0)),
            _ => drop(begin(&mut world, 0, 24)),
        }
        let status = match self {
            Self::Recovering | Self::Validating => Some(done()),
            Self::Retrying => Some(failed("TransientFailure")),
            Self::Failed => Some(failed("PermanentFailure")),
            _ => None,
        };
        if let Some(status) = status {
            end(&mut world, status);
        }
        looks(&mut world);
        if self == Self::Validating {
            world.recovery(0);
            looks(&mut world);
            assert_eq!(attempts(&world).last().unwrap().resource.kind, "Job");
        }
        let phase = match self {
            Self::Draining => Phase::Draining,
            Self::Drained => Phase::Drained,
            Self::Remediating | Self::Retrying | Self::Validating => Phase::Remediating,
            Self::Recovering => Phase::Remediated,
            Self::Failed => Phase::RemediationFailed,
        };
        assert_eq!(world.phase(), phase, "{self:?}");
        world
    }

    /// Ends the work under way in this stage. Returns whether there is any.
    fn end(self, world: &mut World) -> bool {
        match self {
            Self::Draining => {
                world.pods.clear();
                world.deliver_pod_update(crate::PodUpdate::Gone("jobs/a".into()));
            }
            Self::Remediating => end(world, done()),
            Self::Validating => {
                let status = json!({"conditions": [
                    {"type": "Complete", "status": "True", "reason": "R", "message": "m"}]});
                end(world, status);
            }
            _ => return false,
        }
        true
    }
}

impl Change {
    fn happens(self, world: &mut World) {
        let action = match self {
            Self::None => 0,
            Self::Support => 5,
            Self::Replace => 25,
            Self::Reboot => 24,
            Self::Entity => {
                world.recovery(0);
                fault(world, 1, 24);
                return;
            }
            Self::Milder => {
                world.tick();
                let mut milder = event("GpuMemWatch", &[("GPU", "0")], false, false);
                milder.recommended_action = 24;
                world.store(milder, world.now);
                return;
            }
        };
        fault(world, 0, action);
    }
}

/// Ends the newest attempt with this status.
fn end(world: &mut World, status: Value) {
    let name = attempts(world).pop().unwrap().name;
    set(world, &name, status);
}

/// Looks until nothing new is expected soon; creates every requested resource. Returns the
/// phase, and the resource.
fn looks(world: &mut World) -> String {
    let mut made = Vec::new();
    for _ in 0..8 {
        for planned in world.look(Fate::Made).creations {
            make(world, &planned);
            made.push(planned.kind.kind);
        }
    }
    let phase = world.phase().name().to_owned();
    std::iter::once(phase)
        .chain(made)
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn whatever_a_fault_becomes_in_whatever_stage_something_follows() {
    for (stage, change, first, then) in TABLE {
        let mut world = stage.reached();
        change.happens(&mut world);
        let follows = looks(&mut world);
        assert_eq!(
            follows,
            *first,
            "{stage:?} {change:?}: {}",
            awaits_of(&world)
        );
        if stage.end(&mut world) {
            let follows = looks(&mut world);
            assert_eq!(
                follows,
                *then,
                "{stage:?} {change:?}: {}",
                awaits_of(&world)
            );
        }
        // In every case: once all faults are over the node comes back, after a validation at
        // most.
        for gpu in 0..2 {
            world.recovery(gpu);
        }
        for _ in 0..4 {
            let open = attempts(&world).pop().filter(|one| one.end.is_none());
            if let Some(open) = open.filter(|one| one.made.is_some()) {
                let mut status = done();
                status["conditions"][1]["type"] = json!(open.resource.condition);
                set(&mut world, &open.name, status);
            }
            looks(&mut world);
        }
        world.settle();
        let left = awaits_of(&world);
        assert_eq!(world.phase(), Phase::Idle, "{stage:?} {change:?}: {left}");
    }
}

#[test]
fn the_table_has_every_change_in_every_stage() {
    let pairs = TABLE
        .iter()
        .map(|(stage, change, ..)| format!("{stage:?} {change:?}"));
    let pairs: BTreeSet<String> = pairs.collect();
    assert_eq!((TABLE.len(), pairs.len()), (42, 42));
}

fn awaits_of(world: &World) -> String {
    let session = world.fleet.status("n1").and_then(|status| status.session);
    session.map(|session| session.awaits).unwrap_or_default()
}
