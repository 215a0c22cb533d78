use serde_json::json;

use super::*;

fn event(state: &str) -> Value {
    json!({
        "id": "ocid1.instancemaintenanceevent.oc1.phx.e",
        "instanceId": "ocid1.instance.oc1.phx.i",
        "compartmentId": "ocid1.compartment.oc1..c",
        "maintenanceCategory": "FLEXIBLE",
        "maintenanceReason": "HARDWARE_REPLACEMENT",
        "instanceAction": "REBOOT_MIGRATION",
        "lifecycleState": state,
        "timeWindowStart": "2026-03-02T10:00:00.123Z",
        "startWindowDuration": "PT24H",
        "estimatedDuration": "P1DT30M",
        "canReschedule": true,
        "timeCreated": "2026-02-20T10:00:00Z",
    })
}

fn with(key: &str, value: Value) -> Value {
    let mut event = event("SCHEDULED");
    event[key] = value;
    event
}

fn parse(events: &Value) -> Events {
    Events::parse(events.to_string().as_bytes()).unwrap()
}

fn notice(event: &Value) -> Notice {
    let mut page = parse(&json!([event]));
    assert_eq!(page.odd, 0, "{page:?}");
    page.announced.pop().unwrap().notice
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

#[test]
fn an_event_is_a_notice_with_its_own_id() {
    let page = parse(&json!([event("SCHEDULED")]));
    let ocid = "ocid1.instance.oc1.phx.i";
    assert_eq!(page.announced[0].instance, Instance::oci(ocid));
    let notice = &page.announced[0].notice;
    assert_eq!(notice.event, "ocid1.instancemaintenanceevent.oc1.phx.e");
    assert_eq!(notice.resource, ("oci_instance".into(), ocid.into()));
    assert_eq!(
        (notice.phase, notice.kind),
        (Phase::Scheduled, Kind::Reboot)
    );
    assert_eq!((&*notice.word, notice.updated), ("SCHEDULED", None));
    assert_eq!(notice.start, Some(at("2026-03-02T10:00:00.123Z")));
    // The window of a day, then the work of a day and half an hour.
    assert_eq!(notice.end, Some(at("2026-03-04T10:30:00.123Z")));
    assert!(!notice.emergency);
}

#[test]
fn words_are_phases_and_kinds_and_unknown_ones_are_kept() {
    for (state, phase) in [
        ("SCHEDULED", Phase::Scheduled),
        ("STARTED", Phase::Ongoing),
        ("PROCESSING", Phase::Ongoing),
        ("SUCCEEDED", Phase::Completed),
        ("FAILED", Phase::Completed),
        ("CANCELED", Phase::Cancelled),
        ("DEFERRED", Phase::Scheduled),
    ] {
        let notice = notice(&event(state));
        assert_eq!((notice.phase, &*notice.word), (phase, state));
    }
    for (action, kind) in [
        ("REBOOT_MIGRATION", Kind::Reboot),
        ("TERMINATE", Kind::Stop),
        ("STOP", Kind::Stop),
        ("SOMETHING_NEW", Kind::Reboot),
    ] {
        assert_eq!(notice(&with("instanceAction", json!(action))).kind, kind);
    }
    assert!(notice(&with("maintenanceCategory", json!("EMERGENCY"))).emergency);
    let none = parse(&json!([with("instanceAction", json!("NONE"))]));
    assert_eq!(none, Events::default());
}

#[test]
fn the_true_times_come_before_the_scheduled_ones() {
    let mut over = event("SUCCEEDED");
    over["timeStarted"] = json!("2026-03-02T11:00:00Z");
    over["timeFinished"] = json!("2026-03-02T12:00:00Z");
    let over = notice(&over);
    assert_eq!(over.start, Some(at("2026-03-02T11:00:00Z")));
    assert_eq!(over.end, Some(at("2026-03-02T12:00:00Z")));
    for duration in [json!(null), json!("a day"), json!("P9999Y"), json!("P1M")] {
        assert_eq!(notice(&with("startWindowDuration", duration)).end, None);
    }
    assert_eq!(
        notice(&with("estimatedDuration", json!(null))).end,
        Some(at("2026-03-03T10:00:00.123Z"))
    );
}

#[test]
fn an_event_that_is_not_understood_leaves_its_instance_unseen() {
    let page = parse(&json!([
        with("id", json!(7)),
        with("lifecycleState", json!(null)),
        with("timeWindowStart", json!("soon")),
        with("timeWindowStart", json!(1_772_000_000)),
    ]));
    assert_eq!(
        page.unseen,
        vec![Instance::oci("ocid1.instance.oc1.phx.i"); 4]
    );
    assert_eq!(
        (page.announced.len(), page.odd, page.partial),
        (0, 4, false)
    );
    for nameless in [
        json!([{}]),
        json!([null]),
        json!([with("instanceId", json!([]))]),
    ] {
        let page = parse(&nameless);
        assert_eq!((page.odd, page.partial), (1, true), "{nameless}");
    }
    let mut begun = event("STARTED");
    begun["timeWindowStart"] = json!("soon");
    assert_eq!(notice(&begun).start, None);
}

#[test]
fn a_page_of_another_form_is_an_error() {
    for body in ["", "{}", "[{\"id\": \"x", "null", "7"] {
        assert!(Events::parse(body.as_bytes()).is_err(), "{body}");
    }
    assert_eq!(Events::parse(b"[]").unwrap(), Events::default());
}
