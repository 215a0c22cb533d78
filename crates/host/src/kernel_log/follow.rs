//! A file that is followed by its name, through growth, truncation and rotation.
//!
//! inotify only wakes; what has happened is read from the file system each time, so a lost or
//! merged notification does no harm. The open file is read to its end before another one that has
//! its name now is begun, and not before that one holds something: until then a logger may still
//! write into the old one. Where inotify says nothing (network file systems, a limit reached) a
//! look each second finds the change.
//!
//! Not noticed: a file cut to nothing and grown past its former length between two looks.

use std::{
    fs::{self, File, Metadata},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::fs::{Mode, OFlags, inotify::WatchFlags};
use tokio::time::timeout;

use super::{Position, watch::Watch};

/// How long to wait for a notification before looking all the same.
const RECHECK: Duration = Duration::from_secs(1);

/// A file, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    pub(super) dev: u64,
    pub(super) ino: u64,
}

/// What reading a followed file has led to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// So many bytes were read.
    Read(usize),
    /// What comes next is the start of this file: it was just opened, or was truncated.
    Start(FileId),
    /// There is nothing more for now.
    Drained,
}

/// Where a followed file begins.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Begin {
    /// At the start of whatever has the name.
    Start,
    /// Behind the position that was asked for.
    Resumed,
    /// At the start, since the position that was asked for is in no file that is still here.
    PositionGone,
}

#[derive(Debug)]
pub(super) struct Follow {
    path: PathBuf,
    current: Option<Current>,
    watch: Option<Watch>,
    recheck: Duration,
}

#[derive(Debug)]
struct Current {
    file: File,
    id: FileId,
    /// Bytes read so far.
    offset: u64,
    watch: Option<i32>,
}

// === impl Follow ===

impl Follow {
    /// Follows `path`, whose directory must exist.
    pub(super) fn open(path: &Path, resume: Option<&Position>) -> io::Result<(Self, Begin)> {
        let directory = directory_of(path);
        fs::read_dir(directory)?;
        let names = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR;
        let watch = Watch::new(directory, names)
            .inspect_err(|error| {
                tracing::warn!(
                    path = %path.display(), %error,
                    "no file notifications, looking once a second"
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
            Some(&Position::File { dev, ino, offset }) => {
                let id = FileId { dev, ino };
                let found = find(path, id)?;
                let resumed = found
                    .map(|file| follow.resume(file, id, offset))
                    .transpose()?;
                if resumed == Some(true) {
                    Begin::Resumed
                } else {
                    Begin::PositionGone
                }
            }
            _ => Begin::Start,
        };
        Ok((follow, begin))
    }

    /// Goes on in `file` if `offset` still is the end of a line in it.
    fn resume(&mut self, mut file: File, id: FileId, offset: u64) -> io::Result<bool> {
        if let Some(before) = offset.checked_sub(1) {
            // Inode numbers are used again, and a truncated file grows again.
            let mut newline = [0];
            let length = file.read_at(&mut newline, before)?;
            if length == 0 || newline != *b"\n" {
                return Ok(false);
            }
        }
        let watch = self.watch.as_ref().and_then(|watch| watch.add_file(&file));
        file.seek(SeekFrom::Start(offset))?;
        self.current = Some(Current {
            file,
            id,
            offset,
            watch,
        });
        Ok(true)
    }

    /// Reads into `space`, or finds out what to do at the end of the file.
    pub(super) fn read(&mut self, space: &mut [u8]) -> io::Result<Step> {
        let Some(current) = &mut self.current else {
            return self.open_path();
        };
        let length = current.read(space)?;
        if length > 0 {
            return Ok(Step::Read(length));
        }

        let Some(named) = existing(fs::metadata(&self.path))? else {
            return Ok(Step::Drained);
        };
        if FileId::of(&named) == current.id {
            if named.len() >= current.offset {
                return Ok(Step::Drained);
            }
            current.file.rewind()?;
            current.offset = 0;
            return Ok(Step::Start(current.id));
        }

        if named.len() == 0 {
            if let Some(watch) = &self.watch {
                watch.add(&self.path, WatchFlags::MODIFY);
            }
            // Once more, now that a change would be told.
            if existing(fs::metadata(&self.path))?.is_none_or(|named| named.len() == 0) {
                return Ok(Step::Drained);
            }
        }
        // The logger has gone on to the new file: the old one gets no more than what it has now.
        let length = current.read(space)?;
        if length > 0 {
            Ok(Step::Read(length))
        } else {
            self.open_path()
        }
    }

    fn open_path(&mut self) -> io::Result<Step> {
        let Some(file) = existing(open_file(&self.path))? else {
            return Ok(Step::Drained);
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it has been replaced by something that is no regular file",
            ));
        }
        let id = FileId::of(&metadata);
        // Before the first read, so that no change goes untold.
        let watch = self.watch.as_ref().and_then(|watch| watch.add_file(&file));
        let previous = self.current.replace(Current {
            file,
            id,
            offset: 0,
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
        Ok(Step::Start(id))
    }

    /// The path that is followed, where no file has that name and none is open.
    pub(super) fn missing(&self) -> Option<&Path> {
        let gone =
            || fs::metadata(&self.path).is_err_and(|it| it.kind() == io::ErrorKind::NotFound);
        (self.current.is_none() && gone()).then_some(&self.path)
    }

    /// The file that is read now, and how many bytes of it were read.
    pub(super) fn place(&self) -> Option<(FileId, u64)> {
        self.current
            .as_ref()
            .map(|current| (current.id, current.offset))
    }

    /// Waits until it is worth looking again. Cancel-safe.
    pub(super) async fn changed(&self) -> io::Result<()> {
        let Some(watch) = &self.watch else {
            tokio::time::sleep(self.recheck).await;
            return Ok(());
        };
        timeout(self.recheck, watch.changed())
            .await
            .unwrap_or(Ok(()))
    }

    /// For tests: how long to wait at most, and whether inotify is there.
    #[cfg(test)]
    pub(super) fn rely_on(&mut self, recheck: Duration, notifications: bool) {
        self.recheck = recheck;
        if !notifications {
            self.watch = None;
        }
    }
}

/// Opens without ever waiting, whatever may have taken the file's place.
pub(super) fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// The directory that holds `path`.
pub(super) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

fn existing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens the file `id`: at `path`, or where rotation has moved it within the directory.
fn find(path: &Path, id: FileId) -> io::Result<Option<File>> {
    let is_it = |metadata: &Metadata| metadata.is_file() && FileId::of(metadata) == id;
    if existing(fs::metadata(path))?.as_ref().is_some_and(is_it) {
        return existing(open_file(path));
    }
    for entry in fs::read_dir(directory_of(path))? {
        let entry = entry?;
        // A file that vanishes meanwhile is not the one, or gone.
        if entry.metadata().as_ref().is_ok_and(is_it) {
            return existing(open_file(&entry.path()));
        }
    }
    Ok(None)
}

// === impl FileId ===

impl FileId {
    fn of(metadata: &Metadata) -> Self {
        Self {
            dev: metadata.dev(),
            ino: metadata.ino(),
        }
    }
}

// === impl Current ===

impl Current {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.file.read(space) {
                Ok(length) => {
                    self.offset += length as u64;
                    return Ok(length);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
