//! The place in the log, kept in a small file that is replaced as a whole.
//!
//! It lags behind what is stored, never ahead of it: after a crash some lines are read
//! again, get the same event id, and are stored once.
//!
//! A file that is truncated and written anew holds other records at the same places; the
//! generation, which changes then, tells them apart.

use std::io;
use std::path::{Path, PathBuf};

use host::kernel_log::Position;

#[derive(Debug)]
pub(super) struct PositionFile {
    path: PathBuf,
    saved: Option<Saved>,
}

/// A place, and the generation of the file that it is in.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Saved {
    pub(super) position: Position,
    pub(super) generation: i64,
}

impl PositionFile {
    pub(super) fn in_dir(dir: &Path) -> Self {
        Self {
            path: dir.join("kernel-log.position"),
            saved: None,
        }
    }

    /// The saved place. A file that is missing or unreadable is a first start.
    pub(super) fn load(&self) -> Option<Saved> {
        let text = std::fs::read_to_string(&self.path).ok()?;
        let saved = text
            .trim()
            .split_once(' ')
            .and_then(|(position, generation)| {
                Some(Saved {
                    position: position.parse().ok()?,
                    generation: generation.parse().ok()?,
                })
            });
        if saved.is_none() {
            let path = self.path.display();
            tracing::warn!(%path, "the saved place in the kernel log is not understood: ignored");
        }
        saved
    }

    /// Saves a place, where it has changed.
    pub(super) fn save(&mut self, place: Saved) -> io::Result<()> {
        if self.saved.as_ref() == Some(&place) {
            return Ok(());
        }
        let new = self.path.with_extension("new");
        std::fs::write(&new, format!("{} {}\n", place.position, place.generation))?;
        std::fs::rename(&new, &self.path)?;
        self.saved = Some(place);
        Ok(())
    }
}
