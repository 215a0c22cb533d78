//! Reads `gpu_metadata.json`, NVSentinel's description of the GPUs.
//!
//! Read at the start, and again when the file changes, so that a collector that starts later,
//! or finds a replaced GPU, is noticed. A problem with the file costs names on events, never an
//! event; it is shown in the status of the source and logged once.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use diagnosis::decode::{MAX_MACHINE_BYTES, MachineError, MachineGpus};
use runtime::file_stamp::FileStamp;
use runtime::logging::chain;

/// Flag to open without blocking, in case the name is not a file's (`O_NONBLOCK`).
const NONBLOCK: i32 = 0o4000;

/// The file, with its state at the last read.
#[derive(Debug)]
pub(super) struct MachineFile {
    path: PathBuf,
    /// Stamp of the file when it was read, valid or not.
    read: Option<FileStamp>,
    /// Description of the problem with the file.
    problem: Option<String>,
}

#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error("cannot read it")]
    Io(#[from] io::Error),
    #[error("it is not a file")]
    NoFile,
    #[error("it is not UTF-8")]
    Text(#[from] std::string::FromUtf8Error),
    #[error(transparent)]
    Machine(#[from] MachineError),
}

impl MachineFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            read: None,
            problem: None,
        }
    }

    /// Returns the problem with the file; a missing file is none.
    pub(super) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Returns the machine if the file has changed and could be read. Otherwise the previous
    /// one stays in use: a missing or broken file does not change the hardware.
    pub(super) fn poll(&mut self) -> Option<MachineGpus> {
        match self.read() {
            Ok(machine) => {
                if machine.is_some() {
                    self.problem = None;
                }
                machine
            }
            Err(error) => {
                if matches!(error, ReadError::Io(_) | ReadError::NoFile) {
                    // Makes the next check read the file, even if it has not changed.
                    self.read = None;
                }
                let path = self.path.display();
                let problem = format!("{path} is not used: {}", chain(&error));
                if self.problem.as_ref() != Some(&problem) {
                    tracing::warn!(%path, err = %chain(&error), "cannot read the description of the GPUs");
                    self.problem = Some(problem);
                }
                None
            }
        }
    }

    /// Reads the file; returns `None` if it has not changed.
    fn read(&mut self) -> Result<Option<MachineGpus>, ReadError> {
        let opened = File::options()
            .read(true)
            .custom_flags(NONBLOCK)
            .open(&self.path);
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.read = None;
                self.problem = None;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(ReadError::NoFile);
        }
        let stamp = FileStamp::of(&metadata);
        if self.read == Some(stamp) {
            return Ok(None);
        }
        let mut text = Vec::new();
        // One byte more than the limit, so that a longer file is refused rather than truncated.
        file.take(MAX_MACHINE_BYTES as u64 + 1)
            .read_to_end(&mut text)?;
        self.read = Some(stamp);
        Ok(Some(MachineGpus::parse(&String::from_utf8(text)?)?))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn replace(path: &Path, text: &str) {
        let new = path.with_extension("tmp");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, path).unwrap();
    }

    #[test]
    fn it_is_read_when_it_changes_and_a_broken_one_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpu_metadata.json");
        let mut file = MachineFile::new(path.clone());
        assert!(file.poll().is_none() && file.problem().is_none());
        replace(&path, r#"{"driver_version": "570.86.15"}"#);
        let machine = file.poll().unwrap();
        assert_eq!(machine.driver_version(), Some("570.86.15"));
        assert!(file.poll().is_none(), "nothing new");
        replace(&path, "{");
        assert!(file.poll().is_none());
        let problem = file.problem().unwrap().to_owned();
        assert!(
            problem.contains("gpu_metadata.json") && problem.contains("EOF"),
            "{problem}"
        );
        assert!(file.poll().is_none());
        assert_eq!(file.problem(), Some(problem.as_str()), "it is still broken");
        replace(&path, r#"{"driver_version": "580.65.06"}"#);
        assert!(file.poll().is_some() && file.problem().is_none());
        replace(&path, &" ".repeat(MAX_MACHINE_BYTES + 1));
        assert!(file.poll().is_none());
        assert!(file.problem().unwrap().contains("4194304"), "{file:?}");
    }

    #[test]
    fn a_broken_one_that_is_gone_is_no_problem_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpu_metadata.json");
        let mut file = MachineFile::new(path.clone());
        replace(&path, "{");
        assert!(file.poll().is_none() && file.problem().is_some());
        std::fs::remove_file(&path).unwrap();
        assert!(file.poll().is_none());
        assert_eq!(file.problem(), None);
        // Broken in the same way again, and reported again.
        replace(&path, "{");
        assert!(file.poll().is_none() && file.problem().is_some());
    }

    #[test]
    fn one_that_could_not_be_opened_is_read_though_it_has_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, aside) = (
            dir.path().join("gpu_metadata.json"),
            dir.path().join("aside"),
        );
        let mut file = MachineFile::new(path.clone());
        replace(&path, "{}");
        assert!(file.poll().is_some());
        std::fs::rename(&path, &aside).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(file.poll().is_none());
        assert!(file.problem().unwrap().contains("not a file"), "{file:?}");
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        assert!(file.poll().is_some());
        assert_eq!(file.problem(), None);
    }
}
