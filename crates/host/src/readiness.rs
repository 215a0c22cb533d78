//! Descriptors that tell the runtime when there is something to read.

use std::{io, os::fd::OwnedFd};

use tokio::io::{Interest, unix::AsyncFd};

/// Has the runtime's reactor watch `fd` for input.
///
/// # Errors
///
/// `PermissionDenied` for what epoll does not watch, because a read never waits there: regular
/// files and some devices.
///
/// # Panics
///
/// Outside a tokio runtime with I/O enabled.
#[allow(
    deprecated,
    reason = "replaced by an unsafe function, for types whose descriptor may change or close; an OwnedFd does neither"
)]
pub(crate) fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}
