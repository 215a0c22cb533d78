//! `Deduplicator`: of a fault that is reported repeatedly, the reactions receive one report per
//! window. The others are stored for analysis only (`STORE_AND_ANALYSE`).
//!
//! Reports are repeats, as in NVSentinel, if node, check, entities and codes are equal, in any
//! order; and, in addition, the agent and the reporter's authority, which are part of a fault. A
//! report is held back only if it changes nothing: it passes if its gravity differs from the
//! last one's, if it asks for another action, or if it follows a recovery. Reports without
//! reactions are left alone.
//!
//! The window begins with the report that passed, and is not extended by repeats. A report
//! counts as passed once it is stored: if storing fails, the sender's next attempt passes. In
//! doubt (no room, a clock that jumps, a restart) a report passes, which costs an evaluation;
//! holding it back could hide a fault.

use std::collections::HashMap;

use contract::{BehaviourOverrides, Entity, HealthEvent, ProcessingStrategy, json, keys};
use diagnosis::subject::canonical_value;
use jiff::{SignedDuration, Timestamp};
use model::event::{EventRecord, content_fingerprint, counts, lacks_own_time};
use model::fault::may_be_before;
use model::position::Position;
use model::reporter::Authority;

use super::annotate;

/// Memory limit for reports that passed (bytes): about 30,000 faults of usual size. Beyond it,
/// further faults pass without being remembered, until windows end.
pub const MAX_SEEN_BYTES: usize = 16 * 1024 * 1024;
/// Largest number of remembered faults of a node, agent and check, because each report is
/// compared with all of them: as many as a node's open faults (`fault/book.rs`). Further ones
/// pass as well.
pub const MAX_SEEN_PER_SCOPE: usize = 1024;
/// Approximate memory of a fault in addition to its texts (bytes).
const FAULT_OVERHEAD: usize = 256;

/// Settings of the deduplicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Time during which a report holds back its repeats.
    pub window: SignedDuration,
    /// Interval between two removals of ended windows.
    pub cleanup: SignedDuration,
    /// Checks whose repeats are held back; empty for all.
    pub checks: Vec<String>,
}

/// State of the deduplicator: the reports that passed lately.
#[derive(Debug)]
pub struct Deduplicator {
    settings: Settings,
    scopes: HashMap<Scope, HashMap<FaultKey, Report>>,
    bytes: usize,
    room: usize,
    cleaned_at: Timestamp,
    /// Time of the newest record that was read after a restart.
    recalled: Timestamp,
    batches: u64,
}

/// Reports of a batch that hold back others once they are stored.
#[must_use = "say whether it was stored"]
#[derive(Debug)]
pub struct Batch {
    number: u64,
    /// Time of arrival of the batch.
    now: Timestamp,
    passed: Vec<(Scope, FaultKey, usize)>,
}

/// Result for an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// The event passes unchanged.
    Passes,
    /// The event passes unchanged, and is not remembered for lack of room.
    NoRoom,
    /// The event repeats another, and is hidden from the reactions.
    Repeats(Original),
}

/// Report that an event repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Original {
    /// Id of the report's event.
    pub id: String,
    /// Position of the report in the feed; `None` if it is in the same batch.
    pub seq: Option<Position>,
}

/// Faults that a recovery may close.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Scope {
    node: String,
    agent: String,
    check: String,
    authority: Authority,
}

/// Key of a fault within its scope: entities and codes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FaultKey {
    /// Entities as type and value, sorted.
    entities: Vec<(String, String)>,
    /// Error codes of the event, sorted.
    codes: Vec<String>,
}

/// A report that passed.
#[derive(Debug)]
struct Report {
    id: String,
    /// Hash of the content, for a report without a time of its own.
    fingerprint: Option<String>,
    weight: Weight,
    /// Time of acceptance: for a count of repeats, that of the last report counted.
    received: Timestamp,
    /// Time of observation, by the sender.
    observed: Option<Timestamp>,
    state: Storing,
    /// Memory of the report (bytes).
    bytes: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Storing {
    /// The report is being stored with this batch.
    Pending(u64),
    /// The report is stored at this position.
    Stored(Position),
}

/// Fields of a report that affect the reactions.
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
    /// Returns a deduplicator without remembered reports.
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

    /// Begins a batch that arrives at `now`. Call [`judge`](Self::judge) for each event, and
    /// then [`stored`](Self::stored) or [`not_stored`](Self::not_stored). Without either, the
    /// batch holds nothing back.
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

    /// Judges the event at `index` of a batch, and hides it from the reactions if it repeats
    /// another. The event is [normalised](model::event::normalise), and counts as accepted at
    /// `accepted`.
    pub fn judge(
        &mut self,
        batch: &mut Batch,
        index: usize,
        event: &mut HealthEvent,
        accepted: Timestamp,
    ) -> Treatment {
        let checks = &self.settings.checks;
        // Events that neither open nor close a fault must not hold back others.
        if !(checks.is_empty() || checks.contains(&event.check_name)) || !counts(event) {
            return Treatment::Passes;
        }
        let scope = Scope::of(event);
        // A recovery, whether or not it will be stored. An unknown strategy is the sender's
        // choice and stays.
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
                // The sender's retry: the store must find the same event to recognise it.
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
        // A different report of this fault, possibly with other codes, is outdated by this one.
        self.retain(&scope, |seen, other| {
            *seen != subject && (other.weight == report.weight || !seen.may_concern(event))
        });
        // A late report may predate a recovery and open no fault (`fault/closed.rs`), so it must
        // not hold back newer ones.
        if may_be_before(event, batch.now.duration_since(accepted)) {
            return Treatment::Passes;
        }
        if !self.remember(&scope, &subject, report) {
            return Treatment::NoRoom;
        }
        batch.passed.push((scope, subject, index));
        Treatment::Passes
    }

    /// Records that the batch is stored. `seq` returns the position of the event at an index.
    pub fn stored(&mut self, batch: Batch, seq: impl Fn(usize) -> Option<Position>) {
        for (scope, subject, index) in batch.passed {
            let seen = self.scopes.get_mut(&scope);
            let report = seen.and_then(|seen| seen.get_mut(&subject));
            // Another report, or a recovery, may have arrived in between.
            if let Some(report) = report
                && report.state == Storing::Pending(batch.number)
                && let Some(seq) = seq(index)
            {
                report.state = Storing::Stored(seq);
            }
        }
    }

    /// Records that the batch could not be stored: its reports are forgotten.
    pub fn not_stored(&mut self, batch: Batch) {
        let number = batch.number;
        for (scope, subject, _) in batch.passed {
            self.retain(&scope, |seen, report| {
                *seen != subject || report.state != Storing::Pending(number)
            });
        }
    }

    /// Remembers a record that was stored before a restart. Call it with the oldest first.
    pub fn recall(&mut self, record: &EventRecord) {
        self.recalled = self.recalled.max(record.created_at);
        let mut batch = self.begin(self.recalled);
        let mut event = record.event.clone();
        self.judge(&mut batch, 0, &mut event, record.created_at);
        self.stored(batch, |_| Some(record.seq));
    }

    /// Returns the time during which reports hold back repeats.
    pub fn window(&self) -> SignedDuration {
        self.settings.window
    }

    /// Returns the number of remembered faults.
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

    /// Forgets the reports that a recovery may concern, of its own authority and of lower ones.
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

    /// Returns true if an event of the same scope may concern faults with this key. That covers
    /// more than `heals` closes, because the event may name a device differently: the result is
    /// false only if all its entities differ from those of the same type.
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

    /// Returns true if an event about the same subject changes nothing after this report.
    fn holds_back(
        &self,
        event: &HealthEvent,
        with: &Settings,
        batch: u64,
        accepted: Timestamp,
    ) -> bool {
        // While another batch is being stored, the result is unknown.
        let counts = match self.state {
            Storing::Pending(own) => own == batch,
            Storing::Stored(_) => true,
        };
        // Both times are compared, because reports of an hour may be read from a log in one
        // second.
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

    /// Returns true if an event is the sender's retry of this report.
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

/// Returns true if less than `window` has passed since `first`; false if the clock went back.
fn within(window: SignedDuration, first: Timestamp, now: Timestamp) -> bool {
    let since = now.duration_since(first);
    !since.is_negative() && since < window
}

#[cfg(test)]
mod tests;
