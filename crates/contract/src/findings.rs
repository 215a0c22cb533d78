//! Findings about a configuration file: each with its line, and all of them at once, so that
//! one edit can fix the file.

use std::fmt::Display;

use serde::de::DeserializeOwned;
use toml::Spanned;

/// Most findings that are listed; a file with more gets a line that says so.
const MAX_FINDINGS: usize = 100;

/// File that cannot be used, with every finding, one per line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", findings.join("\n"))]
pub struct FileError {
    /// Findings as `file:line: what`.
    pub findings: Vec<String>,
}

/// Collector of the findings about a file.
#[derive(Clone, Debug)]
pub struct Findings<'a> {
    text: &'a str,
    source: &'a str,
    found: Vec<String>,
    /// Start of the entry being read (byte offset).
    entry_at: usize,
    /// Title of that entry for people.
    entry: String,
}

/// Returns the line, from 1, of the byte at `offset`.
pub fn line_of(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().iter().take(offset);
    1 + before.filter(|byte| **byte == b'\n').count()
}

/// Returns `line N: ` for the first line of a YAML file that contains `part`, or an empty text:
/// the YAML reader does not report the position of a value.
pub fn on_line_with(text: &str, part: &str) -> String {
    let line = text
        .lines()
        .position(|line| !part.is_empty() && line.contains(part));
    line.map_or_else(String::new, |line| format!("line {}: ", line + 1))
}

/// Returns the byte offset of a TOML error.
pub fn start_of(error: &toml::de::Error) -> usize {
    error.span().map_or(0, |span| span.start)
}

// === impl Findings ===

impl<'a> Findings<'a> {
    /// Creates an empty collector for `text`. `source` names the file in findings.
    pub fn new(text: &'a str, source: &'a str) -> Self {
        Self {
            text,
            source,
            found: Vec::new(),
            entry_at: 0,
            entry: String::new(),
        }
    }

    /// Parses TOML; a syntax error is the only finding.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, FileError> {
        toml::from_str(self.text)
            .map_err(|error| self.clone().stop(start_of(&error), error.message()))
    }

    /// Starts an entry of the file. `title` returns the entry's name for people.
    pub fn begin<T>(&mut self, entry: Spanned<T>, title: impl Fn(&T) -> String) -> T {
        self.entry_at = entry.span().start;
        self.entry = title(entry.get_ref());
        entry.into_inner()
    }

    /// Records a problem with the current entry.
    pub fn wrong(&mut self, what: impl Display) {
        self.wrong_at(self.entry_at, what);
    }

    /// Records a problem at `offset` in the current entry.
    pub fn wrong_at(&mut self, offset: usize, what: impl Display) {
        let what = format!("{}: {what}", self.entry);
        self.at(offset, &what);
    }

    /// Returns the place of the current entry: `file:line`.
    pub fn entry_place(&self) -> String {
        self.place(self.entry_at)
    }

    /// Records a problem at `offset`.
    pub fn at(&mut self, offset: usize, what: &str) {
        // In a file with thousands of findings, line numbers are computed only for those
        // listed.
        if self.found.len() <= MAX_FINDINGS {
            self.on_line(line_of(self.text, offset), what);
        }
    }

    /// Records a problem on `line`.
    pub fn on_line(&mut self, line: usize, what: &str) {
        let what = match self.found.len() {
            ..MAX_FINDINGS => what,
            MAX_FINDINGS => "there are more findings, which are not listed",
            _ => return,
        };
        self.found.push(format!("{}:{line}: {what}", self.source));
    }

    /// Returns the text of a finding without recording it, for problems that do no harm.
    pub fn said(&self, offset: usize, what: &str) -> String {
        format!("{}: {what}", self.place(offset))
    }

    /// Returns the place of `offset`: `file:line`.
    pub fn place(&self, offset: usize) -> String {
        format!("{}:{}", self.source, line_of(self.text, offset))
    }

    /// Returns the error for a problem at `offset` that prevents further checks.
    pub fn stop(self, offset: usize, what: &str) -> FileError {
        let line = line_of(self.text, offset);
        self.stop_on_line(line, what)
    }

    /// Returns the error for a problem on `line` that prevents further checks.
    pub fn stop_on_line(mut self, line: usize, what: &str) -> FileError {
        self.on_line(line, what);
        FileError {
            findings: self.found,
        }
    }

    /// Returns `value` if there are no findings.
    pub fn result<T>(self, value: T) -> Result<T, FileError> {
        if self.found.is_empty() {
            Ok(value)
        } else {
            Err(FileError {
                findings: self.found,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_has_its_line_and_a_hundred_are_told() {
        let text = "a = 1\nb = 2\n";
        let mut findings = Findings::new(text, "f.toml");
        findings.at(0, "first");
        findings.at(6, "second");
        findings.at(text.len(), "behind");
        findings.at(usize::MAX, "beyond");
        let error = findings.clone().result(()).unwrap_err().to_string();
        assert_eq!(
            error,
            "f.toml:1: first\nf.toml:2: second\nf.toml:3: behind\nf.toml:3: beyond"
        );
        for _ in 0..200 {
            findings.at(0, "again");
        }
        let error = findings.stop(6, "last");
        assert_eq!(error.findings.len(), MAX_FINDINGS + 1);
        assert!(error.findings[MAX_FINDINGS].contains("more findings"));
    }

    #[test]
    fn what_the_reader_refuses_is_the_only_finding() {
        #[derive(serde::Deserialize, Debug)]
        struct File {
            #[serde(rename = "a")]
            _a: u8,
        }
        let error = Findings::new("b = 2\na = 'x'\n", "f").parse::<File>();
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("f:2: invalid type"), "{error}");
        assert!(Findings::new("a = 1", "f").parse::<File>().is_ok());
    }
}
