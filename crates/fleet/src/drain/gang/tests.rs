use super::*;
use crate::drain::partial::fate_of;
use crate::drain::{Checkpoint, Fate, wake_at};

const CONFIG: &str = r#"
    deleteAfterTimeoutMinutes = 60
    [[podDrainPolicies]]
    name = "launchers"
    podSelector = "launcher"
    mode = "Immediate"
    [[podDrainPolicies]]
    name = "late"
    podSelector = "late"
    mode = "DeleteAfterTimeout"
    [[podDrainPolicies]]
    name = "workers"
    podSelector = "worker"
    mode = "AllowCompletion"
"#;
const BEGUN: Drain = Drain {
    since: Timestamp::UNIX_EPOCH,
    force: false,
};

fn at(minute: i64) -> Timestamp {
    Timestamp::from_second(minute * 60).unwrap()
}

fn minutes(minutes: i64) -> SignedDuration {
    SignedDuration::from_mins(minutes)
}

/// Returns a pod of a gang, with a label; an empty gang means none.
fn pod(name: &str, label: &str, gang: &str) -> PodView {
    PodView {
        namespace: "ml".into(),
        name: name.into(),
        labels: [(label.to_owned(), String::new())].into(),
        gang: (!gang.is_empty()).then(|| gang.to_owned()),
        ..PodView::default()
    }
}

fn asks(pod: PodView, requested: Option<i64>, done: Option<i64>) -> PodView {
    let checkpoint = Checkpoint {
        takes: None,
        requested: requested.map(at),
        done: done.map(at),
    };
    PodView {
        checkpoint: Some(checkpoint),
        ..pod
    }
}

/// Returns what happens to each pod next, without those that stay.
fn next(pods: &[PodView], drain: Drain, minute: i64) -> Vec<String> {
    let config = DrainConfig::parse(CONFIG, "d").unwrap();
    let gangs = Gangs::of(pods.iter(), drain, None, &config, at(minute));
    let fates = pods
        .iter()
        .map(|pod| fate_of(pod, &gangs, drain, None, &config, at(minute)));
    let leaves = fates.filter_map(|fate| match fate {
        Fate::Leaves(mode, next) => Some(format!("{}: {next}", mode.name())),
        Fate::Stays(_) => None,
    });
    leaves.collect()
}

const WAITS: &str = "AllowCompletion: is waited for until it has ended";
const LATE: &str = "DeleteAfterTimeout: is waited for until 1970-01-01T01:00:00Z";
const EVICTED: &str = "Immediate: is evicted, with 30 s to end";

#[test]
fn pods_of_one_gang_leave_in_the_gentlest_mode_of_any() {
    let launcher = || pod("l", "launcher", "g");
    assert_eq!(next(&[launcher()], BEGUN, 0), [EVICTED]);
    assert_eq!(
        next(&[launcher(), pod("w", "worker", "g")], BEGUN, 0),
        [WAITS, WAITS]
    );
    assert_eq!(
        next(&[launcher(), pod("d", "late", "g")], BEGUN, 0),
        [LATE, LATE]
    );
    // Another gang, and a pod of none, do not belong to it.
    let apart = [
        launcher(),
        pod("w", "worker", "h"),
        pod("l2", "launcher", ""),
    ];
    assert_eq!(next(&apart, BEGUN, 0), [EVICTED, WAITS, EVICTED]);
    // A pod that has ended, or stays, does not count.
    let ended = PodView {
        finished: true,
        ..pod("w", "worker", "g")
    };
    assert_eq!(
        next(&[launcher(), ended, pod("s", "sidecar", "g")], BEGUN, 0),
        [EVICTED]
    );
    // A sender's force applies to all.
    let drain = Drain {
        force: true,
        ..BEGUN
    };
    assert_eq!(
        next(&[launcher(), pod("w", "worker", "g")], drain, 0),
        [EVICTED, EVICTED]
    );
}

#[test]
fn a_member_that_is_not_ready_is_waited_for_while_another_works() {
    let unready = |name: &str, minute| PodView {
        unready_since: Some(at(minute)),
        ..pod(name, "worker", "g")
    };
    let works = pod("w", "worker", "g");
    assert_eq!(next(&[unready("a", 0), works], BEGUN, 30), [WAITS, WAITS]);
    let idle = "AllowCompletion: is evicted, with 30 s to end";
    let both = [unready("a", 0), unready("b", 28)];
    assert_eq!(next(&both, BEGUN, 30), [WAITS, WAITS]);
    let config = DrainConfig::parse(CONFIG, "d").unwrap();
    let gangs = Gangs::of(both.iter(), BEGUN, None, &config, at(30));
    let wake = wake_at(&both[0], Next::Wait(None), &gangs, BEGUN, &config);
    assert_eq!(wake, Some(at(33)));
    assert_eq!(next(&both, BEGUN, 33), [idle, idle]);
}

#[test]
fn a_pod_that_asks_for_it_has_time_to_write_a_checkpoint() {
    let launcher = || pod("l", "launcher", "");
    let asked = "Immediate: is asked to write a checkpoint";
    let has_time =
        "Immediate: is waited for until its checkpoint is written, or 1970-01-01T00:10:00Z";
    for (pod, minute, expected) in [
        (asks(launcher(), None, None), 0, asked),
        (asks(launcher(), Some(0), None), 1, has_time),
        (asks(launcher(), Some(0), Some(0)), 1, EVICTED),
        // The answer of an earlier drain does not count.
        (asks(launcher(), Some(-5), Some(-5)), 1, asked),
        (asks(launcher(), Some(1), Some(-5)), 2, has_time),
        // The time is over, whether or not the pod was asked.
        (asks(launcher(), Some(9), None), 10, EVICTED),
        (asks(launcher(), None, None), 10, EVICTED),
    ] {
        assert_eq!(
            next(std::slice::from_ref(&pod), BEGUN, minute),
            [expected],
            "{pod:?} {minute}"
        );
    }
    // The pod's own time counts up to the limit.
    let mut short = asks(launcher(), Some(0), None);
    short.checkpoint.as_mut().unwrap().takes = Some(minutes(2));
    assert_eq!(next(std::slice::from_ref(&short), BEGUN, 2), [EVICTED]);
    short.checkpoint.as_mut().unwrap().takes = Some(minutes(200));
    assert_eq!(next(&[short], BEGUN, 1), [has_time]);
    let drain = Drain {
        force: true,
        ..BEGUN
    };
    assert_eq!(next(&[asks(launcher(), None, None)], drain, 0), [EVICTED]);
    // A pod that is waited for until it ends is not asked; nor is one that does no work.
    let worker = || asks(pod("w", "worker", ""), None, None);
    assert_eq!(next(&[worker()], BEGUN, 0), [WAITS]);
    let idle = PodView {
        unready_since: Some(at(-10)),
        ..asks(launcher(), None, None)
    };
    assert_eq!(next(&[idle], BEGUN, 0), [EVICTED]);
}

#[test]
fn no_member_is_evicted_before_all_that_ask_have_had_their_time() {
    let quiet = || pod("a", "launcher", "g");
    let asked = "Immediate: is asked to write a checkpoint";
    let waits = "Immediate: is waited for until its checkpoint is written, or 1970-01-01T00:10:00Z";
    let other = |requested, done| asks(pod("b", "launcher", "g"), requested, done);
    assert_eq!(
        next(&[quiet(), other(None, None)], BEGUN, 0),
        [waits, asked]
    );
    assert_eq!(
        next(&[quiet(), other(Some(0), None)], BEGUN, 1),
        [waits, waits]
    );
    assert_eq!(
        next(&[quiet(), other(Some(0), Some(0))], BEGUN, 1),
        [EVICTED, EVICTED]
    );
    assert_eq!(
        next(&[quiet(), other(Some(0), None)], BEGUN, 10),
        [EVICTED, EVICTED]
    );
}

#[test]
fn who_had_time_for_a_checkpoint_is_evicted_before_it_is_deleted() {
    let late = |name: &str| pod(name, "late", "g");
    let pods = [late("a"), asks(late("b"), Some(60), None)];
    let evicted = "DeleteAfterTimeout: is evicted, with 30 s to end";
    let deleted = "DeleteAfterTimeout: is deleted, without time to end";
    assert_eq!(next(&pods, BEGUN, 70), [evicted, evicted]);
    // The grace period (300 s) and a minute more run from there.
    assert_eq!(next(&pods, BEGUN, 75), [evicted, evicted]);
    assert_eq!(next(&pods, BEGUN, 76), [deleted, deleted]);
    let config = DrainConfig::parse(CONFIG, "d").unwrap();
    let gangs = Gangs::of(pods.iter(), BEGUN, None, &config, at(70));
    let wake = wake_at(&pods[0], Next::Evict(minutes(1)), &gangs, BEGUN, &config);
    assert_eq!(wake, Some(at(76)));
}
