//! `Deduplicator`: of a fault that is reported again and again, the reactions see one report
//! per window; the others are stored for analysis only (`STORE_AND_ANALYSE`).
//!
//! What is the same is NVSentinel's: node, check, entities and codes, in any order; here
//! also the agent and the reporter's authority, which belong to a fault. Held back is only what changes nothing: a
//! report passes where it is graver or milder than the one before, asks for something else,
//! or comes after a recovery. Reports that no reaction looks at are left alone.
//!
//! The window begins with the report that passed, and is not extended by those that it holds
//! back. A report counts as passed once it is stored: where storing fails, its sender's next
//! attempt passes. Every doubt (no room, a clock that jumps, a restart) lets a report
//! through, which costs a look, and never holds one back, which could cost a fault.

use std::collections::HashMap;

use contract::{BehaviourOverrides, Entity, HealthEvent, ProcessingStrategy, json, keys};
use diagnosis::subject::canonical_value;
use jiff::{SignedDuration, Timestamp};
use model::event::{Record, content_fingerprint, counts, lacks_own_time};
use model::fault::may_be_before;
use model::position::Position;
use model::reporter::Authority;

use super::annotate;

/// Most memory for reports that passed (bytes): some 30,000 faults of usual size. Beyond it further
/// faults pass and are not remembered, until windows have ended.
pub const MAX_SEEN_BYTES: usize = 16 * 1024 * 1024;
/// Most faults of a node, agent and check that are remembered: each report is held against
/// all of them. As many as a node's open faults (`fault/book.rs`); further ones pass, too.
pub const MAX_SEEN_PER_SCOPE: usize = 1024;
/// Approximate memory of a fault beside its texts (bytes).
const FAULT_OVERHEAD: usize = 256;

/// The settings of the deduplicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The time in which a report holds back its repeats.
    pub window: SignedDuration,
    /// The time between two removals of windows that have ended.
    pub cleanup: SignedDuration,
    /// The checks whose repeats are taken out; empty: all.
    pub checks: Vec<String>,
}

/// The memory of the reports that passed lately.
#[derive(Debug)]
pub struct Deduplicator {
    settings: Settings,
    scopes: HashMap<Scope, HashMap<FaultKey, Report>>,
    bytes: usize,
    room: usize,
    cleaned_at: Timestamp,
    /// The time of the newest record that was taken in from before a restart.
    recalled: Timestamp,
    batches: u64,
}

/// The reports of a batch that are to hold back others once they are stored.
#[must_use = "say whether it was stored"]
#[derive(Debug)]
pub struct Batch {
    number: u64,
    /// The time at which it came.
    now: Timestamp,
    passed: Vec<(Scope, FaultKey, usize)>,
}

/// The treatment of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// The event goes on as it is.
    Passes,
    /// The event goes on as it is, and there is no room to remember it.
    NoRoom,
    /// The event repeats another, and was taken out of the reactions.
    Repeats(Original),
}

/// The report that an event repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Original {
    /// Its id.
    pub id: String,
    /// Its position in the feed; `None`: it is of the same batch.
    pub seq: Option<Position>,
}

/// The faults among which a recovery looks for those that it heals.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Scope {
    node: String,
    agent: String,
    check: String,
    authority: Authority,
}

/// The key by which reports of a fault are the same: entities and codes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FaultKey {
    /// Entities as type and value, sorted.
    entities: Vec<(String, String)>,
    /// Codes, sorted.
    codes: Vec<String>,
}

/// The report that passed.
#[derive(Debug)]
struct Report {
    id: String,
    /// A hash of its content, where it had no time of its own.
    fingerprint: Option<String>,
    weight: Weight,
    /// The time at which it counts as accepted: a count is as old as the last report that it
    /// counts.
    received: Timestamp,
    /// The time at which it was observed.
    observed: Option<Timestamp>,
    state: Storing,
    /// Room that it takes.
    bytes: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Storing {
    /// The report is being stored with this batch.
    Pending(u64),
    /// The report is stored at this position.
    Stored(Position),
}

/// The fields of a report that decide about reactions.
#[derive(Debug, PartialEq, Eq)]
struct Weight {
    fatal: bool,
    action: i32,
    custom_action: String,
    component_class: String,
    quarantine: Option<BehaviourOverrides>,
    drain: Option<BehaviourOverrides>,
}

// === impl Deduplicator ===

impl Deduplicator {
    /// Returns a deduplicator that remembers nothing.
    pub fn new(settings: Settings) -> Self {
        Self::with_room(settings, MAX_SEEN_BYTES)
    }

    fn with_room(settings: Settings, room: usize) -> Self {
        Self {
            settings,
            scopes: HashMap::new(),
            bytes: 0,
            room,
            cleaned_at: Timestamp::MIN,
            recalled: Timestamp::MIN,
            batches: 0,
        }
    }

    /// Begins a batch that came at `now`. Its events are then judged one by one, and at last
    /// it is [`stored`](Self::stored) or [`not_stored`](Self::not_stored). A batch of which
    /// that is never said holds nothing back.
    pub fn begin(&mut self, now: Timestamp) -> Batch {
        let since = now.duration_since(self.cleaned_at);
        if since.is_negative() || since >= self.settings.cleanup {
            self.forget_ended(now);
        }
        self.batches += 1;
        Batch {
            number: self.batches,
            now,
            passed: Vec::new(),
        }
    }

    /// Judges the event at `index` of a batch, and takes it out of the reactions where it
    /// repeats another. The event is [normalised](model::event::normalise), and counts as
    /// accepted at `accepted`.
    pub fn judge(
        &mut self,
        batch: &mut Batch,
        index: usize,
        event: &mut HealthEvent,
        accepted: Timestamp,
    ) -> Treatment {
        let checks = &self.settings.checks;
        // What neither opens nor closes a fault must not hold back what does.
        if !(checks.is_empty() || checks.contains(&event.check_name)) || !counts(event) {
            return Treatment::Passes;
        }
        let scope = Scope::of(event);
        // A recovery, whether or not it will be stored. A strategy that we do not know is
        // its sender's, and stays.
        let usual = ProcessingStrategy::ExecuteRemediation as i32;
        if event.is_healthy || event.processing_strategy != usual {
            self.forget_healed(&scope, event);
            return Treatment::Passes;
        }
        let subject = FaultKey::of(event);
        let seen = self.scopes.get(&scope).and_then(|seen| seen.get(&subject));
        if let Some(report) = seen
            && report.holds_back(event, &self.settings, batch.number, accepted)
        {
            if report.is(event) {
                // Sent again: the store is to find it as it was.
                return Treatment::Passes;
            }
            event.processing_strategy = ProcessingStrategy::StoreAndAnalyse as i32;
            annotate(event, keys::META_REPEAT_OF, &report.id);
            return Treatment::Repeats(Original {
                id: report.id.clone(),
                seq: report.seq(),
            });
        }
        let report = Report::pending(event, &scope, &subject, batch.number, accepted);
        // What said something else of the same fault, perhaps with other codes beside it, is
        // not the last word any more.
        self.retain(&scope, |seen, other| {
            *seen != subject && (other.weight == report.weight || !seen.may_concern(event))
        });
        // What comes late may be from before a recovery, and open nothing (`fault/closed.rs`):
        // it must not hold back what is new.
        if may_be_before(event, batch.now.duration_since(accepted)) {
            return Treatment::Passes;
        }
        if !self.remember(&scope, &subject, report) {
            return Treatment::NoRoom;
        }
        batch.passed.push((scope, subject, index));
        Treatment::Passes
    }

    /// Takes note that the batch is stored: the event at an index has the position that `seq`
    /// tells.
    pub fn stored(&mut self, batch: Batch, seq: impl Fn(usize) -> Option<Position>) {
        for (scope, subject, index) in batch.passed {
            let seen = self.scopes.get_mut(&scope);
            let report = seen.and_then(|seen| seen.get_mut(&subject));
            // Another report, or a recovery, may have come meanwhile.
            if let Some(report) = report
                && report.state == Storing::Pending(batch.number)
                && let Some(seq) = seq(index)
            {
                report.state = Storing::Stored(seq);
            }
        }
    }

    /// Takes note that the batch could not be stored: its reports count as never seen.
    pub fn not_stored(&mut self, batch: Batch) {
        let number = batch.number;
        for (scope, subject, _) in batch.passed {
            self.retain(&scope, |seen, report| {
                *seen != subject || report.state != Storing::Pending(number)
            });
        }
    }

    /// Takes in a record that was stored before a restart, oldest first.
    pub fn recall(&mut self, record: &Record) {
        self.recalled = self.recalled.max(record.created_at);
        let mut batch = self.begin(self.recalled);
        let mut event = record.event.clone();
        self.judge(&mut batch, 0, &mut event, record.created_at);
        self.stored(batch, |_| Some(record.seq));
    }

    /// Returns the time in which reports hold back others.
    pub fn window(&self) -> SignedDuration {
        self.settings.window
    }

    /// Returns how many faults are remembered.
    pub fn remembered(&self) -> usize {
        self.scopes.values().map(HashMap::len).sum()
    }

    fn remember(&mut self, scope: &Scope, subject: &FaultKey, report: Report) -> bool {
        let bytes = self.bytes + report.bytes;
        let beside = self.scopes.get(scope).map_or(0, HashMap::len);
        if bytes > self.room || beside >= MAX_SEEN_PER_SCOPE {
            return false;
        }
        self.bytes = bytes;
        let seen = self.scopes.entry(scope.clone()).or_default();
        seen.insert(subject.clone(), report);
        true
    }

    /// Forgets the reports of the recovery's own authority, and of lower ones, that it may concern.
    fn forget_healed(&mut self, scope: &Scope, recovery: &HealthEvent) {
        for authority in [Authority::User, Authority::Trusted] {
            if authority <= scope.authority {
                let scope = Scope {
                    authority,
                    ..scope.clone()
                };
                self.retain(&scope, |subject, _| !subject.may_concern(recovery));
            }
        }
    }

    fn forget_ended(&mut self, now: Timestamp) {
        self.cleaned_at = now;
        let (window, mut freed) = (self.settings.window, 0);
        self.scopes.retain(|_, seen| {
            seen.retain(|_, report| {
                let keep = within(window, report.received, now);
                freed += if keep { 0 } else { report.bytes };
                keep
            });
            !seen.is_empty()
        });
        self.bytes -= freed;
    }

    fn retain(&mut self, scope: &Scope, keep: impl Fn(&FaultKey, &Report) -> bool) {
        let Some(seen) = self.scopes.get_mut(scope) else {
            return;
        };
        let bytes = &mut self.bytes;
        seen.retain(|subject, report| {
            let keep = keep(subject, report);
            *bytes -= if keep { 0 } else { report.bytes };
            keep
        });
        if seen.is_empty() {
            self.scopes.remove(scope);
        }
    }
}

// === impl Scope ===

impl Scope {
    fn of(event: &HealthEvent) -> Self {
        Self {
            node: event.node_name.clone(),
            agent: event.agent.clone(),
            check: event.check_name.clone(),
            authority: Authority::of(event),
        }
    }
}

// === impl FaultKey ===

impl FaultKey {
    fn of(event: &HealthEvent) -> Self {
        let entities = event.entities_impacted.iter();
        let mut entities: Vec<_> = entities
            .map(|entity| (entity.entity_type.clone(), entity.entity_value.clone()))
            .collect();
        entities.sort();
        let mut codes = event.error_code.clone();
        codes.sort();
        Self { entities, codes }
    }

    /// Returns whether an event of the same scope may concern faults with this key. That is more
    /// than what `heals` closes: it may know a device by another name, so it does not only where all
    /// that it names are others of the same types.
    fn may_concern(&self, event: &HealthEvent) -> bool {
        let codes = &event.error_code;
        let any_code = codes.is_empty() || codes.iter().any(|code| self.codes.contains(code));
        let of_others = |entity: &Entity| {
            let value = canonical_value(&entity.entity_type, &entity.entity_value);
            let of_type = |(kind, _): &&(String, String)| *kind == entity.entity_type;
            let mut same_type = self.entities.iter().filter(of_type).peekable();
            same_type.peek().is_some()
                && same_type.all(|(kind, own)| canonical_value(kind, own) != value)
        };
        let entities = &event.entities_impacted;
        any_code && (entities.is_empty() || !entities.iter().all(of_others))
    }
}

// === impl Report ===

impl Report {
    fn pending(
        event: &HealthEvent,
        scope: &Scope,
        subject: &FaultKey,
        batch: u64,
        accepted: Timestamp,
    ) -> Self {
        let weight = Weight::of(event);
        let entities = subject.entities.iter();
        let bytes = FAULT_OVERHEAD
            + [&scope.node, &scope.agent, &scope.check]
                .into_iter()
                .chain([&weight.custom_action, &weight.component_class])
                .chain(entities.flat_map(|(kind, value)| [kind, value]))
                .chain(&subject.codes)
                .map(|text| size_of::<String>() + text.len())
                .sum::<usize>();
        Self {
            id: event.id.clone(),
            fingerprint: lacks_own_time(event).then(|| content_fingerprint(event)),
            weight,
            received: accepted,
            observed: event.generated_timestamp.and_then(json::timestamp),
            state: Storing::Pending(batch),
            bytes,
        }
    }

    /// Returns whether an event about the same subject changes nothing after this report.
    fn holds_back(
        &self,
        event: &HealthEvent,
        with: &Settings,
        batch: u64,
        accepted: Timestamp,
    ) -> bool {
        // While another batch is being stored, nobody knows whether it will be.
        let counts = match self.state {
            Storing::Pending(own) => own == batch,
            Storing::Stored(_) => true,
        };
        // By both times: reports of an hour may be read from a log in one second.
        let observed = event.generated_timestamp.and_then(json::timestamp);
        let near = self
            .observed
            .zip(observed)
            .is_none_or(|(first, second)| second.duration_since(first).abs() < with.window);
        counts
            && near
            && within(with.window, self.received, accepted)
            && self.weight == Weight::of(event)
    }

    /// Returns whether an event is this very report, sent again.
    fn is(&self, event: &HealthEvent) -> bool {
        match &self.fingerprint {
            None => self.id == event.id,
            Some(own) => lacks_own_time(event) && *own == content_fingerprint(event),
        }
    }

    fn seq(&self) -> Option<Position> {
        match self.state {
            Storing::Pending(_) => None,
            Storing::Stored(seq) => Some(seq),
        }
    }
}

// === impl Weight ===

impl Weight {
    fn of(event: &HealthEvent) -> Self {
        Self {
            fatal: event.is_fatal,
            action: event.recommended_action,
            custom_action: event.custom_recommended_action.clone(),
            component_class: event.component_class.clone(),
            quarantine: event.quarantine_overrides,
            drain: event.drain_overrides,
        }
    }
}

/// Returns whether less than `window` has passed since `first`, on a clock that did not go back.
fn within(window: SignedDuration, first: Timestamp, now: Timestamp) -> bool {
    let since = now.duration_since(first);
    !since.is_negative() && since < window
}

#[cfg(test)]
mod tests;
