use contract::HealthEvent;

use super::analyzer::{repaired, xid};
use super::at;
use crate::{
    Analyzer, GroupKey, GroupValue, Lack, NodePlaces, Rule, RulesText, Topology, built_in, parse,
};

/// Returns an analyzer with one rule of this kind, for events of XID 79.
fn analyzer(keys: &str) -> Analyzer {
    let text = format!(
        "built_in = false\n[[rules]]\nname = \"r\"\naction = \"NONE\"\nmessage = \"m\"\n\
         window = \"1h\"\n{keys}\n"
    );
    Analyzer::new(parse(&text, "rules.toml").unwrap())
}

#[test]
fn what_a_group_holds_and_lacks_is_told_by_kind() {
    let gpu = "group_by = [\"gpu\"]";
    for (keys, times, now, count, lack) in [
        ("kind = \"count\"\nthreshold = 3", &[0, 60][..], 60, 2, None),
        ("kind = \"count\"\nthreshold = 3", &[0, 60], 3_601, 1, None),
        (
            "kind = \"count\"\nthreshold = 2\nclose = \"30s\"",
            &[0, 60],
            60,
            2,
            Some(Lack::Close),
        ),
        (
            "kind = \"burst\"\ngap = \"3m\"\nthreshold = 5\ncodes = [\"48\"]",
            &[0, 60, 600],
            600,
            2,
            None,
        ),
        (
            "kind = \"sequence\"\nwithin = \"10m\"\nsteps = [{ times = 3 }]",
            &[0, 60],
            600,
            2,
            None,
        ),
        (
            "kind = \"sequence\"\nwithin = \"10m\"\nsteps = [{ times = 3 }]",
            &[0, 60],
            700,
            0,
            None,
        ),
        (
            "kind = \"solo\"\ngap = \"3m\"",
            &[60],
            60,
            1,
            Some(Lack::Silence(at(240))),
        ),
        (
            "kind = \"trend\"\nthreshold = 5",
            &[0, 3_700, 3_800],
            3_800,
            2,
            Some(Lack::Before(1)),
        ),
    ] {
        let mut analyzer = analyzer(&format!("{keys}\n{gpu}"));
        for time in times {
            analyzer.record(&xid(*time, "48", "GPU-1"));
        }
        let groups = analyzer.groups_of_rule("r", at(now));
        let held = &groups[0].held;
        assert_eq!((held.count, &held.lack), (count, &lack), "{keys}");
        assert_eq!(held.last, times.last().map(|last| at(*last)), "{keys}");
        assert_eq!(groups[0].group.to_string(), "n1, GPU_UUID GPU-1");
        assert!(groups[0].conclusion.is_none(), "{keys}");
    }
}

#[test]
fn a_solo_names_the_other_faults() {
    let mut analyzer =
        analyzer("codes = [\"74\"]\nkind = \"solo\"\ngap = \"1m\"\ngroup_by = [\"gpu\"]");
    for (second, code) in [(0, "79"), (10, "74")] {
        analyzer.record(&xid(second, code, "GPU-1"));
    }
    let others = vec!["syslog-health-monitor/SysLogsXIDError 79".to_owned()];
    let groups = analyzer.groups_of_rule("r", at(10));
    assert_eq!(groups[0].held.lack, Some(Lack::Others(others)));
    assert_eq!(groups[0].held.count, 0);
}

#[test]
fn a_conclusion_has_its_end_unless_it_waits_for_a_repair() {
    for (fatal, until) in [(false, Some(at(3_660))), (true, None)] {
        let keys = format!("kind = \"count\"\nthreshold = 2\nfatal = {fatal}");
        let mut analyzer = analyzer(&keys);
        for second in [0, 60] {
            analyzer.record(&xid(second, "48", "GPU-1"));
        }
        let groups = analyzer.groups_of_rule("r", at(60));
        let conclusion = groups[0].conclusion.as_ref().unwrap();
        assert_eq!((conclusion.since, groups[0].until), (at(60), until));
        assert_eq!(conclusion.evidence, groups[0].held.evidence);
    }
    let mut analyzer = analyzer(
        "kind = \"sequence\"\nsteps = [{ checks = [\"NodeRepaired\"], healthy = true }, {}]",
    );
    analyzer.record(&repaired(0));
    assert_eq!(analyzer.groups_of_rule("r", at(0))[0].held.count, 1);
    assert!(analyzer.groups_of_rule("another", at(0)).is_empty());
}

#[test]
fn a_key_has_the_name_that_a_file_has() {
    for name in [
        "node",
        "gpu",
        "link",
        "switch",
        "nic",
        "port",
        "code",
        "fault",
        "job",
        "rack",
        "nvlink_domain",
        "zone",
        "entity:GPC",
        "label:pool",
    ] {
        assert_eq!(
            GroupKey::parse(name, &Topology::default())
                .unwrap()
                .to_string(),
            name
        );
    }
}

#[test]
fn a_file_says_which_labels_racks_domains_and_zones_have() {
    let labels = |rules: &[Rule], name: &str| -> Vec<String> {
        let rule = rules.iter().find(|rule| rule.name == name).unwrap();
        rule.labels().cloned().collect()
    };
    let text = "[topology]\nrack = [\"example.com/row\", \"rack\"]\n[[rules]]\nname = \"Mine\"\n\
                kind = \"count\"\nwindow = \"1h\"\nthreshold = 2\ngroup_by = [\"zone\"]\n\
                distinct = [\"rack\"]\naction = \"NONE\"\nmessage = \"m\"\n";
    let rules = parse(text, "rules.toml").unwrap();
    assert_eq!(labels(&rules, "RackFault"), ["example.com/row", "rack"]);
    assert_eq!(
        labels(&rules, "Mine"),
        ["topology.kubernetes.io/zone", "example.com/row", "rack"]
    );
    // What the file leaves out is as without it.
    assert_eq!(
        labels(&rules, "NVLinkDomainFault"),
        labels(&built_in(), "NVLinkDomainFault")
    );
    let rack = rules.iter().find(|rule| rule.name == "RackFault").unwrap();
    assert_eq!(rack.group_by[0].to_string(), "rack");
    for (keys, expected) in [
        (
            "rack = []",
            "rules.toml:2: topology.rack is a list; write a label",
        ),
        ("zone = [\"a b\"]", "rules.toml:2: topology.zone[0]: "),
        (
            "racks = [\"a\"]",
            "rules.toml:2: unknown key 'topology.racks'",
        ),
        (
            "[[topology.nodes]]\nnames = []\nrack = \"r1\"",
            "rules.toml:3: topology.nodes[0].names is a list; write names of nodes, such as \"gpu-r1-*\"",
        ),
        (
            "[[topology.nodes]]\nnames = [\"a\"]",
            "rules.toml:2: topology.nodes[0].rack is missing; write rack, nvlink_domain or zone",
        ),
        (
            "[[topology.nodes]]\nnames = [\"a\", \"A_\"]\nrack = \"r1\"",
            "rules.toml:3: topology.nodes[0].names[1] is \"A_\"; write the name of a node; * is any text \
             and ? any character",
        ),
        (
            "[[topology.nodes]]\nnames = [\"a*\"]\nrack = \"r1\"\n[[topology.nodes]]\n\
             names = [\"a*\"]\nrack = \"r2\"",
            "rules.toml:6: topology.nodes[1].names[0] is \"a*\"; these nodes have the rack r1 already",
        ),
        (
            "[[topology.nodes]]\nnames = [\"a\"]\nzone = \"z 1\"",
            "rules.toml:4: topology.nodes[0].zone: ",
        ),
    ] {
        let error = parse(&format!("[topology]\n{keys}\n"), "rules.toml").unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}

#[test]
fn a_file_gives_nodes_a_place_by_their_names_before_their_labels() {
    let text = "[[topology.nodes]]\nnames = [\"gpu-r1-*\", \"old-7\"]\nrack = \"r1\"\n\
                [[topology.nodes]]\nnames = [\"gpu-r?-7\"]\nrack = \"r2\"\nnvlink_domain = \"d2\"\n\
                [[topology.nodes]]\nnames = [\"gpu-r1-9\"]\nrack = \"r9\"\n";
    let text = RulesText {
        source: "rules.toml".to_owned(),
        text: text.to_owned(),
    };
    let rules = text.parse().unwrap();
    let rack = rules.iter().find(|rule| rule.name == "RackFault").unwrap();
    let (label, leaf) = (
        "topology.kubernetes.io/rack",
        "network.topology.nvidia.com/leaf",
    );
    for (node, own, key, expected, domain) in [
        ("gpu-r1-1", "", label, "r1", None),
        ("old-7", "r5", label, "r1", None),
        // The first pattern counts, and a whole name before all.
        ("gpu-r1-7", "r5", label, "r1", Some("d2")),
        ("gpu-r3-7", "", label, "r2", Some("d2")),
        ("gpu-r1-9", "", label, "r9", None),
        ("old-8", "r5", leaf, "r5", None),
    ] {
        let mut event = HealthEvent {
            node_name: node.to_owned(),
            metadata: [(leaf.to_owned(), own.to_owned())].into(),
            ..HealthEvent::default()
        };
        let groups = rack.groups(&event);
        let value = GroupValue::Metadata(key.to_owned(), expected.to_owned());
        assert_eq!(groups[0].values, [value], "{node}");
        text.places().locate(&mut event);
        let found = |key: &str| event.metadata.get(key).map(String::as_str);
        assert_eq!(found(key), Some(expected), "{node}");
        assert_eq!(found("nvidia.com/gpu.clique"), domain, "{node}");
    }
    assert_eq!(RulesText::default().places(), NodePlaces::default());
}

#[test]
fn keys_that_change_no_built_in_rule_are_refused() {
    for key in [
        "close = \"1m\"",
        "within = \"1m\"",
        "factor = 2",
        "recover = [\"GpuMemWatch\"]",
        "fatal_events = true",
    ] {
        let text = format!("[[rules]]\nname = \"RackFault\"\n{key}\n");
        let error = parse(&text, "rules.toml").unwrap_err().to_string();
        assert!(error.starts_with("rules.toml:3: rules[0]."), "{error}");
    }
}
