//! Faults of a node that need remediation, and the next attempt for each, given the attempts so
//! far.

use std::collections::BTreeSet;

use contract::{HealthEvent, RecommendedAction, effective_action_name};
use jiff::{SignedDuration, Timestamp};
use model::attempt::VALIDATION_GROUP;
use model::attempt::{Attempt, AttemptOutcome, RemediationMark};

use super::awaiting::Wait;
use super::{Action, RemediationConfig, RemediationInput, TRIES, later};

/// First and longest wait between two attempts of one group after a failure that may pass.
const RETRY: (SignedDuration, SignedDuration) =
    (SignedDuration::from_mins(1), SignedDuration::from_mins(10));

/// A fault that needs remediation, and its action.
#[derive(Clone, Debug)]
pub(super) struct Need<'a> {
    pub(super) event: &'a HealthEvent,
    pub(super) first_seen: Timestamp,
    /// True if the fault's route waits for a person's approval.
    pub(super) asks_approval: bool,
    /// True while the drain for the fault has no approval.
    pub(super) unapproved: bool,
    pub(super) action: String,
    /// Group of the action, without an entity.
    pub(super) group: String,
    pub(super) entity: String,
}

/// Next step for a need.
pub(super) enum NeedStep {
    /// An attempt with this action and group.
    Attempt { action: String, group: String },
    /// A wait until a time.
    Wait(Wait),
    /// A person, for this reason.
    Person(String),
}

/// Returns the needs, gravest first, without those that a superseding action covers; and the
/// recommended actions that are not configured.
pub(super) fn needs<'a>(input: &RemediationInput<'a>) -> (Vec<Need<'a>>, BTreeSet<String>) {
    let mut unsupported = BTreeSet::new();
    let mut needs: Vec<Need<'a>> = Vec::new();
    let Some(config) = input.config else {
        return (needs, unsupported);
    };
    for counted in input.events {
        let event = counted.event;
        let name = effective_action_name(event);
        if counted.excluded_by.is_some() {
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
                asks_approval: counted.asks_approval,
                unapproved: counted.unapproved,
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

// === impl Need ===

impl Need<'_> {
    /// Returns the next step, given the session's attempts so far.
    pub(super) fn next_step(
        &self,
        mark: &RemediationMark,
        config: &RemediationConfig,
        now: Timestamp,
    ) -> NeedStep {
        let (mut group, mut preferred) = (self.group.clone(), self.action.clone());
        // Each group of the escalation is tried once.
        for _ in 0..=config.escalation.len() {
            let Some((name, action)) = config.of_group(&group, &preferred) else {
                break;
            };
            let scoped = action.entity_scope.is_some();
            let own = match self.entity.as_str() {
                "" if scoped => None, // The event does not name the entity, so a scoped action cannot help.
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
                    return NeedStep::Attempt {
                        action: name.to_owned(),
                        group: own,
                    };
                };
                match self.after(last, mark, config, now) {
                    After::Again => {
                        return NeedStep::Attempt {
                            action: name.to_owned(),
                            group: own,
                        };
                    }
                    After::Wait(wait) => return NeedStep::Wait(wait),
                    After::Person(why) => return NeedStep::Person(why),
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
        NeedStep::Person(format!(
            "no repair is left to be tried{}",
            tried.unwrap_or_default()
        ))
    }

    /// Returns what follows the last attempt for this need.
    fn after(
        &self,
        last: &Attempt,
        mark: &RemediationMark,
        config: &RemediationConfig,
        now: Timestamp,
    ) -> After {
        let Some(end) = &last.end else {
            // Only the newest attempt can be under way, and it was handled before: a person
            // wrote this mark.
            return After::Person(format!("nobody knows how {} has ended", last.title()));
        };
        match end.outcome {
            // The fault is newer than the attempt.
            AttemptOutcome::Succeeded if self.first_seen > end.at => After::Again,
            AttemptOutcome::Succeeded => {
                let until = later(end.at, config.recovery);
                if now < until {
                    let why = format!("the recovery of its faults after {}", last.title());
                    After::Wait(Wait::new(why, until, now))
                } else {
                    After::Next
                }
            }
            AttemptOutcome::FailedForNow => {
                let mut tries = mark.attempts.iter().rev();
                let failed = (tries.by_ref().filter(|one| one.group == last.group))
                    .take_while(|one| {
                        let end = one.end.as_ref();
                        end.is_some_and(|end| end.outcome == AttemptOutcome::FailedForNow)
                    })
                    .count();
                if failed >= TRIES {
                    return After::Next;
                }
                let doublings = u32::try_from(failed.saturating_sub(1)).unwrap_or(0).min(8);
                let until = later(end.at, (RETRY.0 * (1 << doublings)).min(RETRY.1));
                if now < until {
                    let why = format!("another try of {}: {}", last.action, end.why);
                    After::Wait(Wait::new(why, until, now))
                } else {
                    After::Again
                }
            }
            AttemptOutcome::Failed => After::Next,
            AttemptOutcome::Unclear => After::Person(last.ending()),
        }
    }
}

/// Step that follows an attempt.
enum After {
    /// Make the same attempt again.
    Again,
    /// Wait until a time.
    Wait(Wait),
    /// Try the next group of the escalation.
    Next,
    Person(String),
}

// === impl Action ===

impl Action {
    /// Returns the entities of an event that are remediated individually; an empty one stands
    /// for the node, or for an entity that the event does not name.
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
