//! Lock of a data directory, which makes one process its owner.
//!
//! Used by the embedded event store, by the connector's outbox, and by a controller that stands by.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::process::{Gid, Pid, getegid, geteuid, getgroups, test_kill_process};

const NAME: &str = "lock";
/// Flag that refuses symbolic links: a link could make this process write to another user's
/// file.
pub(crate) const NO_LINK: i32 = OFlags::NOFOLLOW.bits().cast_signed();

/// Longest time that a child of a killed owner is expected to hold the lock: the child was
/// forked and has not called `exec` yet. A very busy machine takes this long.
const FORKED: Duration = Duration::from_secs(2);
/// Interval between attempts to take the lock meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Ownership of a directory. Ends when the value is dropped or the process dies; the file
/// stays, with the process id of its last owner.
#[derive(Debug)]
pub struct DirectoryLock {
    file: File,
}

/// Reason why a directory cannot be locked. Its contents are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Another process owns the directory, or this process already does.
    #[error(
        "data directory {} is in use by {}: stop it, or use another directory",
        dir.display(),
        owner.map_or("another process".to_owned(), |pid| format!("process {pid}"))
    )]
    InUse {
        /// Path of the directory.
        dir: PathBuf,
        /// Id of the process that owns the directory, as read from the lock file.
        owner: Option<u32>,
    },
    /// The directory cannot be created.
    #[error("data directory {} cannot be created", path.display())]
    Create {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// Other users can create files in the directory.
    #[error(
        "data directory {} is not safe: {who} can put files into it that gpuwarden would take for \
         its own; use a directory of your own, or one below it that does not exist yet",
        dir.display()
    )]
    Untrusted {
        /// Path of the directory.
        dir: PathBuf,
        /// Users with write access, in words.
        who: String,
    },
    /// The lock file cannot be opened, created, read or written.
    #[error("{} cannot be opened for reading and writing", path.display())]
    LockFile {
        /// Path of the lock file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

// === impl DirectoryLock ===

impl DirectoryLock {
    /// Takes ownership of `dir`, which is created if missing.
    pub fn acquire(dir: &Path) -> Result<Self, DirectoryError> {
        make(dir).map_err(|source| DirectoryError::Create {
            path: dir.into(),
            source,
        })?;
        trusted(dir)?;
        let path = dir.join(NAME);
        let failed = |source: io::Error| DirectoryError::LockFile {
            path: path.clone(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(NO_LINK)
            .open(&path)
            .map_err(failed)?;
        let until = Instant::now() + FORKED;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) => {
                    let owner = owner(&file);
                    if owner.is_some_and(has_ended) && Instant::now() < until {
                        sleep(LOOK_EVERY);
                        continue;
                    }
                    let dir = dir.into();
                    return Err(DirectoryError::InUse { dir, owner });
                }
                Err(errno) => return Err(failed(errno.into())),
            }
        }
        file.set_len(0).map_err(failed)?;
        writeln!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { file })
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Closing is not enough: a forked child that has not called `exec` yet shares the lock.
        // If unlocking fails, closing has to do.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Creates `dir` and its missing ancestors, durably.
fn make(dir: &Path) -> io::Result<()> {
    let missing: Vec<&Path> = dir.ancestors().take_while(|path| !exists(path)).collect();
    if missing.is_empty() && !dir.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    for path in missing.into_iter().rev() {
        // Only for this user: events name nodes and workloads.
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => sync_entry(path)?,
        }
    }
    Ok(())
}

/// Returns true if `path` exists. The empty end of a relative path is the working directory.
fn exists(path: &Path) -> bool {
    path.as_os_str().is_empty() || path.exists()
}

/// Refuses a directory that other users can create files in, since those would be taken for
/// files of this process. Root may, and so may a group of this process, since Kubernetes gives
/// a volume to a pod that way.
fn trusted(dir: &Path) -> Result<(), DirectoryError> {
    let failed = |source: io::Error| DirectoryError::Create {
        path: dir.into(),
        source,
    };
    let metadata = dir.metadata().map_err(failed)?;
    let (owner, group, mode) = (metadata.uid(), metadata.gid(), metadata.mode());
    let in_group = || -> io::Result<bool> {
        let own = getgroups()?.into_iter().chain([getegid()]);
        Ok(own.map(Gid::as_raw).any(|own| own == group))
    };
    let who = if owner != 0 && owner != geteuid().as_raw() {
        format!("user {owner}, its owner")
    } else if mode & 0o002 != 0 {
        "everybody".to_owned()
    } else if mode & 0o020 != 0 && !in_group().map_err(failed)? {
        format!("group {group}")
    } else {
        return Ok(());
    };
    Err(DirectoryError::Untrusted {
        dir: dir.into(),
        who,
    })
}

/// Makes the directory entry of `path` durable.
pub(crate) fn sync_entry(path: &Path) -> io::Result<()> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Returns the process id in the lock file; `None` just before it is written.
fn owner(file: &File) -> Option<u32> {
    let mut text = [0; 32];
    let length = file.read_at(&mut text, 0).ok()?;
    str::from_utf8(text.get(..length)?)
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// Returns true if no process has this id.
fn has_ended(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use tempfile::TempDir;

    use super::*;

    #[test]
    fn a_directory_into_which_others_write_is_refused() {
        let dir = TempDir::new().unwrap();
        let root = geteuid().is_root();
        let own = geteuid().as_raw();
        let table = [
            (0o700, None, None, ""),
            (0o755, None, None, ""),
            (0o770, None, None, ""),
            (0o777, None, None, "everybody"),
            (0o1777, None, None, "everybody"),
            (0o700, Some(own + 4_000), None, "its owner"),
            (0o2770, None, Some(40_000), "group 40000"),
            (0o750, None, Some(40_000), ""),
        ];
        for (mode, owner, group, refused) in table {
            if (owner.is_some() || group.is_some()) && !root {
                continue;
            }
            let path = dir.path().join(format!("{mode:o}-{owner:?}-{group:?}"));
            fs::create_dir(&path).unwrap();
            if root {
                chown(&path, owner, group).unwrap();
            }
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            match DirectoryLock::acquire(&path) {
                Ok(_) => assert_eq!(refused, "", "{mode:o}"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!refused.is_empty() && text.contains(refused), "{text}");
                    assert!(
                        fs::read_dir(&path).unwrap().next().is_none(),
                        "left as it is"
                    );
                }
            }
        }
    }

    #[test]
    fn a_file_of_ours_is_no_link_to_anothers() {
        for name in [NAME, "events.db"] {
            let dir = TempDir::new().unwrap();
            let target = dir.path().join("somebody's");
            fs::write(&target, "").unwrap();
            let data = dir.path().join("data");
            fs::create_dir(&data).unwrap();
            symlink(&target, data.join(name)).unwrap();
            let error = crate::sqlite::SqliteStore::open(&data).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
            assert_eq!(fs::read_to_string(&target).unwrap(), "");
        }
    }

    #[test]
    fn a_directory_is_made_with_all_above_it() {
        let dir = TempDir::new().unwrap();
        let data = dir.path().join("a/b/c");
        DirectoryLock::acquire(&data).unwrap();
        for path in data.ancestors().take(3) {
            assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        }
    }

    #[test]
    fn who_comes_after_a_kill_waits_for_a_child_that_has_the_lock_still() {
        let dir = TempDir::new().unwrap();
        let lock = DirectoryLock::acquire(dir.path()).unwrap();
        let copy = lock.file.try_clone().unwrap();
        // State after a kill: the lock file holds an id that no process has.
        let mut killed = std::process::Command::new("true").spawn().unwrap();
        killed.wait().unwrap();
        fs::write(dir.path().join(NAME), format!("{}\n", killed.id())).unwrap();
        std::mem::forget(lock);
        let child = std::thread::spawn(move || {
            sleep(LOOK_EVERY * 5);
            flock(&copy, FlockOperation::Unlock).unwrap();
        });
        let _lock = DirectoryLock::acquire(dir.path()).unwrap();
        let text = fs::read_to_string(dir.path().join(NAME)).unwrap();
        assert_eq!(text.trim(), std::process::id().to_string());
        child.join().unwrap();
    }

    #[test]
    fn ownership_ends_although_a_copy_of_the_descriptor_is_open() {
        let dir = TempDir::new().unwrap();
        let lock = DirectoryLock::acquire(dir.path()).unwrap();
        let copy = lock.file.try_clone().unwrap();
        assert!(matches!(
            DirectoryLock::acquire(dir.path()),
            Err(DirectoryError::InUse { .. })
        ));
        drop(lock);
        DirectoryLock::acquire(dir.path()).unwrap();
        drop(copy);
    }
}
