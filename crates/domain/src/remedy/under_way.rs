//! The attempt that is under way, and how it goes.

use std::ops::ControlFlow;

use contract::effective_action_name;
use jiff::{SignedDuration, Timestamp};

use super::mark::{Attempt, AttemptEnd, Outcome, RemediationMark};
use super::validation::DIAGNOSTICS_GROUP;
use super::{Case, Decision, OpenFault, Seen, later};

/// Time for which a custom resource cannot be made before a person is asked.
const MADE_WITHIN: SignedDuration = SignedDuration::from_secs(60);
/// Said of a custom resource that somebody has deleted.
const GONE: &str = "it was deleted before it had ended";

/// Takes in how the attempt goes that is under way. While it goes on nothing else is decided: it then breaks,
/// with the reason why a person is asked, if one is.
pub(super) fn follow(
    mark: &mut RemediationMark,
    decision: &mut Decision,
    case: &Case<'_>,
) -> ControlFlow<Option<String>> {
    let Some(open) = mark.attempts.last_mut().filter(|one| one.end.is_none()) else {
        return ControlFlow::Continue(());
    };
    let stands = |one: &OpenFault<'_>| {
        one.unrepaired_by.is_none()
            && (one.event.id == open.event || effective_action_name(one.event) == open.action)
    };
    let stands = case.events.iter().any(stands);
    let waits = case.waits.is_some() && open.group != DIAGNOSTICS_GROUP;
    let wanted = case.making || (case.config.is_some() && !waits && stands);
    match under_way(open, case, wanted) {
        Open::Goes { made, person, wake } => {
            let title = open.title();
            decision.awaits = match (&person, made) {
                (Some(why), _) => format!("a person: {why}"),
                (None, None) => format!("{title} to be made"),
                (None, Some(_)) => format!("the end of {title}"),
            };
            decision.wake = wake;
            open.made = made;
            return ControlFlow::Break(person);
        }
        Open::Ended(end) => {
            open.made.get_or_insert(open.since);
            open.end = Some(end);
        }
        Open::Dropped => drop(mark.attempts.pop()),
    }
    ControlFlow::Continue(())
}

/// The state of the attempt that is under way.
enum Open {
    Goes {
        made: Option<Timestamp>,
        person: Option<String>,
        wake: Option<Timestamp>,
    },
    /// It was not made, and is not wanted any more.
    Dropped,
    Ended(AttemptEnd),
}

/// Returns how the attempt goes that is under way.
fn under_way(open: &Attempt, case: &Case<'_>, wanted: bool) -> Open {
    let now = case.now;
    let ended = |outcome, why: &str| {
        Open::Ended(AttemptEnd {
            at: now,
            outcome,
            why: why.to_owned(),
        })
    };
    let Some(made) = open.made else {
        return match case.seen {
            Seen::There(state) if state.attempt == Some(open.key()) => Open::Goes {
                made: Some(now),
                person: None,
                wake: None,
            },
            // One that was let go of while it was being made: the next has another name.
            Seen::There(state) if state.attempt.is_some() => ended(
                Outcome::FailedForNow,
                "the custom resource of another attempt has this name",
            ),
            Seen::There(_) => ended(
                Outcome::Failed,
                "a custom resource of this name is there, and not ours",
            ),
            Seen::Refused(why) => ended(Outcome::Failed, why),
            Seen::Gone => ended(Outcome::Unclear, GONE),
            Seen::Unknown if !wanted => Open::Dropped,
            Seen::Unknown => {
                let late = later(open.since, MADE_WITHIN);
                if now >= late && open.group == DIAGNOSTICS_GROUP {
                    return ended(Outcome::Failed, "it cannot be made");
                }
                Open::Goes {
                    made: None,
                    person: (now >= late).then(|| format!("{} cannot be made", open.title())),
                    wake: Some(late).filter(|at| *at > now),
                }
            }
        };
    };
    let deadline = later(made, open.timeout());
    let late = now >= deadline;
    let goes = |person: Option<String>| Open::Goes {
        made: Some(made),
        person,
        wake: Some(deadline).filter(|at| *at > now),
    };
    match case.seen {
        Seen::Gone => ended(Outcome::Unclear, GONE),
        Seen::There(state) => match &state.end {
            Some((outcome, why)) => ended(*outcome, why),
            None if late && open.group == DIAGNOSTICS_GROUP => {
                ended(Outcome::Failed, "it was not done in time")
            }
            None if late => goes(Some(format!("{} does not come to its end", open.title()))),
            None => goes(None),
        },
        Seen::Unknown | Seen::Refused(_) => {
            goes(late.then(|| format!("{} cannot be read", open.title())))
        }
    }
}
