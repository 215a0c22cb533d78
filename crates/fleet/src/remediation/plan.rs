//! The next step for a node without an attempt under way.

use std::collections::BTreeSet;

use jiff::Timestamp;
use model::attempt::{Attempt, RemediationMark};
use model::attempt::{DIAGNOSTICS_GROUP, VALIDATION_GROUP};
use model::proposal::{DRAIN, repair_action};

use super::awaiting::{APPROVAL, Awaiting, Blocker, Wait};
use super::need::{Need, NeedStep};
use super::{RemediationConfig, RemediationInput, later};
use crate::approval::Done;

/// Most numbers of names tried to find the next free one.
const MOST_NAMES: usize = 1000;

/// Next step for a node.
pub(super) enum NextStep {
    /// Create the custom resource of this attempt.
    Make(Box<Attempt>),
    /// Wait until all pods of the node have left.
    Whole,
    /// Create nothing, and wait for this.
    Await(Awaiting),
}

/// A node without an attempt under way, and its faults.
pub(super) struct RemediationPlan<'a> {
    pub(super) mark: &'a RemediationMark,
    pub(super) config: &'a RemediationConfig,
    pub(super) input: &'a RemediationInput<'a>,
    /// Id of an attempt that was not created because another one has its name.
    pub(super) taken_id: Option<&'a str>,
}

/// A reason to ask a person.
struct PersonRequest {
    why: String,
    /// Time when another attempt may be made, if there were too many.
    again: Option<Timestamp>,
}

// === impl RemediationPlan ===

impl RemediationPlan<'_> {
    /// Returns the next step. `unsupported` are recommended actions that are not configured,
    /// `skipped` the policy routes that exclude faults from remediation.
    pub(super) fn next(
        &self,
        needs: &[Need<'_>],
        unsupported: &BTreeSet<String>,
        skipped: &BTreeSet<String>,
    ) -> NextStep {
        let needs_remediation = needs.iter().any(|need| need.group != VALIDATION_GROUP);
        if (needs_remediation || !unsupported.is_empty())
            && let Some(diagnostics) = self.diagnostics()
        {
            return NextStep::Make(Box::new(diagnostics));
        }
        let mut asked: Vec<PersonRequest> = Vec::new();
        let mut wait: Option<Wait> = None;
        let mut held = None;
        for need in needs {
            match need.next_step(self.mark, self.config, self.input.now) {
                NeedStep::Attempt { action, group } => match self.begin(need, &action, &group) {
                    Ok(NextStep::Await(hold)) => held = Some(hold),
                    Ok(next) => return next,
                    Err(ask) => asked.push(ask),
                },
                NeedStep::Wait(one) => wait = Some(one.or_sooner(wait)),
                NeedStep::Person(why) => asked.push(PersonRequest { why, again: None }),
            }
        }
        if !unsupported.is_empty() {
            let names: Vec<&str> = unsupported.iter().map(String::as_str).collect();
            let why = format!("no repair is configured for {}", names.join(", "));
            asked.push(PersonRequest { why, again: None });
        }
        let now = self.input.now;
        let goes_on = held.or_else(|| wait.map(Awaiting::Waits));
        NextStep::Await(match (asked.is_empty(), self.input.blocker) {
            // While pods leave, or before the first attempt, the blocker comes first: a person
            // is asked only after it has ended.
            (false, Some(hold))
                if *hold == Blocker::Drain || self.mark.remediations().next().is_none() =>
            {
                hold.awaiting(now)
            }
            (false, _) => {
                let again = asked.iter().filter_map(|one| one.again).min();
                let mut whys: Vec<String> = Vec::new();
                for PersonRequest { why, .. } in asked {
                    if !whys.contains(&why) {
                        whys.push(why);
                    }
                }
                let goes_on = goes_on.unwrap_or(Awaiting::Recovery(None));
                goes_on.with_person(whys.join("; "), again)
            }
            (true, _) => goes_on.unwrap_or_else(|| {
                let routes: Vec<&str> = skipped.iter().map(String::as_str).collect();
                let routes = (!routes.is_empty()).then(|| routes.join(" and "));
                Awaiting::Recovery(routes.map(|routes| {
                    format!("the recovery of its faults: no repair, skipped by {routes}")
                }))
            }),
        })
    }

    /// Returns the attempt for a need, or what it has to wait for. The error says why it cannot
    /// be made.
    fn begin(&self, need: &Need<'_>, action: &str, group: &str) -> Result<NextStep, PersonRequest> {
        if let Some(hold) = self.input.blocker {
            return Ok(NextStep::Await(hold.awaiting(self.input.now)));
        }
        let approvals = self.approvals_of(need, action, group);
        let done = Done {
            drain: self.input.drain_since,
            attempts: &self.mark.attempts,
        };
        let has = |one: &String| done.has_approval(one, self.input.proposals);
        if !approvals.iter().all(has) {
            return Ok(NextStep::Await(Awaiting::Others(APPROVAL.to_owned())));
        }
        let scoped = self.config.actions.get(action);
        if self.input.partial && scoped.is_some_and(|one| one.entity_scope.is_none()) {
            return Ok(NextStep::Whole);
        }
        if group != VALIDATION_GROUP
            && let Some(ask) = self.exhausted()
        {
            return Err(ask);
        }
        match self.attempt(need, action, group) {
            Ok(attempt) => Ok(NextStep::Make(Box::new(attempt))),
            Err(why) => Err(PersonRequest { why, again: None }),
        }
    }

    /// Returns the actions of the next attempts that need a person's approval. While pods have to
    /// leave first, only those whose drain needs it too.
    pub(super) fn needs_approval(&self, needs: &[Need<'_>]) -> BTreeSet<String> {
        let due = needs
            .iter()
            .filter(|need| need.unapproved || !self.input.drains);
        let actions =
            due.flat_map(
                |need| match need.next_step(self.mark, self.config, self.input.now) {
                    NeedStep::Attempt { action, group } => self.approvals_of(need, &action, &group),
                    NeedStep::Wait(_) | NeedStep::Person(_) => Vec::new(),
                },
            );
        actions.collect()
    }

    /// Returns the actions of an attempt for a need that a person has to approve: the attempt, and
    /// the drain of the rest of the node where only the pods of single GPUs have left. A validation
    /// needs none.
    fn approvals_of(&self, need: &Need<'_>, name: &str, group: &str) -> Vec<String> {
        let action = self.config.actions.get(name);
        let asks = need.asks_approval || action.is_some_and(|action| action.approve);
        if !asks || group == VALIDATION_GROUP || self.exhausted().is_some() {
            return Vec::new();
        }
        if action.is_some_and(|action| action.entity_scope.is_some()) {
            return vec![repair_action(name, &need.entity)];
        }
        let drain = (need.asks_approval && self.input.partial).then(|| DRAIN.to_owned());
        let repair = repair_action(name, "");
        drain.into_iter().chain([repair]).collect()
    }

    /// Returns why no further attempt is made, and until when, if there were too many recent
    /// ones.
    fn exhausted(&self) -> Option<PersonRequest> {
        let (window, now) = (self.config.window, self.input.now);
        let ours = self.mark.remediations().map(|one| one.since);
        let mut times: Vec<Timestamp> = self.input.earlier.iter().copied().chain(ours).collect();
        times.retain(|at| now.duration_since(*at) < window);
        times.sort();
        let over = (times.len() + 1)
            .checked_sub(self.config.max_attempts)?
            .checked_sub(1)?;
        let why = format!(
            "{} repairs were tried within {} hours, the most allowed",
            times.len(),
            window.as_hours()
        );
        let again = times.get(over).map(|at| later(*at, window));
        Some(PersonRequest { why, again })
    }

    /// Returns the attempt that collects diagnostics, if configured and not yet tried in this
    /// session. A failure in it holds nothing up.
    fn diagnostics(&self) -> Option<Attempt> {
        let name = self.config.diagnostics.as_deref()?;
        let mut attempts = self.mark.attempts.iter();
        let was_tried = attempts.any(|one| one.group == DIAGNOSTICS_GROUP);
        let fault = self.input.events.first().filter(|_| !was_tried)?;
        let need = Need {
            event: fault.event,
            first_seen: fault.first_seen,
            asks_approval: false,
            unapproved: false,
            action: name.to_owned(),
            group: DIAGNOSTICS_GROUP.to_owned(),
            entity: String::new(),
        };
        self.attempt(&need, name, DIAGNOSTICS_GROUP).ok()
    }

    /// Returns the attempt to be made for a need.
    fn attempt(&self, need: &Need<'_>, name: &str, group: &str) -> Result<Attempt, String> {
        let action = self.config.actions.get(name);
        let action = action.ok_or_else(|| format!("there is no action {name}"))?;
        let entity = if action.entity_scope.is_some() {
            need.entity.as_str()
        } else {
            ""
        };
        let event = need.event;
        let id = self.id(need, group);
        let object = action.render(event, &id, entity);
        let object = object.map_err(|why| format!("the template of {name}: {why}"))?;
        let called = object.pointer("/metadata/name");
        let called = called.and_then(|called| called.as_str());
        Ok(Attempt {
            id,
            action: name.to_owned(),
            group: group.to_owned(),
            event: event.id.clone(),
            entity: entity.to_owned(),
            resource: action.resource.clone(),
            name: called.unwrap_or_default().to_owned(),
            since: self.input.now,
            timeout_minutes: action.timeout.as_mins(),
            made: None,
            end: None,
        })
    }

    /// Returns the id of the next attempt for an event. An event may have several, of this
    /// session or of earlier ones that ended while the fault persisted; each further one gets a
    /// number.
    fn id(&self, need: &Need<'_>, group: &str) -> String {
        let event = &need.event.id;
        let numbered = |number: usize| {
            let id = match number {
                0 | 1 => event.clone(),
                _ => format!("{event}-{number}"),
            };
            match group {
                DIAGNOSTICS_GROUP => format!("{id}-{group}"),
                _ => id,
            }
        };
        let earlier = self.input.earlier.iter();
        let earlier = earlier.filter(|at| **at >= need.first_seen).count();
        let ours = self.mark.attempts.iter();
        let ours = ours.filter(|one| one.event == *event && one.group != DIAGNOSTICS_GROUP);
        let ours = match group {
            DIAGNOSTICS_GROUP => 0,
            _ => ours.count(),
        };
        let next = earlier + ours + 1;
        // The names before that one may be taken as well.
        let taken_id = self.taken_id.and_then(|taken_id| {
            let mut numbers = next..next + MOST_NAMES;
            numbers.find(|number| numbered(*number) == taken_id)
        });
        numbered(taken_id.map_or(next, |taken_id| taken_id + 1))
    }
}
