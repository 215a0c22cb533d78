//! Members of a group that report, and those that are far from their siblings.
//!
//! A noisy member is far by the reports alone. A silent one has none, so it is found among the GPUs
//! that a node is known to have ([`crate::member::KnownGpus`]), and only on nodes of which another
//! GPU reports: a node that is off, or whose monitor does not run, says nothing about its GPUs.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::parts::Parts;
use super::{Conclusion, Condition, ConditionKind, EntryKey, Held, Lack, Pending, Report};
use super::{after, before};
use crate::member::{KnownGpus, Member};
use crate::text::Text;

/// Most members of a group that are compared. Reports of further ones do not count.
pub const MAX_MEMBERS: usize = 1024;

/// Members that have reported within the window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Outlier {
    /// Members by their nodes.
    nodes: BTreeMap<String, Vec<Speaker>>,
}

/// Member that reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Speaker {
    member: Member,
    /// Time of the first report, with no longer pause than the window since.
    first: Timestamp,
    /// Event of that report.
    id: Text,
    last: Timestamp,
    /// Number of reports, for [`ConditionKind::Noisy`].
    #[serde(default)]
    parts: Parts,
    /// Time since which it is far from its siblings, for [`ConditionKind::Noisy`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    far: Option<Timestamp>,
}

// === impl Outlier ===

impl Outlier {
    /// Adds a report.
    pub(super) fn report(&mut self, condition: &Condition, key: &EntryKey, report: &Report) {
        let begin = before(key.at, condition.window);
        self.nodes.retain(|_, speakers| {
            speakers.retain(|speaker| speaker.last >= begin);
            !speakers.is_empty()
        });
        for member in &report.members {
            let number: usize = self.nodes.values().map(Vec::len).sum();
            let of_node = self.nodes.entry(member.node.clone()).or_default();
            let known = of_node.iter().position(|it| it.member.is(member));
            if known.is_none() && number >= MAX_MEMBERS {
                continue;
            }
            let mut speaker = match known {
                Some(known) => of_node.swap_remove(known),
                None => Speaker::new(member, key),
            };
            speaker.member.learn(member);
            speaker.last = key.at;
            if let ConditionKind::Noisy { .. } = condition.kind {
                speaker.parts.add(condition.window, key, report);
            }
            of_node.push(speaker);
        }
        self.nodes.retain(|_, speakers| !speakers.is_empty());
        self.compare(condition, key.at, report.only_counts);
    }

    /// Takes note of a repair: reports from before it, of the nodes of its members, do not count.
    pub(super) fn repair(&mut self, members: &[Member]) {
        for member in members {
            self.nodes.remove(&member.node);
        }
    }

    /// Returns true if a member is far from its siblings, as of the last report.
    pub(super) fn is_far(&self, member: &Member) -> bool {
        let mut of_node = self.nodes.get(&member.node).into_iter().flatten();
        of_node.any(|it| it.far.is_some() && it.member.is(member))
    }

    /// Returns the conclusion about the noisy member that has been far for longest, if it was for the
    /// gap before `now`.
    pub(super) fn matured(&self, condition: &Condition, now: Timestamp) -> Option<Conclusion> {
        let ConditionKind::Noisy { gap, .. } = condition.kind else {
            return None;
        };
        let far = self.speakers().filter_map(|it| Some((it.far?, it)));
        let (since, speaker) = far.min_by_key(|(since, it)| (*since, &it.member))?;
        let threshold = usize::try_from(condition.threshold).unwrap_or(usize::MAX);
        (after(since, gap) < now).then(|| {
            let mut evidence = speaker.parts.evidence(condition.window, speaker.last);
            evidence.truncate(threshold);
            Conclusion {
                since,
                evidence,
                node: Some(speaker.member.node.clone()),
                member: Some(speaker.member.lasting()),
            }
        })
    }

    /// Returns the time after which [`Self::matured`] finds the first noisy member.
    pub(super) fn judged_after(&self, gap: SignedDuration) -> Option<Timestamp> {
        let far = self.speakers().filter_map(|it| it.far);
        far.min().map(|since| after(since, gap))
    }

    /// Returns the conclusion about the only member that is silent where all others report.
    pub(super) fn silent(&self, condition: &Condition, known: &KnownGpus) -> Option<Pending> {
        let ConditionKind::Silent { gap } = condition.kind else {
            return None;
        };
        let mut silent = self.silent_members(known);
        let member = silent.next()?;
        let threshold = usize::try_from(condition.threshold).unwrap_or(usize::MAX);
        if silent.next().is_some() || self.speakers().count() < threshold {
            return None;
        }
        let mut speakers: Vec<(Timestamp, &Text)> =
            self.speakers().map(|it| (it.first, &it.id)).collect();
        speakers.sort_unstable();
        let (since, _) = *speakers.last()?;
        let evidence = speakers.into_iter().take(threshold);
        Some(Pending {
            judged: after(since, gap),
            conclusion: Conclusion {
                since,
                evidence: evidence.map(|(_, id)| id.clone()).collect(),
                node: Some(member.node.clone()),
                member: Some(member.lasting()),
            },
        })
    }

    /// Returns the reports of the noisiest member, or the number of members that report.
    pub(super) fn held(&self, condition: &Condition, now: Timestamp, known: &KnownGpus) -> Held {
        let ConditionKind::Noisy {
            siblings, factor, ..
        } = condition.kind
        else {
            let silent: Vec<String> = self
                .silent_members(known)
                .map(|it| it.to_string())
                .collect();
            return Held {
                count: self.speakers().count() as u64,
                lack: (silent.len() != 1).then_some(Lack::OneSilent(silent)),
                ..Held::default()
            };
        };
        let counts = self.counts(condition, now);
        let sum = |it: &Speaker| it.parts.sums(condition.window, now).0;
        let Some(noisiest) = self.speakers().max_by_key(|it| (sum(it), &it.member)) else {
            return Held::default();
        };
        let count = sum(noisiest);
        let others = counts.len().saturating_sub(1) as u64;
        let median = median_of_others(&counts, count);
        let lack = if others < u64::from(siblings) {
            Some(Lack::Siblings(others))
        } else {
            let is_far = count >= median.saturating_mul(u64::from(factor));
            (!is_far).then_some(Lack::Median(median))
        };
        Held {
            count,
            evidence: noisiest.parts.evidence(condition.window, now),
            lack,
            ..Held::default()
        }
    }

    fn speakers(&self) -> impl Iterator<Item = &Speaker> {
        self.nodes.values().flatten()
    }

    /// Returns the members without a report, on nodes of which another one reports.
    fn silent_members<'a>(&'a self, known: &'a KnownGpus) -> impl Iterator<Item = Member> + 'a {
        self.nodes.iter().flat_map(move |(node, speakers)| {
            let silent = move |gpu: &Member| !speakers.iter().any(|it| it.member.is(gpu));
            known.of(node).filter(silent)
        })
    }

    /// Returns the number of reports of each member that has any within the window, in order.
    fn counts(&self, condition: &Condition, at: Timestamp) -> Vec<u64> {
        let sums = self
            .speakers()
            .map(|it| it.parts.sums(condition.window, at));
        let mut counts: Vec<u64> = sums.map(|(sum, _)| sum).filter(|sum| *sum > 0).collect();
        counts.sort_unstable();
        counts
    }

    /// Determines which members are far from their siblings.
    fn compare(&mut self, condition: &Condition, at: Timestamp, only_counts: bool) {
        let ConditionKind::Noisy {
            factor, siblings, ..
        } = condition.kind
        else {
            return;
        };
        let threshold = u64::from(condition.threshold);
        if self
            .speakers()
            .all(|it| it.far.is_none() && it.parts.total() < threshold)
        {
            return;
        }
        let counts = self.counts(condition, at);
        let has_siblings = counts.len() as u64 > u64::from(siblings);
        for speaker in self.nodes.values_mut().flatten() {
            let (count, _) = speaker.parts.sums(condition.window, at);
            let is_far = has_siblings
                && count >= threshold
                && count >= median_of_others(&counts, count).saturating_mul(u64::from(factor));
            speaker.far = match speaker.far {
                Some(since) if is_far => Some(since),
                None if is_far && !only_counts => Some(at),
                _ => None,
            };
        }
    }
}

// === impl Speaker ===

impl Speaker {
    fn new(member: &Member, key: &EntryKey) -> Self {
        Self {
            member: member.clone(),
            first: key.at,
            id: key.id.clone(),
            last: key.at,
            parts: Parts::default(),
            far: None,
        }
    }
}

/// Returns the median of sorted numbers without one of them; of two in the middle, the larger one.
fn median_of_others(counts: &[u64], own: u64) -> u64 {
    let place = counts.partition_point(|count| *count < own);
    let middle = counts.len().saturating_sub(1) / 2;
    let middle = if middle < place { middle } else { middle + 1 };
    counts.get(middle).copied().unwrap_or_default()
}
