//! The kernel log: sources of records in several forms, with detection of lost records.
//!
//! A [`Source`] is opened from a [`KernelLogSpec`] and yields [`Event`]s in batches: `kmsg` reads
//! `/dev/kmsg`, `journal` the files of the systemd journal, `lines` other files and standard
//! input. All wait for the kernel's wake-up, and return a [`Position`] where a later process
//! can resume. `record` and `line` are the parsers, usable alone; `write` writes to the log.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    str::FromStr,
};

mod file_id;
mod follow;
mod journal;
mod kmsg;
mod line;
mod line_buffer;
mod lines;
mod position;
mod record;
mod rotated;
mod watch;
mod write;

use self::{journal::Journal, kmsg::Kmsg, lines::Lines};

pub use self::{
    line::{LineParser, parse_line, unwrapped},
    line_buffer::LINE_MAX,
    position::{Cursor, InvalidPosition, Position},
    record::{KernelLogRecord, Malformed, RecordRef, parse_kmsg},
    write::{KMSG_TEXT_MAX, WriteError, write_kmsg},
};

/// Device of the kernel log.
const KMSG: &str = "/dev/kmsg";

/// A kernel log to read from.
///
/// As text: `auto`, `kmsg` (or `/dev/kmsg`), `journal` or `journal:DIRECTORY`, `-` for standard
/// input; anything else is the path of a file to follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelLogSpec {
    /// The machine's log: [`Kmsg`](Self::Kmsg) if this process may read it, else the
    /// [`Journal`](Self::Journal) that systemd keeps.
    Auto,
    /// The running kernel's own log, from the oldest record in its buffer.
    Kmsg,
    /// The systemd journal in this directory, or in systemd's own; the running boot only, or
    /// everything after the position.
    Journal(Option<PathBuf>),
    /// A file that is followed by name as it grows, is truncated or is replaced; it need not
    /// exist yet.
    File(PathBuf),
    /// A file that is read once to its end.
    FileOnce(PathBuf),
    /// Standard input, to its end.
    Stdin,
}

/// Output of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A record was logged.
    Record(KernelLogRecord),
    /// Records were logged that will never be delivered.
    Lost {
        /// Number of missing records; 0 if unknown.
        count: u64,
        /// True if `count` is known.
        counted: bool,
    },
    /// Something was logged that is damaged or too long. It was skipped, or delivered truncated
    /// just before this event.
    Malformed {
        /// Description of the damage.
        reason: String,
    },
    /// Everything that existed when the source was opened has been delivered. Sent once.
    CaughtUp,
    /// The input has ended. Further calls return this event again.
    End,
}

/// An open source of kernel log.
#[derive(Debug)]
pub struct Source {
    spec: KernelLogSpec,
    input: OpenSource,
}

#[derive(Debug)]
enum OpenSource {
    Kmsg(Box<Kmsg>),
    Journal(Box<Journal>),
    Lines(Box<Lines>),
}

/// Error when a source is opened.
#[derive(Debug, thiserror::Error)]
pub enum KernelLogOpenError {
    /// This process lacks permission to read the kernel log.
    #[error("may not read the kernel log {KMSG}")]
    KmsgPermission(#[source] io::Error),
    /// The administrator has disabled the device.
    #[error("the kernel log device {KMSG} is switched off")]
    KmsgOff,
    /// The device does not exist, as in most containers, or another file has its name.
    #[error("there is no kernel log at {KMSG}")]
    NoKmsg(#[source] io::Error),
    /// The journal's directory does not exist or holds no journal.
    #[error("there is no journal at {}", path.display())]
    NoJournal {
        /// Path of the directory.
        path: PathBuf,
        /// Error from the operating system.
        #[source]
        source: io::Error,
    },
    /// This process lacks permission to read the journal's files.
    #[error("may not read the journal {}", path.display())]
    JournalPermission {
        /// Path of the directory or file.
        path: PathBuf,
        /// Error from the operating system.
        #[source]
        source: io::Error,
    },
    /// This process lacks permission to read the file.
    #[error("may not read {}", path.display())]
    Permission {
        /// Path of the file.
        path: PathBuf,
        /// Error from the operating system.
        #[source]
        source: io::Error,
    },
    /// The file does not exist; for a file that is followed, its directory does not exist.
    #[error("there is no {}", path.display())]
    NotFound {
        /// Path that is missing.
        path: PathBuf,
        /// Error from the operating system.
        #[source]
        source: io::Error,
    },
    /// The path is a directory, which cannot be read as a log.
    #[error("{} is a directory", path.display())]
    Directory {
        /// Path of the directory.
        path: PathBuf,
    },
    /// [`KernelLogSpec::Auto`] found neither of its sources.
    #[error("no kernel log can be read here: {kmsg}; {journal}")]
    Neither {
        /// Error of the journal.
        journal: Box<KernelLogOpenError>,
        /// Error of the kernel log device.
        kmsg: Box<KernelLogOpenError>,
    },
    /// Any other error of the operating system.
    #[error("cannot open {input}")]
    Io {
        /// The source's [`KernelLogSpec`] as text.
        input: String,
        /// Error from the operating system.
        #[source]
        source: io::Error,
    },
}

// === impl KernelLogOpenError ===

impl KernelLogOpenError {
    /// Returns a hint for the operator, to be shown beside the error.
    pub fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::KmsgPermission(_) => {
                "give gpuwarden CAP_SYSLOG (root has it; in a container also the device), or read a file that its \
                 user may read: --kernel-log /var/log/kern.log (group adm)"
            }
            Self::KmsgOff => {
                "set the sysctl kernel.printk_devkmsg=ratelimit, or remove printk.devkmsg=off from the kernel's \
                 command line"
            }
            Self::NoKmsg(_) => "in a container, pass it in from the host",
            Self::NoJournal { .. } => {
                "without systemd-journald read kmsg or a file; in a container pass the host's directory in"
            }
            Self::JournalPermission { .. } => {
                "run as root, or as a member of the group systemd-journal (or adm)"
            }
            Self::Permission { .. } => {
                "run as root, or as a member of the file's group (often adm)"
            }
            Self::Directory { .. } => "name a file, `kmsg`, or `-` for standard input",
            Self::Neither { kmsg, .. } => return kmsg.advice(),
            Self::NotFound { .. } | Self::Io { .. } => return None,
        };
        Some(advice.to_owned())
    }
}

/// Error when a source is read. The source stays open and can be read again; if a device is
/// gone or permission is missing, pause before the retry.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {input}")]
pub struct ReadError {
    /// The source's [`KernelLogSpec`] as text.
    pub input: String,
    /// Error from the operating system.
    #[source]
    pub source: io::Error,
}

/// Opens a source, resuming after `resume` if that is a position in it.
///
/// A position of another boot or of another kind of source is ignored, and reading starts at
/// the oldest record. A position in a file that was renamed since is found as long as the file
/// is in the same directory, and the files that rotation has made since are read in order. If
/// one of them is missing, or the file was rewritten, [`Event::Lost`] comes first. Must be
/// called, and the source used, within a tokio runtime that has I/O and time enabled.
///
/// # Errors
///
/// [`KernelLogOpenError`], which has advice for the operator.
///
/// # Panics
///
/// Outside a tokio runtime.
pub fn open(spec: &KernelLogSpec, resume: Option<&Position>) -> Result<Source, KernelLogOpenError> {
    let spec = &spec.resolve()?;
    let input = match spec {
        // `resolve` never returns `Auto`.
        KernelLogSpec::Auto | KernelLogSpec::Kmsg => {
            OpenSource::Kmsg(Box::new(Kmsg::open(resume)?))
        }
        KernelLogSpec::Journal(directory) => {
            OpenSource::Journal(Box::new(Journal::open(directory.as_deref(), resume)?))
        }
        KernelLogSpec::File(path) => OpenSource::Lines(Box::new(Lines::follow(path, resume)?)),
        KernelLogSpec::FileOnce(path) => OpenSource::Lines(Box::new(Lines::read_once(path)?)),
        KernelLogSpec::Stdin => OpenSource::Lines(Box::new(Lines::stdin()?)),
    };
    Ok(Source {
        spec: spec.clone(),
        input,
    })
}

/// Returns the first of the two that can be read.
fn choose(
    kmsg: impl FnOnce() -> Result<(), KernelLogOpenError>,
    journal: impl FnOnce() -> Result<(), KernelLogOpenError>,
) -> Result<KernelLogSpec, KernelLogOpenError> {
    let Err(kmsg) = kmsg() else {
        return Ok(KernelLogSpec::Kmsg);
    };
    match journal() {
        Ok(()) => Ok(KernelLogSpec::Journal(None)),
        Err(journal) => Err(KernelLogOpenError::Neither {
            journal: Box::new(journal),
            kmsg: Box::new(kmsg),
        }),
    }
}

// === impl Source ===

impl Source {
    /// Waits for at least one event, and appends events to `out`.
    ///
    /// No further record is read once `max` events are appended (at least one, whatever `max`
    /// is); a record may add a second event about a loss before it. Cancel-safe: a dropped call
    /// consumes nothing from the source.
    ///
    /// # Errors
    ///
    /// [`ReadError`]; events that were appended before it are valid.
    pub async fn next_batch(&mut self, out: &mut Vec<Event>, max: usize) -> Result<(), ReadError> {
        // A source that always has more must not starve the other tasks of its thread.
        tokio::task::coop::consume_budget().await;
        match &mut self.input {
            OpenSource::Kmsg(kmsg) => kmsg.next_batch(out, max).await,
            OpenSource::Journal(journal) => journal.next_batch(out, max).await,
            OpenSource::Lines(lines) => lines.next_batch(out, max).await,
        }
        .map_err(|source| ReadError {
            input: self.spec.to_string(),
            source,
        })
    }

    /// Returns the place after the last delivered record, or the place where the source
    /// resumed.
    ///
    /// `None` before the first record of a source that was opened at its start, and for input
    /// that cannot be resumed: standard input, pipes, a file that is read once.
    pub fn position(&self) -> Option<Position> {
        match &self.input {
            OpenSource::Kmsg(kmsg) => kmsg.position(),
            OpenSource::Journal(journal) => journal.position(),
            OpenSource::Lines(lines) => lines.position(),
        }
    }

    /// Returns the path of a followed file that does not exist yet, so that nothing can be
    /// read. Reads the file system.
    pub fn missing(&self) -> Option<&Path> {
        match &self.input {
            OpenSource::Lines(lines) => lines.missing(),
            OpenSource::Kmsg(_) | OpenSource::Journal(_) => None,
        }
    }

    /// Returns the [`KernelLogSpec`] that the source was opened from.
    pub fn spec(&self) -> &KernelLogSpec {
        &self.spec
    }
}

// === impl KernelLogSpec ===

impl KernelLogSpec {
    /// Returns the source to open: for [`Auto`](Self::Auto) the one that can be read now, else
    /// `self`.
    ///
    /// # Errors
    ///
    /// [`KernelLogOpenError::Neither`], with the errors of both.
    pub fn resolve(&self) -> Result<Self, KernelLogOpenError> {
        match self {
            Self::Auto => choose(kmsg::probe, || journal::probe(&journal::DIRECTORIES)),
            named => Ok(named.clone()),
        }
    }

    /// Returns true if `position` belongs to this kind of source.
    pub fn has(&self, position: &Position) -> bool {
        matches!(
            (self, position),
            (Self::Auto | Self::Kmsg, Position::Kmsg { .. })
                | (Self::Auto | Self::Journal(_), Position::Journal(_))
                | (Self::File(_), Position::File { .. })
        )
    }
}

impl FromStr for KernelLogSpec {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Auto,
            "kmsg" | KMSG => Self::Kmsg,
            "journal" => Self::Journal(None),
            "-" => Self::Stdin,
            path if path.starts_with("journal:") => {
                Self::Journal(path.strip_prefix("journal:").map(PathBuf::from))
            }
            path => Self::File(path.into()),
        })
    }
}

impl fmt::Display for KernelLogSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Kmsg => f.write_str("kmsg"),
            Self::Journal(None) => f.write_str("journal"),
            Self::Journal(Some(directory)) => write!(f, "journal:{}", directory.display()),
            Self::File(path) | Self::FileOnce(path) => path.display().fmt(f),
            Self::Stdin => f.write_str("-"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_as_text() {
        let cases = [
            ("auto", KernelLogSpec::Auto, "auto"),
            ("./auto", KernelLogSpec::File("./auto".into()), "./auto"),
            ("kmsg", KernelLogSpec::Kmsg, "kmsg"),
            ("/dev/kmsg", KernelLogSpec::Kmsg, "kmsg"),
            ("-", KernelLogSpec::Stdin, "-"),
            ("journal", KernelLogSpec::Journal(None), "journal"),
            (
                "journal:/var/log/journal",
                KernelLogSpec::Journal(Some("/var/log/journal".into())),
                "journal:/var/log/journal",
            ),
            (
                "./journal",
                KernelLogSpec::File("./journal".into()),
                "./journal",
            ),
            (
                "/var/log/kern.log",
                KernelLogSpec::File("/var/log/kern.log".into()),
                "/var/log/kern.log",
            ),
            ("./kmsg", KernelLogSpec::File("./kmsg".into()), "./kmsg"),
        ];
        for (text, spec, shown) in cases {
            assert_eq!(text.parse(), Ok(spec.clone()), "{text}");
            assert_eq!(spec.to_string(), shown);
        }
    }

    #[test]
    fn auto_takes_kmsg_then_the_journal_and_else_names_both() {
        let denied = || KernelLogOpenError::KmsgPermission(io::ErrorKind::PermissionDenied.into());
        let missing = || KernelLogOpenError::NoJournal {
            path: "/run/log/journal".into(),
            source: io::ErrorKind::NotFound.into(),
        };
        assert_eq!(
            choose(|| Ok(()), || unreachable!()).unwrap(),
            KernelLogSpec::Kmsg,
            "the journal is not tried"
        );
        let journal = choose(|| Err(denied()), || Ok(())).unwrap();
        assert_eq!(journal, KernelLogSpec::Journal(None));
        let error = choose(|| Err(denied()), || Err(missing())).unwrap_err();
        let expected = "no kernel log can be read here: may not read the kernel log /dev/kmsg; there is no \
                        journal at /run/log/journal";
        assert_eq!(error.to_string(), expected);
        assert_eq!(error.advice(), denied().advice());
        // An explicit source is not replaced.
        for spec in [
            KernelLogSpec::Kmsg,
            KernelLogSpec::Stdin,
            KernelLogSpec::File("/nowhere".into()),
        ] {
            assert_eq!(spec.resolve().unwrap(), spec);
        }
    }

    #[test]
    fn errors_are_short_and_say_beside_what_to_do() {
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let path = || PathBuf::from("/var/log/kern.log");
        let cases = [
            (
                KernelLogOpenError::KmsgPermission(denied()),
                "/dev/kmsg",
                "CAP_SYSLOG",
            ),
            (
                KernelLogOpenError::KmsgOff,
                "/dev/kmsg",
                "kernel.printk_devkmsg=ratelimit",
            ),
            (
                KernelLogOpenError::NoKmsg(missing()),
                "/dev/kmsg",
                "from the host",
            ),
            (
                KernelLogOpenError::NoJournal {
                    path: path(),
                    source: missing(),
                },
                "/var/log/kern.log",
                "systemd-journald",
            ),
            (
                KernelLogOpenError::JournalPermission {
                    path: path(),
                    source: denied(),
                },
                "/var/log/kern.log",
                "systemd-journal",
            ),
            (
                KernelLogOpenError::Permission {
                    path: path(),
                    source: denied(),
                },
                "/var/log/kern.log",
                "adm",
            ),
            (
                KernelLogOpenError::Directory { path: path() },
                "/var/log/kern.log",
                "name a file",
            ),
        ];
        for (error, what, advice) in cases {
            let message = error.to_string();
            assert!(message.contains(what) && message.len() < 80, "{message}");
            assert!(
                !message.contains(&denied().to_string()),
                "cause repeated: {message}"
            );
            let hint = error.advice().unwrap();
            assert!(hint.contains(advice) && hint.len() < 200, "{hint}");
        }
    }
}
