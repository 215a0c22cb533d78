//! The room of the fault book: who gets it where it is full, and how reports that got none are read
//! again.
//!
//! Anybody who may report can report a thousand faults. So each authority has a room of its
//! own, and within it no reporter takes the place of another that has less: where the room is
//! full, what quarantines nothing goes first, then the faults of whoever has most.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use contract::{HealthEvent, RecommendedAction, keys};
use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::{Fault, FaultBook, MAX_FAULT_BYTES_PER_NODE, MAX_OPEN_FAULTS_PER_NODE};
use crate::event::{Record, is_notice};
use crate::position::Position;
use crate::reporter::Authority;

/// Reports about a node that found no room, of one authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Missed {
    /// Feed position of the first of them.
    from: Position,
    /// Their number.
    count: u64,
    /// Bytes of the smallest of them: where that does not fit, nothing does.
    least: usize,
}

/// A second reading of what found no room: the faults that were reported since, and are not healed,
/// are found apart from the book, with as much room as that has.
#[derive(Debug)]
pub struct Rereading {
    node: String,
    authority: Authority,
    count: u64,
    /// Feed position of the first event that it reads.
    from: Position,
    found: FaultBook,
    /// Position and size of the first report that found no room here either.
    no_room: Option<(Position, usize)>,
}

/// The room that the faults of one authority take up.
#[derive(Clone, Copy, Default)]
struct Used {
    faults: usize,
    bytes: usize,
}

/// The weight of a report where room is short, the lightest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    /// It quarantines nothing, by its reporter's own word.
    AsksNothing,
    NotFatal,
    Fatal,
}

/// Chooses who of `faults` has to go so that a report finds room: for one more fault, or, where
/// it is to stand for the fault at `replaces`, for `more` bytes. Returns their indices; `None`:
/// there is no room for it.
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

/// Takes the chosen faults out.
pub(super) fn take_out(faults: &mut Vec<Fault>, chosen: &BTreeSet<usize>) -> Vec<Fault> {
    if chosen.is_empty() {
        return Vec::new();
    }
    let indexed = std::mem::take(faults).into_iter().enumerate();
    let (out, kept): (Vec<_>, Vec<_>) = indexed.partition(|(index, _)| chosen.contains(index));
    *faults = kept.into_iter().map(|(_, fault)| fault).collect();
    out.into_iter().map(|(_, fault)| fault).collect()
}

/// Chooses the fault that makes place for a report: one that weighs less, else one of a
/// reporter that has more than the report's own would have with it.
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
        // The oldest of the lightest, of whoever has most.
        (is_lighter || has > with_it).then_some((!is_lighter, weight, Reverse(has), index))
    });
    candidates.min().map(|(.., index)| index)
}

/// Returns who an event is from, apart from the pid.
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

    /// Returns whether a good part of the room is free, and enough for what was missed, so that
    /// reading again is worth it.
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
    /// Returns the feed position up to which it has read.
    pub fn read_up_to(&self) -> Position {
        self.found.applied()
    }

    /// Returns the node whose events it reads.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Reads an event. Where what it reports finds no room here either, the rest is left for
    /// another time: then at least what came first is known.
    pub fn record(&mut self, record: &Record) {
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

    fn has_room_for(&mut self, record: &Record) -> bool {
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
    /// Returns how many reports about `node` found no room and were not read again yet: while
    /// there are any, the node is not fully seen.
    pub fn missed(&self, node: &str) -> u64 {
        let missed = self.missed.get(node).into_iter().flatten();
        missed.map(|(_, missed)| missed.count).sum()
    }

    /// Returns true if reports of monitors are among those that found no room: the node may be
    /// broken by what is not known, and is not given back before they are read again.
    pub fn misses_monitors(&self, node: &str) -> bool {
        let missed = self.missed.get(node);
        missed.is_some_and(|missed| missed.contains_key(&Authority::Trusted))
    }

    /// Begins to read again what was missed of a node for which there is room now: what weighs
    /// more first, then the nodes in turn, behind the one that was read last. `None`: nothing was
    /// missed, or there is still no room for it.
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

    /// Takes in what was read again, up to the position that this book is at.
    pub fn take_missed(&mut self, reread: Rereading) {
        let Rereading {
            node,
            authority,
            count,
            from: read_from,
            mut found,
            no_room,
        } = reread;
        // What had to go meanwhile, and is older than what was read.
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
        for fault in found.nodes.remove(&node).unwrap_or_default() {
            let faults = self.nodes.entry(node.clone()).or_default();
            let same = |known: &Fault| known.is(&fault.event, &fault.code, &fault.subject);
            if faults.iter().any(same) {
                continue;
            }
            match choose(faults, &fault.event, None, fault.bytes) {
                Some(chosen) if chosen.is_empty() => faults.push(fault),
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
    }

    /// Notes that the report at `seq`, of so many bytes, found no room.
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
            self.note_missed(node, fault.authority, fault.seq, fault.bytes);
        }
    }
}

#[cfg(test)]
mod tests;
