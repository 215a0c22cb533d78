//! Finds rotated files of a followed log, and which of them comes next.
//!
//! Recognises logrotate's two naming schemes: `kern.log.1`, older with a larger number, and
//! `kern.log-20260131`, by date. Only the first shows that a file is missing.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::file_id::{FileId, directory_of};

/// Smallest number that counts as a date.
const DATES: u32 = 1000;

/// File to read after another one.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NextFile {
    /// Path of a rotated file; `None` means the file that has the name now.
    pub(super) rotated: Option<(PathBuf, FileId)>,
    /// True if a file between the two is missing.
    pub(super) lost: bool,
}

/// A rotated file in the directory.
struct Rotated {
    turn: RotationName,
    path: PathBuf,
    id: FileId,
}

/// Suffix of a rotated file, which gives the order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RotationName {
    /// Number of rotations since the file was current.
    Ago(u32),
    /// Date, as text that sorts by time.
    Date(String),
}

/// Returns the file that follows `file`, which once was at `path`. Reads the directory.
pub(super) fn next(path: &Path, file: FileId) -> io::Result<NextFile> {
    let all = list(path)?;
    let Some(own) = all.iter().find(|it| it.id == file) else {
        return Ok(NextFile::default());
    };
    let (next, lost) = match &own.turn {
        RotationName::Ago(own) => {
            let younger = all.iter().filter_map(|it| match it.turn {
                RotationName::Ago(ago) if ago < *own => Some((ago, it)),
                _ => None,
            });
            let next = younger.max_by_key(|(ago, _)| *ago);
            // Some configurations count from 0.
            let expected = own.saturating_sub(1);
            let lost = expected > next.map_or(0, |(ago, _)| ago);
            (next.map(|(_, it)| it), lost)
        }
        RotationName::Date(own) => {
            let younger = all.iter().filter_map(|it| match &it.turn {
                RotationName::Date(date) if date > own => Some((date, it)),
                _ => None,
            });
            (
                younger.min_by_key(|(date, _)| *date).map(|(_, it)| it),
                false,
            )
        }
    };
    Ok(NextFile {
        rotated: next.map(|next| (next.path.clone(), next.id)),
        lost,
    })
}

fn list(path: &Path) -> io::Result<Vec<Rotated>> {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    let mut found = Vec::new();
    for entry in fs::read_dir(directory_of(path))? {
        let entry = entry?;
        let other = entry.file_name();
        let Some(turn) = rotation_of(name, other.as_encoded_bytes()) else {
            continue;
        };
        // A file that vanishes meanwhile counts as missing.
        if let Ok(metadata) = entry.metadata()
            && metadata.is_file()
        {
            let (path, id) = (entry.path(), FileId::of(&metadata));
            found.push(Rotated { turn, path, id });
        }
    }
    Ok(found)
}

/// Returns the suffix if `other` is a rotated file of `name`. Compressed files have none, since
/// they cannot be read here.
fn rotation_of(name: &[u8], other: &[u8]) -> Option<RotationName> {
    let (mark, rest) = other.strip_prefix(name)?.split_first()?;
    let text = std::str::from_utf8(rest).ok()?;
    let digits = |byte: u8| byte.is_ascii_digit() || byte == b'-';
    if !matches!(mark, b'.' | b'-') || text.is_empty() || !text.bytes().all(digits) {
        return None;
    }
    match text.parse() {
        Ok(ago) if ago < DATES && *mark == b'.' => Some(RotationName::Ago(ago)),
        _ => Some(RotationName::Date(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_rotation() {
        let cases = [
            ("kern.log.1", Some(RotationName::Ago(1))),
            ("kern.log.0", Some(RotationName::Ago(0))),
            (
                "kern.log-20260131",
                Some(RotationName::Date("20260131".to_owned())),
            ),
            (
                "kern.log.20260131",
                Some(RotationName::Date("20260131".to_owned())),
            ),
            (
                "kern.log-2026-01-31",
                Some(RotationName::Date("2026-01-31".to_owned())),
            ),
            ("kern.log.2.gz", None),
            ("kern.log", None),
            ("kern.log.", None),
            ("kern.logs.1", None),
            ("other.log.1", None),
        ];
        for (other, expected) in cases {
            assert_eq!(
                rotation_of(b"kern.log", other.as_bytes()),
                expected,
                "{other}"
            );
        }
    }
}
