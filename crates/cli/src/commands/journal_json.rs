//! Rejects the journal's JSON, which is neither kernel log text nor an export of events.

use anyhow::bail;
use memchr::memmem;

/// Field of every journal entry, which no event and no kernel line has.
const FIELD: &[u8] = b"\"__REALTIME_TIMESTAMP\"";

/// Returns an error for text in the form of `journalctl -o json` or `json-pretty`.
pub(super) fn refuse(text: &[u8], name: &str) -> anyhow::Result<()> {
    let begins = matches!(text.trim_ascii_start().first(), Some(b'{' | b'[' | b'"'));
    if begins && memmem::find(text, FIELD).is_some() {
        bail!(
            "{name} is JSON of journalctl, which cannot be read; write the log as text: \
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
