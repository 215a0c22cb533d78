//! Assembles the message that a GPU has fallen off the bus.
//!
//! The longer form has three lines: the first names the GPU, the second its PCI id, and the
//! third states what happened; a program that copies a log may break the lines elsewhere. The
//! lines may be three records, with records of others between them: XIDs, of this GPU too, and
//! such messages of other GPUs.

use jiff::Timestamp;

use super::super::{Fallen, gpu};
use super::{REMEMBERED, SAME_FALL};
use crate::subject::normalise_pci;

/// Longest text of earlier lines that is kept with a finding, in bytes. The driver's have 80.
pub(super) const MAX_EARLIER_BYTES: usize = 1024;

/// Incomplete messages, oldest first.
#[derive(Debug, Default)]
pub(super) struct Begun(Vec<Fall>);

/// An incomplete message about a fall.
#[derive(Debug)]
pub(super) struct Fall {
    pub(super) pci: String,
    pub(super) pci_id: Option<String>,
    /// Lines so far, each with a newline.
    pub(super) lines: String,
    at: Timestamp,
    /// Number of words of the sentence so far.
    words: usize,
}

// === impl Begun ===

impl Begun {
    /// Adds a part of a message; returns the message if the part completes it.
    ///
    /// A line that names no GPU continues the newest message that expects the line's words. If
    /// two messages are interleaved, both are completed, whatever the order of their lines.
    pub(super) fn add(&mut self, part: Fallen<'_>, line: &[u8], at: Timestamp) -> Option<Fall> {
        // The end of an old message was lost, and must not be taken from a new one.
        self.0
            .retain(|begun| at.duration_since(begun.at).abs() <= SAME_FALL);
        let mut fall = match part.pci {
            Some(pci) => Fall {
                pci: normalise_pci(pci),
                pci_id: None,
                lines: String::new(),
                at,
                words: 0,
            },
            // Without a begun message, the line's GPU is unknown.
            None => self.newest(&part)?,
        };
        if let Some(pci_id) = part.pci_id {
            fall.pci_id = Some(pci_id.to_owned());
        }
        fall.words = gpu::advance(fall.words, part.words).unwrap_or(fall.words);
        if part.fell || gpu::is_complete(fall.words) {
            return Some(fall);
        }
        if fall.lines.len() + line.len() < MAX_EARLIER_BYTES {
            fall.lines.push_str(&String::from_utf8_lossy(line));
            fall.lines.push('\n');
        }
        self.0.retain(|begun| begun.pci != fall.pci);
        if self.0.len() >= REMEMBERED {
            self.0.remove(0);
        }
        self.0.push(fall);
        None
    }

    /// Removes the newest message that a line continues. A line that is complete by itself ends
    /// the newest message, since a line between may be lost.
    fn newest(&mut self, part: &Fallen<'_>) -> Option<Fall> {
        let advance = |fall: &Fall| gpu::advance(fall.words, part.words) > Some(fall.words);
        let index = self.0.iter().rposition(advance);
        let last = || self.0.len().checked_sub(1).filter(|_| part.fell);
        let index = index.or_else(last)?;
        Some(self.0.remove(index))
    }
}
