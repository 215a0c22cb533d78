use std::collections::BTreeMap;

use serde::Deserialize;

use super::*;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    #[serde(rename = "count")]
    _count: Option<u8>,
    #[serde(rename = "isOn")]
    _is_on: Option<bool>,
    #[serde(rename = "names")]
    _names: Option<Vec<String>>,
    #[serde(rename = "mode")]
    _mode: Option<Mode>,
    #[serde(rename = "within")]
    _within: Option<Inner>,
    #[serde(rename = "each")]
    _each: Option<BTreeMap<String, Inner>>,
    #[serde(rename = "list")]
    _list: Option<Vec<Inner>>,
    #[serde(rename = "time")]
    _time: Option<Time>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Inner {
    #[serde(rename = "name")]
    _name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Append,
    Prepend,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected seconds, or a duration such as 5m")]
enum Time {
    #[allow(dead_code)]
    Seconds(u32),
    #[allow(dead_code)]
    Text(String),
}

fn error(text: &str, format: Format) -> String {
    let read = Findings::read::<File>(text, "f", format);
    read.map(|(file, _)| file).unwrap_err().to_string()
}

#[test]
fn what_cannot_be_deserialized_is_told_with_line_key_and_remedy_in_each_format() {
    for (toml, expected) in [
        ("cuont = 1", "unknown key 'cuont'; did you mean 'count'?"),
        (
            "x = 1",
            "unknown key 'x'; there is count, isOn, names, mode, within, each, list, time",
        ),
        (
            "count = 256",
            "count is 256; write a whole number from 0 to 255",
        ),
        (
            "count = 'a'",
            "count is 'a'; write a whole number from 0 to 255",
        ),
        ("isOn = 3", "isOn is 3; write true or false"),
        ("names = 'a'", "names is 'a'; write a list"),
        ("within = 1", "within is 1; write keys with their values"),
        ("mode = 'apend'", "mode is 'apend'; did you mean 'append'?"),
        ("mode = 'x'", "mode is 'x'; write append or prepend"),
    ] {
        let (key, value) = toml.split_once(" = ").unwrap();
        let json = format!("{{\n\"{key}\": {}}}", value.replace('\'', "\""));
        for (text, format) in [
            (format!("\n{toml}"), Format::Toml),
            (format!("\n{key}: {value}"), Format::Yaml),
            (json, Format::Json),
        ] {
            let found = error(&text, format).replace('"', "'");
            assert_eq!(found, format!("f:2: {expected}"), "{text}");
        }
    }
    for (text, format, expected) in [
        (
            "[each.a]\nname = ''\n[[list]]\nname = ''\n[[list]]\nnmae = ''",
            Format::Toml,
            "f:6: unknown key 'list[1].nmae'; did you mean 'name'?",
        ),
        (
            "list:\n  - name: a\n  - name: a\n    nmae: b",
            Format::Yaml,
            "f:4: unknown key 'list[1].nmae'; did you mean 'name'?",
        ),
        (
            "{\"list\": [{\"name\": \"a\"},\n {\"nmae\": \"a\"}]}",
            Format::Json,
            "f:2: unknown key 'list[1].nmae'; did you mean 'name'?",
        ),
        (
            "time = [1]",
            Format::Toml,
            "f:1: time is a list; write seconds, or a duration such as 5m",
        ),
        (
            "time: [1]",
            Format::Yaml,
            "f:1: time is a list; write seconds, or a duration such as 5m",
        ),
        (
            "\n[each.b]",
            Format::Toml,
            "f:2: each.b: the key 'name' is missing",
        ),
        (
            "\neach: {b: {}}",
            Format::Yaml,
            "f:2: each.b: the key 'name' is missing",
        ),
        (
            "\neach:\n  b:\n    {}\n",
            Format::Yaml,
            "f:4: each.b: the key 'name' is missing",
        ),
    ] {
        assert_eq!(error(text, format), expected, "{text}");
    }
    for (text, format, wanted) in [
        ("isOn = []", Format::Toml, "true or false"),
        ("isOn: []", Format::Yaml, "one value"),
        ("{\"isOn\": []}", Format::Json, "true or false"),
    ] {
        let expected = format!("f:1: isOn is a list; write {wanted}");
        assert_eq!(error(text, format), expected);
    }
    let twice = error("\ncount: 1\ncount: 2", Format::Yaml);
    assert!(
        twice.starts_with("f:3: ") && twice.contains("duplicate"),
        "{twice}"
    );
    for (text, format) in [
        ("a = = 1", Format::Toml),
        ("a: [", Format::Yaml),
        ("a: [1 b: 2", Format::Yaml),
        ("{", Format::Json),
    ] {
        let broken = error(text, format);
        assert!(
            broken.starts_with("f:1: ") && !broken.contains("line") && !broken.contains("write"),
            "{broken}"
        );
    }
    let long = "#".repeat(MAX_FILE_BYTES + 1);
    let expected = "f:1: it has 1048577 bytes, at most 1048576 are taken";
    assert_eq!(error(&long, Format::Toml), expected);
}

#[test]
fn values_are_checked_and_all_findings_have_the_line_of_their_key() {
    let toml = "many = 0\n[table]\ntime = '0s'\nmode = 'nevr'\n[[list]]\nname = 'A'\n";
    let yaml = "many: 0\ntable:\n  time: '0s'\n  mode: 'nevr'\nlist:\n- name: A\n";
    let wrapped = format!("spec:\n  {}\n", yaml.trim_end().replace('\n', "\n  "));
    let expected = [
        "many is 0; write a whole number of minutes from 1 to 9",
        "table.time is '0s'; write a duration above zero such as 90s, 3m or 1h, at most 5m",
        "table.mode is 'nevr'; did you mean 'never'?",
        "table.mode is 'nevr'; write never or ever",
        "list[0].name: \"A\" is no name: ",
        "table.other: is missing",
        "others[3].name: is missing",
    ];
    for (text, format, root, lines) in [
        (toml, Format::Toml, "", [1, 3, 4, 4, 6, 2, 1]),
        (yaml, Format::Yaml, "", [1, 3, 4, 4, 6, 2, 1]),
        (&*wrapped, Format::Yaml, "spec", [2, 4, 5, 5, 7, 3, 1]),
    ] {
        let mut findings = Findings::new(text, "f", format).unwrap();
        assert_eq!(findings.enter_table("spec"), !root.is_empty());
        assert_eq!(findings.minutes("many", Some(0), 1..=9), None);
        let minute = SignedDuration::from_mins(1);
        assert_eq!(findings.duration("table.time", "0s", minute * 5), None);
        assert_eq!(
            findings.duration("table.time", "1m", minute * 5),
            Some(minute)
        );
        let choices = [("never", 0), ("ever", 1)];
        assert_eq!(findings.one_of("table.mode", "nevr", &choices), None);
        assert_eq!(findings.one_of("table.mode", "x", &choices), None);
        assert_eq!(findings.one_of("table.mode", "ever", &choices), Some(1));
        assert_eq!(
            findings.check("list[0].name", crate::names::dns_label("A")),
            None
        );
        findings.at_key("table.other", "is missing");
        findings.at_key("others[3].name", "is missing");
        let error = findings.result(()).unwrap_err();
        for ((found, line), what) in error.findings.iter().zip(lines).zip(expected) {
            let expected = format!("f:{line}: {}", keys::joined(root, what));
            assert!(found.starts_with(&expected), "{found}\n{expected}");
        }
        assert_eq!(error.findings.len(), expected.len());
    }
}

#[test]
fn every_finding_has_its_line_and_a_hundred_are_told() {
    let text = "a = 1\nb = 2\n";
    let mut findings = Findings::new(text, "f.toml", Format::Toml).unwrap();
    findings.at(0, "first");
    findings.at(6, "second");
    findings.at(text.len(), "behind");
    findings.at(usize::MAX, "beyond");
    let error = findings.clone().result(()).unwrap_err().to_string();
    assert_eq!(
        error,
        "f.toml:1: first\nf.toml:2: second\nf.toml:3: behind\nf.toml:3: beyond"
    );
    let mut many = findings.clone();
    for number in 0..200 {
        many.at(0, &format!("number {number}"));
    }
    let error = many.stop(6, "last");
    assert_eq!(error.findings.len(), MAX_FINDINGS + 1);
    assert!(error.findings[MAX_FINDINGS].contains("more findings"));
    // Equal ones are listed once, and cost a search for their line each.
    for _ in 0..200 {
        findings.at(6, "second");
    }
    assert_eq!(findings.count(), MAX_FINDINGS + 1);
    let error = findings.stop(6, "last");
    assert_eq!(error.findings.len(), 5);
    assert!(error.findings[4].contains("more findings"));
}

/// With a search through all keys for each finding, this test would run for minutes.
#[test]
fn a_file_of_wrong_values_is_read_in_linear_time() {
    const ENTRIES: usize = 100_000;
    let text = format!("budgets = [{}]", "{a=0},".repeat(ENTRIES));
    for format in [Format::Toml, Format::Yaml] {
        let text = match format {
            Format::Toml => text.clone(),
            _ => text.replace("budgets = ", "budgets: ").replace('=', ": "),
        };
        let mut findings = Findings::new(&text, "f", format).unwrap();
        for index in 0..ENTRIES {
            let path = format!("budgets[{index}]");
            findings.refuse(&format!("{path}.a"), "write 1");
            findings.at_key(&path, "is wrong");
            findings.unknown_key(&format!("{path}.a"), &["b"]);
            findings.check(&path, Err::<(), _>("is wrong"));
        }
        assert_eq!(findings.keys().len(), 1 + 2 * ENTRIES);
        assert_eq!(findings.count(), MAX_FINDINGS + 1);
        let error = findings.stop(0, "last");
        assert_eq!(error.findings[0], "f:1: budgets[0].a is 0; write 1");
        // The fourth finding of each entry is equal to its second.
        assert_eq!(error.findings.len(), 3 * MAX_FINDINGS / 4 + 1);
    }
}

#[test]
fn a_long_list_costs_no_more_than_a_short_one() {
    let ones = "1,\n".repeat(300_000);
    let nested = "[1],\n".repeat(150_000);
    for (text, format) in [
        (format!("x = [{ones}{{a = 1}}]"), Format::Toml),
        (format!("x: [{ones}{{a: 1}}]"), Format::Yaml),
        (format!("{{\"x\": [{ones}{{\"a\": 1}}]}}"), Format::Json),
        (format!("x = [{nested}{{a = 1}}]"), Format::Toml),
        (format!("x: [{nested}{{a: 1}}]"), Format::Yaml),
    ] {
        let lines = text.lines().count();
        let mut findings = Findings::new(&text, "f", format).unwrap();
        assert!(findings.keys().len() < 10_010);
        findings.refuse("x[4000]", "write 2");
        findings.refuse("x[100000]", "write 2");
        findings.refuse(&format!("x[{}].a", lines - 1), "write 2");
        let error = findings.stop(0, "last");
        assert!(error.findings[0].contains(":4001: x[4000] is "), "{error}");
        assert_eq!(
            error.findings[1..3],
            [
                "f:1: the value of x[100000] is wrong; write 2".to_owned(),
                format!("f:{lines}: x[{}].a is 1; write 2", lines - 1)
            ]
        );
    }
}

#[test]
fn what_has_no_path_does_not_move_the_keys_behind_it() {
    let long = "a".repeat(300);
    for text in [
        format!("{long}:\n  {{b: {{c: 1}}, d: [2]}}\nx:\n  y: 3"),
        format!("t: &t\n  {long}: [[1], {{b: 2}}]\nx:\n  y: 3"),
        "? [a, [b]]\n: {c: [d]}\nx:\n  y: 3".to_owned(),
        "? {a: {b: c}}\n: d\nx:\n  y: 3".to_owned(),
        "a: &a b\n*a : {c: d}\nx:\n  y: 3".to_owned(),
        "a: [&a b, ? [c] : d]\nz: {*a : c}\nx:\n  y: 3".to_owned(),
    ] {
        let mut findings = Findings::new(&text, "f", Format::Yaml).unwrap();
        findings.refuse("x.y", "write 4");
        let line = text.lines().count();
        let error = findings.result(()).unwrap_err().to_string();
        assert_eq!(error, format!("f:{line}: x.y is 3; write 4"), "{text}");
    }
}

#[test]
fn a_value_from_elsewhere_in_a_yaml_file_is_not_missing() {
    let text = "a: &a {b: {c: 1}, d: 2}\nlist:\n- *a\nsame: *a\nmerged:\n  <<: *a\n  b: {d: 2}";
    for (path, expected) in [
        ("same.d", "f:4: the value of same.d is wrong; write 3"),
        ("same.b.c", "f:4: the value of same.b.c is wrong; write 3"),
        ("same", "f:4: same is *a; write 3"),
        ("list[0].d", "f:3: the value of list[0].d is wrong; write 3"),
        ("merged.d", "f:5: the value of merged.d is wrong; write 3"),
        ("merged.b.c", "f:7: merged.b.c is missing; write 3"),
        ("a.b.d", "f:1: a.b.d is missing; write 3"),
        ("x", "f:1: x is missing; write 3"),
    ] {
        let mut findings = Findings::new(text, "f", Format::Yaml).unwrap();
        findings.refuse(path, "write 3");
        assert_eq!(findings.result(()).unwrap_err().to_string(), expected);
    }
    let text = "a: &a {b: 1}\n<<: *a";
    let mut findings = Findings::new(text, "f", Format::Yaml).unwrap();
    findings.refuse("b", "write 3");
    let error = findings.result(()).unwrap_err().to_string();
    assert_eq!(error, "f:1: the value of b is wrong; write 3");
}
