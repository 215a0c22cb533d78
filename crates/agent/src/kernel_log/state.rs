//! What the monitor has to remember over a restart, in a small file that is replaced as a
//! whole: the place in the log, the repeats that are counted and not yet reported, and the
//! events that are on their way to the connector.
//!
//! It is written before events are handed over, so that what is read behind the place is
//! either stored, or stands here: a process that is killed at any moment loses and doubles
//! nothing. Lines that are worth no event only move the place, which is written once a
//! second at most; after a kill they are read again. The file is not synchronised: after a
//! loss of power it may be older than the store, and what is read twice then is recognised
//! by the record it was read from (`domain/src/event.rs`).

use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use contract::{HealthEvent, json};
use domain::fold::Fold;
use host::kernel_log::Position;
use serde::{Deserialize, Serialize};

/// Version of the file's form; another one is not read.
const VERSION: u32 = 1;

/// What is remembered.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct State {
    version: u32,
    /// The place behind the last record taken in.
    pub(super) position: Option<Position>,
    /// Tells the file that is read from what was at the same places before: it changes when
    /// the file is truncated and written anew.
    pub(super) generation: i64,
    /// The boot in which this was written.
    pub(super) boot_id: Option<String>,
    /// Repeats that are counted.
    pub(super) fold: Fold,
    /// Events that the connector has not answered for.
    #[serde(with = "public_forms")]
    pub(super) outbox: Vec<HealthEvent>,
}

/// The file, if there is to be one.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
}

/// Why there is no state although there is a file.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error("cannot read it")]
    Read(#[source] io::Error),
    #[error("it is not what gpuwarden writes there")]
    Form(#[source] serde_json::Error),
    #[error("it has version {0}, this gpuwarden reads version {VERSION}")]
    Version(u32),
}

impl StateFile {
    pub(super) fn in_dir(dir: &Path) -> Self {
        Self {
            path: dir.join("kernel-log.json"),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What was remembered; `None` on a first start.
    pub(super) fn load(&self) -> Result<Option<State>, LoadError> {
        let text = match std::fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(LoadError::Read(error)),
        };
        let state: State = serde_json::from_slice(&text).map_err(LoadError::Form)?;
        if state.version == VERSION {
            Ok(Some(state))
        } else {
            Err(LoadError::Version(state.version))
        }
    }

    pub(super) fn save(&self, state: &mut State) -> io::Result<()> {
        state.version = VERSION;
        let text = serde_json::to_vec(state)?;
        let new = self.path.with_extension("new");
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        io::Write::write_all(&mut file, &text)?;
        std::fs::rename(&new, &self.path)
    }
}

mod public_forms {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    use super::{HealthEvent, json};

    pub(super) fn serialize<S: Serializer>(
        events: &[HealthEvent],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(events.iter().map(json::to_value))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<HealthEvent>, D::Error> {
        Vec::<serde_json::Value>::deserialize(from)?
            .into_iter()
            .map(|value| json::from_value(value).map_err(D::Error::custom))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVSentinel writes its state in place: what is cut off there counts as a reboot.
    #[test]
    fn a_state_that_cannot_be_written_whole_leaves_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::in_dir(dir.path());
        let boot = |name: &str| State {
            boot_id: Some(name.to_owned()),
            ..State::default()
        };
        file.save(&mut boot("first")).unwrap();
        // The disk is full.
        std::os::unix::fs::symlink("/dev/full", file.path().with_extension("new")).unwrap();
        file.save(&mut boot("second")).unwrap_err();
        let left = file.load().unwrap().unwrap();
        assert_eq!(left.boot_id.as_deref(), Some("first"));
        std::fs::remove_file(file.path().with_extension("new")).unwrap();
        file.save(&mut boot("third")).unwrap();
        let new = file.load().unwrap().unwrap();
        assert_eq!(new.boot_id.as_deref(), Some("third"));
    }
}
