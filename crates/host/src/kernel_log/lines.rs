//! Reads kernel log as lines of text, from a file or standard input.
//!
//! The lines may have any format that [`super::parse_line`] supports, also changing from line
//! to line. Empty lines are skipped, and so are the `KEY=value` lines of raw records. A line
//! counts once its newline has arrived, or at the end of the input.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileTypeExt,
    },
    path::Path,
};

use jiff::{Timestamp, tz::TimeZone};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};
use tokio::io::unix::AsyncFd;

use super::{
    Event, KernelLogOpenError, KernelLogRecord, Position,
    file_id::directory_of,
    follow::{Follow, ReadStep, StartingPlace, hash, open_file},
    line::{LineParser, unwrapped},
    line_buffer::{LINE_MAX, LineBuffer, RawLine},
};
use crate::readiness;

/// Most reads without yielding to other tasks, also if no line ever ends.
const MAX_READS: usize = 64;

/// A source of lines.
#[derive(Debug)]
pub(super) struct Lines {
    input: LineInput,
    buffer: LineBuffer,
    output: Output,
}

#[derive(Debug)]
enum LineInput {
    Followed(Follow),
    /// A file, or another input on which reads never block, read to its end.
    Once(OwnedFd),
    /// A pipe, terminal or socket, read to its end.
    Stream(AsyncFd<OwnedFd>),
}

/// Converts lines to events.
#[derive(Debug)]
struct Output {
    parser: LineParser,
    /// True if the last line was a raw record, which its `KEY=value` lines follow.
    after_raw_record: bool,
    /// End of the last delivered line, for input that can be resumed.
    place: Option<Position>,
    /// Number of lines delivered or skipped.
    lines: u64,
    /// True if records are missing before the next line.
    lost: bool,
    caught_up: bool,
    ended: bool,
}

// === impl Lines ===

impl Lines {
    /// Follows a file by name; a pipe or terminal of that name is read to its end.
    pub(super) fn follow(
        path: &Path,
        resume: Option<&Position>,
    ) -> Result<Self, KernelLogOpenError> {
        let failed = |source| path_error(path, source);
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                return Err(KernelLogOpenError::Directory {
                    path: path.to_owned(),
                });
            }
            Ok(metadata) if !metadata.is_file() => return Self::read_once(path),
            // Report an error now rather than at the first read.
            Ok(_) => drop(open_file(path).map_err(failed)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let (follow, begin) =
            Follow::open(path, resume).map_err(|source| path_error(directory_of(path), source))?;
        let mut lines = Self::new(LineInput::Followed(follow));
        lines.output.lost = begin == StartingPlace::PositionGone;
        if begin == StartingPlace::Resumed {
            lines.output.place = resume.cloned();
        }
        Ok(lines)
    }

    /// Reads a file once, from its start to its end.
    pub(super) fn read_once(path: &Path) -> Result<Self, KernelLogOpenError> {
        let failed = |source| path_error(path, source);
        let file = open_file(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if metadata.is_dir() {
            return Err(KernelLogOpenError::Directory {
                path: path.to_owned(),
            });
        }
        Self::to_the_end(file).map_err(failed)
    }

    /// Reads standard input to its end.
    pub(super) fn stdin() -> Result<Self, KernelLogOpenError> {
        // A duplicate: the process's descriptor stays open, and its mode unchanged.
        io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .and_then(|fd| Self::to_the_end(fd.into()))
            .map_err(|source| KernelLogOpenError::Io {
                input: "standard input".to_owned(),
                source,
            })
    }

    fn to_the_end(file: File) -> io::Result<Self> {
        let file_type = file.metadata()?.file_type();
        let may_wait = file_type.is_fifo() || file_type.is_socket() || file_type.is_char_device();
        let fd = OwnedFd::from(file);
        if !may_wait {
            return Ok(Self::new(LineInput::Once(fd)));
        }
        let own = fd.try_clone()?;
        match readiness::readable(own) {
            Ok(stream) => Ok(Self::new(LineInput::Stream(stream))),
            // epoll refuses devices on which reads never block, such as /dev/null.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Ok(Self::new(LineInput::Once(fd)))
            }
            Err(error) => Err(error),
        }
    }

    fn new(input: LineInput) -> Self {
        Self {
            input,
            buffer: LineBuffer::new(),
            output: Output {
                parser: LineParser::new(TimeZone::system(), Timestamp::now()),
                after_raw_record: false,
                lines: 0,
                place: None,
                lost: false,
                caught_up: false,
                ended: false,
            },
        }
    }

    pub(super) async fn next_batch(&mut self, out: &mut Vec<Event>, max: usize) -> io::Result<()> {
        let before = out.len();
        loop {
            self.fill(out, max.max(1))?;
            if out.len() > before {
                return Ok(());
            }
            // An input without line ends never makes this task wait, so it yields to others.
            tokio::task::yield_now().await;
            self.wait().await?;
        }
    }

    pub(super) fn position(&self) -> Option<Position> {
        self.output.place.clone()
    }

    /// Returns the path of the followed file if it does not exist.
    pub(super) fn missing(&self) -> Option<&Path> {
        match &self.input {
            LineInput::Followed(follow) => follow.missing(),
            LineInput::Once(_) | LineInput::Stream(_) => None,
        }
    }

    /// Delivers what is available without waiting, in up to [`MAX_READS`] reads.
    fn fill(&mut self, out: &mut Vec<Event>, max: usize) -> io::Result<()> {
        let Self {
            input,
            buffer,
            output,
        } = self;
        let full = out.len().saturating_add(max);
        output.parser.set_now(Timestamp::now());
        output.begin(out);
        if output.ended {
            out.push(Event::End);
            return Ok(());
        }
        for _ in 0..MAX_READS {
            while out.len() < full {
                let Some(line) = buffer.next_line() else {
                    break;
                };
                output.deliver(&line, out);
            }
            if out.len() >= full {
                return Ok(());
            }
            match input.read(buffer.space())? {
                Some(ReadStep::Read(length)) => buffer.filled(length),
                Some(ReadStep::Start { file, lost }) => {
                    if let Some(line) = buffer.rest() {
                        output.deliver(&line, out);
                    }
                    output.lost = lost;
                    output.begin(out);
                    output.place = Some(Position::File {
                        dev: file.dev,
                        ino: file.ino,
                        offset: 0,
                        line: None,
                    });
                }
                Some(ReadStep::Drained) => {
                    output.caught_up(out);
                    return Ok(());
                }
                None => {
                    if let Some(line) = buffer.rest() {
                        output.deliver(&line, out);
                    }
                    output.end(out);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Waits until there may be more. Holds nothing while waiting.
    async fn wait(&self) -> io::Result<()> {
        match &self.input {
            LineInput::Followed(follow) => follow.changed().await,
            LineInput::Once(_) => Ok(()),
            LineInput::Stream(stream) => loop {
                let mut guard = stream.readable().await?;
                if is_readable(stream.get_ref())? {
                    guard.retain_ready();
                    return Ok(());
                }
                guard.clear_ready();
            },
        }
    }

    /// Returns the followed file, for tests.
    #[cfg(test)]
    fn followed(&mut self) -> &mut Follow {
        match &mut self.input {
            LineInput::Followed(follow) => follow,
            other => panic!("not followed: {other:?}"),
        }
    }
}

fn path_error(path: &Path, source: io::Error) -> KernelLogOpenError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => KernelLogOpenError::NotFound { path, source },
        io::ErrorKind::PermissionDenied => KernelLogOpenError::Permission { path, source },
        _ => KernelLogOpenError::Io {
            input: path.display().to_string(),
            source,
        },
    }
}

/// Returns true if a read would not block. The descriptor may be shared with other processes,
/// so it is polled rather than made non-blocking.
fn is_readable(fd: &OwnedFd) -> io::Result<bool> {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut polled = [PollFd::new(fd, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, Some(&now)))?;
    Ok(ready > 0)
}

// === impl LineInput ===

impl LineInput {
    /// Reads without blocking; `None` at the end.
    fn read(&mut self, space: &mut [u8]) -> io::Result<Option<ReadStep>> {
        let fd = match self {
            Self::Followed(follow) => return follow.read(space).map(Some),
            Self::Once(fd) => fd,
            Self::Stream(stream) if is_readable(stream.get_ref())? => stream.get_mut(),
            Self::Stream(_) => return Ok(Some(ReadStep::Drained)),
        };
        match rustix::io::retry_on_intr(|| rustix::io::read(&*fd, &mut *space)) {
            Ok(0) => Ok(None),
            Ok(length) => Ok(Some(ReadStep::Read(length))),
            Err(Errno::AGAIN) => Ok(Some(ReadStep::Drained)),
            Err(errno) => Err(errno.into()),
        }
    }
}

// === impl Output ===

impl Output {
    fn begin(&mut self, out: &mut Vec<Event>) {
        if std::mem::take(&mut self.lost) {
            out.push(Event::Lost {
                count: 0,
                counted: false,
            });
        }
    }

    fn deliver(&mut self, line: &RawLine<'_>, out: &mut Vec<Event>) {
        self.lines += 1;
        if let Some(Position::File {
            offset, line: last, ..
        }) = &mut self.place
        {
            *offset += line.length;
            *last = Some(hash(line.bytes));
        }
        if line.bytes.trim_ascii().is_empty()
            || (self.after_raw_record && is_record_property(line.bytes))
        {
            return;
        }
        let plain = unwrapped(line.bytes);
        let record = self.parser.parse(&plain);
        self.after_raw_record = record.seq.is_some();
        out.push(Event::Record(KernelLogRecord {
            line: self.place.is_none().then_some(self.lines),
            place: self.place.clone(),
            ..record.to_record()
        }));
        if line.cut {
            out.push(Event::Malformed {
                reason: format!(
                    "a line of {} bytes was cut: lines may have {LINE_MAX}",
                    line.length
                ),
            });
        }
    }

    fn caught_up(&mut self, out: &mut Vec<Event>) {
        if !self.caught_up {
            self.caught_up = true;
            out.push(Event::CaughtUp);
        }
    }

    fn end(&mut self, out: &mut Vec<Event>) {
        self.caught_up(out);
        self.ended = true;
        out.push(Event::End);
    }
}

/// Returns true for ` KEY=value`, a line that follows the text of a raw record.
fn is_record_property(line: &[u8]) -> bool {
    let Some((key, _)) = line
        .strip_prefix(b" ")
        .and_then(|pair| Some(pair.split_at(memchr::memchr(b'=', pair)?)))
    else {
        return false;
    };
    !key.is_empty()
        && key
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

#[cfg(test)]
mod tests;
