//! Reads the running kernel's log from `/dev/kmsg`.
//!
//! The device returns one record per `read`, from the oldest in its ring buffer. When the ring
//! buffer overtakes a reader, `read` fails once with `EPIPE` and continues at the oldest
//! record; the gap in the sequence numbers shows how many records were lost. The descriptor
//! never blocks, and nothing is polled: the kernel wakes the reader.

use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
};

use rustix::{
    fs::{Mode, OFlags, SeekFrom},
    io::Errno,
};
use tokio::io::unix::AsyncFd;

use super::{
    Event, KMSG, KernelLogOpenError, KernelLogRecord, Position, record::parse_kmsg,
    write::devkmsg_is_off,
};
use crate::{
    boot::{BootClock, BootId},
    readiness,
};

/// Buffer size for one record: no kernel prints a longer one (`CONSOLE_EXT_LOG_MAX`). The
/// kernel refuses a read into a buffer that is too short.
const RECORD_SIZE: usize = 8 << 10;
/// Largest size of the buffer, should a kernel print longer records after all.
const RECORD_SIZE_MAX: usize = 64 << 10;

/// Major and minor number of the device; a container may have `/dev/null` in its place.
const KMSG_NUMBER: (u32, u32) = (1, 11);

/// An open `/dev/kmsg`, registered with the runtime.
#[derive(Debug)]
pub(super) struct Kmsg {
    fd: AsyncFd<OwnedFd>,
    reader: Reader,
}

/// All state but the descriptor, which a readiness guard borrows while records are read.
#[derive(Debug)]
struct Reader {
    boot_id: BootId,
    clock: BootClock,
    buffer: Vec<u8>,
    sequence: Sequence,
    caught_up: bool,
}

/// Sequence numbers that were handled, to detect losses.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sequence {
    /// Last record that was delivered, by this process or an earlier one.
    handled: Option<u64>,
    /// Last record that was read, delivered or not.
    read: Option<u64>,
    /// True if the kernel has reported an overrun since then.
    overrun: bool,
    /// True if an earlier process has read the log of an earlier boot, so that this boot's log
    /// is wanted from its first record.
    from_first: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Novelty {
    /// An earlier process has handled the record.
    Old,
    /// The record is to be delivered, after this loss.
    New { lost: Option<Loss> },
}

/// Number of missing records, if known.
type Loss = Option<u64>;

// === impl Kmsg ===

impl Kmsg {
    pub(super) fn open(resume: Option<&Position>) -> Result<Self, KernelLogOpenError> {
        let failed = |input: &str, source| KernelLogOpenError::Io {
            input: input.to_owned(),
            source,
        };
        let boot_id = BootId::current().map_err(|source| failed("the boot id", source))?;
        let sequence = Sequence::behind(resume, boot_id);
        let fd = open_device()?;
        Self::new(fd, boot_id, BootClock::now(), sequence).map_err(|source| failed(KMSG, source))
    }

    fn new(fd: OwnedFd, boot_id: BootId, clock: BootClock, sequence: Sequence) -> io::Result<Self> {
        Ok(Self {
            fd: readiness::readable(fd)?,
            reader: Reader {
                boot_id,
                clock,
                buffer: vec![0; RECORD_SIZE],
                sequence,
                caught_up: false,
            },
        })
    }

    pub(super) async fn next_batch(&mut self, out: &mut Vec<Event>, max: usize) -> io::Result<()> {
        let before = out.len();
        // Without a guard, since the readiness of a descriptor just opened is not known yet.
        self.reader.fill(self.fd.as_fd(), out, max)?;
        while out.len() == before {
            let mut guard = self.fd.readable().await?;
            if self.reader.fill(guard.get_inner().as_fd(), out, max)? == Filled::Drained {
                guard.clear_ready();
            }
        }
        Ok(())
    }

    pub(super) fn position(&self) -> Option<Position> {
        let boot_id = self.reader.boot_id;
        self.reader
            .sequence
            .handled
            .map(|seq| Position::Kmsg { boot_id, seq })
    }
}

/// Succeeds if this process can open and read the device: in some sandboxes, opening works and
/// reading does not.
pub(super) fn probe() -> Result<(), KernelLogOpenError> {
    let fd = open_device()?;
    let mut buffer = vec![0; RECORD_SIZE_MAX];
    match rustix::io::read(&fd, buffer.as_mut_slice()) {
        Ok(1..) | Err(Errno::AGAIN | Errno::PIPE | Errno::INTR) => Ok(()),
        Ok(0) => Err(open_error(io::ErrorKind::UnexpectedEof.into())),
        Err(errno) => Err(open_error(errno.into())),
    }
}

fn open_device() -> Result<OwnedFd, KernelLogOpenError> {
    let metadata = fs::metadata(KMSG).map_err(open_error)?;
    if !metadata.file_type().is_char_device() || device_number(&metadata) != KMSG_NUMBER {
        let other = io::Error::other("another file has this name");
        return Err(KernelLogOpenError::NoKmsg(other));
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open(KMSG, flags, Mode::empty()).map_err(|errno| open_error(errno.into()))
}

fn device_number(metadata: &fs::Metadata) -> (u32, u32) {
    (
        rustix::fs::major(metadata.rdev()),
        rustix::fs::minor(metadata.rdev()),
    )
}

fn open_error(source: io::Error) -> KernelLogOpenError {
    match source.kind() {
        io::ErrorKind::NotFound => KernelLogOpenError::NoKmsg(source),
        io::ErrorKind::PermissionDenied if devkmsg_is_off() => KernelLogOpenError::KmsgOff,
        io::ErrorKind::PermissionDenied => KernelLogOpenError::KmsgPermission(source),
        _ => KernelLogOpenError::Io {
            input: KMSG.to_owned(),
            source,
        },
    }
}

// === impl Reader ===

#[derive(Debug, PartialEq, Eq)]
enum Filled {
    /// The batch is full, and there may be more.
    Full,
    /// No more records for now.
    Drained,
}

impl Reader {
    fn fill(&mut self, fd: BorrowedFd<'_>, out: &mut Vec<Event>, max: usize) -> io::Result<Filled> {
        let full = out.len().saturating_add(max.max(1));
        while out.len() < full {
            match rustix::io::read(fd, self.buffer.as_mut_slice()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.take(length, out),
                Err(Errno::AGAIN) if self.position_is_ahead() => self.rewind(fd)?,
                Err(Errno::AGAIN) => {
                    if !self.caught_up {
                        self.caught_up = true;
                        out.push(Event::CaughtUp);
                    }
                    return Ok(Filled::Drained);
                }
                Err(Errno::PIPE) => self.sequence.overrun = true,
                // The kernel has skipped the record; the gap in the numbers will count it.
                Err(Errno::INVAL) if self.buffer.len() < RECORD_SIZE_MAX => {
                    self.buffer.resize(2 * self.buffer.len(), 0);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(Filled::Full)
    }

    fn take(&mut self, length: usize, out: &mut Vec<Event>) {
        let parsed = parse_kmsg(self.buffer.get(..length).unwrap_or_default());
        let mut record = match parsed {
            Ok(record) => record,
            Err(malformed) => {
                return out.push(Event::Malformed {
                    reason: malformed.to_string(),
                });
            }
        };
        // A raw record always has a number.
        let Novelty::New { lost } = self.sequence.take(record.seq.unwrap_or_default()) else {
            return;
        };
        if let Some(count) = lost {
            out.push(Event::Lost {
                count: count.unwrap_or(0),
                counted: count.is_some(),
            });
        }
        record.wall = record.boot_time_us.map(|us| self.clock.wall_clock(us));
        out.push(Event::Record(KernelLogRecord {
            boot_id: Some(self.boot_id),
            ..record.to_record()
        }));
    }

    /// Returns true if the log ends before the resume position, as in a virtual machine that
    /// was set back to a snapshot: the same boot, but an earlier log.
    fn position_is_ahead(&self) -> bool {
        !self.caught_up
            && self
                .sequence
                .read
                .is_some_and(|read| Some(read) < self.sequence.handled)
    }

    /// Rereads the whole log: duplicates are better than losses.
    fn rewind(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        tracing::warn!(
            position = self.sequence.handled,
            newest = self.sequence.read,
            "position is beyond the end of the kernel log, reading it from the start"
        );
        self.sequence = Sequence::default();
        rustix::fs::seek(fd, SeekFrom::Start(0))?;
        Ok(())
    }
}

// === impl Sequence ===

impl Sequence {
    /// Resumes after `resume` in the boot `boot_id`.
    fn behind(resume: Option<&Position>, boot_id: BootId) -> Self {
        let (handled, from_first) = match resume {
            Some(Position::Kmsg { boot_id: boot, seq }) if *boot == boot_id => (Some(*seq), false),
            Some(Position::Kmsg { .. }) => (None, true),
            _ => (None, false),
        };
        Self {
            handled,
            from_first,
            ..Self::default()
        }
    }

    /// Records that record `seq` was read.
    fn take(&mut self, seq: u64) -> Novelty {
        self.read = Some(seq);
        let overrun = std::mem::take(&mut self.overrun);
        let lost = match self.handled {
            Some(handled) if seq <= handled => return Novelty::Old,
            Some(handled) => Some(seq - handled - 1).filter(|count| *count > 0).map(Some),
            None if self.from_first => (seq > 0).then_some(Some(seq)),
            None => overrun.then_some(None),
        };
        self.handled = Some(seq);
        Novelty::New { lost }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use tokio::time::timeout;

    use super::*;

    const BOOT_ID: &str = "f6ee57d5-7e3f-47b5-b8b4-39ade2595d41";

    /// Returns a socket that preserves message boundaries and so reads like the device, except
    /// for overruns, and its reader.
    fn kmsg(handled: Option<u64>) -> (OwnedFd, Kmsg) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (kernel, reader) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let clock = BootClock::started_at("2026-11-21T11:40:00Z".parse().unwrap());
        (
            kernel,
            Kmsg::new(
                reader,
                BOOT_ID.parse().unwrap(),
                clock,
                Sequence {
                    handled,
                    ..Sequence::default()
                },
            )
            .unwrap(),
        )
    }

    fn log(kernel: &OwnedFd, seq: u64) {
        raw(
            kernel,
            format!("3,{seq},1500000,-;line {seq}\n SUBSYSTEM=pci\n").as_bytes(),
        );
    }

    fn raw(kernel: &OwnedFd, record: &[u8]) {
        assert_eq!(rustix::io::write(kernel, record), Ok(record.len()));
    }

    async fn batch(kmsg: &mut Kmsg, max: usize) -> Vec<String> {
        let mut out = Vec::new();
        within(kmsg.next_batch(&mut out, max)).await.unwrap();
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

    async fn within<T>(future: impl Future<Output = T>) -> T {
        timeout(std::time::Duration::from_secs(10), future)
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn records_carry_their_wall_clock_time() {
        let (kernel, mut kmsg) = kmsg(None);
        log(&kernel, 5);
        let mut out = Vec::new();
        within(kmsg.next_batch(&mut out, 1)).await.unwrap();
        let [Event::Record(record)] = out.as_slice() else {
            panic!("{out:?}")
        };
        assert_eq!(record.wall, Some("2026-11-21T11:40:01.5Z".parse().unwrap()));
        assert_eq!(
            (record.seq, record.boot_time_us),
            (Some(5), Some(1_500_000))
        );
        assert_eq!((record.facility, record.level), (Some(0), Some(3)));
        assert_eq!(record.text, "line 5");
    }

    #[tokio::test]
    async fn an_empty_backlog_is_caught_up_at_once() {
        let (_kernel, mut kmsg) = kmsg(None);
        assert_eq!(batch(&mut kmsg, 10).await, ["CaughtUp"]);
        assert_eq!(kmsg.position(), None);
    }

    #[tokio::test]
    async fn batches_end_where_asked_and_the_backlog_ends_once() {
        let (kernel, mut kmsg) = kmsg(None);
        (0..3).for_each(|seq| log(&kernel, seq));
        assert_eq!(batch(&mut kmsg, 2).await, ["line 0", "line 1"]);
        assert_eq!(batch(&mut kmsg, 0).await, ["line 2"]);
        assert_eq!(batch(&mut kmsg, 2).await, ["CaughtUp"]);
        log(&kernel, 3);
        assert_eq!(batch(&mut kmsg, 2).await, ["line 3"]);
    }

    #[tokio::test]
    async fn a_waiting_reader_is_woken_and_a_cancelled_one_takes_nothing() {
        let (kernel, mut kmsg) = kmsg(None);
        assert_eq!(batch(&mut kmsg, 10).await, ["CaughtUp"]);
        for seq in 0..50 {
            let mut out = Vec::new();
            {
                let mut waiting = std::pin::pin!(kmsg.next_batch(&mut out, 10));
                tokio::select! {
                    biased;
                    result = &mut waiting => panic!("nothing was logged: {result:?}"),
                    () = tokio::task::yield_now() => {}
                }
                log(&kernel, seq);
                if seq % 2 == 0 {
                    within(waiting).await.unwrap();
                }
            }
            if seq % 2 == 1 {
                assert_eq!(out, []);
                within(kmsg.next_batch(&mut out, 10)).await.unwrap();
            }
            assert_eq!(
                out.into_iter().map(shown).collect::<Vec<_>>(),
                [format!("line {seq}")]
            );
        }
    }

    #[tokio::test]
    async fn resuming_skips_what_was_handled_and_counts_what_is_gone() {
        let cases: [(u64, &[&str]); 4] = [
            (7, &["lost 2 true", "line 10", "line 11", "CaughtUp"]),
            (9, &["line 10", "line 11", "CaughtUp"]),
            (10, &["line 11", "CaughtUp"]),
            (11, &["CaughtUp"]),
        ];
        for (handled, expected) in cases {
            let (kernel, mut kmsg) = kmsg(Some(handled));
            log(&kernel, 10);
            log(&kernel, 11);
            assert_eq!(
                batch(&mut kmsg, 10).await,
                expected,
                "resumed after {handled}"
            );
            let boot_id = BOOT_ID.parse().unwrap();
            assert_eq!(kmsg.position(), Some(Position::Kmsg { boot_id, seq: 11 }));
        }
    }

    #[tokio::test]
    async fn malformed_records_are_skipped_and_told() {
        let (kernel, mut kmsg) = kmsg(None);
        raw(&kernel, b"nonsense");
        log(&kernel, 4);
        let expected =
            "malformed: the priority in the header of the record is not a decimal number";
        assert_eq!(batch(&mut kmsg, 10).await, [expected, "line 4", "CaughtUp"]);
    }

    #[tokio::test]
    async fn a_device_that_is_gone_is_an_error() {
        let (kernel, mut kmsg) = kmsg(None);
        log(&kernel, 0);
        drop(kernel);
        let mut out = Vec::new();
        let error = within(kmsg.next_batch(&mut out, 10)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(out.len(), 1, "what was read before is kept");
    }

    #[test]
    fn losses() {
        let new = |lost| Novelty::New { lost };
        let mut sequence = Sequence::default();
        // Records overwritten before the first start do not count as lost.
        assert_eq!(sequence.take(100), new(None));
        assert_eq!(sequence.take(101), new(None));
        assert_eq!(sequence.take(105), new(Some(Some(3))));
        sequence.overrun = true;
        assert_eq!(sequence.take(200), new(Some(Some(94))));
        assert_eq!(sequence.take(201), new(None));
        assert_eq!(sequence.take(201), Novelty::Old);

        let mut overtaken_before_the_first = Sequence {
            overrun: true,
            ..Sequence::default()
        };
        assert_eq!(overtaken_before_the_first.take(9), new(Some(None)));
        assert_eq!(overtaken_before_the_first.take(10), new(None));
    }

    #[test]
    fn after_a_reboot_the_log_is_wanted_from_its_first_record_on() {
        let new = |lost| Novelty::New { lost };
        let boot_id: BootId = BOOT_ID.parse().unwrap();
        let other = Position::Kmsg {
            boot_id: BootId::from_bytes([7; 16]),
            seq: 500,
        };
        let mut sequence = Sequence::behind(Some(&other), boot_id);
        assert_eq!(sequence.take(40), new(Some(Some(40))));
        assert_eq!(sequence.take(41), new(None));
        let mut whole = Sequence::behind(Some(&other), boot_id);
        assert_eq!(whole.take(0), new(None));
        let mut first_start = Sequence::behind(None, boot_id);
        assert_eq!(first_start.take(40), new(None));
    }

    #[test]
    fn another_device_is_not_the_kernel_log() {
        let null = fs::metadata("/dev/null").unwrap();
        assert_eq!(device_number(&null), (1, 3));
        assert_ne!(device_number(&null), KMSG_NUMBER);
    }

    #[test]
    fn refusals() {
        let error = |kind: io::ErrorKind| open_error(kind.into());
        assert!(matches!(
            error(io::ErrorKind::NotFound),
            KernelLogOpenError::NoKmsg(_)
        ));
        assert!(matches!(
            error(io::ErrorKind::PermissionDenied),
            KernelLogOpenError::KmsgPermission(_) | KernelLogOpenError::KmsgOff,
        ));
        assert!(matches!(
            error(io::ErrorKind::OutOfMemory),
            KernelLogOpenError::Io { .. }
        ));
    }
}
