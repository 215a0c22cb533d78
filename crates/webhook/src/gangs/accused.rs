//! Detection of gang members that a majority of their gang cannot reach and that report nothing
//! themselves. It is the one fault of a node that no check can report there.
//!
//! A check that ends without its gang lists the members that it did not reach in its
//! termination message, which the kubelet publishes. A member whose own check ended at about
//! that time has reported for itself.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use preflight::config::Config;
use preflight::inject::last_end;
use preflight::rendezvous::named_not_reached;
use serde_json::Value;

/// Delay before a member is reported, since its own result may still be on its way.
const SETTLED: Duration = Duration::from_secs(30);

/// Result of a pod's gang checks, and the pod's node.
pub(super) struct GangOutcome {
    node: Option<String>,
    created: Timestamp,
    /// End of the last check, and the members that it did not reach.
    ended: Option<(Timestamp, Vec<String>)>,
}

/// Gang member that a majority of the gang did not reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unreached {
    pub(super) pod: String,
    pub(super) node: String,
    /// Members that did not reach it.
    pub(super) by: Vec<String>,
    pub(super) members: usize,
}

/// Unreached members of a gang, with the time of detection and true once reported.
#[derive(Default)]
pub(super) struct Suspects(BTreeMap<String, (Instant, bool)>);

// === impl GangOutcome ===

impl GangOutcome {
    pub(super) fn of(pod: &Value, config: &Config) -> Self {
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
        let created = text("/metadata/creationTimestamp").and_then(|at| at.parse().ok());
        let ended = last_end(pod, config).and_then(|(at, message)| {
            let named = named_not_reached(message);
            let named = named.into_iter().map(str::to_owned).collect();
            Some((at.parse().ok()?, named))
        });
        Self {
            node: text("/spec/nodeName").map(str::to_owned),
            created: created.unwrap_or(Timestamp::MAX),
            ended,
        }
    }
}

/// Returns the members that a majority did not reach, unless their own check ended later than
/// `round` before the first of those messages.
fn unreached(members: &BTreeMap<&str, &GangOutcome>, round: Duration) -> Vec<Unreached> {
    // By unreached member: the members that did not reach it, and when.
    let mut named: BTreeMap<&str, BTreeMap<&str, Timestamp>> = BTreeMap::new();
    for (by, outcome) in members {
        if let Some((at, pods)) = &outcome.ended {
            for pod in pods {
                named.entry(pod).or_default().insert(by, *at);
            }
        }
    }
    let of = |(pod, outcome): (&&str, &&GangOutcome)| {
        let witnesses = named.get(pod)?.iter().map(|(by, at)| (*at, *by));
        // An earlier message is about an earlier pod with this name.
        let meant = witnesses.filter(|(at, by)| by != pod && *at > outcome.created);
        let witnesses: Vec<(Timestamp, &str)> = meant.collect();
        let (first, _) = witnesses.iter().min()?;
        let begun = first.saturating_sub(round).unwrap_or(Timestamp::MIN);
        let has_result = outcome.ended.as_ref().is_some_and(|(at, _)| *at >= begun);
        let is_majority = witnesses.len() * 2 > members.len();
        (is_majority && !has_result).then_some(())?;
        Some(Unreached {
            pod: (*pod).to_owned(),
            node: outcome.node.clone()?,
            by: witnesses.iter().map(|(_, by)| (*by).to_owned()).collect(),
            members: members.len(),
        })
    };
    members.iter().filter_map(of).collect()
}

// === impl Suspects ===

impl Suspects {
    /// Returns the members that have been unreached for long enough and are not reported yet.
    pub(super) fn due(
        &mut self,
        members: &BTreeMap<&str, &GangOutcome>,
        round: Duration,
    ) -> Vec<Unreached> {
        let mut unreached = unreached(members, round);
        self.0
            .retain(|pod, _| unreached.iter().any(|one| one.pod == *pod));
        unreached.retain(|one| {
            let fresh = (Instant::now(), false);
            let (since, is_reported) = *self.0.entry(one.pod.clone()).or_insert(fresh);
            since.elapsed() >= SETTLED && !is_reported
        });
        unreached
    }

    /// Marks a member as reported.
    pub(super) fn mark_reported(&mut self, pod: &str) {
        if let Some((_, is_reported)) = self.0.get_mut(pod) {
            *is_reported = true;
        }
    }

    /// Marks a member as not reported, after a failed attempt.
    pub(super) fn mark_unreported(&mut self, pod: &str) {
        if let Some((_, is_reported)) = self.0.get_mut(pod) {
            *is_reported = false;
        }
    }

    /// Ends the delay of all members.
    #[cfg(test)]
    pub(super) fn settle(&mut self) {
        let long_ago = Instant::now().checked_sub(SETTLED);
        for (since, _) in self.0.values_mut() {
            *since = long_ago.unwrap_or(*since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND: Duration = Duration::from_secs(600);

    fn outcome(ended: Option<(&str, &[&str])>) -> GangOutcome {
        GangOutcome {
            node: Some("n".to_owned()),
            created: "2026-01-01T00:00:00Z".parse().expect("a time"),
            ended: ended.map(|(at, named)| {
                let at = format!("2026-01-01T{at}Z").parse().expect("a time");
                (at, named.iter().map(|name| (*name).to_owned()).collect())
            }),
        }
    }

    fn pods(outcomes: &[(&'static str, GangOutcome)]) -> Vec<(String, Vec<String>)> {
        let members = outcomes.iter().map(|(pod, word)| (*pod, word)).collect();
        let accused = unreached(&members, ROUND).into_iter();
        accused.map(|one| (one.pod, one.by)).collect()
    }

    #[test]
    fn only_whom_a_majority_does_not_reach_and_who_is_silent_is_accused() {
        let (at, later) = ("01:00:00", "01:00:09");
        let silent = || outcome(None);
        let not_c = || outcome(Some((at, &["c"])));
        let by = |names: &[&str]| {
            vec![(
                "c".to_owned(),
                names.iter().map(|it| (*it).into()).collect(),
            )]
        };
        let table = [
            (
                vec![("a", not_c()), ("b", not_c()), ("c", silent())],
                by(&["a", "b"]),
            ),
            // Neither one of two nor two of four is a majority.
            (vec![("a", not_c()), ("c", silent())], vec![]),
            (
                vec![
                    ("a", not_c()),
                    ("b", not_c()),
                    ("c", silent()),
                    ("d", silent()),
                ],
                vec![],
            ),
            (
                vec![
                    ("a", not_c()),
                    ("b", not_c()),
                    ("c", outcome(Some((later, &["a"])))),
                ],
                vec![],
            ),
            // A result from an hour before does not belong to this round.
            (
                vec![
                    ("a", not_c()),
                    ("b", not_c()),
                    ("c", outcome(Some(("00:10:00", &[])))),
                ],
                by(&["a", "b"]),
            ),
            (
                vec![
                    ("a", outcome(Some((at, &[])))),
                    ("b", not_c()),
                    ("c", silent()),
                ],
                vec![],
            ),
            // A member's report about itself does not count.
            (
                vec![
                    ("b", not_c()),
                    ("c", outcome(Some((at, &["c"])))),
                    ("d", silent()),
                ],
                vec![],
            ),
        ];
        for (number, (outcomes, expected)) in table.into_iter().enumerate() {
            assert_eq!(pods(&outcomes), expected, "{number}");
        }
        // A pod that was created after the messages is not the one they are about.
        let mut new = silent();
        new.created = "2026-01-01T02:00:00Z".parse().expect("a time");
        assert_eq!(pods(&[("a", not_c()), ("b", not_c()), ("c", new)]), []);
    }

    #[test]
    fn it_is_told_once_and_not_at_once() {
        let (a, b, c) = (
            outcome(Some(("01:00:00", &["c"]))),
            outcome(Some(("01:00:00", &["c"]))),
            outcome(None),
        );
        let all: BTreeMap<&str, &GangOutcome> = [("a", &a), ("b", &b), ("c", &c)].into();
        let mut suspects = Suspects::default();
        assert_eq!(suspects.due(&all, ROUND), []);
        let past = Instant::now().checked_sub(SETTLED).expect("a time");
        suspects.0.insert("c".to_owned(), (past, false));
        assert_eq!(suspects.due(&all, ROUND).len(), 1);
        assert_eq!(suspects.due(&all, ROUND).len(), 1, "it was not told");
        suspects.mark_reported("c");
        assert_eq!(suspects.due(&all, ROUND), []);
        // A member that was reached again may be reported again.
        let said = outcome(Some(("01:00:05", &[])));
        let well: BTreeMap<&str, &GangOutcome> = [("a", &a), ("b", &b), ("c", &said)].into();
        assert_eq!(suspects.due(&well, ROUND), []);
        assert!(suspects.0.is_empty());
    }
}
