//! What senders ask for themselves, and how often the policy is asked: tests of the looks of
//! `assess` at the faults of a node.

use contract::BehaviourOverrides;

use super::tests::{fatal, faults, judge};
use super::*;
use crate::policy::counts;

#[test]
fn force_counts_where_a_sender_asks_for_both_and_skip_holds_for_its_own_fault_only() {
    let asking = |gpu: &str, force, skip| HealthEvent {
        quarantine_overrides: Some(BehaviourOverrides { force, skip }),
        ..fatal(gpu)
    };
    let rulings = |desired: &Desired| -> Vec<Ruling> {
        let verdicts = desired.verdicts.iter();
        verdicts.map(|verdict| verdict.ruling.clone()).collect()
    };
    // One event with both.
    let both = judge(vec![asking("GPU-1", true, true)]);
    assert!(both.cordon && both.forced_by.is_some());
    assert_eq!(rulings(&both), [Ruling::Forced]);
    // Two events: each has its own say, whichever came first.
    for events in [
        vec![asking("GPU-1", false, true), asking("GPU-2", true, false)],
        vec![asking("GPU-2", true, false), asking("GPU-1", false, true)],
    ] {
        let desired = judge(events);
        assert!(desired.cordon && desired.forced_by.is_some());
        let mut found = rulings(&desired);
        found.sort_by_key(|ruling| *ruling == Ruling::Skipped);
        assert_eq!(found, [Ruling::Forced, Ruling::Skipped]);
        let counted: Vec<_> = desired.events.iter().map(|one| &one.event).collect();
        assert_eq!(counted.len(), 1);
        assert!(counted[0].quarantine_overrides.unwrap().force);
    }
    assert!(!judge(vec![asking("GPU-1", false, true)]).wanted());
}

#[test]
fn a_look_asks_each_rule_once_a_fault_and_makes_each_variable_once() {
    let rule = |group: &str, kind: &str, expression: &str| {
        format!("[[rule-sets.match.{group}]]\nkind = '{kind}'\nexpression = \"{expression}\"\n")
    };
    let set = |name: &str| {
        format!(
            "[[rule-sets]]\nname = '{name}'\ncordon = {{ shouldCordon = true }}\n{}{}{}{}",
            rule("all", "HealthEvent", "event.isFatal"),
            rule("all", "Node", "node.metadata.name != ''"),
            rule("any", "HealthEvent", "event.agent == 'x'"),
            rule("any", "HealthEvent", "event.agent != 'x'"),
        )
    };
    let policy = Policy::parse(&format!("{}{}", set("a"), set("b")), "p").unwrap();
    let faults = faults(vec![fatal("GPU-1"), fatal("GPU-2"), fatal("GPU-3")]);
    let mut node = NodeView::unknown("n1");
    for quarantined in [false, true] {
        if quarantined {
            node.annotations
                .insert(keys::QUARANTINE_HEALTH_EVENT.to_owned(), "[]".to_owned());
            node.unschedulable = true;
        }
        counts::reset();
        assert!(assess(&faults, &policy, &node, None).cordon);
        // Two rule sets of four rules, for three faults; three events and one node.
        assert_eq!(counts::asked(), 2 * 4 * 3);
        assert_eq!(counts::made(), 3 + 1);
    }
}
