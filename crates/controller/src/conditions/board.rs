//! The board: for each node, what is to be told on it, and what was told already.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cluster::Event;
use jiff::{SignedDuration, Timestamp};
use model::condition::{self, ConditionChange, Occurrence, Options};
use model::fault::Fault;
use model::node::NodeView;
use model::wakes::{CLOCK_SLACK, Wakes};
use runtime::work_queue::{Work, WorkQueue};
use tokio::sync::Notify;

use super::EventKind;
use super::rate::Bucket;

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
    backlog: Mutex<Backlog>,
    queue: WorkQueue,
    /// Something was posted.
    pub(super) posted: Notify,
}

/// The nodes that wait, and when each is looked at.
struct Backlog {
    /// Nodes about which there is something to tell, or was.
    nodes: BTreeMap<String, Node>,
    /// The nodes to look at now.
    due: BTreeSet<String>,
    /// The nodes to look at later.
    later: Wakes,
    /// The clock when this was last asked.
    asked_at: Timestamp,
    all: Bucket,
}

struct Node {
    view: Arc<NodeView>,
    /// Conditions to write.
    changes: Vec<ConditionChange>,
    /// Faults that are not fatal.
    occurrences: Vec<Occurrence>,
    /// Those of them that were told, by key.
    told: BTreeMap<String, Told>,
    bucket: Bucket,
    /// The work from the moment at which something is to be told until it is, for the metrics.
    work: Option<Work>,
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
    /// True if the faults of the Event are closed, which is to be told.
    recovered: bool,
}

/// The requests to the API server about one node.
pub(super) struct Job {
    pub(super) view: Arc<NodeView>,
    pub(super) changes: Vec<ConditionChange>,
    pub(super) events: Vec<Telling>,
    /// True unless the last attempt failed.
    pub(super) first: bool,
}

/// An Event to tell.
pub(super) struct Telling {
    pub(super) key: String,
    pub(super) event: Event,
    /// True if the Event's count is raised; otherwise the Event is new.
    pub(super) repeat: bool,
    /// True if the Event tells of the recovery.
    pub(super) recovered: bool,
}

/// A request did not get through.
pub(super) struct Failed {
    /// The wait that the server asks for.
    pub(super) retry_after: Option<Duration>,
}

/// The result of a [`Job`].
pub(super) struct JobResult {
    pub(super) node: String,
    /// Version of the node after its conditions were written.
    pub(super) written: Option<String>,
    /// The conditions that were written.
    pub(super) changes: Vec<ConditionChange>,
    /// The request that failed, if one did.
    pub(super) failed: Option<Failed>,
    /// Events that were told: key, of the recovery, count.
    pub(super) told: Vec<(String, bool, u64)>,
}

// === impl Shared ===

impl Shared {
    pub(super) fn new(
        conditions: Option<Options>,
        events: Option<EventKind>,
        queue: WorkQueue,
        now: Timestamp,
    ) -> Self {
        Self {
            conditions,
            events,
            started_at: now,
            queue,
            backlog: Mutex::new(Backlog {
                nodes: BTreeMap::new(),
                due: BTreeSet::new(),
                later: Wakes::default(),
                asked_at: now,
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
        let backlog = &mut *guard;
        if changes.is_empty() && occurrences.is_empty() && !backlog.nodes.contains_key(&view.name) {
            return;
        }
        let node = backlog
            .nodes
            .entry(view.name.clone())
            .or_insert_with(|| Node::new(Arc::clone(view), now));
        node.take_in(faults, changes, occurrences, view, self.started_at);
        if node.is_done() {
            backlog.nodes.remove(&view.name);
            backlog.due.remove(&view.name);
            backlog.later.set(&view.name, None);
        } else {
            if !node.changes.is_empty() && !node.under_way {
                node.work.get_or_insert_with(|| self.queue.add());
            }
            backlog.due.insert(view.name.clone());
            drop(guard);
            self.posted.notify_one();
        }
    }

    /// Takes in that what we have written on the node may not be there any more, and that its
    /// versions begin lower.
    pub(super) fn restored(&self, node: &str) {
        if let Some(node) = self.lock().nodes.get_mut(node) {
            node.written = 0;
        }
    }

    pub(super) fn gone(&self, node: &str) {
        let mut backlog = self.lock();
        backlog.nodes.remove(node);
        backlog.due.remove(node);
        backlog.later.set(node, None);
    }

    /// Returns the jobs that are due, so many at most.
    pub(super) fn take(&self, now: Timestamp, most: usize) -> Vec<Job> {
        let mut guard = self.lock();
        let backlog = &mut *guard;
        backlog.watch_the_clock(now);
        let later = backlog.later.take_due(now);
        backlog.due.extend(later);
        let mut jobs = Vec::new();
        while jobs.len() < most
            && let Some(name) = backlog.due.pop_first()
        {
            let Some(node) = backlog.nodes.get_mut(&name) else {
                continue;
            };
            if node.under_way {
                continue; // Looked at again when it is done.
            }
            if let Some(at) = node.not_before.filter(|at| *at > now) {
                backlog.later.set(&name, Some(at));
                continue;
            }
            let (events, wake) = node.events(self.events, &mut backlog.all, now);
            backlog.later.set(&name, wake);
            if node.changes.is_empty() && events.is_empty() {
                node.work = None;
                continue;
            }
            node.work.get_or_insert_with(|| self.queue.add()).begin();
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

    /// Returns when to take again, if nothing is posted.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.lock().later.next()
    }

    pub(super) fn done(&self, result: JobResult, now: Timestamp) {
        let mut guard = self.lock();
        let backlog = &mut *guard;
        let Some(node) = backlog.nodes.get_mut(&result.node) else {
            return;
        };
        node.under_way = false;
        node.work = None;
        if let Some(version) = result.written {
            node.wrote(&result.changes);
            node.written = version.parse().unwrap_or_default();
        }
        for (key, recovered, count) in result.told {
            node.told(&key, recovered, count, now);
        }
        match result.failed {
            None => {
                node.failures = 0;
                node.not_before = None;
            }
            Some(Failed { retry_after }) => {
                self.queue.retry();
                node.work = Some(self.queue.add());
                node.failures = node.failures.saturating_add(1);
                let doublings = node.failures.min(10) - 1;
                let wait = (RETRY * (1 << doublings)).min(LONGEST_RETRY);
                let wish = retry_after.and_then(|wish| SignedDuration::try_from(wish).ok());
                let wait = wish.map_or(wait, |wish| wait.max(wish.min(LONGEST_RETRY)));
                node.not_before = Some(now + wait);
            }
        }
        backlog.due.insert(result.node);
    }

    /// Has all nodes looked at again that a job was under way for, after a bug.
    pub(super) fn none_under_way(&self) {
        let mut guard = self.lock();
        let backlog = &mut *guard;
        for (name, node) in &mut backlog.nodes {
            node.under_way = false;
            node.work = None;
            backlog.due.insert(name.clone());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Backlog> {
        self.backlog.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Backlog ===

impl Backlog {
    /// Ends all waits where the clock was put back since it was last asked.
    fn watch_the_clock(&mut self, now: Timestamp) {
        let before = std::mem::replace(&mut self.asked_at, now);
        if now >= before - CLOCK_SLACK {
            return;
        }
        self.later = Wakes::default();
        self.all = Bucket::new(ALL_BURST, ALL_REFILL, now);
        for (name, node) in &mut self.nodes {
            node.not_before = None;
            node.bucket = Bucket::new(NODE_BURST, NODE_REFILL, now);
            for told in node.told.values_mut() {
                told.at = told.at.min(now);
            }
            self.due.insert(name.clone());
        }
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
            work: None,
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

    /// Takes in that these are written; what was asked for meanwhile stays.
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

    /// Returns whether nothing is to be told or to be remembered.
    fn is_done(&self) -> bool {
        let seen = version(&self.view) >= self.written;
        let nothing =
            self.changes.is_empty() && self.occurrences.is_empty() && self.told.is_empty();
        nothing && seen && !self.under_way
    }

    /// Returns the Events to tell now, and when to look again for more.
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

/// Returns the version of a view. Versions are comparable numbers in every Kubernetes we know;
/// where they are not, each view counts as new.
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
        pod: None,
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
mod tests;
