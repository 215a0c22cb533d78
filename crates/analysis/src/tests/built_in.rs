use contract::{Entity, HealthEvent, RecommendedAction};
use model::event::EventRecord;

use super::analyzer::{analyzer, feed, open, record, xid};
use crate::{BUILT_IN, parse};

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
fn concludes(events: &[EventRecord], expected: &[&str]) {
    let mut analyzer = analyzer();
    feed(&mut analyzer, events);
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
    let same = [of(0, "GPU-1"), of(10, "GPU-1")];
    concludes(&same, &["RepeatedXID31OnSameGPU"]);
    concludes(&[of(0, "GPU-1"), of(1, "GPU-1")], &[]);
    let several = [of(0, "GPU-1"), of(1, "GPU-2")];
    concludes(&several, &["RepeatedXID31OnDifferentGPU"]);
    concludes(&[of(0, "GPU-1"), of(25 * 60, "GPU-2")], &[]);
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
    concludes(&repeated(&[0, 1, 2], &one), &["RepeatedNICDegradation"]);
    let both = [repeated(&[0, 1], &one), repeated(&[2], &two)].concat();
    concludes(&both, &[]);
}

#[test]
fn only_what_asks_for_an_action_is_fatal() {
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
    assert_eq!(parse(rule, "r").unwrap().len(), 1);
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
            "rules[0].gap is missing; a burst needs one",
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
