//! Remediation of a node: which custom resource is created next, and what its end means.
//!
//! [`decide`] is asked about a node as a whole, from the open faults, the earlier attempts that
//! its session records, and the custom resource of the attempt under way. So a second fault is
//! included, a restart gets the same answer, and an attempt recorded on the node is created
//! once: its name follows from the session.
//!
//! | end of an attempt | what follows |
//! |---|---|
//! | succeeded | the faults have to recover within a time; else the next group is tried |
//! | failed, and may pass | the same again, later, [`TRIES`] times; then the next group |
//! | failed for good | the next group |
//! | unknown, or the resource vanished | a person is asked: it is not done twice |
//!
//! The next group is that of the escalation; where there is none, or there were too many recent
//! attempts, a person is asked. The person's work, or the recovery of the faults, ends it. A
//! fault without a configured action asks a person while other attempts continue. Each decision
//! names the state that it waits in ([`Awaiting`]), with a time or somebody who was asked.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use contract::HealthEvent;
use jiff::Timestamp;

use model::attempt::{PersonAsked, RemediationMark};
use model::proposal::Proposal;
use model::resource::ResourceState;
use model::time::later;

mod awaiting;
mod config;
mod need;
mod plan;
mod under_way;
pub mod validation;

pub(crate) use awaiting::APPROVAL;
use awaiting::Wait;
pub use awaiting::{Awaiting, Blocker, Meanwhile};
pub use config::{Action, RemediationConfig};
use need::needs;
use plan::{NextStep, RemediationPlan};
use under_way::{MADE_WITHIN, is_searched_for, update_attempt};

/// Failures in a row of one group that may pass by themselves before the next group is tried.
pub const TRIES: usize = 3;

/// Input of [`decide`] about a node.
#[derive(Clone, Copy, Debug)]
pub struct RemediationInput<'a> {
    /// Open faults of the node that count, gravest first.
    pub events: &'a [OpenFault<'a>],
    /// Remediation recorded in the node's session.
    pub mark: Option<&'a RemediationMark>,
    /// Observed state of the custom resource of the attempt under way.
    pub resource: &'a ResourceObservation,
    /// True while a request to create it is in flight.
    pub creating: bool,
    /// True while it is looked for and not found yet.
    pub searching: bool,
    /// Configuration; `None` if nothing new begins.
    pub config: Option<&'a RemediationConfig>,
    /// Reason why nothing new begins now.
    pub blocker: Option<&'a Blocker>,
    /// True while pods have to leave first.
    pub drains: bool,
    /// Begin of the drain that the session records.
    pub drain_since: Option<Timestamp>,
    /// True if only the pods of single GPUs have left.
    pub partial: bool,
    /// Proposals of the session, with the approvals that count now.
    pub proposals: &'a [Proposal],
    /// Times of attempts before this session.
    pub earlier: &'a [Timestamp],
    /// Current time of the decision.
    pub now: Timestamp,
}

/// An open fault that counts.
#[derive(Clone, Copy, Debug)]
pub struct OpenFault<'a> {
    /// Event that stands for it.
    pub event: &'a HealthEvent,
    /// Time when it was first observed.
    pub first_seen: Timestamp,
    /// Route of the policy that excludes it from remediation, for people.
    pub excluded_by: Option<&'a str>,
    /// True if its route waits for a person's approval.
    pub asks_approval: bool,
    /// True while the drain for it has no approval.
    pub unapproved: bool,
}

/// Observed state of a custom resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ResourceObservation {
    /// The resource was not observed yet.
    #[default]
    Unknown,
    /// The resource was looked for because it might exist, and does not.
    Absent,
    /// The resource existed, and is gone.
    Gone,
    /// The resource exists, in this state.
    There(Box<ResourceState>),
    /// The creation was refused for good, for this reason.
    Refused(String),
}

/// A decision about the remediation of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemediationDecision {
    /// Remediation to record in the session; `None` for nothing.
    pub mark: Option<RemediationMark>,
    /// State that the remediation waits for.
    pub awaiting: Awaiting,
    /// True if the custom resource of the attempt under way is to be looked for before it is
    /// created.
    pub searching: bool,
    /// Recommended actions that are not configured.
    pub unsupported: BTreeSet<String>,
    /// Routes of the policy that exclude faults from remediation, for people.
    pub skipped: BTreeSet<String>,
    /// True if the whole node is to be remediated, and all its pods are to leave first.
    pub whole_node: bool,
    /// Actions that are due but for a person's approval, whether or not they have it.
    pub needs_approval: BTreeSet<String>,
}

/// Decides about the remediation of a node.
pub fn decide(input: &RemediationInput<'_>) -> RemediationDecision {
    let mut mark = input.mark.cloned().unwrap_or_default();
    let (needs, unsupported) = needs(input);
    let routes = (input.config.iter()).flat_map(|_| input.events.iter());
    let skipped: BTreeSet<String> = routes
        .filter_map(|one| one.excluded_by.map(str::to_owned))
        .collect();
    let config = input.config.filter(|_| !input.events.is_empty());
    let (awaited, taken_id) = match update_attempt(&mut mark, input) {
        ControlFlow::Break(awaiting) => (Some(awaiting), None),
        ControlFlow::Continue(taken_id) => (None, taken_id),
    };
    let plan = config.map(|config| RemediationPlan {
        mark: &mark,
        config,
        input,
        taken_id: taken_id.as_deref(),
    });
    let needs_approval = plan.as_ref().map(|plan| plan.needs_approval(&needs));
    let next = match (awaited, plan) {
        (Some(awaiting), _) => NextStep::Await(awaiting),
        (None, Some(plan)) => plan.next(&needs, &unsupported, &skipped),
        (None, None) => {
            let awaiting = Awaiting::Recovery(None);
            // A person who was asked stays asked.
            let person = mark.person.as_ref().map(|one| one.why.clone());
            NextStep::Await(match person {
                Some(why) => awaiting.with_person(why, None),
                None => awaiting,
            })
        }
    };
    let whole_node = matches!(next, NextStep::Whole);
    let awaiting = match next {
        NextStep::Make(attempt) => {
            let what = format!("{} to be made", attempt.title());
            let until = later(attempt.since, MADE_WITHIN);
            mark.attempts.push(*attempt);
            Awaiting::Waits(Wait::new(what, until, input.now))
        }
        NextStep::Whole => Awaiting::Others("all of its pods to leave".to_owned()),
        NextStep::Await(awaiting) => awaiting,
    };
    let open = input.mark.and_then(RemediationMark::under_way);
    RemediationDecision {
        mark: new_mark(mark, &awaiting, input),
        awaiting,
        searching: open.is_some_and(|open| is_searched_for(open, input)),
        unsupported,
        skipped,
        whole_node,
        needs_approval: needs_approval.unwrap_or_default(),
    }
}

/// Returns the mark for the session: the attempts, why a person is asked, and the end of a wait.
/// `None` if there is nothing to record.
fn new_mark(
    mut mark: RemediationMark,
    awaiting: &Awaiting,
    input: &RemediationInput<'_>,
) -> Option<RemediationMark> {
    let before = mark.person.take();
    mark.person = awaiting.person().map(|why| match before {
        Some(before) if before.why == why => before,
        _ => PersonAsked {
            since: input.now,
            why: why.to_owned(),
        },
    });
    // An attempt under way has times of its own.
    mark.waits_until = match awaiting {
        Awaiting::Waits(wait) if mark.under_way().is_none() => Some(wait.until()),
        _ => None,
    };
    mark.earlier = input.earlier.to_vec();
    let blank = mark.attempts.is_empty() && mark.person.is_none();
    (!blank).then_some(mark)
}

#[cfg(test)]
mod tests;
