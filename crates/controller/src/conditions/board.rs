//! Board: the reports due for each node, and those already made.

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

/// Most Events of one node at once.
const NODE_BURST: i64 = 20;
/// Time after which a node may have one more Event.
const NODE_REFILL: SignedDuration = SignedDuration::from_secs(15);
/// Most Events of all nodes at once, as etcd keeps each for an hour.
const ALL_BURST: i64 = 1_000;
/// Time after which all nodes together may have one more Event.
const ALL_REFILL: SignedDuration = SignedDuration::from_millis(50);
/// Shortest pause between two updates of an Event's count.
const REPEAT_EVERY: SignedDuration = SignedDuration::from_secs(10);
/// Age of a fault at the start that excludes it from Events. Newer faults may have none yet; if
/// one has, its Event is found again by its name.
const REPORT_AGAIN: SignedDuration = SignedDuration::from_mins(10);
/// Most Events that are remembered for one node.
const MAX_REPORTED: usize = 4 * condition::MAX_OCCURRENCES;
/// First pause after a failure; each further one doubles.
const RETRY: SignedDuration = SignedDuration::from_millis(200);
/// Longest pause after a failure.
const LONGEST_RETRY: SignedDuration = SignedDuration::from_secs(30);
/// Longest name of a node that leaves room for the key in the name of an Event (bytes).
const MAX_NODE_IN_NAME: usize = 200;

/// State that the board and its reporter share.
pub(super) struct Shared {
    conditions: Option<Options>,
    events: Option<EventKind>,
    started_at: Timestamp,
    backlog: Mutex<Backlog>,
    queue: WorkQueue,
    /// Notified after each post.
    pub(super) posted: Notify,
}

/// Nodes with reports, and when each is due.
struct Backlog {
    /// Nodes with reports, due or made.
    nodes: BTreeMap<String, Node>,
    /// Nodes that are due now.
    due: BTreeSet<String>,
    /// Nodes that are due later.
    later: Wakes,
    /// Time of the last call of [`Shared::take`].
    asked_at: Timestamp,
    all: Bucket,
}

struct Node {
    view: Arc<NodeView>,
    /// Changes of conditions to write.
    changes: Vec<ConditionChange>,
    /// Open faults that are not fatal.
    occurrences: Vec<Occurrence>,
    /// Events that were written, by key of the fault.
    reported: BTreeMap<String, Reported>,
    bucket: Bucket,
    /// Pending work, for the metrics of the queue.
    work: Option<Work>,
    under_way: bool,
    failures: u32,
    not_before: Option<Timestamp>,
    /// Version of the node after our last patch. Older views do not show the patch.
    written: u64,
}

struct Reported {
    occurrence: Occurrence,
    /// Count in the Event.
    count: u64,
    at: Timestamp,
    /// True if the faults of the Event are closed, and the recovery is to be reported.
    recovered: bool,
}

/// Requests to the API server about one node.
pub(super) struct Job {
    pub(super) view: Arc<NodeView>,
    pub(super) changes: Vec<ConditionChange>,
    pub(super) events: Vec<EventRequest>,
    /// True unless the last attempt failed.
    pub(super) first: bool,
}

/// An Event to create or update.
pub(super) struct EventRequest {
    pub(super) key: String,
    pub(super) event: Event,
    /// True to raise the count of an Event, false to create one.
    pub(super) repeat: bool,
    /// True if the Event reports the recovery.
    pub(super) recovered: bool,
}

/// A request that failed.
pub(super) struct Failed {
    /// Pause that the API server asks for, if any.
    pub(super) retry_after: Option<Duration>,
}

/// Result of a [`Job`].
pub(super) struct JobResult {
    pub(super) node: String,
    /// Version of the node after its conditions were written.
    pub(super) written: Option<String>,
    /// Conditions that were written.
    pub(super) changes: Vec<ConditionChange>,
    /// The failed request, if any.
    pub(super) failed: Option<Failed>,
    /// Events that were written: key, true for a recovery, count.
    pub(super) reported: Vec<(String, bool, u64)>,
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
        checks: impl Iterator<Item = &'a str>,
        view: &Arc<NodeView>,
        now: Timestamp,
    ) {
        let changes = self.conditions.map_or_else(Vec::new, |options| {
            condition::changes(faults, checks, view, &options)
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
        node.update(faults, changes, occurrences, view, self.started_at);
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

    /// Forgets the version of our last patch: the patch may be lost, and versions may begin
    /// lower.
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

    /// Takes up to `most` due jobs.
    pub(super) fn take(&self, now: Timestamp, most: usize) -> Vec<Job> {
        let mut guard = self.lock();
        let backlog = &mut *guard;
        backlog.detect_clock_step(now);
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
                continue; // Due again when the job is done.
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

    /// Returns when to call [`Self::take`] again, if nothing is posted before.
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
            node.record_written(&result.changes);
            node.written = version.parse().unwrap_or_default();
        }
        for (key, recovered, count) in result.reported {
            node.record_reported(&key, recovered, count, now);
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
                let asked = retry_after.and_then(|asked| SignedDuration::try_from(asked).ok());
                let wait = asked.map_or(wait, |asked| wait.max(asked.min(LONGEST_RETRY)));
                node.not_before = Some(now + wait);
            }
        }
        backlog.due.insert(result.node);
    }

    /// Makes all nodes due again, after a job was lost to a bug.
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
    /// Ends all waits if the clock was set back since the last call.
    fn detect_clock_step(&mut self, now: Timestamp) {
        let before = std::mem::replace(&mut self.asked_at, now);
        if now >= before - CLOCK_SLACK {
            return;
        }
        self.later = Wakes::default();
        self.all = Bucket::new(ALL_BURST, ALL_REFILL, now);
        for (name, node) in &mut self.nodes {
            node.not_before = None;
            node.bucket = Bucket::new(NODE_BURST, NODE_REFILL, now);
            for reported in node.reported.values_mut() {
                reported.at = reported.at.min(now);
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
            reported: BTreeMap::new(),
            bucket: Bucket::new(NODE_BURST, NODE_REFILL, now),
            work: None,
            under_way: false,
            failures: 0,
            not_before: None,
            written: 0,
        }
    }

    fn update(
        &mut self,
        faults: &[Fault],
        changes: Vec<ConditionChange>,
        occurrences: Vec<Occurrence>,
        view: &Arc<NodeView>,
        started_at: Timestamp,
    ) {
        if self.view.uid != view.uid {
            // A recreated node of the same name.
            self.written = 0;
        }
        // A view from before our last patch would cause it to be written again. A newer view
        // will follow.
        if version(view) >= self.written {
            self.changes = changes;
            self.view = Arc::clone(view);
        }
        for (key, reported) in &mut self.reported {
            reported.recovered = !condition::is_open(faults, key);
        }
        for occurrence in &occurrences {
            let old = occurrence.accepted_at < started_at - REPORT_AGAIN;
            if old && !self.reported.contains_key(&occurrence.key) {
                let reported = Reported {
                    occurrence: occurrence.clone(),
                    count: occurrence.count,
                    at: occurrence.accepted_at,
                    recovered: false,
                };
                self.reported.insert(occurrence.key.clone(), reported);
            }
        }
        self.occurrences = occurrences;
        // Recoveries that have waited longest are dropped without an Event.
        while self.reported.len() > MAX_REPORTED
            && let Some(oldest) = self
                .reported
                .iter()
                .min_by_key(|(_, reported)| (!reported.recovered, reported.at))
                .map(|(key, _)| key.clone())
        {
            self.reported.remove(&oldest);
        }
    }

    /// Removes the changes that were written; newer ones stay.
    fn record_written(&mut self, written: &[ConditionChange]) {
        self.changes.retain(|change| !written.contains(change));
        for change in &mut self.changes {
            let condition = &change.condition;
            let same = |other: &&ConditionChange| other.condition.kind == condition.kind;
            if let Some(other) = written.iter().find(same) {
                change.transition = other.condition.status != condition.status;
            }
        }
    }

    /// Returns true if no report is due or to be remembered.
    fn is_done(&self) -> bool {
        let seen = version(&self.view) >= self.written;
        let nothing =
            self.changes.is_empty() && self.occurrences.is_empty() && self.reported.is_empty();
        nothing && seen && !self.under_way
    }

    /// Returns the Events that are due now, and when the next ones are.
    fn events(
        &mut self,
        kind: Option<EventKind>,
        all: &mut Bucket,
        now: Timestamp,
    ) -> (Vec<EventRequest>, Option<Timestamp>) {
        let (mut events, mut wake) = (Vec::new(), None::<Timestamp>);
        let Some(kind) = kind else {
            return (events, wake);
        };
        let recovered = self.reported.values().filter(|reported| reported.recovered);
        let recovered = recovered.map(|reported| (&reported.occurrence, true, false));
        let open = self.occurrences.iter().filter_map(|occurrence| {
            match self.reported.get(&occurrence.key) {
                None => Some((occurrence, false, false)),
                Some(reported) if reported.count == occurrence.count => None,
                Some(reported) if reported.at + REPEAT_EVERY > now => {
                    let at = reported.at + REPEAT_EVERY;
                    wake = Some(wake.map_or(at, |wake| wake.min(at)));
                    None
                }
                Some(_) => Some((occurrence, false, true)),
            }
        });
        // Recoveries last, so that the Event of a fault precedes that of its recovery.
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
            events.push(EventRequest {
                key: occurrence.key.clone(),
                event: event(&self.view.name, occurrence, kind, recovered, now),
                repeat,
                recovered,
            });
        }
        (events, wake)
    }

    fn record_reported(&mut self, key: &str, recovered: bool, count: u64, now: Timestamp) {
        if recovered {
            self.reported.remove(key);
            return;
        }
        if let Some(reported) = self.reported.get_mut(key) {
            (reported.count, reported.at) = (count, now);
            return;
        }
        let Some(occurrence) = self.occurrences.iter().find(|one| one.key == key) else {
            return; // Closed, or fatal, before it was reported.
        };
        let reported = Reported {
            occurrence: occurrence.clone(),
            count,
            at: now,
            recovered: false,
        };
        self.reported.insert(key.to_owned(), reported);
    }
}

/// Returns the version of a view. Versions are comparable numbers in all known releases of
/// Kubernetes; otherwise each view counts as new.
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
