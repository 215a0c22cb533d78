//! The attempt under way, and its progress.

use std::ops::ControlFlow;

use contract::effective_action_name;
use jiff::{SignedDuration, Timestamp};
use model::attempt::{Attempt, AttemptEnd, AttemptOutcome, DIAGNOSTICS_GROUP, RemediationMark};

use super::awaiting::{Awaiting, Wait};
use super::{OpenFault, RemediationInput, ResourceObservation, later};

/// Time that the creation of a custom resource may fail before a person is asked.
pub(super) const MADE_WITHIN: SignedDuration = SignedDuration::from_secs(60);
/// Reason of an end by deletion.
const GONE: &str = "it was deleted before it had ended";

/// Updates the attempt under way in `mark`. Breaks with the awaited state while it is under way.
/// Otherwise continues with the id of an attempt that was not created because another one has
/// its name, if any.
pub(super) fn update_attempt(
    mark: &mut RemediationMark,
    input: &RemediationInput<'_>,
) -> ControlFlow<Awaiting, Option<String>> {
    let Some(open) = mark.attempts.last_mut().filter(|one| one.end.is_none()) else {
        return ControlFlow::Continue(None);
    };
    match attempt_state(open, input) {
        AttemptState::UnderWay { made, by } => {
            open.made = made;
            let title = open.title();
            let what = match made {
                None if is_searched_for(open, input) => format!("to see whether {title} was made"),
                None => format!("{title} to be made"),
                Some(_) => format!("the end of {title}"),
            };
            return ControlFlow::Break(Awaiting::Waits(Wait::new(what, by, input.now)));
        }
        AttemptState::Late(why) => {
            return ControlFlow::Break(Awaiting::Recovery(None).with_person(why, None));
        }
        AttemptState::Ended(end) => {
            open.made.get_or_insert(open.since);
            open.end = Some(end);
        }
        AttemptState::Dropped => drop(mark.attempts.pop()),
        AttemptState::Taken => {
            let taken = mark.attempts.pop().map(|one| one.id);
            return ControlFlow::Continue(taken);
        }
    }
    ControlFlow::Continue(None)
}

/// Returns whether the custom resource of an attempt is to be looked for before anything else:
/// nothing new may begin now, and an earlier process may have created it without recording that.
pub(super) fn is_searched_for(open: &Attempt, input: &RemediationInput<'_>) -> bool {
    let unknown = open.made.is_none() && *input.resource == ResourceObservation::Unknown;
    unknown && (input.searching || !is_wanted(open, input))
}

/// Returns whether an attempt that was not created yet is still wanted.
fn is_wanted(open: &Attempt, input: &RemediationInput<'_>) -> bool {
    let stands = |one: &OpenFault<'_>| {
        one.excluded_by.is_none()
            && (one.event.id == open.event || effective_action_name(one.event) == open.action)
    };
    let held = input.blocker.is_some() && open.group != DIAGNOSTICS_GROUP;
    input.creating || (input.config.is_some() && !held && input.events.iter().any(stands))
}

/// State of the attempt under way.
enum AttemptState {
    /// The attempt is on its way, and is to progress by this time.
    UnderWay {
        made: Option<Timestamp>,
        by: Timestamp,
    },
    /// The attempt is late, for this reason; the watch continues.
    Late(String),
    /// The attempt was not created, and is no longer wanted.
    Dropped,
    /// The attempt was not created: the custom resource of another attempt has its name.
    Taken,
    Ended(AttemptEnd),
}

/// Returns the state of the attempt under way.
fn attempt_state(open: &Attempt, input: &RemediationInput<'_>) -> AttemptState {
    let now = input.now;
    let ended = |outcome, why: &str| {
        AttemptState::Ended(AttemptEnd {
            at: now,
            outcome,
            why: why.to_owned(),
        })
    };
    let Some(made) = open.made else {
        return match input.resource {
            ResourceObservation::There(state) if state.attempt == Some(open.key()) => {
                AttemptState::UnderWay {
                    made: Some(now),
                    by: later(now, open.timeout()),
                }
            }
            // The resource is from an earlier session, or was let go of during its creation.
            ResourceObservation::There(state) if state.attempt.is_some() => AttemptState::Taken,
            ResourceObservation::There(_) => ended(
                AttemptOutcome::Failed,
                "a custom resource of this name is there, and not ours",
            ),
            ResourceObservation::Refused(why) => ended(AttemptOutcome::Failed, why),
            ResourceObservation::Gone => ended(AttemptOutcome::Unclear, GONE),
            ResourceObservation::Absent if !is_wanted(open, input) => AttemptState::Dropped,
            ResourceObservation::Unknown | ResourceObservation::Absent => {
                let by = later(open.since, MADE_WITHIN);
                let title = open.title();
                match open.group.as_str() {
                    _ if now < by => AttemptState::UnderWay { made: None, by },
                    DIAGNOSTICS_GROUP => ended(AttemptOutcome::Failed, "it cannot be made"),
                    _ if is_searched_for(open, input) => {
                        AttemptState::Late(format!("it cannot be seen whether {title} was made"))
                    }
                    _ => AttemptState::Late(format!("{title} cannot be made")),
                }
            }
        };
    };
    let by = later(made, open.timeout());
    let goes = |late: &str| {
        if now < by {
            let made = Some(made);
            return AttemptState::UnderWay { made, by };
        }
        AttemptState::Late(format!("{} {late}", open.title()))
    };
    match input.resource {
        ResourceObservation::Gone => ended(AttemptOutcome::Unclear, GONE),
        ResourceObservation::There(state) => match &state.end {
            Some((outcome, why)) => ended(*outcome, why),
            None if now >= by && open.group == DIAGNOSTICS_GROUP => {
                ended(AttemptOutcome::Failed, "it was not done in time")
            }
            None => goes("does not end"),
        },
        ResourceObservation::Unknown
        | ResourceObservation::Absent
        | ResourceObservation::Refused(_) => goes("cannot be read"),
    }
}
