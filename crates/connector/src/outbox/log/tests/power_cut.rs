//! Test of power cuts at every moment: acknowledged events are on disk.

use std::collections::HashSet;

use super::*;
use crate::outbox::disk::power_cut::{Kept, after, moments, observe};

/// Events that the outbox has promised to keep, by its answers.
#[derive(Clone, Debug, Default)]
struct Owed {
    /// Events, in order, and how many of the first were delivered, by position.
    taken: Vec<String>,
    delivered: usize,
    /// Store that the events were delivered to.
    store: Option<String>,
    aside: HashSet<String>,
}

impl Owed {
    fn waiting(&self) -> &[String] {
        &self.taken[self.delivered..]
    }
}

/// Returns the events that an outbox with these files has for `store`, the store that answered
/// last, and the events that it has put aside.
fn found(kept: &Kept, store: Option<&str>) -> (Vec<String>, HashSet<String>) {
    let root = after(kept);
    let dir = root.path().join("outbox");
    let mut log = Log::open(&dir, SMALL).unwrap();
    log.keep_since(Timestamp::MIN);
    if let Some(store) = store {
        log.turn_to(store.to_owned());
    }
    (names(&log.all()), refused::ids(&dir))
}

/// Small segments, so that they change often; room for all of them.
const SMALL: OutboxLimits = OutboxLimits {
    bytes: 16 * 300,
    events: 100,
};

#[test]
fn what_was_answered_survives_a_power_cut_at_any_moment() {
    let root = tempfile::tempdir().unwrap();
    observe(root.path());
    let dir = root.path().join("outbox");
    let mut log = Log::open(&dir, SMALL).unwrap();
    log.keep_since(Timestamp::MIN);
    let mut owed = Owed::default();
    let turn = |log: &mut Log, owed: &mut Owed, store: &str| {
        log.turn_to(store.to_owned());
        owed.store = Some(store.to_owned());
        owed.delivered = 0;
    };
    for round in 0..20_usize {
        let before = owed.clone();
        match round {
            0 => turn(&mut log, &mut owed, "a"),
            5 | 9 | 15 => {
                owed.delivered = owed.taken.len() - 2;
                log.delivered(owed.delivered as u64);
            }
            12 => turn(&mut log, &mut owed, "b"),
            7 | 8 => {
                let refused = event(&format!("refused {round}"));
                owed.aside.insert(refused.event.id.clone());
                log.put_aside(&[(refused, "why".into())]).unwrap();
            }
            // A full file of refused events makes way for a new one.
            10 => fs::write(dir.join("refused.jsonl"), vec![b'x'; 1 << 20]).unwrap(),
            11 => {
                owed.aside = [event("one more").event.id].into();
                log.put_aside(&[(event("one more"), "why".into())]).unwrap();
            }
            _ => {
                let new = event(&round.to_string());
                log.append(std::slice::from_ref(&new)).unwrap();
                owed.taken.push(new.event.message);
            }
        }
        let (meanwhile, now) = moments();
        for kept in &meanwhile {
            if before.taken.is_empty() {
                continue;
            }
            // The recorded store is the one before the switch, or the new one.
            let (waiting, aside) = found(kept, owed.store.as_deref());
            let least = if before.store == owed.store {
                owed.waiting()
            } else {
                &owed.taken
            };
            let least = &least[..least.len() - (owed.taken.len() - before.taken.len())];
            let has = |name: &String| waiting.contains(name);
            assert!(
                least.iter().all(has),
                "round {round}: {waiting:?}, owed {before:?}"
            );
            assert!(
                round == 11 || before.aside.is_subset(&aside),
                "round {round}"
            );
        }
        for kept in &now {
            if owed.taken.is_empty() {
                continue;
            }
            let (waiting, aside) = found(kept, owed.store.as_deref());
            assert_eq!(waiting, owed.waiting(), "round {round}");
            assert!(owed.aside.is_subset(&aside), "round {round}");
        }
    }
    assert!(log.segments.len() > 3, "{}", log.segments.len());
}
