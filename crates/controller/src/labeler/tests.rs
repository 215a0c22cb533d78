use serde_json::json;

use super::*;

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn objects(sources: &Sources) -> Objects {
    Objects {
        names: Listing::default(),
        failures: 0,
        settled: false,
        source: sources.add_optional("dcgm-pods", "app in (dcgm)", NOW),
        detail: "app in (dcgm)".to_owned(),
    }
}

fn pod(name: &str) -> Signal<PodObject> {
    let pod = json!({"metadata": {"namespace": "ns", "name": name}, "spec": {"nodeName": "n"}});
    Signal::Applied(Arc::new(serde_json::from_value(pod).unwrap()))
}

#[test]
fn deletions_of_any_kind_count() {
    let mut objects = objects(&Sources::default());
    let mut take = |signal| {
        let changes = objects.take(signal, NOW, PodObject::title).into_iter();
        let shown = changes.map(|(name, pod)| format!("{name} {}", pod.is_some()));
        shown.collect::<Vec<_>>().join(", ")
    };
    for (signal, expected) in [
        (Signal::Restarted, ""),
        (pod("a"), "ns/a true"),
        (pod("b"), "ns/b true"),
        (Signal::Listed, ""),
        (Signal::Deleted("ns/a".to_owned()), "ns/a false"),
        // A deletion while the watch was away: the new list lacks the pod.
        (Signal::Restarted, ""),
        (Signal::Listed, "ns/b false"),
    ] {
        assert_eq!(take(signal.clone()), expected, "{signal:?}");
    }
}

#[test]
fn a_watch_that_fails_is_shown_and_is_waited_for_unless_it_is_refused() {
    let sources = Sources::default();
    let failing = |refused| Signal::<PodObject>::Failing {
        error: "forbidden".to_owned(),
        refused,
    };
    let mut waits = objects(&sources);
    for failure in 1..=PATIENCE {
        drop(waits.take(failing(false), NOW, PodObject::title));
        assert_eq!(waits.settled, failure == PATIENCE);
    }
    let mut refused = objects(&sources);
    drop(refused.take(failing(true), NOW, PodObject::title));
    assert!(refused.settled && !refused.names.is_complete());
    let status = &sources.statuses()[0];
    assert_eq!(status.state, SourceState::Failing);
    assert_eq!(status.detail, "app in (dcgm): forbidden");
    assert_eq!(
        sources.not_seen(),
        [""; 0],
        "agents reach the controller all the same"
    );
    for signal in [Signal::Restarted, Signal::Listed] {
        drop(refused.take(signal, NOW, PodObject::title));
    }
    let status = &sources.statuses()[0];
    assert_eq!(
        (status.state, status.detail.as_str()),
        (SourceState::Following, "app in (dcgm)")
    );
}
