//! Position of a reader in a source of kernel log, in a form that outlives the process.

use std::{fmt, num::ParseIntError, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::boot::{BootId, InvalidBootId};

/// Place after the last record that a source delivered.
///
/// Pass it to [`open`](super::open) to resume reading there. The text form is also the
/// serialised form: `kmsg:<boot id>:<sequence number>`; `file:<device>:<inode>:<offset>` and,
/// after a line, `:` and its hash in hexadecimal; or `journal:` and the cursor that `journalctl
/// --show-cursor` prints and `--after-cursor` accepts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Position {
    /// A place in the kernel's own log.
    Kmsg {
        /// Boot that `seq` belongs to.
        boot_id: BootId,
        /// Sequence number of the last delivered record.
        seq: u64,
    },
    /// A place in a file.
    File {
        /// Device that holds the file (`st_dev`).
        dev: u64,
        /// Inode number (`st_ino`), which stays the same when the file is renamed.
        ino: u64,
        /// Bytes from the start of the file to the end of the last delivered line.
        offset: u64,
        /// Hash of that line, to detect a rewritten file.
        line: Option<u64>,
    },
    /// A place in the systemd journal.
    Journal(Cursor),
}

/// A journal entry with all of its identifiers, so that it is found in a copy of its file too:
/// the journal's own term is cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Id of the sequence that `seqnum` belongs to, which spans the files of a rotation.
    pub seqnum_id: u128,
    /// Sequence number of the entry.
    pub seqnum: u64,
    /// Boot of the entry.
    pub boot_id: BootId,
    /// Microseconds since that boot.
    pub monotonic: u64,
    /// Microseconds since 1970, by the wall clock at the time of writing.
    pub realtime: u64,
    /// Hash of the entry's fields.
    pub xor_hash: u64,
}

/// Error for a text that is not a position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPosition {
    /// The text has none of the three forms.
    #[error(
        "`{0}` is not a position: expected kmsg:<boot id>:<sequence number>, \
         file:<device>:<inode>:<offset>[:<hash>] or journal:<cursor>"
    )]
    Form(String),
    /// The second part of a kmsg position is not a boot id.
    #[error("`{text}` holds no valid boot id")]
    BootId {
        /// The text that was parsed.
        text: String,
        /// Error of the boot id.
        #[source]
        source: InvalidBootId,
    },
    /// A number is malformed or out of range.
    #[error("`{text}` holds an invalid number")]
    Number {
        /// The text that was parsed.
        text: String,
        /// Error of the number.
        #[source]
        source: ParseIntError,
    },
}

// === impl Position ===

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kmsg { boot_id, seq } => write!(f, "kmsg:{boot_id}:{seq}"),
            Self::File {
                dev,
                ino,
                offset,
                line,
            } => {
                write!(f, "file:{dev}:{ino}:{offset}")?;
                line.map_or(Ok(()), |line| write!(f, ":{line:x}"))
            }
            Self::Journal(cursor) => write!(f, "journal:{cursor}"),
        }
    }
}

impl FromStr for Position {
    type Err = InvalidPosition;

    fn from_str(text: &str) -> Result<Self, InvalidPosition> {
        let number = |part: &str| {
            part.parse().map_err(|source| InvalidPosition::Number {
                text: text.to_owned(),
                source,
            })
        };
        if let Some(cursor) = text.strip_prefix("journal:") {
            return Cursor::parse(cursor)
                .map(Self::Journal)
                .ok_or_else(|| InvalidPosition::Form(text.to_owned()));
        }
        let parts: Vec<&str> = text.split(':').collect();
        match parts.as_slice() {
            ["kmsg", boot_id, seq] => Ok(Self::Kmsg {
                boot_id: boot_id.parse().map_err(|source| InvalidPosition::BootId {
                    text: text.to_owned(),
                    source,
                })?,
                seq: number(seq)?,
            }),
            ["file", dev, ino, offset, line @ ..] if line.len() <= 1 => {
                let line = line.first().map(|line| u64::from_str_radix(line, 16));
                Ok(Self::File {
                    dev: number(dev)?,
                    ino: number(ino)?,
                    offset: number(offset)?,
                    line: line.transpose().map_err(|source| InvalidPosition::Number {
                        text: text.to_owned(),
                        source,
                    })?,
                })
            }
            _ => Err(InvalidPosition::Form(text.to_owned())),
        }
    }
}

// === impl Cursor ===

impl Cursor {
    /// Parses `s=<id>;i=<number>;b=<boot>;m=<time>;t=<time>;x=<hash>`, all hexadecimal.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(';');
        let mut number = |name: &str| {
            let value = parts.next()?.strip_prefix(name)?.strip_prefix('=')?;
            u128::from_str_radix(value, 16).ok()
        };
        let cursor = Self {
            seqnum_id: number("s")?,
            seqnum: number("i")?.try_into().ok()?,
            boot_id: BootId::from_bytes(number("b")?.to_be_bytes()),
            monotonic: number("m")?.try_into().ok()?,
            realtime: number("t")?.try_into().ok()?,
            xor_hash: number("x")?.try_into().ok()?,
        };
        parts.next().is_none().then_some(cursor)
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let boot_id = self.boot_id.to_string().replace('-', "");
        write!(
            f,
            "s={:032x};i={:x};b={boot_id};m={:x};t={:x};x={:x}",
            self.seqnum_id, self.seqnum, self.monotonic, self.realtime, self.xor_hash
        )
    }
}

impl TryFrom<String> for Position {
    type Error = InvalidPosition;

    fn try_from(text: String) -> Result<Self, InvalidPosition> {
        text.parse()
    }
}

impl From<Position> for String {
    fn from(position: Position) -> Self {
        position.to_string()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOOT_ID: &str = "f6ee57d5-7e3f-47b5-b8b4-39ade2595d41";

    #[test]
    fn forms() {
        let kmsg = Position::Kmsg {
            boot_id: BOOT_ID.parse().unwrap(),
            seq: 7,
        };
        assert_eq!(kmsg.to_string(), format!("kmsg:{BOOT_ID}:7"));
        let at = |line| Position::File {
            dev: 1,
            ino: 2,
            offset: 3,
            line,
        };
        assert_eq!(at(Some(0xab)).to_string(), "file:1:2:3:ab");
        assert_eq!("file:1:2:3:ab".parse(), Ok(at(Some(0xab))));
        let file = at(None);
        assert_eq!(file.to_string(), "file:1:2:3");
        assert_eq!(serde_json::to_string(&file).unwrap(), "\"file:1:2:3\"");
        assert_eq!(
            serde_json::from_str::<Position>("\"file:1:2:3\"").unwrap(),
            file
        );
    }

    #[test]
    fn anything_else_is_refused() {
        let form =
            |text: &str| matches!(text.parse(), Err::<Position, _>(InvalidPosition::Form(_)));
        let texts = [
            "",
            "kmsg",
            "file:1:2",
            "file:1:2:3:4:5",
            "journal:x",
            "kmsg:a:1:2",
        ];
        assert!(texts.into_iter().all(form));
        assert!(matches!(
            "kmsg:x:1".parse::<Position>(),
            Err(InvalidPosition::BootId { .. }),
        ));
        for text in [
            "file:1:2:x",
            "file:1:2:-3",
            "file:1:2:18446744073709551616",
            "file:1:2:3:x",
        ] {
            assert!(matches!(
                text.parse::<Position>(),
                Err(InvalidPosition::Number { .. })
            ));
        }
        assert!(serde_json::from_str::<Position>("\"file:1\"").is_err());
    }

    proptest! {
        #[test]
        fn positions_come_back(dev: u64, ino: u64, offset: u64, line: Option<u64>, seq: u64) {
            let boot_id: BootId = BOOT_ID.parse().unwrap();
            let file = Position::File { dev, ino, offset, line };
            for position in [file, Position::Kmsg { boot_id, seq }] {
                prop_assert_eq!(position.to_string().parse::<Position>(), Ok(position));
            }
        }
    }
}
