//! Descriptions of machines by BMCs, and the detection of resets.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::*;
use crate::janitor::{Class, JanitorConfig, ProviderFailure};

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn machine(power: &str, allowed: &Value) -> Value {
    json!({
        "@odata.id": "/redfish/v1/Systems/1",
        "PowerState": power,
        "LastResetTime": "2026-11-20T08:00:00+00:00",
        "LogServices": {"@odata.id": "/redfish/v1/Systems/1/LogServices"},
        "Actions": {"#ComputerSystem.Reset": {
            "target": "/redfish/v1/Systems/1/Actions/ComputerSystem.Reset",
            "ResetType@Redfish.AllowableValues": allowed,
        }},
    })
}

#[test]
fn the_reset_is_the_strongest_that_the_machine_takes() {
    let all = json!([
        "On",
        "ForceOff",
        "GracefulRestart",
        "ForceRestart",
        "PowerCycle"
    ]);
    let some = json!(["On", "ForceOff", "ForceRestart", "GracefulRestart", "Nmi"]);
    for (power, allowed, wanted) in [
        ("On", &all, "PowerCycle"),
        ("On", &some, "ForceRestart"),
        ("Off", &all, "On"),
        ("PoweringOff", &some, "ForceRestart"),
        ("On", &Value::Null, "ForceRestart"),
        ("Off", &Value::Null, "On"),
    ] {
        let machine = ComputerSystem::read(&machine(power, allowed)).unwrap();
        assert_eq!(machine.reset_type().unwrap(), wanted, "{power} {allowed}");
    }
    let gentle = ComputerSystem::read(&machine("On", &json!(["GracefulRestart"]))).unwrap();
    assert_eq!(
        gentle.reset_type().unwrap_err(),
        "the machine takes none of the resets PowerCycle, ForceRestart, but GracefulRestart"
    );
}

#[test]
fn the_types_may_stand_in_a_description_of_the_action() {
    let mut object = machine("On", &Value::Null);
    let reset = &mut object["Actions"]["#ComputerSystem.Reset"];
    reset["@Redfish.ActionInfo"] = json!("/redfish/v1/Systems/1/ResetActionInfo");
    let mut machine = ComputerSystem::read(&object).unwrap();
    assert!(machine.says_no_types());
    assert_eq!(
        machine.action_info.as_deref(),
        Some("/redfish/v1/Systems/1/ResetActionInfo")
    );
    machine.learn_types(&json!({"Parameters": [
        {"Name": "Other"},
        {"Name": "ResetType", "AllowableValues": ["ForceRestart", "PowerCycle"]},
    ]}));
    assert_eq!(machine.reset_type().unwrap(), "PowerCycle");
}

#[test]
fn what_is_no_machine_says_so() {
    for object in [json!(null), json!([]), json!({"Actions": {}})] {
        let error = ComputerSystem::read(&object).unwrap_err();
        assert_eq!(error, "the machine has no action #ComputerSystem.Reset");
    }
    assert!(members_of(&json!({"Members": "many"})).is_empty());
}

/// Logs of several vendors, each with the expected boot and critical entries.
#[test]
fn a_log_tells_of_boots_and_of_what_was_wrong() {
    for (name, text, boot, critical) in [
        (
            "ipmi",
            include_str!("tests/sel-ipmi.json"),
            Some("2026-11-20T08:01:12Z"),
            vec!["Power Supply 2 : Power Supply input lost (AC/DC)"],
        ),
        (
            "dell",
            include_str!("tests/sel-dell.json"),
            Some("2026-11-21T02:14:55Z"),
            vec!["A fatal error was detected on a component at bus 202 device 0 function 0."],
        ),
        (
            "hpe",
            include_str!("tests/iml-hpe.json"),
            Some("2026-11-19T23:40:02Z"),
            vec![
                "Uncorrectable Machine Check Exception (Processor 1, APIC ID 0x00000010, Bank 0x0000000D)",
            ],
        ),
        (
            "openbmc",
            include_str!("tests/eventlog-openbmc.json"),
            Some("2026-11-22T11:05:31Z"),
            vec![],
        ),
        (
            "no times",
            r#"{"Members": [{"SensorType": "System Boot / Restart Initiated", "Created": "yesterday"}]}"#,
            None,
            vec![],
        ),
        (
            "rubbish",
            r#"{"Members": [3, null, {"Created": 7}]}"#,
            None,
            vec![],
        ),
        ("nothing", "[]", None, vec![]),
    ] {
        let mut log = Log::default();
        log.read(&serde_json::from_str(text).unwrap());
        assert_eq!(log.last_boot, boot.map(at), "{name}");
        let critical_entries: Vec<&str> =
            log.critical.iter().map(|(_, what)| what.as_str()).collect();
        assert_eq!(critical_entries, critical, "{name}");
    }
}

#[test]
fn the_log_is_the_sel_where_there_is_one() {
    let of = |paths: &[&str]| {
        let paths: Vec<String> = paths.iter().map(|&path| path.to_owned()).collect();
        log_of(&paths).cloned()
    };
    assert_eq!(
        of(&["/l/Lclog", "/l/Sel", "/l/FaultList"]).as_deref(),
        Some("/l/Sel")
    );
    assert_eq!(of(&["/l/Event", "/l/IML"]).as_deref(), Some("/l/IML"));
    assert_eq!(
        of(&["/l/PostCodes", "/l/EventLog"]).as_deref(),
        Some("/l/EventLog")
    );
    assert_eq!(of(&["/l/PostCodes"]), None);
}

#[test]
fn a_record_knows_its_operation_and_the_boot() {
    let record = PowerCycleRecord {
        operation: "op-1".to_owned(),
        boot_id: "boot-1".to_owned(),
        last_reset: None,
        last_boot: None,
        at: at("2026-11-25T10:00:00Z"),
    };
    let text = serde_json::to_string(&record).unwrap();
    assert_eq!(
        PowerCycleRecord::read(Some(&text), "op-1").as_ref(),
        Some(&record)
    );
    assert_eq!(PowerCycleRecord::read(Some(&text), "op-2"), None);
    assert_eq!(PowerCycleRecord::read(Some("{"), "op-1"), None);
    assert_eq!(PowerCycleRecord::read(None, "op-1"), None);
    assert!(record.booted("boot-2"));
    assert!(!record.booted("boot-1") && !record.booted(""));
}

#[test]
fn only_a_witness_says_that_a_machine_was_reset_or_not() {
    use SignalEffect::{NotReset, Reset, TooSoon, Unknown};
    let (old, new) = ("2026-11-20T08:00:00Z", "2026-11-25T10:00:40Z");
    let noted = at("2026-11-25T10:00:00Z");
    for (before, after, boot_before, boot_after, seconds, wanted) in [
        // Evidence from the machine itself.
        (Some(old), Some(new), None, None, 1, Reset),
        (Some(old), Some(old), None, None, 119, TooSoon),
        (Some(old), Some(old), None, None, 121, NotReset),
        // A clock that was set back does not make the record old.
        (Some(old), Some(old), None, None, -10, TooSoon),
        // Evidence from the log.
        (None, None, Some(old), Some(new), 1, Reset),
        (None, None, None, Some(new), 1, Reset),
        (Some(old), Some(old), Some(old), Some(new), 121, Reset),
        // A log without entries proves nothing.
        (None, None, Some(old), Some(old), 121, Unknown),
        (None, None, Some(old), None, 121, Unknown),
        (None, Some(new), None, None, 121, Unknown),
        (Some(old), None, None, None, 121, Unknown),
        (None, None, None, None, 1, TooSoon),
    ] {
        let record = PowerCycleRecord {
            operation: "op".to_owned(),
            boot_id: "boot".to_owned(),
            last_reset: before.map(str::to_owned),
            last_boot: boot_before.map(at),
            at: noted,
        };
        let mut machine = ComputerSystem::read(&machine("On", &Value::Null)).unwrap();
        machine.last_reset = after.map(str::to_owned);
        let log = Log {
            last_boot: boot_after.map(at),
            critical: Vec::new(),
        };
        let now = noted + SignedDuration::from_secs(seconds);
        let case = (before, after, boot_before, boot_after, seconds);
        assert_eq!(record.verdict(&machine, &log, now), wanted, "{case:?}");
    }
}

fn wrong(config: &str) -> String {
    let text = format!("redfish:\n  {}\n", config.trim_end().replace('\n', "\n  "));
    let error = JanitorConfig::parse(&text, "j").err();
    error.map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn a_configuration_says_what_is_wrong_with_it() {
    for good in [
        "{}",
        "address: https://{node}-bmc.example.net\ncaPath: /ca.crt\n",
        "address: http://{node}.bmc:8000/\n",
        "addresses: {gpu-1: 'https://[fd00::7]:8443'}\ninsecureSkipVerify: true\nusernamePath: /u\npasswordPath: /p\n",
    ] {
        assert_eq!(wrong(good), "", "{good}");
    }
    for (bad, part) in [
        ("caPath: /ca.crt", "j:1: redfish.address: it is missing"),
        (
            "address: http://bmc",
            "redfish.address is http://bmc; that is the same for each node",
        ),
        ("address: '{node}-bmc'", "https://HOST"),
        ("address: 'http://{node}/redfish/v1'", "https://HOST"),
        ("addresses: {a: ftp://b}", "redfish.addresses.a is"),
        ("address: 'https://{node}'", "redfish.caPath: it is missing"),
        (
            "address: 'http://{node}'\nusernamePath: /u",
            "belong together",
        ),
        (
            "address: 'http://{node}'\nsystem: Systems/1",
            "j:3: redfish.system is Systems/1; write a path",
        ),
    ] {
        let wrong = wrong(bad);
        assert!(wrong.contains(part), "{bad}: {wrong}");
    }
}

#[test]
fn the_address_of_a_node_is_its_own_or_that_of_all() {
    let config = "address: 'http://{node}.bmc'\naddresses: {gpu-2: 'http://10.0.0.2'}\n";
    let config: RedfishConfig = serde_saphyr::from_str(config).unwrap();
    assert_eq!(
        config.address_of("gpu-1").as_deref(),
        Some("http://gpu-1.bmc")
    );
    assert_eq!(
        config.address_of("gpu-2").as_deref(),
        Some("http://10.0.0.2")
    );
    let config: RedfishConfig =
        serde_saphyr::from_str("addresses: {gpu-2: 'http://10.0.0.2'}\n").unwrap();
    assert_eq!(config.address_of("gpu-1"), None);
}

#[test]
fn a_path_names_no_other_host() {
    for good in [
        "/redfish/v1/Systems/1",
        "/redfish/v1/Systems/1/Actions/ComputerSystem.Reset",
        "/redfish/v1/Systems/1/LogServices/SEL/Entries?$skip=50&$top=50",
        "/redfish/v1/Chassis/1/Power#/PowerSupplies/0",
        "/",
    ] {
        assert!(is_path(good), "{good}");
    }
    for bad in [
        "",
        "@10.0.0.2/redfish/v1/Systems/1",
        ".evil.example/redfish/v1/Systems/1",
        ":1@10.0.0.2/redfish/v1/Systems/1",
        "//10.0.0.2/redfish/v1/Systems/1",
        "/\\10.0.0.2/redfish",
        "http://10.0.0.2/redfish/v1/Systems/1",
        "redfish/v1/Systems/1",
        "/redfish/v1 HTTP/1.1",
        "/redfish\r\nHost: 10.0.0.2",
        "/redfish/v1/Systems/\u{e9}",
    ] {
        assert!(!is_path(bad), "{bad:?}");
    }
}

#[test]
fn what_a_bmc_says_at_length_is_cut() {
    let long = "x".repeat(1_000_000);
    let mut log = Log::default();
    log.read(&json!({"Members": [
        {"Created": "2026-11-20T08:00:00Z", "Severity": "Critical", "Message": long}]}));
    assert_eq!(log.critical[0].1.len(), 200);
    let mut object = machine("On", &json!([long]));
    object["LastResetTime"] = json!(long);
    let machine = ComputerSystem::read(&object).unwrap();
    assert_eq!(machine.last_reset, None);
    let failure = ProviderFailure::new(Class::Permanent, "X", machine.reset_type().unwrap_err());
    assert_eq!(failure.message.len(), 1000);
}
