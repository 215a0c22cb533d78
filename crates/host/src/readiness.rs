//! Descriptors that notify the runtime when they become readable.

use std::{io, os::fd::OwnedFd};

use tokio::io::{Interest, unix::AsyncFd};

/// Registers `fd` with the runtime's reactor for input.
///
/// # Errors
///
/// `PermissionDenied` for a file that epoll does not support because reads never block: regular
/// files and some devices.
///
/// # Panics
///
/// Panics outside a tokio runtime with I/O enabled.
#[allow(
    deprecated,
    reason = "replaced by an unsafe function, for types whose descriptor may change or close; an OwnedFd does neither"
)]
pub(crate) fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}
