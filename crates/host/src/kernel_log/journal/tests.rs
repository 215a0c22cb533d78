use std::process::Command;

use proptest::prelude::*;

use super::*;

mod unprivileged;
mod writer;

use writer::{Compression, Writer};

const BOOT: [u8; 16] = [2; 16];
const OLD_BOOT: [u8; 16] = [1; 16];
const SECOND: u64 = 1_000_000;
/// 2026-11-21T11:40:00Z, in microseconds since 1970.
const NOON: u64 = 1_795_261_200 * SECOND;

struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(MACHINE)).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(MACHINE).join(name)
    }

    fn file(&self, name: &str, number: u8) -> Writer {
        Writer::new(&self.path(name), number)
    }

    fn open(&self, resume: Option<&Position>) -> Journal {
        self.try_open(resume).unwrap()
    }

    fn try_open(&self, resume: Option<&Position>) -> Result<Journal, KernelLogOpenError> {
        let directories = vec![self.dir.path().join("absent"), self.dir.path().to_owned()];
        Journal::new(directories, BootId::from_bytes(BOOT), resume)
    }
}

const MACHINE: &str = "0123456789abcdef0123456789abcdef";

fn drain(journal: &mut Journal) -> Vec<String> {
    let mut out = Vec::new();
    journal.fill(&mut out, 1_000_000);
    out.into_iter()
        .map(|event| match event {
            Event::Record(record) => record.text,
            Event::Lost { counted: false, .. } => "lost".to_owned(),
            Event::Malformed { .. } => "malformed".to_owned(),
            other => format!("{other:?}"),
        })
        .collect()
}

#[tokio::test]
async fn kernel_entries_of_this_boot_come_in_order_and_carry_their_own_time() {
    let bench = Bench::new();
    let mut file = bench.file("system.journal", 1);
    file.kernel(OLD_BOOT, 5 * SECOND, NOON - SECOND, "of the boot before");
    file.kernel(BOOT, SECOND, NOON, "first");
    file.entry(
        BOOT,
        SECOND,
        NOON,
        &["_TRANSPORT=syslog", "MESSAGE=no kernel"],
    );
    file.entry(
        BOOT,
        9 * SECOND,
        NOON + 8 * SECOND,
        &[
            "_TRANSPORT=kernel",
            "MESSAGE=second",
            "PRIORITY=3",
            "SYSLOG_FACILITY=0",
            "SYSLOG_IDENTIFIER=kernel",
            "_SOURCE_MONOTONIC_TIMESTAMP=2500000",
        ],
    );
    let mut journal = bench.open(None);
    let mut out = Vec::new();
    journal.fill(&mut out, 1);
    journal.fill(&mut out, 1);
    let [Event::Record(first), Event::Record(second)] = out.as_slice() else {
        panic!("{out:?}")
    };
    assert_eq!((first.text.as_str(), first.facility), ("first", Some(0)));
    assert_eq!((second.text.as_str(), second.level), ("second", Some(3)));
    assert_eq!(second.boot_time_us, Some(2_500_000));
    // journald reads the record 6.5 s after the kernel wrote it.
    assert_eq!(second.wall.unwrap().to_string(), "2026-11-21T11:40:01.5Z");
    assert_eq!(second.boot_id, Some(BootId::from_bytes(BOOT)));
    assert_eq!(second.place, journal.position());
    assert_eq!(drain(&mut journal), ["CaughtUp"]);
    // The file grows.
    for number in 0..300 {
        file.kernel(BOOT, 10 * SECOND, NOON, &format!("line {number}"));
    }
    let lines: Vec<String> = (0..300).map(|number| format!("line {number}")).collect();
    assert_eq!(drain(&mut journal), lines);
}

#[tokio::test]
async fn every_form_of_file_is_read() {
    let long = format!("{} end", "long ".repeat(300));
    for compact in [false, true] {
        for keyed in [false, true] {
            for compression in [None, Some(Compression::Lz4), Some(Compression::Zstd)] {
                let bench = Bench::new();
                let mut file = bench.file("system.journal", 1);
                file.form(compact, keyed, compression);
                for number in 0..40 {
                    file.kernel(BOOT, number, NOON, &format!("{number} {long}"));
                }
                let read = drain(&mut bench.open(None));
                assert_eq!(read.len(), 41, "{compact} {keyed} {compression:?}");
                assert_eq!(read[39], format!("39 {long}"));
            }
        }
    }
}

#[tokio::test]
async fn the_reset_job_is_heard_as_root_only_and_programs_keep_their_tag() {
    let bench = Bench::new();
    let mut file = bench.file("system.journal", 1);
    let reset = |uid: &'static str| {
        [
            "_TRANSPORT=syslog",
            "SYSLOG_IDENTIFIER=nvsentinel-gpu-reset",
            uid,
            "MESSAGE=GPU reset executed: GPU-1, success: true",
        ]
    };
    file.entry(BOOT, 1, NOON, &reset("_UID=1000"));
    file.entry(BOOT, 2, NOON, &reset("_UID=0"));
    // journald splits a program's line into tag and text, but not the kernel's.
    for facility in ["SYSLOG_FACILITY=1", "SYSLOG_FACILITY=0"] {
        let fields = [
            "_TRANSPORT=kernel",
            facility,
            "SYSLOG_IDENTIFIER=NVRM",
            "MESSAGE=Xid",
        ];
        file.entry(BOOT, 3, NOON, &fields);
    }
    let mut journal = bench.open(None);
    let mut out = Vec::new();
    journal.fill(&mut out, 100);
    let records: Vec<(Option<u8>, &str)> = out
        .iter()
        .filter_map(|event| match event {
            Event::Record(record) => Some((record.facility, record.text.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(
        records,
        [
            (None, "GPU reset executed: GPU-1, success: true"),
            (Some(1), "NVRM: Xid"),
            (Some(0), "Xid"),
        ]
    );
}

#[tokio::test]
async fn a_later_process_goes_on_behind_the_cursor_through_rotation() {
    let bench = Bench::new();
    let mut file = bench.file("system.journal", 1);
    for number in 0..100 {
        file.kernel(BOOT, number, NOON, &format!("{number}"));
    }
    let mut journal = bench.open(None);
    let mut out = Vec::new();
    journal.fill(&mut out, 60);
    let position = journal.position();
    drop(journal);
    let shown = position.as_ref().unwrap().to_string();
    assert_eq!(shown.parse::<Position>().ok(), position, "{shown}");

    // Rotated once while no process was reading, and once while one is.
    let mut next = file.rotate(
        &bench.path("system@1.journal"),
        &bench.path("system.journal"),
    );
    next.kernel(BOOT, 101, NOON, "100");
    let mut journal = bench.open(position.as_ref());
    let read = drain(&mut journal);
    assert_eq!((read.len(), read[0].as_str()), (42, "60"));
    assert_eq!(read[40..], ["100", "CaughtUp"]);
    next.kernel(BOOT, 102, NOON, "101");
    let mut last = next.rotate(
        &bench.path("system@2.journal"),
        &bench.path("system.journal"),
    );
    last.kernel(BOOT, 103, NOON, "102");
    assert_eq!(drain(&mut journal), ["101", "102"]);
    assert_eq!(journal.tracks.len(), 1, "what is finished is closed");
    assert_eq!(
        drain(&mut bench.open(journal.position().as_ref())),
        ["CaughtUp"]
    );
}

#[tokio::test]
async fn what_was_removed_behind_the_cursor_is_told_and_the_rest_is_read() {
    let bench = Bench::new();
    let mut file = bench.file("system.journal", 1);
    file.kernel(BOOT, 1, NOON, "one");
    let mut journal = bench.open(None);
    drain(&mut journal);
    let position = journal.position();
    drop(journal);
    file.kernel(BOOT, 2, NOON, "lost to the vacuum");
    let mut next = file.rotate(
        &bench.path("system@1.journal"),
        &bench.path("system.journal"),
    );
    next.kernel(BOOT, 3, NOON, "three");
    fs::remove_file(bench.path("system@1.journal")).unwrap();
    // Reading starts at the oldest entry that is left, not at the end.
    assert_eq!(
        drain(&mut bench.open(position.as_ref())),
        ["lost", "three", "CaughtUp"]
    );
}

#[tokio::test]
async fn a_cursor_of_the_boot_before_leads_through_its_end_into_this_one() {
    let bench = Bench::new();
    let mut file = bench.file("system.journal", 1);
    file.kernel(OLD_BOOT, 100, NOON, "read");
    let position = {
        let mut journal = bench.try_open(None).unwrap();
        // As seen by a process of the earlier boot.
        journal.boot_id = BootId::from_bytes(OLD_BOOT);
        assert_eq!(drain(&mut journal), ["read", "CaughtUp"]);
        journal.position()
    };
    file.kernel(OLD_BOOT, 200, NOON + SECOND, "last words");
    // The clock's battery is empty, so the new boot starts in 1970.
    file.kernel(BOOT, 1, 3 * SECOND, "new boot");
    assert_eq!(
        drain(&mut bench.open(position.as_ref())),
        ["last words", "new boot", "CaughtUp"]
    );
    // Likewise if the new boot has a file and a sequence of its own.
    let bench = Bench::new();
    let mut old = bench.file("system@1.journal", 1);
    old.kernel(OLD_BOOT, 100, NOON, "read");
    old.kernel(OLD_BOOT, 200, NOON + SECOND, "last words");
    let mut new = bench.file("system.journal", 9);
    new.kernel(BOOT, 1, 3 * SECOND, "new boot");
    assert_eq!(
        drain(&mut bench.open(position.as_ref())),
        ["last words", "new boot", "CaughtUp"]
    );
}

#[tokio::test]
async fn a_wall_clock_that_is_set_back_loses_nothing() {
    let bench = Bench::new();
    let mut file = bench.file("system.journal", 1);
    file.kernel(BOOT, SECOND, NOON, "before");
    let mut journal = bench.open(None);
    drain(&mut journal);
    file.kernel(BOOT, 2 * SECOND, NOON - 3_600 * SECOND, "after");
    let position = journal.position();
    assert_eq!(drain(&mut journal), ["after"]);
    assert_eq!(
        drain(&mut bench.open(position.as_ref())),
        ["after", "CaughtUp"]
    );
}

#[tokio::test]
async fn what_moves_from_run_to_var_comes_once() {
    let bench = Bench::new();
    let run = bench.dir.path().join("absent");
    fs::create_dir(&run).unwrap();
    let mut volatile = Writer::new(&run.join("system.journal"), 1);
    volatile.kernel(BOOT, 1, NOON, "one");
    volatile.kernel(BOOT, 2, NOON, "two");
    let mut journal = bench.open(None);
    assert_eq!(drain(&mut journal), ["one", "two", "CaughtUp"]);
    // Copied under other sequence numbers; the volatile file disappears.
    let mut lasting = bench.file("system.journal", 7);
    for (time, text) in [(1, "one"), (2, "two"), (3, "three")] {
        lasting.kernel(BOOT, time, NOON, text);
    }
    fs::remove_file(run.join("system.journal")).unwrap();
    let position = journal.position();
    assert_eq!(drain(&mut journal), ["three"]);
    assert_eq!(journal.tracks.len(), 1);
    assert_eq!(
        drain(&mut bench.open(position.as_ref())),
        ["three", "CaughtUp"]
    );
}

#[tokio::test]
async fn a_damaged_file_is_told_and_the_others_are_read() {
    let bench = Bench::new();
    let mut damaged = bench.file("system@1.journal", 1);
    damaged.kernel(BOOT, 1, NOON, "one");
    damaged.kernel(BOOT, 2, NOON, "two");
    damaged.cut_at_entry(1);
    damaged.archive();
    let mut sound = bench.file("system.journal", 9);
    sound.kernel(BOOT, 3, NOON, "three");
    fs::write(bench.path("other.journal"), "no journal").unwrap();
    fs::write(bench.path("foreign.journal"), [b'x'; 512]).unwrap();
    fs::write(bench.path("user-1000.journal"), [b'x'; 512]).unwrap();
    assert_eq!(
        drain(&mut bench.open(None)),
        ["malformed", "one", "malformed", "lost", "three", "CaughtUp"]
    );
}

#[tokio::test]
async fn damage_in_the_file_that_is_written_to_is_no_silence_and_passes() {
    let bench = Bench::new();
    let mut file = bench.file("system.journal", 1);
    file.kernel(BOOT, 1, NOON, "one");
    file.kernel(BOOT, 2, NOON, "two");
    file.cut_at_entry(1);
    let mut other = bench.file("other.journal", 9);
    other.kernel(BOOT, 3, NOON, "three");
    let mut journal = bench.open(None);
    let mut out = Vec::new();
    journal.next_batch(&mut out, 100).await.unwrap();
    assert!(matches!(&out[..], [Event::Record(one)] if one.text == "one"));
    for _ in 0..2 {
        let read = timeout(Duration::from_secs(20), journal.next_batch(&mut out, 100)).await;
        let error = read.expect("it does not wait").unwrap_err().to_string();
        assert!(error.contains("system.journal cannot be read"), "{error}");
    }
    assert_eq!(out.len(), 1, "{out:?}");
    // The error was temporary, or the file is whole by now.
    file.kernel(BOOT, 4, NOON, "four");
    assert_eq!(
        drain(&mut bench.open(journal.position().as_ref())),
        ["two", "three", "four", "CaughtUp"]
    );
}

#[tokio::test]
async fn a_new_entry_wakes() {
    let bench = Bench::new();
    let mut file = bench.file("system.journal", 1);
    let mut journal = bench.open(None);
    let mut out = Vec::new();
    journal.next_batch(&mut out, 10).await.unwrap();
    assert_eq!(out, [Event::CaughtUp]);
    for number in 0..5 {
        let mut out = Vec::new();
        {
            let mut waiting = std::pin::pin!(journal.next_batch(&mut out, 10));
            tokio::select! {
                biased;
                result = &mut waiting => panic!("nothing was logged: {result:?}"),
                () = tokio::task::yield_now() => {}
            }
            file.kernel(BOOT, number, NOON, "line");
            // Before the periodic check.
            timeout(RECHECK / 2, waiting).await.unwrap().unwrap();
        }
        assert_eq!(out.len(), 1);
    }
}

#[tokio::test]
async fn without_a_journal_it_is_said_what_to_do() {
    let directories = vec![PathBuf::from("/nowhere/run"), PathBuf::from("/nowhere/var")];
    let error = Journal::new(directories, BootId::from_bytes(BOOT), None).unwrap_err();
    assert!(matches!(&error, KernelLogOpenError::NoJournal { path, .. } if path.ends_with("run")));
    assert!(error.to_string().contains("/nowhere/run"), "{error}");
    let advice = error.advice().unwrap();
    assert!(advice.contains("kmsg"), "{advice}");
}

/// Compares with systemd's own reader on the same files.
#[tokio::test]
async fn journalctl_reads_the_same() {
    if Command::new("journalctl")
        .arg("--version")
        .output()
        .is_err()
    {
        return testkit::skip("journalctl: install systemd");
    }
    for (compact, keyed) in [(false, false), (false, true), (true, true)] {
        let bench = Bench::new();
        let mut file = bench.file("system.journal", 1);
        file.form(compact, keyed, Some(Compression::Lz4));
        for number in 0..50 {
            let text = "x".repeat(usize::try_from(number).unwrap() * 40);
            file.kernel(BOOT, number, NOON + number, &format!("{number} {text}"));
        }
        let output = Command::new("journalctl")
            .arg("--file")
            .arg(bench.path("system.journal"))
            .args(["-o", "json", "--all", "_TRANSPORT=kernel"])
            .output()
            .unwrap();
        let theirs: Vec<(String, String)> = String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .map(|line| {
                let entry: serde_json::Value = serde_json::from_str(line).unwrap();
                let field = |name: &str| {
                    let value = entry[name].as_str();
                    value
                        .unwrap_or_else(|| panic!("{name} in {line}"))
                        .to_owned()
                };
                (format!("journal:{}", field("__CURSOR")), field("MESSAGE"))
            })
            .collect();
        let mut out = Vec::new();
        bench.open(None).fill(&mut out, 1_000);
        let ours: Vec<(String, String)> = out
            .into_iter()
            .filter_map(|event| match event {
                Event::Record(record) => Some((record.place?.to_string(), record.text)),
                _ => None,
            })
            .collect();
        assert_eq!(ours.len(), 50);
        assert_eq!(ours, theirs, "compact {compact}, keyed {keyed}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Damaged files cause no panic and no endless loop.
    #[test]
    fn damage_anywhere_ends(
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>()), 1..8),
        cut in any::<prop::sample::Index>(),
        compact: bool,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = runtime.enter();
        let bench = Bench::new();
        let mut file = bench.file("system.journal", 1);
        file.form(compact, true, Some(Compression::Lz4));
        for number in 0..30 {
            file.kernel(BOOT, number, NOON, &format!("{number} {}", "x".repeat(600)));
        }
        let path = bench.path("system.journal");
        let mut bytes = fs::read(&path).unwrap();
        for (place, value) in places {
            let at = place.index(bytes.len() / 8) * 8;
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes.truncate(bytes.len() - cut.index(bytes.len() / 4));
        fs::write(&path, bytes).unwrap();
        if let Ok(mut journal) = bench.try_open(None) {
            prop_assert!(drain(&mut journal).len() < 100);
        }
    }
}

#[test]
fn a_journal_is_there_where_a_file_of_it_may_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("run");
    let present = dir.path().join("var");
    let paths = [missing.to_str().unwrap(), present.to_str().unwrap()];
    let error = || super::probe(&paths).unwrap_err().to_string();
    assert!(error().contains(paths[0]), "{}", error());
    // systemd creates the directory, and journald the files in the machine's directory.
    let machine = present.join("0123456789abcdef0123456789abcdef");
    fs::create_dir_all(&machine).unwrap();
    assert!(error().contains("there is no journal"), "{}", error());
    fs::write(machine.join("user-1000.journal"), "").unwrap();
    fs::write(present.join("notes"), "").unwrap();
    assert!(super::probe(&paths).is_err());
    fs::write(machine.join("system.journal"), "").unwrap();
    super::probe(&paths).unwrap();
}

/// Compares the seeds of the fuzz target with the writer's files. To regenerate the seeds:
/// `GPUWARDEN_WRITE_SEEDS=1 cargo test -p gpuwarden-host seeds`.
#[tokio::test]
async fn the_seeds_of_the_fuzz_target_are_whole_journals() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus-seed/journal");
    let forms = [
        ("plain", false, true, None),
        ("unkeyed", false, false, None),
        ("compact-lz4", true, true, Some(Compression::Lz4)),
        ("zstd", false, true, Some(Compression::Zstd)),
    ];
    for (name, compact, keyed, compression) in forms {
        let bench = Bench::new();
        let mut file = bench.file("system.journal", 1);
        file.form(compact, keyed, compression);
        let long = format!("NVRM: Xid (PCI:0000:01:00): 79, {}", "text ".repeat(150));
        for (index, text) in ["first", &long, "second", "third", "fourth", "fifth"]
            .iter()
            .enumerate()
        {
            let index = index as u64;
            file.kernel(BOOT, index * SECOND, NOON + index * SECOND, text);
        }
        let job = [
            "SYSLOG_IDENTIFIER=nvsentinel-gpu-reset",
            "_UID=0",
            "_TRANSPORT=syslog",
            "PRIORITY=6",
            "MESSAGE=GPU reset executed: GPU-1, success: true",
        ];
        file.entry(BOOT, 9 * SECOND, NOON + 9 * SECOND, &job);
        file.entry(BOOT, 10 * SECOND, NOON, &["_TRANSPORT=kernel"]);
        // No further events.
        assert_eq!(drain(&mut bench.open(None)).len(), 8 + 1, "{name}");
        let path = seeds.join(name);
        if std::env::var_os("GPUWARDEN_WRITE_SEEDS").is_some() {
            fs::write(&path, file.bytes()).unwrap();
        }
        assert!(fs::read(&path).unwrap() == file.bytes(), "{name}");
    }
}
