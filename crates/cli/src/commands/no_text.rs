//! Rejects files that are not text, such as compressed logs.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, bail};

/// Number of bytes at the beginning that are examined.
const BEGIN: u64 = 8 * 1024;

/// Returns an error for a file that is not text. A pipe is not examined, since reading would consume
/// its data.
pub(super) fn refuse(path: &Path, command: &str) -> anyhow::Result<()> {
    if !path.is_file() {
        return Ok(());
    }
    let mut begin = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BEGIN).read_to_end(&mut begin));
    read.with_context(|| format!("cannot read {}", path.display()))?;
    match no_text(&begin, command) {
        Some(what) => bail!("{} is {what}", path.display()),
        None => Ok(()),
    }
}

/// Returns the kind of a file that is not text by its beginning, and what to do. `command` is the
/// command that reads the text from standard input.
pub(super) fn no_text(begin: &[u8], command: &str) -> Option<String> {
    const PACKED: [(&[u8], &str, &str); 5] = [
        (b"\x1f\x8b", "gzip", "zcat"),
        (b"\x28\xb5\x2f\xfd", "zstd", "zstdcat"),
        (b"\xfd7zXZ\0", "xz", "xzcat"),
        (b"BZh", "bzip2", "bzcat"),
        (b"\x04\x22\x4d\x18", "lz4", "lz4cat"),
    ];
    if let Some((_, form, tool)) = PACKED.iter().find(|(magic, ..)| begin.starts_with(magic)) {
        return Some(format!(
            "compressed ({form}); unpack it: `{tool} FILE | {command}`"
        ));
    }
    if begin.starts_with(b"LPKSHHRH") {
        return Some(format!(
            "a file of the journal; write it as text: `journalctl --file FILE -k -o \
             short-iso-precise | {command}`"
        ));
    }
    // Zeros do not count unless there is nothing else: a crash may leave them in a log.
    let written = begin.iter().filter(|byte| **byte != 0).count();
    let odd =
        |c: &char| matches!(c, '\u{fffd}' | '\u{1}'..='\u{8}' | '\u{e}'..='\u{1a}' | '\u{7f}');
    let odd = String::from_utf8_lossy(begin).chars().filter(odd).count();
    let binary = odd > written / 10 || written == 0 && !begin.is_empty();
    binary.then(|| {
        "no text; kernel logs are read as `dmesg` or `journalctl -k` write them, and events as \
         `gpuwarden events -o json` does"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_text_is_told_from_damaged_logs() {
        for (begin, expected) in [
            (&b"\x1f\x8b\x08\x00abc"[..], Some("zcat FILE")),
            (b"\x28\xb5\x2f\xfdabc", Some("zstdcat FILE")),
            (b"LPKSHHRH\0\0", Some("journalctl --file FILE")),
            (b"\0\0\0", Some("no text")),
            (b"\x80\x92\x07\x99\xff a\x01", Some("no text")),
            (b"", None),
            (b"[    1.000000] a \x1b[31m caf\xe9 of a driver\n", None),
            ("[    1.000000] caf\u{e9} \u{1f600}\n".as_bytes(), None),
            (
                b"[    1.000000] a line\n\0\0\0\0\0\0\0\0\0[ 2.0] next\n",
                None,
            ),
        ] {
            let found = no_text(begin, "gpuwarden decode");
            match expected {
                Some(part) => assert!(
                    found.as_ref().is_some_and(|it| it.contains(part)),
                    "{found:?}"
                ),
                None => assert_eq!(found, None, "{begin:?}"),
            }
        }
    }
}
