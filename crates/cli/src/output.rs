//! Writes results and errors, as text for people or as JSON and YAML.

use std::io::{self, IsTerminal as _, Write};

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

pub(crate) use runtime::logging::plain;

use crate::args::Format;

/// Writes `value` as JSON or YAML. Returns false if the format is text.
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
    part(&format!("{text}\n"))
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
    write(text)
}

/// A list in JSON or YAML, written one item at a time.
#[derive(Default)]
pub(crate) struct StreamedList {
    written: u64,
}

// === impl StreamedList ===

impl StreamedList {
    pub(crate) fn item(&mut self, format: Format, item: &impl Serialize) -> anyhow::Result<()> {
        if format == Format::Yaml {
            structured(format, &[item])?;
        } else {
            // A comma precedes each further item, since the last one is not known in advance.
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

/// Writes a line about the output to standard error.
pub(crate) fn note(text: &str) {
    // A closed standard error is no reason to fail.
    drop(writeln!(io::stderr().lock(), "{text}"));
}

/// Writes a warning to standard error.
pub(crate) fn warning(text: &str) {
    let head = paint("warning", Colour::Yellow, io::stderr().is_terminal());
    // A closed standard error is no reason to fail.
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

/// Writes an error with its causes to standard error.
pub(crate) fn error(error: &anyhow::Error) {
    // A closed standard error is no reason to fail.
    drop(writeln!(io::stderr().lock(), "{}", error_text(error)));
}

/// Returns an error with its causes, one per line.
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

/// Returns the causes of an error, without those that the text of the error above repeats.
fn causes(error: &anyhow::Error) -> Vec<String> {
    let mut causes: Vec<String> = error.chain().skip(1).map(ToString::to_string).collect();
    causes.dedup_by(|later, earlier| earlier.contains(later.as_str()));
    causes
}

/// Returns true if the reader of the output, such as `head`, has closed the pipe.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Ignores a broken pipe, which does not change the exit code.
pub(crate) fn even_if_unread(written: anyhow::Result<()>) -> anyhow::Result<()> {
    match written {
        Err(error) if is_broken_pipe(&error) => Ok(()),
        written => written,
    }
}

/// Writes one document of an endless stream as JSON, on one line, or YAML. Returns false if the
/// format is text.
pub(crate) fn document<T: Serialize>(format: Format, value: &T) -> anyhow::Result<bool> {
    match format {
        Format::Text | Format::Wide => return Ok(false),
        Format::Json => line(&serde_json::to_string(value)?)?,
        Format::Yaml => {
            line("---")?;
            structured(format, value)?;
        }
    }
    Ok(true)
}

/// Returns a count with its noun, which gets an `s` unless the count is 1.
pub(crate) fn plural(count: u64, noun: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{s}")
}

/// Returns text of several lines from outside, without control characters. Each line after the first
/// has `indent` spaces before it.
pub(crate) fn indented(text: &str, indent: usize) -> String {
    let gap = format!("\n{:indent$}", "");
    let lines: Vec<String> = text.trim_end().lines().map(plain).collect();
    lines.join(&gap)
}

/// Returns the time since `at` in its largest unit: `42s`, `7m`, `3h`, `12d`.
pub(crate) fn ago(at: Timestamp, now: Timestamp) -> String {
    span(now.duration_since(at))
}

/// Returns a duration in its largest unit.
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

/// Colour of a word on the terminal.
#[derive(Clone, Copy)]
pub(crate) enum Colour {
    Red,
    Yellow,
    Green,
    Grey,
}

/// Colours a word if standard output is a terminal.
pub(crate) fn colour(text: &str, colour: Colour) -> String {
    let on = !cfg!(test) && io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
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

#[cfg(not(test))]
fn write(text: &str) -> io::Result<()> {
    io::stdout().lock().write_all(text.as_bytes())
}

#[cfg(test)]
pub(crate) use tests::{take_written, write};

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        static WRITTEN: RefCell<String> = const { RefCell::new(String::new()) };
    }

    /// Takes the place of standard output in unit tests: keeps the text for [`take_written`].
    #[expect(
        clippy::unnecessary_wraps,
        reason = "the signature of the product's own"
    )]
    pub(crate) fn write(text: &str) -> io::Result<()> {
        WRITTEN.with_borrow_mut(|written| written.push_str(text));
        Ok(())
    }

    /// Returns the output of this thread so far, and clears it.
    pub(crate) fn take_written() -> String {
        WRITTEN.take()
    }

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
