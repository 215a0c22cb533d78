//! The watch of one consumer.
//!
//! A watcher has no buffer of events, only a place in the board's history, and gets the next
//! change when it has room for one. A watcher whose place was dropped from the history is
//! informed, and restarts with a snapshot. So a slow watcher costs the others nothing, and
//! never misses a change unknowingly.

use std::collections::VecDeque;
use std::sync::Arc;

use contract::device::{Gpu, WatchEventType, WatchGpusResponse};

use crate::board::{Board, GpuChange, Position};

#[cfg(test)]
mod tests;

/// Place of one watcher.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    /// Last version that the watcher has received; `None` before a snapshot.
    at: Option<u64>,
    /// GPUs of a snapshot that are still to be sent.
    snapshot: VecDeque<Arc<Gpu>>,
    /// Message to send before anything else.
    first: Option<Message>,
    /// Message that ends the snapshot.
    last: Option<Message>,
}

/// A message to a watcher.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// A GPU of a snapshot, sent before its bookmark.
    Added(Arc<Gpu>),
    /// A change; the watcher has received everything up to its version.
    Change(GpuChange),
    /// Nothing else has changed up to this version.
    Bookmark(String),
    /// Changes were missed; a snapshot follows.
    Resync,
}

// === impl Cursor ===

impl Cursor {
    /// Creates the place of a watcher that starts at a position; without a position it starts
    /// with a snapshot.
    pub(crate) fn new(from: Option<Position>) -> Self {
        match from {
            None => Self::default(),
            Some(Position::At(version)) => Self {
                at: Some(version),
                ..Self::default()
            },
            Some(Position::Elsewhere) => Self {
                first: Some(Message::Resync),
                ..Self::default()
            },
        }
    }

    /// Returns the next message to the watcher; `None` if it is up to date.
    pub(crate) fn next(&mut self, board: &Board) -> Option<Message> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        if let Some(at) = self.at
            && self.last.is_none()
        {
            let Ok(change) = board.after(at) else {
                self.at = None;
                return Some(Message::Resync);
            };
            let change = change?.clone();
            self.at = Some(at + 1);
            return Some(Message::Change(change));
        }
        if self.at.is_none() {
            self.snapshot = board.gpus().cloned().collect();
            self.at = Some(board.version());
            self.last = Some(Message::Bookmark(board.name_of(board.version())));
        }
        let next = self.snapshot.pop_front().map(Message::Added);
        next.or_else(|| self.last.take())
    }

    /// Returns the bookmark of a watcher that is up to date.
    pub(crate) fn bookmark(&self, board: &Board) -> Message {
        Message::Bookmark(board.name_of(self.at.unwrap_or_default()))
    }
}

// === impl Message ===

impl From<Message> for WatchGpusResponse {
    fn from(message: Message) -> Self {
        let (kind, gpu, resource_version) = match message {
            Message::Added(gpu) => (WatchEventType::Added, Some(gpu), String::new()),
            Message::Change(change) => {
                let version = change.gpu.resource_version.clone();
                (change.kind, Some(change.gpu), version)
            }
            Message::Bookmark(version) => (WatchEventType::Bookmark, None, version),
            Message::Resync => (WatchEventType::Resync, None, String::new()),
        };
        Self {
            r#type: kind.into(),
            gpu: gpu.map(Arc::unwrap_or_clone),
            resource_version,
        }
    }
}
