//! File of events that the receiver refuses, for a person to inspect: one line of JSON each,
//! with the reason. This program only reads the number of lines and the ids of events, so
//! damage to the file costs only the damaged lines.

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use contract::json;
use serde_json::json;
use store::NewEvent;

use super::disk;

pub(super) const FILE: &str = "refused.jsonl";
/// Name of a full file; the previous file of this name is dropped.
const OLD_FILE: &str = "refused.old.jsonl";
/// Size that closes a file (bytes). Refusals come from a mistake in a sender or a name, and a
/// person needs only some of them to find it.
const MAX_BYTES: u64 = 1024 * 1024;
/// Most bytes of a file that are counted: a full file and the last events of one delivery. A
/// larger file is not from this program.
const MAX_COUNTED: u64 = 8 * MAX_BYTES;

/// Adds events to the file in `directory`, all or none.
pub(super) fn append(directory: &Path, events: &[(NewEvent, String)]) -> io::Result<()> {
    let path = directory.join(FILE);
    if fs::metadata(&path).is_ok_and(|metadata| metadata.len() >= MAX_BYTES) {
        fs::rename(&path, directory.join(OLD_FILE))?;
    }
    let mut options = OpenOptions::new();
    let options = options.create(true).read(true).write(true).truncate(false);
    let file = options.mode(0o600).open(path)?;
    let end = file.metadata()?.len();
    let mut text = String::new();
    let mut last = [b'\n'];
    if end > 0 {
        file.read_exact_at(&mut last, end - 1)?;
    }
    if last != [b'\n'] {
        // A write was cut short: the next line must not be joined to its end.
        text.push('\n');
    }
    for (NewEvent { event, received_at }, reason) in events {
        let line = json!({
            "reason": reason,
            "acceptedAt": received_at.to_string(),
            "event": json::to_value(event),
        });
        text.push_str(&line.to_string());
        text.push('\n');
    }
    let mut written = disk::write(&file, text.as_bytes(), end).and_then(|()| disk::sync(&file));
    if end == 0 {
        // The file is new, and a full one may have been renamed.
        written = written.and_then(|()| disk::sync_directory(directory));
    }
    written.inspect_err(|_| {
        // The write is retried later, and must not follow half of itself.
        let _ = file.set_len(end);
    })
}

/// Returns the ids of the readable events in the files in `directory`: these are not sent
/// again.
pub(super) fn ids(directory: &Path) -> HashSet<String> {
    let mut ids = HashSet::new();
    for name in [OLD_FILE, FILE] {
        for line in read(directory, name)
            .unwrap_or_default()
            .split(|byte| *byte == b'\n')
        {
            let line = serde_json::from_slice::<serde_json::Value>(line).unwrap_or_default();
            ids.extend(line["event"]["id"].as_str().map(str::to_owned));
        }
    }
    ids
}

/// Returns the number of readable events in the files in `directory`.
pub(super) fn count(directory: &Path) -> u64 {
    let lines = |name| {
        let bytes = read(directory, name)?;
        let lines = bytes.split(|byte| *byte == b'\n');
        io::Result::Ok(lines.filter(|line| !line.is_empty()).count() as u64)
    };
    lines(FILE).unwrap_or(0) + lines(OLD_FILE).unwrap_or(0)
}

fn read(directory: &Path, name: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = fs::File::open(directory.join(name))?;
    file.take(MAX_COUNTED).read_to_end(&mut bytes)?;
    Ok(bytes)
}
