//! Verdicts for the members, in words.

use preflight::roster::Member;

use super::super::messages::{Hello, MemberVerdict, VerdictKind};
use super::super::search::Conclusion;
use super::{ExaminationPlan, Judged, Odd};
use crate::verdict;
use crate::worker::{Measured, WorkerFailure};

/// Most members that a text names.
const NAMED: usize = 8;

/// Names of the members, by rank.
pub(super) struct Names(Vec<String>);

// === impl Names ===

impl Names {
    pub(super) fn of(roster: &[Member]) -> Self {
        let names = roster
            .iter()
            .map(|member| format!("{} ({})", member.pod, member.address));
        Self(names.collect())
    }

    /// Records the node of a member.
    pub(super) fn note(&mut self, rank: usize, hello: &Hello) {
        if let Some(name) = self.0.get_mut(rank) {
            *name = format!("{} on {}", hello.pod, hello.node);
        }
    }

    fn name(&self, rank: usize) -> &str {
        self.0.get(rank).map(String::as_str).unwrap_or_default()
    }

    /// Returns names for use in a text.
    pub(super) fn list(&self, ranks: &[usize]) -> String {
        let named: Vec<&str> = ranks
            .iter()
            .take(NAMED)
            .map(|rank| self.name(*rank))
            .collect();
        let more = ranks.len().saturating_sub(NAMED);
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        format!("{}{more}", named.join(", "))
    }

    /// Returns the same verdict for all members.
    pub(super) fn all(&self, kind: VerdictKind, text: &str, whole: &Judged) -> Vec<MemberVerdict> {
        let verdict = MemberVerdict {
            kind,
            text: text.to_owned(),
            gb_s: whole.gb_s,
            failure: whole.failure.clone(),
            suspects: Vec::new(),
        };
        self.0.iter().map(|_| verdict.clone()).collect()
    }

    /// Returns the verdicts of a gang that may not test.
    pub(super) fn untested(&self, why: &str) -> Vec<MemberVerdict> {
        let verdict = MemberVerdict {
            kind: VerdictKind::Untested,
            text: format!("nothing is measured, for enableFallback is false: {why}"),
            gb_s: None,
            failure: None,
            suspects: Vec::new(),
        };
        self.0.iter().map(|_| verdict.clone()).collect()
    }

    /// Returns the verdicts of a gang with missing members.
    pub(super) fn missing(&self, missing: &[usize]) -> Vec<MemberVerdict> {
        let there = self.0.len() - missing.len();
        let verdict = MemberVerdict {
            kind: VerdictKind::Missing,
            text: format!(
                "{} of {} members of the gang are there, missing: {}",
                there,
                self.0.len(),
                self.list(missing)
            ),
            gb_s: None,
            failure: None,
            suspects: missing.iter().take(NAMED).copied().collect(),
        };
        self.0.iter().map(|_| verdict.clone()).collect()
    }

    /// Returns the verdicts after a search. Members in `odd` are not blamed.
    pub(super) fn found(
        &self,
        found: &Conclusion,
        odd: &Odd,
        text: &str,
        whole: &Judged,
    ) -> Vec<MemberVerdict> {
        let culprits: Vec<usize> = found.culprits.iter().copied().collect();
        let of_node = culprits.iter().filter(|member| !odd.contains_key(member));
        let of_node: Vec<usize> = of_node.copied().collect();
        let mut blamed = Vec::new();
        if !of_node.is_empty() {
            blamed.push(format!("to blame: {}", self.list(&of_node)));
        }
        for (member, variables) in odd.iter().take(NAMED) {
            blamed.push(format!(
                "{} fails with every other member, and its variables {variables} are not theirs",
                self.name(*member)
            ));
        }
        let is_refused = is_refused(whole);
        for (one, other) in found.pairs.iter().take(NAMED) {
            let (one, other) = (self.name(*one), self.name(*other));
            blamed.push(if is_refused {
                format!("the path between {one} and {other} is not at fault")
            } else {
                format!("{one} and {other} fail only together")
            });
        }
        if self.0.len() < 2 {
            blamed.push("there is no other member to compare it with".to_owned());
        } else if blamed.is_empty() {
            blamed.push("only larger groups fail, so no member is to blame".to_owned());
        }
        let text = format!("{text}; {}", blamed.join("; "));
        let nobody = found.culprits.is_empty() && found.pairs.is_empty();
        let mut verdicts = self.all(VerdictKind::Innocent, &text, whole);
        for (rank, verdict) in verdicts.iter_mut().enumerate() {
            verdict.suspects = culprits.iter().take(NAMED).copied().collect();
            let in_pair = found
                .pairs
                .iter()
                .any(|(one, other)| [*one, *other].contains(&rank));
            if let Some(variables) = odd.get(&rank) {
                verdict.kind = VerdictKind::Unclear;
                verdict.text = format!(
                    "{} fails with every other member, which may be its pod's doing: give all pods of the \
                     gang the same variables, {variables} are not those of the others: {text}",
                    self.name(rank)
                );
            } else if found.culprits.contains(&rank) {
                verdict.kind = VerdictKind::Culprit;
                verdict.text = format!(
                    "{}, which fails with every other member: {text}",
                    self.name(rank)
                );
            } else if in_pair {
                verdict.kind = VerdictKind::Pair;
            } else if nobody {
                verdict.kind = VerdictKind::Unclear;
            }
        }
        verdicts
    }
}

/// Returns true if the test of the whole gang was prevented by something other than a hardware
/// fault, such as a variable that names something that does not exist.
fn is_refused(whole: &Judged) -> bool {
    whole.failure.as_ref().is_some_and(|failure| {
        let is_unknown = matches!(
            failure,
            WorkerFailure::Late { .. } | WorkerFailure::Crashed(_)
        );
        !is_unknown && !verdict::of(failure).fatal
    })
}

/// Describes the test of the whole gang, for people.
pub(super) fn describe(whole: &Judged, ranks: u32, plan: &ExaminationPlan) -> String {
    let threshold = &plan.threshold;
    if ranks < 2 {
        return match (&whole.failure, whole.gb_s) {
            (Some(failure), _) => format!("the test of {ranks} device fails: {failure}"),
            (None, Some(gb_s)) => format!(
                "{ranks} device has no peer to reduce with; it keeps what is written to it, and its memory \
                 copies with {gb_s:.2} GB/s"
            ),
            (None, None) => {
                format!("{ranks} device has no peer to reduce with; it keeps what is written to it")
            }
        };
    }
    if let Some(failure) = &whole.failure {
        return format!("the all-reduce over {ranks} devices fails: {failure}");
    }
    let gb_s = whole.gb_s.unwrap_or_default();
    let wanted = match threshold.gb_s {
        Some(least) if whole.passes => format!("at least {least} GB/s is required"),
        Some(least) => format!("below the {least} GB/s that are required"),
        None => "no least bandwidth is required".to_owned(),
    };
    format!(
        "{ranks} devices reduce with a bus bandwidth of {gb_s:.3} GB/s; {wanted} ({})",
        threshold.basis
    )
}

/// Returns the slowest measurements of the members, or the failure that is nearest to the cause.
pub(super) fn worst(
    results: Vec<Result<Vec<Measured>, WorkerFailure>>,
) -> Result<Vec<Measured>, WorkerFailure> {
    let mut worst: Vec<Measured> = Vec::new();
    let mut failures = Vec::new();
    for result in results {
        match result {
            Ok(measured) if worst.is_empty() => worst = measured,
            Ok(measured) => {
                for (worst, measured) in worst.iter_mut().zip(measured) {
                    worst.seconds = worst.seconds.max(measured.seconds);
                }
            }
            Err(failure) => failures.push(failure),
        }
    }
    match failures.into_iter().min_by_key(rank) {
        Some(failure) => Err(failure),
        None => Ok(worst),
    }
}

/// Ranks failures by their distance from the cause: one member's failure makes others fail.
fn rank(failure: &WorkerFailure) -> u8 {
    match failure {
        WorkerFailure::Wrong { .. } => 0,
        WorkerFailure::Cuda { .. } | WorkerFailure::Library(_) | WorkerFailure::Nvml(_) => 1,
        WorkerFailure::Nccl { code, .. } if *code != 6 => 2,
        WorkerFailure::Crashed(_) => 3,
        WorkerFailure::Nccl { .. } => 4,
        WorkerFailure::Late { .. } => 5,
    }
}
