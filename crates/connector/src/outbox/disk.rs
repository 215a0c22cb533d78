//! Writes and syncs of the outbox, so that bytes survive a power cut.
//!
//! A write reaches the page cache, which survives a killed process but not a machine without
//! power. A test that kills the process therefore cannot detect a missing sync; the tests of
//! the outbox replay what the disk may have kept (`power_cut.rs`). For that, every write and
//! sync of the outbox goes through this module.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

#[cfg(test)]
pub(super) mod power_cut;

/// Writes at an offset. Before a sync, the bytes may or may not be on disk.
pub(super) fn write(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    file.write_all_at(bytes, at)?;
    #[cfg(test)]
    power_cut::wrote(file, bytes, at);
    Ok(())
}

/// Makes the contents of a file durable, and its length.
pub(super) fn sync(file: &File) -> io::Result<()> {
    file.sync_data()?;
    #[cfg(test)]
    power_cut::synced(file);
    Ok(())
}

/// Makes the entries of a directory durable: the files and their names.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()?;
    #[cfg(test)]
    power_cut::synced_directory(directory);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn the_kernel_is_asked_to_synchronise() {
        // The kernel refuses to sync a file without a disk.
        let (_reader, writer) = io::pipe().unwrap();
        let pipe = File::from(OwnedFd::from(writer));
        sync(&pipe).unwrap_err();
        sync_directory(Path::new("/dev/null")).unwrap_err();
    }
}
