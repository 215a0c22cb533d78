//! Decides without I/O when to request the Lease, when to renew it, and when it is lost.
//!
//! Times come from the process's monotonic clock, and are arguments. A missing answer is
//! [`LeaseAnswer::Unknown`]: the request may have been carried out, or may still be.

use std::time::Duration;

use tokio::time::Instant;

use crate::tenure::RENEW_DEADLINE;

/// Time that other candidates leave an unchanged Lease alone. With [`RENEW_DEADLINE`] and
/// [`RETRY`] these are the numbers of Kubernetes' own controllers, which have proven themselves
/// against API servers that restart. A cluster is without a leader for so long after its leader
/// was killed; with a shorter time a slow API server would depose leaders.
pub(crate) const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Pause between two renewals, and between two reads of a candidate on standby.
pub(crate) const RETRY: Duration = Duration::from_secs(2);

/// The content of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseRecord {
    /// Version of the object (`metadata.resourceVersion`).
    pub(crate) version: String,
    /// Name of the holder; empty if there is none.
    pub(crate) holder: String,
    /// Duration that the holder has written; `None` if absent.
    pub(crate) duration: Option<Duration>,
    /// Number of changes of the holder.
    pub(crate) transitions: u32,
}

/// A request to the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// A read of the Lease.
    Read,
    /// Creation of the Lease, held by this process.
    Create,
    /// Takeover of the Lease, if it still has this version.
    Take(LeaseRecord),
    /// Renewal of the Lease, if it still has this version.
    Renew(LeaseRecord),
}

/// The answer to an [`Ask`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LeaseAnswer {
    /// Answer to [`Ask::Read`]; `None` if there is no Lease.
    Found(Option<LeaseRecord>),
    /// The request was carried out, and this is the Lease afterwards.
    Written(LeaseRecord),
    /// The request was refused: the Lease has changed since it was read.
    Changed,
    /// The result of the request is not known.
    Unknown,
}

/// The next step of the election.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Send a request now.
    Ask(Ask),
    /// Wait until a time.
    Wait(Instant),
    /// This process has lost the lead, for good.
    Deposed(Deposed),
}

/// Reason why the lead was lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Deposed {
    /// The API server did not confirm a renewal within the deadline.
    #[error("the Lease could not be renewed for {} s", RENEW_DEADLINE.as_secs())]
    NotRenewed,
    /// Another process, of this name, holds the Lease.
    #[error("{0} has taken the Lease over")]
    Taken(String),
    /// The Lease has no holder any longer, or was deleted.
    #[error("somebody has cleared or deleted the Lease")]
    Cleared,
}

/// State of one candidate.
#[derive(Debug)]
pub(crate) struct Election {
    me: String,
    /// The Lease as last observed; `None` if there was none.
    seen: Option<LeaseRecord>,
    /// True if `seen`, or its absence, comes from the last answer.
    fresh: bool,
    /// Time until which only the holder may have the Lease.
    held_until: Option<Instant>,
    /// Time when the last confirmed renewal was sent; `None` if this process has never led.
    renewed_at: Option<Instant>,
    /// Time of the next request, at the earliest.
    next_at: Instant,
    /// True if a request without an answer may have made this process the holder.
    unanswered: bool,
    deposed: Option<Deposed>,
}

// === impl Election ===

impl Election {
    pub(crate) fn new(me: String, now: Instant) -> Self {
        Self {
            me,
            seen: None,
            fresh: false,
            held_until: None,
            renewed_at: None,
            next_at: now,
            unanswered: false,
            deposed: None,
        }
    }

    /// Returns when the last confirmed renewal was sent; `None` unless this process leads.
    pub(crate) fn renewed_at(&self) -> Option<Instant> {
        self.renewed_at.filter(|_| self.deposed.is_none())
    }

    /// Returns the last observed holder; empty if there is none.
    pub(crate) fn holder(&self) -> &str {
        self.seen.as_ref().map_or("", |seen| &seen.holder)
    }

    /// Returns true if this process may be the holder of the Lease.
    pub(crate) fn may_hold(&self) -> bool {
        self.unanswered || (self.renewed_at.is_some() && self.deposed.is_none())
    }

    /// Returns the step to take at `now`. The caller has to send a request that is returned, as
    /// its sending is recorded here.
    pub(crate) fn next(&mut self, now: Instant) -> NextStep {
        if let Some(renewed_at) = self.renewed_at
            && now >= renewed_at + RENEW_DEADLINE
        {
            self.deposed.get_or_insert(Deposed::NotRenewed);
        }
        if let Some(deposed) = &self.deposed {
            return NextStep::Deposed(deposed.clone());
        }
        if now < self.next_at {
            return NextStep::Wait(self.next_at);
        }
        let ask = match &self.seen {
            _ if !self.fresh => Ask::Read,
            Some(seen) if self.renewed_at.is_some() => Ask::Renew(seen.clone()),
            _ if self.held_until.is_some_and(|until| now < until) => Ask::Read,
            Some(seen) => Ask::Take(seen.clone()),
            None => Ask::Create,
        };
        // Holds until the answer, or if there is none.
        self.next_at = now + RETRY;
        if !matches!(ask, Ask::Read) {
            self.unanswered = true;
        }
        NextStep::Ask(ask)
    }

    /// Brings the next request forward to `now`.
    pub(crate) fn ask_at_once(&mut self, now: Instant) {
        self.next_at = self.next_at.min(now);
    }

    /// Handles the answer, at `now`, to the request that was sent at `asked_at`.
    pub(crate) fn answered(&mut self, asked_at: Instant, answer: LeaseAnswer, now: Instant) {
        match answer {
            // A leader continues with its last state: a conflict shows a change.
            LeaseAnswer::Unknown => self.fresh &= self.renewed_at.is_some(),
            LeaseAnswer::Changed => {
                self.unanswered = false;
                self.fresh = false;
                self.next_at = now;
            }
            LeaseAnswer::Written(record) => {
                self.unanswered = false;
                self.remember(record, now);
                self.renewed_at = Some(asked_at);
                self.next_at = asked_at + RETRY;
            }
            LeaseAnswer::Found(found) => self.observe(found, now),
        }
    }

    fn observe(&mut self, found: Option<LeaseRecord>, now: Instant) {
        let holder = found.as_ref().map_or("", |record| record.holder.as_str());
        if self.renewed_at.is_some() && holder != self.me {
            self.deposed = Some(match holder {
                "" => Deposed::Cleared,
                other => Deposed::Taken(other.to_owned()),
            });
            self.unanswered = false;
        }
        if let Some(record) = found {
            self.remember(record, now);
        } else {
            // The last observed holder may continue until it notices, so `held_until` stays.
            // Without one there is nothing to wait for.
            self.seen = None;
            self.fresh = true;
        }
        // At once if no other process may hold the Lease, else when the holder's time is over.
        let until = self.held_until.unwrap_or(now);
        self.next_at = until.clamp(now, now + RETRY);
    }

    fn remember(&mut self, record: LeaseRecord, now: Instant) {
        self.fresh = true;
        if (self.seen.as_ref()).is_some_and(|seen| seen.version == record.version) {
            return;
        }
        let others = !record.holder.is_empty() && record.holder != self.me;
        let duration = record.duration.unwrap_or(LEASE_DURATION);
        self.held_until = others.then(|| now + duration);
        self.seen = Some(record);
    }
}

#[cfg(test)]
mod tests;
