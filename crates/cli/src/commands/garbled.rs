//! XID and `SXid` lines that cannot be parsed. They report no fault, so `decode` and `replay` warn at
//! the end how many there were.

use diagnosis::decode::KernelLogDecoder;

use crate::output;

/// Garbled lines of one log.
#[derive(Default)]
pub(super) struct GarbledLines {
    lines: u64,
    /// File, line number and beginning of the first garbled line.
    first: Option<String>,
}

// === impl GarbledLines ===

impl GarbledLines {
    /// Counts the garbled lines of the decoder after line `line` of a file, counted from 1.
    pub(super) fn count(&mut self, decoder: &mut KernelLogDecoder, file: &str, line: u64) {
        let Some(garbled) = decoder.take_garbled() else {
            return;
        };
        self.lines = self.lines.saturating_add(garbled.lines);
        self.first
            .get_or_insert_with(|| format!("{file}:{line}: {}", garbled.quoted));
    }

    /// Warns of the garbled lines of all logs, if there are any, and quotes the first.
    pub(super) fn warn<'a>(logs: impl IntoIterator<Item = &'a Self>) {
        let (mut lines, mut first) = (0_u64, None);
        for log in logs {
            lines = lines.saturating_add(log.lines);
            first = first.or(log.first.as_deref());
        }
        let Some(first) = first else {
            return;
        };
        output::warning(&match lines {
            1 => format!("an XID or SXid line cannot be parsed, and reports no fault: {first}"),
            lines => format!(
                "{lines} XID or SXid lines cannot be parsed, and report no fault; the first is {first}"
            ),
        });
    }
}
