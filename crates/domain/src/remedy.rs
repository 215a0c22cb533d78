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
//! a person is asked. What a person then does, or the recovery of the faults, ends it.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use contract::{HealthEvent, RecommendedAction, effective_action_name};
use jiff::{SignedDuration, Timestamp};

mod config;
mod mark;
mod resource;
pub mod template;
mod under_way;
pub mod validation;

pub use config::{Action, MAX_CONFIG_BYTES, RemedyConfig, ResourceKind};
pub use mark::{Attempt, AttemptEnd, Outcome, PersonAsked, RemediationMark, Repair};
pub use resource::ResourceState;
use under_way::follow;
use validation::{DIAGNOSTICS_GROUP, VALIDATION_GROUP};

/// Attempts of one group in a row that may fail and pass by themselves.
pub const TRIES: usize = 3;
/// First and longest wait between two of them.
const RETRY: (SignedDuration, SignedDuration) =
    (SignedDuration::from_mins(1), SignedDuration::from_mins(10));
/// Time for the watch of who carries it out to tell of the session for which a custom resource was made: the
/// node says first that it is.
pub(crate) const TOLD_WITHIN: SignedDuration = SignedDuration::from_secs(10);

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
    /// What is wished; `None`: nothing new begins.
    pub config: Option<&'a RemedyConfig>,
    /// Why nothing new begins now, for people.
    pub waits: Option<&'a str>,
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
    /// It was there, and is gone.
    Gone,
    /// It is there.
    There(Box<ResourceState>),
    /// It was to be made, and that is refused for good.
    Refused(String),
}

/// What is decided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// What the session is to say of the remediation; `None`: nothing.
    pub mark: Option<RemediationMark>,
    /// What is awaited, for people.
    pub awaits: String,
    /// When to ask again even if nothing happens.
    pub wake: Option<Timestamp>,
    /// Actions that events recommend and nobody carries out.
    pub unsupported: BTreeSet<String>,
    /// The routes of the policy for which events are not repaired, for people.
    pub skipped: BTreeSet<String>,
    /// True if the node as a whole is to be repaired, and all its pods are to leave first.
    pub whole: bool,
}

/// A fault to be repaired, and how.
#[derive(Clone, Debug)]
struct Need<'a> {
    event: &'a HealthEvent,
    first_seen: Timestamp,
    action: String,
    /// Its group without an entity.
    group: String,
    entity: String,
}

/// What a need asks for now.
enum Asks {
    /// An attempt of this action and group.
    Attempt { action: String, group: String },
    /// Nothing before then, for this reason.
    Wait(Timestamp, String),
    /// A person, for this reason.
    Person(String),
}

/// What follows for a node of which no attempt is under way.
enum Next {
    /// An attempt is to be made.
    Make(Box<Attempt>),
    /// First all pods of the node are to leave.
    Whole,
    /// Something is awaited, no longer than until then.
    Wait(Option<Timestamp>, String),
    /// A person is asked, and nobody else until then.
    Person(Option<Timestamp>, String),
    /// There is nothing to do.
    Nothing,
}

/// Decides about a node.
pub fn decide(case: &Case<'_>) -> Decision {
    let mut mark = case.mark.cloned().unwrap_or_default();
    let (needs, unsupported) = needs(case);
    let routes = (case.config.iter()).flat_map(|_| case.events.iter());
    let mut decision = Decision {
        unsupported,
        skipped: routes
            .filter_map(|one| one.unrepaired_by.map(str::to_owned))
            .collect(),
        ..Decision::default()
    };
    if let ControlFlow::Break(person) = follow(&mut mark, &mut decision, case) {
        return decision.with(mark, person, case);
    }
    let Some(config) = case.config.filter(|_| !case.events.is_empty()) else {
        let person = mark.person.as_ref().map(|one| one.why.clone());
        return decision.with(mark, person, case);
    };
    let mut person = None;
    match next(&needs, &mark, &decision, config, case) {
        Next::Make(attempt) => {
            decision.awaits = format!("{} to be made", attempt.title());
            mark.attempts.push(*attempt);
        }
        Next::Whole => {
            decision.whole = true;
            "all of its pods to leave".clone_into(&mut decision.awaits);
        }
        Next::Wait(until, why) => {
            decision.wake = until;
            decision.awaits = why;
        }
        Next::Person(until, why) => {
            decision.wake = until;
            decision.awaits = format!("a person: {why}");
            person = Some(why);
        }
        Next::Nothing => {}
    }
    decision.with(mark, person, case)
}

/// Returns what follows where no attempt is under way and faults are open.
fn next(
    needs: &[Need<'_>],
    mark: &RemediationMark,
    decision: &Decision,
    config: &RemedyConfig,
    case: &Case<'_>,
) -> Next {
    let to_repair = needs.iter().any(|need| need.group != VALIDATION_GROUP);
    if (to_repair || !decision.unsupported.is_empty())
        && let Some(diagnostics) = diagnostics(mark, config, case)
    {
        return Next::Make(Box::new(diagnostics));
    }
    let mut person = None;
    let mut waits: Option<(Timestamp, String)> = None;
    for need in needs {
        match need.asks(mark, config, case.now) {
            Asks::Attempt { action, group } => {
                match begin(need, &action, &group, mark, config, case) {
                    Ok(next) => return next,
                    Err(why) => person = person.or(Some(why)),
                }
            }
            Asks::Wait(until, why) => {
                if waits.as_ref().is_none_or(|(before, _)| until < *before) {
                    waits = Some((until, why));
                }
            }
            Asks::Person(why) => person = person.or(Some(why)),
        }
    }
    if let Some((until, why)) = waits {
        return Next::Wait(Some(until), why);
    }
    let unsupported = || {
        let names: Vec<&str> = decision.unsupported.iter().map(String::as_str).collect();
        (!names.is_empty()).then(|| format!("no repair is configured for {}", names.join(", ")))
    };
    match (person.or_else(unsupported), case.waits) {
        // Its pods leave first: until then nothing is said.
        (Some(_), Some(waits)) if mark.repairs().next().is_none() => {
            Next::Wait(None, waits.to_owned())
        }
        (Some(why), _) => Next::Person(None, why),
        (None, _) if needs.is_empty() && !decision.skipped.is_empty() => {
            let routes: Vec<&str> = decision.skipped.iter().map(String::as_str).collect();
            let routes = routes.join(" and ");
            let why = format!("the recovery of its faults: no repair, skipped by {routes}");
            Next::Wait(None, why)
        }
        (None, _) => Next::Nothing,
    }
}

/// Returns what an attempt that a need asks for has to wait for, or the attempt. The error says why it
/// cannot be made.
fn begin(
    need: &Need<'_>,
    action: &str,
    group: &str,
    mark: &RemediationMark,
    config: &RemedyConfig,
    case: &Case<'_>,
) -> Result<Next, String> {
    if let Some(why) = case.waits {
        return Ok(Next::Wait(None, why.to_owned()));
    }
    let scoped = config.actions.get(action);
    if case.partial && scoped.is_some_and(|one| one.entity_scope.is_none()) {
        return Ok(Next::Whole);
    }
    let repairs = group != VALIDATION_GROUP;
    if let Some((free_at, why)) = exhausted(mark, config, case).filter(|_| repairs) {
        return Ok(Next::Person(free_at, why));
    }
    let attempt = attempt(need, action, group, mark, config, case.now)?;
    Ok(Next::Make(Box::new(attempt)))
}

/// Returns the faults to be repaired, gravest first, without those that the repair of another covers;
/// and the actions that nobody carries out.
fn needs<'a>(case: &Case<'a>) -> (Vec<Need<'a>>, BTreeSet<String>) {
    let mut unsupported = BTreeSet::new();
    let mut needs: Vec<Need<'a>> = Vec::new();
    let Some(config) = case.config else {
        return (needs, unsupported);
    };
    for counted in case.events {
        let event = counted.event;
        let name = effective_action_name(event);
        if counted.unrepaired_by.is_some() {
            continue;
        }
        if name == RecommendedAction::None.as_str_name() {
            continue;
        }
        let Some(action) = config.actions.get(name.as_ref()) else {
            unsupported.insert(name.into_owned());
            continue;
        };
        for entity in action.entities(event) {
            needs.push(Need {
                event,
                first_seen: counted.first_seen,
                action: name.to_string(),
                group: action.group.clone(),
                entity,
            });
        }
    }
    let groups: BTreeSet<String> = needs.iter().map(|one| one.group.clone()).collect();
    needs.retain(|need| {
        let action = config.actions.get(&need.action);
        let mut superseding = action.into_iter().flat_map(|action| &action.superseding);
        !superseding.any(|group| groups.contains(group))
    });
    (needs, unsupported)
}

/// Returns why no further attempt is made, and until when, where too many were made of late.
fn exhausted(
    mark: &RemediationMark,
    config: &RemedyConfig,
    case: &Case<'_>,
) -> Option<(Option<Timestamp>, String)> {
    let since = |at: &Timestamp| case.now.duration_since(*at) < config.window;
    let ours = mark.repairs().map(|one| one.since);
    let mut times: Vec<Timestamp> = case.earlier.iter().copied().chain(ours).collect();
    times.retain(since);
    times.sort();
    let over = (times.len() + 1)
        .checked_sub(config.max_attempts)?
        .checked_sub(1)?;
    let why = format!(
        "{} repairs were tried within {} hours, as many as may be",
        times.len(),
        config.window.as_hours()
    );
    Some((times.get(over).map(|at| later(*at, config.window)), why))
}

/// Returns the attempt that collects diagnostics, where that is asked for and was not tried in this session.
/// What goes wrong with it holds nothing up.
fn diagnostics(mark: &RemediationMark, config: &RemedyConfig, case: &Case<'_>) -> Option<Attempt> {
    let name = config.diagnostics.as_deref()?;
    let mut attempts = mark.attempts.iter();
    let was_tried = attempts.any(|one| one.group == DIAGNOSTICS_GROUP);
    let fault = case.events.first().filter(|_| !was_tried)?;
    let need = Need {
        event: fault.event,
        first_seen: fault.first_seen,
        action: name.to_owned(),
        group: DIAGNOSTICS_GROUP.to_owned(),
        entity: String::new(),
    };
    attempt(&need, name, DIAGNOSTICS_GROUP, mark, config, case.now).ok()
}

/// Returns the attempt to be made for a need.
fn attempt(
    need: &Need<'_>,
    action_name: &str,
    group: &str,
    mark: &RemediationMark,
    config: &RemedyConfig,
    now: Timestamp,
) -> Result<Attempt, String> {
    let action = config.actions.get(action_name);
    let action = action.ok_or_else(|| format!("there is no action {action_name}"))?;
    let entity = if action.entity_scope.is_some() {
        need.entity.as_str()
    } else {
        ""
    };
    let event = need.event;
    // Several of one session may be for one event: each further one has its number.
    let before = mark.attempts.iter().filter(|one| one.event == event.id);
    let before = before.filter(|one| one.group != DIAGNOSTICS_GROUP);
    let id = match before.count() {
        _ if group == DIAGNOSTICS_GROUP => format!("{}-{group}", event.id),
        0 => event.id.clone(),
        before => format!("{}-{}", event.id, before + 1),
    };
    let object = action.render(event, &id, entity);
    let object = object.map_err(|why| format!("the template of {action_name}: {why}"))?;
    let name = object
        .pointer("/metadata/name")
        .and_then(|name| name.as_str());
    Ok(Attempt {
        id,
        action: action_name.to_owned(),
        group: group.to_owned(),
        event: event.id.clone(),
        entity: entity.to_owned(),
        resource: action.resource.clone(),
        name: name.unwrap_or_default().to_owned(),
        since: now,
        timeout_minutes: action.timeout.as_mins(),
        made: None,
        end: None,
    })
}

pub(crate) fn later(at: Timestamp, by: SignedDuration) -> Timestamp {
    at.checked_add(by).unwrap_or(Timestamp::MAX)
}

// === impl Decision ===

impl Decision {
    /// Returns it with what the session is to say, which is nothing where there is nothing to say.
    fn with(mut self, mut mark: RemediationMark, person: Option<String>, case: &Case<'_>) -> Self {
        let before = mark.person.take();
        mark.person = person.map(|why| match before {
            Some(before) if before.why == why => before,
            _ => PersonAsked {
                since: case.now,
                why,
            },
        });
        mark.earlier = case.earlier.to_vec();
        let blank = mark.attempts.is_empty() && mark.person.is_none();
        self.mark = (!blank).then_some(mark);
        self
    }
}

// === impl Need ===

impl Need<'_> {
    /// Returns what it asks for, by the attempts of the session so far.
    fn asks(&self, mark: &RemediationMark, config: &RemedyConfig, now: Timestamp) -> Asks {
        let (mut group, mut preferred) = (self.group.clone(), self.action.clone());
        // Each group of the escalation is looked at once.
        for _ in 0..=config.escalation.len() {
            let Some((name, action)) = config.of_group(&group, &preferred) else {
                break;
            };
            let scoped = action.entity_scope.is_some();
            let own = match self.entity.as_str() {
                "" if scoped => None, // The event does not say which entity: that helps nobody.
                entity if scoped => Some(format!("{group}-{entity}")),
                _ => Some(group.clone()),
            };
            if let Some(own) = own {
                let covers = |one: &&Attempt| {
                    one.group == own || (action.superseding.contains(&one.group) && one.succeeded())
                };
                let attempts = if group == VALIDATION_GROUP {
                    mark.validations()
                } else {
                    &mark.attempts
                };
                let Some(last) = attempts.iter().rev().find(covers) else {
                    return Asks::Attempt {
                        action: name.to_owned(),
                        group: own,
                    };
                };
                match self.after(last, mark, config, now) {
                    After::Again => {
                        return Asks::Attempt {
                            action: name.to_owned(),
                            group: own,
                        };
                    }
                    After::Wait(until, why) => return Asks::Wait(until, why),
                    After::Person(why) => return Asks::Person(why),
                    After::Next => {}
                }
            }
            let mut rest = config.escalation.iter().skip_while(|one| **one != group);
            match rest.nth(1) {
                Some(next) => (group, preferred) = (next.clone(), String::new()),
                None => break,
            }
        }
        let tried = mark
            .attempts
            .last()
            .map(|one| format!(": {}", one.ending()));
        Asks::Person(format!(
            "no repair is left to be tried{}",
            tried.unwrap_or_default()
        ))
    }

    /// Returns what follows the last attempt that was to mend it.
    fn after(
        &self,
        last: &Attempt,
        mark: &RemediationMark,
        config: &RemedyConfig,
        now: Timestamp,
    ) -> After {
        let Some(end) = &last.end else {
            return After::Wait(Timestamp::MAX, format!("the end of {}", last.title()));
        };
        match end.outcome {
            // It came after the repair.
            Outcome::Succeeded if self.first_seen > end.at => After::Again,
            Outcome::Succeeded => {
                let until = later(end.at, config.recovery);
                if now < until {
                    let why = format!("the recovery of its faults after {}", last.title());
                    After::Wait(until, why)
                } else {
                    After::Next
                }
            }
            Outcome::FailedForNow => {
                let mut tries = mark.attempts.iter().rev();
                let failed = (tries.by_ref().filter(|one| one.group == last.group))
                    .take_while(|one| {
                        let end = one.end.as_ref();
                        end.is_some_and(|end| end.outcome == Outcome::FailedForNow)
                    })
                    .count();
                if failed >= TRIES {
                    return After::Next;
                }
                let doublings = u32::try_from(failed.saturating_sub(1)).unwrap_or(0).min(8);
                let until = later(end.at, (RETRY.0 * (1 << doublings)).min(RETRY.1));
                if now < until {
                    let why = format!("another try of {}: {}", last.action, end.why);
                    After::Wait(until, why)
                } else {
                    After::Again
                }
            }
            Outcome::Failed => After::Next,
            Outcome::Unclear => After::Person(last.ending()),
        }
    }
}

/// What follows an attempt.
enum After {
    /// The same again.
    Again,
    /// Nothing before then.
    Wait(Timestamp, String),
    /// The next group of the escalation.
    Next,
    Person(String),
}

// === impl Action ===

impl Action {
    /// Returns the entities of an event that are repaired each by itself; an empty one stands for the
    /// node, or for one that the event does not name.
    fn entities(&self, event: &HealthEvent) -> Vec<String> {
        let Some(scope) = &self.entity_scope else {
            return vec![String::new()];
        };
        let found = event.entities_impacted.iter();
        let found: BTreeSet<String> = found
            .filter(|one| one.entity_type == *scope && !one.entity_value.is_empty())
            .map(|one| one.entity_value.clone())
            .collect();
        if found.is_empty() {
            vec![String::new()]
        } else {
            found.into_iter().collect()
        }
    }
}

#[cfg(test)]
mod tests;
