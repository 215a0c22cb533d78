//! Events that matter beyond their own group: the inventory of GPUs, and values that other groups may
//! have too.

use std::sync::Arc;

use jiff::Timestamp;
use model::event::EventRecord;
use model::reporter::Authority;

use super::{Analyzer, GroupId};
use crate::condition::ConditionKind;
use crate::group::Group;
use crate::text::Text;

// === impl Analyzer ===

impl Analyzer {
    /// Records the GPUs that a node has.
    pub(super) fn record_gpus(&mut self, record: &EventRecord) {
        let event = &record.event;
        if !event.is_healthy || Authority::of(event) != Authority::Trusted {
            return;
        }
        let learned = self.context.gpus.add(event, record.created_at);
        self.agenda.changed.extend(learned.forgotten);
        if learned.renames {
            self.rename(&event.node_name);
        }
        if !learned.is_new {
            return;
        }
        self.agenda.note_changed(&event.node_name);
        let of_node = self.groups.of_node(&event.node_name).into_iter();
        let ids = of_node.chain(self.groups.of_node(""));
        let is_silent = |id: &GroupId| {
            let kind = self.rules.get(id.1).map(|rule| &rule.condition.kind);
            matches!(kind, Some(ConditionKind::Silent { .. }))
        };
        let ids: Vec<GroupId> = ids.filter(is_silent).collect();
        for id in ids {
            self.settle_again(&id);
        }
    }

    /// Marks the groups that may have events of a node by another name of their GPU, to be built again.
    fn rename(&mut self, node: &str) {
        self.agenda.note_changed(node);
        for of in [node, ""] {
            if !self.groups.is_without(of) {
                self.agenda.late.insert(of.to_owned());
            }
        }
    }

    /// Records values of groups at a time, by the number of their rule, and determines the conclusions
    /// of other groups with the same value again.
    pub(super) fn record_values(&mut self, at: Timestamp, values: Vec<(usize, Text, Vec<Group>)>) {
        for (number, value, groups) in values {
            let Some(window) = self.rules.get(number).map(|rule| rule.condition.window) else {
                continue;
            };
            for group in &groups {
                let rule = (number, window);
                let others = self.context.elsewhere.add(rule, &value, at, group);
                for other in others.into_iter().chain([group.clone()]) {
                    self.settle_again(&(Arc::new(other), number));
                }
            }
        }
    }

    /// Determines the conclusion of a group again, as of its latest event.
    fn settle_again(&mut self, id: &GroupId) {
        let state = self.groups.get(id);
        let newest = state.and_then(|state| Some(state.history.newest()?.at));
        if let Some(at) = newest {
            self.settle(id, at);
        }
    }
}
