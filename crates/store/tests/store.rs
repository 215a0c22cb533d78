//! Tests of the embedded store through its public interface: the conformance tests, then its
//! own guarantees: ownership, access by other programs, and crashes at any moment.
//!
//! Kept in one file, though a long one: the list of known faults names tests by its path.

// The fixtures are test code too.
#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::{env, fs, io, process, thread, time};

use gpuwarden_store::conformance::{event, event_without_time, read_feed};
use gpuwarden_store::memory::MemoryStorage;
use gpuwarden_store::sqlite::{self, SqliteOpenError, SqliteStore};
use gpuwarden_store::{
    Checkpoint, Checkpoints, DirectoryError, EventLog, EventQuery, EventStore, NewEvent, Position,
    Prune, Upkeep, conformance_tests,
};
use jiff::Timestamp;
use tempfile::TempDir;

conformance_tests!(embedded);

/// Conformance tests of a backend with gaps between its positions.
mod memory {
    use super::*;

    conformance_tests!(in_memory);

    fn in_memory() -> impl AsyncFn() -> Arc<dyn EventStore> {
        let storage = MemoryStorage::default();
        async move || Arc::new(storage.open()) as Arc<dyn EventStore>
    }
}

/// Creates an empty storage, and returns its opener.
fn embedded() -> impl AsyncFn() -> Arc<dyn EventStore> {
    let dir = TempDir::new().unwrap();
    async move || Arc::new(SqliteStore::open(dir.path()).unwrap()) as Arc<dyn EventStore>
}

#[tokio::test]
async fn one_process_owns_a_directory_that_is_private() {
    let temp = TempDir::new().unwrap();
    let dir = temp.path().join("a/b");
    let store = SqliteStore::open(&dir).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&dir), 0o700);
    store.append(vec![event("n1", 1)]).await.unwrap();
    for file in fs::read_dir(&dir).unwrap() {
        let path = file.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }

    let error = SqliteStore::open(&dir).unwrap_err();
    let SqliteOpenError::Directory(DirectoryError::InUse { owner, .. }) = &error else {
        panic!("{error}")
    };
    assert_eq!(*owner, Some(process::id()));
    let text = error.to_string();
    assert!(text.contains(dir.to_str().unwrap()), "{text}");
    assert!(text.contains(&process::id().to_string()), "{text}");

    store.close().await;
    let files: HashSet<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|file| file.unwrap().file_name())
        .collect();
    assert_eq!(
        files,
        HashSet::from(["events.db".into(), "lock".into()]),
        "log folded in"
    );
    SqliteStore::open(&dir).unwrap().close().await;
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let temp = TempDir::new().unwrap();
    fs::write(temp.path().join("file"), "").unwrap();
    let error = SqliteStore::open(&temp.path().join("file/data")).unwrap_err();
    assert!(matches!(
        error,
        SqliteOpenError::Directory(DirectoryError::Create { .. })
    ));
    assert!(error.to_string().contains("file/data"), "{error}");
}

#[tokio::test]
async fn other_programs_can_read_the_file_while_it_is_in_use() {
    let dir = TempDir::new().unwrap();
    let store = SqliteStore::open(dir.path()).unwrap();
    store
        .append((0..3).map(|n| event("n1", n)).collect())
        .await
        .unwrap();
    let other = rusqlite::Connection::open(dir.path().join("events.db")).unwrap();
    let row = |row: &rusqlite::Row<'_>| {
        Ok((
            row.get::<_, String>(0)?,
            row.get::<_, String>(1)?,
            row.get::<_, i64>(2)?,
        ))
    };
    let found = other
        .query_row(
            "SELECT body->>'checkName', body->>'$.errorCode[0]', healthy FROM event
             WHERE node = 'n1' AND body->>'message' = 'fault 2'",
            [],
            row,
        )
        .unwrap();
    assert_eq!(found, ("SysLogsXIDError".to_owned(), "79".to_owned(), 0));
    store.close().await;
}

#[tokio::test]
async fn a_row_that_cannot_be_read_costs_itself_only() {
    let dir = TempDir::new().unwrap();
    let store = SqliteStore::open(dir.path()).unwrap();
    let events: Vec<NewEvent> = (0..5).map(|n| event("n1", n)).collect();
    store.append(events.clone()).await.unwrap();
    let other = rusqlite::Connection::open(dir.path().join("events.db")).unwrap();
    // Unknown JSON content, and a byte that is not valid text.
    for damage in [
        "UPDATE event SET body = '{\"version\": \"x\"}' WHERE seq = 2",
        "UPDATE event SET body = CAST(x'7bff7d' AS TEXT) WHERE seq = 3",
    ] {
        other.execute(damage, []).unwrap();
    }
    let seqs = async |after: u64, limit| {
        let records = store.feed(after.into(), limit).await.unwrap();
        records
            .iter()
            .map(|record| record.seq.number())
            .collect::<Vec<_>>()
    };
    assert_eq!(seqs(0, 10).await, [1, 4, 5]);
    assert_eq!(seqs(0, 2).await, [1, 4], "a short page is the end");
    assert_eq!(seqs(1, 1).await, [4]);
    let newest = EventQuery {
        limit: 2,
        before: Some(5.into()),
        ..EventQuery::default()
    };
    let records = store.events(newest).await.unwrap();
    let found: Vec<u64> = records.iter().map(|record| record.seq.number()).collect();
    assert_eq!(found, [4, 1]);
    let id = events[1].event.id.clone();
    assert_eq!(store.event(&id).await.unwrap(), None);
    assert_eq!(*store.unreadable().borrow(), 2, "each is counted once");
    let found = sqlite::inspect(dir.path()).unwrap();
    assert_eq!((found.events, found.unreadable), (5, 2));
    let named = &found.unreadable_events;
    assert_eq!((named[0].position, &named[0].id), (2.into(), &id));

    // Sending the events again restores the unreadable ones; sound events are unchanged.
    let answers = store.append(events[..2].to_vec()).await.unwrap();
    let answers: Vec<_> = answers
        .iter()
        .map(|one| (one.seq.number(), one.new))
        .collect();
    assert_eq!(answers, [(1, false), (6, true)]);
    assert_eq!(seqs(0, 10).await, [1, 4, 5, 6]);
    assert_eq!(store.event(&id).await.unwrap().unwrap().seq, 6.into());
    store.close().await;
}

#[tokio::test]
async fn names_that_cannot_be_read_are_deleted_and_inspected_all_the_same() {
    let dir = TempDir::new().unwrap();
    let store = SqliteStore::open(dir.path()).unwrap();
    let events = (0..3).map(|n| event("n1", n)).collect();
    store.append(events).await.unwrap();
    let other = rusqlite::Connection::open(dir.path().join("events.db")).unwrap();
    let damage = "UPDATE event SET id = CAST(x'ff31' AS TEXT), node = CAST(x'fe' AS TEXT)
                  WHERE seq = 1";
    other.execute(damage, []).unwrap();
    let found = sqlite::inspect(dir.path()).unwrap();
    assert_eq!(found.unreadable_events[0].id, "\u{fffd}1");
    let all = Prune {
        before: Timestamp::MAX,
        finished: 3.into(),
        ..prune_nothing()
    };
    assert_eq!(store.prune(all).await.unwrap().events, 2);
    store.close().await;
}

/// Variable with the directory of the child of [`acknowledged_events_survive_a_kill`].
const CHILD_DIR: &str = "GPUWARDEN_TEST_STORE_DIR";
/// Variable with the number of the child's run, from 1.
const CHILD_LIFE: &str = "GPUWARDEN_TEST_STORE_LIFE";
const LIVES: i64 = 20;
const TASKS: i64 = 6;

/// Events of the `n`-th append of a task in a run. Every second event has no time of its own.
fn batch(life: i64, task: i64, n: i64) -> Vec<NewEvent> {
    let node = format!("life{life}-task{task}");
    (0..=(n + task) % 4)
        .map(|k| {
            let number = n * 10 + k;
            let event = event(&node, number);
            if k % 2 == 0 {
                return event;
            }
            event_without_time(&node, &format!("report {number}"), Timestamp::now())
        })
        .collect()
}

/// Not a test, but the entry point of the process that `acknowledged_events_survive_a_kill`
/// kills.
#[test]
fn child_of_the_kill_test() {
    if let Some(dir) = env::var_os(CHILD_DIR) {
        append_until_killed(Path::new(&dir));
    }
}

/// Sends the first events of its predecessor again, then its own events, and prints each
/// acknowledgement: node, message, position.
fn append_until_killed(dir: &Path) {
    let life: i64 = env::var(CHILD_LIFE).unwrap().parse().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = Arc::new(SqliteStore::open(dir).unwrap());
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..TASKS {
            let store = Arc::clone(&store);
            tasks.spawn(async move {
                let again = (0..20).map(|n| (life - 1, n));
                for (life, n) in again.chain((0..).map(|n| (life, n))) {
                    let batch = batch(life, task, n);
                    let answers = store.append(batch.clone()).await.unwrap();
                    let lines: Vec<_> = batch
                        .iter()
                        .zip(answers)
                        .map(|(NewEvent { event, .. }, answer)| {
                            format!("ack|{}|{}|{}\n", event.node_name, event.message, answer.seq)
                        })
                        .collect();
                    let mut stdout = io::stdout().lock();
                    stdout
                        .write_all(lines.concat().as_bytes())
                        .and_then(|()| stdout.flush())
                        .unwrap();
                }
            });
        }
        tasks.join_all().await;
    });
}

#[tokio::test]
async fn acknowledged_events_survive_a_kill() {
    let seed = time::SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap()
        .subsec_nanos();
    println!("seed {seed}");
    let mut random = u64::from(seed) | 1;
    let mut below = move |bound: u64| {
        // Xorshift: any distribution of the moments will do.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % bound
    };
    let dir = TempDir::new().unwrap();
    let mut acknowledged: HashMap<(String, String), Position> = HashMap::new();
    for life in 1..=LIVES {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([
                "--exact",
                "child_of_the_kill_test",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(CHILD_DIR, dir.path())
            .env(CHILD_LIFE, life.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        // Some children die while they open the store, the others in the middle of writing.
        let opening = life % 5 == 0;
        let lines_before_death = if opening { 0 } else { 1 + below(200) };
        let mut read = Vec::new();
        let mut acknowledge = |line: &str| -> bool {
            let Some(rest) = line
                .strip_suffix('\n')
                .and_then(|line| line.split_once("ack|"))
            else {
                return false;
            };
            let fields: Vec<_> = rest.1.split('|').collect();
            let (event, seq) = (
                (fields[0].into(), fields[1].into()),
                fields[2].parse().unwrap(),
            );
            let before = acknowledged.insert(event, seq);
            assert!(
                before.is_none_or(|before| before == seq),
                "{line}: before at {before:?}"
            );
            true
        };
        let mut count = 0;
        while count < lines_before_death {
            read.clear();
            assert!(
                lines.read_until(b'\n', &mut read).unwrap() > 0,
                "the child died by itself"
            );
            count += u64::from(acknowledge(&String::from_utf8_lossy(&read)));
        }
        thread::sleep(time::Duration::from_micros(below(if opening {
            30_000
        } else {
            3_000
        })));
        child.kill().unwrap();
        child.wait().unwrap();
        // Lines that were printed before the kill count too; the last one may be cut off.
        read.clear();
        while lines.read_until(b'\n', &mut read).unwrap() > 0 {
            acknowledge(&String::from_utf8_lossy(&read));
            read.clear();
        }

        let store = SqliteStore::open(dir.path()).unwrap();
        let records = read_feed(&store, 1_000).await;
        assert!(
            records
                .iter()
                .map(|record| record.seq.number())
                .eq(1..=records.len() as u64),
            "no gap"
        );
        let mut stored = HashMap::new();
        for record in records {
            let event = (record.event.node_name, record.event.message);
            let doubled = stored.insert(event, record.seq);
            assert_eq!(
                doubled, None,
                "stored twice, the second time at {}",
                record.seq
            );
        }
        for (event, seq) in &acknowledged {
            assert_eq!(
                stored.get(event),
                Some(seq),
                "acknowledged and lost: {event:?}"
            );
        }
        store.close().await;
    }
    assert!(
        acknowledged.len() > 500,
        "{} events acknowledged",
        acknowledged.len()
    );
}

/// Small file system, unmounted at the end. `None`, and a skip, if this user may not mount one.
struct SmallDisk {
    dir: TempDir,
}

impl SmallDisk {
    fn new(kib: u32) -> Option<Self> {
        let dir = TempDir::new().unwrap();
        let mounted = Command::new("mount")
            .args([
                "-t",
                "tmpfs",
                "-o",
                &format!("size={kib}k,mode=0700"),
                "tmpfs",
            ])
            .arg(dir.path())
            .stderr(Stdio::null())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self { dir });
        }
        testkit::skip("the right to mount a tmpfs: run as root");
        None
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Remounts the file system with other options. Retries while it is busy: a process that
    /// another test has just started holds all descriptors of this one until `exec`.
    fn remount(&self, options: &str) {
        let options = format!("remount,{options}");
        let mut output = None;
        for _ in 0..100 {
            let mut mount = Command::new("mount");
            let tried = mount.args(["-o", &options]).arg(self.path()).output();
            let tried = tried.unwrap();
            if tried.status.success() {
                return;
            }
            output = Some(tried);
            thread::sleep(time::Duration::from_millis(50));
        }
        panic!("{options}: {output:?}");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

fn prune_nothing() -> Prune {
    Prune {
        before: Timestamp::UNIX_EPOCH,
        passes_before: Timestamp::UNIX_EPOCH,
        max_bytes: u64::MAX,
        finished: Position::START,
        gone_before: Timestamp::UNIX_EPOCH,
        keep: Vec::new(),
    }
}

#[tokio::test]
async fn a_full_disk_refuses_loses_nothing_and_passes() {
    let Some(disk) = SmallDisk::new(1_024) else {
        return;
    };
    let store = SqliteStore::open(disk.path()).unwrap();
    store.append(vec![event("n1", 0)]).await.unwrap();
    let trouble = store.trouble();
    store.append(vec![event("n1", 1)]).await.unwrap();
    assert_eq!(*trouble.borrow(), None);
    assert!(!trouble.has_changed().unwrap(), "a commit is no news of it");
    let ballast = disk.path().join("ballast");
    // Filling the disk ends in an error on purpose.
    let _ = fs::write(&ballast, vec![1; 1_024 * 1_024]);
    let mut acknowledged = 2;
    let error = loop {
        match store.append(vec![event("n1", acknowledged)]).await {
            Ok(_) => acknowledged += 1,
            Err(error) => break error,
        }
    };
    assert!(error.is_retryable(), "{error}");
    let trouble = store.trouble().borrow().clone();
    assert!(
        trouble.as_deref().is_some_and(|text| text.contains("full")),
        "{trouble:?}"
    );
    assert_eq!(
        read_feed(&store, 1_000).await.len(),
        usize::try_from(acknowledged).unwrap()
    );
    store.prune(prune_nothing()).await.unwrap_err();
    assert!(store.trouble().borrow().is_some(), "still full");

    fs::remove_file(ballast).unwrap();
    store.prune(prune_nothing()).await.unwrap();
    assert_eq!(
        *store.trouble().borrow(),
        None,
        "seen without an event to store"
    );
    store.append(vec![event("n1", acknowledged)]).await.unwrap();
    store.close().await;
    let store = SqliteStore::open(disk.path()).unwrap();
    assert_eq!(
        read_feed(&store, 1_000).await.len(),
        usize::try_from(acknowledged + 1).unwrap()
    );
    store.close().await;
}

#[tokio::test]
async fn a_disk_that_became_read_only_refuses_and_passes() {
    let Some(disk) = SmallDisk::new(4_096) else {
        return;
    };
    // Reopened: a descriptor that is open for writing would prevent the remount.
    let store = SqliteStore::open(disk.path()).unwrap();
    store.append(vec![event("n1", 0)]).await.unwrap();
    store.close().await;
    disk.remount("ro");
    let error = SqliteStore::open(disk.path()).unwrap_err();
    let text = runtime_chain(&error);
    assert!(
        text.contains("Read-only") || text.contains("read-only"),
        "{text}"
    );
    disk.remount("rw");
    let store = SqliteStore::open(disk.path()).unwrap();
    assert_eq!(read_feed(&store, 10).await.len(), 1);
    store.append(vec![event("n1", 1)]).await.unwrap();
    store.close().await;
}

/// An ext4 file system in a file, which turns read-only at an error, like a failing disk: also
/// under files that are open for writing, which a remount cannot do.
struct FailingDisk {
    dir: TempDir,
    mount_point: PathBuf,
}

impl FailingDisk {
    fn new() -> Option<Self> {
        let mkfs = testkit::require(testkit::Component::FileSystem)?;
        Some(Self::with(|image| {
            fs::File::create(image).unwrap().set_len(16 << 20).unwrap();
            run(Command::new(mkfs).arg("-qF").arg(image));
        }))
    }

    /// Returns the disk as found after a power cut now: data that is only in the page cache is
    /// not in the image.
    fn after_power_cut(&self) -> Self {
        Self::with(|image| {
            fs::copy(self.dir.path().join("image"), image).unwrap();
        })
    }

    fn with(make: impl FnOnce(&Path)) -> Self {
        let dir = TempDir::new().unwrap();
        make(&dir.path().join("image"));
        let mount_point = dir.path().join("mounted");
        fs::create_dir(&mount_point).unwrap();
        let disk = Self { dir, mount_point };
        disk.mount();
        disk
    }

    fn mount(&self) {
        let mount = Command::new("mount")
            .args(["-o", "loop,errors=remount-ro"])
            .arg(self.dir.path().join("image"))
            .arg(&self.mount_point)
            .output();
        assert!(mount.unwrap().status.success(), "mount");
    }

    fn data(&self) -> PathBuf {
        self.mount_point.join("data")
    }

    /// Makes the kernel find an error of the file system.
    fn fail(&self) {
        let mut findmnt = Command::new("findmnt");
        let source = run(findmnt.args(["-no", "SOURCE"]).arg(&self.mount_point));
        let device = Path::new(source.trim()).file_name().unwrap().to_owned();
        let trigger = Path::new("/sys/fs/ext4").join(device);
        fs::write(trigger.join("trigger_fs_error"), "1").unwrap();
    }
}

impl Drop for FailingDisk {
    fn drop(&mut self) {
        let mount_point = &self.mount_point;
        drop(Command::new("umount").arg("-l").arg(mount_point).status());
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn what_is_acknowledged_survives_a_power_cut() {
    let Some(disk) = FailingDisk::new() else {
        return;
    };
    let store = SqliteStore::open(&disk.data()).unwrap();
    for n in 0..5 {
        store.append(vec![event("n1", n)]).await.unwrap();
        let found = disk.after_power_cut();
        let after = SqliteStore::open(&found.data()).unwrap();
        let records = read_feed(&after, 10).await;
        assert_eq!(records.len(), usize::try_from(n).unwrap() + 1);
        assert!(after.notes().is_empty(), "it is not damaged");
        after.close().await;
    }
    store.close().await;
}

#[tokio::test]
async fn a_disk_that_turns_read_only_under_a_running_store_is_shown_and_passes() {
    let Some(disk) = FailingDisk::new() else {
        return;
    };
    let store = SqliteStore::open(&disk.data()).unwrap();
    store.append(vec![event("n1", 0)]).await.unwrap();
    assert_eq!(*store.trouble().borrow(), None);
    disk.fail();
    let error = store.append(vec![event("n1", 1)]).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    let trouble = store.trouble().borrow().clone();
    assert!(trouble.is_some());
    assert_eq!(*store.damage().borrow(), None, "it is no damage");
    assert_eq!(read_feed(&store, 10).await.len(), 1, "reads go on");
    // No event arrives: retention checks whether the store can write again.
    store.prune(prune_nothing()).await.unwrap_err();
    assert_eq!(*store.trouble().borrow(), trouble);
    store.close().await;

    // The kernel allows writes again only after a new mount, and so after a restart of the
    // store.
    run(Command::new("umount").arg(&disk.mount_point));
    disk.mount();
    let store = SqliteStore::open(&disk.data()).unwrap();
    assert_eq!(read_feed(&store, 10).await.len(), 1);
    store.append(vec![event("n1", 1)]).await.unwrap();
    assert_eq!(*store.trouble().borrow(), None);
    store.close().await;
}

fn runtime_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

#[tokio::test]
async fn a_store_can_be_looked_into_while_it_is_in_use_and_afterwards() {
    let dir = TempDir::new().unwrap();
    let missing = sqlite::inspect(dir.path()).unwrap_err();
    assert!(missing.is_retryable(), "{missing}");
    let store = SqliteStore::open(dir.path()).unwrap();
    let empty = sqlite::inspect(dir.path()).unwrap();
    assert_eq!((empty.events, empty.oldest), (0, None));
    assert_eq!(empty.id, store.identity().id);
    let nodes = ["n1", "n2", "n1"];
    store
        .append(
            nodes
                .iter()
                .zip(0..)
                .map(|(node, n)| event(node, n))
                .collect(),
        )
        .await
        .unwrap();
    let token = Checkpoint {
        token: 2.into(),
        state: vec![0; 4],
        parts: [("n1".to_owned(), vec![0; 3])].into(),
    };
    store.save_checkpoint("reader", token).await.unwrap();
    for in_use in [true, false] {
        let found = sqlite::inspect(dir.path()).unwrap();
        assert_eq!((found.events, found.newest_position), (3, 3.into()));
        assert_eq!(found.damage, [""; 0]);
        assert_eq!(found.history_up_to, Position::START);
        let counts: Vec<_> = found
            .nodes
            .iter()
            .map(|one| (one.name.as_str(), one.events))
            .collect();
        assert_eq!(counts, [("n1", 2), ("n2", 1)]);
        let [reader] = found.consumers.as_slice() else {
            panic!("{:?}", found.consumers)
        };
        assert_eq!(
            (reader.token.number(), reader.behind, reader.state_bytes),
            (2, 1, 7)
        );
        if in_use {
            store.close().await;
        }
    }
}
