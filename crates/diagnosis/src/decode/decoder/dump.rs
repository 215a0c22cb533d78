//! Attaches dumps of requests to a GPU's system processor (GSP) to the next XID of that GPU.
//!
//! The driver prints a dump after the first XID 119 or 120, and further such XIDs, or the
//! advice of an XID 154, after the dump. An XID is reported at once, so the dump is attached to
//! the next of these. If none follows, the dump stays in the log only.

use jiff::{SignedDuration, Timestamp};

use super::super::{RpcLine, XidLine, rpc};
use super::REMEMBERED;
use contract::MAX_METADATA_BYTES;

/// Longest time between an XID and the later one that gets its dump.
const SAME_TROUBLE: SignedDuration = SignedDuration::from_mins(5);

/// GPUs that had an XID with a dump, the newest last.
#[derive(Debug, Default)]
pub(super) struct Dumps {
    gpus: Vec<Gpu>,
    /// PCI address of the GPU whose part of a dump has begun.
    current: Option<String>,
}

#[derive(Debug)]
struct Gpu {
    pci: String,
    /// Driver's number of the GPU, if the XID has it.
    number: Option<u32>,
    /// Lines of the dump so far, at most [`MAX_METADATA_BYTES`].
    lines: String,
    /// Time of the XID.
    at: Timestamp,
}

// === impl Dumps ===

impl Dumps {
    /// Returns the dump before this XID of the GPU at `pci`, if the XID is one that has a dump
    /// (119, 120) or sums one up (154).
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

    /// Records a line of a dump. Lines of a GPU without such an XID are dropped.
    pub(super) fn add(&mut self, line: RpcLine<'_>) {
        if let Some(number) = line.gpu {
            let mut gpus = self.gpus.iter().rev();
            // Otherwise the newest GPU whose XID lacks the driver's number.
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
