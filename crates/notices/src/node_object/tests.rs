use serde_json::{Value, json};

use super::*;

fn node(object: Value) -> NodeView {
    let mut object = object;
    object["metadata"]["name"] = "n".into();
    NodeView::from_object(object).unwrap()
}

/// Returns the only notice of a node; `Err` if nothing can be said about it.
fn read_one(object: Value) -> Result<Option<Notice>, u64> {
    let (mut reading, odd) = read([node(object)].iter());
    assert!(reading.complete);
    if reading.unseen.contains("n") {
        assert!(reading.notices.is_empty());
        return Err(odd);
    }
    assert!(reading.notices.len() < 2 && odd == 0);
    Ok(reading.notices.pop())
}

fn gke_labels(labels: &Value) -> Value {
    json!({
        "metadata": {"labels": labels, "annotations": {GKE_INSTANCE: "4711"}},
        "spec": {"providerID": "gce://p/z/vm-1"},
    })
}

#[test]
fn gke_tells_by_labels_annotations_and_a_taint() {
    assert_eq!(read_one(gke_labels(&json!({}))), Ok(None));
    let object = gke_labels(&json!({GKE_SCHEDULED: "1800000000"}));
    let scheduled = read_one(object.clone()).unwrap().unwrap();
    assert_eq!(scheduled.phase, Phase::Scheduled);
    assert_eq!(
        scheduled.start,
        Some(Timestamp::from_second(1_800_000_000).unwrap())
    );
    assert_eq!(
        (scheduled.kind, scheduled.word.as_str()),
        (Kind::Reboot, "PENDING")
    );
    let resource = ("gce_instance".to_owned(), "4711".to_owned());
    assert_eq!(
        (scheduled.provider.as_str(), scheduled.resource),
        ("gcp", resource)
    );

    let ongoing = read_one(gke_labels(&json!({GKE_ACTIVE: "ONGOING"})))
        .unwrap()
        .unwrap();
    assert_eq!((ongoing.phase, ongoing.start), (Phase::Ongoing, None));
    assert_eq!(ongoing.word, "ONGOING");
    let idle = read_one(gke_labels(&json!({GKE_ACTIVE: "NONE"})));
    assert_eq!(idle, Ok(None));

    let mut ending = gke_labels(&json!({}));
    ending["spec"]["taints"] = json!([{"key": GKE_ENDING, "effect": "NoSchedule"}]);
    assert_eq!(read_one(ending).unwrap().unwrap().phase, Phase::Ongoing);

    let mut replaced = object;
    replaced["metadata"]["annotations"][GKE_REPLACE] = "operation-1".into();
    assert_eq!(read_one(replaced).unwrap().unwrap().kind, Kind::Replacement);
}

#[test]
fn gke_tells_more_in_the_words_of_the_metadata_server() {
    let with = |upcoming: Value| {
        let mut object = gke_labels(&json!({}));
        object["metadata"]["annotations"][GKE_UPCOMING] = upcoming.to_string().into();
        read_one(object)
    };
    let told = with(json!({
        "can_reschedule": "false", "maintenance_status": "PENDING", "type": "UNSCHEDULED",
        "window_start_time": "2026-12-01T10:00:00.000-08:00",
        "window_end_time": "2026-12-01T14:00:00.000-08:00",
        "latest_window_start_time": "2026-12-02T10:00:00.000-08:00",
    }));
    let told = told.unwrap().unwrap();
    assert!(told.emergency);
    assert_eq!(told.start.unwrap().to_string(), "2026-12-01T18:00:00Z");
    assert_eq!(told.end.unwrap().to_string(), "2026-12-01T22:00:00Z");
    for (word, phase) in [
        ("ONGOING", Phase::Ongoing),
        ("COMPLETED", Phase::Completed),
        ("CANCELLED", Phase::Cancelled),
        ("SOMETHING_NEW", Phase::Scheduled),
    ] {
        let told = with(json!({"maintenanceStatus": word})).unwrap().unwrap();
        assert_eq!((told.phase, told.word.as_str()), (phase, word));
    }
}

#[test]
fn a_window_without_a_readable_begin_takes_no_node_out() {
    let with = |status: &str| {
        let mut object = gke_labels(&json!({}));
        let upcoming = json!({"maintenance_status": status, "window_start_time": "soon"});
        object["metadata"]["annotations"][GKE_UPCOMING] = upcoming.to_string().into();
        read_one(object)
    };
    assert_eq!(with("PENDING"), Err(1));
    let ongoing = with("ONGOING").unwrap().unwrap();
    assert_eq!((ongoing.phase, ongoing.start), (Phase::Ongoing, None));
}

#[test]
fn aks_tells_by_a_condition() {
    let with = |status: &str, message: &str| {
        read_one(json!({
            "spec": {"providerID": "azure:///subscriptions/s/vm/3"},
            "status": {"conditions": [
                {"type": "VMEventScheduled", "status": status, "message": message},
            ]},
        }))
    };
    assert_eq!(with("False", "VM has no scheduled event"), Ok(None));
    for (event, kind) in [
        ("Freeze", Kind::Migration),
        ("Reboot", Kind::Reboot),
        ("Redeploy", Kind::Replacement),
        ("Preempt", Kind::Stop),
        ("Terminate", Kind::Stop),
    ] {
        let message = format!("{event} Scheduled: Mon, 02 Mar 2026 19:01:45 GMT");
        let told = with("True", &message).unwrap().unwrap();
        assert_eq!((told.kind, told.phase), (kind, Phase::Scheduled));
        assert_eq!(told.start.unwrap().to_string(), "2026-03-02T19:01:45Z");
        assert_eq!(told.word, format!("{event} Scheduled"));
        assert_eq!(told.resource.1, "/subscriptions/s/vm/3");
    }
    let begun = with("True", "Reboot Started: ").unwrap().unwrap();
    assert_eq!(begun.start, None);
}

#[test]
fn what_cannot_be_understood_neither_opens_nor_closes() {
    let azure = |conditions: Value| {
        read_one(json!({
            "spec": {"providerID": "azure:///vm"}, "status": {"conditions": conditions},
        }))
    };
    let event = |status: &str, message: &str| {
        azure(json!([{"type": "VMEventScheduled", "status": status, "message": message}]))
    };
    assert_eq!(azure(json!([])), Err(0), "a missing condition");
    assert_eq!(event("Unknown", "Reboot Scheduled: "), Err(0));
    assert_eq!(event("True", "IMDS unavailable"), Err(1));
    assert_eq!(event("True", "Reboot Scheduled: tomorrow"), Err(1));
    for time in ["tomorrow", "", "99999999999999999999", "-99999999999999"] {
        assert_eq!(
            read_one(gke_labels(&json!({GKE_SCHEDULED: time}))),
            Err(1),
            "{time}"
        );
    }
    for text in ["{", "7", "{\"maintenance_status\": 7}"] {
        let mut object = gke_labels(&json!({}));
        object["metadata"]["annotations"][GKE_UPCOMING] = text.into();
        assert_eq!(read_one(object), Err(1), "{text}");
    }
    // A begin that is odd does not hide that the maintenance has begun.
    let odd = read_one(gke_labels(
        &json!({GKE_SCHEDULED: "odd", GKE_ACTIVE: "ONGOING"}),
    ));
    assert_eq!(odd.unwrap().unwrap().phase, Phase::Ongoing);
}
