//! Detection of changes to a file.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;

/// Identity and state of a file. Permissions count, since a file that could not be read may be
/// readable now (`st_ctime` is also the time of a change of attributes).
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
    /// Returns the stamp for a file's metadata. For a path, the metadata should be read through
    /// symbolic links: Kubernetes updates a mounted file by changing the target of a link.
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
