//! Free space of file systems.

use std::io;
use std::path::Path;

/// Returns how many bytes this process may still write to the file system of `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_has_a_size_and_a_missing_one_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let free = free_bytes(dir.path()).unwrap();
        assert!(free < u64::MAX / 2);
        assert!(free_bytes(&dir.path().join("none")).is_err());
    }
}
