//! inotify as a hint that files have changed. The change is read from the file system, so a
//! lost or merged notification does no harm to a reader that also checks periodically.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::inotify::{self, CreateFlags, WatchFlags},
    io::Errno,
};
use tokio::io::unix::AsyncFd;

use crate::readiness;

/// An inotify instance, registered with the runtime.
#[derive(Debug)]
pub(super) struct InotifyWatch {
    fd: AsyncFd<OwnedFd>,
}

impl InotifyWatch {
    /// Watches `changes` of `directory`.
    pub(super) fn new(directory: &Path, changes: WatchFlags) -> io::Result<Self> {
        let watch = Self::empty()?;
        inotify::add_watch(watch.fd.get_ref(), directory, changes)?;
        Ok(watch)
    }

    /// Creates an instance without watches.
    pub(super) fn empty() -> io::Result<Self> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        Ok(Self {
            fd: readiness::readable(fd)?,
        })
    }

    /// Watches an open file, whatever name it has by now.
    pub(super) fn add_file(&self, file: &File) -> Option<i32> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        self.add(Path::new(&path), WatchFlags::MODIFY)
    }

    /// Watches `path`. On failure, the reader depends on its periodic check.
    pub(super) fn add(&self, path: &Path, changes: WatchFlags) -> Option<i32> {
        inotify::add_watch(self.fd.get_ref(), path, changes)
            .inspect_err(|errno| {
                tracing::debug!(
                    path = %path.display(), error = %io::Error::from(*errno),
                    "cannot watch the file for changes; relying on the periodic check"
                );
            })
            .ok()
    }

    /// Removes a watch. Fails harmlessly if the file and its watch are gone.
    pub(super) fn remove(&self, descriptor: i32) {
        let _ = inotify::remove_watch(self.fd.get_ref(), descriptor);
    }

    pub(super) async fn changed(&self) -> io::Result<()> {
        loop {
            let mut guard = self.fd.readable().await?;
            let mut notified = false;
            // Only the arrival of notifications matters, not their content.
            let mut notifications = [0_u8; 4096];
            loop {
                match rustix::io::read(self.fd.get_ref(), &mut notifications) {
                    Ok(_) => notified = true,
                    Err(Errno::AGAIN) => break,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            guard.clear_ready();
            if notified {
                return Ok(());
            }
        }
    }
}
