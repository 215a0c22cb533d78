use contract::{Entity, HealthEvent, RecommendedAction};
use model::event::EventRecord;

use super::analyzer::{analyzer, entity, feed, open, record, repaired, xid};
use super::at;
use crate::{AGENT, BUILT_IN, built_in, parse};

/// Events of a check, some minutes apart.
fn repeated(minutes: &[i64], event: &HealthEvent) -> Vec<EventRecord> {
    let at = |minute: &i64| record(minute * 60, event.clone());
    minutes.iter().map(at).collect()
}

fn nic(agent: &str, check: &str, code: &str, entities: &[(&str, &str)]) -> HealthEvent {
    let entity = |(kind, value): &(&str, &str)| Entity {
        entity_type: (*kind).to_owned(),
        entity_value: (*value).to_owned(),
    };
    HealthEvent {
        agent: agent.to_owned(),
        check_name: check.to_owned(),
        error_code: vec![code.to_owned()],
        entities_impacted: entities.iter().map(entity).collect(),
        ..HealthEvent::default()
    }
}

/// Checks the names of the rules that conclude something from these events.
pub(crate) fn concludes(events: &[EventRecord], expected: &[&str]) {
    let mut analyzer = analyzer();
    feed(&mut analyzer, events);
    // Events are complete for ten minutes after the last one.
    let last = events.iter().map(|it| it.created_at).max().unwrap();
    analyzer.time(last + jiff::SignedDuration::from_mins(10));
    assert_eq!(analyzer.take_errors(), Vec::<String>::new());
    let rules: Vec<String> = open(&analyzer).into_iter().map(|(rule, _)| rule).collect();
    assert_eq!(rules, expected);
}

#[test]
fn the_same_xid_in_five_bursts_on_one_gpu() {
    let of = |code: &'static str, minutes: &[i64]| -> Vec<EventRecord> {
        minutes
            .iter()
            .map(|it| xid(it * 60, code, "GPU-1"))
            .collect()
    };
    concludes(
        &of("62", &[0, 10, 20, 30, 40]),
        &["RepeatedXIDErrorOnSameGPU"],
    );
    concludes(&of("62", &[0, 10, 20, 30]), &[]);
    concludes(&of("62", &[0, 1, 2, 3, 4, 5, 6]), &[]);
    // Codes whose faults last are one burst for three hours.
    concludes(&of("79", &[0, 60, 120, 180, 240]), &[]);
    // Each code makes bursts of its own.
    let mixed = [of("62", &[0, 20, 40]), of("63", &[10, 30])].concat();
    concludes(&mixed, &[]);
}

#[test]
fn xid_31_twice_on_a_gpu_or_on_several() {
    let of = |minute: i64, gpu| xid(minute * 60, "31", gpu);
    let solo = "XIDErrorSoloNoBurst";
    let same = [of(0, "GPU-1"), of(10, "GPU-1")];
    concludes(&same, &["RepeatedXID31OnSameGPU", solo]);
    concludes(&[of(0, "GPU-1"), of(1, "GPU-1")], &[]);
    // Another code does not tie two bursts together.
    let between = [of(0, "GPU-1"), xid(180, "48", "GPU-1"), of(6, "GPU-1")];
    concludes(&between, &["RepeatedXID31OnSameGPU"]);
    let several = [of(0, "GPU-1"), of(1, "GPU-2")];
    concludes(&several, &["RepeatedXID31OnDifferentGPU", solo, solo]);
    concludes(&[of(0, "GPU-1"), of(25 * 60, "GPU-2")], &[solo]);
}

#[test]
fn the_same_error_of_a_nic_driver_three_times_within_an_hour() {
    let code = "netdev_watchdog";
    let event = nic("syslog-health-monitor", "SysLogsNICDriverError", code, &[]);
    concludes(&repeated(&[0, 20, 60], &event), &["RepeatedNICDriverError"]);
    concludes(&repeated(&[0, 20, 61], &event), &[]);
    let fatal = HealthEvent {
        is_fatal: true,
        ..event.clone()
    };
    concludes(&repeated(&[0, 1, 2], &fatal), &[]);
    let other = HealthEvent {
        error_code: vec!["link_down".to_owned()],
        ..event
    };
    concludes(&repeated(&[0, 1, 2], &other), &[]);
}

#[test]
fn a_port_degraded_three_times_within_an_hour() {
    let of = |port| {
        let entities = [("NIC", "mlx5_0"), ("NICPort", port)];
        nic(
            "nic-health-monitor",
            "InfiniBandDegradationCheck",
            "x",
            &entities,
        )
    };
    let (one, two) = (of("1"), of("2"));
    concludes(&repeated(&[0, 20, 25], &one), &["RepeatedNICDegradation"]);
    concludes(&repeated(&[0, 20, 40], &one), &[]);
    let both = [repeated(&[0, 1], &one), repeated(&[2], &two)].concat();
    concludes(&both, &[]);
}

/// Returns an XID 13 on a compute unit.
fn xid_13(second: i64, gpc: &str, tpc: &str) -> EventRecord {
    let mut event = xid(second, "13", "GPU-1").event;
    let unit = [entity("GPC", gpc), entity("TPC", tpc)];
    event.entities_impacted.extend(unit);
    record(second, event)
}

#[test]
fn xid_13_twice_on_a_compute_unit_or_on_several() {
    let same = "RepeatedXID13OnSameGPCAndTPC";
    let solo = "XIDErrorSoloNoBurst";
    concludes(&[xid_13(0, "1", "2"), xid_13(16, "1", "2")], &[same]);
    concludes(&[xid_13(0, "1", "2"), xid_13(15, "1", "2")], &[]);
    let several = "RepeatedXID13OnDifferentGPCAndTPC";
    concludes(&[xid_13(0, "1", "2"), xid_13(16, "1", "3")], &[several]);
    concludes(&[xid_13(0, "1", "2"), xid_13(86_401, "1", "3")], &[solo]);
    // An event without a unit is none more.
    concludes(&[xid_13(0, "1", "2"), xid(16, "13", "GPU-1")], &[]);
}

#[test]
fn xid_13_and_31_once_with_nothing_else_on_the_gpu() {
    let solo = "XIDErrorSoloNoBurst";
    concludes(&[xid(0, "13", "GPU-1")], &[solo]);
    concludes(&[xid(0, "43", "GPU-1")], &[]);
    // What happens on another GPU does not matter.
    concludes(&[xid(0, "13", "GPU-1"), xid(1, "48", "GPU-2")], &[solo]);
    concludes(&[xid(0, "13", "GPU-1"), xid(1, "48", "GPU-1")], &[]);
    concludes(&[xid(0, "13", "GPU-1"), xid(180, "13", "GPU-1")], &[]);
}

/// Returns an XID 74 on a link, with these bits set.
fn xid_74(minute: i64, link: &str, bits: &[(usize, u32)]) -> EventRecord {
    let mut event = xid(minute * 60, "74", "GPU-1").event;
    event.entities_impacted.push(entity("NVLINK", link));
    for register in 0..7 {
        let set = bits.iter().filter(|(of, _)| *of == register);
        let word = set.fold(0_u32, |word, (_, bit)| word | 1 << bit);
        let word = format!("{word:032b}");
        event
            .entities_impacted
            .push(entity(&format!("REG{register}"), &word));
    }
    record(minute * 60, event)
}

#[test]
fn xid_74_by_the_bits_of_its_registers() {
    // Rule, register, bits, number of events, and whether they have to be of one link.
    let table: [(&str, usize, &[u32], usize, bool); 13] = [
        ("XID74Reg0SoloNVLinkError", 0, &[1, 20], 1, false),
        ("XID74Reg0SignalIntegrityError", 0, &[21, 22], 1, false),
        ("XID74Reg3UnexpectedError", 3, &[16, 17], 1, false),
        ("XID74Reg3Bit18Set", 3, &[18], 1, false),
        ("XID74Reg2Bit13Set", 2, &[13], 1, false),
        (
            "RepeatedXID74Reg0HardwareIssue",
            0,
            &[8, 9, 12, 16, 17, 24, 28],
            2,
            false,
        ),
        ("XID74Reg0Bit27Or29Set", 0, &[27, 29], 2, false),
        ("RepeatedXID74Reg2Bit16Or19Set", 2, &[16, 19], 2, false),
        ("RepeatedXID74Reg2Bit17Or18Set", 2, &[17, 18], 2, false),
        ("XID74Reg0ECCParityError", 0, &[4, 5], 2, true),
        ("RepeatedXID74Reg2HardwareIssue", 2, &[0, 1, 2, 6], 2, true),
        (
            "XID74Reg4HardwareIssue",
            4,
            &[18, 19, 21, 22, 24, 25, 27, 28],
            2,
            true,
        ),
        ("XID74Reg4ECCError", 4, &[20, 23, 26, 29], 2, true),
    ];
    for (rule, register, bits, events, of_link) in table {
        for bit in bits {
            let of = |minute, link: &str| xid_74(minute, link, &[(register, *bit)]);
            let all = [of(0, "3"), of(20, "3")];
            concludes(&all[..events], &[rule]);
            let fewer = all[..events - 1].iter().cloned();
            let other_bit = xid_74(0, "3", &[(register, 31)]);
            concludes(&fewer.chain([other_bit]).collect::<Vec<_>>(), &[]);
            if events == 2 {
                let expected = if of_link { &[][..] } else { &[rule][..] };
                concludes(&[of(0, "3"), of(20, "4")], expected);
            }
            // A second bit hides nothing.
            let two = |minute| xid_74(minute, "3", &[(register, *bit), (6, 30)]);
            concludes(&[two(0), two(20)][..events], &[rule]);
        }
    }
    // Both rules whose bits are set conclude.
    let both = xid_74(0, "3", &[(2, 13), (3, 18)]);
    concludes(&[both], &["XID74Reg2Bit13Set", "XID74Reg3Bit18Set"]);
}

#[test]
fn xid_74_stands_alone_on_its_own_gpu_only() {
    let solo = |minute| xid_74(minute, "3", &[(0, 20)]);
    let rule = "XID74Reg0SoloNVLinkError";
    concludes(&[xid(0, "48", "GPU-1"), solo(5)], &[]);
    concludes(&[xid(0, "48", "GPU-2"), solo(5)], &[rule]);
    let mut of_other_node = xid(0, "48", "GPU-1").event;
    of_other_node.node_name = "n2".to_owned();
    concludes(&[record(0, of_other_node), solo(5)], &[rule]);
    // An event of yesterday does not count, whatever the clock of the store says.
    concludes(&[xid(0, "48", "GPU-1"), solo(24 * 60 + 1)], &[rule]);
    let mut healthy = xid(60, "48", "GPU-1").event;
    healthy.is_healthy = true;
    concludes(
        &[xid(0, "48", "GPU-1"), record(60, healthy), solo(5)],
        &[rule],
    );
}

/// Returns a fatal XID 79 of a GPU.
fn fatal(hour: i64, gpu: &str) -> EventRecord {
    let mut event = xid(hour * 3600, "79", gpu).event;
    event.is_fatal = true;
    record(hour * 3600, event)
}

#[test]
fn a_fault_after_five_repairs_of_a_node_within_a_week() {
    let repairs = |hours: &[i64]| -> Vec<EventRecord> {
        hours.iter().map(|hour| repaired(hour * 3600)).collect()
    };
    let rule = "MultipleRemediations";
    let five = repairs(&[0, 30, 60, 90, 120]);
    concludes(&five, &[]);
    concludes(&[five.clone(), vec![fatal(121, "GPU-1")]].concat(), &[rule]);
    concludes(
        &[five.clone(), vec![xid(121 * 3600, "63", "GPU-1")]].concat(),
        &[],
    );
    concludes(&[five, vec![fatal(169, "GPU-1")]].concat(), &[]);
    concludes(
        &[repairs(&[0, 30, 60, 90]), vec![fatal(91, "GPU-1")]].concat(),
        &[],
    );
}

#[test]
fn the_same_fault_after_each_of_two_repairs() {
    let rule = "RepairNotWorking";
    let story = |last: i64, gpu| {
        let first = [
            fatal(0, "GPU-1"),
            repaired(3600),
            fatal(5, "GPU-1"),
            repaired(6 * 3600),
        ];
        [&first[..], &[fatal(last, gpu)]].concat()
    };
    concludes(&story(10, "GPU-1"), &[rule]);
    concludes(&story(10, "GPU-2"), &[]);
    concludes(&story(31, "GPU-1"), &[]);
    concludes(&story(10, "GPU-1")[2..], &[]);
    let mut analyzer = analyzer();
    feed(&mut analyzer, &story(10, "GPU-1"));
    let sayings = analyzer.to_say(at(0), 10);
    let event = &sayings[0].event;
    assert_eq!((event.error_code[0].as_str(), event.is_fatal), ("79", true));
    assert_eq!(event.entities_impacted, [entity("GPU_UUID", "GPU-1")]);
}

/// Returns the event by which a validation begins, passes (healthy), or fails (with its code).
fn validation(hour: i64, is_healthy: bool, code: &str) -> EventRecord {
    let event = HealthEvent {
        agent: "gpuwarden".to_owned(),
        check_name: "NodeValidation".to_owned(),
        is_healthy,
        is_fatal: !code.is_empty(),
        error_code: Some(code.to_owned())
            .filter(|code| !code.is_empty())
            .into_iter()
            .collect(),
        ..HealthEvent::default()
    };
    record(hour * 3600, event)
}

#[test]
fn a_validation_changes_nothing_in_what_repairs_do_not_help() {
    let failed = |hour| validation(hour, false, contract::keys::CODE_VALIDATION_FAILED);
    let (begun, passed) = (
        |hour| validation(hour, false, ""),
        |hour| validation(hour, true, ""),
    );
    let repair = |hour: i64| repaired(hour * 3600);
    let fault = |hour| fatal(hour, "GPU-1");
    let rule = "RepairNotWorking";
    // The fault is back after the node has passed, or before.
    let passes = [
        fault(0),
        repair(1),
        begun(2),
        passed(3),
        fault(4),
        repair(5),
        begun(6),
        passed(7),
    ];
    concludes(&[&passes[..], &[fault(8)]].concat(), &[rule]);
    let before = [
        fault(0),
        repair(1),
        begun(2),
        fault(3),
        repair(4),
        begun(5),
        fault(6),
    ];
    concludes(&before, &[rule]);
    // A failed validation is not the fault again, neither beside it nor alone.
    let beside = [
        fault(0),
        repair(1),
        begun(2),
        fault(3),
        failed(4),
        repair(5),
        begun(6),
        failed(7),
    ];
    concludes(&beside, &[]);
    concludes(&[&beside[..], &[fault(8)]].concat(), &[rule]);
    let alone = [failed(0), repair(1), failed(2), repair(3), failed(4)];
    concludes(&alone, &[]);
    // One repair is one, however often the fault is back.
    concludes(&[fault(0), repair(1), fault(2), failed(3), fault(4)], &[]);
}

#[test]
fn three_nodes_of_a_rack_within_ten_minutes() {
    for (rule, label) in [
        ("RackFault", "topology.kubernetes.io/rack"),
        ("RackFault", "network.topology.nvidia.com/leaf"),
        ("NVLinkDomainFault", "nvidia.com/gpu.clique"),
        (
            "NVLinkDomainFault",
            "network.topology.nvidia.com/accelerator",
        ),
    ] {
        three_nodes_with(rule, label);
    }
}

/// Checks the rule that groups nodes by a label.
fn three_nodes_with(rule: &str, label: &str) {
    let of = |node: &str, second: i64, is_fatal| {
        let mut event = xid(second, "79", "GPU-1").event;
        event.node_name = node.to_owned();
        event.is_fatal = is_fatal;
        let rack = (label.to_owned(), "r7".to_owned());
        event.metadata.extend([rack]);
        record(second, event)
    };
    let three = [of("a", 0, true), of("b", 300, true), of("c", 600, true)];
    let mut analyzer = analyzer();
    feed(&mut analyzer, &three);
    assert_eq!(open(&analyzer), [(rule.to_owned(), vec!["r7".to_owned()])]);
    let event = analyzer.to_say(at(600), 9).remove(0).event;
    assert_eq!(
        (event.node_name.as_str(), event.agent.as_str()),
        ("c", AGENT)
    );
    assert_eq!((event.is_fatal, event.recommended_action), (false, 0));
    model::event::validate(&event).unwrap();
    for not in [
        [of("a", 0, true), of("b", 300, true), of("c", 601, true)],
        [of("a", 0, true), of("b", 300, true), of("b", 600, true)],
        [of("a", 0, true), of("b", 300, true), of("c", 600, false)],
    ] {
        concludes(&not, &[]);
    }
}

#[test]
fn without_labels_the_chassis_is_rack_and_nvlink_domain() {
    let of = |node: &str, labels: Vec<(&str, String)>| {
        let mut event = xid(0, "79", "GPU-1").event;
        event.node_name = node.to_owned();
        event.is_fatal = true;
        let labels = labels.into_iter().map(|(key, it)| (key.to_owned(), it));
        event.metadata.extend(labels);
        record(0, event)
    };
    let racks_of = |labels: &dyn Fn(&str) -> Vec<(&'static str, String)>| {
        let mut analyzer = analyzer();
        let events = ["a", "b", "c"].map(|node| of(node, labels(node)));
        feed(&mut analyzer, &events);
        let open = open(&analyzer).into_iter();
        open.map(|(rule, values)| format!("{rule} {}", values.join(" ")))
            .collect::<Vec<_>>()
    };
    let chassis = || ("chassis_serial", "1820".to_owned());
    assert_eq!(
        racks_of(&|_| vec![chassis()]),
        ["NVLinkDomainFault 1820", "RackFault 1820"]
    );
    // A label counts before the chassis.
    let labels = [
        ("topology.kubernetes.io/rack", "r7".to_owned()),
        ("nvidia.com/gpu.clique", "c1".to_owned()),
        chassis(),
    ];
    assert_eq!(
        racks_of(&|_| labels.to_vec()),
        ["NVLinkDomainFault c1", "RackFault r7"]
    );
    // Each machine has its own.
    let own = racks_of(&|node| vec![("chassis_serial", node.to_owned())]);
    assert_eq!(own, [""; 0]);
}

#[test]
fn the_crash_of_one_job_counts_once() {
    let of = |minute: i64, job: &str| {
        let mut event = xid(minute * 60, "31", "GPU-1").event;
        let job = (contract::keys::META_JOB.to_owned(), job.to_owned());
        event.metadata.extend([job]);
        record(minute * 60, event)
    };
    let solo = "XIDErrorSoloNoBurst";
    concludes(&[of(0, "a"), of(10, "a"), of(20, "a")], &[solo]);
    concludes(
        &[of(0, "a"), of(10, "b")],
        &["RepeatedXID31OnSameGPU", solo],
    );
}

#[test]
fn entries_of_nvsentinels_file_change_the_rules_of_their_names() {
    let file = "[[rules]]\nname = \"RepeatedXID31OnSameGPU\"\ndescription = \"d\"\nstage = [\"{}\"]\n\
                recommended_action = \"NONE\"\nmessage = \"m\"\nevaluate_rule = true\n\
                processing_strategy = \"STORE_ONLY\"\n\n\
                [[rules]]\nname = \"XID74Reg2Bit13Set\"\nevaluate_rule = false\nstage = []\n";
    let rules = parse(file, "r").unwrap();
    assert_eq!(rules.len(), built_in().len() - 1);
    let changed = rules
        .iter()
        .find(|rule| rule.name == "RepeatedXID31OnSameGPU")
        .unwrap();
    assert!(!changed.fatal && !changed.condition.until_repaired);
    assert_eq!(changed.message, "m");
    assert_eq!(changed.strategy, contract::ProcessingStrategy::StoreOnly);
    let error = parse("[[rules]]\nname = \"Own\"\nstage = [\"{}\"]\n", "r")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("r:3: rules[0].stage: queries of NVSentinel"),
        "{error}"
    );
}

#[test]
fn only_what_asks_for_an_action_is_fatal() {
    assert_eq!(built_in().len(), 28);
    for rule in parse(BUILT_IN, "rules.toml").unwrap() {
        assert_eq!(
            rule.fatal,
            rule.action != RecommendedAction::None,
            "{}",
            rule.name
        );
        assert!(rule.message.ends_with('.'), "{}", rule.name);
    }
}

#[test]
fn wrong_rules_are_refused_with_line_and_hint() {
    let rule = "[[rules]]\nname = \"r\"\nkind = \"count\"\nwindow = \"1h\"\nthreshold = 2\n\
                action = \"NONE\"\nmessage = \"m\"\n";
    assert_eq!(parse(rule, "r").unwrap().len(), built_in().len() + 1);
    for (wrong, right, expected) in [
        (
            "threshold = 0",
            "threshold = 2",
            "r:5: rules[0].threshold is 0; write a whole number",
        ),
        (
            "window = \"31d\"",
            "window = \"1h\"",
            "r:4: rules[0].window is \"31d\"; write a duration",
        ),
        (
            "kind = \"cuont\"",
            "kind = \"count\"",
            "r:3: rules[0].kind is \"cuont\"",
        ),
        (
            "kind = \"burst\"",
            "kind = \"count\"",
            "rules[0].gap is missing; this kind needs one",
        ),
        (
            "action = \"REBOOT\"",
            "action = \"NONE\"",
            "r:6: rules[0].action is \"REBOOT\"",
        ),
        (
            "group_by = [\"gpus\"]\nkind = \"count\"",
            "kind = \"count\"",
            "r:3: rules[0].group_by[0] is \"gpus\"; write one of node, gpu",
        ),
        (
            "match = \"event.x\"\nkind = \"count\"",
            "kind = \"count\"",
            "r:3: rules[0].match",
        ),
        (
            "colour = 1\nkind = \"count\"",
            "kind = \"count\"",
            "r:3: unknown key 'rules[0].colour'",
        ),
    ] {
        let error = parse(&rule.replace(right, wrong), "r")
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = parse(&format!("{rule}{rule}"), "r")
        .unwrap_err()
        .to_string();
    assert!(error.contains("another rule with this name"), "{error}");
}
