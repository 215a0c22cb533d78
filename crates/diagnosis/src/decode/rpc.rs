//! Lines of the dump that the driver prints when a GPU's system processor (GSP) does not
//! respond: the recent requests (RPC). The dump follows an XID 119 or 120.
//!
//! ```text
//! NVRM: GPU0 GSP RPC buffer contains function 76 (GSP_RM_CONTROL) and data 0x2080a097 0x490.
//! NVRM: GPU0 RPC history (CPU -> GSP):
//! NVRM:     entry function          data0      data1 ts_start ts_end duration actively_polling
//! NVRM:      0    76   GSP_RM_CONTROL 0x2080a097 0x490 0x609ffebd7f5bd 0x0                 y
//! NVRM: GPU0 RPC event history (CPU <- GSP):
//! ```

use super::{leading_number, text};

/// A line of such a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RpcLine<'a> {
    /// Driver's number of the GPU in the first line of a part, 0 for `GPU0`.
    pub gpu: Option<u32>,
    /// Line without `NVRM: `.
    pub text: &'a str,
}

/// Parses the first line of a part of a dump, which follows `NVRM: `.
pub(super) fn begins(rest: &[u8]) -> Option<RpcLine<'_>> {
    let text = text(rest);
    let (gpu, after) = leading_number(text.strip_prefix("GPU")?)?;
    let what = [
        " GSP RPC buffer contains ",
        " RPC history (",
        " RPC event history (",
    ];
    let gpu = Some(gpu);
    (what.iter().any(|what| after.starts_with(what))).then_some(RpcLine { gpu, text })
}

/// Parses a row of a part, or the column names, which follow `NVRM: `.
pub(super) fn row(rest: &[u8]) -> Option<RpcLine<'_>> {
    let text = text(rest);
    let mut words = text.strip_prefix("    ")?.split_ascii_whitespace();
    let (first, second) = (words.next()?, words.next()?);
    let is_row = first.parse::<i32>().is_ok() && second.parse::<u32>().is_ok();
    (is_row || (first, second) == ("entry", "function")).then_some(RpcLine { gpu: None, text })
}

/// Returns the driver's number of the GPU in the message of an XID 119:
/// `... from GPU0 GSP! ...`.
pub(super) fn gpu_of(message: &str) -> Option<u32> {
    let (_, rest) = message.split_once(" GPU")?;
    let (gpu, rest) = leading_number(rest)?;
    rest.starts_with(" GSP").then_some(gpu)
}
