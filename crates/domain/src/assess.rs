//! From the open faults of a node to what is wanted for it.
//!
//! Recomputed from all open faults every time: a second fault is taken in at once, and
//! the recovery of one of two takes back only what that one asked for.

use std::cell::LazyCell;
use std::collections::BTreeMap;

use contract::{HealthEvent, keys};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::fault::Fault;
use crate::node::{NodeView, Taint, label_value};
use crate::ownership::Ownership;
use crate::policy::{EventVariable, NodeVariable, Policy, RuleSet, RuleSetAnswer, event_variable};

mod remaining;

/// What of a node is wanted otherwise. Each has a session of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// The node as a whole.
    #[default]
    Node,
    /// One of its devices, by name. No session of one is opened yet.
    Device(String),
}

/// What is wanted for a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// Take it out of scheduling.
    pub cordon: bool,
    /// Taints it should carry, sorted, one per key and effect.
    pub taints: Vec<Taint>,
    /// Rule sets that ask for it, in the order of the policy.
    pub rule_sets: Vec<String>,
    /// Taints that single devices of it should carry, by the name of the device. No rule asks for
    /// one yet.
    pub devices: BTreeMap<String, Vec<Taint>>,
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
    /// The node is handed over to an external system (label
    /// [`HANDED_OVER_LABEL`](keys::HANDED_OVER_LABEL)).
    HandedOver,
    /// A person has dismissed it, and it was not reported since.
    Dismissed(Dismissal),
    /// Its sender asks not to quarantine.
    Skipped,
    /// Its sender asks to quarantine.
    Forced,
    /// The policy.
    Judged {
        /// Whether a rule set that matches asks for anything.
        wanted: bool,
        /// What each rule set says, in the order of the policy.
        answers: Vec<(String, RuleSetAnswer)>,
    },
}

/// An event that counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// The event that stands for the fault.
    pub event: HealthEvent,
    /// What of it is still open: the event itself, or parts of it.
    pub open: Vec<HealthEvent>,
    /// When the newest report of the fault was accepted.
    pub accepted_at: Timestamp,
    /// When the fault was first observed.
    pub first_seen: Timestamp,
}

// === impl Ruling ===

impl Ruling {
    /// Returns whether it asks for anything to be done.
    pub fn asks(&self) -> bool {
        matches!(self, Self::Forced | Self::Judged { wanted: true, .. })
    }

    /// Returns whether the operator's label on the node ([`keys::MANAGED_LABEL`]) is what keeps it
    /// in service.
    pub fn opted_out(&self, node: &NodeView) -> bool {
        let Self::Judged {
            wanted: false,
            answers,
        } = self
        else {
            return false;
        };
        let by_label = |answer: &RuleSetAnswer| matches!(answer, RuleSetAnswer::NotMatched(expression) if expression.contains(keys::MANAGED_LABEL));
        node.labels
            .get(keys::MANAGED_LABEL)
            .is_some_and(|value| value == "false")
            && answers.iter().any(|(_, answer)| by_label(answer))
    }
}

/// Returns whether nothing waits for the repair of a fault: by its reporter's word, and by the
/// policy, as its verdicts say.
pub fn is_notice(fault: &Fault, verdicts: &[Verdict]) -> bool {
    fault.notice_until().is_some() && {
        let title = fault.title();
        !verdicts
            .iter()
            .any(|verdict| verdict.fault == title && verdict.ruling.asks())
    }
}

// === impl Verdict ===

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.fault)?;
        match &self.ruling {
            Ruling::HandedOver => write!(
                f,
                "the node is handed over for repair (label {}=false)",
                keys::HANDED_OVER_LABEL
            ),
            Ruling::Dismissed(Dismissal { by, .. }) => match by {
                DismissedBy::Released => f.write_str(
                    "dismissed when the node was released by hand; a newer report counts",
                ),
                DismissedBy::Dropped => f.write_str(
                    "dropped when the circuit breaker was reset with cursor CREATE; a newer \
                     report counts",
                ),
            },
            Ruling::Skipped => f.write_str("its sender asks not to quarantine (skip)"),
            Ruling::Forced => f.write_str("its sender asks to quarantine (force)"),
            Ruling::Judged { wanted, answers } => {
                let (for_it, against): (Vec<_>, Vec<_>) = answers
                    .iter()
                    .partition(|(_, answer)| *answer == RuleSetAnswer::Matched);
                let said = |answers: Vec<&(String, RuleSetAnswer)>| -> Vec<String> {
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

// === impl Scope ===

impl Scope {
    /// Returns whether it is the node as a whole.
    pub fn is_node(&self) -> bool {
        *self == Self::Node
    }
}

// === impl Desired ===

impl Desired {
    /// Returns whether the node is to be quarantined at all.
    pub fn wanted(&self) -> bool {
        self.cordon || !self.taints.is_empty()
    }

    /// Returns whether a session about this is wanted.
    pub(crate) fn wanted_for(&self, scope: &Scope) -> bool {
        match scope {
            Scope::Node => self.wanted(),
            Scope::Device(name) => self
                .devices
                .get(name)
                .is_some_and(|taints| !taints.is_empty()),
        }
    }
}

/// Faults that do not count, because a person has dismissed them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dismissal {
    /// Those last reported up to then.
    pub up_to: Timestamp,
    /// How.
    pub by: DismissedBy,
}

/// How a person has dismissed faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DismissedBy {
    /// The node was released by hand.
    Released,
    /// What the circuit breaker held back was dropped (`cursor: CREATE`).
    Dropped,
}

/// Returns what `policy` asks for, given the open faults of a node, without those dismissed.
pub fn assess(
    faults: &[Fault],
    policy: &Policy,
    node: &NodeView,
    dismissed: Option<Dismissal>,
) -> Desired {
    let mut faults: Vec<&Fault> = faults.iter().collect();
    faults.sort_by(|a, b| Fault::by_gravity(a, b));
    let rule_sets = policy.rule_sets_of(node);
    // Most nodes have no faults, and a fault may ask no rule.
    let variable = LazyCell::new(|| {
        let whole = rule_sets.iter().any(RuleSet::reads_whole_node);
        NodeVariable::new(&if whole {
            node.object()
        } else {
            node.labels_and_annotations()
        })
    });
    let mut desired = Desired::default();
    let mut matched: Vec<&RuleSet> = Vec::new();
    let mut counted: Vec<(Counted, Vec<&Fault>)> = Vec::new();
    let handed_over = is_handed_over(node);
    for fault in faults {
        let mut rule = |ruling| {
            desired.verdicts.push(Verdict {
                fault: fault.title(),
                ruling,
            });
        };
        if handed_over {
            rule(Ruling::HandedOver);
            continue;
        }
        if let Some(dismissed) = dismissed.filter(|one| fault.dismissed(one.up_to)) {
            rule(Ruling::Dismissed(dismissed));
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
            take(&mut counted, fault);
            continue;
        }
        let event = EventVariable::new(&event_variable(&fault.event));
        let mut wanted = false;
        let mut answers = Vec::with_capacity(rule_sets.len());
        for rule_set in rule_sets {
            let answer = rule_set.answer(&event, &variable);
            if answer == RuleSetAnswer::Matched {
                wanted |= rule_set.asks();
                if !matched.iter().any(|known| std::ptr::eq(*known, rule_set)) {
                    matched.push(rule_set);
                }
            }
            answers.push((rule_set.name.clone(), answer));
        }
        rule(Ruling::Judged { wanted, answers });
        if wanted {
            take(&mut counted, fault);
        }
    }
    // In the order of the policy, whatever order the faults came in: deterministic.
    let mut taints: BTreeMap<(&str, &str), (i64, &Taint)> = BTreeMap::new();
    for rule_set in rule_sets
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
    desired.taints = one_for_each_effect(taints.into_values().collect());
    desired.events = counted
        .into_iter()
        .map(|(mut counted, open)| {
            counted.open = remaining::remaining(&counted.event, &open);
            counted
        })
        .collect();
    if policy.unhealthy_taint && desired.wanted() {
        add_unhealthy(&mut desired);
    }
    desired
}

/// Returns whether an operator has handed the node to an external system for its repair, and we
/// have not taken it out before: it has its own taint, and is not ours to touch.
fn is_handed_over(node: &NodeView) -> bool {
    let label = node.labels.get(keys::HANDED_OVER_LABEL);
    label.is_some_and(|value| value == "false") && Ownership::read(node).is_none()
}

/// Returns one taint for each key and effect, as many as a node can have: of several values the one
/// of the higher priority, then the lesser one, stays.
fn one_for_each_effect(mut taints: Vec<(i64, &Taint)>) -> Vec<Taint> {
    taints.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(b.1)));
    let mut kept: BTreeMap<(&str, &str), &Taint> = BTreeMap::new();
    for (_, taint) in taints {
        kept.entry((&taint.key, &taint.effect)).or_insert(taint);
    }
    kept.into_values().cloned().collect()
}

/// Adds the taint of the data-flow document, with the gravest fault's check as value.
fn add_unhealthy(desired: &mut Desired) {
    let effect = "NoSchedule";
    let check = desired
        .events
        .first()
        .map(|counted| label_value(&counted.event.check_name));
    let taken = |on: &Taint| on.key == keys::UNHEALTHY_TAINT && on.effect == effect;
    if let Some(value) = check
        && !desired.taints.iter().any(taken)
    {
        desired.taints.push(Taint {
            key: keys::UNHEALTHY_TAINT.to_owned(),
            value,
            effect: effect.to_owned(),
        });
        desired.taints.sort();
    }
}

fn take<'a>(counted: &mut Vec<(Counted, Vec<&'a Fault>)>, fault: &'a Fault) {
    // One event may stand for several faults (two GPUs, two codes).
    match counted
        .iter_mut()
        .find(|(known, _)| known.event.id == fault.event.id)
    {
        Some((known, open)) => {
            known.accepted_at = known.accepted_at.max(fault.accepted_at);
            known.first_seen = known.first_seen.min(fault.first_seen);
            open.push(fault);
        }
        None => counted.push((
            Counted {
                event: fault.event.clone(),
                open: Vec::new(),
                accepted_at: fault.accepted_at,
                first_seen: fault.first_seen,
            },
            vec![fault],
        )),
    }
}

/// Returns `<agent>-<creator>`, as the reference names who forced a quarantine.
fn forced_by(event: &HealthEvent) -> String {
    match event.metadata.get("creator_id") {
        Some(creator) => format!("{}-{creator}", event.agent),
        None => event.agent.clone(),
    }
}

#[cfg(test)]
mod overrides;
#[cfg(test)]
mod tests {
    use contract::{BehaviourOverrides, Entity};

    use super::*;
    use crate::event::{Record, normalise};
    use crate::fault::FaultBook;

    pub(super) fn faults(events: Vec<HealthEvent>) -> Vec<Fault> {
        let mut book = FaultBook::default();
        for (seq, mut event) in (1_u64..).zip(events) {
            let created_at = Timestamp::from_second(1_000 + i64::try_from(seq).unwrap()).unwrap();
            event.node_name = "n1".into();
            normalise(&mut event, created_at);
            book.record(&Record {
                seq: seq.into(),
                id: event.id.clone(),
                created_at,
                event,
            });
        }
        book.faults("n1").to_vec()
    }

    pub(super) fn fatal(gpu: &str) -> HealthEvent {
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

    pub(super) fn judge(events: Vec<HealthEvent>) -> Desired {
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
        let labels = serde_json::json!({contract::keys::MANAGED_LABEL: "false"});
        let opted_out = serde_json::json!({"metadata": {"name": "n1", "labels": labels}});
        let opted_out = NodeView::from_object(opted_out).unwrap();
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
                &Policy::parse("# no rules", "p").unwrap(),
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
        let judge = |second| {
            let dismissed = Dismissal {
                up_to: Timestamp::from_second(second).unwrap(),
                by: DismissedBy::Released,
            };
            assess(&faults, &policy, &node, Some(dismissed))
        };
        assert_eq!(judge(1_001).events.len(), 1);
        assert!(!judge(1_002).wanted());
        assert_eq!(judge(1_000).events.len(), 2);
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
    fn two_values_of_one_key_and_effect_are_decided_by_priority() {
        let rule = |name: &str, priority: i64, value: &str| {
            format!(
                "[[rule-sets]]\nname = \"{name}\"\npriority = {priority}\n\
                 taint = {{ key = \"gpu\", value = \"{value}\", effect = \"NoSchedule\" }}\n\
                 [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n"
            )
        };
        for (a, b, expected) in [(1, 2, "b"), (2, 1, "a"), (0, 0, "a")] {
            let policy = Policy::parse(&(rule("a", a, "a") + &rule("b", b, "b")), "p").unwrap();
            let node = NodeView::unknown("n1");
            let desired = assess(&faults(vec![fatal("0")]), &policy, &node, None);
            let values: Vec<_> = desired.taints.iter().map(|taint| &taint.value).collect();
            assert_eq!(values, [expected], "{a} {b}");
        }
    }

    #[test]
    fn the_taint_of_the_document_comes_by_the_policys_switch() {
        let policy = Policy::parse(
            "unhealthy-taint = true\n[[rule-sets]]\nname = \"a\"\ncordon.shouldCordon = true\n\
             [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n",
            "p",
        )
        .unwrap();
        let node = NodeView::unknown("n1");
        let mut odd = fatal("0");
        odd.check_name = "GPU memory/watch".into();
        let minor = HealthEvent {
            is_fatal: false,
            ..fatal("0")
        };
        for (event, expected) in [
            (
                fatal("0"),
                vec!["nvsentinel.nvidia.com/unhealthy=GpuMemWatch:NoSchedule"],
            ),
            (
                odd,
                vec!["nvsentinel.nvidia.com/unhealthy=GPU-memory-watch:NoSchedule"],
            ),
            (minor, vec![]),
        ] {
            let desired = assess(&faults(vec![event]), &policy, &node, None);
            let taints: Vec<_> = desired.taints.iter().map(ToString::to_string).collect();
            assert_eq!(taints, expected);
        }
    }

    #[test]
    fn a_node_that_is_handed_over_is_not_taken_out() {
        let faults = faults(vec![fatal("0")]);
        let policy = Policy::builtin();
        let mut node = NodeView::unknown("n1");
        let label = keys::HANDED_OVER_LABEL.to_owned();
        node.labels.insert(label.clone(), "false".into());
        let desired = assess(&faults, &policy, &node, None);
        assert!(!desired.wanted(), "{desired:?}");
        assert!(desired.verdicts[0].to_string().contains("handed over"));
        // What was taken out before stays so until its faults recover.
        node.annotations.insert(
            keys::QUARANTINE_HEALTH_EVENT.into(),
            "[{\"id\":\"a\"}]".into(),
        );
        assert!(assess(&faults, &policy, &node, None).wanted());
        node.annotations.clear();
        node.labels.insert(label, "true".into());
        assert!(assess(&faults, &policy, &node, None).wanted());
    }

    #[test]
    fn a_node_s_own_choice_of_policy_decides() {
        let policy = Policy::parse(
            "[[rule-sets]]\nname = \"a\"\ncordon.shouldCordon = true\n\
             [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n\
             [[policies]]\nname = \"lenient\"\n",
            "p",
        )
        .unwrap();
        let faults = faults(vec![fatal("0")]);
        let mut node = NodeView::unknown("n1");
        for (name, wanted) in [("lenient", false), ("other", true)] {
            node.annotations.insert(keys::POLICY.into(), name.into());
            assert_eq!(assess(&faults, &policy, &node, None).wanted(), wanted);
        }
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
