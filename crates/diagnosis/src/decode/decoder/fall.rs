//! The message that a GPU has fallen off the bus, put together.
//!
//! Its longer form has three lines, of which the first names the GPU, the second its PCI id,
//! and the third says what happened; who copies a log may break them elsewhere. They may be three
//! records, and the kernel may have put records of others between them: XIDs, of this GPU too, and
//! such messages of other GPUs.

use jiff::Timestamp;

use super::super::{Fallen, gpu};
use super::{REMEMBERED, SAME_FALL};
use crate::subject::normalise_pci;

/// Longest earlier lines that are kept with a finding (bytes). The driver's have 80.
pub(super) const MAX_EARLIER_BYTES: usize = 1024;

/// The messages that have begun, in their order.
#[derive(Debug, Default)]
pub(super) struct Begun(Vec<Fall>);

/// A message of a fall, as far as its lines have come.
#[derive(Debug)]
pub(super) struct Fall {
    pub(super) pci: String,
    pub(super) pci_id: Option<String>,
    /// The lines before the last, each with its end.
    pub(super) lines: String,
    at: Timestamp,
    /// The words of the sentence that have come.
    said: usize,
}

// === impl Begun ===

impl Begun {
    /// Takes in a part of a message; returns the message where this is its end.
    ///
    /// A line that names no GPU goes on with the newest message whose next words it has. Where two are
    /// told at once, each has its end, whatever the order of their lines.
    pub(super) fn take_in(&mut self, part: Fallen<'_>, line: &[u8], at: Timestamp) -> Option<Fall> {
        // What began long ago has lost its end, and another one's is not its own.
        self.0
            .retain(|begun| at.duration_since(begun.at).abs() <= SAME_FALL);
        let mut fall = match part.pci {
            Some(pci) => Fall {
                pci: normalise_pci(pci),
                pci_id: None,
                lines: String::new(),
                at,
                said: 0,
            },
            // Else the rest of a message whose beginning was not read: no GPU is named.
            None => self.newest(&part)?,
        };
        if let Some(pci_id) = part.pci_id {
            fall.pci_id = Some(pci_id.to_owned());
        }
        fall.said = gpu::goes_on(fall.said, part.words).unwrap_or(fall.said);
        if part.fell || gpu::is_said(fall.said) {
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

    /// Takes out the newest message that the words of a line go on with. One that says all by itself
    /// ends the newest message, for a line between may be lost.
    fn newest(&mut self, part: &Fallen<'_>) -> Option<Fall> {
        let goes_on = |fall: &Fall| gpu::goes_on(fall.said, part.words) > Some(fall.said);
        let index = self.0.iter().rposition(goes_on);
        let last = || self.0.len().checked_sub(1).filter(|_| part.fell);
        let index = index.or_else(last)?;
        Some(self.0.remove(index))
    }
}
