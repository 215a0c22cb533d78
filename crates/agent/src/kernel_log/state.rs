//! What the monitor has to remember over a restart, in a small file that is replaced as a
//! whole: the place in the log, the repeats that are counted and not yet reported, and the
//! events that are on their way to the connector.
//!
//! It is written before events are handed over, so that what is read behind the place is
//! either stored, or stands here: a process that is killed at any moment loses and doubles
//! nothing. Lines that are worth no event only move the place, which is written once a
//! second at most; after a kill they are read again.
//!
//! The file is not synchronised: that would cost a write to the disk a second. After a loss
//! of power it may be old, or empty (XFS renames before it writes), and then the log is read
//! as on a first start; what is read twice is recognised by the record it was read from
//! (`domain/src/event.rs`). What must not be lost with it is the boot: a node that was
//! power-cycled for a fault would keep it for ever. So the boot stands in a file of its own
//! beside it, synchronised, and written once a boot.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
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

/// The file, if there is to be one, and that of the boot beside it.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    boot_path: PathBuf,
    /// The boot that stands in its file, on disk.
    boot_id: Option<String>,
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
        let boot_path = dir.join("kernel-log-boot");
        // What cannot be read is not known, and written again.
        let boot_id = fs::read_to_string(&boot_path)
            .ok()
            .filter(|id| !id.is_empty());
        Self {
            path: dir.join("kernel-log.json"),
            boot_path,
            boot_id,
        }
    }

    /// The last boot whose beginning was told, also where the state is lost.
    pub(super) fn boot_id(&self) -> Option<&str> {
        self.boot_id.as_deref()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What was remembered; `None` on a first start.
    pub(super) fn load(&self) -> Result<Option<State>, LoadError> {
        let text = match fs::read(&self.path) {
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

    pub(super) fn save(&mut self, state: &mut State) -> io::Result<()> {
        state.version = VERSION;
        let text = serde_json::to_vec(state)?;
        replace(&self.path, &text, false)?;
        // Not before the connector has what a new boot mends: until then the boot before
        // has to be known, for what waits here may be lost.
        if let Some(boot_id) = &state.boot_id
            && state.outbox.is_empty()
            && self.boot_id.as_ref() != Some(boot_id)
        {
            replace(&self.boot_path, boot_id.as_bytes(), true)?;
            self.boot_id = Some(boot_id.clone());
        }
        Ok(())
    }
}

/// Puts `text` in the place of the file at `path`; `synced`: it, and never nothing, is there
/// also after a loss of power.
fn replace(path: &Path, text: &[u8], synced: bool) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(text)?;
    if synced {
        file.sync_data()?;
    }
    fs::rename(&new, path)?;
    match path.parent() {
        Some(dir) if synced => File::open(dir)?.sync_all(),
        _ => Ok(()),
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
        let mut file = StateFile::in_dir(dir.path());
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

    #[test]
    fn a_new_boot_is_on_disk_once_what_it_mends_is_handed_over() {
        let dir = tempfile::tempdir().unwrap();
        let mut state = State {
            boot_id: Some("first".to_owned()),
            ..State::default()
        };
        StateFile::in_dir(dir.path()).save(&mut state).unwrap();
        let known = || StateFile::in_dir(dir.path()).boot_id().map(str::to_owned);
        assert_eq!(known().as_deref(), Some("first"));
        state.boot_id = Some("second".to_owned());
        state.outbox = vec![HealthEvent::default()];
        StateFile::in_dir(dir.path()).save(&mut state).unwrap();
        assert_eq!(known().as_deref(), Some("first"));
        state.outbox.clear();
        StateFile::in_dir(dir.path()).save(&mut state).unwrap();
        assert_eq!(known().as_deref(), Some("second"));
    }
}
