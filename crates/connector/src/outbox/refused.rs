//! Events that the controller has refused, for a person to look at: a line of JSON each,
//! with the reason. Nothing reads the file again.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use contract::json;
use serde_json::json;
use store::NewEvent;

const FILE: &str = "refused.jsonl";
/// Where the file goes when it is full; what was there is dropped.
const OLD_FILE: &str = "refused.old.jsonl";
/// Size at which a file is full (bytes). Refusals are a mistake of a sender or a name;
/// whoever looks for it needs some of them, not all.
const MAX_BYTES: u64 = 1024 * 1024;

/// Adds events to the file in `directory`.
pub(super) fn append(directory: &Path, events: &[(NewEvent, String)]) -> io::Result<()> {
    let path = directory.join(FILE);
    if fs::metadata(&path).is_ok_and(|metadata| metadata.len() >= MAX_BYTES) {
        fs::rename(&path, directory.join(OLD_FILE))?;
    }
    let mut text = String::new();
    for (NewEvent { event, received_at }, reason) in events {
        let line = json!({
            "reason": reason,
            "acceptedAt": received_at.to_string(),
            "event": json::to_value(event),
        });
        text.push_str(&line.to_string());
        text.push('\n');
    }
    let mut options = OpenOptions::new();
    let mut file = options.create(true).append(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_data()
}
