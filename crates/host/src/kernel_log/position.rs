//! How far a source of kernel log has been read, in a form that outlives the process.

use std::{fmt, num::ParseIntError, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::boot::{BootId, InvalidBootId};

/// The place behind the last record that a source delivered.
///
/// Given back to [`open`](super::open), reading goes on there. Its text form is also its serialised
/// form: `kmsg:<boot id>:<sequence number>` or `file:<device>:<inode>:<offset>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Position {
    /// In the kernel's own log.
    Kmsg {
        /// The boot in which the number counts.
        boot_id: BootId,
        /// The number of the last record delivered.
        seq: u64,
    },
    /// In a file.
    File {
        /// The device that holds the file (`st_dev`).
        dev: u64,
        /// The file's number on that device (`st_ino`); it follows the file when it is renamed.
        ino: u64,
        /// Bytes from the start of the file to the end of the last line delivered.
        offset: u64,
    },
}

/// The text is not a position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPosition {
    /// It has neither of the two forms.
    #[error(
        "`{0}` is not a position: expected kmsg:<boot id>:<sequence number> or file:<device>:<inode>:<offset>"
    )]
    Form(String),
    /// The second part of a kmsg position is wrong.
    #[error("`{text}` holds no boot id")]
    BootId {
        /// The whole text.
        text: String,
        /// What is wrong.
        #[source]
        source: InvalidBootId,
    },
    /// A number is wrong.
    #[error("`{text}` holds a number that is not one")]
    Number {
        /// The whole text.
        text: String,
        /// What is wrong.
        #[source]
        source: ParseIntError,
    },
}

// === impl Position ===

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kmsg { boot_id, seq } => write!(f, "kmsg:{boot_id}:{seq}"),
            Self::File { dev, ino, offset } => write!(f, "file:{dev}:{ino}:{offset}"),
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
        let mut parts = text.split(':');
        match (
            parts.next(),
            parts.next(),
            parts.next(),
            parts.next(),
            parts.next(),
        ) {
            (Some("kmsg"), Some(boot_id), Some(seq), None, _) => Ok(Self::Kmsg {
                boot_id: boot_id.parse().map_err(|source| InvalidPosition::BootId {
                    text: text.to_owned(),
                    source,
                })?,
                seq: number(seq)?,
            }),
            (Some("file"), Some(dev), Some(ino), Some(offset), None) => Ok(Self::File {
                dev: number(dev)?,
                ino: number(ino)?,
                offset: number(offset)?,
            }),
            _ => Err(InvalidPosition::Form(text.to_owned())),
        }
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
        let file = Position::File {
            dev: 1,
            ino: 2,
            offset: 3,
        };
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
            "file:1:2:3:4",
            "journal:x",
            "kmsg:a:1:2",
        ];
        assert!(texts.into_iter().all(form));
        assert!(matches!(
            "kmsg:x:1".parse::<Position>(),
            Err(InvalidPosition::BootId { .. }),
        ));
        for text in ["file:1:2:x", "file:1:2:-3", "file:1:2:18446744073709551616"] {
            assert!(matches!(
                text.parse::<Position>(),
                Err(InvalidPosition::Number { .. })
            ));
        }
        assert!(serde_json::from_str::<Position>("\"file:1\"").is_err());
    }

    proptest! {
        #[test]
        fn positions_come_back(dev: u64, ino: u64, offset: u64, seq: u64) {
            let boot_id: BootId = BOOT_ID.parse().unwrap();
            for position in [Position::File { dev, ino, offset }, Position::Kmsg { boot_id, seq }] {
                prop_assert_eq!(position.to_string().parse::<Position>(), Ok(position));
            }
        }
    }
}
