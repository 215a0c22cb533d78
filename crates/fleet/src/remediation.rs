//! How a node is repaired: which custom resource is made next, and what its end means.
//!
//! [`decide`] is asked about a node as a whole, from the faults that are open, from what its session says
//! of the attempts before, and from the custom resource of the attempt that is under way. So a second
//! fault is taken in, whoever asks again after a restart gets the same answer, and an attempt that stands
//! on the node is made once: its name follows from the session.
//!
//! | end of an attempt | what follows |
//! |---|---|
//! | succeeded | the faults are to be over within a time; else the next group is tried |
//! | failed, and it may pass | the same again, later, [`TRIES`] times; then the next group |
//! | failed for good | the next group |
//! | nobody knows how it went, or it vanished | a person is asked: it is not done twice |
//!
//! The next group is that of the escalation; where there is none, or too many attempts were made of late,
//! a person is asked. What a person then does, or the recovery of the faults, ends it. A fault that nobody
//! repairs asks a person beside what is waited for. Each decision says how the repair stands, and what ends
//! that ([`Stand`]): a state that waits has a time, or somebody who was asked.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use contract::HealthEvent;
use jiff::Timestamp;

use model::attempt::{PersonAsked, RemediationMark};
use model::resource::ResourceState;
use model::time::later;

mod config;
mod need;
mod plan;
mod stand;
mod under_way;
pub mod validation;

pub use config::{Action, MAX_CONFIG_BYTES, RemediationConfig};
use need::needs;
use plan::{Next, Plan};
use stand::Wait;
pub use stand::{Beside, Hold, Stand};
use under_way::{MADE_WITHIN, follow, is_sought};

/// Attempts of one group in a row that may fail and pass by themselves.
pub const TRIES: usize = 3;

/// A node to be decided about.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// Its open faults that count, gravest first.
    pub events: &'a [OpenFault<'a>],
    /// What its session says of its remediation.
    pub mark: Option<&'a RemediationMark>,
    /// The custom resource of the attempt that is under way, as it is seen.
    pub seen: &'a Seen,
    /// True while it is being made: how that ends is not known.
    pub making: bool,
    /// True while it is looked for, and nobody has told yet.
    pub sought: bool,
    /// What is wished; `None`: nothing new begins.
    pub config: Option<&'a RemediationConfig>,
    /// Why nothing new begins now.
    pub hold: Option<&'a Hold>,
    /// True if only pods of single GPUs have left.
    pub partial: bool,
    /// The times of attempts before this session.
    pub earlier: &'a [Timestamp],
    /// The time.
    pub now: Timestamp,
}

/// An open fault that counts.
#[derive(Clone, Copy, Debug)]
pub struct OpenFault<'a> {
    /// The event that stands for it.
    pub event: &'a HealthEvent,
    /// The time at which it was first observed.
    pub first_seen: Timestamp,
    /// The route of the policy for which it is not repaired, for people.
    pub unrepaired_by: Option<&'a str>,
}

/// A custom resource, as it is seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Seen {
    /// Nobody has looked yet, or cannot; with the reason.
    #[default]
    Unknown,
    /// It was looked for because nobody knew whether it was made, and is not there.
    Absent,
    /// It was there, and is gone.
    Gone,
    /// It is there.
    There(Box<ResourceState>),
    /// It was to be made, and that is refused for good.
    Refused(String),
}

/// What is decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What the session is to say of the remediation; `None`: nothing.
    pub mark: Option<RemediationMark>,
    /// How the repair stands, and what ends that.
    pub stand: Stand,
    /// True if the custom resource of the attempt under way is to be looked for, and not made before that.
    pub sought: bool,
    /// Actions that events recommend and nobody carries out.
    pub unsupported: BTreeSet<String>,
    /// The routes of the policy for which events are not repaired, for people.
    pub skipped: BTreeSet<String>,
    /// True if the node as a whole is to be repaired, and all its pods are to leave first.
    pub whole: bool,
}

/// Decides about a node.
pub fn decide(case: &Case<'_>) -> Decision {
    let mut mark = case.mark.cloned().unwrap_or_default();
    let (needs, unsupported) = needs(case);
    let routes = (case.config.iter()).flat_map(|_| case.events.iter());
    let skipped: BTreeSet<String> = routes
        .filter_map(|one| one.unrepaired_by.map(str::to_owned))
        .collect();
    let config = case.config.filter(|_| !case.events.is_empty());
    let next = match (follow(&mut mark, case), config) {
        (ControlFlow::Break(stand), _) => Next::Stands(stand),
        (ControlFlow::Continue(taken), Some(config)) => {
            let plan = Plan {
                mark: &mark,
                config,
                case,
                taken: taken.as_deref(),
            };
            plan.next(&needs, &unsupported, &skipped)
        }
        (ControlFlow::Continue(_), None) => {
            let stand = Stand::Rests(None);
            // Who was asked stays so.
            let person = mark.person.as_ref().map(|one| one.why.clone());
            Next::Stands(match person {
                Some(why) => stand.asking(why, None),
                None => stand,
            })
        }
    };
    let whole = matches!(next, Next::Whole);
    let stand = match next {
        Next::Make(attempt) => {
            let what = format!("{} to be made", attempt.title());
            let until = later(attempt.since, MADE_WITHIN);
            mark.attempts.push(*attempt);
            Stand::Waits(Wait::new(what, until, case.now))
        }
        Next::Whole => Stand::Others("all of its pods to leave".to_owned()),
        Next::Stands(stand) => stand,
    };
    let open = case.mark.and_then(RemediationMark::under_way);
    Decision {
        mark: marked(mark, &stand, case),
        stand,
        sought: open.is_some_and(|open| is_sought(open, case)),
        unsupported,
        skipped,
        whole,
    }
}

/// Returns the mark for the session: the attempts, why a person is asked, and the end of a wait. `None`
/// where there is nothing to record.
fn marked(mut mark: RemediationMark, stand: &Stand, case: &Case<'_>) -> Option<RemediationMark> {
    let before = mark.person.take();
    mark.person = stand.person().map(|why| match before {
        Some(before) if before.why == why => before,
        _ => PersonAsked {
            since: case.now,
            why: why.to_owned(),
        },
    });
    // An attempt that is under way has times of its own.
    mark.waits_until = match stand {
        Stand::Waits(wait) if mark.under_way().is_none() => Some(wait.until()),
        _ => None,
    };
    mark.earlier = case.earlier.to_vec();
    let blank = mark.attempts.is_empty() && mark.person.is_none();
    (!blank).then_some(mark)
}

#[cfg(test)]
mod tests;
