//! Groups and nodes that something is to be done for, because they have changed or will.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use jiff::Timestamp;

use super::{GroupId, GroupState};
use crate::condition::{Entry, EntryKey};
use crate::context::Context;
use crate::finding::Finding;
use crate::history::Recorded;
use crate::rule::Rule;

/// Groups and nodes that something is to be done for.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    /// Times at which groups may change without a further event: never later than they do.
    pub(super) due: BTreeSet<(Timestamp, GroupId)>,
    /// Groups whose conclusion may differ from what was said.
    pub(super) unsaid: BTreeSet<GroupId>,
    /// Nodes with events that came too late for their groups.
    pub(super) late: BTreeSet<String>,
    /// Nodes whose groups have changed since they were saved.
    pub(super) changed: HashSet<String>,
}

// === impl Agenda ===

impl Agenda {
    /// Adds an entry to a group. Returns true if that changes the group.
    pub(super) fn add(
        &mut self,
        context: &Context,
        id: &GroupId,
        state: &mut GroupState,
        rule: &Rule,
        key: &EntryKey,
        entry: Arc<Entry>,
    ) -> bool {
        let condition = context.thresholds.condition(rule, id);
        match state.history.record(&condition, key.clone(), entry) {
            Recorded::Known => return false,
            Recorded::TooOld => {
                self.late.insert(id.0.node.clone());
                return false;
            }
            Recorded::Done => {}
        }
        let now = state.history.newest().map_or(Timestamp::MIN, |key| key.at);
        self.settle(context, id, state, rule, now);
        true
    }

    /// Determines the conclusion of a group as of a time.
    pub(super) fn settle(
        &mut self,
        context: &Context,
        id: &GroupId,
        state: &mut GroupState,
        rule: &Rule,
        now: Timestamp,
    ) {
        let seen = context.seen(rule, id, &state.history);
        let conclusion = seen.conclusion(now);
        let known = state.open.as_ref().map(|open| &open.conclusion);
        if known != conclusion.as_deref() {
            let conclusion = conclusion.map(Cow::into_owned);
            let open = conclusion.map(|it| Finding::new(rule, &id.0, it));
            state.open = open.map(Box::new);
            self.note_changed(&id.0.node);
            self.unsaid.insert(id.clone());
        }
        let newest = state.history.newest().map(|key| key.at);
        let forgotten = newest.and_then(|at| at.checked_add(rule.condition.window).ok());
        let due = seen.changes_after(now);
        let due = due.or(forgotten.filter(|_| state.open.is_none()));
        // Most reports only move the time back, which is seen when it has come.
        if let Some(due) = due
            && state.due.is_none_or(|known| due < known)
        {
            if let Some(known) = state.due.replace(due) {
                self.due.remove(&(known, id.clone()));
            }
            self.due.insert((due, id.clone()));
        }
    }

    /// Notes that the groups of a node have changed.
    pub(super) fn note_changed(&mut self, node: &str) {
        if !self.changed.contains(node) {
            self.changed.insert(node.to_owned());
        }
    }
}
