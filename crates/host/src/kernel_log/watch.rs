//! inotify: a hint that files have changed. What has changed is read from the file system, so a
//! notification that is lost or merged does no harm where somebody looks from time to time.

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

/// An inotify instance.
#[derive(Debug)]
pub(super) struct Watch {
    fd: AsyncFd<OwnedFd>,
}

impl Watch {
    /// Watches `changes` of `directory`.
    pub(super) fn new(directory: &Path, changes: WatchFlags) -> io::Result<Self> {
        let watch = Self::empty()?;
        inotify::add_watch(watch.fd.get_ref(), directory, changes)?;
        Ok(watch)
    }

    /// Watches nothing yet.
    pub(super) fn empty() -> io::Result<Self> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        Ok(Self {
            fd: readiness::readable(fd)?,
        })
    }

    /// Watches an open file, whatever its name is by now.
    pub(super) fn add_file(&self, file: &File) -> Option<i32> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        self.add(Path::new(&path), WatchFlags::MODIFY)
    }

    /// Watches what `path` leads to; without success the look each second has to do.
    pub(super) fn add(&self, path: &Path, changes: WatchFlags) -> Option<i32> {
        inotify::add_watch(self.fd.get_ref(), path, changes)
            .inspect_err(|errno| {
                tracing::debug!(
                    path = %path.display(), error = %io::Error::from(*errno),
                    "no notifications for file"
                );
            })
            .ok()
    }

    /// Removes a watch. The file may be gone, and its watch with it.
    pub(super) fn remove(&self, descriptor: i32) {
        let _ = inotify::remove_watch(self.fd.get_ref(), descriptor);
    }

    pub(super) async fn changed(&self) -> io::Result<()> {
        loop {
            let mut guard = self.fd.readable().await?;
            let mut told = false;
            // What is told does not matter, only that something is.
            let mut notifications = [0_u8; 4096];
            loop {
                match rustix::io::read(self.fd.get_ref(), &mut notifications) {
                    Ok(_) => told = true,
                    Err(Errno::AGAIN) => break,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            guard.clear_ready();
            if told {
                return Ok(());
            }
        }
    }
}
