//! Writes a line to the kernel log, to test the whole path from the kernel on.

use std::{fs, io};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use super::KMSG;

/// Most bytes that the kernel accepts in one write (`PRINTKRB_RECORD_MAX`), with priority and
/// newline.
const WRITE_MAX: usize = 1024;
/// Length of the `<3>` before a text and the newline after it.
const FRAME: usize = 4;

/// Longest text that [`write_kmsg`] accepts, in bytes. Older kernels accept up to 48 bytes
/// less.
pub const KMSG_TEXT_MAX: usize = WRITE_MAX - FRAME;

/// Error when a line is written to the kernel log.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The severity is above 7.
    #[error("{0} is not a level: the kernel log has 0 (emergency) to 7 (debug)")]
    Level(u8),
    /// The text is longer than the kernel accepts.
    #[error(
        "the text has {length} bytes; the kernel log takes {WRITE_MAX} in one record, of which \
         {KMSG_TEXT_MAX} are left for the text"
    )]
    TooLong {
        /// Length of the text in bytes.
        length: usize,
    },
    /// The text contains a newline, which would make a second record, or a NUL, which would end
    /// it early.
    #[error("the text holds a newline or a NUL; the kernel log takes single lines")]
    NotOneLine,
    /// This process lacks permission to write to the device.
    #[error(
        "may not write the kernel log {KMSG}: this needs root, and in a container the device itself"
    )]
    Permission(#[source] io::Error),
    /// The administrator has disabled the device.
    #[error(
        "the kernel log device {KMSG} is switched off: set the sysctl kernel.printk_devkmsg=ratelimit, or remove \
         printk.devkmsg=off from the kernel's command line"
    )]
    Off,
    /// The kernel refuses a text below the limit; older kernels accept less.
    #[error("the kernel refuses the text of {length} bytes as too long; make it shorter")]
    Refused {
        /// Length of the text in bytes.
        length: usize,
        /// Error from the operating system.
        #[source]
        source: io::Error,
    },
    /// Any other error of the operating system.
    #[error("cannot write the kernel log {KMSG}")]
    Io(#[source] io::Error),
}

/// Writes one line to the kernel log, with severity `level`.
///
/// The kernel marks the line as written by user space (facility 1), which cannot be avoided.
/// The device is reopened for each line: by default (`kernel.printk_devkmsg=ratelimit`) the
/// kernel silently drops most of a burst that comes through one descriptor.
///
/// # Errors
///
/// [`WriteError`]; nothing was written.
pub fn write_kmsg(level: u8, text: &str) -> Result<(), WriteError> {
    let line = framed(level, text)?;
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(KMSG, flags, Mode::empty()).map_err(refusal)?;
    // The kernel accepts a record whole or not at all.
    match rustix::io::retry_on_intr(|| rustix::io::write(&fd, line.as_bytes())) {
        Ok(_) => Ok(()),
        Err(Errno::INVAL) => Err(WriteError::Refused {
            length: text.len(),
            source: Errno::INVAL.into(),
        }),
        Err(errno) => Err(refusal(errno)),
    }
}

/// Returns the bytes to write for `text`. Without the newline, the kernel would hold the record
/// back until the next one, as a line to be continued.
fn framed(level: u8, text: &str) -> Result<String, WriteError> {
    if level > 7 {
        return Err(WriteError::Level(level));
    }
    if text.contains(['\n', '\0']) {
        return Err(WriteError::NotOneLine);
    }
    if text.len() > KMSG_TEXT_MAX {
        return Err(WriteError::TooLong { length: text.len() });
    }
    Ok(format!("<{level}>{text}\n"))
}

fn refusal(errno: Errno) -> WriteError {
    match errno {
        Errno::PERM | Errno::ACCESS if devkmsg_is_off() => WriteError::Off,
        Errno::PERM | Errno::ACCESS => WriteError::Permission(errno.into()),
        _ => WriteError::Io(errno.into()),
    }
}

/// Returns true if the device is disabled for user space. An unreadable setting counts as
/// enabled.
pub(super) fn devkmsg_is_off() -> bool {
    fs::read_to_string("/proc/sys/kernel/printk_devkmsg")
        .is_ok_and(|setting| setting.trim() == "off")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_framed() {
        assert_eq!(framed(3, "text").unwrap(), "<3>text\n");
        assert_eq!(framed(0, "").unwrap(), "<0>\n");
        let longest = "x".repeat(KMSG_TEXT_MAX);
        assert_eq!(framed(7, &longest).unwrap().len(), WRITE_MAX);
    }

    #[test]
    fn what_the_kernel_would_refuse_or_change_is_refused() {
        assert!(matches!(framed(8, "x"), Err(WriteError::Level(8))));
        assert!(matches!(framed(3, "a\nb"), Err(WriteError::NotOneLine)));
        assert!(matches!(framed(3, "a\n"), Err(WriteError::NotOneLine)));
        assert!(matches!(framed(3, "a\0b"), Err(WriteError::NotOneLine)));
        let error = framed(3, &"x".repeat(KMSG_TEXT_MAX + 1)).unwrap_err();
        assert!(matches!(error, WriteError::TooLong { length } if length == KMSG_TEXT_MAX + 1));
        assert!(error.to_string().contains("1021 bytes"), "{error}");
        assert!(error.to_string().contains("1024"), "{error}");
    }

    #[test]
    fn refusals() {
        assert!(matches!(
            refusal(Errno::PERM),
            WriteError::Permission(_) | WriteError::Off
        ));
        assert!(matches!(refusal(Errno::NOENT), WriteError::Io(_)));
    }
}
