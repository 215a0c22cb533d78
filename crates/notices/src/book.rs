//! The book of all maintenances: takes readings, and says what to report.

mod progress;

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::notice::{Notice, Reading};
use crate::record::{Record, Settled, State};
use crate::report::{Report, Reported};

/// Most maintenances that are not over: a notice for each node of a large cluster. Notices beyond
/// it are counted and wait for room.
pub const MAX_OPEN: usize = 20_000;
/// Most maintenances that are over and kept, to be shown; also those whose notice is still there,
/// up to twice as many, since they would be taken for new ones.
pub const MAX_ENDED: usize = 1_000;
/// Time after which an open fault that this book has not reported is taken over.
const STRANGE: SignedDuration = SignedDuration::from_mins(1);
/// Longest id and word of a notice (bytes): a name in an event.
const MAX_TEXT: usize = 253;
/// Longest id of a resource (bytes): a value in an event.
const MAX_RESOURCE: usize = 1024;

/// Times of all maintenances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Time before the begin from which the node is to be out of service.
    pub limit: SignedDuration,
    /// Time after the end until the node returns.
    pub delay: SignedDuration,
    /// Time after that in which the node has to be ready.
    pub readiness: SignedDuration,
    /// Time for which a notice has to be missing until it counts as gone.
    pub missing: SignedDuration,
}

/// State of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeState {
    /// True if its condition `Ready` is true.
    pub ready: bool,
    /// Boot id; empty if unknown.
    pub boot_id: String,
    /// True if gpuwarden has taken it out of service.
    pub is_out: bool,
}

/// All maintenances; see the [module](self).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Book {
    /// Maintenances, in the order of their first notice.
    records: Vec<Record>,
    /// Last report, by node. `None` for a report of an earlier book.
    reported: BTreeMap<String, Option<Reported>>,
    /// Nodes with an open fault that this book has not reported, and since when that is seen.
    #[serde(skip)]
    strange: BTreeMap<String, Timestamp>,
    /// Number of records ever made, for their ids.
    made: u64,
    /// Time of the last successful poll of each source that is asked from time to time.
    polled: BTreeMap<String, Timestamp>,
    /// Notices of the last readings that found no room.
    #[serde(skip)]
    left_out: usize,
}

/// Records of a book during a reading.
struct Index<'a> {
    /// The source that is read.
    source: &'a str,
    /// Position of the newest record of the source for each node and provider's id.
    newest: BTreeMap<(String, String), usize>,
    /// Ids of all records.
    ids: BTreeSet<String>,
    /// Number of records that are not over.
    open: usize,
}

// === impl Book ===

impl Book {
    /// Returns all maintenances, in the order of their first notice.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Notes whether the provider was told, by a mark on the node, that the maintenance with this
    /// id may begin.
    pub fn set_told_to_begin(&mut self, id: &str, told: Option<Timestamp>) {
        let mut records = self.records.iter_mut();
        if let Some(record) = records.find(|record| record.id == id) {
            record.told_to_begin = told;
        }
    }

    /// Returns the number of notices that found no room since the last call.
    pub fn take_left_out(&mut self) -> usize {
        std::mem::take(&mut self.left_out)
    }

    /// Takes over the reports of an earlier book. `open` are the nodes with an open fault: one that
    /// this book has not reported for a minute ends once the node is ready and no notice is about it.
    /// The minute is for reports on their way.
    pub fn take_over(&mut self, open: &BTreeSet<&str>, now: Timestamp) {
        let reported = &self.reported;
        let is_strange = |node: &str| open.contains(node) && !reported.contains_key(node);
        self.strange.retain(|node, _| is_strange(node));
        for node in open.iter().filter(|node| is_strange(node)) {
            self.strange.entry((*node).to_owned()).or_insert(now);
        }
        let reported = &mut self.reported;
        self.strange.retain(|node, since| {
            let is_due = now.duration_since(*since) >= STRANGE;
            if is_due {
                reported.insert(node.clone(), None);
            }
            !is_due
        });
    }

    /// Returns whether there are open faults that wait to be taken over.
    pub fn takes_over(&self) -> bool {
        !self.strange.is_empty()
    }

    /// Returns the time of the last successful poll of each source.
    pub fn polled(&self) -> &BTreeMap<String, Timestamp> {
        &self.polled
    }

    /// Takes a reading that was asked for at `at`; the next one is to reach back to there.
    pub fn poll(&mut self, source: &str, reading: &Reading, at: Timestamp, now: Timestamp) {
        self.read(source, reading, now);
        self.polled.insert(source.to_owned(), at);
    }

    /// Takes it that all notices of sources other than `sources` are gone: nobody asks these any
    /// longer.
    pub fn keep(&mut self, sources: &BTreeSet<&str>, now: Timestamp) {
        self.polled
            .retain(|source, _| sources.contains(source.as_str()));
        for record in &mut self.records {
            if !sources.contains(record.source.as_str()) {
                record.vanished = record.vanished.or(Some(now));
            }
        }
    }

    /// Takes a reading of a source.
    pub fn read(&mut self, source: &str, reading: &Reading, now: Timestamp) {
        let mut index = Index::of(&self.records, source);
        let mut told = BTreeSet::new();
        for notice in &reading.notices {
            let notice = bounded(notice);
            told.insert((notice.node.clone(), notice.event.clone()));
            self.take(&mut index, &notice, now);
        }
        if !reading.complete {
            return;
        }
        for record in &mut self.records {
            let is_missing = record.source == source
                && record.vanished.is_none()
                && !reading.unseen.contains(&record.node)
                && !told.contains(&(record.node.clone(), record.event.clone()));
            if is_missing {
                record.vanished = Some(now);
            }
        }
    }

    /// Takes a notice.
    fn take(&mut self, index: &mut Index<'_>, notice: &Notice, now: Timestamp) {
        let known = index.newest(notice).and_then(|at| self.records.get_mut(at));
        let Some(record) = known else {
            // One that was over before it was known has changed nothing.
            if notice.phase.is_open() {
                self.add(index, notice, now);
            }
            return;
        };
        let is_older = matches!((notice.updated, record.updated), (Some(a), Some(b)) if a < b);
        if is_older {
            return;
        }
        // A source without times tells what holds now; another may be read again late.
        let is_now = notice.updated.is_none() || notice.updated > record.updated;
        if record.state.is_last() && is_another(record, notice, is_now) {
            self.add(index, notice, now);
            return;
        }
        let is_settled = record.settled == Some(Settled::Provider);
        if record.state.is_last() || (is_settled && !is_now) {
            record.vanished = None;
            return;
        }
        let before = record.clone();
        record.update(notice);
        if *record != before {
            record.changed = now;
        }
        // The maintenance was not over, or is going on again.
        let is_back = record.settled.is_some() || record.state == State::Error;
        if is_back && notice.phase.is_open() {
            (record.settled, record.ended) = (None, None);
            let state = match record.out_since {
                Some(_) => State::QuarantineTriggered,
                None => State::Detected,
            };
            record.enter(state, now);
        }
    }

    fn add(&mut self, index: &mut Index<'_>, notice: &Notice, now: Timestamp) {
        if index.open >= MAX_OPEN {
            self.left_out += 1;
            return;
        }
        self.made += 1;
        let own = || format!("{}-{}-{}", notice.provider, notice.node, self.made);
        let of_provider = Some(&notice.event).filter(|id| !id.is_empty());
        let of_provider = of_provider.filter(|id| !index.ids.contains(*id));
        let id = of_provider.cloned().unwrap_or_else(own);
        let record = Record::new(id, index.source, notice, now);
        index.add(&record, self.records.len());
        self.records.push(record);
    }

    /// Advances all maintenances to `now`, and returns what is to be reported. `node` returns the
    /// state of a node, `None` if the cluster does not have it. After about `most` reports the
    /// others wait for the next step.
    pub fn step(
        &mut self,
        node: impl Fn(&str) -> Option<NodeState>,
        settings: &Settings,
        most: usize,
        now: Timestamp,
    ) -> Vec<Report> {
        for record in &mut self.records {
            if !record.state.is_last() {
                let state = node(&record.node);
                progress::advance(record, state, settings, now);
            }
        }
        self.forget();
        self.report(node, most)
    }

    /// Returns what differs from what was reported last.
    fn report(&mut self, node: impl Fn(&str) -> Option<NodeState>, most: usize) -> Vec<Report> {
        let mut gravest: BTreeMap<&str, &Record> = BTreeMap::new();
        for record in self.records.iter().filter(|one| !one.state.is_last()) {
            // A second source of the same maintenance is no new report of a node that is out.
            let reported = self.reported.get(&record.node).and_then(Option::as_ref);
            let is_new = |one: &Record| reported.is_none_or(|reported| reported.id != one.id);
            let rank = |one: &Record| match one.out_since {
                Some(_) => (false, is_new(one), one.start),
                None => (true, false, one.start),
            };
            let held = gravest.entry(&record.node).or_insert(record);
            if rank(record) < rank(held) {
                *held = record;
            }
        }
        let wanted: BTreeMap<String, Reported> = gravest
            .into_iter()
            .map(|(node, record)| (node.to_owned(), Reported::of(record)))
            .collect();
        let names: BTreeSet<String> = (self.reported.keys().chain(wanted.keys()))
            .cloned()
            .collect();
        let mut reports = Vec::new();
        for name in names {
            if reports.len() >= most {
                break;
            }
            let next = wanted.get(&name);
            let is_ready = || node(&name).is_none_or(|node| node.ready);
            let ends = match (self.reported.get(&name), next) {
                (Some(Some(before)), Some(next)) => before != next && !before.can_become(next),
                (Some(Some(_)), None) => true,
                // Nobody knows whether that maintenance is over: the node has to show it.
                (Some(None), None) => is_ready(),
                (Some(None), Some(next)) => !next.fatal,
                (None, _) => false,
            };
            if ends {
                let before = self.reported.remove(&name).flatten();
                reports.push(Report::healthy(&name, before));
            }
            let before = self.reported.get(&name).and_then(Option::as_ref);
            if let Some(next) = next.filter(|next| before != Some(next)) {
                reports.push(Report::of(&name, next.clone()));
                self.reported.insert(name, Some(next.clone()));
            }
        }
        reports
    }

    /// Forgets the oldest maintenances that are over, beyond [`MAX_ENDED`].
    fn forget(&mut self) {
        let is_ended = |record: &Record| record.state.is_last();
        let ended = self.records.iter().filter(|one| is_ended(one)).count();
        let mut beyond = ended.saturating_sub(MAX_ENDED);
        let mut beyond_all = ended.saturating_sub(2 * MAX_ENDED);
        self.records.retain(|record| {
            let may = is_ended(record) && beyond > 0;
            let goes = may && (record.vanished.is_some() || beyond_all > 0);
            if goes {
                beyond -= 1;
                beyond_all = beyond_all.saturating_sub(1);
            }
            !goes
        });
    }
}

// === impl Index ===

impl<'a> Index<'a> {
    fn of(records: &[Record], source: &'a str) -> Self {
        let mut index = Self {
            source,
            newest: BTreeMap::new(),
            ids: BTreeSet::new(),
            open: 0,
        };
        for (at, record) in records.iter().enumerate() {
            index.add(record, at);
        }
        index
    }

    fn add(&mut self, record: &Record, at: usize) {
        if record.source == self.source {
            let key = (record.node.clone(), record.event.clone());
            self.newest.insert(key, at);
        }
        self.ids.insert(record.id.clone());
        self.open += usize::from(!record.state.is_last());
    }

    /// Returns the position of the newest record that a notice is about.
    fn newest(&self, notice: &Notice) -> Option<usize> {
        let key = (notice.node.clone(), notice.event.clone());
        self.newest.get(&key).copied()
    }
}

/// Returns whether a notice is about another maintenance than the one of `record`, which is over
/// and has the same node and id. `is_now`: the notice is newer than the record.
fn is_another(record: &Record, notice: &Notice, is_now: bool) -> bool {
    let was_over = record.vanished.is_some() || (!record.phase.is_open() && is_now);
    notice.phase.is_open() && was_over
}

/// Returns the notice with its texts cut to their limit.
fn bounded(notice: &Notice) -> Notice {
    let mut notice = notice.clone();
    let (kind, id) = &mut notice.resource;
    for (text, most) in [
        (&mut notice.event, MAX_TEXT),
        (&mut notice.word, MAX_TEXT),
        (kind, MAX_TEXT),
        (id, MAX_RESOURCE),
    ] {
        let mut end = text.len().min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    notice
}
