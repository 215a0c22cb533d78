//! Handling of a damaged database: it is moved aside and replaced by an empty one, since
//! unreadable history is no reason to leave a node unwatched.
//!
//! Damage is found at the start, or later by a write or by the feed. Damage found later is
//! noted in a file beside the database, the process ends, and the next start finds the note.
//! Any other read that fails only loses its own answer.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use model::position::Position;
use rusqlite::{Connection, ErrorCode};
use tokio::sync::watch;

use super::{SqliteOpenError, identity, newest, schema};
use crate::{Identity, directory_lock};

/// Number of damaged databases kept for inspection, the newest ones. Each may be as large as
/// the store was.
const KEPT: usize = 2;
/// Suffix of the note that the database is damaged. With a time appended, suffix of a database
/// that was moved aside.
const DAMAGED: &str = ".damaged";
/// Suffixes of a database's files. The database itself is moved last: without its log it would
/// be a different database.
const FILES: [&str; 3] = ["-wal", "-shm", ""];

/// Usable database that has been opened.
pub(super) struct Opened {
    pub(super) connection: Connection,
    pub(super) newest: Position,
    pub(super) identity: Identity,
}

/// Damage found while the store is open.
#[derive(Debug)]
pub(super) struct Damage {
    database: PathBuf,
    /// Identity of the file that was opened; `None` if unknown.
    file: Option<String>,
    met: watch::Sender<Option<String>>,
}

/// Opens the database; a damaged one is moved aside first. The caller holds the directory lock.
pub(super) fn open(database: &Path) -> Result<Opened, SqliteOpenError> {
    let note = with_ending(database, DAMAGED);
    let noted = fs::read_to_string(&note).ok();
    // The note does not apply to a file that replaced the damaged one, such as a backup.
    let of_this_file = noted
        .as_deref()
        .and_then(|noted| noted.split_once('\n'))
        .filter(|(file, _)| file_identity(database).as_deref() == Some(*file));
    let damage = match of_this_file {
        Some((_, met)) => met.to_owned(),
        None => match open_and_read(database) {
            Err(error) if error.is_damage() => with_causes(&error),
            opened => {
                if noted.is_some() {
                    let _ = fs::remove_file(note);
                }
                return opened;
            }
        },
    };
    let failed = |source| SqliteOpenError::File {
        path: database.into(),
        source,
    };
    let aside = set_aside(database, Timestamp::now()).map_err(failed)?;
    tracing::error!(
        damage,
        aside = %aside.display(),
        "the event store was damaged: it was moved aside and replaced by an empty one; faults that \
         nodes carry are restored from the nodes"
    );
    let opened = open_and_read(database)?;
    match fs::remove_file(note) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(opened),
    }
}

/// Returns the databases that were moved aside and still exist, oldest first.
pub(super) fn aside(database: &Path) -> Vec<PathBuf> {
    let begin = with_ending(database, &format!("{DAMAGED}-"));
    let begin = begin.as_os_str().as_encoded_bytes();
    let entries = database.parent().and_then(|dir| fs::read_dir(dir).ok());
    let mut found: Vec<PathBuf> = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.as_os_str().as_encoded_bytes();
            name.starts_with(begin) && !name.ends_with(b"-wal") && !name.ends_with(b"-shm")
        })
        .collect();
    found.sort_unstable();
    found
}

/// Opens the database, and reads the values that opening needs.
fn open_and_read(database: &Path) -> Result<Opened, SqliteOpenError> {
    let connection = schema::open(database)?;
    let newest = newest(&connection);
    let read = newest.and_then(|newest| Ok((newest, identity::read(&connection)?)));
    let (newest, identity) = read.map_err(|source| schema::failure(database, source))?;
    Ok(Opened {
        connection,
        newest,
        identity,
    })
}

/// Moves the database aside, durably, and deletes older ones beyond [`KEPT`].
fn set_aside(database: &Path, now: Timestamp) -> io::Result<PathBuf> {
    let before = aside(database);
    let time = now.strftime("%Y%m%dT%H%M%S%.6fZ");
    let to = with_ending(database, &format!("{DAMAGED}-{time}"));
    for part in FILES {
        rename(&with_ending(database, part), &with_ending(&to, part))?;
    }
    for old in before.iter().rev().skip(KEPT - 1) {
        for part in FILES {
            // A file that stays only takes room.
            let _ = fs::remove_file(with_ending(old, part));
        }
    }
    directory_lock::sync_entry(database)?;
    Ok(to)
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        renamed => renamed,
    }
}

/// Returns device and inode of the file at a path.
fn file_identity(database: &Path) -> Option<String> {
    let found = fs::metadata(database).ok()?;
    Some(format!("{}:{}", found.dev(), found.ino()))
}

fn with_ending(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

/// Returns the text of an error and its causes.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let causes: Vec<String> = causes.map(ToString::to_string).collect();
    causes.join(": ")
}

/// Returns true if the error means that the file is damaged.
pub(super) fn is_damage(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
    )
}

// === impl Damage ===

impl Damage {
    pub(super) fn new(database: PathBuf) -> Self {
        Self {
            file: file_identity(&database),
            database,
            met: watch::Sender::new(None),
        }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Option<String>> {
        self.met.subscribe()
    }

    /// Records that the database is damaged, for subscribers and for the next start.
    pub(super) fn note(&self, error: &dyn std::error::Error) {
        let what = with_causes(error);
        let first = self.met.send_if_modified(|met| {
            let first = met.is_none();
            if first {
                *met = Some(what.clone());
            }
            first
        });
        if !first {
            return;
        }
        tracing::error!(
            err = what,
            "the event store is damaged; the next start moves it aside and begins with an empty one"
        );
        let note = format!("{}\n{what}", self.file.as_deref().unwrap_or_default());
        if let Err(error) = fs::write(with_ending(&self.database, DAMAGED), note) {
            tracing::warn!(err = %error, "the damage could not be recorded for the next start");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;

    use tempfile::TempDir;

    use super::super::SqliteStore;
    use super::*;
    use crate::conformance::{event, read_feed};
    use crate::{EventLog, NewEvent, Upkeep};

    const PAGE: u64 = 4096;

    async fn filled(dir: &Path) {
        let store = SqliteStore::open(dir).unwrap();
        for part in 0..10 {
            let events: Vec<NewEvent> = (0..100).map(|n| event("n1", part * 100 + n)).collect();
            store.append(events).await.unwrap();
        }
        store.close().await;
    }

    /// Overwrites every third page, starting with page `first`, with noise.
    fn spoil(database: &Path, first: u64) {
        let file = OpenOptions::new().write(true).open(database).unwrap();
        let pages = file.metadata().unwrap().len() / PAGE;
        assert!(pages > 30);
        for page in (first..pages).step_by(3) {
            let noise = (0..PAGE).map(|n| (n * n + page * 7).to_le_bytes()[0] | 1);
            let noise: Vec<u8> = noise.collect();
            file.write_all_at(&noise, page * PAGE).unwrap();
        }
    }

    #[tokio::test]
    async fn a_damaged_database_is_moved_aside_and_the_store_takes_events_again() {
        for first in 0..3 {
            let dir = TempDir::new().unwrap();
            filled(dir.path()).await;
            let database = dir.path().join("events.db");
            spoil(&database, first);
            let spoilt = fs::read(&database).unwrap();
            // Damage that the start does not find is found by a write or by the feed, and the
            // next start finds the note of it.
            let mut starts = 0;
            let store = loop {
                starts += 1;
                assert!(starts < 3, "still damaged after {starts} starts");
                let store = SqliteStore::open(dir.path()).unwrap();
                let stored = store.append(vec![event("n1", 5_000)]).await;
                let read = store.feed(Position::START, 10_000).await;
                let damage = store.damage().borrow().clone();
                if stored.is_ok() && read.is_ok() {
                    assert_eq!(damage, None);
                    break store;
                }
                assert!(
                    damage.is_some(),
                    "{stored:?}, {:?}",
                    read.map(|it| it.len())
                );
                store.close().await;
            };
            let [aside] = aside(&database).try_into().unwrap();
            assert_eq!(fs::read(&aside).unwrap()[..64], spoilt[..64], "{first}");
            let [note] = store.notes().try_into().unwrap();
            assert!(note.contains(aside.to_str().unwrap()), "{note}");
            assert_eq!(read_feed(&store, 100).await.len(), 1, "begun anew");
            store.close().await;
            let store = SqliteStore::open(dir.path()).unwrap();
            assert_eq!(read_feed(&store, 100).await.len(), 1, "and kept");
            store.close().await;
        }
    }

    #[tokio::test]
    async fn a_note_of_damage_says_nothing_of_a_file_that_was_put_in_its_place() {
        let dir = TempDir::new().unwrap();
        filled(dir.path()).await;
        let database = dir.path().join("events.db");
        let note = with_ending(&database, DAMAGED);
        fs::write(&note, "1:2\nmalformed").unwrap();
        let store = SqliteStore::open(dir.path()).unwrap();
        assert_eq!(read_feed(&store, 1_000).await.len(), 1_000);
        assert!(aside(&database).is_empty() && !note.exists());
        store.close().await;
    }

    #[test]
    fn of_many_damaged_databases_the_newest_are_kept() {
        let dir = TempDir::new().unwrap();
        let database = dir.path().join("events.db");
        for second in 0..5 {
            fs::write(&database, format!("notes {second}")).unwrap();
            fs::write(with_ending(&database, "-wal"), "").unwrap();
            set_aside(&database, Timestamp::from_second(second).unwrap()).unwrap();
        }
        let kept = aside(&database);
        let texts = kept.iter().map(|path| fs::read_to_string(path).unwrap());
        assert_eq!(texts.collect::<Vec<_>>(), ["notes 3", "notes 4"]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2 * KEPT);
    }

    #[test]
    fn what_is_newer_or_cannot_be_opened_is_refused_and_left_where_it_is() {
        type Break = fn(&Path);
        let table: [(&str, Break); 3] = [
            ("newer", |path| {
                let connection = schema::open(path).unwrap();
                connection.pragma_update(None, "user_version", 99).unwrap();
            }),
            ("foreign", |path| {
                let other = Connection::open(path).unwrap();
                other.execute_batch("CREATE TABLE t (a)").unwrap();
            }),
            ("a directory", |path| fs::create_dir(path).unwrap()),
        ];
        for (name, break_it) in table {
            let dir = TempDir::new().unwrap();
            let database = dir.path().join("events.db");
            break_it(&database);
            assert!(open(&database).is_err(), "{name}");
            assert!(database.exists() && aside(&database).is_empty(), "{name}");
        }
    }
}
