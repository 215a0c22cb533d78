//! The kernel log through the real `/dev/kmsg`.
//!
//! The log belongs to the whole machine: these tests run one at a time, also across processes,
//! mark their lines with a token, and write at a level that the console does not show.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

use std::{
    fs::{self, File},
    future::Future,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use gpuwarden_host::{
    boot::BootId,
    kernel_log::{
        Event, KMSG_TEXT_MAX, KernelLogRecord, KernelLogSpec, Position, Source, WriteError, open,
        write_kmsg,
    },
};
use jiff::{SignedDuration, Timestamp};
use rustix::fs::{FlockOperation, flock};
use tokio::time::timeout;

/// The device itself is the lock file, as in the test kit.
const LOCK: &str = "/dev/kmsg";
const CONSOLE_LEVEL: &str = "/proc/sys/kernel/printk";
/// Severity of the tests' lines: below what consoles show on most machines.
const INFO: u8 = 6;

/// The kernel log, locked for this test.
struct KernelLog {
    token: String,
    console: Option<String>,
    _lock: File,
}

impl KernelLog {
    /// Returns `None`, and skips the test, if the log cannot be read or written.
    fn take(test: &str) -> Option<Self> {
        let lock = File::open(LOCK).inspect(|lock| {
            flock(lock, FlockOperation::LockExclusive).unwrap();
        });
        let nanos = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_nanos();
        let token = format!("gpuwarden-test {test} {} {nanos}", std::process::id());

        let readable = open(&KernelLogSpec::Kmsg, None)
            .map(drop)
            .map_err(|error| error.to_string());
        let usable =
            readable.and_then(|()| write_kmsg(INFO, &token).map_err(|error| error.to_string()));
        let usable = usable.and_then(|()| lock.map_err(|error| error.to_string()));
        match usable {
            Ok(lock) => Some(Self {
                token,
                console: None,
                _lock: lock,
            }),
            Err(reason) => {
                testkit::skip(format_args!("a writable /dev/kmsg: {reason}"));
                None
            }
        }
    }

    /// Keeps the lines off the console: a serial one takes a millisecond for each.
    fn silence_console(&mut self) {
        let levels = fs::read_to_string(CONSOLE_LEVEL).unwrap();
        let console: u8 = levels.split_whitespace().next().unwrap().parse().unwrap();
        if console > INFO {
            fs::write(CONSOLE_LEVEL, format!("{INFO}\n")).unwrap();
            self.console = Some(levels);
        }
    }

    fn write(&self, text: &str) {
        write_kmsg(INFO, &format!("{}: {text}", self.token)).unwrap();
    }

    /// Returns the text after the token in a record of this test; `None` for the first record,
    /// which only checked that the log can be written.
    fn own<'a>(&self, record: &'a KernelLogRecord) -> Option<&'a str> {
        record.text.strip_prefix(&self.token)?.strip_prefix(": ")
    }
}

impl Drop for KernelLog {
    fn drop(&mut self) {
        if let Some(levels) = self.console.take()
            && let Err(error) = fs::write(CONSOLE_LEVEL, levels)
        {
            eprintln!("cannot restore {CONSOLE_LEVEL}: {error}");
        }
    }
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(30), future)
        .await
        .expect("nothing came in 30 seconds")
}

/// Reads until `enough` is true for all events so far.
async fn read_until(source: &mut Source, enough: impl Fn(&[Event]) -> bool) -> Vec<Event> {
    let mut events = Vec::new();
    while !enough(&events) {
        within(source.next_batch(&mut events, 256)).await.unwrap();
    }
    events
}

async fn catch_up(source: &mut Source) -> Vec<Event> {
    read_until(source, |events| events.contains(&Event::CaughtUp)).await
}

fn records(events: &[Event]) -> impl Iterator<Item = &KernelLogRecord> {
    events.iter().filter_map(|event| match event {
        Event::Record(record) => Some(record),
        _ => None,
    })
}

fn own(log: &KernelLog, events: &[Event]) -> Vec<String> {
    records(events)
        .filter_map(|record| log.own(record))
        .map(str::to_owned)
        .collect()
}

/// Reads until `count` records of this test have arrived.
async fn read_own(log: &KernelLog, source: &mut Source, count: usize) -> Vec<Event> {
    read_until(source, |events| own(log, events).len() >= count).await
}

fn seq_of(position: Option<Position>) -> u64 {
    match position {
        Some(Position::Kmsg { seq, .. }) => seq,
        other => panic!("not in the kernel log: {other:?}"),
    }
}

#[tokio::test]
async fn written_lines_come_back_whole_and_wake_the_reader() {
    let Some(log) = KernelLog::take("written_lines") else {
        return;
    };
    let mut source = open(&KernelLogSpec::Kmsg, None).unwrap();
    catch_up(&mut source).await;

    // Characters that the kernel escapes.
    let text = "NVRM: Xid (PCI:0000:b3:00): 79, pid='<unknown>', caf\u{e9} back\\slash \u{1b}[31m\ttab \\x41";
    let before = Timestamp::now();
    log.write(text);
    let events = read_own(&log, &mut source, 1).await;

    let record = records(&events)
        .find(|record| log.own(record).is_some())
        .unwrap();
    assert_eq!(log.own(record), Some(text));
    assert_eq!(record.level, Some(INFO));
    assert_eq!(record.facility, Some(1), "written by user space");
    let error = record.wall.unwrap().duration_since(before).abs();
    assert!(
        error < SignedDuration::from_secs(10),
        "wall clock off by {error:?}"
    );
}

#[tokio::test]
async fn the_backlog_comes_first_and_in_order() {
    let Some(log) = KernelLog::take("backlog") else {
        return;
    };
    let expected: Vec<_> = (0..20).map(|number| format!("line {number}")).collect();
    for line in &expected {
        log.write(line);
    }

    let mut source = open(&KernelLogSpec::Kmsg, None).unwrap();
    let events = catch_up(&mut source).await;
    assert_eq!(own(&log, &events), expected);
    assert_eq!(events.last(), Some(&Event::CaughtUp));
    let numbers: Vec<_> = records(&events).filter_map(|record| record.seq).collect();
    assert!(numbers.is_sorted_by(|earlier, later| earlier < later));
    assert_eq!(Some(seq_of(source.position())), numbers.last().copied());
}

/// Through one descriptor, the kernel's rate limit would drop most of a burst.
#[tokio::test]
async fn a_burst_of_written_lines_arrives_whole() {
    let Some(mut log) = KernelLog::take("burst") else {
        return;
    };
    log.silence_console();
    let mut source = open(&KernelLogSpec::Kmsg, None).unwrap();
    catch_up(&mut source).await;
    for number in 0..200 {
        log.write(&number.to_string());
    }
    let events = read_own(&log, &mut source, 200).await;
    let expected: Vec<_> = (0..200).map(|number| number.to_string()).collect();
    assert_eq!(own(&log, &events), expected);
}

#[tokio::test]
async fn resuming_neither_repeats_nor_loses() {
    let Some(log) = KernelLog::take("resume") else {
        return;
    };
    log.write("before");
    let mut first = open(&KernelLogSpec::Kmsg, None).unwrap();
    catch_up(&mut first).await;
    let position = first.position().unwrap();
    drop(first);
    log.write("after");

    let saved = position.to_string().parse().unwrap();
    let mut second = open(&KernelLogSpec::Kmsg, Some(&saved)).unwrap();
    assert_eq!(second.position(), Some(position.clone()));
    let events = catch_up(&mut second).await;
    assert_eq!(own(&log, &events), ["after"]);
    assert!(
        !events
            .iter()
            .any(|event| matches!(event, Event::Lost { .. })),
        "{events:?}"
    );
    assert!(records(&events).all(|record| record.seq > Some(seq_of(Some(position.clone())))));
}

#[tokio::test]
async fn positions_that_say_nothing_about_this_log_are_ignored() {
    let Some(log) = KernelLog::take("ignored_position") else {
        return;
    };
    log.write("line");
    let boot = |id: &str| id.parse::<BootId>().unwrap();
    let here = BootId::current().unwrap();
    let ignored = [
        Position::Kmsg {
            boot_id: boot("00000000-0000-4000-8000-000000000000"),
            seq: 0,
        },
        Position::Kmsg {
            boot_id: boot("00000000-0000-4000-8000-000000000000"),
            seq: u64::MAX,
        },
        Position::File {
            dev: 1,
            ino: 2,
            offset: 3,
            line: None,
        },
        // This boot, but beyond the end of its log, as after the return to a snapshot.
        Position::Kmsg {
            boot_id: here,
            seq: u64::MAX,
        },
    ];
    for position in &ignored {
        let mut source = open(&KernelLogSpec::Kmsg, Some(position)).unwrap();
        let events = catch_up(&mut source).await;
        assert_eq!(own(&log, &events), ["line"], "{position}");
        // After a reboot the whole log is wanted, and records that the buffer has dropped are
        // reported lost.
        let first = records(&events).next().unwrap().seq.unwrap();
        let another_boot = matches!(position, Position::Kmsg { boot_id, .. } if *boot_id != here);
        let expected = (another_boot && first > 0).then_some(first);
        let lost = match events.first() {
            Some(Event::Lost { count, .. }) => Some(*count),
            _ => None,
        };
        assert_eq!(lost, expected, "{position}");
    }
}

/// Largest kernel log buffer that the test fills, in bytes: twice what a kernel can be built
/// with, so that only one enlarged at boot is left alone.
const LARGEST_LOG: usize = 64 << 20;

#[tokio::test]
async fn an_overtaken_reader_counts_what_it_lost() {
    let Some(mut log) = KernelLog::take("overrun") else {
        return;
    };
    log.silence_console();
    let mut source = open(&KernelLogSpec::Kmsg, None).unwrap();
    catch_up(&mut source).await;
    let last = seq_of(source.position());

    // Long lines, so that few of them fill the buffer, however large it is.
    let padding = "x".repeat(KMSG_TEXT_MAX / 2);
    let text = |number: usize| format!("{number} {padding}");
    let mut written = 0;
    while oldest_in_the_log().await <= last + 1 {
        if written * padding.len() > LARGEST_LOG {
            return testkit::skip("a kernel log buffer of 64 MiB at most (log_buf_len)");
        }
        for _ in 0..100 {
            log.write(&text(written));
            written += 1;
        }
    }
    let newest = text(written - 1);
    let events = read_until(&mut source, |events| own(&log, events).contains(&newest)).await;

    let [
        Event::Lost {
            count,
            counted: true,
        },
        Event::Record(oldest),
        ..,
    ] = events.as_slice()
    else {
        panic!("no loss first: {:?}", &events[..2]);
    };
    let oldest = oldest.seq.unwrap();
    assert!(*count > 0);
    assert_eq!(oldest, last + 1 + count);
    assert_eq!(
        events
            .iter()
            .filter(|event| matches!(event, Event::Lost { .. }))
            .count(),
        1
    );
    // Lost and delivered records add up to all that were logged.
    let delivered = records(&events).count() as u64;
    assert_eq!(last + count + delivered, seq_of(source.position()));

    // A process that restarts too late counts the same gap.
    let boot_id = BootId::current().unwrap();
    let mut late = open(
        &KernelLogSpec::Kmsg,
        Some(&Position::Kmsg { boot_id, seq: last }),
    )
    .unwrap();
    let events = catch_up(&mut late).await;
    let first = records(&events)
        .next()
        .and_then(|record| record.seq)
        .unwrap();
    assert_eq!(
        events[0],
        Event::Lost {
            count: first - last - 1,
            counted: true
        }
    );
}

/// Returns the number of the oldest record that can still be read.
async fn oldest_in_the_log() -> u64 {
    let mut source = open(&KernelLogSpec::Kmsg, None).unwrap();
    let events = read_until(&mut source, |events| records(events).next().is_some()).await;
    records(&events).find_map(|record| record.seq).unwrap()
}

#[tokio::test]
async fn the_longest_text_is_taken_and_a_longer_one_refused() {
    let Some(log) = KernelLog::take("longest") else {
        return;
    };
    let mut source = open(&KernelLogSpec::Kmsg, None).unwrap();
    catch_up(&mut source).await;

    let room = KMSG_TEXT_MAX - log.token.len() - ": ".len();
    let longest = "x".repeat(room);
    match write_kmsg(INFO, &format!("{}: {longest}", log.token)) {
        Ok(()) => {
            let events = read_own(&log, &mut source, 1).await;
            assert_eq!(own(&log, &events), [longest]);
        }
        // An older kernel, which must report the refusal.
        Err(error) => assert!(matches!(error, WriteError::Refused { .. }), "{error}"),
    }
    let too_long = format!("{}: {}", log.token, "x".repeat(room + 1));
    assert!(matches!(
        write_kmsg(INFO, &too_long),
        Err(WriteError::TooLong { .. })
    ));
}

#[tokio::test]
async fn a_followed_file_is_read_through_the_same_door() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kern.log");
    fs::write(&path, "[    1.500000] a\n<3>[    2.000000] b\n").unwrap();
    let spec: KernelLogSpec = path.to_str().unwrap().parse().unwrap();
    let mut source = open(&spec, None).unwrap();
    let events = catch_up(&mut source).await;
    let stamps: Vec<_> = records(&events)
        .map(|record| (record.text.as_str(), record.boot_time_us))
        .collect();
    assert_eq!(stamps, [("a", Some(1_500_000)), ("b", Some(2_000_000))]);

    let position = source.position().unwrap().to_string().parse().unwrap();
    let mut source = open(&spec, Some(&position)).unwrap();
    assert_eq!(catch_up(&mut source).await, [Event::CaughtUp]);
    assert_eq!(
        source.spec(),
        &KernelLogSpec::File(Path::new(&path).to_owned())
    );
}

/// A journald of this test, in a mount namespace of its own; it reads the machine's kernel log.
struct Journald {
    process: std::process::Child,
    dir: tempfile::TempDir,
}

impl Journald {
    /// Returns `None`, and skips the test, if it cannot be started.
    fn start() -> Option<Self> {
        const PROGRAM: &str = "/lib/systemd/systemd-journald";
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("systemd/journal")).unwrap();
        fs::create_dir_all(dir.path().join("log/journal")).unwrap();
        let script = format!("mount --bind \"$1\" /run && exec {PROGRAM}");
        let process = std::process::Command::new("unshare")
            .args(["--mount", "sh", "-c", &script, "sh"])
            .arg(dir.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn();
        let skip = |reason: &str| {
            testkit::skip(format_args!("a journald of its own: {reason}"));
            None
        };
        if !Path::new(PROGRAM).exists() {
            return skip("install systemd");
        }
        let mut journald = match process {
            Ok(process) => Self { process, dir },
            Err(error) => return skip(&format!("unshare: {error}")),
        };
        let began = std::time::Instant::now();
        while began.elapsed() < Duration::from_secs(20) {
            if journald.process.try_wait().unwrap().is_some() {
                return skip("it ended at once; it needs root");
            }
            if journald.dir.path().join("systemd/journal/socket").exists() {
                return Some(journald);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        skip("it did not come up")
    }
}

impl Drop for Journald {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn what_systemd_writes_is_read_as_it_comes() {
    let Some(mut log) = KernelLog::take("journald") else {
        return;
    };
    log.silence_console();
    let Some(journald) = Journald::start() else {
        return;
    };
    let spec = KernelLogSpec::Journal(Some(journald.dir.path().join("log/journal")));
    let mut source = open(&spec, None).unwrap();
    // Longer than 512 bytes, so that journald compresses it.
    let long = "word ".repeat(150);
    let lines = [
        format!("NVRM: Xid (PCI:0000:b3:00): 79, name={}, short", log.token),
        format!(
            "NVRM: Xid (PCI:0000:b3:00): 31, name={}, {long}end",
            log.token
        ),
    ];
    let before = Timestamp::now();
    for line in &lines {
        write_kmsg(INFO, line).unwrap();
    }
    let mut found: Vec<KernelLogRecord> = Vec::new();
    let mut events = Vec::new();
    within(async {
        while found.len() < lines.len() {
            source.next_batch(&mut events, 100).await.unwrap();
            found.extend(events.drain(..).filter_map(|event| match event {
                Event::Record(record) if record.text.contains(&log.token) => {
                    (record.text.starts_with("NVRM: ")).then_some(record)
                }
                _ => None,
            }));
        }
    })
    .await;
    for (record, line) in found.iter().zip(&lines) {
        assert_eq!(&record.text, line);
        assert_eq!(record.boot_id, Some(BootId::current().unwrap()));
        assert_eq!((record.facility, record.level), (Some(1), Some(INFO)));
        let error = record.wall.unwrap().duration_since(before).abs();
        assert!(error < SignedDuration::from_secs(5), "{error:?}");
    }
    // A later process resumes after these lines.
    let position = source.position();
    drop(source);
    log.write("behind");
    let mut source = open(&spec, position.as_ref()).unwrap();
    let events = within(async {
        let mut events = Vec::new();
        while !events
            .iter()
            .any(|event| matches!(event, Event::Record(record) if record.text.ends_with("behind")))
        {
            source.next_batch(&mut events, 100).await.unwrap();
        }
        events
    })
    .await;
    assert!(!records(&events).any(|record| record.text.starts_with("NVRM: ")));
    assert!(!matches!(events.first(), Some(Event::Lost { .. })));
}

#[test]
fn auto_is_what_this_machine_has() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _inside = runtime.enter();
    let kmsg = open(&KernelLogSpec::Kmsg, None);
    match open(&KernelLogSpec::Auto, None) {
        Ok(source) if kmsg.is_ok() => assert_eq!(source.spec(), &KernelLogSpec::Kmsg),
        Ok(source) => assert_eq!(source.spec(), &KernelLogSpec::Journal(None)),
        Err(error) => {
            assert!(kmsg.is_err(), "{error}");
            assert!(error.to_string().contains("--kernel-log"), "{error}");
        }
    }
}
