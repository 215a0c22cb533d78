//! Reading of small text files that people name: configuration and policies.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Reads a file of at most `limit` bytes of UTF-8. Reads no further than that from a longer
/// one: a file named by mistake may be a disk or endless.
pub fn read(path: &Path, limit: usize) -> io::Result<String> {
    let mut text = String::new();
    let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    File::open(path)?.take(most).read_to_string(&mut text)?;
    if text.len() > limit {
        let what = format!("it has more than {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, what));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_longer_or_has_no_end_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), "12345");
        let error = read(&path, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        let error = read(Path::new("/dev/zero"), 1024).unwrap_err();
        assert_eq!(error.to_string(), "it has more than 1024 bytes");
    }
}
