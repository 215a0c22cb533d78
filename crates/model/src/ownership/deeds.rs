//! What a session did to its node that others can undo: the cordon and the taints.

use super::{ByHand, Ownership};
use crate::node::NodeView;

/// The name of a cordon among what a session does.
const CORDON: &str = "cordon";

// === impl Ownership ===

impl Ownership {
    /// Returns what the session did to `node` that others can undo, each with whether it is there.
    pub fn deeds<'a>(&'a self, node: &'a NodeView) -> impl Iterator<Item = (String, bool)> + 'a {
        let cordon = (self.cordoned).then(|| (CORDON.to_owned(), node.unschedulable));
        let taints = self.taints.iter().filter(|applied| !applied.pre_existing);
        cordon.into_iter().chain(
            taints.map(|applied| (applied.taint.to_string(), node.has_taint(&applied.taint))),
        )
    }

    /// Returns whether anything is not on `node` of what the session did to it.
    pub fn lacks_a_deed(&self, node: &NodeView) -> bool {
        self.deeds(node).any(|(_, there)| !there)
    }

    /// Returns what others took back of what the session had done. Our own changes remove the annotations in the
    /// same patch, so they never look like this; and what was never there cannot have been taken back.
    pub fn undone_by_hand(&self, node: &NodeView) -> Option<ByHand> {
        let gone = self.deeds(node).filter(|(_, there)| !there);
        let mut gone = gone.filter(|(deed, _)| !self.mark.missing.contains(deed));
        gone.next().map(|(deed, _)| match deed.as_str() {
            CORDON => ByHand::Uncordoned,
            _ => ByHand::Untainted,
        })
    }
}
