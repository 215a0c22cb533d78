//! The file system of a directory: events on a file system in memory are not durable.

use std::fmt;
use std::path::{Path, PathBuf};

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileSystem {
    /// Kind, for example `ext4`.
    kind: String,
    /// The device that is mounted, for example `/dev/nvme0n1p2`.
    source: String,
    mount_point: PathBuf,
}

// === impl FileSystem ===

impl FileSystem {
    /// Returns the file system that `path`, an absolute path, lies on.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        Self::find(&std::fs::read_to_string("/proc/self/mountinfo").ok()?, path)
    }

    /// Finds the file system of `path` in the text of `/proc/PID/mountinfo` (proc(5)). A later
    /// mount hides an earlier one at the same place.
    fn find(mounts: &str, path: &Path) -> Option<Self> {
        let mounts = mounts.lines().filter_map(Self::parse);
        mounts
            .filter(|one| path.starts_with(&one.mount_point))
            .max_by_key(|one| one.mount_point.components().count())
    }

    fn parse(line: &str) -> Option<Self> {
        let (mount, what) = line.split_once(" - ")?;
        let mut what = what.split(' ');
        Some(Self {
            mount_point: unescaped(mount.split(' ').nth(4)?).into(),
            kind: what.next()?.to_owned(),
            source: unescaped(what.next()?),
        })
    }

    /// Returns true if the file system is in memory only, so that a reboot loses all files.
    pub(crate) fn is_memory(&self) -> bool {
        matches!(self.kind.as_str(), "tmpfs" | "ramfs")
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            source,
            mount_point,
        } = self;
        write!(f, "{kind} ({source} on {})", mount_point.display())
    }
}

/// Decodes the octal escapes of the kernel, such as `\040` for a space.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:20 / /proc rw,nosuid - proc proc rw
24 22 0:22 / /tmp rw,nosuid master:2 shared:3 - tmpfs tmpfs rw,size=65536k
25 22 8:17 / /mnt/my\\040disk rw - xfs /dev/sdb1 rw
26 24 254:0 /x /tmp/real rw - ext4 /dev/vda rw
";

    #[test]
    fn the_nearest_mount_counts() {
        for (path, kind, memory) in [
            ("/home/me", "ext4", false),
            ("/tmp/a/b", "tmpfs", true),
            ("/tmpfile", "ext4", false),
            ("/tmp/real/a", "ext4", false),
            ("/mnt/my disk/a", "xfs", false),
        ] {
            let found = FileSystem::find(MOUNTS, Path::new(path)).unwrap();
            assert_eq!(
                (found.kind.as_str(), found.is_memory()),
                (kind, memory),
                "{path}"
            );
        }
        assert_eq!(FileSystem::find("garbage\n", Path::new("/")), None);
    }

    #[test]
    fn it_is_told_in_a_few_words() {
        let found = FileSystem::find(MOUNTS, Path::new("/mnt/my disk")).unwrap();
        assert_eq!(found.to_string(), "xfs (/dev/sdb1 on /mnt/my disk)");
    }
}
