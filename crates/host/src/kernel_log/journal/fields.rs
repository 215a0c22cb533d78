//! Converts the fields of a journal entry to a record of the kernel log.

use jiff::Timestamp;

use super::file::Head;
use crate::kernel_log::{Cursor, KernelLogRecord, Position, record::readable};

/// Fields that are read from an entry, in the order of [`Fields`].
pub(super) const WANTED: [&[u8]; 8] = [
    b"MESSAGE",
    b"PRIORITY",
    b"SYSLOG_FACILITY",
    b"SYSLOG_IDENTIFIER",
    b"SYSLOG_PID",
    b"_SOURCE_MONOTONIC_TIMESTAMP",
    b"_TRANSPORT",
    b"_UID",
];

/// Values of the [`WANTED`] fields.
#[derive(Debug, Default)]
pub(super) struct Fields {
    pub(super) values: [Option<Vec<u8>>; WANTED.len()],
    /// True if a field was truncated.
    pub(super) cut: bool,
}

impl Fields {
    /// Returns the record; `None` for an entry that is neither the kernel's nor the reset
    /// job's, or that cannot be trusted: any user may log under any identifier.
    pub(super) fn record(self, head: &Head, cursor: Cursor) -> Option<KernelLogRecord> {
        let [
            message,
            priority,
            facility,
            identifier,
            pid,
            source,
            transport,
            uid,
        ] = self.values;
        let kernel = transport.as_deref() == Some(b"kernel");
        if !kernel && uid.as_deref() != Some(b"0") {
            return None;
        }
        let number = |value: Option<Vec<u8>>| -> Option<u64> {
            std::str::from_utf8(&value?).ok()?.parse().ok()
        };
        let facility = number(facility).and_then(|number| u8::try_from(number).ok());
        let facility = kernel.then(|| facility.unwrap_or(0));
        let mut text = message.unwrap_or_default();
        if facility.is_some_and(|facility| facility != 0)
            && let Some(tag) =
                identifier.filter(|tag| !matches!(tag.as_slice(), b"unknown" | b"kernel"))
        {
            // journald splits `NVRM: text` of a program into tag and text; the kernel's own
            // lines stay whole.
            let pid = pid.map_or_else(Vec::new, |pid| [b"[", pid.as_slice(), b"]"].concat());
            text = [tag.as_slice(), &pid, b": ", &text].concat();
        }
        // journald reads a line some time after the kernel writes it.
        let boot_time_us = number(source).filter(|time| kernel && *time <= head.monotonic);
        let delay = head.monotonic - boot_time_us.unwrap_or(head.monotonic);
        let wall = i64::try_from(head.realtime.saturating_sub(delay))
            .ok()
            .and_then(|time| Timestamp::from_microsecond(time).ok());
        Some(KernelLogRecord {
            seq: None,
            boot_id: Some(head.boot_id),
            boot_time_us,
            wall,
            facility,
            level: number(priority).and_then(|level| u8::try_from(level).ok()),
            place: Some(Position::Journal(cursor)),
            line: None,
            text: readable(text.into()).into_owned(),
        })
    }
}
