//! XID and `SXid` lines of a log that cannot be read. They tell of no fault, and must not
//! vanish: `decode` and `replay` say at their end how many there were, on standard error.

use diagnosis::decode::KernelLogDecoder;

use crate::output;

/// `GarbledLines` counts such lines of one log.
#[derive(Default)]
pub(super) struct GarbledLines {
    count: u64,
    /// File, number and beginning of the first.
    first: Option<String>,
}

// === impl GarbledLines ===

impl GarbledLines {
    /// Takes in the garbled lines of the decoder after a line of a file, counted from 1.
    pub(super) fn take(&mut self, decoder: &mut KernelLogDecoder, file: &str, line: u64) {
        let Some(garbled) = decoder.take_garbled() else {
            return;
        };
        self.count = self.count.saturating_add(garbled.lines);
        self.first
            .get_or_insert_with(|| format!("{file}:{line}: {}", garbled.quoted));
    }

    /// Warns of the garbled lines of all logs, if there were any, and quotes the first.
    pub(super) fn tell<'a>(logs: impl IntoIterator<Item = &'a Self>) {
        let (mut lines, mut first) = (0_u64, None);
        for log in logs {
            lines = lines.saturating_add(log.count);
            first = first.or(log.first.as_deref());
        }
        let Some(first) = first else {
            return;
        };
        output::warning(&match lines {
            1 => format!("an XID or SXid line cannot be read, and tells of no fault: {first}"),
            lines => format!(
                "{lines} XID or SXid lines cannot be read, and tell of no fault; the first is {first}"
            ),
        });
    }
}
