use std::fs;

use contract::HealthEvent;
use proptest::prelude::*;

use super::super::MIN_BYTES;
use super::*;
use crate::outbox::MAX_EVENTS;

const LIMITS: OutboxLimits = OutboxLimits {
    bytes: MIN_BYTES,
    events: MAX_EVENTS,
};

fn event(name: &str) -> NewEvent {
    let received_at: Timestamp = "2026-01-01T00:00:00.000001Z".parse().unwrap();
    let mut event = HealthEvent {
        agent: "a".into(),
        component_class: "GPU".into(),
        check_name: "c".into(),
        node_name: "n1".into(),
        message: name.into(),
        ..HealthEvent::default()
    };
    model::reporter::Reporter::Monitor.note_in(&mut event);
    model::event::normalise(&mut event, received_at);
    NewEvent { event, received_at }
}

fn names(waiting: &[WaitingEvent]) -> Vec<String> {
    let name = |one: &WaitingEvent| one.event.event.message.clone();
    waiting.iter().map(name).collect()
}

impl Log {
    fn append(&mut self, events: &[NewEvent]) -> Result<Vec<Appended>, OutboxError> {
        let answers = self.stage(events)?;
        self.commit()?;
        Ok(answers)
    }

    fn all(&mut self) -> Vec<WaitingEvent> {
        self.read(0, usize::MAX, u64::MAX).unwrap()
    }
}

fn only_segment(directory: &Path) -> PathBuf {
    let mut found = Segment::list(directory).unwrap();
    assert_eq!(found.len(), 1);
    found.remove(0).path
}

#[test]
fn cut_at_any_byte_it_delivers_all_that_is_whole_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    let (mut ends, mut expected) = (Vec::new(), Vec::new());
    let segment = || only_segment(dir.path());
    for name in ["one", "two", "three", "four"] {
        log.append(&[event(name)]).unwrap();
        ends.push(fs::metadata(segment()).unwrap().len());
        expected.push(name.to_owned());
    }
    let bytes = fs::read(segment()).unwrap();
    let file = segment();
    drop(log);
    for cut in 0..=bytes.len() {
        fs::write(&file, &bytes[..cut]).unwrap();
        let whole = ends.iter().filter(|end| **end <= cut as u64).count();
        let mut log = Log::open(dir.path(), LIMITS).unwrap();
        assert_eq!(names(&log.all()), expected[..whole], "cut at {cut}");
        let start = if whole == 0 {
            12
        } else {
            usize::try_from(ends[whole - 1]).unwrap()
        };
        let dropped = if cut < 12 { cut } else { cut - start };
        assert_eq!(log.status().damaged, dropped as u64, "cut at {cut}");
        // Later events are appended behind the whole ones, and are found by the next start.
        log.append(&[event("later")]).unwrap();
        drop(log);
        let mut log = Log::open(dir.path(), LIMITS).unwrap();
        assert_eq!(log.status().damaged, 0, "cut at {cut}");
        let mut after = expected[..whole].to_vec();
        after.push("later".into());
        assert_eq!(names(&log.all()), after, "cut at {cut}");
    }
}

#[test]
fn damage_at_any_byte_costs_the_event_that_lies_there_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    let all = ["one", "two", "three", "four"].map(str::to_owned);
    let mut ends = Vec::new();
    for name in &all {
        log.append(&[event(name)]).unwrap();
        ends.push(usize::try_from(log.status().bytes).unwrap());
    }
    drop(log);
    let file = only_segment(dir.path());
    let bytes = fs::read(&file).unwrap();
    for at in 0..bytes.len() {
        for flip in [0xff, 0x01] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            fs::write(&file, &damaged).unwrap();
            let mut log = Log::open(dir.path(), LIMITS).unwrap();
            let hit = ends.iter().position(|end| at < *end).filter(|_| at >= 12);
            let expected: Vec<String> = (0..all.len())
                .filter(|index| Some(*index) != hit)
                .map(|index| all[index].clone())
                .collect();
            assert_eq!(names(&log.all()), expected, "byte {at}");
            assert!(log.status().damaged > 0, "byte {at}");
        }
    }
}

#[test]
fn damage_after_the_start_is_found_when_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    for name in ["one", "two", "three"] {
        log.append(&[event(name)]).unwrap();
    }
    let file = only_segment(dir.path());
    let mut bytes = fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[end / 2] ^= 0xff;
    fs::write(&file, bytes).unwrap();
    assert_eq!(names(&log.all()), ["one", "three"]);
    assert_eq!(log.status().events, 2);
    // The whole file is gone: nothing is left to deliver, and no call hangs.
    fs::remove_file(&file).unwrap();
    log.reading = None;
    assert!(log.all().is_empty());
    assert_eq!(log.status().events, 0);
}

#[test]
fn what_waits_already_is_taken_once_also_where_nothing_more_fits() {
    let dir = tempfile::tempdir().unwrap();
    let limits = OutboxLimits {
        events: 2,
        ..LIMITS
    };
    let mut log = Log::open(dir.path(), limits).unwrap();
    let answers = log
        .append(&[event("one"), event("two"), event("one")])
        .unwrap();
    assert_eq!(
        answers
            .iter()
            .map(|one| (one.seq.number(), one.new))
            .collect::<Vec<_>>(),
        [(1, true), (2, true), (1, false)]
    );
    let error = log.append(&[event("one"), event("three")]).unwrap_err();
    assert!(error.to_string().contains("2 events wait"), "{error}");
    assert_eq!(log.append(&[event("two")]).unwrap()[0].seq, 2.into());
    assert_eq!(names(&log.all()), ["one", "two"]);
    // Delivery makes room. A delivered event counts as new again, since the store recognises
    // it.
    log.delivered(1);
    assert!(log.append(&[event("three")]).unwrap()[0].new);
    assert_eq!(names(&log.all()), ["two", "three"]);
    log.delivered(u64::MAX);
    assert!(log.append(&[event("two")]).unwrap()[0].new);
}

#[test]
fn room_is_bounded_in_bytes_and_comes_back_with_delivery() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    let large = |index: u32| event(&format!("{index:016384}"));
    let mut taken = 0;
    let error = loop {
        match log.append(&[large(taken)]) {
            Ok(_) => taken += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, OutboxError::Full { .. }), "{error}");
    assert!(error.to_string().contains("16777216"), "{error}");
    assert!(log.status().bytes <= MIN_BYTES && log.status().bytes > MIN_BYTES * 9 / 10);
    assert!(log.segments.len() >= 15);
    // A batch has at least one event, and at most the requested bytes.
    assert_eq!(log.read(0, 100, 1).unwrap().len(), 1);
    assert_eq!(log.read(0, 100, 100_000).unwrap().len(), 6);
    assert_eq!(log.read(0, 3, u64::MAX).unwrap().len(), 3);
    let waiting = log.all();
    log.delivered(waiting[waiting.len() / 2].position);
    assert!(log.status().bytes < MIN_BYTES * 6 / 10);
    log.append(&[large(taken)]).unwrap();
    log.delivered(u64::MAX);
    assert!(log.segments.len() <= 1, "{:?}", log.segments);
    assert_eq!(Segment::list(dir.path()).unwrap().len(), log.segments.len());
}

#[test]
fn delivered_stays_delivered_and_losing_the_note_of_it_delivers_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    log.append(&[event("one"), event("two"), event("three")])
        .unwrap();
    log.delivered(2);
    drop(log);
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    assert_eq!(names(&log.all()), ["three"]);
    log.delivered(3);
    drop(log);
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    assert!(log.all().is_empty());
    // Positions continue, even if no file records the last one.
    assert_eq!(log.append(&[event("four")]).unwrap()[0].seq, 4.into());
    drop(log);
    let cursor = dir.path().join("delivered");
    for wreck in [&b"x"[..], b"0123456789ab"] {
        fs::write(&cursor, wreck).unwrap();
        let mut log = Log::open(dir.path(), LIMITS).unwrap();
        assert_eq!(names(&log.all()), ["one", "two", "three", "four"]);
    }
}

#[test]
fn another_store_gets_all_that_is_kept_but_for_what_was_put_aside() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    log.keep_since(Timestamp::MIN);
    assert_eq!(log.turn_to("a".into()), 0);
    let names_of = |names: &[&str]| names.iter().map(|one| event(one)).collect::<Vec<_>>();
    log.append(&names_of(&["one", "bad", "two", "three"]))
        .unwrap();
    log.put_aside(&[(event("bad"), "why".into())]).unwrap();
    log.delivered(3);
    assert_eq!((log.status().events, log.status().kept), (1, 3));
    // Answer of the same store, also after a restart: nothing is sent again.
    drop(log);
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    log.keep_since(Timestamp::MIN);
    assert_eq!(log.store(), Some("a"));
    assert_eq!(log.turn_to("a".into()), 0);
    assert_eq!(names(&log.all()), ["three"]);
    // Another store: all kept events come before new ones. An event that waits again is stored
    // once.
    assert_eq!(log.turn_to("b".into()), 2);
    assert_eq!(names(&log.all()), ["one", "two", "three"]);
    assert!(!log.append(&[event("one")]).unwrap()[0].new);
    log.append(&[event("four")]).unwrap();
    log.delivered(1);
    drop(log);
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    log.keep_since(Timestamp::MIN);
    assert_eq!(names(&log.all()), ["two", "three", "four"]);
    // A third store, before the second one has all events.
    assert_eq!(log.turn_to("c".into()), 1);
    assert_eq!(names(&log.all()), ["one", "two", "three", "four"]);
    log.delivered(u64::MAX);
    // Events beyond the retention are not kept, and their file is removed.
    let later: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
    log.keep_since(later);
    assert_eq!(log.turn_to("d".into()), 0);
    assert!(log.all().is_empty());
}

/// A counted report of a monitor may be older than the events before it.
#[test]
fn a_file_is_kept_for_the_newest_event_in_it_wherever_that_stands() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    let at = |name: &str, day: &str| NewEvent {
        received_at: format!("2026-01-{day}T00:00:00Z").parse().unwrap(),
        ..event(name)
    };
    log.append(&[at("a", "02"), at("b", "05"), at("c", "01")])
        .unwrap();
    log.append(&[at("d", "03")]).unwrap();
    let newest = at("", "05").received_at;
    assert_eq!(log.segments[0].newest, Some(newest));
    drop(log);
    let log = Log::open(dir.path(), LIMITS).unwrap();
    assert_eq!(log.segments[0].newest, Some(newest));
}

#[test]
fn what_is_kept_goes_before_anything_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let limits = OutboxLimits {
        events: 2_000,
        ..LIMITS
    };
    let mut log = Log::open(dir.path(), limits).unwrap();
    log.keep_since(Timestamp::MIN);
    // More events than there is room for, each delivered at once.
    for index in 0..1_200 {
        log.append(&[event(&format!("{index:016384}"))]).unwrap();
        log.delivered(u64::MAX);
        assert!(log.status().bytes <= MIN_BYTES);
    }
    let kept = log.turn_to("b".into());
    assert!((900..1_100).contains(&kept), "{kept}");
    // Events that wait again make way for new ones, by bytes and by number.
    for part in 0..20 {
        let names = (0..100).map(|index| format!("small {part} {index}"));
        let events: Vec<_> = names.map(|name| event(&name)).collect();
        log.append(&events).unwrap();
        assert!(log.status().bytes <= MIN_BYTES);
    }
    let waiting = names(&log.all());
    assert_eq!(waiting.len(), 2_000);
    assert!(waiting.iter().all(|name| name.starts_with("small")));
    let error = log.append(&[event("one more")]).unwrap_err();
    assert!(error.to_string().contains("2000 events wait"), "{error}");
}

#[test]
fn killed_at_any_byte_of_turning_to_another_store_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = Log::open(dir.path(), LIMITS).unwrap();
    log.keep_since(Timestamp::MIN);
    log.turn_to("store-a".into());
    log.append(&[event("one"), event("two"), event("three")])
        .unwrap();
    log.delivered(2);
    let cursor = dir.path().join("delivered");
    let before = fs::read(&cursor).unwrap();
    log.turn_to("another-store".into());
    drop(log);
    let after = fs::read(&cursor).unwrap();
    assert_eq!(before.len(), after.len());
    let whole = ["one", "two", "three"];
    for cut in 0..=after.len() {
        let torn = [&after[..cut], &before[cut..]].concat();
        fs::write(&cursor, torn).unwrap();
        let mut log = Log::open(dir.path(), LIMITS).unwrap();
        log.keep_since(Timestamp::MIN);
        // A store that is not known yet counts as another one.
        log.turn_to("another-store".into());
        assert_eq!(names(&log.all()), whole, "cut at {cut}");
        // After the switch, the store is remembered.
        drop(log);
        let mut log = Log::open(dir.path(), LIMITS).unwrap();
        assert_eq!(log.store(), Some("another-store"), "cut at {cut}");
        log.delivered(1);
        drop(log);
        let mut log = Log::open(dir.path(), LIMITS).unwrap();
        assert_eq!(names(&log.all()), whole[1..], "cut at {cut}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Append(Vec<u8>),
    Deliver(u8),
    Restart,
    /// The process dies in a write of these bytes.
    Torn(Vec<u8>),
    /// Another store answers the next request.
    Turn(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => proptest::collection::vec(0..40_u8, 1..6).prop_map(Step::Append),
        2 => (0..20_u8).prop_map(Step::Deliver),
        1 => Just(Step::Restart),
        1 => proptest::collection::vec(any::<u8>(), 1..80).prop_map(Step::Torn),
        1 => (0..3_u8).prop_map(Step::Turn),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_what_was_taken_waits_in_order_until_it_is_delivered(
        steps in proptest::collection::vec(step(), 1..40),
        keeps in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        // Small segments, so that they change often.
        let limits = OutboxLimits { bytes: 16 * 300, events: 30 };
        let open = || {
            let mut log = Log::open(dir.path(), limits).unwrap();
            if keeps {
                log.keep_since(Timestamp::MIN);
            }
            log
        };
        let mut log = open();
        // All events accepted so far, and the number of the last ones that no store has yet.
        let (mut history, mut fresh): (Vec<String>, usize) = (Vec::new(), 0);
        for step in steps {
            let waiting = names(&log.all());
            match step {
                Step::Append(ids) => {
                    let events: Vec<NewEvent> = ids.iter().map(|id| event(&id.to_string())).collect();
                    if let Ok(answers) = log.append(&events) {
                        let mut known = waiting;
                        for (event, answer) in events.iter().zip(answers) {
                            let name = event.event.message.clone();
                            prop_assert_eq!(answer.new, !known.contains(&name));
                            if answer.new {
                                known.push(name.clone());
                                history.push(name);
                                fresh += 1;
                            }
                        }
                    } else {
                        prop_assert_eq!(names(&log.all()).len().min(fresh), fresh);
                    }
                }
                Step::Deliver(count) => {
                    let batch = log.read(0, usize::from(count), u64::MAX).unwrap();
                    if let Some(last) = batch.last() {
                        log.delivered(last.position);
                        fresh = fresh.min(waiting.len() - batch.len());
                    }
                }
                Step::Restart => {
                    drop(log);
                    log = open();
                }
                Step::Torn(bytes) => {
                    drop(log);
                    if let Some(last) = Segment::list(dir.path()).unwrap().pop() {
                        let mut content = fs::read(&last.path).unwrap();
                        content.extend(bytes);
                        fs::write(&last.path, content).unwrap();
                    }
                    log = open();
                }
                Step::Turn(store) => {
                    let again = log.turn_to(store.to_string());
                    prop_assert_eq!(log.status().events, waiting.len() + again);
                    prop_assert!(keeps || again == 0);
                }
            }
            // The waiting events are the end of the history: all that no store has, and before
            // them those that only another store had.
            let waiting = names(&log.all());
            prop_assert!(waiting.len() >= fresh);
            prop_assert!(history.ends_with(&waiting), "{:?} {:?}", history, waiting);
            prop_assert!(keeps || waiting.len() == fresh);
            prop_assert!(log.status().events <= limits.events);
            prop_assert!(log.status().bytes <= limits.bytes);
        }
    }
}

mod disk;
mod power_cut;

#[test]
fn users_leave_room_for_the_monitors() {
    let dir = tempfile::tempdir().unwrap();
    let limits = OutboxLimits {
        events: 20,
        ..LIMITS
    };
    let mut log = Log::open(dir.path(), limits).unwrap();
    let of_user = |name: &str| {
        let mut new = event(name);
        new.event.metadata.clear();
        new
    };
    for number in 0..10 {
        log.append(&[of_user(&number.to_string())]).unwrap();
    }
    let refused = log.append(&[of_user("one more")]).unwrap_err();
    assert!(matches!(refused, OutboxError::Full { .. }), "{refused}");
    // A repeated event needs no room.
    log.append(&[of_user("3")]).unwrap();
    drop(log);
    let mut log = Log::open(dir.path(), limits).unwrap();
    assert!(log.append(&[of_user("one more")]).is_err());
    for number in 0..10 {
        log.append(&[event(&format!("monitor {number}"))]).unwrap();
    }
    assert!(log.append(&[event("beyond all")]).is_err());
}
