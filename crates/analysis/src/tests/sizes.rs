//! Rules that ask for a share of the nodes of a group.

use std::collections::BTreeMap;

use model::event::EventRecord;
use proptest::prelude::*;

use super::analyzer::{feed, open, record, recovery, repaired, xid};
use super::at;
use crate::{Analyzer, Rule, Saved, built_in, parse};

const RACK: &str = "topology.kubernetes.io/rack";

/// Returns a fatal event of the node with this number; two racks have the even and the odd ones.
fn fails(node: usize, second: i64) -> EventRecord {
    let mut event = xid(second, "79", "GPU-1").event;
    event.node_name = format!("n{node}");
    event.is_fatal = true;
    event.metadata.extend(labels(node));
    record(second, event)
}

fn labels(node: usize) -> BTreeMap<String, String> {
    [(RACK.to_owned(), format!("r{}", node % 2))].into()
}

/// Sets a cluster of the first nodes.
fn set_nodes(analyzer: &mut Analyzer, count: usize) {
    let nodes: Vec<_> = (0..count).map(labels).collect();
    let nodes = nodes.iter().map(|labels| ("", labels));
    analyzer.set_nodes(&nodes.collect::<Vec<_>>());
}

/// Nodes without labels have a rack by their names.
#[test]
fn a_rack_whose_nodes_a_file_names_is_counted_by_their_names() {
    let text = "built_in = true\n[[topology.nodes]]\nnames = [\"n?\"]\nrack = \"r1\"\n";
    let mut rules = parse(text, "rules.toml").unwrap();
    rules.retain(|rule| rule.name == "RackFault");
    let mut analyzer = Analyzer::new(rules);
    let (names, labels) = ((0..8).map(|node| format!("n{node}")), BTreeMap::new());
    let names: Vec<String> = names.collect();
    let nodes = names.iter().map(|name| (name.as_str(), &labels));
    analyzer.set_nodes(&nodes.collect::<Vec<_>>());
    let mut failed = (0..4).map(|node| {
        let mut event = fails(node, 10);
        event.event.metadata.clear();
        event
    });
    feed(&mut analyzer, &failed.by_ref().take(3).collect::<Vec<_>>());
    assert_eq!(open(&analyzer), [], "half of eight are four");
    feed(&mut analyzer, &failed.collect::<Vec<_>>());
    let said = analyzer.to_say(at(10), 9);
    let [said] = said.as_slice() else {
        panic!("one conclusion: {said:?}");
    };
    assert_eq!(said.event.metadata[RACK], "r1");
}

fn rack_fault() -> Vec<Rule> {
    let mut rules = built_in();
    rules.retain(|rule| rule.name == "RackFault");
    rules
}

fn rebuild(analyzer: &mut Analyzer, events: &[EventRecord]) {
    for node in analyzer.late().clone() {
        analyzer.rebuild(&node, events);
    }
}

#[test]
fn half_of_a_rack_and_three_nodes_have_to_fail() {
    // Nodes of both racks, and how many of one have to fail.
    for (nodes, needed) in [
        (0, 3),
        (4, 3),
        (12, 3),
        (14, 4),
        (16, 4),
        (400, 100),
        (4_000, 100),
    ] {
        let mut analyzer = Analyzer::new(rack_fault());
        set_nodes(&mut analyzer, nodes);
        for failed in 1..=needed {
            assert_eq!(open(&analyzer), [], "{nodes} nodes");
            let second = i64::try_from(failed).unwrap();
            analyzer.record(&fails(2 * failed, second));
        }
        let found = open(&analyzer);
        assert_eq!(found, [("RackFault".to_owned(), vec!["r0".to_owned()])]);
        let open = analyzer.open().next().unwrap();
        assert_eq!(open.conclusion.evidence.len(), needed);
        let group = analyzer.groups_of_rule("RackFault", at(0)).remove(0);
        assert_eq!(usize::try_from(group.needed).unwrap(), needed);
    }
}

#[test]
fn a_rack_that_changes_is_judged_by_its_size_now() {
    let events = [fails(0, 0), fails(2, 10), fails(4, 20)];
    let mut analyzer = Analyzer::new(rack_fault());
    set_nodes(&mut analyzer, 16);
    assert!(analyzer.late().is_empty(), "it has no events");
    feed(&mut analyzer, &events);
    assert_eq!(open(&analyzer), []);
    // The other rack has no events.
    let ours: Vec<_> = (0..16).chain([1, 3, 5]).map(labels).collect();
    let ours = ours.iter().map(|labels| ("", labels));
    analyzer.set_nodes(&ours.collect::<Vec<_>>());
    assert!(analyzer.late().is_empty());
    set_nodes(&mut analyzer, 12);
    rebuild(&mut analyzer, &events);
    assert_eq!(open(&analyzer).len(), 1);
    let said = analyzer.to_say(at(20), 9);
    assert!(!said[0].event.is_healthy);
    analyzer.said(&said[0]);
    // What a larger rack disproves is withdrawn.
    set_nodes(&mut analyzer, 16);
    rebuild(&mut analyzer, &events);
    assert_eq!(open(&analyzer), []);
    assert!(analyzer.to_say(at(20), 9)[0].event.is_healthy);
}

#[test]
fn a_share_is_of_nodes_that_a_label_groups() {
    let rule = |keys: &str| {
        let text = format!(
            "built_in = false\n[[rules]]\nname = \"r\"\nkind = \"count\"\nwindow = \"1h\"\n\
             threshold = 3\naction = \"NONE\"\nmessage = \"m\"\n{keys}\n"
        );
        parse(&text, "rules.toml").map(|rules| rules[0].share)
    };
    let of_racks = "distinct = [\"node\"]\ngroup_by = [\"rack\", \"label:pool\"]\n";
    assert_eq!(rule(&format!("share = \"70%\"\n{of_racks}")), Ok(Some(70)));
    for keys in [
        "share = \"50%\"",
        "share = \"50%\"\ngroup_by = [\"rack\"]",
        "share = \"50%\"\ndistinct = [\"node\"]\ngroup_by = [\"job\"]",
        "share = \"50%\"\ndistinct = [\"node\"]\ngroup_by = [\"rack\", \"code\"]",
    ] {
        let error = rule(keys).unwrap_err().to_string();
        let expected = "rules.toml:9: rules[0].share is \"50%\"; it belongs to a rule with";
        assert!(error.contains(expected), "{error}");
    }
    for share in ["0%", "101%", "half", "50"] {
        let error = rule(&format!("share = \"{share}\"\n{of_racks}")).unwrap_err();
        assert!(
            error.to_string().contains("write a part of the nodes"),
            "{error}"
        );
    }
    // A file may change that of a built-in rule, and give none to another.
    let changed = |name: &str| {
        let text = format!("[[rules]]\nname = \"{name}\"\nshare = \"80%\"\n");
        let rules = parse(&text, "rules.toml")?;
        let found = rules.into_iter().find(|rule| rule.name == name);
        Ok::<_, contract::findings::FileError>(found.unwrap().share)
    };
    assert_eq!(changed("RackFault"), Ok(Some(80)));
    assert!(changed("RepeatedXID31OnSameGPU").is_err());
}

#[test]
fn a_repair_may_come_before_the_first_report_of_its_group_of_several_nodes() {
    let of_rack = |repair: EventRecord, second| {
        let mut event = repair.event;
        event.metadata.extend(labels(0));
        record(second, event)
    };
    let conclusions = |analyzer: &mut Analyzer, events: &[EventRecord]| {
        feed(analyzer, events);
        open(analyzer).len()
    };
    let faults = [fails(0, 0), fails(2, 10), fails(4, 20)];
    let released = of_rack(recovery(100, "RackFault", ""), 100);
    let mut analyzer = Analyzer::new(rack_fault());
    assert_eq!(
        conclusions(&mut analyzer, &[&[released], &faults[..]].concat()),
        0
    );

    let text = "built_in = false\n[[rules]]\nname = \"r\"\nkind = \"sequence\"\ngroup_by = [\"rack\"]\n\
                window = \"1h\"\naction = \"NONE\"\nmessage = \"m\"\n\
                steps = [{ fatal_events = true }, { checks = [\"NodeRepaired\"], healthy = true }, \
                { fatal_events = true }]\n";
    let mut analyzer = Analyzer::new(parse(text, "rules.toml").unwrap());
    let repaired = of_rack(repaired(15), 15);
    assert_eq!(
        conclusions(&mut analyzer, &[&[repaired], &faults[..]].concat()),
        1
    );
}

/// Step of a test.
#[derive(Clone, Debug)]
enum Happening {
    Fails { node: usize, minute: i64 },
    Nodes(usize),
    Restart,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        6 => (0..10_usize, 0..40_i64).prop_map(|(node, minute)| Happening::Fails { node, minute }),
        2 => (0..16_usize).prop_map(Happening::Nodes),
        1 => Just(Happening::Restart),
    ]
}

proptest! {
    /// The open conclusions follow from the events and the sizes at the end, whatever the sizes were
    /// in between.
    #[test]
    fn open_conclusions_depend_on_the_events_and_the_sizes_alone(
        happenings in prop::collection::vec(happening(), 1..60),
    ) {
        let rule = |name: &str, fatal: bool| format!(
            "[[rules]]\nname = \"{name}\"\nkind = \"count\"\ngroup_by = [\"rack\"]\n\
             distinct = [\"node\"]\nwindow = \"10m\"\nthreshold = 2\nshare = \"50%\"\n\
             action = \"NONE\"\nfatal = {fatal}\nmessage = \"m\"\n"
        );
        let text = format!("built_in = false\n{}{}", rule("ends", false), rule("lasts", true));
        let rules = parse(&text, "rules.toml").unwrap();
        let mut one = Analyzer::new(rules.clone());
        let (mut events, mut nodes, mut now) = (Vec::new(), 0, 0);
        let mut saved = Saved::default();
        for happening in happenings {
            match happening {
                Happening::Fails { node, minute } => {
                    now = now.max(minute * 60);
                    events.push(fails(node, minute * 60));
                    one.record(events.last().unwrap());
                }
                Happening::Nodes(count) => {
                    nodes = count;
                    set_nodes(&mut one, nodes);
                }
                Happening::Restart => {
                    let now = one.save();
                    saved.state = now.state;
                    saved.parts.extend(now.parts);
                    one = Analyzer::new(rules.clone());
                    one.restore(&saved).unwrap();
                    set_nodes(&mut one, nodes);
                }
            }
            rebuild(&mut one, &events);
            one.time(at(now));
        }
        events.sort_by_key(|it| (it.created_at, it.id.clone()));
        let mut other = Analyzer::new(rules);
        set_nodes(&mut other, nodes);
        feed(&mut other, &events);
        for analyzer in [&mut one, &mut other] {
            analyzer.time(at(now));
        }
        let found = |of: &Analyzer| of.open().map(|it| (it.id.clone(), it.clone())).collect::<Vec<_>>();
        prop_assert_eq!(found(&one), found(&other));
    }
}
