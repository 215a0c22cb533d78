//! The message that a GPU has fallen off the bus, put together.
//!
//! Its longer form has three lines, of which the first names the GPU, the second its PCI id,
//! and the third says what happened. They may be three records, and the kernel may have put
//! records of others between them: XIDs, of this GPU too, and such messages of other GPUs.

use jiff::Timestamp;

use super::{Fallen, REMEMBERED, SAME_FALL};
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
    /// True once the second line has come, which no other message of the driver has.
    goes_on: bool,
}

// === impl Begun ===

impl Begun {
    /// Takes in a part of a message; returns the message where this is its end.
    ///
    /// A line that names no GPU goes on with the newest message that it can belong to. Where
    /// two are told at once, each has its end, whatever the order of their lines.
    pub(super) fn take_in(&mut self, part: Fallen<'_>, line: &[u8], at: Timestamp) -> Option<Fall> {
        let mut fall = match part.pci {
            Some(pci) => Fall {
                pci: normalise_pci(pci),
                pci_id: None,
                lines: String::new(),
                at,
                goes_on: false,
            },
            // Else the rest of a message whose beginning was not read: no GPU is named.
            None => self.newest(part.pci_id.is_some())?,
        };
        fall.goes_on |= part.pci.is_none();
        if let Some(pci_id) = part.pci_id {
            fall.pci_id = Some(pci_id.to_owned());
        }
        if part.fell {
            return Some(fall);
        }
        if fall.lines.len() + line.len() < MAX_EARLIER_BYTES {
            fall.lines.push_str(&String::from_utf8_lossy(line));
            fall.lines.push('\n');
        }
        // That a driver does not support a GPU begins in the same way, and never ends so.
        self.0.retain(|begun| {
            begun.pci != fall.pci && at.duration_since(begun.at).abs() <= SAME_FALL
        });
        if self.0.len() >= REMEMBERED {
            self.0.remove(0);
        }
        self.0.push(fall);
        None
    }

    /// Takes out the newest message whose second line, or whose end, may come now.
    fn newest(&mut self, is_second: bool) -> Option<Fall> {
        let index = if is_second {
            self.0.iter().rposition(|fall| !fall.goes_on)
        } else {
            let of_two = self.0.iter().rposition(|fall| fall.goes_on);
            of_two.or(self.0.len().checked_sub(1))
        };
        Some(self.0.remove(index?))
    }
}
