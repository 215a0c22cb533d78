//! Parsers of the values of settings: durations, sizes, permission bits, choices and files.

use std::path::Path;

use contract::findings::{FileError, MAX_FILE_BYTES};
use jiff::{SignedDuration, Span, SpanRelativeTo};
use runtime::text_file;

use super::SettingsError;

/// Parses a duration such as `30d`, `12h` or `1h30m`. A day has 24 hours. The result is never
/// negative.
pub(crate) fn duration(name: &'static str, text: &str) -> Result<SignedDuration, SettingsError> {
    text.parse::<Span>()
        .and_then(|span| span.to_duration(SpanRelativeTo::days_are_24_hours()))
        .ok()
        .filter(|duration| !duration.is_negative())
        .ok_or_else(|| SettingsError::value(name, text, "is not a duration such as 15m, 2h or 30d"))
}

/// Parses a size such as `512MiB`, `1GiB` or `2GB`, or a number of bytes.
pub(super) fn bytes(name: &'static str, text: &str) -> Result<u64, SettingsError> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "kb" => Some(1_000),
        "mb" => Some(1_000_000),
        "gb" => Some(1_000_000_000),
        "k" | "ki" | "kib" => Some(1 << 10),
        "m" | "mi" | "mib" => Some(1 << 20),
        "g" | "gi" | "gib" => Some(1 << 30),
        "t" | "ti" | "tib" => Some(1_u64 << 40),
        _ => None,
    };
    number
        .parse::<u64>()
        .ok()
        .zip(factor)
        .and_then(|(number, factor)| number.checked_mul(factor))
        .ok_or_else(|| SettingsError::value(name, text, "is not a size such as 512MiB or 1GiB"))
}

/// Parses permission bits of user, group and others in octal, `0660` or `660`.
pub(super) fn mode(name: &'static str, text: &str) -> Result<u32, SettingsError> {
    let digits = text.bytes().all(|digit| digit.is_ascii_digit());
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| digits && *mode <= 0o777)
        .ok_or_else(|| {
            SettingsError::value(name, text, "is not a file mode such as 666, 660 or 600")
        })
}

/// Returns the value of a flag with two choices; the first is the default.
pub(super) fn choice<T>(
    name: &'static str,
    text: Option<&str>,
    [(first, default), (second, other)]: [(&str, T); 2],
) -> Result<T, SettingsError> {
    match text {
        None => Ok(default),
        Some(text) if text == first => Ok(default),
        Some(text) if text == second => Ok(other),
        Some(text) => {
            let what = format!("is neither {first} nor {second}");
            Err(SettingsError::value(name, text, what))
        }
    }
}

/// Reads the file that a flag names, and parses its text; the second argument of `parse` is the
/// file's name.
pub(super) fn parsed<T>(
    name: &'static str,
    path: &Path,
    parse: impl FnOnce(&str, &str) -> Result<T, FileError>,
) -> Result<T, SettingsError> {
    let source = path.display().to_string();
    let wrong = |what: String| SettingsError::value(name, &source, what);
    let text = text_file::read(path, MAX_FILE_BYTES)
        .map_err(|error| wrong(format!("cannot be read: {error}")))?;
    parse(&text, &source).map_err(|error| wrong(format!("is not right:\n{error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_people_write_them() {
        for (text, seconds) in [
            ("90s", 90),
            ("15m", 900),
            ("1h30m", 5_400),
            ("30d", 2_592_000),
        ] {
            assert_eq!(duration("--x", text).unwrap().as_secs(), seconds, "{text}");
        }
        for (text, expected) in [
            ("4096", 4_096),
            ("512MiB", 512 << 20),
            ("1Gi", 1 << 30),
            ("2 GB", 2_000_000_000),
        ] {
            assert_eq!(bytes("--x", text).unwrap(), expected, "{text}");
        }
        for text in ["", "soon", "-5m"] {
            let error = duration("--x", text).unwrap_err().to_string();
            assert!(error.contains("--x"), "{error}");
        }
        for text in ["", "MiB", "1.5GiB", "1 apple", "99999999999TiB", "-1"] {
            assert!(bytes("--x", text).is_err(), "{text}");
        }
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(mode("--x", "0660").unwrap(), 0o660);
        assert_eq!(mode("--x", "600").unwrap(), 0o600);
        for text in ["", "68", "1777", "rw", "+66", "-1"] {
            assert!(mode("--x", text).is_err(), "{text}");
        }
    }
}
