//! Who of a gang a majority of it does not reach, and is silent itself: the one fault of a node that no check
//! can report there.
//!
//! A check that ends without its gang leaves in its termination message whom it does not reach, which its
//! kubelet brings. Who has ended a check at about that time has reported for itself.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use preflight::config::Config;
use preflight::inject::last_end;
use preflight::rendezvous::named_not_reached;
use serde_json::Value;

/// Time for which somebody stays accused before it is told: its own word may be on its way.
const SETTLED: Duration = Duration::from_secs(30);

/// What a pod of a gang says by its checks, and where it runs.
pub(super) struct Word {
    node: Option<String>,
    created: Timestamp,
    /// The time at which its check has ended last, and whom it did not reach.
    said: Option<(Timestamp, Vec<String>)>,
}

/// A member of a gang that a majority of it does not reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Accused {
    pub(super) pod: String,
    pub(super) node: String,
    /// Those who do not reach it.
    pub(super) by: Vec<String>,
    pub(super) members: usize,
}

/// Who of a gang is accused, since when, and whether that was told.
#[derive(Default)]
pub(super) struct Dock(BTreeMap<String, (Instant, bool)>);

// === impl Word ===

impl Word {
    pub(super) fn of(pod: &Value, config: &Config) -> Self {
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
        let created = text("/metadata/creationTimestamp").and_then(|at| at.parse().ok());
        let said = last_end(pod, config).and_then(|(at, message)| {
            let named = named_not_reached(message);
            let named = named.into_iter().map(str::to_owned).collect();
            Some((at.parse().ok()?, named))
        });
        Self {
            node: text("/spec/nodeName").map(str::to_owned),
            created: created.unwrap_or(Timestamp::MAX),
            said,
        }
    }
}

/// Returns whom a majority of the members does not reach, and who has said nothing within `round` before the
/// first of them.
fn accused(members: &BTreeMap<&str, &Word>, round: Duration) -> Vec<Accused> {
    // Who does not reach whom, and when that was said.
    let mut named: BTreeMap<&str, BTreeMap<&str, Timestamp>> = BTreeMap::new();
    for (by, word) in members {
        if let Some((at, pods)) = &word.said {
            for pod in pods {
                named.entry(pod).or_default().insert(by, *at);
            }
        }
    }
    let of = |(pod, word): (&&str, &&Word)| {
        let accusers = named.get(pod)?.iter().map(|(by, at)| (*at, *by));
        // Not one of the same name before this one was meant.
        let meant = accusers.filter(|(at, by)| by != pod && *at > word.created);
        let accusers: Vec<(Timestamp, &str)> = meant.collect();
        let (first, _) = accusers.iter().min()?;
        let begun = first.saturating_sub(round).unwrap_or(Timestamp::MIN);
        let has_spoken = word.said.as_ref().is_some_and(|(at, _)| *at >= begun);
        let is_majority = accusers.len() * 2 > members.len();
        (is_majority && !has_spoken).then_some(())?;
        Some(Accused {
            pod: (*pod).to_owned(),
            node: word.node.clone()?,
            by: accusers.iter().map(|(_, by)| (*by).to_owned()).collect(),
            members: members.len(),
        })
    };
    members.iter().filter_map(of).collect()
}

// === impl Dock ===

impl Dock {
    /// Returns who is accused for long enough, and was not told of yet.
    pub(super) fn due(&mut self, members: &BTreeMap<&str, &Word>, round: Duration) -> Vec<Accused> {
        let mut accused = accused(members, round);
        self.0
            .retain(|pod, _| accused.iter().any(|one| one.pod == *pod));
        accused.retain(|one| {
            let fresh = (Instant::now(), false);
            let (since, is_told) = *self.0.entry(one.pod.clone()).or_insert(fresh);
            since.elapsed() >= SETTLED && !is_told
        });
        accused
    }

    /// Notes that somebody was told of.
    pub(super) fn told(&mut self, pod: &str) {
        if let Some((_, is_told)) = self.0.get_mut(pod) {
            *is_told = true;
        }
    }

    /// Notes that somebody was not told of after all.
    pub(super) fn not_told(&mut self, pod: &str) {
        if let Some((_, is_told)) = self.0.get_mut(pod) {
            *is_told = false;
        }
    }

    /// Has all be accused for long enough.
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

    fn word(said: Option<(&str, &[&str])>) -> Word {
        Word {
            node: Some("n".to_owned()),
            created: "2026-01-01T00:00:00Z".parse().expect("a time"),
            said: said.map(|(at, named)| {
                let at = format!("2026-01-01T{at}Z").parse().expect("a time");
                (at, named.iter().map(|name| (*name).to_owned()).collect())
            }),
        }
    }

    fn pods(words: &[(&'static str, Word)]) -> Vec<(String, Vec<String>)> {
        let members = words.iter().map(|(pod, word)| (*pod, word)).collect();
        let accused = accused(&members, ROUND).into_iter();
        accused.map(|one| (one.pod, one.by)).collect()
    }

    #[test]
    fn only_whom_a_majority_does_not_reach_and_who_is_silent_is_accused() {
        let (at, later) = ("01:00:00", "01:00:09");
        let silent = || word(None);
        let not_c = || word(Some((at, &["c"])));
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
            // One of two, and two of four, are none.
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
                    ("c", word(Some((later, &["a"])))),
                ],
                vec![],
            ),
            // What it has said an hour before is no word of this round.
            (
                vec![
                    ("a", not_c()),
                    ("b", not_c()),
                    ("c", word(Some(("00:10:00", &[])))),
                ],
                by(&["a", "b"]),
            ),
            (
                vec![
                    ("a", word(Some((at, &[])))),
                    ("b", not_c()),
                    ("c", silent()),
                ],
                vec![],
            ),
            // Nobody is a witness against itself.
            (
                vec![
                    ("b", not_c()),
                    ("c", word(Some((at, &["c"])))),
                    ("d", silent()),
                ],
                vec![],
            ),
        ];
        for (number, (words, expected)) in table.into_iter().enumerate() {
            assert_eq!(pods(&words), expected, "{number}");
        }
        // Who came after the words were said is another than the one that was meant.
        let mut new = silent();
        new.created = "2026-01-01T02:00:00Z".parse().expect("a time");
        assert_eq!(pods(&[("a", not_c()), ("b", not_c()), ("c", new)]), []);
    }

    #[test]
    fn it_is_told_once_and_not_at_once() {
        let (a, b, c) = (
            word(Some(("01:00:00", &["c"]))),
            word(Some(("01:00:00", &["c"]))),
            word(None),
        );
        let all: BTreeMap<&str, &Word> = [("a", &a), ("b", &b), ("c", &c)].into();
        let mut dock = Dock::default();
        assert_eq!(dock.due(&all, ROUND), []);
        let past = Instant::now().checked_sub(SETTLED).expect("a time");
        dock.0.insert("c".to_owned(), (past, false));
        assert_eq!(dock.due(&all, ROUND).len(), 1);
        assert_eq!(dock.due(&all, ROUND).len(), 1, "it was not told");
        dock.told("c");
        assert_eq!(dock.due(&all, ROUND), []);
        // When it is back, it may be lost again.
        let said = word(Some(("01:00:05", &[])));
        let well: BTreeMap<&str, &Word> = [("a", &a), ("b", &b), ("c", &said)].into();
        assert_eq!(dock.due(&well, ROUND), []);
        assert!(dock.0.is_empty());
    }
}
