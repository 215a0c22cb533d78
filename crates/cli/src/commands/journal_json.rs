//! The journal's own JSON, which is neither kernel log text nor an export of events.

use anyhow::bail;
use memchr::memmem;

/// A field that every entry has, and neither an event nor a line of the kernel.
const FIELD: &[u8] = b"\"__REALTIME_TIMESTAMP\"";

/// Refuses text that begins as `journalctl -o json` and `json-pretty` write it.
pub(super) fn refuse(text: &[u8], name: &str) -> anyhow::Result<()> {
    let begins = matches!(text.trim_ascii_start().first(), Some(b'{' | b'[' | b'"'));
    if begins && memmem::find(text, FIELD).is_some() {
        bail!(
            "{name} is JSON of journalctl, which is not read; write the log as text: \
             journalctl -k -o short-iso-precise"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_of_the_journal_is_told_from_lines_and_events() {
        for (text, refused) in [
            (
                r#"{"__CURSOR":"s=1","__REALTIME_TIMESTAMP":"1","MESSAGE":"x"}"#,
                true,
            ),
            ("{\n\t\"__REALTIME_TIMESTAMP\" : \"1\",", true),
            ("\t\"__REALTIME_TIMESTAMP\" : \"1\",", true),
            (r#"{"nodeName": "n1"}"#, false),
            ("[   12.3] x", false),
            (r#"docker: {"__REALTIME_TIMESTAMP":"1"}"#, false),
            ("", false),
        ] {
            let found = refuse(text.as_bytes(), "k.json");
            assert_eq!(found.is_err(), refused, "{text}");
            if let Err(error) = found {
                assert!(
                    error
                        .to_string()
                        .starts_with("k.json is JSON of journalctl")
                );
            }
        }
    }
}
