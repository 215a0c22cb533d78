use contract::HealthEvent;
use model::event::{EventRecord, normalise};
use model::fault::FaultBook;
use runtime::metrics::Metrics;
use serde_json::json;

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(100_000 + second).unwrap()
}

/// Returns a node of this version, with or without the condition of check `X`.
fn view(version: u64, broken: bool) -> Arc<NodeView> {
    let condition = json!({
        "type": "X", "status": "True", "reason": "XIsNotHealthy",
        "message": "Recommended Action=NONE;",
    });
    let conditions = if broken { vec![condition] } else { vec![] };
    let object = json!({
        "metadata": {"name": "n", "uid": "u", "resourceVersion": version.to_string()},
        "status": {"conditions": conditions},
    });
    Arc::new(NodeView::from_object(object).unwrap())
}

/// Records an event of check `X` at this second.
fn record(book: &mut FaultBook, second: i64, code: &str, fatal: bool, healthy: bool) {
    let mut event = HealthEvent {
        node_name: "n".into(),
        agent: "a".into(),
        component_class: "GPU".into(),
        check_name: "X".into(),
        is_fatal: fatal,
        is_healthy: healthy,
        error_code: if code.is_empty() {
            vec![]
        } else {
            vec![code.into()]
        },
        ..HealthEvent::default()
    };
    normalise(&mut event, at(second));
    book.record(&EventRecord {
        seq: (book.applied().number() + 1).into(),
        id: event.id.clone(),
        created_at: at(second),
        event,
    });
}

fn shared() -> Shared {
    counted(&Metrics::default())
}

fn counted(metrics: &Metrics) -> Shared {
    let queue = WorkQueue::new(metrics, "kubernetes", "nodes");
    let options = Options {
        limits: condition::MessageLimits::default(),
        summary: false,
    };
    Shared::new(Some(options), Some(EventKind::Kubernetes), queue, at(0))
}

fn post(shared: &Shared, book: &FaultBook, view: &Arc<NodeView>, second: i64) {
    shared.post(
        book.faults("n"),
        book.reported_checks("n"),
        view,
        at(second),
    );
}

/// Returns the result of a job whose requests all succeeded, or all failed.
fn outcome(job: Job, written: Option<u64>, failed: bool) -> JobResult {
    let reported = job.events.iter();
    let reported = reported.map(|one| (one.key.clone(), one.recovered, one.event.count));
    JobResult {
        node: "n".into(),
        written: written.map(|version| version.to_string()),
        changes: if failed { vec![] } else { job.changes },
        failed: failed.then_some(Failed { retry_after: None }),
        reported: if failed { vec![] } else { reported.collect() },
    }
}

fn one(mut jobs: Vec<Job>) -> Job {
    assert_eq!(jobs.len(), 1);
    jobs.remove(0)
}

#[test]
fn a_condition_is_written_once_and_an_old_view_does_not_write_it_again() {
    let (shared, mut book) = (shared(), FaultBook::default());
    record(&mut book, 1, "", true, false);
    post(&shared, &book, &view(5, false), 1);
    let job = one(shared.take(at(1), usize::MAX));
    assert_eq!(job.changes.len(), 1);
    post(&shared, &book, &view(6, false), 1);
    assert!(shared.take(at(1), usize::MAX).is_empty(), "one at a time");
    shared.done(outcome(job, Some(9), false), at(2));
    post(&shared, &book, &view(7, false), 2);
    assert!(
        shared.take(at(2), usize::MAX).is_empty(),
        "from before our patch"
    );
    post(&shared, &book, &view(9, true), 2);
    assert!(shared.take(at(2), usize::MAX).is_empty());
    assert!(shared.lock().nodes.is_empty(), "nothing is kept of it");
}

#[test]
fn what_changes_while_a_patch_is_under_way_is_not_lost() {
    let (shared, mut book) = (shared(), FaultBook::default());
    record(&mut book, 1, "", true, false);
    post(&shared, &book, &view(5, false), 1);
    let job = one(shared.take(at(1), usize::MAX));
    record(&mut book, 2, "79", true, false);
    post(&shared, &book, &view(5, false), 2);
    shared.done(outcome(job, Some(9), false), at(2));
    let job = one(shared.take(at(2), usize::MAX));
    assert!(job.changes[0].condition.message.contains("ErrorCode:79"));
    assert!(!job.changes[0].transition, "the status is the same by now");
}

#[test]
fn what_comes_to_be_known_before_there_is_room_is_told_with_the_rest() {
    let (shared, mut book) = (shared(), FaultBook::default());
    record(&mut book, 1, "", true, false);
    post(&shared, &book, &view(5, false), 1);
    assert!(shared.take(at(1), 0).is_empty());
    record(&mut book, 2, "79", true, false);
    post(&shared, &book, &view(5, false), 2);
    let job = one(shared.take(at(2), 1));
    assert!(job.changes[0].condition.message.contains("ErrorCode:79"));
}

#[test]
fn a_recovery_is_tried_until_it_is_through() {
    let (shared, mut book) = (shared(), FaultBook::default());
    record(&mut book, 1, "", true, false);
    record(&mut book, 2, "", false, true);
    post(&shared, &book, &view(5, true), 2);
    let mut now = 2;
    for failures in 0..100 {
        let job = one(shared.take(at(now), usize::MAX));
        assert!(!job.changes[0].condition.status);
        shared.done(outcome(job, None, true), at(now));
        assert!(shared.take(at(now), usize::MAX).is_empty(), "not at once");
        let next = shared.next().unwrap();
        if failures < 2 {
            let wait = [RETRY, RETRY * 2][failures];
            assert_eq!(next, at(now) + wait, "each wait doubles the one before");
        }
        assert!(next <= at(now + 30), "not later than after 30 s");
        now += 30;
    }
    let job = one(shared.take(at(now), usize::MAX));
    shared.done(outcome(job, Some(9), false), at(now));
    assert!(shared.take(at(now + 60), usize::MAX).is_empty());
}

#[test]
fn a_clock_that_is_put_back_ends_all_waits() {
    let (shared, mut book) = (shared(), FaultBook::default());
    record(&mut book, 1, "", true, false);
    post(&shared, &book, &view(5, false), 3_700);
    let job = one(shared.take(at(3_700), usize::MAX));
    shared.done(outcome(job, None, true), at(3_700));
    assert!(shared.take(at(3_700), usize::MAX).is_empty());
    let job = one(shared.take(at(100), usize::MAX));
    assert!(job.changes[0].condition.status);
    // Later changes take effect.
    shared.done(outcome(job, None, true), at(100));
    assert!(shared.take(at(100), usize::MAX).is_empty());
    assert!(shared.next().unwrap() <= at(130));
}

#[test]
fn repeats_raise_a_count_and_recovery_is_told_once() {
    let (shared, mut book) = (shared(), FaultBook::default());
    let node = view(5, false);
    record(&mut book, 1, "", false, false);
    post(&shared, &book, &node, 1);
    let job = one(shared.take(at(1), usize::MAX));
    let first = job.events[0].event.clone();
    assert_eq!((first.kind.as_str(), first.count), ("Warning", 1));
    shared.done(outcome(job, None, false), at(1));
    for second in 2..8 {
        record(&mut book, second, "", false, false);
        post(&shared, &book, &node, second);
        assert!(
            shared.take(at(second), usize::MAX).is_empty(),
            "not every second"
        );
    }
    let job = one(shared.take(shared.next().unwrap(), usize::MAX));
    assert!(job.events[0].repeat);
    assert_eq!(job.events[0].event.count, 7);
    assert_eq!(job.events[0].event.name, first.name);
    shared.done(outcome(job, None, false), at(11));
    record(&mut book, 12, "", false, true);
    post(&shared, &book, &node, 12);
    let job = one(shared.take(at(12), usize::MAX));
    assert_eq!(job.events[0].event.kind, "Normal");
    assert_ne!(job.events[0].event.name, first.name);
    shared.done(outcome(job, None, false), at(12));
    post(&shared, &book, &node, 13);
    assert!(shared.take(at(13), usize::MAX).is_empty());
    assert!(shared.lock().nodes.is_empty());
}

#[test]
fn a_storm_of_events_is_told_at_a_rate() {
    let (shared, mut book) = (shared(), FaultBook::default());
    let node = view(5, false);
    let mut reported = 0;
    for second in 0..600 {
        for part in 0..10 {
            let code = format!("{second}-{part}");
            record(&mut book, second, &code, false, false);
            record(&mut book, second, &code, false, true);
        }
        record(&mut book, second, &second.to_string(), false, false);
        post(&shared, &book, &node, second);
        for job in shared.take(at(second), usize::MAX) {
            reported += job.events.len();
            shared.done(outcome(job, None, false), at(second));
        }
    }
    assert_eq!(reported, 20 + 599 / 15);
    assert!(shared.lock().nodes["n"].reported.len() <= MAX_REPORTED);
}

#[test]
fn what_was_reported_long_before_the_start_is_not_told_again() {
    let mut book = FaultBook::default();
    record(&mut book, -700, "old", false, false);
    record(&mut book, -500, "new", false, false);
    let shared = shared();
    post(&shared, &book, &view(5, false), 1);
    let job = one(shared.take(at(1), usize::MAX));
    assert_eq!(job.events.len(), 1);
    assert!(job.events[0].event.message.contains("ErrorCode:new"));
}

#[test]
fn what_is_to_be_told_is_counted_until_it_is() {
    let metrics = Metrics::default();
    let (shared, mut book) = (counted(&metrics), FaultBook::default());
    let seen = || {
        let text = metrics.encode();
        [
            "depth_kubernetes",
            "adds_total_kubernetes",
            "retries_total_kubernetes",
            "work_duration_seconds_kubernetes_count",
        ]
        .map(|name| {
            let mut lines = text.lines();
            let line = lines.find(|line| line.contains(&format!("_{name}{{")));
            line.unwrap().rsplit(' ').next().unwrap().to_owned()
        })
    };
    record(&mut book, 1, "", true, false);
    post(&shared, &book, &view(5, false), 1);
    assert_eq!(seen(), ["1", "1", "0", "0"]);
    let job = one(shared.take(at(1), usize::MAX));
    shared.done(outcome(job, None, true), at(1));
    assert_eq!(seen(), ["1", "2", "1", "1"], "it waits for its next try");
    assert!(shared.take(at(1), usize::MAX).is_empty());
    let job = one(shared.take(shared.next().unwrap(), usize::MAX));
    post(&shared, &book, &view(6, false), 2);
    shared.done(outcome(job, Some(9), false), at(2));
    assert_eq!(seen(), ["0", "2", "1", "2"]);
    post(&shared, &book, &view(9, true), 3);
    assert_eq!(seen(), ["0", "2", "1", "2"], "nothing is left to tell");
}
