//! Readable files are enough: neither root nor a capability is needed.

use std::os::unix::fs::PermissionsExt as _;

use super::*;

/// Runs `test` as an unprivileged user, whichever user runs the tests.
fn unprivileged(test: impl FnOnce() + Send) {
    let run = || {
        if rustix::process::geteuid().is_root() {
            // Changes only this thread, and drops its capabilities.
            rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65_534)).unwrap();
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async { test() });
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap());
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn files_that_are_readable_are_enough() {
    let bench = Bench::new();
    let mut file = bench.file("system.journal", 1);
    file.kernel(BOOT, 1, NOON, "a");
    mode(bench.dir.path(), 0o755);
    mode(&bench.path(""), 0o755);
    mode(&bench.path("system.journal"), 0o644);
    unprivileged(|| {
        let mut journal = bench.open(None);
        assert_eq!(drain(&mut journal), ["a", "CaughtUp"]);
        // Later files as well.
        let position = journal.position();
        drop(journal);
        assert_eq!(drain(&mut bench.open(position.as_ref())), ["CaughtUp"]);
    });
    // An unreadable file is an error, which it would not be for root.
    mode(&bench.path("system.journal"), 0o000);
    unprivileged(|| {
        let error = bench.try_open(None).err().map(|error| error.to_string());
        let error = error.unwrap_or_default();
        assert!(error.starts_with("may not read the journal"), "{error}");
    });
}
