//! The dumps of requests to a GPU's system processor, for the next XID of that GPU.
//!
//! The driver prints a dump behind the first XID 119 or 120, and further such XIDs, or the
//! advice of an XID 154, after it. An XID is reported at once, so the dump goes with the
//! next of these. Where none follows, it stays in the log.

use jiff::{SignedDuration, Timestamp};

use super::super::{RpcLine, XidLine, rpc};
use super::REMEMBERED;
use contract::MAX_METADATA_BYTES;

/// The time after an XID in which a later one gets its dump.
const SAME_TROUBLE: SignedDuration = SignedDuration::from_mins(5);

/// The GPUs that had an XID with a dump, the newest last.
#[derive(Debug, Default)]
pub(super) struct Dumps {
    gpus: Vec<Gpu>,
    /// The address of the GPU whose part of a dump has begun.
    current: Option<String>,
}

#[derive(Debug)]
struct Gpu {
    pci: String,
    /// The driver's number of it, where the XID has it.
    number: Option<u32>,
    /// The lines that have come since, at most [`MAX_METADATA_BYTES`].
    lines: String,
    /// The time of the XID.
    at: Timestamp,
}

// === impl Dumps ===

impl Dumps {
    /// Returns the dump that an XID of the GPU at `pci` stands behind, if the XID is of those
    /// that have one or sum one up.
    pub(super) fn take(&mut self, xid: &XidLine<'_>, pci: &str, at: Timestamp) -> Option<String> {
        let dumps = matches!(xid.code, 119 | 120);
        if !dumps && xid.code != 154 {
            return None;
        }
        let known = self.gpus.iter().position(|gpu| gpu.pci == pci);
        let before = known.map(|index| self.gpus.remove(index));
        if dumps {
            if self.gpus.len() >= REMEMBERED {
                self.gpus.remove(0);
            }
            self.gpus.push(Gpu {
                pci: pci.to_owned(),
                number: rpc::gpu_of(xid.message).or(before.as_ref().and_then(|gpu| gpu.number)),
                lines: String::new(),
                at,
            });
        }
        before
            .filter(|gpu| at.duration_since(gpu.at).abs() <= SAME_TROUBLE)
            .map(|gpu| gpu.lines)
            .filter(|lines| !lines.is_empty())
    }

    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.gpus.len()
    }

    /// Takes in a line of a dump. One of a GPU that had no such XID is nobody's.
    pub(super) fn take_in(&mut self, line: RpcLine<'_>) {
        if let Some(number) = line.gpu {
            let mut gpus = self.gpus.iter().rev();
            // The newest of those of which the XID did not say the number, else.
            let of_number = gpus.clone().find(|gpu| gpu.number == Some(number));
            let gpu = of_number.or_else(|| gpus.find(|gpu| gpu.number.is_none()));
            self.current = gpu.map(|gpu| gpu.pci.clone());
        }
        let current = self.current.as_deref();
        let Some(gpu) = (self.gpus.iter_mut()).find(|gpu| Some(&*gpu.pci) == current) else {
            return;
        };
        let text = line.text.trim_end();
        if gpu.lines.len() + 1 + text.len() <= MAX_METADATA_BYTES {
            if !gpu.lines.is_empty() {
                gpu.lines.push('\n');
            }
            gpu.lines.push_str(text);
        }
    }
}
