//! Kernel log as lines of text, from a file or standard input.
//!
//! The lines may have any form that [`super::parse_line`] knows, also changing from line to line.
//! Empty lines are passed over, and so are the `KEY=value` lines of raw records. A line counts once
//! its newline has come, or when no more can come.

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
    Event, OpenError, Position, Record,
    file_id::directory_of,
    follow::{Follow, ReadStep, StartingPlace, hash, open_file},
    line::{LineParser, unwrapped},
    line_buffer::{LINE_MAX, LineBuffer, RawLine},
};
use crate::readiness;

/// Most reads in one go: after so many others get their turn, also where no line ever ends.
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
    /// A file, or something else that never makes us wait, to its end.
    Once(OwnedFd),
    /// A pipe, terminal or socket, to its end.
    Stream(AsyncFd<OwnedFd>),
}

/// The events that were made of the lines so far.
#[derive(Debug)]
struct Output {
    parser: LineParser,
    /// True if the last line was a raw record, after which its `KEY=value` lines come.
    after_raw_record: bool,
    /// The end of the last line delivered, for input that can be resumed.
    place: Option<Position>,
    /// Lines delivered or passed over.
    lines: u64,
    /// True if records are missing before the next line.
    lost: bool,
    caught_up: bool,
    ended: bool,
}

// === impl Lines ===

impl Lines {
    /// Follows a file by its name; a pipe or terminal of that name is read to its end.
    pub(super) fn follow(path: &Path, resume: Option<&Position>) -> Result<Self, OpenError> {
        let failed = |source| path_error(path, source);
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                return Err(OpenError::Directory {
                    path: path.to_owned(),
                });
            }
            Ok(metadata) if !metadata.is_file() => return Self::read_once(path),
            // Told now rather than with the first read.
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
    pub(super) fn read_once(path: &Path) -> Result<Self, OpenError> {
        let failed = |source| path_error(path, source);
        let file = open_file(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if metadata.is_dir() {
            return Err(OpenError::Directory {
                path: path.to_owned(),
            });
        }
        Self::to_the_end(file).map_err(failed)
    }

    /// Reads standard input to its end.
    pub(super) fn stdin() -> Result<Self, OpenError> {
        // A descriptor of our own: the one of the process stays open, and in the mode it has.
        io::stdin()
            .as_fd()
            .try_clone_to_owned()
            .and_then(|fd| Self::to_the_end(fd.into()))
            .map_err(|source| OpenError::Io {
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
            // epoll refuses devices that never make anyone wait, such as /dev/null.
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
            // What never ends a line never makes anyone wait either, and others want their turn.
            tokio::task::yield_now().await;
            self.wait().await?;
        }
    }

    pub(super) fn position(&self) -> Option<Position> {
        self.output.place.clone()
    }

    /// Returns the path of the file that is followed and is not there.
    pub(super) fn missing(&self) -> Option<&Path> {
        match &self.input {
            LineInput::Followed(follow) => follow.missing(),
            LineInput::Once(_) | LineInput::Stream(_) => None,
        }
    }

    /// Delivers what is there, without waiting: up to [`MAX_READS`] reads of it.
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

    /// Waits until there may be more. Holds nothing while it waits.
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

fn path_error(path: &Path, source: io::Error) -> OpenError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => OpenError::NotFound { path, source },
        io::ErrorKind::PermissionDenied => OpenError::Permission { path, source },
        _ => OpenError::Io {
            input: path.display().to_string(),
            source,
        },
    }
}

/// Returns whether a read would return at once. The descriptor may be shared with other processes,
/// so it is not made non-blocking; it is asked instead.
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
    /// Reads without waiting; `None` at the end.
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
        out.push(Event::Record(Record {
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

/// Returns whether the line is ` KEY=value`, as it follows the text of a raw record.
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
