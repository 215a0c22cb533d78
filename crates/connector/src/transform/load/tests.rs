use super::*;

const CONFIG: &str = include_str!("../../../../../examples/connector/config.json");
const METADATA: &str = include_str!("../../../../../examples/connector/metadata.toml");
const OVERRIDES: &str = include_str!("../../../../../examples/connector/overrides.toml");
const DEDUP: &str = include_str!("../../../../../examples/connector/dedup.toml");

fn entry(kind: Kind, config: &str) -> TransformerEntry {
    TransformerEntry {
        kind,
        config: config.to_owned(),
    }
}

#[test]
fn the_four_files_as_they_are_in_use_load() {
    let file = connector(CONFIG, "config.json").unwrap();
    let pipeline = [
        entry(Kind::MetadataAugmentor, "metadata.toml"),
        entry(Kind::OverrideTransformer, "overrides.toml"),
        entry(Kind::Deduplicator, "dedup.toml"),
    ];
    assert_eq!(file.pipeline, pipeline);
    assert_eq!(file.limits, MessageLimits::default());
    for key in [
        "K8sConnectorQps",
        "enableMongoDBStorePlatformConnector",
        "StoreConnectorMaxRetries",
        "GRPCSinkConnectorMaxRetries",
    ] {
        let note = file.notes.iter().find(|note| note.contains(key));
        assert!(note.unwrap().contains("config.json: "), "{key}");
    }

    let (labels, notes) = metadata(METADATA, "metadata.toml").unwrap();
    assert_eq!(labels.0.len(), 9);
    assert!(notes[0].contains("cacheSize"), "{notes:?}");

    let (overrides, notes) = overrides(OVERRIDES, "overrides.toml").unwrap();
    assert_eq!(overrides.rules.len(), 2);
    assert_eq!(overrides.rules[0].is_fatal, Some(false));
    assert_eq!(overrides.rules[1].action, Some((27, "RECABLE".to_owned())));
    assert!(notes.is_empty(), "{notes:?}");

    let settings = dedup::Settings {
        window: SignedDuration::from_mins(3),
        cleanup: SignedDuration::from_mins(1),
        checks: vec!["SysLogsXIDError".into(), "SysLogsSXIDError".into()],
    };
    assert_eq!(dedup(DEDUP, "dedup.toml").unwrap(), settings);
}

#[test]
fn what_is_left_out_has_the_values_of_the_reference() {
    let empty = ConnectorFile {
        pipeline: vec![],
        limits: MessageLimits::new(1024, 72).unwrap(),
        forward: None,
        notes: vec![],
    };
    assert_eq!(connector("{}", "c").unwrap(), empty);
    assert_eq!(metadata("", "m").unwrap().0, Labels::default());
    let none = metadata("allowedLabels = []", "m").unwrap().0;
    assert_eq!(none, Labels(Vec::new()));
    let off = overrides("[[rules]]\nname = 'not even read'\n", "o").unwrap();
    assert!(off.0.rules.is_empty() && off.1[0].contains("1 rules are off"));
    let settings = dedup("", "d").unwrap();
    assert_eq!(settings.window, SignedDuration::from_mins(3));
    assert_eq!(settings.cleanup, SignedDuration::from_secs(60));
    assert!(settings.checks.is_empty());
}

#[test]
fn the_lengths_of_conditions_are_what_the_file_says() {
    let limits = |text: &str| connector(text, "c").unwrap().limits;
    let both = r#"{"MaxNodeConditionMessageLength": 2048, "CompactedHealthEventMsgLen": 100.0}"#;
    assert_eq!(limits(both), MessageLimits::new(2048, 100).unwrap());
    let one = r#"{"CompactedHealthEventMsgLen": 30}"#;
    assert_eq!(limits(one), MessageLimits::new(1024, 30).unwrap());
    let endless = "{\n\"MaxNodeConditionMessageLength\": 1e300}";
    let error = connector(endless, "c").unwrap_err().to_string();
    assert!(error.starts_with("c:2: MaxNode"), "{error}");
}

/// In NVSentinel, a whole number of requests per second is an error at the start.
#[test]
fn numbers_and_switches_are_read_in_every_form_in_use() {
    for number in ["5", "5.00", "1e1"] {
        for switch in ["\"true\"", "true", "\"false\"", "false"] {
            let text = format!(
                "{{\"K8sConnectorQps\": {number}, \"K8sConnectorBurst\": {number}, \
                 \"StoreConnectorMaxRetries\": {number}, \"enableK8sPlatformConnector\": {switch}}}"
            );
            let file = connector(&text, "c").unwrap_or_else(|error| panic!("{text}: {error}"));
            assert!(file.notes.len() >= 2, "{:?}", file.notes);
        }
    }
}

#[test]
fn entries_that_are_off_are_skipped_whatever_they_are() {
    let text = r#"{"pipeline": [
        {"name": "OfTheFuture", "enabled": false},
        {"name": "Deduplicator", "enabled": "false", "config": "d"},
        {"name": "Deduplicator"},
        {"name": "MetadataAugmentor", "enabled": "true"}
    ]}"#;
    let file = connector(text, "c").unwrap();
    assert_eq!(file.pipeline, [entry(Kind::MetadataAugmentor, "")]);
}

#[test]
fn what_is_wrong_with_config_json_is_named_with_its_line() {
    let table = [
        (
            "{\n\"pipline\": []}",
            "c:2: unknown key 'pipline'; did you mean 'pipeline'?",
        ),
        (
            "{\n\n\"enableK8sPlatformConnector\": \"yes\"}",
            "c:3: enableK8sPlatformConnector is \"yes\"; write \"true\" or \"false\"",
        ),
        (
            "{\n\"MaxNodeConditionMessageLength\": 0}",
            "c:2: MaxNodeConditionMessageLength: 0 is not above zero",
        ),
        (
            "{\"CompactedHealthEventMsgLen\": -1}",
            "c:1: CompactedHealthEventMsgLen: -1 is not above zero",
        ),
        (
            "{\"StoreConnectorMaxRetries\": \"3\"}",
            "c:1: StoreConnectorMaxRetries is \"3\"; write a number",
        ),
        (
            "{\"pipeline\": [\n{\"name\": \"Dedup\", \"enabled\": true}]}",
            "c:2: pipeline[0].name is \"Dedup\"; write MetadataAugmentor, OverrideTransformer or Deduplicator",
        ),
        (
            "{\"pipeline\": [{}]}",
            "c:1: pipeline[0]: the key 'name' is missing",
        ),
        (
            "{\n\"enableGRPCSinkConnector\": \"true\"}",
            "c:2: enableGRPCSinkConnector: it needs GRPCSinkTarget: https://collector:50051",
        ),
        (
            "{\n\"enableGRPCSinkConnector\": true,\n\"GRPCSinkTarget\": \"collector\"}",
            "c:3: GRPCSinkTarget is \"collector\"; write https://",
        ),
        (
            "{\n\"MaxNodeConditionMessageLength\": 10}",
            "c:2: MaxNodeConditionMessageLength: ",
        ),
        ("", "c:1: EOF"),
    ];
    for (text, expected) in table {
        let error = connector(text, "c").unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}: {error}");
        assert!(!error.contains("column"), "{error}");
    }
}

#[test]
fn what_is_wrong_with_a_transformers_file_is_named_with_its_line() {
    type Load = fn(&str) -> Result<(), FileError>;
    let of_metadata: Load = |text| metadata(text, "f").map(drop);
    let of_overrides: Load = |text| overrides(text, "f").map(drop);
    let of_dedup: Load = |text| dedup(text, "f").map(drop);
    let long = format!("allowedLabels = [\"{}\"]", "x".repeat(600));
    let many = "enabled = true\n".to_owned()
        + &"[[rules]]\nname = 'r'\nwhen = 'true'\noverride = { isFatal = true }\n".repeat(257);
    // An override on the third line.
    let rule = |rule: &str| format!("enabled = true\n[[rules]]\n{rule}\n");
    let change = |change: &str| {
        rule(&format!(
            "name = 'r'\nwhen = 'true'\noverride = {{ {change} }}"
        ))
    };
    let when = |when: &str| {
        rule(&format!(
            "name = 'r'\nwhen = '''{when}'''\noverride = {{ isFatal = true }}"
        ))
    };
    let codes = |inner: &str| format!("event.errorCode.all(a, {inner})");
    let double = codes("event.errorCode.all(b, b != a)");
    let triple = codes(&double);
    let table: [(Load, String, &str); 26] = [
        (
            of_metadata,
            "allowedLabel = []".into(),
            "f:1: unknown key 'allowedLabel'; did you mean 'allowedLabels'?",
        ),
        (
            of_metadata,
            "\ncacheTTL = 'soon'".into(),
            "f:2: cacheTTL is 'soon'; write a duration",
        ),
        (of_metadata, long, "f:1: allowedLabels[0]: \"xxx"),
        (
            of_overrides,
            "enabled = true".into(),
            "f:1: enabled is true and there are no rules",
        ),
        (of_overrides, many, "f:1026: 257 rules, at most 256"),
        (of_overrides, when(&triple), "f:4: rule 'r': when can take"),
        (
            of_overrides,
            format!(
                "{}{}",
                when(&double),
                when(&double).replace("enabled = true\n", "").repeat(9)
            ),
            "f:1: the rules together can take",
        ),
        (
            of_overrides,
            rule("when = 'true'\noverride = { isFatal = true }"),
            "f:2: a rule needs a name",
        ),
        (
            of_overrides,
            rule("name = 'r'\noverride = { isFatal = true }"),
            "f:2: rule 'r': when is missing",
        ),
        (
            of_overrides,
            rule("name = 'r'\nwhen = 'true'"),
            "f:2: rule 'r': override is to have",
        ),
        (
            of_overrides,
            change(""),
            "f:2: rule 'r': override is to have",
        ),
        (
            of_overrides,
            change("isFatl = true"),
            "f:5: unknown key 'rules[0].override.isFatl'; did you mean 'isFatal'?",
        ),
        (
            of_overrides,
            change("recommendedAction = 'REBOOT'"),
            "f:5: rule 'r': recommendedAction 'REBOOT' is unknown",
        ),
        // NVSentinel accepts the rule and creates events that it would itself refuse.
        (
            of_overrides,
            change("recommendedAction = 'CUSTOM'"),
            "f:5: rule 'r': recommendedAction CUSTOM needs",
        ),
        (
            of_overrides,
            change("recommendedAction = 'CUSTOM', customRecommendedAction = ' '"),
            "f:5: rule 'r': recommendedAction CUSTOM needs",
        ),
        (
            of_overrides,
            change("recommendedAction = 'NONE', customRecommendedAction = 'X'"),
            "f:5: rule 'r': customRecommendedAction stands",
        ),
        (
            of_overrides,
            change("isFatal = true, customRecommendedAction = 'X'"),
            "f:5: rule 'r': customRecommendedAction stands",
        ),
        (
            of_overrides,
            when("event.isFatl"),
            "f:4: rule 'r': when unknown field 'isFatl' of 'event'; did you mean",
        ),
        (
            of_overrides,
            when("event.agent"),
            "f:4: rule 'r': when gives a string",
        ),
        (
            of_overrides,
            when("node.metadata.name == 'n'"),
            "f:4: rule 'r': when unknown variable 'node'",
        ),
        (
            of_overrides,
            when("event.agent =="),
            "f:4: rule 'r': when does not parse",
        ),
        (
            of_overrides,
            when(&format!("event.agent == '{}'", "x".repeat(4096))),
            "f:4: rule 'r': when has 41",
        ),
        (
            of_dedup,
            "suppressionWindow = '3 parsecs'".into(),
            "f:1: suppressionWindow is '3 parsecs'; write a duration",
        ),
        (
            of_dedup,
            "suppressionWindow = '0s'".into(),
            "f:1: suppressionWindow is '0s'",
        ),
        (
            of_dedup,
            "\n\ncleanupInterval = '25h'".into(),
            "f:3: cleanupInterval is '25h'; write a duration above zero such as 90s, 3m or 1h, at most 24h",
        ),
        (
            of_dedup,
            "includeCheck = []".into(),
            "f:1: unknown key 'includeCheck'; did you mean 'includeChecks'?",
        ),
    ];
    for (load, text, expected) in table {
        let error = load(&text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}\n{error}");
    }
}

#[test]
fn all_findings_are_told_at_once() {
    let text = "enabled = true\n[[rules]]\nname = 'a'\nwhen = 'event.x'\noverride = { isFatal = true }\n\
                [[rules]]\nname = 'b'\nwhen = 'true'\noverride = { recommendedAction = 'NO' }\n";
    let error = overrides(text, "f").unwrap_err();
    assert_eq!(error.findings.len(), 2, "{error}");
}
