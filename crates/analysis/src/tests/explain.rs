use super::analyzer::{repaired, xid};
use super::at;
use crate::{Analyzer, GroupKey, Lack, parse};

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
        assert_eq!(GroupKey::parse(name).unwrap().to_string(), name);
    }
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
