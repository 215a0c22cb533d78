//! Decisions about single open faults, and how they are explained to people.

use std::collections::BTreeMap;
use std::fmt;

use contract::keys;
use jiff::Timestamp;
use model::fault::{Cause, Fault};
use model::node::NodeView;

use super::judge::RuleSetAnswers;
use crate::{Routed, RuleSet, RuleSetAnswer};

/// Decision about one open fault. Formatted for people.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultRuling {
    /// Title of the fault, see [`Fault::title`].
    pub fault: String,
    /// Decision, and its origin.
    pub ruling: Ruling,
    /// Reason why the fault deletes no pods of its device although the policy requests that.
    pub lowered: Option<&'static str>,
    /// Chosen route, if the fault takes the node out of service and matches one.
    pub route: Option<Routed>,
}

/// Decision about an open fault, by origin, in order of precedence. Formatted for people.
#[derive(Clone, Debug, PartialEq)]
pub enum Ruling {
    /// The node is handed over to an external system (label
    /// [`HANDED_OVER_LABEL`](keys::HANDED_OVER_LABEL)).
    HandedOver,
    /// A person dismissed the fault, and no report was accepted since.
    Dismissed(Dismissal),
    /// The sender requested the quarantine (`force`).
    Forced,
    /// The sender ruled the quarantine out (`skip`).
    Skipped,
    /// Another fault explains this one.
    Explained(Cause),
    /// The fault waits for one that may explain it, until this time.
    AwaitsPrimary(Timestamp),
    /// The policy was evaluated.
    Judged {
        /// True if a matching rule set requests a measure.
        wanted: bool,
        /// Answer of each rule set, in the order of the policy.
        answers: Vec<(String, RuleSetAnswer)>,
    },
}

/// Dismissal of faults by a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dismissal {
    /// Acceptance time of the latest dismissed report.
    pub up_to: Timestamp,
    /// Action that dismissed the faults.
    pub by: DismissedBy,
}

/// Action of a person that dismisses faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DismissedBy {
    /// The node was released by hand.
    Released,
    /// The quarantines held by the circuit breaker were dropped (`cursor: CREATE`).
    Dropped,
}

/// Returns the decision about a fault that does not depend on rules. `None` if rules decide.
pub(super) fn without_rules(
    fault: &Fault,
    handed_over: bool,
    dismissed: Option<Dismissal>,
    now: Timestamp,
) -> Option<Ruling> {
    if handed_over {
        return Some(Ruling::HandedOver);
    }
    if let Some(dismissed) = dismissed.filter(|one| fault.dismissed(one.up_to)) {
        return Some(Ruling::Dismissed(dismissed));
    }
    let overrides = fault.event.quarantine_overrides.unwrap_or_default();
    if overrides.force {
        return Some(Ruling::Forced);
    }
    if overrides.skip {
        return Some(Ruling::Skipped);
    }
    if let Some(cause) = &fault.cause {
        return Some(Ruling::Explained(cause.clone()));
    }
    let until = fault.awaits_primary_until();
    until
        .filter(|until| now < *until)
        .map(Ruling::AwaitsPrimary)
}

/// Returns whether a fault is a notice: by its report, and because the policy requests no
/// measures for it.
pub fn is_notice(fault: &Fault, rulings: &[FaultRuling]) -> bool {
    fault.notice_until().is_some() && {
        let title = fault.title();
        let mut rulings = rulings.iter();
        !rulings.any(|one| one.fault == title && one.ruling.asks())
    }
}

// === impl Ruling ===

impl Ruling {
    /// Returns the decision of the rules about a fault.
    pub(super) fn judged(
        answers: &BTreeMap<&str, RuleSetAnswers>,
        fault: &Fault,
        rule_sets: &[RuleSet],
    ) -> Self {
        let answers = answers.get(fault.event.id.as_str()).cloned();
        let answers = answers.unwrap_or_default();
        let mut both = answers.iter().zip(rule_sets);
        let wanted = both.any(|((_, answer), set)| *answer == RuleSetAnswer::Matched && set.asks());
        Self::Judged { wanted, answers }
    }

    /// Returns whether the decision requests any measure.
    pub fn asks(&self) -> bool {
        matches!(self, Self::Forced | Self::Judged { wanted: true, .. })
    }

    /// Returns whether the policy's rule set at `index` matches the fault.
    pub(super) fn matched(&self, index: usize) -> bool {
        let Self::Judged { answers, .. } = self else {
            return false;
        };
        matches!(answers.get(index), Some((_, RuleSetAnswer::Matched)))
    }

    /// Returns whether the operator's label on the node ([`keys::MANAGED_LABEL`]) keeps it in
    /// service.
    pub fn opted_out(&self, node: &NodeView) -> bool {
        let Self::Judged {
            wanted: false,
            answers,
        } = self
        else {
            return false;
        };
        let by_label = |answer: &RuleSetAnswer| matches!(answer, RuleSetAnswer::NotMatched(expression) if expression.contains(keys::MANAGED_LABEL));
        node.labels
            .get(keys::MANAGED_LABEL)
            .is_some_and(|value| value == "false")
            && answers.iter().any(|(_, answer)| by_label(answer))
    }
}

impl fmt::Display for Ruling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HandedOver => write!(
                f,
                "the node is handed over for repair (label {}=false)",
                keys::HANDED_OVER_LABEL
            ),
            Self::Dismissed(Dismissal { by, .. }) => f.write_str(match by {
                DismissedBy::Released => {
                    "dismissed when the node was released by hand; a newer report counts"
                }
                DismissedBy::Dropped => {
                    "dropped when the circuit breaker was reset with cursor CREATE; a newer \
                     report counts"
                }
            }),
            Self::Forced => f.write_str("its sender asks to quarantine (force)"),
            Self::Skipped => f.write_str("its sender asks not to quarantine (skip)"),
            Self::Explained(cause) => {
                let state = match cause.recovered {
                    None => "asks for nothing while that is open",
                    Some(_) => "that has recovered, and this fault is closed",
                };
                write!(f, "explained by {cause}: {state}")
            }
            Self::AwaitsPrimary(until) => write!(
                f,
                "waits until {until:.0} for a fault that explains it, as reports of this code often \
                 follow another fault"
            ),
            Self::Judged { wanted, answers } => {
                let (for_it, against): (Vec<_>, Vec<_>) = answers
                    .iter()
                    .map(|(name, answer)| {
                        (
                            *answer == RuleSetAnswer::Matched,
                            format!("'{name}' {answer}"),
                        )
                    })
                    .partition(|(matched, _)| *matched);
                let mut parts: Vec<String> = (for_it.into_iter())
                    .map(|(_, answer)| format!("rule set {answer}"))
                    .collect();
                if !wanted {
                    let against: Vec<String> =
                        against.into_iter().map(|(_, answer)| answer).collect();
                    let why = match (answers.as_slice(), against.as_slice()) {
                        ([], _) => "the policy has no rule sets".to_owned(),
                        (_, []) => "the matching rule sets request nothing".to_owned(),
                        _ => against.join(", "),
                    };
                    parts.push(format!("quarantines nothing: {why}"));
                }
                f.write_str(&parts.join("; "))
            }
        }
    }
}

// === impl FaultRuling ===

impl fmt::Display for FaultRuling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.fault, self.ruling)?;
        if let Some(route) = &self.route {
            write!(f, "; {route}")?;
        }
        match self.lowered {
            Some(why) => write!(f, "; NoExecute is requested but not set: {why}"),
            None => Ok(()),
        }
    }
}
