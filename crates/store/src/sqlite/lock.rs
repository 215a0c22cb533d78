//! Who owns a data directory: one process, for as long as it works with it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::OpenError;

const NAME: &str = "lock";

/// Ownership of a directory. It ends when this is dropped or the process dies; the
/// file stays, with the process id of its last owner.
#[derive(Debug)]
pub struct DirectoryLock {
    file: File,
}

// === impl DirectoryLock ===

impl DirectoryLock {
    /// Takes hold of `dir`, which is made where it is missing.
    pub fn acquire(dir: &Path) -> Result<Self, OpenError> {
        if !dir.is_dir() {
            // Events name nodes and workloads: nobody else's business on a shared machine.
            let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.map_err(|source| OpenError::Directory {
                path: dir.into(),
                source,
            })?;
            sync_entry(dir).map_err(|source| OpenError::Directory {
                path: dir.into(),
                source,
            })?;
        }
        let path = dir.join(NAME);
        let failed = |source: io::Error| OpenError::File {
            path: path.clone(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(OpenError::InUse {
                    dir: dir.into(),
                    owner: owner(&mut file),
                });
            }
            Err(errno) => return Err(failed(errno.into())),
        }
        file.set_len(0).map_err(failed)?;
        writeln!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { file })
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Closing is not enough: a child process that was forked and has not yet replaced
        // itself holds the same lock. An error leaves it to the closing.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Makes the directory entry of `path` durable.
pub(super) fn sync_entry(path: &Path) -> io::Result<()> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// The process id in the lock file; `None` in the moment before it is written.
fn owner(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn ownership_ends_although_a_copy_of_the_descriptor_is_open() {
        let dir = TempDir::new().unwrap();
        let lock = DirectoryLock::acquire(dir.path()).unwrap();
        let copy = lock.file.try_clone().unwrap();
        assert!(matches!(
            DirectoryLock::acquire(dir.path()),
            Err(OpenError::InUse { .. })
        ));
        drop(lock);
        DirectoryLock::acquire(dir.path()).unwrap();
        drop(copy);
    }
}
