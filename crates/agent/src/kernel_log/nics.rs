//! Keeps the names of the machine's NICs up to date.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use diagnosis::decode::MAX_NICS;
use tokio::time::Instant;

/// Interval of readings: names change with a replaced card or a new virtual function.
const EVERY: Duration = Duration::from_secs(60);

/// Names of NICs, as `host::nics` reads them.
#[derive(Debug)]
pub(super) struct NicNames {
    sysfs: PathBuf,
    known: BTreeMap<String, String>,
    read_at: Option<Instant>,
}

// === impl NicNames ===

impl NicNames {
    pub(super) fn new(sysfs: PathBuf) -> Self {
        Self {
            sysfs,
            known: BTreeMap::new(),
            read_at: None,
        }
    }

    /// Returns the names if a reading was due and found any. A NIC that is gone keeps its name:
    /// log lines about a card that fell off the bus are the ones that matter.
    pub(super) fn poll(&mut self, now: Instant) -> Option<BTreeMap<String, String>> {
        if self.read_at.is_some_and(|at| now < at + EVERY) {
            return None;
        }
        self.read_at = Some(now);
        let found = host::nics::read(&self.sysfs);
        // Present NICs take precedence over those that are gone.
        let gone = std::mem::take(&mut self.known);
        let gone = gone.into_iter().filter(|(key, _)| !found.contains_key(key));
        let room = MAX_NICS.saturating_sub(found.len());
        let gone: Vec<_> = gone.take(room).collect();
        self.known = found;
        self.known.extend(gone);
        (!self.known.is_empty()).then(|| self.known.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn names_are_read_anew_and_one_that_is_gone_keeps_its_name() {
        let sysfs = tempfile::tempdir().unwrap();
        let mut names = NicNames::new(sysfs.path().to_owned());
        let now = Instant::now();
        assert_eq!(names.poll(now), None, "no sysfs");
        let nic = |name: &str, address: &str| {
            let entry = sysfs.path().join("class/infiniband").join(name);
            std::fs::create_dir_all(&entry).unwrap();
            symlink(format!("../../../{address}"), entry.join("device")).unwrap();
            entry
        };
        let first = nic("mlx5_0", "0000:9a:00.0");
        assert_eq!(names.poll(now), None, "not yet");
        assert_eq!(names.poll(now + EVERY).unwrap()["0000:9a:00.0"], "mlx5_0");
        std::fs::remove_dir_all(first).unwrap();
        nic("mlx5_1", "0000:9b:00.0");
        let known = names.poll(now + 2 * EVERY).unwrap();
        assert_eq!(known["0000:9a:00.0"], "mlx5_0");
        assert_eq!(known["0000:9b:00.0"], "mlx5_1");
    }
}
