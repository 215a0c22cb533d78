//! The results of decisions: effects, and the nodes to look at, save and show.

use std::collections::BTreeSet;

use jiff::Timestamp;
use model::journal::{EntryKind, JournalEntry};
use model::position::Position;
use model::wakes::Wakes;

use super::{Effect, Level, Unsaved};
use crate::session::JournalNote;

/// Results of decisions that are still to be collected.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    /// Effects in order, since they were last collected.
    pub(super) effects: Vec<Effect>,
    /// Nodes to look at.
    pub(super) dirty: BTreeSet<String>,
    /// Time of each node's next look if no input marks it before.
    pub(super) wakes: Wakes,
    /// Parts of the state to save.
    pub(super) unsaved: Unsaved,
    /// Nodes that may have changed since they were last shown, which includes every node looked
    /// at.
    pub(super) unshown: BTreeSet<String>,
    /// True if anything shown may have changed.
    pub(super) view_changed: bool,
}

/// A question to the store about a node.
#[derive(Debug)]
pub(super) enum StoreQuestion {
    /// The store is asked whether it has the events listed on the node.
    LookUp,
    /// The store is asked to append events that the node lists.
    TakeOver {
        /// Ids as listed on the node.
        listed: Vec<String>,
    },
    /// The store is asked to append events of gpuwarden itself, which open or close faults.
    AppendOwn {
        /// Text for the journal once the events are stored.
        text: Option<String>,
    },
    /// The store has answered, and the feed has yet to deliver up to this position.
    AwaitFeed(Position),
}

// === impl Agenda ===

impl Agenda {
    /// Marks a node for another look.
    pub(super) fn look_again_at(&mut self, name: &str) {
        self.dirty.insert(name.to_owned());
        self.unshown.insert(name.to_owned());
        self.view_changed = true;
    }

    /// Marks several nodes for another look.
    pub(super) fn look_again_at_all<'a>(&mut self, names: impl Iterator<Item = &'a String>) {
        for name in names {
            self.dirty.insert(name.clone());
            self.unshown.insert(name.clone());
        }
    }

    /// Adds an entry to the journal of a node; with a level, logs it too.
    pub(super) fn journal(
        &mut self,
        now: Timestamp,
        node: &str,
        session: Option<&str>,
        note: JournalNote,
        level: Option<Level>,
    ) {
        let entry = JournalEntry {
            at: now,
            node: node.to_owned(),
            session: session.map(str::to_owned),
            kind: note.kind,
            text: note.text,
            detail: note.detail,
        };
        self.effects.push(Effect::Journal(entry, level));
    }

    /// Journals and logs something about a node that needs a person's attention.
    pub(super) fn call_attention(&mut self, now: Timestamp, node: &str, text: String) {
        let note = JournalNote::new(EntryKind::Attention, text);
        self.journal(now, node, None, note, Some(Level::Warn));
    }

    /// Logs a line for people.
    pub(super) fn log(&mut self, level: Level, node: Option<&str>, text: String) {
        let node = node.map(str::to_owned);
        self.effects.push(Effect::Log { level, node, text });
    }
}
