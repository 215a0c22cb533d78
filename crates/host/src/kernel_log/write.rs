//! Writing a line into the kernel log, to try the whole path from the kernel on.

use std::{fs, io};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use super::KMSG;

/// Bytes that the kernel takes in one write (`PRINTKRB_RECORD_MAX`), priority and newline included.
const WRITE_MAX: usize = 1024;
/// Bytes that the kernel's `<3>` before a text and the newline behind it need.
const FRAME: usize = 4;

/// Longest text that [`write_kmsg`] takes, in bytes. Older kernels take up to 48 bytes less.
pub const KMSG_TEXT_MAX: usize = WRITE_MAX - FRAME;

/// A line cannot be written into the kernel log.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// There is no such severity.
    #[error("{0} is not a level: the kernel log has 0 (emergency) to 7 (debug)")]
    Level(u8),
    /// The text is beyond what the kernel takes.
    #[error(
        "the text has {length} bytes; the kernel log takes {WRITE_MAX} in one record, of which \
         {KMSG_TEXT_MAX} are left for the text"
    )]
    TooLong {
        /// Bytes of the text.
        length: usize,
    },
    /// The text would end early or make a second record.
    #[error("the text holds a newline or a NUL; the kernel log takes single lines")]
    NotOneLine,
    /// The device is closed to this process.
    #[error(
        "may not write the kernel log {KMSG}: this needs root, and in a container the device itself"
    )]
    Permission(#[source] io::Error),
    /// The administrator has switched the device off.
    #[error(
        "the kernel log device {KMSG} is switched off: set the sysctl kernel.printk_devkmsg=ratelimit, or remove \
         printk.devkmsg=off from the kernel's command line"
    )]
    Off,
    /// The kernel refuses a text that should fit; older kernels take less.
    #[error("the kernel refuses the text of {length} bytes as too long; make it shorter")]
    Refused {
        /// Bytes of the text.
        length: usize,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// Anything else that the system refuses.
    #[error("cannot write the kernel log {KMSG}")]
    Io(#[source] io::Error),
}

/// Writes one line into the kernel log, as severity `level`.
///
/// The kernel marks it as written by user space (facility 1), which cannot be avoided. The device
/// is opened anew for each line: by default (`kernel.printk_devkmsg=ratelimit`) the kernel silently
/// drops most of a burst that comes through one descriptor.
///
/// # Errors
///
/// [`WriteError`]; nothing was written.
pub fn write_kmsg(level: u8, text: &str) -> Result<(), WriteError> {
    let line = framed(level, text)?;
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(KMSG, flags, Mode::empty()).map_err(refusal)?;
    // The kernel takes a record whole or not at all.
    match rustix::io::retry_on_intr(|| rustix::io::write(&fd, line.as_bytes())) {
        Ok(_) => Ok(()),
        Err(Errno::INVAL) => Err(WriteError::Refused {
            length: text.len(),
            source: Errno::INVAL.into(),
        }),
        Err(errno) => Err(refusal(errno)),
    }
}

/// Returns the bytes to be written for `text`. The newline matters: without it the kernel keeps the
/// record back until the next one, to be continued.
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

/// Returns true if user space is shut out of the device altogether. An unreadable setting counts as
/// no.
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
