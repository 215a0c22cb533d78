//! Answering why a node is quarantined, or is not, from what is known at that moment.

use jiff::Timestamp;

use super::{Fleet, Owns};
use crate::nearest::nearest;
use crate::session::Session;
use crate::why_not::{Connection, Situation, Source, WhyNot, why_not};

/// Names offered where nothing is known of the one that was asked about.
const NAMES_OFFERED: usize = 3;

impl Fleet {
    /// Returns whether `node` is quarantined or not, and why. `cluster` and `sources` are what
    /// the caller knows beside.
    pub fn why_not(
        &self,
        node: &str,
        cluster: Option<Connection<'_>>,
        sources: &[Source<'_>],
        now: Timestamp,
    ) -> WhyNot {
        let entry = self.nodes.get(node);
        let idle = Session::idle(now);
        let own = match &self.settings.owns {
            Owns::Node(own) => Some(own),
            Owns::All => None,
        };
        let ours = own.is_some_and(|own| own == node);
        let mut why = why_not(&Situation {
            node,
            // Those of another machine are not known here.
            sources: if ours { sources } else { &[] },
            acting: self.settings.mode,
            cluster,
            observed: entry.and_then(|entry| entry.observed.as_ref()),
            faults: self.book.faults(node),
            missed: self.book.missed(node),
            policy: self.policy.as_deref(),
            session: entry.map_or(&idle, |entry| &entry.session),
            anothers: entry.is_some_and(|entry| entry.claim.anothers.is_some()),
            on_our_node: entry.is_some_and(|entry| entry.claim.on_our_node),
            hold: entry.and_then(|entry| entry.hold.as_ref()),
            dropped_at: self.brake.switched.dropped_at,
        });
        why.known |= ours;
        if !why.known {
            let names = self.nodes.keys().chain(own);
            let nearest = nearest(node, names.map(String::as_str), NAMES_OFFERED);
            why.nearest = nearest.into_iter().map(str::to_owned).collect();
        }
        why
    }
}
