//! Reads the kernel log from the systemd journal.
//!
//! Delivered are the entries of the kernel, and those that NVSentinel's reset job, running as
//! root, logs about its work. The journal is a set of files that appear, grow and disappear:
//! each is followed on its own (`track`), and of all next entries the earliest is delivered.
//! Entries are ordered by sequence number within one sequence of the journal, by the monotonic
//! clock within one boot, and by the wall clock only between boots, since that one jumps.
//!
//! inotify only wakes the reader; changes are read from the files. journald sends notifications
//! of new entries up to a quarter of a second after it writes them.

mod fields;
mod file;
mod hash;
mod track;

use std::{
    cmp::Ordering,
    collections::HashSet,
    ffi::OsStr,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

use rustix::fs::inotify::WatchFlags;
use tokio::time::timeout;

use self::file::{FileError, Head, JournalFile};
use self::track::Track;
use super::{Cursor, Event, KernelLogOpenError, LINE_MAX, Position, watch::InotifyWatch};
use crate::boot::BootId;

/// Directories of systemd's journal: a volatile one that is lost on reboot, and a persistent
/// one.
pub(super) const DIRECTORIES: [&str; 2] = ["/run/log/journal", "/var/log/journal"];

/// Longest wait for a notification before the files are checked all the same.
const RECHECK: Duration = Duration::from_secs(5);
/// Most files that are read; journald keeps 100 by default.
const FILES_MAX: usize = 4096;

/// An open journal with its files.
#[derive(Debug)]
pub(super) struct Journal {
    directories: Vec<PathBuf>,
    boot_id: BootId,
    watch: Option<InotifyWatch>,
    /// Files that are or were read, by device, inode and creation time.
    known: HashSet<FileKey>,
    tracks: Vec<Track>,
    position: Option<Cursor>,
    /// Events to deliver before anything else.
    notices: Vec<Event>,
    /// The error of the file that journald is writing, if it cannot be read. Nothing more is
    /// delivered then: an entry of another file would move the position past the unread ones.
    failed: Option<String>,
    caught_up: bool,
}

type FileKey = (u64, u64, u128);

/// Succeeds if one of these directories holds a journal that this process may read.
pub(super) fn probe(directories: &[&str]) -> Result<(), KernelLogOpenError> {
    let mut nothing = None;
    for directory in directories.iter().map(Path::new) {
        if let Err(error) = fs::read_dir(directory) {
            nothing.get_or_insert(open_error(directory, error));
            continue;
        }
        let machines = entries_of(directory).filter(|path| is_machine(path));
        let files = std::iter::once(directory.to_owned())
            .chain(machines)
            .flat_map(|directory| entries_of(&directory).collect::<Vec<_>>());
        for path in files.filter(|path| is_journal(path)).take(FILES_MAX) {
            match fs::File::open(&path) {
                Ok(_) => return Ok(()),
                // More useful than an error about the other directory, which does not exist.
                Err(error) => nothing = Some(open_error(&path, error)),
            }
        }
        nothing.get_or_insert_with(|| {
            let empty = io::Error::new(io::ErrorKind::NotFound, "it holds no file of a journal");
            open_error(directory, empty)
        });
    }
    nothing.map_or(Ok(()), Err)
}

fn open_error(path: &Path, source: io::Error) -> KernelLogOpenError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::PermissionDenied => KernelLogOpenError::JournalPermission { path, source },
        _ => KernelLogOpenError::NoJournal { path, source },
    }
}

// === impl Journal ===

impl Journal {
    /// Opens the journal in `directory`, or in systemd's own directories.
    pub(super) fn open(
        directory: Option<&Path>,
        resume: Option<&Position>,
    ) -> Result<Self, KernelLogOpenError> {
        let boot_id = BootId::current().map_err(|source| KernelLogOpenError::Io {
            input: "the boot id".to_owned(),
            source,
        })?;
        let directories = match directory {
            Some(directory) => vec![directory.to_owned()],
            None => DIRECTORIES.map(PathBuf::from).to_vec(),
        };
        Self::new(directories, boot_id, resume)
    }

    fn new(
        directories: Vec<PathBuf>,
        boot_id: BootId,
        resume: Option<&Position>,
    ) -> Result<Self, KernelLogOpenError> {
        let mut first_error = None;
        let mut readable = false;
        for directory in &directories {
            match fs::read_dir(directory) {
                Ok(_) => readable = true,
                Err(error) => {
                    first_error.get_or_insert_with(|| open_error(directory, error));
                }
            }
        }
        if let (false, Some(error)) = (readable, first_error) {
            return Err(error);
        }
        let watch = InotifyWatch::empty()
            .inspect_err(|error| {
                tracing::warn!(%error, "no file notifications, checking the journal every 5 s");
            })
            .ok();
        let position = match resume {
            Some(Position::Journal(cursor)) => Some(*cursor),
            _ => None,
        };
        let mut journal = Self {
            directories,
            boot_id,
            watch,
            known: HashSet::new(),
            tracks: Vec::new(),
            position,
            notices: Vec::new(),
            failed: None,
            caught_up: false,
        };
        let refused = journal.look_for_files();
        if let (true, Some((path, source))) = (journal.known.is_empty(), refused) {
            return Err(KernelLogOpenError::JournalPermission { path, source });
        }
        if let Some(cursor) = position
            && !journal
                .tracks
                .iter_mut()
                .any(|track| track.goes_back_to(&cursor))
        {
            // journald has removed the file, and with it the entries after the position.
            journal.notices.push(Event::Lost {
                count: 0,
                counted: false,
            });
        }
        Ok(journal)
    }

    /// Delivers the next entries. An error is permanent: the caller must reopen the journal at
    /// its position.
    pub(super) async fn next_batch(&mut self, out: &mut Vec<Event>, max: usize) -> io::Result<()> {
        let before = out.len();
        loop {
            self.fill(out, max.max(1));
            if out.len() > before {
                return Ok(());
            }
            if let Some(failed) = &self.failed {
                return Err(io::Error::other(failed.clone()));
            }
            self.changed().await?;
        }
    }

    pub(super) fn position(&self) -> Option<Position> {
        self.position.map(Position::Journal)
    }

    /// Waits until a check may find something. Cancel-safe.
    async fn changed(&self) -> io::Result<()> {
        let Some(watch) = &self.watch else {
            tokio::time::sleep(RECHECK).await;
            return Ok(());
        };
        timeout(RECHECK, watch.changed()).await.unwrap_or(Ok(()))
    }

    /// Delivers what is available, without waiting.
    fn fill(&mut self, out: &mut Vec<Event>, max: usize) {
        if self.failed.is_some() {
            return;
        }
        let full = out.len().saturating_add(max);
        for track in &mut self.tracks {
            track.file.refresh();
        }
        let mut has_listed_files = false;
        loop {
            out.append(&mut self.notices);
            if out.len() >= full {
                return;
            }
            let earliest = self.earliest();
            if self.failed.is_some() {
                out.append(&mut self.notices);
                return;
            }
            if !self.notices.is_empty() {
                // Deliver a loss before the entries that follow it.
            } else if let Some(index) = earliest {
                self.deliver(index, out);
            } else if has_listed_files {
                break;
            } else {
                has_listed_files = true;
                self.look_for_files();
            }
        }
        if !self.caught_up {
            self.caught_up = true;
            out.push(Event::CaughtUp);
        }
    }

    /// Returns the index of the file with the earliest next entry.
    fn earliest(&mut self) -> Option<usize> {
        let mut earliest: Option<(usize, Head)> = None;
        let mut index = 0;
        while let Some(track) = self.tracks.get_mut(index) {
            // Checked before the search for its end, since it may be written to until then.
            let finished = track.file.is_finished();
            match track.next() {
                Ok(Some(head)) if is_behind(&head, track, self.position.as_ref(), self.boot_id) => {
                    track.take(&head);
                }
                Ok(Some(head)) => {
                    let before = earliest.as_ref().is_none_or(|(other, first)| {
                        let first_id = self.tracks.get(*other).map(|other| other.file.seqnum_id());
                        let id = self.tracks.get(index).map(|track| track.file.seqnum_id());
                        self.compare(&head, first, id == first_id) == Ordering::Less
                    });
                    if before {
                        earliest = Some((index, head));
                    }
                    index += 1;
                }
                Ok(None) if finished => drop(self.tracks.remove(index)),
                Ok(None) => index += 1,
                Err(error) => self.give_up(index, &error),
            }
        }
        earliest.map(|(index, _)| index)
    }

    fn compare(&self, a: &Head, b: &Head, same_sequence: bool) -> Ordering {
        if same_sequence {
            a.seqnum.cmp(&b.seqnum)
        } else if a.boot_id == b.boot_id {
            (a.monotonic, a.realtime).cmp(&(b.monotonic, b.realtime))
        } else {
            let new = |head: &Head| head.boot_id == self.boot_id;
            (new(a), a.realtime).cmp(&(new(b), b.realtime))
        }
    }

    fn deliver(&mut self, index: usize, out: &mut Vec<Event>) {
        let Some(track) = self.tracks.get_mut(index) else {
            return;
        };
        let Ok(Some(head)) = track.next() else {
            return;
        };
        let cursor = track.cursor(&head);
        let fields = track.fields(&head);
        track.take(&head);
        let before = self.position.replace(cursor);
        match fields {
            Ok(fields) => {
                let cut = fields.cut;
                out.extend(fields.record(&head, cursor).map(Event::Record));
                if cut {
                    out.push(Event::Malformed {
                        reason: format!("a message was cut: {LINE_MAX} bytes of it are read"),
                    });
                }
            }
            Err(error @ (FileError::Compression(_) | FileError::Corrupt { .. })) => {
                let path = track.file.path().display();
                out.push(Event::Malformed {
                    reason: format!("an entry of {path} cannot be read: {error}"),
                });
            }
            Err(error) => {
                self.position = before;
                self.give_up(index, &error);
            }
        }
    }

    /// Stops reading a damaged file. If journald is still writing to it, new entries would be
    /// missed silently, so the whole journal fails.
    fn give_up(&mut self, index: usize, error: &FileError) {
        let track = self.tracks.remove(index);
        let path = track.file.path().display();
        let because = std::error::Error::source(error)
            .map_or_else(String::new, |source| format!(": {source}"));
        let reason = format!("the rest of {path} cannot be read: {error}{because}");
        if !track.file.is_finished() {
            self.failed = Some(reason);
            return;
        }
        self.notices.push(Event::Malformed { reason });
        self.notices.push(Event::Lost {
            count: 0,
            counted: false,
        });
    }

    /// Starts to read new files. Returns the first one that this process may not read.
    fn look_for_files(&mut self) -> Option<(PathBuf, io::Error)> {
        let mut refused = None;
        let mut present = HashSet::new();
        for path in self.files() {
            let Ok(key) = fs::metadata(&path).map(|meta| file_key(&meta)) else {
                // The file has vanished meanwhile.
                continue;
            };
            if self.known.contains(&key) {
                present.insert(key);
                continue;
            }
            match JournalFile::open(&path) {
                Ok(Some(file)) => {
                    present.insert(key);
                    if !self
                        .tracks
                        .iter()
                        .any(|track| track.file.file_id() == file.file_id())
                    {
                        self.tracks.push(Track::new(file, self.position.as_ref()));
                    }
                }
                // The file is just being created.
                Ok(None) => {}
                Err(FileError::Io(error)) => {
                    refused.get_or_insert((path, error));
                }
                Err(error) => {
                    present.insert(key);
                    self.notices.push(Event::Malformed {
                        reason: format!("{} cannot be read: {error}", path.display()),
                    });
                }
            }
        }
        self.known = present;
        refused
    }

    /// Returns the files that may hold kernel entries, which excludes the files of users.
    fn files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let changes = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::MODIFY;
        for root in &self.directories {
            let mut directories = vec![root.clone()];
            directories.extend(entries_of(root).filter(|path| is_machine(path)));
            for directory in directories {
                // Watched before it is listed, so that no change is missed. Adding a watch
                // twice is harmless.
                if let Some(watch) = &self.watch {
                    watch.add(&directory, changes);
                }
                files.extend(entries_of(&directory).filter(|path| is_journal(path)));
            }
        }
        files.truncate(FILES_MAX);
        files
    }
}

fn entries_of(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path()))
}

/// Returns true if the name is a machine id, as the directories of the journal have.
fn is_machine(path: &Path) -> bool {
    let name = path.file_name().map(OsStr::as_encoded_bytes);
    name.is_some_and(|name| name.len() == 32 && name.iter().all(u8::is_ascii_hexdigit))
}

fn is_journal(path: &Path) -> bool {
    let end = path.extension().map(OsStr::as_encoded_bytes);
    let name = path.file_name().map(OsStr::as_encoded_bytes);
    matches!(end, Some(b"journal" | b"journal~"))
        && name.is_some_and(|name| !name.starts_with(b"user-"))
}

/// Returns a key that differs between a file and a later one with the same inode number.
fn file_key(metadata: &fs::Metadata) -> FileKey {
    let created = metadata
        .created()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .map_or(0, |since| since.as_nanos());
    (metadata.dev(), metadata.ino(), created)
}

/// Returns true if the entry is at the position or before it, so that an earlier process, or
/// another file, has delivered it. Without a position only entries of the running boot are
/// wanted.
fn is_behind(head: &Head, track: &Track, position: Option<&Cursor>, boot_id: BootId) -> bool {
    let Some(position) = position else {
        return head.boot_id != boot_id;
    };
    if u128::from_be_bytes(track.file.seqnum_id()) == position.seqnum_id {
        return head.seqnum <= position.seqnum;
    }
    if head.boot_id == position.boot_id {
        return head.monotonic < position.monotonic
            || (head.monotonic == position.monotonic && head.xor_hash == position.xor_hash);
    }
    // The running boot is the last one, whatever the wall clock shows.
    head.boot_id != boot_id && (position.boot_id == boot_id || head.realtime <= position.realtime)
}

#[cfg(test)]
mod tests;
