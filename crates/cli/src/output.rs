//! Writes results and errors, for people or as JSON and YAML.

use std::io::{self, IsTerminal as _, Write};

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

pub(crate) use runtime::logging::plain;

use crate::args::Format;

/// Writes `value` as JSON or YAML. Returns `false` where the format is for people.
pub(crate) fn structured<T: Serialize>(format: Format, value: &T) -> anyhow::Result<bool> {
    let text = match format {
        Format::Text | Format::Wide => return Ok(false),
        Format::Json => serde_json::to_string_pretty(value)?,
        Format::Yaml => serde_saphyr::to_string(value)?,
    };
    line(text.trim_end())?;
    Ok(true)
}

/// Writes one line to standard output.
pub(crate) fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.write_all(b"\n")
}

/// Writes one line to standard output, formatted as by `println!`.
macro_rules! say {
    ($($text:tt)*) => {
        crate::output::line(&format!($($text)*))
    };
}
pub(crate) use say;

/// Writes a part of a line to standard output.
pub(crate) fn part(text: &str) -> io::Result<()> {
    io::stdout().lock().write_all(text.as_bytes())
}

/// A `List` is a list in JSON or YAML that is written one item at a time.
#[derive(Default)]
pub(crate) struct List {
    written: u64,
}

// === impl List ===

impl List {
    /// Writes one item.
    pub(crate) fn item(&mut self, format: Format, item: &impl Serialize) -> anyhow::Result<()> {
        if format == Format::Yaml {
            structured(format, &[item])?;
        } else {
            // The comma stands before the next one: nobody knows which is the last.
            let begin = if self.written == 0 { "[" } else { "," };
            part(&format!("{begin}\n  {}", serde_json::to_string(item)?))?;
        }
        self.written += 1;
        Ok(())
    }

    /// Writes the end of the list.
    pub(crate) fn end(&self, format: Format) -> io::Result<()> {
        match (format, self.written) {
            (Format::Json | Format::Yaml, 0) => line("[]"),
            (Format::Json, _) => line("\n]"),
            _ => Ok(()),
        }
    }
}

/// Writes a warning to standard error.
pub(crate) fn warning(text: &str) {
    let head = paint("warning", Colour::Yellow, io::stderr().is_terminal());
    // It fails only where nobody reads.
    drop(writeln!(io::stderr().lock(), "{head}: {}", plain(text)));
}

/// Writes rows as columns under their heads, two spaces apart.
pub(crate) fn table(heads: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
    let heads: Vec<String> = heads.iter().map(ToString::to_string).collect();
    let rows = || std::iter::once(&heads).chain(rows);
    let width = |column: usize| {
        let cells = rows().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    for row in rows() {
        let mut text = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            text.push_str(&format!("{cell:width$}  "));
        }
        line(text.trim_end())?;
    }
    Ok(())
}

/// Writes an error with its causes, and nothing else: it goes to standard error.
pub(crate) fn error(error: &anyhow::Error) {
    // It fails only where nobody reads.
    drop(writeln!(io::stderr().lock(), "{}", error_text(error)));
}

/// Returns an error with its causes, one a line.
pub(crate) fn error_text(error: &anyhow::Error) -> String {
    let mut text = format!(
        "{}: {error}",
        paint("error", Colour::Red, io::stderr().is_terminal())
    );
    for cause in causes(error) {
        text.push_str(&format!("\n  because: {cause}"));
    }
    text
}

/// Returns the causes of an error. Those of others repeat their own in what they say themselves.
fn causes(error: &anyhow::Error) -> Vec<String> {
    let mut causes: Vec<String> = error.chain().skip(1).map(ToString::to_string).collect();
    causes.dedup_by(|later, earlier| earlier.contains(later.as_str()));
    causes
}

/// Returns whether an error only says that the reader of our output has gone.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Keeps what a command found where it could not be told: a reader that has gone, as `head` does,
/// changes nothing about it.
pub(crate) fn even_if_unread<T>(told: anyhow::Result<T>, found: T) -> anyhow::Result<T> {
    match told {
        Err(error) if is_broken_pipe(&error) => Ok(found),
        told => told,
    }
}

/// Returns text of several lines that came from outside: the first as it stands, each further one
/// on a line of its own, behind `indent` spaces.
pub(crate) fn indented(text: &str, indent: usize) -> String {
    let gap = format!("\n{:indent$}", "");
    let lines: Vec<String> = text.trim_end().lines().map(plain).collect();
    lines.join(&gap)
}

/// Writes how long ago something was, in its largest unit: `42s`, `7m`, `3h`, `12d`.
pub(crate) fn ago(at: Timestamp, now: Timestamp) -> String {
    span(now.duration_since(at))
}

/// Writes a duration in its largest unit.
pub(crate) fn span(duration: SignedDuration) -> String {
    let seconds = duration.as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Returns a time for people: UTC, to the millisecond.
pub(crate) fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%S%.3f").to_string()
}

/// A `Colour` marks a word on the terminal.
#[derive(Clone, Copy)]
pub(crate) enum Colour {
    /// Bad.
    Red,
    /// In between.
    Yellow,
    /// Good.
    Green,
    /// By the way.
    Grey,
}

/// Colours a word for standard output, where that is a terminal.
pub(crate) fn colour(text: &str, colour: Colour) -> String {
    let on = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    paint(text, colour, on)
}

fn paint(text: &str, colour: Colour, on: bool) -> String {
    let code = match colour {
        Colour::Red => "31",
        Colour::Yellow => "33",
        Colour::Green => "32",
        Colour::Grey => "90",
    };
    if on {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_is_said_already_is_not_said_again() {
        let format = runtime::logging::LogFormat::Text;
        let error = runtime::logging::start("gpuwarden=bla", format, false).unwrap_err();
        let error = anyhow::Error::new(error);
        assert_eq!(error.chain().count(), 3);
        assert_eq!(causes(&error).len(), 1);
        let two = anyhow::anyhow!("c").context("b").context("a");
        assert_eq!(causes(&two), ["b", "c"]);
    }

    #[test]
    fn spans_have_one_unit() {
        for (seconds, text) in [
            (-5, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (7_200, "2h"),
            (200_000, "2d"),
        ] {
            assert_eq!(span(SignedDuration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn lines_stay_lines_and_cannot_steer_the_terminal_either() {
        assert_eq!(
            indented("a\r\nb\x1b[2J\n\nc\n", 2),
            "a\n  b\u{fffd}[2J\n  \n  c"
        );
        assert_eq!(indented("", 2), "");
    }

    #[test]
    fn text_from_outside_cannot_steer_the_terminal() {
        assert_eq!(
            plain("a\x1b[2Jb\rc\u{9b}d"),
            "a\u{fffd}[2Jb\u{fffd}c\u{fffd}d"
        );
        let bidi = "\u{61c}\u{200e}\u{200f}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\
                    \u{2066}\u{2067}\u{2068}\u{2069}";
        assert_eq!(plain(bidi), "\u{fffd}".repeat(12));
        assert_eq!(indented(bidi, 2), "\u{fffd}".repeat(12));
        let words = "\u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{200d}\u{2065}\u{206a}";
        assert_eq!(plain(words), words);
    }
}
