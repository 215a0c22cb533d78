//! The machine's kernel log, for tests that write to it.
//!
//! There is one for the whole machine, so it is locked by one test at a time. By default the
//! kernel drops lines from user space beyond ten in five seconds, and copies all to the console.
//! Both settings are changed, and restored on drop.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use crate::{components::Component, objects::unique, skip::require};

const RATE_LIMIT: &str = "/proc/sys/kernel/printk_devkmsg";
const CONSOLE_LEVEL: &str = "/proc/sys/kernel/printk";

/// Exclusive right to write to `/dev/kmsg`, until dropped.
#[derive(Debug)]
pub struct KernelLog {
    token: String,
    _rate_limit: Restore,
    _console_level: Restore,
    // Also the lock: flock works on devices, and this one is the same file for all processes. It
    // is the last field, so that the lock is released after the settings are restored.
    device: File,
}

/// A kernel setting whose old value is restored on drop.
#[derive(Debug)]
struct Restore {
    path: PathBuf,
    old: String,
}

// === impl KernelLog ===

impl KernelLog {
    /// Waits for the kernel log. Returns `None` if the calling test must return, because this
    /// machine has no writable log; the skip is then already reported.
    ///
    /// # Panics
    ///
    /// With `CI=true` if the log cannot be written, as [`require`] does.
    #[track_caller]
    pub fn lock() -> impl Future<Output = anyhow::Result<Option<Self>>> {
        let device = require(Component::KernelLog);
        async move {
            let Some(device) = device else {
                return Ok(None);
            };
            tokio::task::spawn_blocking(move || Self::lock_blocking(&device))
                .await?
                .map(Some)
        }
    }

    fn lock_blocking(device: &Path) -> anyhow::Result<Self> {
        let device = OpenOptions::new().write(true).open(device)?;
        device.lock().context("lock /dev/kmsg")?;
        // The kernel ignores the value without its newline, and reports no error.
        let rate_limit = Restore::set(Path::new(RATE_LIMIT), "on\n", str::to_owned)?;
        let console_level = Restore::set(Path::new(CONSOLE_LEVEL), "1\n", |old| {
            old.split_whitespace().next().unwrap_or("4").to_owned()
        })?;
        let token = unique("gpuwarden-test");
        Ok(Self {
            token,
            _rate_limit: rate_limit,
            _console_level: console_level,
            device,
        })
    }

    /// Returns a word that no other test writes. Include it in your lines to recognise them.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Writes one record at level "error". The kernel refuses more than about 1,000 bytes.
    pub fn write(&self, line: &str) -> io::Result<()> {
        // One write is one record.
        (&self.device).write_all(format!("<3>{line}\n").as_bytes())
    }
}

// === impl Restore ===

impl Restore {
    /// Writes `value`. `keep` converts the value read before into the one to restore.
    fn set(path: &Path, value: &str, keep: impl FnOnce(&str) -> String) -> anyhow::Result<Self> {
        let read = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        fs::write(path, value).with_context(|| format!("write {}", path.display()))?;
        Ok(Self {
            path: path.to_owned(),
            old: keep(read.trim()),
        })
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.path, format!("{}\n", self.old)) {
            let _ = writeln!(
                io::stderr(),
                "cannot put back {}: {error}",
                self.path.display()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_comes_back_on_drop() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("printk");
        fs::write(&path, "7 4 1 7\n").unwrap();
        let restore = Restore::set(&path, "1\n", |old| old[..1].to_owned()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n");
        drop(restore);
        assert_eq!(fs::read_to_string(&path).unwrap(), "7\n");
    }
}
