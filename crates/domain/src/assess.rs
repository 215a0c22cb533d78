//! From the open faults of a node to what is wanted for it.
//!
//! Recomputed from all open faults every time: a second fault is taken in at once, and
//! the recovery of one of two takes back only what that one asked for.

use std::collections::BTreeMap;

use contract::HealthEvent;
use jiff::Timestamp;

use crate::fault::Fault;
use crate::node::{NodeView, Taint};
use crate::policy::{Answer, NodeVariable, Policy, RuleSet, event_variable};

/// What is wanted for a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// Take it out of scheduling.
    pub cordon: bool,
    /// Taints it should carry, sorted, one per key and value.
    pub taints: Vec<Taint>,
    /// Rule sets that ask for it, in the order of the policy.
    pub rule_sets: Vec<String>,
    /// The faults for which it is wanted, gravest first: their events.
    pub events: Vec<Counted>,
    /// Who is named as having cordoned, where a sender's override forces it.
    pub forced_by: Option<String>,
    /// For people: why each open fault counts, or does not.
    pub reasons: Vec<String>,
}

/// An event that counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// The event that stands for the fault.
    pub event: HealthEvent,
    /// When the newest report of the fault was accepted.
    pub accepted_at: Timestamp,
}

// === impl Desired ===

impl Desired {
    /// Whether the node is to be quarantined at all.
    pub fn wanted(&self) -> bool {
        self.cordon || !self.taints.is_empty()
    }
}

/// What `policy` asks for, given the open faults of a node. Faults last reported before
/// `released_at`, when a person ended the last session, do not count.
pub fn assess(
    faults: &[Fault],
    policy: &Policy,
    node: &NodeView,
    released_at: Option<Timestamp>,
) -> Desired {
    let mut faults: Vec<&Fault> = faults.iter().collect();
    faults.sort_by(|a, b| Fault::by_gravity(a, b));
    let variable = NodeVariable::new(&node.object);
    let mut desired = Desired::default();
    let mut matched: Vec<&RuleSet> = Vec::new();
    for fault in faults {
        let title = fault.title();
        if released_at.is_some_and(|released| fault.accepted_at <= released) {
            desired.reasons.push(format!(
                "{title}: dismissed when the node was released by hand"
            ));
            continue;
        }
        let overrides = fault.event.quarantine_overrides.unwrap_or_default();
        if overrides.skip && !overrides.force {
            desired
                .reasons
                .push(format!("{title}: its sender asks not to quarantine (skip)"));
            continue;
        }
        if overrides.force {
            desired.cordon = true;
            desired
                .forced_by
                .get_or_insert_with(|| forced_by(&fault.event));
            desired
                .reasons
                .push(format!("{title}: its sender asks to quarantine (force)"));
            take(&mut desired.events, fault);
            continue;
        }
        let event = event_variable(&fault.event);
        let mut wanted = false;
        let mut against = Vec::new();
        for rule_set in &policy.rule_sets {
            match rule_set.answer(&event, &variable) {
                Answer::Matched => {
                    wanted |= rule_set.cordon || rule_set.taint.is_some();
                    desired
                        .reasons
                        .push(format!("{title}: rule set '{}' matches", rule_set.name));
                    if !matched.iter().any(|known| std::ptr::eq(*known, rule_set)) {
                        matched.push(rule_set);
                    }
                }
                Answer::NotMatched(_) => {
                    against.push(format!("'{}' does not match", rule_set.name));
                }
                Answer::Failed(expression, why) => against.push(format!(
                    "'{}' cannot be evaluated: {expression}: {why}",
                    rule_set.name
                )),
            }
        }
        if wanted {
            take(&mut desired.events, fault);
        } else {
            let why = if policy.rule_sets.is_empty() {
                "the policy has no rule sets".to_owned()
            } else {
                against.join(", ")
            };
            desired
                .reasons
                .push(format!("{title}: quarantines nothing: {why}"));
        }
    }
    // In the order of the policy, whatever order the faults came in: deterministic.
    let mut taints: BTreeMap<(&str, &str), (i64, &Taint)> = BTreeMap::new();
    for rule_set in policy
        .rule_sets
        .iter()
        .filter(|set| matched.iter().any(|m| std::ptr::eq(*m, *set)))
    {
        desired.rule_sets.push(rule_set.name.clone());
        desired.cordon |= rule_set.cordon;
        if let Some(taint) = &rule_set.taint {
            let entry = taints
                .entry((&taint.key, &taint.value))
                .or_insert((rule_set.priority, taint));
            if rule_set.priority > entry.0 {
                *entry = (rule_set.priority, taint);
            }
        }
    }
    desired.taints = taints
        .into_values()
        .map(|(_, taint)| taint.clone())
        .collect();
    desired
}

fn take(events: &mut Vec<Counted>, fault: &Fault) {
    // One event may stand for several faults (two GPUs, two codes).
    match events
        .iter_mut()
        .find(|known| known.event.id == fault.event.id)
    {
        Some(known) => known.accepted_at = known.accepted_at.max(fault.accepted_at),
        None => events.push(Counted {
            event: fault.event.clone(),
            accepted_at: fault.accepted_at,
        }),
    }
}

/// `<agent>-<creator>`, as the reference names who forced a quarantine.
fn forced_by(event: &HealthEvent) -> String {
    match event.metadata.get("creator_id") {
        Some(creator) => format!("{}-{creator}", event.agent),
        None => event.agent.clone(),
    }
}

#[cfg(test)]
mod tests {
    use contract::{BehaviourOverrides, Entity};

    use super::*;
    use crate::event::{Record, normalise};
    use crate::fault::FaultBook;

    fn faults(events: Vec<HealthEvent>) -> Vec<Fault> {
        let mut book = FaultBook::default();
        for (seq, mut event) in (1_u64..).zip(events) {
            let created_at = Timestamp::from_second(1_000 + i64::try_from(seq).unwrap()).unwrap();
            event.node_name = "n1".into();
            normalise(&mut event, created_at);
            book.record(&Record {
                seq,
                id: event.id.clone(),
                created_at,
                event,
            });
        }
        book.faults("n1").to_vec()
    }

    fn fatal(gpu: &str) -> HealthEvent {
        HealthEvent {
            agent: "gpu-health-monitor".into(),
            component_class: "GPU".into(),
            check_name: "GpuMemWatch".into(),
            is_fatal: true,
            entities_impacted: vec![Entity {
                entity_type: "GPU".into(),
                entity_value: gpu.into(),
            }],
            ..HealthEvent::default()
        }
    }

    fn judge(events: Vec<HealthEvent>) -> Desired {
        assess(
            &faults(events),
            &Policy::builtin(),
            &NodeView::unknown("n1"),
            None,
        )
    }

    #[test]
    fn fatal_and_replace_vm_quarantine_by_default() {
        let desired = judge(vec![fatal("0")]);
        assert!(desired.cordon && desired.taints.is_empty());
        assert_eq!(desired.rule_sets, ["default"]);
        let replace = HealthEvent {
            is_fatal: false,
            recommended_action: 25,
            ..fatal("0")
        };
        assert!(judge(vec![replace]).cordon);
        let harmless = HealthEvent {
            is_fatal: false,
            ..fatal("0")
        };
        let desired = judge(vec![harmless]);
        assert!(!desired.wanted() && desired.events.is_empty());
        assert!(
            desired.reasons[0].contains("does not match"),
            "{:?}",
            desired.reasons
        );
    }

    #[test]
    fn skip_and_force_of_the_sender_have_precedence() {
        let skip = HealthEvent {
            quarantine_overrides: Some(BehaviourOverrides {
                force: false,
                skip: true,
            }),
            ..fatal("0")
        };
        assert!(!judge(vec![skip]).wanted());
        let force = HealthEvent {
            is_fatal: false,
            quarantine_overrides: Some(BehaviourOverrides {
                force: true,
                skip: false,
            }),
            metadata: [("creator_id".to_owned(), "alice".to_owned())].into(),
            ..fatal("0")
        };
        let desired = judge(vec![force]);
        assert!(desired.cordon);
        assert_eq!(
            desired.forced_by.as_deref(),
            Some("gpu-health-monitor-alice")
        );
    }

    #[test]
    fn faults_dismissed_by_hand_do_not_count_but_newer_ones_do() {
        let faults = faults(vec![fatal("0"), fatal("1")]);
        let policy = Policy::builtin();
        let node = NodeView::unknown("n1");
        let released = |second| Some(Timestamp::from_second(second).unwrap());
        assert_eq!(
            assess(&faults, &policy, &node, released(1_001))
                .events
                .len(),
            1
        );
        assert!(!assess(&faults, &policy, &node, released(1_002)).wanted());
        assert_eq!(
            assess(&faults, &policy, &node, released(1_000))
                .events
                .len(),
            2
        );
    }

    #[test]
    fn the_higher_priority_decides_about_an_effect_and_the_order_is_the_policys() {
        let rule = |name: &str, priority: i64, effect: &str| {
            format!(
                "[[rule-sets]]\nname = \"{name}\"\npriority = {priority}\n\
                 taint = {{ key = \"gpu\", value = \"bad\", effect = \"{effect}\" }}\n\
                 [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n"
            )
        };
        let text = [
            rule("a", 1, "NoSchedule"),
            rule("b", 5, "NoExecute"),
            rule("c", 5, "NoSchedule"),
        ];
        let policy = Policy::parse(&text.concat(), "p").unwrap();
        let desired = assess(
            &faults(vec![fatal("0")]),
            &policy,
            &NodeView::unknown("n1"),
            None,
        );
        assert_eq!(desired.taints.len(), 1);
        assert_eq!(desired.taints[0].effect, "NoExecute");
        assert_eq!(desired.rule_sets, ["a", "b", "c"]);
        assert!(!desired.cordon);
    }

    #[test]
    fn one_event_for_several_faults_is_listed_once_gravest_first() {
        let mut both = fatal("0");
        both.error_code = vec!["48".into(), "95".into()];
        let minor = HealthEvent {
            is_fatal: false,
            recommended_action: 25,
            ..fatal("7")
        };
        let desired = judge(vec![minor, both]);
        assert_eq!(desired.events.len(), 2);
        assert!(desired.events[0].event.is_fatal);
    }
}
