//! Reports of several steps in their order.
//!
//! For each step, the newest report that completes the steps up to it is kept. It begins latest and
//! ends latest, so no other one could be continued where it cannot.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Condition, ConditionKind, EntryKey, Held, Report};
use crate::text::Text;

/// Completed steps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Chain {
    /// Newest completion of each step; those behind the list are not completed.
    links: Vec<Option<Link>>,
}

/// Reports that complete the steps up to one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Link {
    /// Time of the first report.
    begin: Timestamp,
    /// Time of the last report.
    at: Timestamp,
    /// Events of the reports.
    ids: Vec<Text>,
}

// === impl Chain ===

impl Chain {
    /// Adds a report. Returns the evidence if it completes the last step.
    pub(super) fn report(
        &mut self,
        condition: &Condition,
        key: &EntryKey,
        report: &Report,
    ) -> Option<Vec<Text>> {
        let ConditionKind::Sequence { within } = condition.kind else {
            return None;
        };
        let steps = usize::try_from(condition.threshold).unwrap_or(usize::MAX);
        self.links.resize(steps, None);
        let mut evidence = None;
        // From the last step to the first, so that a report is one step only.
        for step in (0..steps).rev() {
            let is_part = u32::try_from(step)
                .is_ok_and(|step| report.steps.checked_shr(step).unwrap_or(0) & 1 == 1);
            if !is_part {
                continue;
            }
            let link = match step.checked_sub(1) {
                None => Some(Link {
                    begin: key.at,
                    at: key.at,
                    ids: vec![key.id.clone()],
                }),
                Some(before) => {
                    self.links
                        .get(before)
                        .and_then(Option::as_ref)
                        .and_then(|before| {
                            let goes_on = key.at.duration_since(before.at) <= within
                                && key.at.duration_since(before.begin) <= condition.window;
                            goes_on.then(|| Link {
                                begin: before.begin,
                                at: key.at,
                                ids: [before.ids.as_slice(), std::slice::from_ref(&key.id)]
                                    .concat(),
                            })
                        })
                }
            };
            let Some(link) = link else {
                continue;
            };
            if step + 1 == steps {
                evidence = Some(link.ids.clone());
            }
            if let Some(place) = self.links.get_mut(step) {
                *place = Some(link);
            }
        }
        evidence
    }

    /// Returns the most steps that a report at a time could continue.
    pub(super) fn held(&self, condition: &Condition, now: Timestamp) -> Held {
        let ConditionKind::Sequence { within } = condition.kind else {
            return Held::default();
        };
        let goes_on = |link: &&Link| {
            now.duration_since(link.at) <= within
                && now.duration_since(link.begin) <= condition.window
        };
        let mut links = self.links.iter().rev().flatten();
        let link = links.find(goes_on);
        let evidence = link.map(|link| link.ids.clone()).unwrap_or_default();
        Held {
            count: evidence.len() as u64,
            evidence,
            ..Held::default()
        }
    }
}
