//! What decisions about nodes ask for: effects, and the nodes to look at, save and show anew.

use std::collections::BTreeSet;

use jiff::Timestamp;
use model::journal::{Entry, EntryKind};
use model::position::Position;
use model::wakes::Wakes;

use super::{Effect, Level, Unsaved};
use crate::session::Note;

/// What decisions about nodes ask for.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    /// Effects, in order, since they were last taken.
    pub(super) effects: Vec<Effect>,
    /// Nodes to look at.
    pub(super) dirty: BTreeSet<String>,
    /// The times at which nodes are to be looked at even if nothing happens to them.
    pub(super) wakes: Wakes,
    /// The parts of the state to be saved.
    pub(super) unsaved: Unsaved,
    /// Nodes that may have changed since they were last shown. Each node that is looked at is one.
    pub(super) unshown: BTreeSet<String>,
    /// True if anything shown may have changed.
    pub(super) news: bool,
}

/// A question to the store about a node.
#[derive(Debug)]
pub(super) enum Awaits {
    /// The store is asked whether it has the events on the node.
    Found,
    /// The store is asked to append these events, which the node lists.
    TakenOver {
        /// Their ids as listed.
        listed: Vec<String>,
    },
    /// The store is asked to append events of our own, which open or close faults.
    OfOurs {
        /// The note for the story of the node.
        text: String,
    },
    /// Answered: the feed is to bring what was appended, up to this position.
    Feed(Position),
}

// === impl Agenda ===

impl Agenda {
    /// Marks a node for another look.
    pub(super) fn look_again_at(&mut self, name: &str) {
        self.dirty.insert(name.to_owned());
        self.unshown.insert(name.to_owned());
        self.news = true;
    }

    /// Adds a note to the story of a node; with a level, it is logged, too.
    pub(super) fn note(
        &mut self,
        now: Timestamp,
        node: &str,
        session: Option<&str>,
        note: Note,
        level: Option<Level>,
    ) {
        let entry = Entry {
            at: now,
            node: node.to_owned(),
            session: session.map(str::to_owned),
            kind: note.kind,
            text: note.text,
            detail: note.detail,
        };
        self.effects.push(Effect::Note(entry, level));
    }

    /// Asks people to look at a node.
    pub(super) fn call_attention(&mut self, now: Timestamp, node: &str, text: String) {
        let note = Note::new(EntryKind::Attention, text);
        self.note(now, node, None, note, Some(Level::Warn));
    }

    /// Logs a line for people.
    pub(super) fn log(&mut self, level: Level, node: Option<&str>, text: String) {
        let node = node.map(str::to_owned);
        self.effects.push(Effect::Log { level, node, text });
    }
}
