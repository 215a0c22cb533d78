//! Tests with disks that are full or read-only.

use std::process::Command;

use super::*;

/// File system of its own, for tests as root.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    /// Returns `None`, and skips, if none can be mounted.
    fn mount(bytes: u32) -> Option<Self> {
        let own = Self(tempfile::tempdir().unwrap());
        if own.run(
            "mount",
            &["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"],
        ) {
            return Some(own);
        }
        testkit::skip("the right to mount a tmpfs: run as root");
        None
    }

    fn remount(&self, option: &str) {
        assert!(self.run("mount", &["-o", &format!("remount,{option}")]));
    }

    fn run(&self, program: &str, args: &[&str]) -> bool {
        let output = Command::new(program).args(args).arg(self.0.path()).output();
        output.is_ok_and(|output| output.status.success())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        self.run("umount", &["-l"]);
    }
}

#[test]
fn a_full_disk_refuses_keeps_what_waits_and_passes() {
    let Some(disk) = Tmpfs::mount(256 * 1024) else {
        return;
    };
    let dir = disk.0.path().join("outbox");
    let mut log = Log::open(&dir, LIMITS).unwrap();
    let large = |index: u32| event(&format!("{index:05000}"));
    let mut taken = Vec::new();
    let error = loop {
        let index = u32::try_from(taken.len()).unwrap();
        match log.append(&[large(index)]) {
            Ok(_) => taken.push(format!("{index:05000}")),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, OutboxError::Full { .. }), "{error:?}");
    assert!(error.to_string().contains("No space left"), "{error}");
    assert!(taken.len() > 10);
    // Still full: events are refused again, and waiting ones stay. A repeat needs no room.
    log.append(&[event("small"), large(1000)]).unwrap_err();
    assert!(!log.append(&[large(3)]).unwrap()[0].new);
    assert_eq!(names(&log.all()), taken);
    let newest = log.status().newest;
    log.delivered(newest - 1);
    drop(log);
    let mut log = Log::open(&dir, LIMITS).unwrap();
    assert_eq!(log.status().damaged, 0);
    assert_eq!(names(&log.all()), taken[taken.len() - 1..]);
    // Room comes back, here with a larger disk.
    disk.remount("size=2m");
    log.append(&[large(1000)]).unwrap();
    assert_eq!(names(&log.all()).len(), 2);
}

#[test]
fn a_read_only_disk_refuses_and_what_waits_is_delivered() {
    let Some(disk) = Tmpfs::mount(1024 * 1024) else {
        return;
    };
    let dir = disk.0.path().join("outbox");
    let mut log = Log::open(&dir, LIMITS).unwrap();
    log.append(&[event("one"), event("two")]).unwrap();
    // A file system with a file open for writing cannot be made read-only.
    log.file = None;
    disk.remount("ro");
    let error = log.append(&[event("three")]).unwrap_err();
    assert!(matches!(error, OutboxError::Disk { .. }), "{error:?}");
    assert_eq!(names(&log.all()), ["one", "two"]);
    log.delivered(1);
    assert_eq!(names(&log.all()), ["two"]);
    disk.remount("rw");
    log.append(&[event("three")]).unwrap();
    drop(log);
    let mut log = Log::open(&dir, LIMITS).unwrap();
    // Events whose delivery could not be recorded are delivered again.
    assert_eq!(names(&log.all()), ["one", "two", "three"]);
}
