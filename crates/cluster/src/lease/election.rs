//! Decides when to ask for the Lease, when to renew it, and when it is lost: without I/O.
//!
//! Times are of one process's own monotonic clock, and are arguments. An answer that was
//! lost is [`LeaseAnswer::Unknown`]: what was asked for may have been done, or may yet be.

use std::time::Duration;

use tokio::time::Instant;

use crate::tenure::RENEW_DEADLINE;

/// Time for which the others leave an unchanged Lease alone. Together with [`RENEW_DEADLINE`] and
/// [`RETRY`] these are the numbers of Kubernetes' own controllers, which have proven themselves
/// against API servers that restart: a leader that was killed is missed for so long, and a shorter
/// time would let a slow API server depose leaders.
pub(crate) const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Between two renewals, and between two looks of who stands by.
pub(crate) const RETRY: Duration = Duration::from_secs(2);
/// The Lease as somebody wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// `metadata.resourceVersion`.
    pub(crate) version: String,
    /// The holder; empty: nobody.
    pub(crate) holder: String,
    /// Time for which its holder relies on it; `None`: not said.
    pub(crate) duration: Option<Duration>,
    /// Number of times that it has changed hands.
    pub(crate) transitions: u32,
}

/// A request to the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Read the Lease.
    Read,
    /// Make it, with us as the holder.
    Create,
    /// Make us the holder, if it still has this version.
    Take(Record),
    /// Renew it, if it still has this version.
    Renew(Record),
}

/// The answer to an [`Ask`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LeaseAnswer {
    /// The answer to [`Ask::Read`]; `None`: there is no Lease.
    Found(Option<Record>),
    /// It is done, and this is the Lease now.
    Written(Record),
    /// It is not done: the Lease is not what we had seen.
    Changed,
    /// Nobody knows.
    Unknown,
}

/// The next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Ask this now.
    Ask(Ask),
    /// Do nothing before then.
    Wait(Instant),
    /// We led, and do not any more. This does not change.
    Deposed(Deposed),
}

/// The reason why we lead no more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Deposed {
    /// The API server did not confirm a renewal in time.
    #[error("the Lease could not be renewed for {} s", RENEW_DEADLINE.as_secs())]
    NotRenewed,
    /// Another holds it.
    #[error("{0} has taken the Lease over")]
    Taken(String),
    /// Somebody took it away: it has no holder, or is gone.
    #[error("somebody has cleared or deleted the Lease")]
    Cleared,
}

/// One process's part in the election.
#[derive(Debug)]
pub(crate) struct Election {
    me: String,
    /// The Lease as last seen.
    seen: Option<Record>,
    /// True if `seen` (or that there is none) is as of the last answer.
    fresh: bool,
    /// The time until which nobody but its holder may have it.
    held_until: Option<Instant>,
    /// The time when the last renewal was sent that was confirmed; `None`: we have never led.
    renewed_at: Option<Instant>,
    /// The time before which nothing is asked.
    next_at: Instant,
    /// We may hold it without knowing.
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

    /// Returns when the last confirmed renewal was sent, while we lead.
    pub(crate) fn renewed_at(&self) -> Option<Instant> {
        self.renewed_at.filter(|_| self.deposed.is_none())
    }

    /// Returns the holder, as last seen; empty: nobody.
    pub(crate) fn holder(&self) -> &str {
        self.seen.as_ref().map_or("", |seen| &seen.holder)
    }

    /// Returns true if the Lease may have us as its holder.
    pub(crate) fn may_hold(&self) -> bool {
        self.unanswered || (self.renewed_at.is_some() && self.deposed.is_none())
    }

    /// Returns the step to take at `now`. Takes note of it: a request that it returns has to be
    /// made.
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
        // Until it is answered, or if it never is.
        self.next_at = now + RETRY;
        if !matches!(ask, Ask::Read) {
            self.unanswered = true;
        }
        NextStep::Ask(ask)
    }

    /// Lets the next request be made at `now`.
    pub(crate) fn ask_at_once(&mut self, now: Instant) {
        self.next_at = self.next_at.min(now);
    }

    /// Takes in the answer, at `now`, to what was asked at `asked_at`.
    pub(crate) fn answered(&mut self, asked_at: Instant, answer: LeaseAnswer, now: Instant) {
        match answer {
            // A leader goes on with what it knows: it is told where that has changed.
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
            LeaseAnswer::Found(found) => self.take_in_lease(found, now),
        }
    }

    fn take_in_lease(&mut self, found: Option<Record>, now: Instant) {
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
            // Whom we last saw with it may go on until it notices: `held_until` stays. Who
            // has seen nobody has nothing to wait for.
            self.seen = None;
            self.fresh = true;
        }
        // At once where nobody else may have it, else when their time is over.
        let until = self.held_until.unwrap_or(now);
        self.next_at = until.clamp(now, now + RETRY);
    }

    fn remember(&mut self, record: Record, now: Instant) {
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
