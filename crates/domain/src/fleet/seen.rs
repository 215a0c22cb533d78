//! Taking in what is seen of the nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use super::look::Look;
use super::{Effect, Fleet, Level, Owns};
use crate::brake::MOST_ALONE;
use crate::node::NodeView;

/// Most time for which a view may be on its way to us as part of a list: a page takes 30 s, and
/// may wait in the watch's queue.
pub const LIST_TAKES: SignedDuration = SignedDuration::from_secs(60);

/// A list that is being delivered.
#[derive(Debug)]
pub(super) struct Relisted {
    /// Nodes that it had so far.
    seen: BTreeSet<String>,
    began: Timestamp,
}

impl Fleet {
    /// Takes in that a list begins.
    pub(super) fn list_begun(&mut self) {
        // What people did to the nodes meanwhile may be of any time.
        for entry in self.nodes.values_mut() {
            entry.session.watched = false;
        }
        self.relisted = Some(Relisted {
            seen: BTreeSet::new(),
            began: self.common.now,
        });
    }

    /// Takes in a node as the watch tells of it.
    pub(super) fn seen(&mut self, view: Arc<NodeView>) {
        if let Some(list) = &mut self.relisted {
            list.seen.insert(view.name.clone());
        }
        let (name, began) = (
            view.name.clone(),
            self.relisted.as_ref().map(|list| list.began),
        );
        self.entry(&name);
        if let Some(mut look) = self.look_at(&name)
            && look.take_view(view, began)
        {
            look.again();
        }
    }

    /// Takes in that a list is complete.
    pub(super) fn list_complete(&mut self) {
        let list = self.relisted.take();
        let seen = list.map(|list| list.seen).unwrap_or_default();
        let gone: Vec<String> = self
            .nodes
            .iter()
            .filter(|(name, entry)| entry.view.is_some() && !seen.contains(*name))
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            self.gone(&name);
        }
        self.common.listed = true;
        self.warn_of_nodes();
        self.look_again_at_all();
        self.agenda.news = true;
    }

    /// Says, after a list, where our own node is missing, or too many act for themselves.
    fn warn_of_nodes(&mut self) {
        let Owns::Node(own) = self.common.settings.owns.clone() else {
            return;
        };
        if !self.writes() {
            return;
        }
        if self.view(&own).is_none() {
            let text = "the cluster has no node of this name: its faults cannot be acted on until \
                        it appears; --node-name sets the name";
            self.log(Level::Warn, Some(&own), text.to_owned());
        }
        let entries = self.nodes.values();
        let nodes = entries.filter(|entry| entry.view.is_some()).count();
        if nodes > MOST_ALONE {
            let text = format!(
                "each node acts for itself, and budgets do not hold what fails at the same \
                 moment: in a cluster of more than {MOST_ALONE} nodes run `gpuwarden agent` on \
                 them, and one `gpuwarden controller`; this one has {nodes}"
            );
            self.log(Level::Warn, None, text);
        }
    }

    /// Takes in that the cluster does not have a node any more.
    pub(super) fn gone(&mut self, name: &str) {
        self.entry(name).gone();
        self.brake.mark_stale();
        self.look_again_at(name);
    }
}

impl Look<'_> {
    /// Takes a view of the node in, unless it is older than what is known: the watch may still
    /// deliver states from before our own last patch. Returns whether anything has changed
    /// that decisions look at.
    ///
    /// The state in a list, which began at `listing`, is taken all the same where no patch can be newer:
    /// after etcd was restored from a backup, nodes have lower versions than before.
    pub(super) fn take_view(&mut self, view: Arc<NodeView>, listing: Option<Timestamp>) -> bool {
        let now = self.common.now;
        if self.entry.knows_newer(&view) {
            let patched_at = self.entry.patch.answered_at;
            let patched_before = |began| patched_at.is_none_or(|at| at + LIST_TAKES < began);
            if !listing.is_some_and(patched_before) {
                return false;
            }
            let text = "the API server went back to an older state of the node".to_owned();
            self.log(Level::Info, text);
            let name = self.name.to_owned();
            self.agenda.effects.push(Effect::Restored(name));
        }
        let moved = self.moved(&view);
        let entry = &mut *self.entry;
        let (was_out, since) = (!entry.in_service(), entry.out_since());
        let counted = entry.counted(now);
        let changed = entry.take_view(view);
        if let Some(observed) = &entry.observed {
            entry.session.take_in_view(observed, now);
        }
        let (in_service, counts) = (entry.in_service(), entry.counted(now));
        if was_out && in_service {
            self.agenda.unsaved.recently_out |= self.brake.back(self.name, since);
        } else if changed && moved || counts != counted {
            self.brake.mark_stale();
        }
        changed
    }

    /// Returns whether the node is new to the brake, or counts among others than before.
    fn moved(&self, view: &NodeView) -> bool {
        let Some(before) = &self.entry.view else {
            return true;
        };
        let policy = self.common.policy.as_ref();
        let budgets = policy.iter().flat_map(|policy| &policy.brake.budgets);
        std::iter::once(&self.common.settings.gpu_label.key)
            .chain(budgets.filter_map(|budget| budget.per.as_ref()))
            .any(|label| before.labels.get(label) != view.labels.get(label))
    }
}
