//! What the outbox asks of the disk: bytes that are there after a power cut.
//!
//! A write is in the page cache, which outlives a process that is killed and not a machine
//! without power. So a test that kills cannot see whether anything was synchronised; those of
//! the outbox replay what the disk may have kept (`power_cut.rs`). Therefore every write and
//! synchronisation of the outbox goes through here.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

#[cfg(test)]
pub(super) mod power_cut;

/// Writes at an offset. It may be on disk before it is synchronised, or not.
pub(super) fn write(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    file.write_all_at(bytes, at)?;
    #[cfg(test)]
    power_cut::wrote(file, bytes, at);
    Ok(())
}

/// Makes what was written into a file durable, and its length.
pub(super) fn sync(file: &File) -> io::Result<()> {
    file.sync_data()?;
    #[cfg(test)]
    power_cut::synced(file);
    Ok(())
}

/// Makes the entries of a directory durable: which files it has, under which names.
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
        // It refuses that for what has no disk behind it.
        let (_reader, writer) = io::pipe().unwrap();
        let pipe = File::from(OwnedFd::from(writer));
        sync(&pipe).unwrap_err();
        sync_directory(Path::new("/dev/null")).unwrap_err();
    }
}
