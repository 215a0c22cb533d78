//! What tells whether a file is the one that was read before.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;

/// The identity and the state of a file. Permissions count: a file that could not be read may be
/// readable now (the time of change, `st_ctime`, is that of the file's attributes too).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

// === impl FileStamp ===

impl FileStamp {
    /// Returns the stamp of a file that was looked at. Where it is found by name, links are to be
    /// followed: what Kubernetes mounts is changed by changing where one points.
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}
