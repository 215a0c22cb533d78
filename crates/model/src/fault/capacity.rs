//! Capacity of the fault book: which faults are evicted if it is full, and how reports without
//! room are read again.
//!
//! Any permitted reporter can report a thousand faults. Each authority therefore has its own
//! room. Within that room no reporter can evict the faults of another one that has fewer:
//! faults that quarantine nothing go first, then those of the reporter that has most.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use contract::{HealthEvent, RecommendedAction, keys};
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::{Fault, FaultBook, MAX_FAULT_BYTES_PER_NODE, MAX_OPEN_FAULTS_PER_NODE};
use crate::event::{EventRecord, is_notice};
use crate::position::Position;
use crate::reporter::Authority;

/// Reports of one authority about a node that found no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Missed {
    /// Feed position of the first report.
    from: Position,
    /// Number of the reports.
    count: u64,
    /// Size of the smallest report, in bytes. If it does not fit, none does.
    least: usize,
}

/// A second reading of events that found no room. Faults that were reported since and have not
/// recovered are collected apart from the book, within the same limits.
#[derive(Debug)]
pub struct Rereading {
    node: String,
    authority: Authority,
    count: u64,
    /// Feed position of the first event to read.
    from: Position,
    found: FaultBook,
    /// Position and size of the first report that found no room in `found` either.
    no_room: Option<(Position, usize)>,
}

/// Room taken up by the faults of one authority.
#[derive(Clone, Copy, Default)]
struct Used {
    faults: usize,
    bytes: usize,
}

/// Weight of a report when room is short, lightest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    /// Quarantines nothing: a notice, or the reporter asked to skip quarantine.
    AsksNothing,
    NotFatal,
    Fatal,
}

/// Chooses which of `faults` to evict to make room for a report: for one more fault, or for
/// `more` bytes if the report's event is to replace that of the fault at index `replaces`.
/// Returns their indices. `None` if the report gets no room.
pub(super) fn choose(
    faults: &[Fault],
    event: &HealthEvent,
    replaces: Option<usize>,
    more: usize,
) -> Option<BTreeSet<usize>> {
    let authority = Authority::of(event);
    let indexed = faults.iter().enumerate();
    let mut left: Vec<(usize, &Fault)> = indexed
        .filter(|(_, fault)| fault.authority == authority)
        .collect();
    let mut gone = BTreeSet::new();
    loop {
        let used = Used::of(left.iter().map(|(_, fault)| *fault));
        let too_many = replaces.is_none() && used.faults >= MAX_OPEN_FAULTS_PER_NODE;
        if !too_many && used.bytes + more <= MAX_FAULT_BYTES_PER_NODE {
            return Some(gone);
        }
        let others = left.iter().filter(|(index, _)| Some(*index) != replaces);
        let index = victim(others.copied().collect(), event, too_many, more)?;
        left.retain(|(other, _)| *other != index);
        gone.insert(index);
    }
}

/// Removes and returns the chosen faults.
pub(super) fn remove(faults: &mut Vec<Fault>, chosen: &BTreeSet<usize>) -> Vec<Fault> {
    if chosen.is_empty() {
        return Vec::new();
    }
    let indexed = std::mem::take(faults).into_iter().enumerate();
    let (out, kept): (Vec<_>, Vec<_>) = indexed.partition(|(index, _)| chosen.contains(index));
    *faults = kept.into_iter().map(|(_, fault)| fault).collect();
    out.into_iter().map(|(_, fault)| fault).collect()
}

/// Chooses the fault to evict for a report: a lighter one, or else one of a reporter that has
/// more than the report's own reporter would have with it.
fn victim(
    faults: Vec<(usize, &Fault)>,
    event: &HealthEvent,
    too_many: bool,
    more: usize,
) -> Option<usize> {
    let mut used: BTreeMap<&str, Used> = BTreeMap::new();
    for (_, fault) in &faults {
        let used = used.entry(reporter(&fault.event)).or_default();
        *used = used.and(fault);
    }
    let has = |event: &HealthEvent| {
        let used = used.get(reporter(event)).copied().unwrap_or_default();
        if too_many { used.faults } else { used.bytes }
    };
    let with_it = has(event) + if too_many { 1 } else { more };
    let own_weight = Weight::of(event);
    let candidates = faults.into_iter().filter_map(|(index, fault)| {
        let (weight, has) = (Weight::of(&fault.event), has(&fault.event));
        let is_lighter = weight < own_weight;
        // The oldest among the lightest, from the reporter that has most.
        (is_lighter || has > with_it).then_some((!is_lighter, weight, Reverse(has), index))
    });
    candidates.min().map(|(.., index)| index)
}

/// Returns the reporter of an event, without the pid.
fn reporter(event: &HealthEvent) -> &str {
    let mark = event.metadata.get(keys::META_REPORTED_BY);
    let mark = mark.map_or("", String::as_str);
    mark.split_once(" pid=").map_or(mark, |(who, _)| who)
}

// === impl Used ===

impl Used {
    fn of<'a>(faults: impl Iterator<Item = &'a Fault>) -> Self {
        faults.fold(Self::default(), Self::and)
    }

    fn and(self, fault: &Fault) -> Self {
        Self {
            faults: self.faults + 1,
            bytes: self.bytes + fault.bytes,
        }
    }

    /// Returns whether at least a quarter of the room is free, and enough for the smallest
    /// missed report, so that reading again is worthwhile.
    fn leaves_room(self, least: usize) -> bool {
        self.faults <= MAX_OPEN_FAULTS_PER_NODE / 4 * 3
            && self.bytes <= MAX_FAULT_BYTES_PER_NODE / 4 * 3
            && self.bytes + least <= MAX_FAULT_BYTES_PER_NODE
    }
}

// === impl Weight ===

impl Weight {
    fn of(event: &HealthEvent) -> Self {
        let overrides = event.quarantine_overrides.as_ref();
        let (skips, forces) = overrides.map_or((false, false), |one| (one.skip, one.force));
        if forces {
            Self::Fatal
        } else if skips || is_notice(event) {
            Self::AsksNothing
        } else if event.is_fatal || event.recommended_action == RecommendedAction::ReplaceVm as i32
        {
            Self::Fatal
        } else {
            Self::NotFatal
        }
    }
}

// === impl Rereading ===

impl Rereading {
    /// Returns the position of the last event that was read.
    pub fn read_up_to(&self) -> Position {
        self.found.applied()
    }

    /// Returns the node whose events are read.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Reads an event. Once a report finds no room in this reading either, the remaining ones
    /// are left for a later reading, so the earliest reports are known first.
    pub fn record(&mut self, record: &EventRecord) {
        let event = &record.event;
        let concerns = event.node_name == self.node
            && (event.is_healthy
                || (Authority::of(event) == self.authority && self.has_room_for(record)));
        if concerns {
            self.found.record(record);
        } else {
            self.found.pass_over(record.seq);
        }
    }

    fn has_room_for(&mut self, record: &EventRecord) -> bool {
        let event = &record.event;
        let faults = self.found.faults(&self.node);
        if faults.is_empty() || !self.found.touched_by(event).is_empty() {
            return self.no_room.is_none() || !faults.is_empty();
        }
        let opens = event.entities_impacted.len().max(1) * event.error_code.len().max(1);
        let used = Used::of(faults.iter());
        let size = event.encoded_len();
        let has_room = self.no_room.is_none()
            && used.faults + opens <= MAX_OPEN_FAULTS_PER_NODE
            && used.bytes + opens * size <= MAX_FAULT_BYTES_PER_NODE;
        if !has_room {
            let (_, least) = self.no_room.get_or_insert((record.seq, size));
            *least = size.min(*least);
        }
        has_room
    }
}

// === impl FaultBook ===

impl FaultBook {
    /// Returns the number of reports about `node` that found no room and were not read again
    /// yet. While there are any, the node's state is incomplete.
    pub fn missed(&self, node: &str) -> u64 {
        let missed = self.missed.get(node).into_iter().flatten();
        missed.map(|(_, missed)| missed.count).sum()
    }

    /// Returns whether reports of monitors are among those without room. The node may have an
    /// unknown fault, so it does not return to service before they are read again.
    pub fn misses_monitors(&self, node: &str) -> bool {
        let missed = self.missed.get(node);
        missed.is_some_and(|missed| missed.contains_key(&Authority::Trusted))
    }

    /// Starts reading the missed reports of a node that has room for them now. Reports of
    /// monitors come first, then nodes in turn, starting after `last`, the node that was read
    /// last. `None` if no report was missed, or there is still no room.
    pub fn read_again(&self, last: &str) -> Option<Rereading> {
        let behind = (Bound::Excluded(last), Bound::Unbounded);
        let before = (Bound::Unbounded, Bound::Included(last));
        let in_turn = || {
            let rest = self.missed.range::<str, _>(behind);
            rest.chain(self.missed.range::<str, _>(before))
        };
        [Authority::Trusted, Authority::User]
            .into_iter()
            .find_map(|authority| {
                let own = |fault: &&Fault| fault.authority == authority;
                in_turn().find_map(|(node, missed)| {
                    let missed = missed.get(&authority)?;
                    let used = Used::of(self.faults(node).iter().filter(own));
                    let mut found = Self::since(missed.from.before());
                    found.closed.restore(node, self.closed.of(node).to_vec());
                    used.leaves_room(missed.least).then_some(Rereading {
                        node: node.clone(),
                        authority,
                        count: missed.count,
                        from: missed.from,
                        found,
                        no_room: None,
                    })
                })
            })
    }

    /// Returns the feed position of the first report of monitors that found no room.
    pub fn missed_from(&self) -> Option<Position> {
        let missed = self.missed.values();
        let trusted = missed.filter_map(|missed| missed.get(&Authority::Trusted));
        trusted.map(|missed| missed.from).min()
    }

    /// Adds the result of a second reading that has caught up with this book. Returns the names of
    /// the other nodes whose faults got or lost their cause by that.
    pub fn add_missed(&mut self, reread: Rereading) -> BTreeSet<String> {
        let Rereading {
            node,
            authority,
            count,
            from: read_from,
            mut found,
            no_room,
        } = reread;
        let domains = self.domains_of_primaries(&node);
        // Reports evicted meanwhile that are older than the ones that were read.
        let older = self.missed.get(&node).and_then(|all| all.get(&authority));
        let older = older.filter(|missed| missed.from < read_from);
        let mut left = older.map(|missed| (missed.from, missed.least));
        let mut leave = |from: Position, least: usize| {
            left = Some(left.map_or((from, least), |known| {
                (known.0.min(from), known.1.min(least))
            }));
        };
        if let Some((from, least)) = no_room {
            leave(from, least);
        }
        for mut fault in found.nodes.remove(&node).unwrap_or_default() {
            let faults = self.nodes.entry(node.clone()).or_default();
            let same = |known: &Fault| known.is(&fault.event, &fault.code, &fault.subject);
            if faults.iter().any(same) {
                continue;
            }
            match choose(faults, &fault.event, None, fault.bytes) {
                Some(chosen) if chosen.is_empty() => {
                    fault.incident = String::new();
                    self.incidents.enter(&mut fault);
                    faults.push(fault);
                }
                _ => leave(fault.seq, fault.bytes),
            }
        }
        if self.faults(&node).is_empty() {
            self.nodes.remove(&node);
        }
        let missed = self.missed.entry(node.clone()).or_default();
        match left {
            Some((from, least)) => {
                missed.insert(authority, Missed { from, count, least });
            }
            None => {
                missed.remove(&authority);
            }
        }
        if missed.is_empty() {
            self.missed.remove(&node);
        }
        // The reading knew only the faults of one node, and the causes among them.
        self.settle_causes(&node, None, domains)
    }

    /// Records that the report at `seq`, of this size, found no room.
    pub(super) fn note_missed(
        &mut self,
        node: &str,
        authority: Authority,
        seq: Position,
        bytes: usize,
    ) {
        self.overflow += 1;
        let missed = self.missed.entry(node.to_owned()).or_default();
        let missed = missed.entry(authority).or_insert(Missed {
            from: seq,
            count: 0,
            least: bytes,
        });
        missed.from = missed.from.min(seq);
        missed.least = missed.least.min(bytes);
        missed.count += 1;
    }

    pub(super) fn note_evicted(&mut self, node: &str, gone: &[Fault]) {
        for fault in gone {
            self.incidents.leave(fault);
            self.note_missed(node, fault.authority, fault.seq, fault.bytes);
        }
    }
}

#[cfg(test)]
mod tests;
