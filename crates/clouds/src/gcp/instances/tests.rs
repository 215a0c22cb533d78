use serde_json::json;

use super::*;

fn instance(name: &str, upcoming: &Value) -> Value {
    let base = "https://www.googleapis.com/compute/v1/projects/p/zones/z/instances";
    json!({
        "id": "17",
        "selfLink": format!("{base}/{name}"),
        "resourceStatus": {"upcomingMaintenance": upcoming},
        "scheduling": {"onHostMaintenance": "TERMINATE"},
    })
}

fn parse(page: &Value) -> Instances {
    Instances::parse(page.to_string().as_bytes()).unwrap()
}

fn of_zone(instances: &Value) -> Instances {
    parse(&json!({"items": {"zones/z": {"instances": instances}}}))
}

#[test]
fn each_instance_with_a_maintenance_is_a_notice() {
    let upcoming = json!({
        "type": "UNSCHEDULED",
        "canReschedule": false,
        "windowStartTime": "2026-03-02T10:00:00Z",
        "windowEndTime": "2026-03-02T14:00:00Z",
        "latestWindowStartTime": "2026-03-02T10:00:00Z",
        "maintenanceStatus": "ONGOING",
        "maintenanceReasons": ["FAILURE_GPU_XID"],
    });
    let mut moves = instance("b", &json!({"maintenanceStatus": "PENDING"}));
    moves["scheduling"]["onHostMaintenance"] = json!("MIGRATE");
    let page = parse(&json!({
        "items": {
            "zones/z": {"instances": [instance("a", &upcoming), moves]},
            "zones/y": {"warning": {"code": "NO_RESULTS_ON_PAGE"}},
        },
        "nextPageToken": "t2",
    }));
    assert_eq!((page.partial, page.odd, &*page.next), (false, 0, "t2"));
    let [a, b] = &page.announced[..] else {
        panic!("{page:?}")
    };
    assert_eq!(a.instance, Instance::gcp("p", "z", "a", "17"));
    assert_eq!(
        (a.notice.phase, a.notice.kind),
        (Phase::Ongoing, Kind::Reboot)
    );
    assert!(a.notice.emergency);
    assert_eq!(a.notice.start, "2026-03-02T10:00:00Z".parse().ok());
    assert_eq!(a.notice.end, "2026-03-02T14:00:00Z".parse().ok());
    assert_eq!(a.notice.updated, None);
    assert_eq!(
        (b.notice.phase, b.notice.kind),
        (Phase::Scheduled, Kind::Migration)
    );
}

#[test]
fn instances_without_a_maintenance_are_none() {
    let quiet = json!([
        {"id": "1", "resourceStatus": {}},
        {"id": "2"},
        {"resourceStatus": {"upcomingMaintenance": null}},
        5,
        "text",
    ]);
    assert_eq!(of_zone(&quiet), Instances::default());
    assert_eq!(parse(&json!({})), Instances::default());
}

#[test]
fn a_maintenance_that_is_not_understood_leaves_its_instance_unseen() {
    let page = of_zone(&json!([
        instance("a", &json!("PENDING")),
        instance("b", &json!({"windowStartTime": "soon"})),
        instance("c", &json!({"maintenanceStatus": 1})),
    ]));
    let of = |name| Instance::gcp("p", "z", name, "17");
    assert_eq!(page.unseen, [of("a"), of("b"), of("c")]);
    assert_eq!((page.odd, page.partial), (3, false));
    // The begin of one that has begun does not matter.
    let begun = json!({"maintenanceStatus": "ONGOING", "windowStartTime": "soon"});
    assert_eq!(of_zone(&json!([instance("a", &begun)])).announced.len(), 1);
    // Nobody knows whose it is.
    let nameless = json!([{"resourceStatus": {"upcomingMaintenance": {}}}]);
    let page = of_zone(&nameless);
    assert_eq!((page.odd, page.partial), (1, true));
}

#[test]
fn a_page_without_a_zone_is_partial() {
    for page in [
        json!({"unreachables": ["zones/z"]}),
        json!({"items": {"zones/z": {"warning": {"code": "UNREACHABLE"}}}}),
        json!({"warning": {"code": "PARTIAL_SUCCESS"}}),
    ] {
        assert!(parse(&page).partial, "{page}");
    }
}

#[test]
fn a_page_of_another_form_is_an_error() {
    for body in [
        "",
        r#"{"items": ["#,
        r#"{"items": []}"#,
        r#"{"items": {"zones/z": []}}"#,
        r#"{"items": {"zones/z": {"instances": {}}}}"#,
        r#"{"nextPageToken": null}"#,
    ] {
        assert!(Instances::parse(body.as_bytes()).is_err(), "{body}");
    }
}
