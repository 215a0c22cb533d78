//! The attempt that is under way, and how it goes.

use std::ops::ControlFlow;

use contract::effective_action_name;
use jiff::{SignedDuration, Timestamp};
use model::attempt::{Attempt, AttemptEnd, DIAGNOSTICS_GROUP, Outcome, RemediationMark};

use super::stand::{Stand, Wait};
use super::{Case, OpenFault, Seen, later};

/// Time for which a custom resource cannot be made before a person is asked.
pub(super) const MADE_WITHIN: SignedDuration = SignedDuration::from_secs(60);
/// Said of a custom resource that somebody has deleted.
const GONE: &str = "it was deleted before it had ended";

/// Takes in how the attempt goes that is under way. While it goes on nothing else is decided: it then breaks,
/// and says how the repair stands. Else the id of an attempt follows that was not made, for another one has
/// its name.
pub(super) fn follow(
    mark: &mut RemediationMark,
    case: &Case<'_>,
) -> ControlFlow<Stand, Option<String>> {
    let Some(open) = mark.attempts.last_mut().filter(|one| one.end.is_none()) else {
        return ControlFlow::Continue(None);
    };
    match under_way(open, case) {
        Open::Goes { made, by } => {
            open.made = made;
            let title = open.title();
            let what = match made {
                None if is_sought(open, case) => format!("to see whether {title} was made"),
                None => format!("{title} to be made"),
                Some(_) => format!("the end of {title}"),
            };
            return ControlFlow::Break(Stand::Waits(Wait::new(what, by, case.now)));
        }
        Open::Late(why) => return ControlFlow::Break(Stand::Rests(None).asking(why, None)),
        Open::Ended(end) => {
            open.made.get_or_insert(open.since);
            open.end = Some(end);
        }
        Open::Dropped => drop(mark.attempts.pop()),
        Open::Taken => {
            let taken = mark.attempts.pop().map(|one| one.id);
            return ControlFlow::Continue(taken);
        }
    }
    ControlFlow::Continue(None)
}

/// Returns whether the custom resource of an attempt is to be looked for before anything else follows: nothing
/// new may begin now, and a process before this one may have made it, and not have come to note that.
pub(super) fn is_sought(open: &Attempt, case: &Case<'_>) -> bool {
    let unknown = open.made.is_none() && *case.seen == Seen::Unknown;
    unknown && (case.sought || !is_wanted(open, case))
}

/// Returns whether an attempt that was not made yet is to be made.
fn is_wanted(open: &Attempt, case: &Case<'_>) -> bool {
    let stands = |one: &OpenFault<'_>| {
        one.unrepaired_by.is_none()
            && (one.event.id == open.event || effective_action_name(one.event) == open.action)
    };
    let held = case.hold.is_some() && open.group != DIAGNOSTICS_GROUP;
    case.making || (case.config.is_some() && !held && case.events.iter().any(stands))
}

/// The state of the attempt that is under way.
enum Open {
    /// It goes on, and is to be further by then.
    Goes {
        made: Option<Timestamp>,
        by: Timestamp,
    },
    /// It is not further, for this reason, and is watched on.
    Late(String),
    /// It was not made, and is not wanted any more.
    Dropped,
    /// It was not made: the custom resource of another attempt has its name.
    Taken,
    Ended(AttemptEnd),
}

/// Returns how the attempt goes that is under way.
fn under_way(open: &Attempt, case: &Case<'_>) -> Open {
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
                by: later(now, open.timeout()),
            },
            // One of an earlier session, or that was let go of while it was being made.
            Seen::There(state) if state.attempt.is_some() => Open::Taken,
            Seen::There(_) => ended(
                Outcome::Failed,
                "a custom resource of this name is there, and not ours",
            ),
            Seen::Refused(why) => ended(Outcome::Failed, why),
            Seen::Gone => ended(Outcome::Unclear, GONE),
            Seen::Absent if !is_wanted(open, case) => Open::Dropped,
            Seen::Unknown | Seen::Absent => {
                let by = later(open.since, MADE_WITHIN);
                let title = open.title();
                match open.group.as_str() {
                    _ if now < by => Open::Goes { made: None, by },
                    DIAGNOSTICS_GROUP => ended(Outcome::Failed, "it cannot be made"),
                    _ if is_sought(open, case) => {
                        Open::Late(format!("it cannot be seen whether {title} was made"))
                    }
                    _ => Open::Late(format!("{title} cannot be made")),
                }
            }
        };
    };
    let by = later(made, open.timeout());
    let goes = |late: &str| {
        if now < by {
            let made = Some(made);
            return Open::Goes { made, by };
        }
        Open::Late(format!("{} {late}", open.title()))
    };
    match case.seen {
        Seen::Gone => ended(Outcome::Unclear, GONE),
        Seen::There(state) => match &state.end {
            Some((outcome, why)) => ended(*outcome, why),
            None if now >= by && open.group == DIAGNOSTICS_GROUP => {
                ended(Outcome::Failed, "it was not done in time")
            }
            None => goes("does not come to its end"),
        },
        Seen::Unknown | Seen::Absent | Seen::Refused(_) => goes("cannot be read"),
    }
}
