//! Sizes of groups of nodes, for rules that ask for a share of the nodes of a group.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use contract::HealthEvent;

use super::{Analyzer, GroupId};
use crate::load::MAX_THRESHOLD;

// === impl Analyzer ===

impl Analyzer {
    /// Sets the nodes of the cluster, by name and labels: a rule with a share needs as many nodes
    /// as that is of a group. Groups whose threshold is another one now are built again
    /// ([`Self::late`]).
    pub fn set_nodes(&mut self, nodes: &[(&str, &BTreeMap<String, String>)]) {
        let mut thresholds: BTreeMap<GroupId, u32> = BTreeMap::new();
        for (number, rule) in self.rules.iter().enumerate() {
            let Some(share) = rule.share else {
                continue;
            };
            let mut sizes: BTreeMap<_, u64> = BTreeMap::new();
            for (name, labels) in nodes {
                let mut event = HealthEvent {
                    node_name: (*name).to_owned(),
                    ..HealthEvent::default()
                };
                let known = rule.labels().filter_map(|key| labels.get_key_value(key));
                event.metadata = known.map(|(key, it)| (key.clone(), it.clone())).collect();
                for group in rule.groups(&event) {
                    *sizes.entry(group).or_default() += 1;
                }
            }
            for (group, size) in sizes {
                let needed = size.saturating_mul(u64::from(share)).div_ceil(100);
                let needed = needed.min(MAX_THRESHOLD.unsigned_abs());
                let needed = u32::try_from(needed).unwrap_or(u32::MAX);
                if needed > rule.condition.threshold {
                    thresholds.insert((Arc::new(group), number), needed);
                }
            }
        }
        let before = std::mem::replace(&mut self.context.thresholds.0, thresholds);
        let after = &self.context.thresholds.0;
        let has_events = self.groups.len() > 0 || !self.unknown.is_empty();
        let ids: BTreeSet<&GroupId> = before.keys().chain(after.keys()).collect();
        let is_other = ids.into_iter().any(|id| {
            // A group that is not kept holds nothing that counts, unless conclusions last.
            let rule = self.rules.get(id.1).filter(|_| has_events);
            let lasts = rule.is_some_and(|rule| rule.condition.until_repaired);
            before.get(id) != after.get(id) && (lasts || self.groups.get(id).is_some())
        });
        if is_other {
            self.agenda.late.insert(String::new());
        }
    }
}
