//! What is to be told, per node, and what was told already.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cluster::Event;
use domain::condition::{self, ConditionChange, Occurrence, Options};
use domain::fault::Fault;
use domain::node::NodeView;
use jiff::{SignedDuration, Timestamp};
use tokio::sync::Notify;

use super::EventKind;
use super::rate::Bucket;
use crate::wakes::Wakes;

/// Events of one node at once, and after how long it gets leave for one more.
const NODE_BURST: i64 = 20;
const NODE_REFILL: SignedDuration = SignedDuration::from_secs(15);
/// The same for all nodes together: etcd keeps each Event for an hour.
const ALL_BURST: i64 = 1_000;
const ALL_REFILL: SignedDuration = SignedDuration::from_millis(50);
/// The count of an Event is raised at most this often.
const REPEAT_EVERY: SignedDuration = SignedDuration::from_secs(10);
/// After a start, faults that were reported before that are not told again; those that are
/// newer may not have been told. Telling them twice finds the Event of the first time.
const TELL_AGAIN: SignedDuration = SignedDuration::from_mins(10);
/// Faults of one node of which it is remembered that they were told.
const MAX_TOLD: usize = 4 * condition::MAX_OCCURRENCES;
/// First wait after a failure; each further one doubles it.
const RETRY: SignedDuration = SignedDuration::from_millis(200);
/// Longest wait.
const LONGEST_RETRY: SignedDuration = SignedDuration::from_secs(30);
/// Longest name of a node that leaves room for the key in an Event's name (bytes).
const MAX_NODE_IN_NAME: usize = 200;

/// Shared between those who post and the one who works.
pub(super) struct Shared {
    conditions: Option<Options>,
    events: Option<EventKind>,
    started_at: Timestamp,
    state: Mutex<State>,
    /// Something was posted.
    pub(super) posted: Notify,
}

struct State {
    /// Nodes about which there is something to tell, or was.
    nodes: BTreeMap<String, Node>,
    /// Those to look at now.
    due: BTreeSet<String>,
    /// Those to look at later.
    later: Wakes,
    all: Bucket,
}

struct Node {
    view: Arc<NodeView>,
    /// Conditions to write.
    changes: Vec<ConditionChange>,
    /// Faults that are not fatal.
    occurrences: Vec<Occurrence>,
    /// What was told of them, by key.
    told: BTreeMap<String, Told>,
    bucket: Bucket,
    under_way: bool,
    failures: u32,
    not_before: Option<Timestamp>,
    /// Version of the node after our last patch: older views do not show it.
    written: u64,
}

struct Told {
    occurrence: Occurrence,
    /// The count that was told.
    count: u64,
    at: Timestamp,
    /// Its faults are closed, and that is to be told.
    recovered: bool,
}

/// What to ask of the API server about one node.
pub(super) struct Job {
    pub(super) view: Arc<NodeView>,
    pub(super) changes: Vec<ConditionChange>,
    pub(super) events: Vec<Telling>,
    /// The last attempt did not fail.
    pub(super) first: bool,
}

/// An Event to tell.
pub(super) struct Telling {
    pub(super) key: String,
    pub(super) event: Event,
    /// Its count is raised; otherwise it is new.
    pub(super) repeat: bool,
    /// It tells of the recovery.
    pub(super) recovered: bool,
}

/// A request did not get through.
pub(super) struct Failed {
    /// The wait that the server asks for.
    pub(super) retry_after: Option<Duration>,
}

/// What became of a [`Job`].
pub(super) struct Outcome {
    pub(super) node: String,
    /// Version of the node after its conditions were written.
    pub(super) written: Option<String>,
    /// Those that were written.
    pub(super) changes: Vec<ConditionChange>,
    /// It failed.
    pub(super) failed: Option<Failed>,
    /// Events that were told: key, of the recovery, count.
    pub(super) told: Vec<(String, bool, u64)>,
}

// === impl Shared ===

impl Shared {
    pub(super) fn new(
        conditions: Option<Options>,
        events: Option<EventKind>,
        now: Timestamp,
    ) -> Self {
        Self {
            conditions,
            events,
            started_at: now,
            state: Mutex::new(State {
                nodes: BTreeMap::new(),
                due: BTreeSet::new(),
                later: Wakes::default(),
                all: Bucket::new(ALL_BURST, ALL_REFILL, now),
            }),
            posted: Notify::new(),
        }
    }

    pub(super) fn post<'a>(
        &self,
        faults: &[Fault],
        heard: impl Iterator<Item = &'a str>,
        view: &Arc<NodeView>,
        now: Timestamp,
    ) {
        let changes = self.conditions.map_or_else(Vec::new, |options| {
            condition::changes(faults, heard, view, &options)
        });
        let limits = self.conditions.map(|options| options.limits);
        let occurrences = self.events.map_or_else(Vec::new, |_| {
            condition::occurrences(faults, &limits.unwrap_or_default())
        });
        let mut guard = self.lock();
        let state = &mut *guard;
        if changes.is_empty() && occurrences.is_empty() && !state.nodes.contains_key(&view.name) {
            return;
        }
        let node = state
            .nodes
            .entry(view.name.clone())
            .or_insert_with(|| Node::new(Arc::clone(view), now));
        node.take_in(faults, changes, occurrences, view, self.started_at);
        if node.is_done() {
            state.nodes.remove(&view.name);
            state.due.remove(&view.name);
            state.later.set(&view.name, None);
        } else {
            state.due.insert(view.name.clone());
            drop(guard);
            self.posted.notify_one();
        }
    }

    pub(super) fn gone(&self, node: &str) {
        let mut state = self.lock();
        state.nodes.remove(node);
        state.due.remove(node);
        state.later.set(node, None);
    }

    /// What is to be done now.
    pub(super) fn take(&self, now: Timestamp) -> Vec<Job> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let later = state.later.take_due(now);
        state.due.extend(later);
        let mut jobs = Vec::new();
        while let Some(name) = state.due.pop_first() {
            let Some(node) = state.nodes.get_mut(&name) else {
                continue;
            };
            if node.under_way {
                continue; // Looked at again when it is done.
            }
            if let Some(at) = node.not_before.filter(|at| *at > now) {
                state.later.set(&name, Some(at));
                continue;
            }
            let (events, wake) = node.events(self.events, &mut state.all, now);
            state.later.set(&name, wake);
            if node.changes.is_empty() && events.is_empty() {
                continue;
            }
            node.under_way = true;
            jobs.push(Job {
                view: Arc::clone(&node.view),
                changes: node.changes.clone(),
                events,
                first: node.failures == 0,
            });
        }
        jobs
    }

    /// When to take again, if nothing is posted.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.lock().later.next()
    }

    pub(super) fn done(&self, outcome: Outcome, now: Timestamp) {
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(node) = state.nodes.get_mut(&outcome.node) else {
            return;
        };
        node.under_way = false;
        if let Some(version) = outcome.written {
            node.wrote(&outcome.changes);
            node.written = version.parse().unwrap_or_default();
        }
        for (key, recovered, count) in outcome.told {
            node.told(&key, recovered, count, now);
        }
        match outcome.failed {
            None => {
                node.failures = 0;
                node.not_before = None;
            }
            Some(Failed { retry_after }) => {
                node.failures = node.failures.saturating_add(1);
                let wait = (RETRY * (1 << node.failures.min(10))).min(LONGEST_RETRY);
                let wish = retry_after.and_then(|wish| SignedDuration::try_from(wish).ok());
                let wait = wish.map_or(wait, |wish| wait.max(wish.min(LONGEST_RETRY)));
                node.not_before = Some(now + wait);
            }
        }
        state.due.insert(outcome.node);
    }

    /// After a bug: whoever is left waiting is looked at again.
    pub(super) fn none_under_way(&self) {
        let mut guard = self.lock();
        let state = &mut *guard;
        for (name, node) in &mut state.nodes {
            node.under_way = false;
            state.due.insert(name.clone());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Node ===

impl Node {
    fn new(view: Arc<NodeView>, now: Timestamp) -> Self {
        Self {
            view,
            changes: Vec::new(),
            occurrences: Vec::new(),
            told: BTreeMap::new(),
            bucket: Bucket::new(NODE_BURST, NODE_REFILL, now),
            under_way: false,
            failures: 0,
            not_before: None,
            written: 0,
        }
    }

    fn take_in(
        &mut self,
        faults: &[Fault],
        changes: Vec<ConditionChange>,
        occurrences: Vec<Occurrence>,
        view: &Arc<NodeView>,
        started_at: Timestamp,
    ) {
        if self.view.uid != view.uid {
            // Another node of the same name.
            self.written = 0;
        }
        // A view from before our own patch would have it written again. One that shows it
        // is on its way.
        if version(view) >= self.written {
            self.changes = changes;
            self.view = Arc::clone(view);
        }
        for (key, told) in &mut self.told {
            told.recovered = !condition::is_open(faults, key);
        }
        for occurrence in &occurrences {
            let old = occurrence.accepted_at < started_at - TELL_AGAIN;
            if old && !self.told.contains_key(&occurrence.key) {
                let told = Told {
                    occurrence: occurrence.clone(),
                    count: occurrence.count,
                    at: occurrence.accepted_at,
                    recovered: false,
                };
                self.told.insert(occurrence.key.clone(), told);
            }
        }
        self.occurrences = occurrences;
        // Recoveries that found no leave to be told for so long are told no more.
        while self.told.len() > MAX_TOLD
            && let Some(oldest) = self
                .told
                .iter()
                .min_by_key(|(_, told)| (!told.recovered, told.at))
                .map(|(key, _)| key.clone())
        {
            self.told.remove(&oldest);
        }
    }

    /// These are written; what was asked for meanwhile stays.
    fn wrote(&mut self, written: &[ConditionChange]) {
        self.changes.retain(|change| !written.contains(change));
        for change in &mut self.changes {
            let condition = &change.condition;
            let same = |other: &&ConditionChange| other.condition.kind == condition.kind;
            if let Some(other) = written.iter().find(same) {
                change.transition = other.condition.status != condition.status;
            }
        }
    }

    /// Nothing is to be told or to be remembered.
    fn is_done(&self) -> bool {
        let seen = version(&self.view) >= self.written;
        let nothing =
            self.changes.is_empty() && self.occurrences.is_empty() && self.told.is_empty();
        nothing && seen && !self.under_way
    }

    /// The Events to tell now, and when to look again for more.
    fn events(
        &mut self,
        kind: Option<EventKind>,
        all: &mut Bucket,
        now: Timestamp,
    ) -> (Vec<Telling>, Option<Timestamp>) {
        let (mut events, mut wake) = (Vec::new(), None::<Timestamp>);
        let Some(kind) = kind else {
            return (events, wake);
        };
        let recovered = self.told.values().filter(|told| told.recovered);
        let recovered = recovered.map(|told| (&told.occurrence, true, false));
        let open =
            self.occurrences
                .iter()
                .filter_map(|occurrence| match self.told.get(&occurrence.key) {
                    None => Some((occurrence, false, false)),
                    Some(told) if told.count == occurrence.count => None,
                    Some(told) if told.at + REPEAT_EVERY > now => {
                        let at = told.at + REPEAT_EVERY;
                        wake = Some(wake.map_or(at, |wake| wake.min(at)));
                        None
                    }
                    Some(_) => Some((occurrence, false, true)),
                });
        // Recoveries last: a fault is told before.
        let due: Vec<_> = open.chain(recovered).collect();
        for (occurrence, recovered, repeat) in due {
            let leave = self.bucket.take(now).and_then(|()| {
                let leave = all.take(now);
                if leave.is_err() {
                    self.bucket.give_back();
                }
                leave
            });
            if let Err(at) = leave {
                wake = Some(wake.map_or(at, |wake| wake.min(at)));
                break;
            }
            events.push(Telling {
                key: occurrence.key.clone(),
                event: event(&self.view.name, occurrence, kind, recovered, now),
                repeat,
                recovered,
            });
        }
        (events, wake)
    }

    fn told(&mut self, key: &str, recovered: bool, count: u64, now: Timestamp) {
        if recovered {
            self.told.remove(key);
            return;
        }
        if let Some(told) = self.told.get_mut(key) {
            (told.count, told.at) = (count, now);
            return;
        }
        let Some(occurrence) = self.occurrences.iter().find(|one| one.key == key) else {
            return; // Closed, or fatal, before it was told.
        };
        let told = Told {
            occurrence: occurrence.clone(),
            count,
            at: now,
            recovered: false,
        };
        self.told.insert(key.to_owned(), told);
    }
}

/// Versions are comparable numbers in every Kubernetes we know; where they are not, each view
/// counts as new.
fn version(view: &NodeView) -> u64 {
    view.resource_version.parse().unwrap_or(u64::MAX)
}

fn event(
    node: &str,
    occurrence: &Occurrence,
    kind: EventKind,
    recovered: bool,
    now: Timestamp,
) -> Event {
    let key: String = occurrence
        .key
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_lowercase())
        .collect();
    let before = if node.len() <= MAX_NODE_IN_NAME {
        node
    } else {
        "gpuwarden"
    };
    let after = if recovered { ".recovered" } else { "" };
    let text = occurrence.message.as_str();
    Event {
        name: format!("{before}.{key}{after}"),
        node: node.to_owned(),
        kind: match (kind, recovered) {
            (EventKind::Check, _) => occurrence.check.clone(),
            (EventKind::Kubernetes, true) => "Normal".to_owned(),
            (EventKind::Kubernetes, false) => "Warning".to_owned(),
        },
        reason: condition::reason(&occurrence.check, recovered),
        message: if recovered {
            format!("Recovered: {text}")
        } else {
            text.to_owned()
        },
        agent: occurrence.agent.clone(),
        count: if recovered { 1 } else { occurrence.count },
        first_seen: if recovered {
            now
        } else {
            occurrence.first_seen
        },
        last_seen: if recovered { now } else { occurrence.last_seen },
    }
}

#[cfg(test)]
mod tests {
    use contract::HealthEvent;
    use domain::event::{Record, normalise};
    use domain::fault::FaultBook;
    use serde_json::json;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(100_000 + second).unwrap()
    }

    /// A node of this version, with or without the condition of check `X`.
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
        book.record(&Record {
            seq: book.applied() + 1,
            id: event.id.clone(),
            created_at: at(second),
            event,
        });
    }

    fn shared() -> Shared {
        let options = Options {
            limits: condition::Limits::default(),
            summary: false,
        };
        Shared::new(Some(options), Some(EventKind::Kubernetes), at(0))
    }

    fn post(shared: &Shared, book: &FaultBook, view: &Arc<NodeView>, second: i64) {
        shared.post(book.faults("n"), book.heard("n"), view, at(second));
    }

    /// What became of a job: all of it was done, or none.
    fn outcome(job: Job, written: Option<u64>, failed: bool) -> Outcome {
        let told = job.events.iter();
        let told = told.map(|one| (one.key.clone(), one.recovered, one.event.count));
        Outcome {
            node: "n".into(),
            written: written.map(|version| version.to_string()),
            changes: if failed { vec![] } else { job.changes },
            failed: failed.then_some(Failed { retry_after: None }),
            told: if failed { vec![] } else { told.collect() },
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
        let job = one(shared.take(at(1)));
        assert_eq!(job.changes.len(), 1);
        post(&shared, &book, &view(6, false), 1);
        assert!(shared.take(at(1)).is_empty(), "one at a time");
        shared.done(outcome(job, Some(9), false), at(2));
        post(&shared, &book, &view(7, false), 2);
        assert!(shared.take(at(2)).is_empty(), "from before our patch");
        post(&shared, &book, &view(9, true), 2);
        assert!(shared.take(at(2)).is_empty());
        assert!(shared.lock().nodes.is_empty(), "nothing is kept of it");
    }

    #[test]
    fn what_changes_while_a_patch_is_under_way_is_not_lost() {
        let (shared, mut book) = (shared(), FaultBook::default());
        record(&mut book, 1, "", true, false);
        post(&shared, &book, &view(5, false), 1);
        let job = one(shared.take(at(1)));
        record(&mut book, 2, "79", true, false);
        post(&shared, &book, &view(5, false), 2);
        shared.done(outcome(job, Some(9), false), at(2));
        let job = one(shared.take(at(2)));
        assert!(job.changes[0].condition.message.contains("ErrorCode:79"));
        assert!(!job.changes[0].transition, "the status is the same by now");
    }

    #[test]
    fn a_recovery_is_tried_until_it_is_through() {
        let (shared, mut book) = (shared(), FaultBook::default());
        record(&mut book, 1, "", true, false);
        record(&mut book, 2, "", false, true);
        post(&shared, &book, &view(5, true), 2);
        let mut now = 2;
        for _ in 0..100 {
            let job = one(shared.take(at(now)));
            assert!(!job.changes[0].condition.status);
            shared.done(outcome(job, None, true), at(now));
            assert!(shared.take(at(now)).is_empty(), "not at once");
            let next = shared.next().unwrap();
            assert!(next <= at(now + 30), "not later than after 30 s");
            now += 30;
        }
        let job = one(shared.take(at(now)));
        shared.done(outcome(job, Some(9), false), at(now));
        assert!(shared.take(at(now + 60)).is_empty());
    }

    #[test]
    fn repeats_raise_a_count_and_recovery_is_told_once() {
        let (shared, mut book) = (shared(), FaultBook::default());
        let node = view(5, false);
        record(&mut book, 1, "", false, false);
        post(&shared, &book, &node, 1);
        let job = one(shared.take(at(1)));
        let first = job.events[0].event.clone();
        assert_eq!((first.kind.as_str(), first.count), ("Warning", 1));
        shared.done(outcome(job, None, false), at(1));
        for second in 2..8 {
            record(&mut book, second, "", false, false);
            post(&shared, &book, &node, second);
            assert!(shared.take(at(second)).is_empty(), "not every second");
        }
        let job = one(shared.take(shared.next().unwrap()));
        assert!(job.events[0].repeat);
        assert_eq!(job.events[0].event.count, 7);
        assert_eq!(job.events[0].event.name, first.name);
        shared.done(outcome(job, None, false), at(11));
        record(&mut book, 12, "", false, true);
        post(&shared, &book, &node, 12);
        let job = one(shared.take(at(12)));
        assert_eq!(job.events[0].event.kind, "Normal");
        assert_ne!(job.events[0].event.name, first.name);
        shared.done(outcome(job, None, false), at(12));
        post(&shared, &book, &node, 13);
        assert!(shared.take(at(13)).is_empty());
        assert!(shared.lock().nodes.is_empty());
    }

    #[test]
    fn a_storm_of_events_is_told_at_a_rate() {
        let (shared, mut book) = (shared(), FaultBook::default());
        let node = view(5, false);
        let mut told = 0;
        for second in 0..600 {
            for part in 0..10 {
                let code = format!("{second}-{part}");
                record(&mut book, second, &code, false, false);
                record(&mut book, second, &code, false, true);
            }
            record(&mut book, second, &second.to_string(), false, false);
            post(&shared, &book, &node, second);
            for job in shared.take(at(second)) {
                told += job.events.len();
                shared.done(outcome(job, None, false), at(second));
            }
        }
        assert_eq!(told, 20 + 599 / 15);
        assert!(shared.lock().nodes["n"].told.len() <= MAX_TOLD);
    }

    #[test]
    fn what_was_reported_long_before_the_start_is_not_told_again() {
        let mut book = FaultBook::default();
        record(&mut book, -700, "old", false, false);
        record(&mut book, -500, "new", false, false);
        let shared = shared();
        post(&shared, &book, &view(5, false), 1);
        let job = one(shared.take(at(1)));
        assert_eq!(job.events.len(), 1);
        assert!(job.events[0].event.message.contains("ErrorCode:new"));
    }
}
