use super::*;

const MACHINE: Machine<'static> = Machine {
    node: "gpu-1",
    id: "i-0abc",
};

fn shown(notice: &Notice) -> String {
    let time = |time: Option<jiff::Timestamp>| time.map_or("-".to_owned(), |time| time.to_string());
    format!(
        "{} {} {}/{} {} {} [{}] {}..{} {}",
        notice.node,
        notice.event,
        notice.provider,
        notice.resource.1,
        notice.kind.name(),
        notice.phase.name(),
        notice.word,
        time(notice.start),
        time(notice.end),
        notice.emergency,
    )
}

#[test]
fn events_of_ec2_are_read() {
    let document = br#"[
        {"NotBefore": "21 Jan 2026 09:00:43 GMT", "Code": "system-reboot",
         "Description": "scheduled reboot", "EventId": "instance-event-1",
         "NotAfter": "21 Jan 2026 09:17:23 GMT", "State": "active"},
        {"NotBefore": "22 Jan 2026 09:00:00 GMT", "Code": "instance-retirement",
         "Description": "The instance is running on degraded hardware",
         "EventId": "instance-event-2", "State": "active", "NewKey": 1},
        {"NotBefore": "22 Jan 2026 10:00:00 GMT", "Code": "system-maintenance",
         "Description": "Network Maintenance", "EventId": "instance-event-5", "State": "active"},
        {"NotBefore": "20 Jan 2026 09:00:00 GMT", "Code": "instance-stop",
         "Description": "[Canceled] x", "EventId": "instance-event-3", "State": "canceled"},
        {"NotBefore": "", "Code": "x-new", "EventId": "instance-event-4", "State": "completed"}]"#;
    let notices = ec2(MACHINE, document).unwrap();
    let shown: Vec<String> = notices.iter().map(shown).collect();
    assert_eq!(
        shown,
        [
            "gpu-1 instance-event-1 aws/i-0abc reboot scheduled [system-reboot active] \
             2026-01-21T09:00:43Z..2026-01-21T09:17:23Z false",
            "gpu-1 instance-event-2 aws/i-0abc replacement scheduled [instance-retirement active] \
             2026-01-22T09:00:00Z..- false",
            "gpu-1 instance-event-5 aws/i-0abc network scheduled [system-maintenance active] \
             2026-01-22T10:00:00Z..- false",
            "gpu-1 instance-event-3 aws/i-0abc stop cancelled [instance-stop canceled] \
             2026-01-20T09:00:00Z..- false",
            "gpu-1 instance-event-4 aws/i-0abc reboot completed [x-new completed] -..- false",
        ]
    );
    assert!(ec2(MACHINE, b"[]").unwrap().is_empty());
}

#[test]
fn events_of_azure_are_those_of_the_machine() {
    let document = br#"{"DocumentIncarnation": 2, "Events": [
        {"EventId": "A-1", "EventType": "Reboot", "ResourceType": "VirtualMachine",
         "Resources": ["other", "I-0ABC"], "EventStatus": "Scheduled",
         "NotBefore": "Mon, 19 Jan 2026 18:29:47 GMT", "DurationInSeconds": 600},
        {"EventId": "A-2", "EventType": "Freeze", "ResourceType": "VirtualMachine",
         "Resources": ["i-0abc"], "EventStatus": "Started", "NotBefore": "",
         "DurationInSeconds": 5},
        {"EventId": "A-3", "EventType": "Vanish", "Resources": ["i-0abc"],
         "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Jan 2026 18:29:47 GMT",
         "DurationInSeconds": -1},
        {"EventId": "A-4", "EventType": "Reboot", "Resources": ["other"],
         "NotBefore": "nonsense"}]}"#;
    let notices = azure(MACHINE, document).unwrap();
    let shown: Vec<String> = notices.iter().map(shown).collect();
    assert_eq!(
        shown,
        [
            "gpu-1 A-1 azure/i-0abc reboot scheduled [Reboot Scheduled] \
             2026-01-19T18:29:47Z..2026-01-19T18:39:47Z false",
            "gpu-1 A-2 azure/i-0abc migration ongoing [Freeze Started] -..- false",
            "gpu-1 A-3 azure/i-0abc reboot scheduled [Vanish Scheduled] \
             2026-01-19T18:29:47Z..- false",
        ]
    );
    let none = br#"{"DocumentIncarnation": 1, "Events": []}"#;
    assert!(azure(MACHINE, none).unwrap().is_empty());
}

#[test]
fn both_notices_of_gcp_are_one() {
    let pending = br#"{"can_reschedule": "true", "maintenance_status": "PENDING",
        "latest_window_start_time": "2026-01-19T20:00:00Z", "type": "SCHEDULED",
        "window_start_time": "2026-01-19T18:00:00Z", "window_end_time": "2026-01-19T22:00:00Z"}"#;
    let read = |event: &str, upcoming: &[u8]| {
        let notice = gcp(MACHINE, event, upcoming).unwrap();
        notice.map_or("none".to_owned(), |notice| shown(&notice))
    };
    let window = "2026-01-19T18:00:00Z..2026-01-19T22:00:00Z false";
    assert_eq!(
        read("NONE", pending),
        format!("gpu-1  gcp/i-0abc reboot scheduled [PENDING] {window}")
    );
    assert_eq!(
        read("TERMINATE_ON_HOST_MAINTENANCE\n", pending),
        format!("gpu-1  gcp/i-0abc reboot ongoing [TERMINATE_ON_HOST_MAINTENANCE] {window}")
    );
    assert_eq!(
        read("MIGRATE_ON_HOST_MAINTENANCE", b"{}"),
        "gpu-1  gcp/i-0abc migration ongoing [MIGRATE_ON_HOST_MAINTENANCE] -..- false"
    );
    assert_eq!(
        read(
            "NONE",
            br#"{"maintenance_status": "ONGOING", "type": "UNSCHEDULED"}"#
        ),
        "gpu-1  gcp/i-0abc reboot ongoing [ONGOING] -..- true"
    );
    let error: &[u8] = br#"{ "error": "no notifications have been received yet" }"#;
    for none in [error, b"", b"NONE", b"\"NONE\"", b"{}"] {
        assert_eq!(read("NONE", none), "none");
    }
}

#[test]
fn what_cannot_be_understood_is_no_notice() {
    let no_time =
        br#"[{"EventId": "e", "Code": "system-reboot", "State": "active", "NotBefore": "?"}]"#;
    let error = ec2(MACHINE, no_time).unwrap_err();
    assert_eq!(error, "event e: NotBefore \"?\" is no time");
    for document in [&b"<html>"[..], b"", b"{}", b"[{}]", b"[1", b"null", b"\xff"] {
        assert!(ec2(MACHINE, document).is_err(), "{document:?}");
    }
    let no_time =
        br#"{"Events": [{"EventId": "e", "EventType": "Reboot", "Resources": ["i-0abc"], "NotBefore": "?"}]}"#;
    assert!(azure(MACHINE, no_time).is_err());
    for document in [&b"[]"[..], b"{}", b"{\"Events\": [{}]}", b"{\"Events\": 3}"] {
        assert!(azure(MACHINE, document).is_err(), "{document:?}");
    }
    assert!(gcp(MACHINE, "NONE", br#"{"maintenance_status": "PENDING"}"#).is_err());
    for document in [&b"<html>"[..], b"[ \"x\" ]", b"{\"type\": 1}"] {
        assert!(gcp(MACHINE, "NONE", document).is_err(), "{document:?}");
    }
}

#[test]
fn the_longest_duration_has_no_end() {
    let document = format!(
        r#"{{"Events": [{{"EventId": "e", "EventType": "Reboot", "Resources": ["i-0abc"],
            "NotBefore": "Mon, 19 Jan 2026 18:29:47 GMT", "DurationInSeconds": {}}}]}}"#,
        i64::MAX
    );
    assert_eq!(azure(MACHINE, document.as_bytes()).unwrap()[0].end, None);
}
