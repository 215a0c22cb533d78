use std::{
    fs::OpenOptions,
    future::Future,
    io::{Read, Write},
    path::PathBuf,
    time::Duration,
};

use tempfile::TempDir;
use tokio::time::timeout;

use super::*;

const NEVER: Duration = Duration::from_secs(3600);

/// A log file in a directory of its own.
struct Log {
    directory: TempDir,
}

impl Log {
    fn new() -> Self {
        Self {
            directory: TempDir::new().unwrap(),
        }
    }

    fn with(text: &str) -> Self {
        let log = Self::new();
        log.append(text);
        log
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("kern.log")
    }

    fn rotated(&self) -> PathBuf {
        self.directory.path().join("kern.log.1")
    }

    fn append(&self, text: &str) {
        append(&self.path(), text);
    }

    fn rotate(&self) {
        fs::rename(self.path(), self.rotated()).unwrap();
    }

    /// Follows the file by notifications alone.
    fn follow(&self) -> Lines {
        self.resume(None)
    }

    fn resume(&self, position: Option<&Position>) -> Lines {
        let mut lines = Lines::follow(&self.path(), position).unwrap();
        lines.followed().rely_on(NEVER, true);
        lines
    }
}

fn append(path: &Path, text: &str) {
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(10), future)
        .await
        .expect("nothing came in 10 seconds")
}

async fn batch(lines: &mut Lines, max: usize) -> Vec<String> {
    let mut out = Vec::new();
    within(lines.next_batch(&mut out, max)).await.unwrap();
    out.into_iter().map(shown).collect()
}

fn shown(event: Event) -> String {
    match event {
        Event::Record(record) => record.text,
        Event::Lost { count, counted } => format!("lost {count} {counted}"),
        Event::Malformed { reason } => format!("malformed: {reason}"),
        other => format!("{other:?}"),
    }
}

/// Collects `count` events, over as many batches as needed.
async fn collect(lines: &mut Lines, count: usize) -> Vec<String> {
    let mut events = Vec::new();
    while events.len() < count {
        events.extend(batch(lines, 100).await);
    }
    events
}

/// Runs the source until it waits, and fails on any event.
async fn assert_silent(lines: &mut Lines) {
    let mut out = Vec::new();
    let waiting = std::pin::pin!(lines.next_batch(&mut out, 100));
    tokio::select! {
        biased;
        result = waiting => panic!("something came: {result:?}"),
        () = tokio::task::yield_now() => {}
    }
}

#[tokio::test]
async fn a_file_that_grows() {
    let log = Log::with("[    1.000000] a\n\n[    2.000000] b\n");
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 1).await, ["a"]);
    assert_eq!(batch(&mut lines, 100).await, ["b", "CaughtUp"]);
    log.append("c\n");
    assert_eq!(batch(&mut lines, 100).await, ["c"]);
    assert_silent(&mut lines).await;
    log.append("d\ne\n");
    assert_eq!(batch(&mut lines, 100).await, ["d", "e"]);
}

#[tokio::test]
async fn a_partial_line_waits_for_its_end() {
    let log = Log::with("a\nb");
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 100).await, ["a", "CaughtUp"]);
    let offset = |lines: &Lines| match lines.position() {
        Some(Position::File { offset, .. }) => offset,
        other => panic!("{other:?}"),
    };
    assert_eq!(offset(&lines), 2);
    log.append("b");
    assert_silent(&mut lines).await;
    log.append("b\nc");
    assert_eq!(batch(&mut lines, 100).await, ["bbb"]);
    assert_eq!(offset(&lines), 6);
}

#[tokio::test]
async fn a_file_that_is_not_there_yet() {
    let log = Log::new();
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 100).await, ["CaughtUp"]);
    assert_eq!(lines.position(), None);
    assert_silent(&mut lines).await;
    log.append("a\n");
    assert_eq!(batch(&mut lines, 100).await, ["a"]);
    assert!(lines.position().is_some());
}

#[tokio::test]
async fn rotation_by_rename() {
    let log = Log::with("a\n");
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 100).await, ["a", "CaughtUp"]);

    log.rotate();
    append(&log.rotated(), "late\n");
    assert_eq!(batch(&mut lines, 100).await, ["late"]);
    log.append("");
    assert_silent(&mut lines).await;
    // The new file exists, but the logger still writes to the old one.
    append(&log.rotated(), "later\nunfinished");
    assert_eq!(batch(&mut lines, 100).await, ["later"]);
    log.append("new\n");
    assert_eq!(collect(&mut lines, 2).await, ["unfinished", "new"]);
    log.append("newer\n");
    assert_eq!(batch(&mut lines, 100).await, ["newer"]);

    log.rotate();
    log.append("newest\n");
    assert_eq!(batch(&mut lines, 100).await, ["newest"]);
}

#[tokio::test]
async fn a_file_that_is_deleted_and_made_anew() {
    let log = Log::with("a\n");
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 100).await, ["a", "CaughtUp"]);
    fs::remove_file(log.path()).unwrap();
    log.append("b\n");
    assert_eq!(batch(&mut lines, 100).await, ["b"]);
}

#[tokio::test]
async fn truncation() {
    let log = Log::with("a long first line\nunfinished");
    let mut lines = log.follow();
    assert_eq!(
        batch(&mut lines, 100).await,
        ["a long first line", "CaughtUp"]
    );
    File::create(log.path()).unwrap();
    assert_eq!(batch(&mut lines, 100).await, ["unfinished"]);
    log.append("b\n");
    assert_eq!(batch(&mut lines, 100).await, ["b"]);
    assert!(matches!(
        lines.position(),
        Some(Position::File { offset: 2, .. })
    ));
}

#[tokio::test]
async fn without_notifications_a_look_finds_the_change() {
    let log = Log::with("a\n");
    let mut lines = Lines::follow(&log.path(), None).unwrap();
    lines.followed().rely_on(Duration::from_millis(1), false);
    assert_eq!(batch(&mut lines, 100).await, ["a", "CaughtUp"]);
    log.append("b\n");
    assert_eq!(batch(&mut lines, 100).await, ["b"]);
    log.rotate();
    log.append("c\n");
    assert_eq!(batch(&mut lines, 100).await, ["c"]);
}

#[tokio::test]
async fn a_cancelled_read_takes_nothing() {
    let log = Log::with("");
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 100).await, ["CaughtUp"]);
    for number in 0..50 {
        assert_silent(&mut lines).await;
        log.append(&format!("line {number}\n"));
        assert_eq!(batch(&mut lines, 100).await, [format!("line {number}")]);
    }
}

#[tokio::test]
async fn resuming_in_the_same_file() {
    let log = Log::with("a\nb\nc");
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 1).await, ["a"]);
    let position = lines.position().unwrap();
    drop(lines);

    let mut lines = log.resume(Some(&position));
    assert_eq!(lines.position().as_ref(), Some(&position));
    assert_eq!(batch(&mut lines, 100).await, ["b", "CaughtUp"]);
    log.append("c\n");
    assert_eq!(batch(&mut lines, 100).await, ["cc"]);

    let end = lines.position().unwrap();
    assert_eq!(batch(&mut log.resume(Some(&end)), 100).await, ["CaughtUp"]);
}

#[tokio::test]
async fn resuming_in_a_file_that_was_rotated_meanwhile() {
    let log = Log::with("a\nb\n");
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 1).await, ["a"]);
    let position = lines.position().unwrap();
    drop(lines);

    log.rotate();
    let mut nothing_new = log.resume(Some(&position));
    assert_eq!(batch(&mut nothing_new, 100).await, ["b", "CaughtUp"]);
    log.append("c\n");
    let mut lines = log.resume(Some(&position));
    assert_eq!(collect(&mut lines, 3).await, ["b", "c", "CaughtUp"]);
    assert_eq!(batch(&mut nothing_new, 100).await, ["c"]);
}

/// Rotates as logrotate does: by number or by date.
fn rotate_again(log: &Log, dates: bool, day: u32) {
    let name = |end: &str| log.directory.path().join(format!("kern.log{end}"));
    if dates {
        fs::rename(log.path(), name(&format!("-202601{day:02}"))).unwrap();
        return;
    }
    for ago in (1..5).rev() {
        drop(fs::rename(
            name(&format!(".{ago}")),
            name(&format!(".{}", ago + 1)),
        ));
    }
    log.rotate();
}

#[tokio::test]
async fn several_rotations_between_two_looks_cost_nothing() {
    for dates in [false, true] {
        let log = Log::with("b1\n");
        let mut followed = log.follow();
        assert_eq!(batch(&mut followed, 100).await, ["b1", "CaughtUp"]);
        let position = followed.position().unwrap();
        log.append("b2\n");
        rotate_again(&log, dates, 9);
        log.append("b3\n");
        rotate_again(&log, dates, 10);
        // The newest file has no line yet; the one between is read all the same.
        let mut lines = log.resume(Some(&position));
        assert_eq!(collect(&mut lines, 3).await, ["b2", "b3", "CaughtUp"]);
        log.append("b4\n");
        rotate_again(&log, dates, 11);
        log.append("b5\n");
        assert_eq!(collect(&mut lines, 2).await, ["b4", "b5"]);
        // Likewise for a process that was not running, and for one that was only late.
        let expected = ["b2", "b3", "b4", "b5"];
        let mut late = log.resume(Some(&position));
        assert_eq!(collect(&mut late, 5).await[..4], expected);
        assert_eq!(collect(&mut followed, 4).await, expected);
    }
}

#[tokio::test]
async fn a_rotated_file_that_is_gone_is_told() {
    let log = Log::with("b1\n");
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 100).await, ["b1", "CaughtUp"]);
    let position = lines.position().unwrap();
    drop(lines);
    log.append("b2\n");
    for day in 3..6 {
        rotate_again(&log, false, day);
        log.append(&format!("b{day}\n"));
    }
    fs::remove_file(log.directory.path().join("kern.log.2")).unwrap();
    let mut lines = log.resume(Some(&position));
    let events = collect(&mut lines, 5).await;
    assert_eq!(events, ["b2", "lost 0 false", "b4", "b5", "CaughtUp"]);
}

#[tokio::test]
async fn a_file_written_anew_up_to_its_old_length_or_beyond_is_read_from_its_start() {
    for anew in ["c\nd\n", "ccc\nddd\n"] {
        let log = Log::with("a\nb\n");
        let mut lines = log.follow();
        assert_eq!(batch(&mut lines, 100).await, ["a", "b", "CaughtUp"]);
        let position = lines.position().unwrap();
        // Truncated and refilled at once, as after copytruncate.
        fs::write(log.path(), anew).unwrap();
        let mut expected = vec!["lost 0 false"];
        expected.extend(anew.lines());
        assert_eq!(collect(&mut lines, 3).await, expected);
        expected.push("CaughtUp");
        let mut later = log.resume(Some(&position));
        assert_eq!(collect(&mut later, 4).await, expected);
        log.append("e\n");
        assert_eq!(batch(&mut lines, 100).await, ["e"]);
    }
}

#[tokio::test]
async fn a_file_cut_under_a_logger_that_goes_on_at_its_old_place_is_read_on() {
    let log = Log::new();
    let mut logger = File::create(log.path()).unwrap();
    logger.write_all(b"a long line\n").unwrap();
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 100).await, ["a long line", "CaughtUp"]);
    logger.set_len(0).unwrap();
    for line in ["b", "c"] {
        writeln!(logger, "{line}").unwrap();
        assert_eq!(batch(&mut lines, 100).await, [line]);
    }
}

#[tokio::test]
async fn a_position_that_is_gone_is_told_and_all_is_read() {
    let log = Log::with("a\nb\nc\n");
    let mut lines = log.follow();
    assert_eq!(collect(&mut lines, 4).await, ["a", "b", "c", "CaughtUp"]);
    let Some(Position::File {
        dev,
        ino,
        offset,
        line,
    }) = lines.position()
    else {
        panic!()
    };
    let gone = [
        // Beyond the end, not at a line's end, another file.
        Position::File {
            dev,
            ino,
            offset: offset + 1,
            line,
        },
        Position::File {
            dev,
            ino,
            offset: offset - 1,
            line,
        },
        Position::File {
            dev,
            ino: ino ^ 1 << 40,
            offset,
            line,
        },
    ];
    for position in &gone {
        let events = collect(&mut log.resume(Some(position)), 5).await;
        assert_eq!(
            events,
            ["lost 0 false", "a", "b", "c", "CaughtUp"],
            "{position}"
        );
    }
}

#[tokio::test]
async fn a_position_of_another_kind_is_ignored() {
    let log = Log::with("a\n");
    let position = "kmsg:f6ee57d5-7e3f-47b5-b8b4-39ade2595d41:7"
        .parse()
        .unwrap();
    assert_eq!(
        batch(&mut log.resume(Some(&position)), 100).await,
        ["a", "CaughtUp"]
    );
}

#[tokio::test]
async fn a_file_read_once_ends() {
    let log = Log::with("6,1,1000000,-;a\n SUBSYSTEM=pci\n DEVICE=+pci:0000\nb\n KEY=x\nc");
    let mut lines = Lines::read_once(&log.path()).unwrap();
    assert_eq!(
        collect(&mut lines, 6).await,
        ["a", "b", " KEY=x", "c", "CaughtUp", "End"]
    );
    assert_eq!(batch(&mut lines, 100).await, ["End"]);
    assert_eq!(lines.position(), None);
}

#[tokio::test]
async fn a_line_beyond_the_limit_is_cut_and_told_once() {
    let log = Log::with(&format!("{}\nnext\n", "x".repeat(3 * LINE_MAX)));
    let mut lines = log.follow();
    let events = collect(&mut lines, 4).await;
    assert_eq!(events[0], "x".repeat(LINE_MAX));
    assert_eq!(
        events[1],
        "malformed: a line of 196609 bytes was cut: lines may have 65536"
    );
    assert_eq!(events[2..], ["next", "CaughtUp"]);
    let offset = fs::metadata(log.path()).unwrap().len();
    assert!(matches!(lines.position(), Some(Position::File { offset: end, .. }) if end == offset));
}

#[tokio::test]
async fn a_pipe_is_read_as_it_comes_and_ends_with_its_writer() {
    let (reader, mut writer) = io::pipe().unwrap();
    let mut lines = Lines::to_the_end(OwnedFd::from(reader).into()).unwrap();
    assert_eq!(batch(&mut lines, 100).await, ["CaughtUp"]);
    for number in 0..20 {
        assert_silent(&mut lines).await;
        writeln!(writer, "line {number}").unwrap();
        assert_eq!(batch(&mut lines, 100).await, [format!("line {number}")]);
    }
    write!(writer, "last").unwrap();
    assert_silent(&mut lines).await;
    drop(writer);
    assert_eq!(collect(&mut lines, 2).await, ["last", "End"]);
    assert_eq!(batch(&mut lines, 100).await, ["End"]);
}

#[tokio::test]
async fn reading_does_not_change_the_mode_of_a_shared_pipe() {
    let (reader, mut writer) = io::pipe().unwrap();
    let mut shared = reader.try_clone().unwrap();
    let mut lines = Lines::to_the_end(OwnedFd::from(reader).into()).unwrap();
    assert_eq!(batch(&mut lines, 100).await, ["CaughtUp"]);
    assert!(
        !rustix::fs::fcntl_getfl(&shared)
            .unwrap()
            .contains(rustix::fs::OFlags::NONBLOCK)
    );
    writer.write_all(b"x").unwrap();
    assert_eq!(shared.read(&mut [0; 8]).unwrap(), 1);
}

#[tokio::test]
async fn a_named_pipe_does_not_wait_for_its_writer() {
    let log = Log::new();
    rustix::fs::mkfifoat(
        rustix::fs::CWD,
        log.path(),
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
    )
    .unwrap();
    let mut lines = Lines::follow(&log.path(), None).unwrap();
    assert_eq!(batch(&mut lines, 100).await, ["CaughtUp"]);
    log.append("a\n");
    assert_eq!(collect(&mut lines, 2).await, ["a", "End"]);
}

#[tokio::test]
async fn devices_that_never_wait_are_read() {
    let mut lines = Lines::follow(Path::new("/dev/null"), None).unwrap();
    assert_eq!(batch(&mut lines, 100).await, ["CaughtUp", "End"]);
}

#[tokio::test]
async fn what_cannot_be_opened() {
    let log = Log::new();
    let directory = log.directory.path();
    assert!(matches!(
        Lines::follow(directory, None),
        Err(KernelLogOpenError::Directory { .. })
    ));
    assert!(matches!(
        Lines::read_once(directory),
        Err(KernelLogOpenError::Directory { .. })
    ));
    assert!(matches!(
        Lines::read_once(&log.path()),
        Err(KernelLogOpenError::NotFound { .. })
    ));
    let in_no_directory = directory.join("missing").join("kern.log");
    match Lines::follow(&in_no_directory, None) {
        Err(KernelLogOpenError::NotFound { path, .. }) => {
            assert_eq!(path, directory.join("missing"));
        }
        other => panic!("{other:?}"),
    }
    let below_a_file = Log::with("x").path().join("kern.log");
    assert!(Lines::follow(&below_a_file, None).is_err());
}

#[tokio::test]
async fn what_is_missing_is_known_before_and_after_the_first_read() {
    let log = Log::new();
    let mut lines = Lines::follow(&log.path(), None).unwrap();
    let mut out = Vec::new();
    assert_eq!(lines.missing(), Some(&*log.path()));
    lines.next_batch(&mut out, 8).await.unwrap();
    assert_eq!(out, [Event::CaughtUp]);
    assert_eq!(lines.missing(), Some(&*log.path()));
    append(&log.path(), "late\n");
    assert_eq!(lines.missing(), None);
    lines.next_batch(&mut out, 8).await.unwrap();
    // An open file is not missing, even if it was renamed.
    log.rotate();
    assert_eq!(lines.missing(), None);
}

#[tokio::test]
async fn a_file_replaced_by_a_directory_is_an_error_until_it_is_back() {
    let log = Log::with("a\n");
    let mut lines = log.follow();
    assert_eq!(batch(&mut lines, 100).await, ["a", "CaughtUp"]);
    log.rotate();
    fs::create_dir(log.path()).unwrap();
    append(&log.path().join("entry"), "");
    let mut out = Vec::new();
    within(lines.next_batch(&mut out, 100)).await.unwrap_err();
    fs::remove_dir_all(log.path()).unwrap();
    log.append("b\n");
    assert_eq!(batch(&mut lines, 100).await, ["b"]);
}

#[test]
fn properties_of_records() {
    for line in [" SUBSYSTEM=pci", " DEVICE=+pci:0000:00:00.0", " SEQNUM_2="] {
        assert!(is_record_property(line.as_bytes()), "{line}");
    }
    for line in ["", " ", "KEY=x", "  KEY=x", " NVRM: a=b", " =x", " KEY"] {
        assert!(!is_record_property(line.as_bytes()), "{line}");
    }
}

#[tokio::test]
async fn a_line_that_never_ends_leaves_others_their_turn() {
    let mut zeros = Lines::to_the_end(File::open("/dev/zero").unwrap()).unwrap();
    let mut out = Vec::new();
    let reading = async { while zeros.next_batch(&mut out, 1000).await.is_ok() {} };
    // Without the yield this would never end.
    assert!(timeout(Duration::from_millis(200), reading).await.is_err());
}
