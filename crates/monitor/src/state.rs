//! The state of a monitor that survives a restart, in a small file that is replaced as a whole:
//! the monitor's own memory, such as its place in a log, the repeats that are counted and not
//! yet reported, and the events on their way to the connector.
//!
//! Counts, and events that are not of a log record, would not be found again under the same
//! name, so they are written before they are handed over. All others may be handed over at
//! once, since a record that is read and reported twice is stored once (`event_id` in
//! `model/event.rs`). So a process that is killed at any moment loses and duplicates
//! nothing. The state is also written when everything has been handed over: otherwise an agent
//! whose outbox has delivered an event would deliver it again. Other changes are written at
//! most once a second.
//!
//! The file is not synchronised: that would cost a disk write per second. After a power loss it
//! may be old, or empty (XFS renames before it writes), and then a log is read as on a first
//! start. The boot must not be lost with it: a node that was power-cycled for a fault would
//! keep the fault forever. So the boot is in a file of its own, which is synchronised, and
//! written once per boot.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use contract::HealthEvent;
use diagnosis::fold::Fold;
use runtime::logging::chain;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Version of the file's format; other versions are not read.
const VERSION: u32 = 1;
/// Interval of writes of all other changes, which a restarted monitor finds again after a kill.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// State of a monitor that survives a restart.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MonitorState<M> {
    version: u32,
    /// The monitor's own memory.
    #[serde(flatten)]
    pub(super) memory: M,
    /// Boot that wrote the file.
    pub(super) boot_id: Option<String>,
    /// Repeats that are being counted.
    pub(super) fold: Fold,
    /// Events that the connector has not acknowledged.
    pub(super) outbox: Vec<HealthEvent>,
}

/// The state file and the boot's file beside it.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    boot_path: PathBuf,
    /// Boot id in the boot's file, on disk.
    boot_id: Option<String>,
}

/// Writes the state, one write at a time, on a blocking thread.
pub(super) struct Saving {
    path: PathBuf,
    file: Arc<Mutex<StateFile>>,
    /// Write in progress, with the number of events at the front of the outbox that it
    /// includes.
    under_way: Option<(JoinHandle<io::Result<()>>, usize)>,
    /// True if the state differs from the file.
    pub(super) changed: bool,
    /// True if the state has something new that would not be found again, so that no further
    /// event may be handed over before it is written.
    pub(super) first: bool,
    /// True if the state must be written at once, because a restart would otherwise hand over
    /// events again.
    pub(super) soon: bool,
    at: Instant,
    /// Error of the last write that was logged.
    pub(super) failed: Option<String>,
}

/// Reason why a file has no usable state.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error("cannot read it")]
    Read(#[source] io::Error),
    #[error("it is not a state file of gpuwarden")]
    Form(#[source] serde_json::Error),
    #[error("it has version {0}, this gpuwarden reads version {VERSION}")]
    Version(u32),
}

impl StateFile {
    /// Returns the files of the monitor with this name.
    pub(super) fn in_dir(dir: &Path, monitor: &str) -> Self {
        let boot_path = dir.join(format!("{monitor}-boot"));
        // An unreadable boot id counts as unknown, and is written again.
        let boot_id = fs::read_to_string(&boot_path)
            .ok()
            .filter(|id| !id.is_empty());
        Self {
            path: dir.join(format!("{monitor}.json")),
            boot_path,
            boot_id,
        }
    }

    /// Returns the last boot that was reported, even if the state is lost.
    pub(super) fn boot_id(&self) -> Option<&str> {
        self.boot_id.as_deref()
    }

    /// Returns the state of the last process; `None` on a first start, and if it cannot be
    /// read.
    pub(super) fn remembered<M: DeserializeOwned>(&self) -> Option<MonitorState<M>> {
        self.load().unwrap_or_else(|error| {
            tracing::warn!(
                path = %self.path.display(), err = %chain(&error),
                "cannot read the monitor's state: starting as on a first start"
            );
            None
        })
    }

    fn load<M: DeserializeOwned>(&self) -> Result<Option<MonitorState<M>>, LoadError> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(LoadError::Read(error)),
        };
        let state: MonitorState<M> = serde_json::from_slice(&text).map_err(LoadError::Form)?;
        if state.version == VERSION {
            Ok(Some(state))
        } else {
            Err(LoadError::Version(state.version))
        }
    }

    fn save<M: Serialize>(&mut self, mut state: MonitorState<M>) -> io::Result<()> {
        state.version = VERSION;
        let text = serde_json::to_vec(&state)?;
        replace(&self.path, &text, false)?;
        // Not before the connector has the events of a new boot: until then the previous boot
        // must stay known, since the waiting events may be lost.
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

// === impl Saving ===

impl Saving {
    /// Creates the writer of a state that was never written. Its boot must be written, even if
    /// nothing is ever found.
    pub(super) fn new(file: StateFile) -> Self {
        Self {
            path: file.path.clone(),
            file: Arc::new(Mutex::new(file)),
            under_way: None,
            changed: true,
            first: true,
            soon: false,
            at: Instant::now(),
            failed: None,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    #[cfg(any(test, feature = "test-util"))]
    pub(super) fn file(&self) -> std::sync::Weak<Mutex<StateFile>> {
        Arc::downgrade(&self.file)
    }

    /// Returns the time of the next write, if the state has changed.
    pub(super) fn due(&self) -> Option<Instant> {
        let is_due = self.changed && self.under_way.is_none();
        let pause = if self.soon {
            Duration::ZERO
        } else {
            SAVE_EVERY
        };
        is_due.then(|| self.at + pause)
    }

    /// Returns true if a write is due now.
    pub(super) fn is_due(&self) -> bool {
        self.due().is_some_and(|due| Instant::now() >= due)
    }

    /// Returns true if a write is in progress.
    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Starts to write the current state, unless a write is in progress.
    pub(super) fn begin<M>(&mut self, state: &MonitorState<M>)
    where
        M: Clone + Serialize + Send + 'static,
    {
        if self.under_way.is_some() {
            return;
        }
        (self.changed, self.first, self.soon) = (false, false, false);
        self.at = Instant::now();
        let (file, state) = (Arc::clone(&self.file), state.clone());
        let waiting = state.outbox.len();
        let writing = tokio::task::spawn_blocking(move || {
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            file.save(state)
        });
        self.under_way = Some((writing, waiting));
    }

    /// Waits for the write in progress, and returns its result; waits forever if there is none.
    /// Cancel-safe; [`end`](Self::end) must follow.
    pub(super) async fn until_written(this: &mut Option<Self>) -> io::Result<()> {
        let under_way = this.as_mut().and_then(|saving| saving.under_way.as_mut());
        match under_way {
            Some((writing, _)) => writing.await.map_err(io::Error::other)?,
            None => std::future::pending().await,
        }
    }

    /// Ends a write, and returns how many events of the outbox it included.
    pub(super) fn end(&mut self) -> usize {
        self.under_way.take().map_or(0, |(_, waiting)| waiting)
    }

    /// Records that `count` events have left the front of the outbox.
    pub(super) fn sent(&mut self, count: usize) {
        if let Some((_, waiting)) = &mut self.under_way {
            *waiting = waiting.saturating_sub(count);
        }
    }
}

/// Replaces the file at `path` with `text`. If `synced`, the complete file survives a power
/// loss.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &Path) -> StateFile {
        StateFile::in_dir(dir, "a")
    }

    /// NVSentinel writes its state in place, where a truncated file counts as a reboot.
    #[test]
    fn a_state_that_cannot_be_written_whole_leaves_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = file(dir.path());
        let boot = |name: &str| MonitorState::<()> {
            boot_id: Some(name.to_owned()),
            ..MonitorState::default()
        };
        file.save(boot("first")).unwrap();
        // The disk is full.
        std::os::unix::fs::symlink("/dev/full", file.path.with_extension("new")).unwrap();
        file.save(boot("second")).unwrap_err();
        let left = file.load::<()>().unwrap().unwrap();
        assert_eq!(left.boot_id.as_deref(), Some("first"));
        std::fs::remove_file(file.path.with_extension("new")).unwrap();
        file.save(boot("third")).unwrap();
        let new = file.load::<()>().unwrap().unwrap();
        assert_eq!(new.boot_id.as_deref(), Some("third"));
    }

    #[test]
    fn a_new_boot_is_on_disk_once_what_it_mends_is_handed_over() {
        let dir = tempfile::tempdir().unwrap();
        let mut state = MonitorState::<()> {
            boot_id: Some("first".to_owned()),
            ..MonitorState::default()
        };
        file(dir.path()).save(state.clone()).unwrap();
        let known = || file(dir.path()).boot_id().map(str::to_owned);
        assert_eq!(known().as_deref(), Some("first"));
        state.boot_id = Some("second".to_owned());
        state.outbox = vec![HealthEvent::default()];
        file(dir.path()).save(state.clone()).unwrap();
        assert_eq!(known().as_deref(), Some("first"));
        state.outbox.clear();
        file(dir.path()).save(state.clone()).unwrap();
        assert_eq!(known().as_deref(), Some("second"));
    }
}
