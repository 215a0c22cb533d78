//! Follows a file by name through growth, truncation and rotation.
//!
//! inotify only wakes the reader; each time, the state is read from the file system, so a lost
//! or merged notification does no harm. The open file is read to its end before the file that
//! now has its name is started, and not before the new file holds something: until then a
//! logger may still write to the old one. After more than one rotation, the files between are
//! read first (`rotated.rs`). Without inotify (network file systems, a limit reached) a check
//! each second finds the change.
//!
//! A file that was truncated and rewritten is detected by its length or, if it has grown past
//! its former length, by the bytes before the offset.

use std::{
    fs::{self, File, Metadata},
    hash::Hasher as _,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use memchr::memrchr;

use rustix::fs::{Mode, OFlags, inotify::WatchFlags};
use tokio::time::timeout;

use siphasher::sip::SipHasher24;

use super::{
    Position,
    file_id::{FileId, directory_of},
    line_buffer::LINE_MAX,
    rotated::{NextFile, next},
    watch::InotifyWatch,
};

/// Number of last bytes that are kept to recognise a file. Lines of a log differ in the time at
/// their start, and are mostly shorter than this.
const TAIL: usize = 256;
/// Longest wait for a notification before the file is checked all the same.
const RECHECK: Duration = Duration::from_secs(1);

/// Result of one read of a followed file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReadStep {
    /// Number of bytes read.
    Read(usize),
    /// The next bytes are the start of this file, which was just opened or was truncated.
    Start {
        file: FileId,
        /// True if some content before it was lost.
        lost: bool,
    },
    /// There is nothing to read now.
    Drained,
}

/// Place where reading starts.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StartingPlace {
    /// Start of the file that has the name.
    Start,
    /// Place after the requested position.
    Resumed,
    /// Start of the file, since the requested position is in no file that still exists.
    PositionGone,
}

#[derive(Debug)]
pub(super) struct Follow {
    path: PathBuf,
    current: Option<Current>,
    watch: Option<InotifyWatch>,
    recheck: Duration,
}

#[derive(Debug)]
struct Current {
    file: File,
    id: FileId,
    /// Bytes read so far, and the last of them.
    offset: u64,
    tail: Vec<u8>,
    watch: Option<i32>,
}

// === impl Follow ===

impl Follow {
    /// Follows `path`, whose directory must exist.
    pub(super) fn open(
        path: &Path,
        resume: Option<&Position>,
    ) -> io::Result<(Self, StartingPlace)> {
        let directory = directory_of(path);
        fs::read_dir(directory)?;
        let names = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR;
        let watch = InotifyWatch::new(directory, names)
            .inspect_err(|error| {
                tracing::warn!(
                    path = %path.display(), %error,
                    "no file notifications; checking the file once a second"
                );
            })
            .ok();
        let mut follow = Self {
            path: path.to_owned(),
            current: None,
            watch,
            recheck: RECHECK,
        };

        let begin = match resume {
            Some(&Position::File {
                dev,
                ino,
                offset,
                line,
            }) => {
                let id = FileId { dev, ino };
                let resume = |file| follow.resume(file, id, offset, line);
                match find(path, id)?.map(resume).transpose()? {
                    Some(true) => StartingPlace::Resumed,
                    _ => StartingPlace::PositionGone,
                }
            }
            _ => StartingPlace::Start,
        };
        Ok((follow, begin))
    }

    /// Resumes in `file` if `offset` is still the end of a line there, and of the line with the
    /// recorded hash.
    fn resume(
        &mut self,
        mut file: File,
        id: FileId,
        offset: u64,
        line: Option<u64>,
    ) -> io::Result<bool> {
        // Inode numbers are reused, and a truncated file may grow again.
        let Some(before) = read_before(&file, offset, LINE_MAX + 2)? else {
            return Ok(false);
        };
        if let Some((newline, rest)) = before.split_last() {
            let begin = match memrchr(b'\n', rest) {
                Some(end) => end + 1,
                None => 0,
            };
            let whole = begin > 0 || before.len() as u64 == offset;
            let last = rest.get(begin..).unwrap_or_default();
            let is_it = line.is_none_or(|line| !whole || hash(last) == line);
            if *newline != b'\n' || !is_it {
                return Ok(false);
            }
        }
        let watch = self.watch.as_ref().and_then(|watch| watch.add_file(&file));
        file.seek(SeekFrom::Start(offset))?;
        let mut current = Current {
            file,
            id,
            offset,
            tail: Vec::new(),
            watch,
        };
        current.remember(&before);
        self.current = Some(current);
        Ok(true)
    }

    /// Reads into `space`, or handles the end of the file.
    pub(super) fn read(&mut self, space: &mut [u8]) -> io::Result<ReadStep> {
        let Some(current) = &mut self.current else {
            let path = self.path.clone();
            return self.begin(&path, None, false);
        };
        if let Some(step) = current.step(space)? {
            return Ok(step);
        }

        let named = unless_missing(fs::metadata(&self.path))?;
        let named_id = named.as_ref().map(FileId::of);
        if named_id == Some(current.id) {
            return Ok(ReadStep::Drained);
        }
        let NextFile { rotated, lost } = next(&self.path, current.id)?;
        let (path, id) = match (rotated, named) {
            (Some((path, id)), _) => (path, Some(id)),
            (None, None) => return Ok(ReadStep::Drained),
            (None, Some(named)) => {
                if named.len() == 0 {
                    if let Some(watch) = &self.watch {
                        watch.add(&self.path, WatchFlags::MODIFY);
                    }
                    // Check once more, now that a notification would report a change.
                    if unless_missing(fs::metadata(&self.path))?
                        .is_none_or(|named| named.len() == 0)
                    {
                        return Ok(ReadStep::Drained);
                    }
                }
                (self.path.clone(), named_id)
            }
        };
        // The logger has moved to the new file, so the old one will not grow.
        match current.step(space)? {
            Some(step) => Ok(step),
            None => self.begin(&path, id, lost),
        }
    }

    /// Starts to read the file at `path`. If it is not `expected`, there was another rotation,
    /// which the next check handles.
    fn begin(&mut self, path: &Path, expected: Option<FileId>, lost: bool) -> io::Result<ReadStep> {
        let Some(file) = unless_missing(open_file(path))? else {
            return Ok(ReadStep::Drained);
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it was replaced by something other than a regular file",
            ));
        }
        let id = FileId::of(&metadata);
        if expected.is_some_and(|expected| expected != id) {
            return Ok(ReadStep::Drained);
        }
        // Before the first read, so that no change is missed.
        let watch = self.watch.as_ref().and_then(|watch| watch.add_file(&file));
        let previous = self.current.replace(Current {
            file,
            id,
            offset: 0,
            tail: Vec::new(),
            watch,
        });
        if let (
            Some(watch),
            Some(Current {
                watch: Some(descriptor),
                ..
            }),
        ) = (&self.watch, previous)
        {
            watch.remove(descriptor);
        }
        Ok(ReadStep::Start { file: id, lost })
    }

    /// Returns the followed path if no file has that name and none is open.
    pub(super) fn missing(&self) -> Option<&Path> {
        let gone =
            || fs::metadata(&self.path).is_err_and(|it| it.kind() == io::ErrorKind::NotFound);
        (self.current.is_none() && gone()).then_some(&self.path)
    }

    /// Waits until a check may find something. Cancel-safe.
    pub(super) async fn changed(&self) -> io::Result<()> {
        let Some(watch) = &self.watch else {
            tokio::time::sleep(self.recheck).await;
            return Ok(());
        };
        timeout(self.recheck, watch.changed())
            .await
            .unwrap_or(Ok(()))
    }

    /// Sets the longest wait, and enables or disables inotify, for tests.
    #[cfg(test)]
    pub(super) fn rely_on(&mut self, recheck: Duration, notifications: bool) {
        self.recheck = recheck;
        if !notifications {
            self.watch = None;
        }
    }
}

/// Opens a file without blocking, even if a pipe has replaced it.
pub(super) fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

fn unless_missing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens the file `id`: at `path`, or under the name that rotation gave it in the same
/// directory.
fn find(path: &Path, id: FileId) -> io::Result<Option<File>> {
    let is_it = |metadata: &Metadata| metadata.is_file() && FileId::of(metadata) == id;
    if unless_missing(fs::metadata(path))?
        .as_ref()
        .is_some_and(is_it)
    {
        return unless_missing(open_file(path));
    }
    for entry in fs::read_dir(directory_of(path))? {
        let entry = entry?;
        // A file that vanishes meanwhile counts as missing.
        if entry.metadata().as_ref().is_ok_and(is_it) {
            return unless_missing(open_file(&entry.path()));
        }
    }
    Ok(None)
}

/// Returns the last bytes before `offset`, at most `most`; `None` if the file is too short.
fn read_before(file: &File, offset: u64, most: usize) -> io::Result<Option<Vec<u8>>> {
    let length = usize::try_from(offset).unwrap_or(most).min(most);
    let mut bytes = vec![0; length];
    match file.read_exact_at(&mut bytes, offset - length as u64) {
        Ok(()) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns a hash to recognise a line by, the same in every version of this program. For a
/// truncated line, it covers the part that is delivered.
pub(super) fn hash(line: &[u8]) -> u64 {
    let mut hasher = SipHasher24::new();
    hasher.write(line.get(..LINE_MAX).unwrap_or(line));
    hasher.finish()
}

// === impl Current ===

impl Current {
    /// Reads more; `None` at the end. If the file was rewritten, its start comes next.
    fn step(&mut self, space: &mut [u8]) -> io::Result<Option<ReadStep>> {
        let length = self.read(space)?;
        // Checked after the read, so that a truncation at any time is noticed.
        if !self.still_matches()? {
            // If the file is shorter now, all of its former content was read, as far as can be
            // known.
            let lost = self.file.metadata()?.len() >= self.offset;
            self.file.rewind()?;
            self.offset = 0;
            self.tail.clear();
            let file = self.id;
            return Ok(Some(ReadStep::Start { file, lost }));
        }
        if length == 0 {
            return Ok(None);
        }
        self.offset += length as u64;
        self.remember(space.get(..length).unwrap_or_default());
        Ok(Some(ReadStep::Read(length)))
    }

    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.file.read(space) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }

    /// Returns true if the line that was read last still stands before the offset.
    fn still_matches(&mut self) -> io::Result<bool> {
        let found = read_before(&self.file, self.offset, self.tail.len())?;
        let Some(found) = found else {
            return Ok(false);
        };
        // A logger that goes on at its old offset in a truncated file leaves a hole of zeroes.
        if found.iter().all(|byte| *byte == 0) {
            self.tail = found;
            return Ok(true);
        }
        Ok(found == self.tail)
    }

    /// Keeps the last of the bytes read, to recognise the file by.
    fn remember(&mut self, read: &[u8]) {
        let read = read.get(read.len().saturating_sub(TAIL)..).unwrap_or(read);
        let kept = TAIL - read.len();
        let dropped = self.tail.len().saturating_sub(kept);
        self.tail.drain(..dropped);
        self.tail.extend_from_slice(read);
    }
}
