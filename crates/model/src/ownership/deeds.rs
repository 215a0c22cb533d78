//! Changes that a session made to its node and that others can undo: the cordon and the taints.

use super::{ByHand, Ownership};
use crate::node::NodeView;

/// Name of the cordon among the changes.
const CORDON: &str = "cordon";

// === impl Ownership ===

impl Ownership {
    /// Returns the changes that the session made to `node`, each with whether it is in effect.
    pub fn deeds<'a>(&'a self, node: &'a NodeView) -> impl Iterator<Item = (String, bool)> + 'a {
        let cordon = (self.cordoned).then(|| (CORDON.to_owned(), node.unschedulable));
        let taints = self.taints.iter().filter(|applied| !applied.pre_existing);
        cordon.into_iter().chain(
            taints.map(|applied| (applied.taint.to_string(), node.has_taint(&applied.taint))),
        )
    }

    /// Returns whether any change of the session is not in effect on `node`.
    pub fn lacks_a_deed(&self, node: &NodeView) -> bool {
        self.deeds(node).any(|(_, there)| !there)
    }

    /// Returns how others have undone a change of the session. Our own patches remove the
    /// annotations together with the changes, so they never look like this. Changes that were
    /// never observed cannot have been undone.
    pub fn undone_by_hand(&self, node: &NodeView) -> Option<ByHand> {
        let gone = self.deeds(node).filter(|(_, there)| !there);
        let mut gone = gone.filter(|(deed, _)| !self.mark.missing.contains(deed));
        gone.next().map(|(deed, _)| match deed.as_str() {
            CORDON => ByHand::Uncordoned,
            _ => ByHand::Untainted,
        })
    }
}
