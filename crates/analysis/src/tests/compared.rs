//! Members that are compared with their siblings, and values that are compared with other groups.

mod built_in;
mod property;

use contract::{HealthEvent, keys};
use model::event::EventRecord;
use model::reporter::Reporter;

use super::analyzer::{entity, feed, record, recovery, say};
use super::at;
use crate::{Analyzer, Lack, MAX_MEMBERS, Rule, parse};

const RACK: &str = "topology.kubernetes.io/rack";
/// Window of the rules, and time for which others may still report.
const WINDOW: i64 = 100;
const GAP: i64 = 10;

const SILENT: &str = "group_by = [\"rack\"]\nkind = \"outlier\"\nmember = \"gpu\"\nsilent = true\n\
                      siblings = 3\naction = \"NONE\"\n";
const NOISY: &str = "group_by = [\"rack\"]\nkind = \"outlier\"\nmember = \"gpu\"\nfactor = 3\n\
                     siblings = 2\nthreshold = 5\naction = \"NONE\"\n";
const EXCLUSIVE: &str = "group_by = [\"gpu\"]\nkind = \"count\"\ndistinct = [\"job\"]\nexclusive = true\n\
                         threshold = 2\naction = \"RUN_DCGMEUD\"\n";

/// Returns a rule about XIDs, with this name.
fn rule(name: &str, keys: &str) -> String {
    format!(
        "[[rules]]\nname = \"{name}\"\nchecks = [\"SysLogsXIDError\"]\nwindow = \"{WINDOW}s\"\n\
         gap = \"{GAP}s\"\nmessage = \"m\"\n{keys}\n"
    )
}

fn rules(text: &str) -> Vec<Rule> {
    parse(&format!("built_in = false\n{text}"), "rules.toml").unwrap()
}

/// Returns an event of a GPU in the rack `r`: the node's name and the number of the GPU make its
/// names.
fn event(node: &str, gpu: u8, check: &str) -> HealthEvent {
    let mut event = HealthEvent {
        agent: "syslog-health-monitor".to_owned(),
        check_name: check.to_owned(),
        node_name: node.to_owned(),
        entities_impacted: vec![
            entity("PCI", &format!("0000:b{gpu}:00.0")),
            entity("GPU_UUID", &format!("GPU-{node}{gpu}")),
        ],
        ..HealthEvent::default()
    };
    event.metadata.insert(RACK.to_owned(), "r".to_owned());
    event
}

fn xid(second: i64, node: &str, gpu: u8) -> EventRecord {
    let mut xid = event(node, gpu, keys::CHECK_XID);
    xid.error_code = vec!["45".to_owned()];
    record(second, xid)
}

/// Returns an XID that stands for several.
fn xids(second: i64, node: &str, gpu: u8, count: u64) -> EventRecord {
    let mut event = xid(second, node, gpu).event;
    let time = at(second).to_string();
    event.metadata.extend([
        (keys::META_COUNT.to_owned(), count.to_string()),
        (keys::META_FIRST_SEEN.to_owned(), time.clone()),
        (keys::META_LAST_SEEN.to_owned(), time),
    ]);
    record(second, event)
}

/// Returns an XID of a job.
fn of_job(second: i64, node: &str, gpu: u8, job: &str) -> EventRecord {
    let mut event = xid(second, node, gpu).event;
    event
        .metadata
        .insert(keys::META_JOB.to_owned(), job.to_owned());
    record(second, event)
}

/// Returns the event by which a monitor names a GPU of its node.
fn inventory(second: i64, node: &str, gpu: u8, boot: &str) -> EventRecord {
    let mut named = event(node, gpu, keys::CHECK_GPU_INVENTORY);
    named.agent = keys::GPU_AGENT.to_owned();
    named.is_healthy = true;
    named.processing_strategy = contract::ProcessingStrategy::StoreOnly as i32;
    named
        .metadata
        .insert(keys::META_BOOT_ID.to_owned(), boot.to_owned());
    Reporter::Monitor.note_in(&mut named);
    record(second, named)
}

/// Returns the names of the open conclusions, with node and address of their GPUs.
fn found(analyzer: &Analyzer) -> Vec<String> {
    let events = analyzer.open().map(|finding| {
        let rule = analyzer
            .rules()
            .iter()
            .find(|rule| rule.name == finding.rule);
        let event = finding.event(rule.unwrap());
        let pci = event
            .entities_impacted
            .iter()
            .find(|one| one.entity_type == "PCI");
        let pci = pci.or(event.entities_impacted.first());
        let pci = pci.map(|one| one.entity_value.clone()).unwrap_or_default();
        format!("{} {} {pci}", event.check_name, event.node_name)
    });
    let mut found: Vec<String> = events.collect();
    found.sort();
    found
}

/// Returns what a rule concludes from events, as of a time.
fn concludes(keys: &str, events: &[EventRecord], now: i64) -> Vec<String> {
    let mut analyzer = Analyzer::new(rules(&rule("r", keys)));
    feed(&mut analyzer, events);
    analyzer.time(at(now));
    found(&analyzer)
}

/// Returns the inventory of two nodes with two GPUs each.
fn two_nodes() -> Vec<EventRecord> {
    let gpus = [("a", 0), ("a", 1), ("b", 0), ("b", 1)];
    gpus.map(|(node, gpu)| inventory(0, node, gpu, "1"))
        .to_vec()
}

/// Returns XIDs of all GPUs of two nodes but the last, a second apart.
fn all_but_one() -> Vec<EventRecord> {
    vec![xid(10, "a", 0), xid(11, "a", 1), xid(12, "b", 0)]
}

#[test]
fn a_gpu_is_silent_where_all_others_report() {
    let events = [two_nodes(), all_but_one()].concat();
    let silent = ["r b 0000:b1:00"];
    assert_eq!(
        concludes(SILENT, &events, 12 + GAP),
        [""; 0],
        "it may still report"
    );
    assert_eq!(concludes(SILENT, &events, 13 + GAP), silent);
    assert_eq!(concludes(SILENT, &events, 12 + WINDOW), silent);
    assert_eq!(concludes(SILENT, &events, 13 + WINDOW), [""; 0]);
    // Monitors that name GPUs late, or not at all.
    let named_late = [all_but_one(), two_nodes()].concat();
    assert_eq!(concludes(SILENT, &named_late, 13 + GAP), silent);
    assert_eq!(concludes(SILENT, &all_but_one(), 13 + GAP), [""; 0]);
    // One that reports, also late, is not silent; nor is one of two.
    for more in [
        vec![xid(20, "b", 1)],
        vec![xid(5, "b", 1)],
        vec![inventory(0, "b", 2, "1")],
    ] {
        let events = [events.clone(), more].concat();
        assert_eq!(concludes(SILENT, &events, 30), [""; 0]);
    }
    // Too few others report.
    let fewer = [two_nodes(), all_but_one()[1..].to_vec()].concat();
    assert_eq!(concludes(SILENT, &fewer, 30), [""; 0]);
}

#[test]
fn a_node_that_says_nothing_is_not_silent_gpus() {
    let mut events = [two_nodes(), all_but_one()].concat();
    // A third node is off, or its monitor does not run.
    events.push(inventory(0, "c", 0, "1"));
    assert_eq!(concludes(SILENT, &events, 30), ["r b 0000:b1:00"]);
    // Once one of its GPUs reports, another one may be silent too.
    events.extend([inventory(0, "c", 1, "1"), xid(13, "c", 0)]);
    assert_eq!(concludes(SILENT, &events, 30), [""; 0]);
}

#[test]
fn a_gpu_that_is_gone_since_the_last_boot_is_not_silent() {
    let mut events = [two_nodes(), all_but_one()].concat();
    events.push(inventory(1, "b", 0, "2"));
    assert_eq!(concludes(SILENT, &events, 30), [""; 0]);
    // Any user of a machine may send such an event.
    let mut by_user = inventory(2, "b", 1, "2").event;
    by_user.metadata.remove(keys::META_REPORTED_BY);
    events.push(record(2, by_user));
    assert_eq!(concludes(SILENT, &events, 30), [""; 0]);
}

#[test]
fn a_gpu_is_noisy_that_reports_far_more_than_its_siblings_for_a_while() {
    let others = [xid(10, "a", 0), xid(10, "b", 0)];
    let of = |count| [&others[..], &[xids(11, "b", 1, count)]].concat();
    let noisy = ["r b 0000:b1:00"];
    assert_eq!(concludes(NOISY, &of(5), 11 + GAP), [""; 0]);
    assert_eq!(concludes(NOISY, &of(5), 12 + GAP), noisy);
    assert_eq!(concludes(NOISY, &of(4), 30), [""; 0]);
    assert_eq!(
        concludes(NOISY, &of(5)[1..], 30),
        [""; 0],
        "too few siblings"
    );
    // The same storm reaches the others a second later.
    let storm = [of(5), vec![xids(12, "a", 0, 9), xids(12, "b", 0, 9)]].concat();
    assert_eq!(concludes(NOISY, &storm, 40), [""; 0]);
    // The conclusion ends once the others catch up.
    let later = [of(5), vec![xids(40, "a", 0, 9), xids(40, "b", 0, 9)]].concat();
    assert_eq!(concludes(NOISY, &later, 40), [""; 0]);
}

#[test]
fn the_conclusion_names_the_member_and_ends_before_one_about_another_member() {
    let mut analyzer = Analyzer::new(rules(&rule("r", NOISY)));
    let events = [
        xid(10, "a", 0),
        xid(10, "b", 0),
        xids(11, "b", 1, 9),
        xids(12, "a", 1, 9),
    ];
    feed(&mut analyzer, &events);
    analyzer.time(at(30));
    let sayings = say(&mut analyzer, 30);
    assert_eq!(sayings.len(), 1);
    let first = sayings[0].event.clone();
    assert_eq!(first.node_name, "b");
    let names = [entity("GPU_UUID", "GPU-b1"), entity("PCI", "0000:b1:00")];
    assert_eq!(first.entities_impacted, names);
    assert_eq!(
        (first.metadata[RACK].as_str(), first.is_fatal),
        ("r", false)
    );
    model::event::validate(&first).unwrap();
    // The other one has more now, and the first one is far still.
    feed(&mut analyzer, &[xids(40, "a", 1, 30)]);
    assert_eq!(found(&analyzer), ["r b 0000:b1:00"]);
    feed(&mut analyzer, &[xids(41, "a", 0, 9), xids(41, "b", 0, 9)]);
    assert_eq!(found(&analyzer), ["r a 0000:b1:00"]);
    let (end, next) = (say(&mut analyzer, 61), say(&mut analyzer, 61));
    assert!(end[0].event.is_healthy && end[0].event.node_name == "b");
    assert_eq!(end[0].event.entities_impacted, names);
    assert!(!next[0].event.is_healthy && next[0].event.node_name == "a");
    assert_eq!(say(&mut analyzer, 61), []);
}

#[test]
fn a_repair_of_the_member_ends_its_conclusion_and_no_other_one_does() {
    let fatal = NOISY.replace("NONE", "CONTACT_SUPPORT");
    for (node, gpu, ends) in [
        ("b", "GPU-b1", true),
        ("b", "", true),
        ("b", "GPU-b0", false),
        ("a", "", false),
    ] {
        let mut analyzer = Analyzer::new(rules(&rule("r", &fatal)));
        feed(
            &mut analyzer,
            &[xid(10, "a", 0), xid(10, "b", 0), xids(11, "b", 1, 9)],
        );
        analyzer.time(at(30));
        assert_eq!(say(&mut analyzer, 30).len(), 1);
        let mut by_person = recovery(40, "r", gpu).event;
        by_person.node_name = node.to_owned();
        by_person.metadata.insert(RACK.to_owned(), "r".to_owned());
        feed(&mut analyzer, &[record(40, by_person)]);
        assert_eq!(found(&analyzer).is_empty(), ends, "{node} {gpu}");
        assert_eq!(say(&mut analyzer, 40), [], "{node} {gpu}");
    }
}

#[test]
fn jobs_count_that_have_failed_on_no_other_gpu() {
    let two = [of_job(0, "a", 0, "j"), of_job(50, "a", 0, "k")];
    let of_gpu = ["r a GPU-a0"];
    assert_eq!(
        concludes(EXCLUSIVE, &two, 50 + GAP),
        [""; 0],
        "others may still report"
    );
    assert_eq!(concludes(EXCLUSIVE, &two, 51 + GAP), of_gpu);
    assert_eq!(
        concludes(EXCLUSIVE, &two, 9_999),
        of_gpu,
        "it lasts until a repair"
    );
    // The same job again, a report without a job, and one that is too old.
    for last in [
        of_job(50, "a", 0, "j"),
        xid(50, "a", 0),
        of_job(101, "a", 0, "k"),
    ] {
        assert_eq!(concludes(EXCLUSIVE, &[two[0].clone(), last], 999), [""; 0]);
    }
    // One of them has failed on another GPU, of this node or another one.
    for elsewhere in [of_job(5, "a", 1, "j"), of_job(55, "b", 0, "k")] {
        let mut analyzer = Analyzer::new(rules(&rule("r", EXCLUSIVE)));
        feed(&mut analyzer, &two);
        analyzer.time(at(200));
        assert_eq!(say(&mut analyzer, 200).len(), 1);
        feed(&mut analyzer, &[elsewhere]);
        analyzer.time(at(200));
        let end = say(&mut analyzer, 200);
        assert!(end[0].event.is_healthy, "{end:?}");
    }
    // Long before or after, a job of this name is another one.
    let later = [two.to_vec(), vec![of_job(300, "b", 0, "k")]].concat();
    assert_eq!(concludes(EXCLUSIVE, &later, 999), of_gpu);
    // After a repair, the jobs count anew.
    let repaired = [
        two.to_vec(),
        vec![recovery_of("a", 60, "GPU-a0"), of_job(70, "a", 0, "l")],
    ]
    .concat();
    assert_eq!(concludes(EXCLUSIVE, &repaired, 999), [""; 0]);
}

fn recovery_of(node: &str, second: i64, gpu: &str) -> EventRecord {
    let mut event = recovery(second, "r", gpu).event;
    event.node_name = node.to_owned();
    record(second, event)
}

#[test]
fn what_a_group_holds_and_lacks_is_told_of_comparisons_too() {
    let held = |keys: &str, events: &[EventRecord], now| {
        let mut analyzer = Analyzer::new(rules(&rule("r", keys)));
        feed(&mut analyzer, events);
        let held = analyzer.groups_of_rule("r", at(now)).remove(0).held;
        (held.count, held.lack)
    };
    let silent = [two_nodes(), all_but_one()].concat();
    assert_eq!(
        held(SILENT, &silent, 15),
        (3, Some(Lack::Wait(at(12 + GAP))))
    );
    let none = held(SILENT, &all_but_one(), 15);
    assert_eq!(none, (3, Some(Lack::OneSilent(Vec::new()))));
    assert_eq!(
        held(SILENT, &silent[..5], 15),
        (1, None),
        "one sibling reports so far"
    );
    let noisy = [xid(10, "a", 0), xid(10, "b", 0), xids(11, "b", 1, 2)];
    assert_eq!(held(NOISY, &noisy, 15), (2, Some(Lack::Median(1))));
    assert_eq!(held(NOISY, &noisy[1..], 15), (2, Some(Lack::Siblings(1))));
    let jobs = [
        of_job(0, "a", 0, "j"),
        of_job(1, "a", 0, "k"),
        of_job(2, "b", 0, "k"),
    ];
    let elsewhere = Some(Lack::Elsewhere(vec!["k".to_owned()]));
    assert_eq!(held(EXCLUSIVE, &jobs, 15), (1, elsewhere));
}

#[test]
fn members_and_gpus_are_bounded() {
    let mut analyzer = Analyzer::new(rules(&rule("r", NOISY)));
    for index in 0..MAX_MEMBERS + 100 {
        let second = i64::try_from(index / 32).unwrap();
        let mut event = xid(second, "a", 0).event;
        event.entities_impacted = vec![entity("GPU_UUID", &format!("GPU-{index}"))];
        let mut named = inventory(second, "a", 0, "1").event;
        named.entities_impacted.clone_from(&event.entities_impacted);
        analyzer.record(&record(second, event));
        analyzer.record(&record(second, named));
    }
    let saved = analyzer.save();
    let size: usize = saved.parts.values().map(Vec::len).sum();
    assert!(size < 2_000 * MAX_MEMBERS, "{size} bytes");
    let of_node = String::from_utf8(saved.parts["a"].clone()).unwrap();
    assert_eq!(of_node.matches("\"at\"").count(), 64);
}

#[test]
fn wrong_keys_of_comparisons_are_refused_with_line_and_hint() {
    let silent = rule("r", SILENT);
    for (text, from, to, expected) in [
        (
            &silent,
            "siblings = 3\n",
            "",
            "rules[0].siblings is missing; write how many",
        ),
        (
            &silent,
            "siblings = 3",
            "siblings = 0",
            "r:12: rules[0].siblings is 0; write a whole number",
        ),
        (
            &silent,
            "\"gpu\"",
            "\"node\"",
            "rules[0].member is \"node\"; write gpu: a node that says nothing",
        ),
        (
            &silent,
            "\"rack\"",
            "\"job\"",
            "rules[0].group_by[0] is \"job\"; write node or a label",
        ),
        (
            &silent,
            "siblings = 3",
            "siblings = 3\nthreshold = 3",
            "rules[0].threshold is 3; this kind has none",
        ),
        (
            &silent,
            "siblings = 3",
            "siblings = 3\nfatal = true",
            "rules[0].fatal is true; write false",
        ),
        (
            &silent,
            "gap = \"10s\"\n",
            "",
            "rules[0].gap is missing; this kind needs one, such as 5m",
        ),
        (
            &rule("r", NOISY),
            "factor = 3\n",
            "",
            "rules[0].factor is missing; write how many times",
        ),
        (
            &rule("r", NOISY),
            "\"gpu\"",
            "\"rack\"",
            "rules[0].member is \"rack\"; write gpu or node",
        ),
        (
            &rule("r", NOISY),
            "outlier",
            "count",
            "rules[0].member is \"gpu\"; it belongs to the kind outlier",
        ),
        (
            &rule("r", EXCLUSIVE),
            "distinct = [\"job\"]\n",
            "",
            "rules[0].distinct is missing; exclusive needs it",
        ),
        (
            &rule("r", EXCLUSIVE),
            "exclusive = true",
            "exclusive = true\nclose = \"1s\"",
            "it belongs to a count without",
        ),
        (
            &rule("r", EXCLUSIVE),
            "exclusive = true\n",
            "",
            "rules[0].gap is \"10s\"; it belongs to the kind burst",
        ),
    ] {
        let text = format!("built_in = false\n{text}").replace(from, to);
        let error = parse(&text, "r").unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for (key, expected) in [
        (
            "threshold = 2",
            "rules[0].threshold is 2; this rule has none; write siblings",
        ),
        ("fatal = true", "rules[0].fatal is true; write false"),
        (
            "member = \"node\"",
            "rules[0].member: belongs to a rule of its own",
        ),
    ] {
        let error = parse(&format!("[[rules]]\nname = \"SilentGPU\"\n{key}\n"), "r").unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let fewer = "[[rules]]\nname = \"SilentGPU\"\nsiblings = 7\naction = \"CONTACT_SUPPORT\"\n";
    let rules = parse(fewer, "r").unwrap();
    let changed = rules.iter().find(|rule| rule.name == "SilentGPU").unwrap();
    assert_eq!((changed.condition.threshold, changed.fatal), (7, false));
}
