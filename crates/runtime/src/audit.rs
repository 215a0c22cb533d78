//! Audit log of the process: a file that is rotated by size, with a bounded number of files.
//!
//! Writing never blocks or fails the caller: a line that cannot be written is only counted, and
//! reported in the log.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::line_queue::LineQueue;
use crate::logging::Seldom;
use crate::metrics::{Description, Kind, Metrics};

/// Longest time that the end of the process waits for the last lines to be written.
const LAST_LINES: Duration = Duration::from_secs(2);

/// The log, set by [`start`].
static LOG: OnceLock<Log> = OnceLock::new();

struct Log {
    queue: Arc<LineQueue>,
    overflow: Seldom,
}

/// A file that is rotated when it is full: `x` becomes `x.1`, `x.1` becomes `x.2`, and so on.
#[derive(Debug)]
pub struct RotatedFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Largest size of the file (bytes); a full one is rotated.
    pub max_bytes: u64,
    /// Number of older files that are kept.
    pub backups: u32,
}

/// Starts the log. Fails if the file cannot be opened now. A second call changes nothing.
pub fn start(file: RotatedFile, metrics: &Metrics) -> io::Result<()> {
    if let Some(directory) = file.path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    file.open()?;
    let (failed, path) = (Seldom::default(), file.path.clone());
    let log = LOG.get_or_init(|| Log {
        queue: LineQueue::start("audit log", Reported { file, failed }),
        overflow: Seldom::default(),
    });
    metrics.add(&lost_lines(), log.queue.lost());
    tracing::info!(path = %path.display(), "writes to the API server are recorded in the audit log");
    Ok(())
}

/// Returns the description of the metric that [`start`] adds.
pub(crate) fn lost_lines() -> Description {
    let help = "Lines of the audit log that could not be written, or not fast enough";
    Description::new(Kind::Counter, "gpuwarden_audit_lines_lost", &[], help)
}

/// Queues a line. Does nothing before [`start`].
pub fn write(line: &[u8]) {
    if let Some(log) = LOG.get()
        && !log.queue.push(line)
        && let Some(not_logged_before) = log.overflow.now()
    {
        tracing::warn!(
            not_logged_before,
            "the audit log is too slow: a line is lost"
        );
    }
}

/// Waits a moment until all lines are written.
pub fn end() {
    if let Some(log) = LOG.get() {
        log.queue.flush(LAST_LINES);
    }
}

/// File whose errors are logged.
struct Reported {
    file: RotatedFile,
    failed: Seldom,
}

impl Write for Reported {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let written = self.file.append(line);
        if let Err(error) = &written
            && let Some(not_logged_before) = self.failed.now()
        {
            let path = self.file.path.display();
            tracing::warn!(err = %error, not_logged_before, "cannot write the audit log {path}");
        }
        written.map(|()| line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// === impl RotatedFile ===

impl RotatedFile {
    /// Appends a line. The file is opened for each line, so one that somebody moved or deleted is
    /// created anew.
    fn append(&self, line: &[u8]) -> io::Result<()> {
        let mut file = self.open()?;
        let size = file.metadata()?.len();
        if size > 0 && size + line.len() as u64 > self.max_bytes {
            self.rotate()?;
            file = self.open()?;
        }
        file.write_all(line)
    }

    fn open(&self) -> io::Result<File> {
        let mut options = File::options();
        options.create(true).append(true).mode(0o600);
        options.open(&self.path)
    }

    fn rotate(&self) -> io::Result<()> {
        if self.backups == 0 {
            return std::fs::remove_file(&self.path);
        }
        for number in (1..self.backups).rev() {
            rename_if_there(&self.backup(number), &self.backup(number + 1))?;
        }
        std::fs::rename(&self.path, self.backup(1))
    }

    fn backup(&self, number: u32) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(format!(".{number}"));
        path.into()
    }
}

fn rename_if_there(from: &Path, to: &Path) -> io::Result<()> {
    match std::fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        renamed => renamed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(directory: &Path, backups: u32) -> RotatedFile {
        RotatedFile {
            path: directory.join("audit.log"),
            max_bytes: 10,
            backups,
        }
    }

    /// Returns names and contents of all files.
    fn all(directory: &Path) -> Vec<(String, String)> {
        let files = std::fs::read_dir(directory).unwrap().flatten();
        let mut all: Vec<_> = files
            .map(|file| {
                let name = file.file_name().into_string().unwrap();
                (name, std::fs::read_to_string(file.path()).unwrap())
            })
            .collect();
        all.sort();
        all
    }

    #[test]
    fn a_full_file_is_rotated_and_the_oldest_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let kept = file(directory.path(), 2);
        for line in [
            "a1\n",
            "a2\n",
            "a3\n",
            "b1\n",
            "b2\n",
            "longer than a file\n",
            "d\n",
        ] {
            kept.append(line.as_bytes()).unwrap();
        }
        let expected = [
            ("audit.log", "d\n"),
            ("audit.log.1", "longer than a file\n"),
            ("audit.log.2", "b1\nb2\n"),
        ];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(all(directory.path()), expected);

        let directory = tempfile::tempdir().unwrap();
        let single = file(directory.path(), 0);
        for line in ["12345\n", "67890\n"] {
            single.append(line.as_bytes()).unwrap();
        }
        let expected = [("audit.log".to_owned(), "67890\n".to_owned())];
        assert_eq!(all(directory.path()), expected);
    }

    #[test]
    fn a_file_that_somebody_took_away_is_made_anew() {
        let directory = tempfile::tempdir().unwrap();
        let file = file(directory.path(), 1);
        file.append(b"one\n").unwrap();
        std::fs::remove_file(&file.path).unwrap();
        file.append(b"two\n").unwrap();
        assert_eq!(std::fs::read_to_string(&file.path).unwrap(), "two\n");
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(&file.path).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
    }

    /// The process goes on, and counts the lines.
    #[test]
    fn a_file_that_cannot_be_written_costs_its_lines_only() {
        let file = RotatedFile {
            path: "/dev/full".into(),
            max_bytes: 10,
            backups: 0,
        };
        let metrics = Metrics::default();
        start(file, &metrics).unwrap();
        write(b"one\n");
        write(b"two\n");
        end();
        let text = metrics.encode();
        assert!(
            text.contains("gpuwarden_audit_lines_lost_total 2\n"),
            "{text}"
        );
    }
}
