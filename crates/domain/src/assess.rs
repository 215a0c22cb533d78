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
    /// Why each open fault counts, or does not; gravest first.
    pub verdicts: Vec<Verdict>,
}

/// Why one open fault counts, or does not. Displayed for people.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// [`Fault::title`].
    pub fault: String,
    /// What decided about it.
    pub ruling: Ruling,
}

/// What decides about one open fault, in order of precedence.
#[derive(Clone, Debug, PartialEq)]
pub enum Ruling {
    /// A person released the node, at this time, and the fault was not reported since.
    Dismissed(Timestamp),
    /// Its sender asks not to quarantine.
    Skipped,
    /// Its sender asks to quarantine.
    Forced,
    /// The policy.
    Judged {
        /// Whether a rule set that matches asks for anything.
        wanted: bool,
        /// What each rule set says, in the order of the policy.
        answers: Vec<(String, Answer)>,
    },
}

/// An event that counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// The event that stands for the fault.
    pub event: HealthEvent,
    /// When the newest report of the fault was accepted.
    pub accepted_at: Timestamp,
}

// === impl Verdict ===

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.fault)?;
        match &self.ruling {
            Ruling::Dismissed(_) => {
                f.write_str("dismissed when the node was released by hand; a newer report counts")
            }
            Ruling::Skipped => f.write_str("its sender asks not to quarantine (skip)"),
            Ruling::Forced => f.write_str("its sender asks to quarantine (force)"),
            Ruling::Judged { wanted, answers } => {
                let (for_it, against): (Vec<_>, Vec<_>) = answers
                    .iter()
                    .partition(|(_, answer)| *answer == Answer::Matched);
                let said = |answers: Vec<&(String, Answer)>| -> Vec<String> {
                    answers
                        .into_iter()
                        .map(|(name, answer)| format!("'{name}' {answer}"))
                        .collect()
                };
                let mut parts: Vec<String> = said(for_it)
                    .into_iter()
                    .map(|text| format!("rule set {text}"))
                    .collect();
                if answers.is_empty() {
                    parts.push("quarantines nothing: the policy has no rule sets".to_owned());
                } else if !wanted {
                    let against = said(against);
                    let why = if against.is_empty() {
                        "what matches asks for nothing".to_owned()
                    } else {
                        against.join(", ")
                    };
                    parts.push(format!("quarantines nothing: {why}"));
                }
                f.write_str(&parts.join("; "))
            }
        }
    }
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
        let mut rule = |ruling| {
            desired.verdicts.push(Verdict {
                fault: fault.title(),
                ruling,
            });
        };
        if let Some(released) = released_at.filter(|released| fault.dismissed(*released)) {
            rule(Ruling::Dismissed(released));
            continue;
        }
        let overrides = fault.event.quarantine_overrides.unwrap_or_default();
        if overrides.skip && !overrides.force {
            rule(Ruling::Skipped);
            continue;
        }
        if overrides.force {
            rule(Ruling::Forced);
            desired.cordon = true;
            desired
                .forced_by
                .get_or_insert_with(|| forced_by(&fault.event));
            take(&mut desired.events, fault);
            continue;
        }
        let event = event_variable(&fault.event);
        let mut wanted = false;
        let mut answers = Vec::with_capacity(policy.rule_sets.len());
        for rule_set in &policy.rule_sets {
            let answer = rule_set.answer(&event, &variable);
            if answer == Answer::Matched {
                wanted |= rule_set.asks();
                if !matched.iter().any(|known| std::ptr::eq(*known, rule_set)) {
                    matched.push(rule_set);
                }
            }
            answers.push((rule_set.name.clone(), answer));
        }
        rule(Ruling::Judged { wanted, answers });
        if wanted {
            take(&mut desired.events, fault);
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
    }

    #[test]
    fn which_expression_did_not_match_is_said() {
        let said = |event: HealthEvent, node: &NodeView, policy: &Policy| {
            assess(&faults(vec![event]), policy, node, None).verdicts[0].to_string()
        };
        let harmless = HealthEvent {
            is_fatal: false,
            ..fatal("0")
        };
        let mut opted_out = NodeView::unknown("n1");
        opted_out.object["metadata"]["labels"][contract::keys::MANAGED_LABEL] = "false".into();
        let node = NodeView::unknown("n1");
        let asks_nothing = Policy::parse(
            "[[rule-sets]]\nname = \"a\"\n[[rule-sets.match.all]]\nkind = \"HealthEvent\"\n\
             expression = \"event.isFatal\"\n",
            "p",
        )
        .unwrap();
        let title = "GpuMemWatch on GPU 0: ";
        for (event, node, policy, expected) in [
            (
                harmless,
                &node,
                &Policy::builtin(),
                "quarantines nothing: 'default' does not match: event.isFatal || \
                 event.recommendedAction == 25",
            ),
            (
                fatal("0"),
                &opted_out,
                &Policy::builtin(),
                "quarantines nothing: 'default' does not match: !(has(node.metadata.labels) && \
                 'k8saas.nvidia.com/ManagedByNVSentinel' in node.metadata.labels && \
                 node.metadata.labels['k8saas.nvidia.com/ManagedByNVSentinel'] == 'false')",
            ),
            (
                fatal("0"),
                &node,
                &Policy::builtin(),
                "rule set 'default' matches",
            ),
            (
                fatal("0"),
                &node,
                &asks_nothing,
                "rule set 'a' matches; quarantines nothing: what matches asks for nothing",
            ),
            (
                fatal("0"),
                &node,
                &Policy::parse("", "p").unwrap(),
                "quarantines nothing: the policy has no rule sets",
            ),
        ] {
            assert_eq!(said(event, node, policy), format!("{title}{expected}"));
        }
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
