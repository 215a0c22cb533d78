use serde_json::json;

use super::*;

const NOW: &str = "2026-03-01T00:00:00Z";

fn parse(entries: &Value) -> Entries {
    let page = json!({"entries": entries, "nextPageToken": "t2"}).to_string();
    Entries::parse(page.as_bytes(), NOW.parse().unwrap()).unwrap()
}

/// Returns an entry of a method, with `metadata` of its payload.
fn entry(method: &str, metadata: &Value) -> Value {
    json!({
        "insertId": "-abc",
        "timestamp": "2026-02-28T10:00:00.5Z",
        "logName": "projects/p/logs/cloudaudit.googleapis.com%2Fsystem_event",
        "resource": {
            "type": "gce_instance",
            "labels": {"instance_id": "17", "project_id": "p", "zone": "z"},
        },
        "protoPayload": {
            "@type": "type.googleapis.com/google.cloud.audit.AuditLog",
            "methodName": method,
            "resourceName": "projects/p/zones/z/instances/gpu-7",
            "metadata": metadata,
        },
    })
}

fn window(status: &str) -> Value {
    json!({
        "@type": "type.googleapis.com/x",
        "maintenanceStatus": status,
        "type": "SCHEDULED",
        "windowStartTime": "2026-03-02T10:00:00-08:00",
        "windowEndTime": "2026-03-02T22:00:00Z",
        "canReschedule": true,
    })
}

#[test]
fn an_entry_has_all_of_an_announced_maintenance() {
    let page = parse(&json!([entry(UPCOMING, &window("PENDING"))]));
    let [Announced { instance, notice }] = &page.announced[..] else {
        panic!("{page:?}")
    };
    assert_eq!((page.odd, &*page.next), (0, "t2"));
    assert_eq!(*instance, Instance::gcp("p", "z", "gpu-7", "17"));
    assert_eq!(notice.phase, Phase::Scheduled);
    assert_eq!(notice.kind, Kind::Reboot);
    assert_eq!(notice.word, "PENDING");
    assert_eq!(notice.resource, ("gce_instance".into(), "17".into()));
    assert_eq!((&*notice.node, &*notice.event), ("", ""));
    let time = |text: &str| Some(text.parse::<Timestamp>().unwrap());
    assert_eq!(notice.start, time("2026-03-02T18:00:00Z"));
    assert_eq!(notice.end, time("2026-03-02T22:00:00Z"));
    assert_eq!(notice.updated, time("2026-02-28T10:00:00.5Z"));
    assert!(!notice.emergency);
}

#[test]
fn the_phase_is_read_from_status_message_and_operation() {
    let ended = |mut entry: Value| {
        entry["protoPayload"]["status"] =
            json!({"message": "Maintenance window has completed for this instance."});
        entry
    };
    let over = |mut entry: Value| {
        entry["operation"] = json!({"id": "o", "first": true, "last": true});
        entry
    };
    let upcoming = |status: &str| entry(UPCOMING, &window(status));
    let bare = |method: &str| entry(method, &json!({}));
    for (entry, phase, word) in [
        (upcoming("PENDING"), Phase::Scheduled, "PENDING"),
        (upcoming("ONGOING"), Phase::Ongoing, "ONGOING"),
        (upcoming("ACTIVE"), Phase::Ongoing, "ACTIVE"),
        (upcoming("COMPLETED"), Phase::Completed, "COMPLETED"),
        (upcoming("CANCELLED"), Phase::Cancelled, "CANCELLED"),
        (upcoming("CANCELED"), Phase::Cancelled, "CANCELED"),
        (upcoming("POSTPONED"), Phase::Scheduled, "POSTPONED"),
        (upcoming(""), Phase::Scheduled, "PENDING"),
        (over(upcoming("PENDING")), Phase::Scheduled, "PENDING"),
        (ended(upcoming("ONGOING")), Phase::Completed, "COMPLETED"),
        (ended(bare(UPCOMING_INFRA)), Phase::Completed, "COMPLETED"),
        (bare(TERMINATES), Phase::Ongoing, "ACTIVE"),
        (ended(bare(TERMINATES)), Phase::Ongoing, "ACTIVE"),
        (over(bare(TERMINATES)), Phase::Completed, "COMPLETED"),
        (over(bare(MIGRATES)), Phase::Completed, "COMPLETED"),
    ] {
        let page = parse(&json!([entry]));
        let notice = &page.announced[0].notice;
        assert_eq!((notice.phase, &*notice.word), (phase, word), "{entry}");
    }
    let kind = |method: &str| parse(&json!([bare(method)])).announced[0].notice.kind;
    assert_eq!(kind(MIGRATES), Kind::Migration);
    assert_eq!(kind(TERMINATES), Kind::Reboot);
    let mut emergency = upcoming("PENDING");
    emergency["protoPayload"]["metadata"]["type"] = json!("UNSCHEDULED");
    assert!(parse(&json!([emergency])).announced[0].notice.emergency);
}

#[test]
fn what_says_nothing_now_is_left_out_and_what_is_not_understood_is_counted() {
    let mut past = window("PENDING");
    past["windowEndTime"] = json!("2026-02-28T23:59:59Z");
    let mut ended = past.clone();
    ended["maintenanceStatus"] = json!("COMPLETED");
    let quiet = json!([
        entry(UPCOMING, &past),
        entry("compute.instances.preempted", &json!({})),
        {"textPayload": "a line of another log"},
        7,
        null,
    ]);
    let page = parse(&quiet);
    assert_eq!((page.announced.len(), page.odd), (0, 0), "{page:?}");
    // An end is taken whatever the window was.
    assert_eq!(parse(&json!([entry(UPCOMING, &ended)])).announced.len(), 1);

    let with = |key: &str, value: Value| {
        let mut entry = entry(UPCOMING, &window("PENDING"));
        *entry.pointer_mut(key).unwrap() = value;
        entry
    };
    let metadata = |key: &str, value: Value| {
        let mut metadata = window("PENDING");
        metadata[key] = value;
        entry(UPCOMING, &metadata)
    };
    let odd = json!([
        with("/timestamp", json!("yesterday")),
        with("/resource", json!({"type": "gce_disk", "labels": {}})),
        with("/resource/labels", json!({"zone": 7})),
        with("/protoPayload/metadata", json!("PENDING")),
        metadata("windowStartTime", json!("soon")),
        metadata("windowStartTime", json!(1_772_000_000)),
        metadata("maintenanceStatus", json!({})),
    ]);
    let page = parse(&odd);
    assert_eq!(page.announced, [], "{page:?}");
    assert_eq!(page.odd, 7);
    let mut nameless = with("/resource/labels", json!({"instance_id": "17"}));
    nameless["protoPayload"]["resourceName"] = json!("projects/p");
    assert_eq!(parse(&json!([nameless])).odd, 1, "no zone");
}

#[test]
fn a_page_of_another_form_is_an_error() {
    let now = NOW.parse().unwrap();
    for body in [
        "",
        "{",
        "[]",
        r#"{"entries": {}}"#,
        r#"{"entries": [], "nextPageToken": 7}"#,
        r#"{"entries": [{"timestamp"#,
    ] {
        assert!(Entries::parse(body.as_bytes(), now).is_err(), "{body}");
    }
    let deep = "[".repeat(100_000);
    let page = format!("{{\"entries\": {deep}");
    assert!(Entries::parse(page.as_bytes(), now).is_err());
    assert_eq!(Entries::parse(b"{}", now).unwrap(), Entries::default());
}

#[test]
fn the_own_filter_names_the_log_and_all_methods() {
    let filter = default_filter();
    for method in [UPCOMING, UPCOMING_INFRA, TERMINATES, MIGRATES] {
        assert!(filter.contains(&format!("\"{method}\"")), "{filter}");
    }
    assert!(filter.contains("system_event"), "{filter}");
}
