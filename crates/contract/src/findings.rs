//! Findings about a file that people write: each with the line it stands on, and all of them at
//! once, so that a file is mended in one go.

use std::fmt::Display;

use serde::de::DeserializeOwned;
use toml::Spanned;

/// Findings that are told; who has made more begins with these.
const MAX_FINDINGS: usize = 100;

/// A file that cannot be used: every finding, one per line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", findings.join("\n"))]
pub struct FileError {
    /// Findings as `file:line: what`.
    pub findings: Vec<String>,
}

/// Collects the findings about a file.
#[derive(Clone, Debug)]
pub struct Findings<'a> {
    text: &'a str,
    source: &'a str,
    found: Vec<String>,
    /// The byte at which the entry begins that is read.
    entry_at: usize,
    /// The name of that entry for people.
    entry: String,
}

/// Returns the line, from 1, on which the byte at `offset` stands.
pub fn line_of(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().iter().take(offset);
    1 + before.filter(|byte| **byte == b'\n').count()
}

/// Returns `line N: ` for the first line of a YAML file that has `part`, and nothing where none has: its
/// reader does not say where a value stands.
pub fn on_line_with(text: &str, part: &str) -> String {
    let line = text
        .lines()
        .position(|line| !part.is_empty() && line.contains(part));
    line.map_or_else(String::new, |line| format!("line {}: ", line + 1))
}

/// Returns the byte at which the text begins that a TOML error is about.
pub fn start_of(error: &toml::de::Error) -> usize {
    error.span().map_or(0, |span| span.start)
}

// === impl Findings ===

impl<'a> Findings<'a> {
    /// Returns no findings about `text` yet. `source` names the file in those to come.
    pub fn new(text: &'a str, source: &'a str) -> Self {
        Self {
            text,
            source,
            found: Vec::new(),
            entry_at: 0,
            entry: String::new(),
        }
    }

    /// Reads TOML; what the reader itself refuses is the only finding.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, FileError> {
        toml::from_str(self.text)
            .map_err(|error| self.clone().stop(start_of(&error), error.message()))
    }

    /// Begins to read an entry of the file, which has the name `title` for people.
    pub fn begin<T>(&mut self, entry: Spanned<T>, title: impl Fn(&T) -> String) -> T {
        self.entry_at = entry.span().start;
        self.entry = title(entry.get_ref());
        entry.into_inner()
    }

    /// Notes what is wrong with the entry that is read.
    pub fn wrong(&mut self, what: impl Display) {
        self.wrong_at(self.entry_at, what);
    }

    /// Notes what is wrong at `offset` in the entry that is read.
    pub fn wrong_at(&mut self, offset: usize, what: impl Display) {
        let what = format!("{}: {what}", self.entry);
        self.at(offset, &what);
    }

    /// Returns the place at which the entry begins that is read: `file:line`.
    pub fn entry_place(&self) -> String {
        self.place(self.entry_at)
    }

    /// Notes what is wrong at `offset`.
    pub fn at(&mut self, offset: usize, what: &str) {
        // Of a file with thousands, only those that are told are looked up.
        if self.found.len() <= MAX_FINDINGS {
            self.on_line(line_of(self.text, offset), what);
        }
    }

    /// Notes what is wrong on `line`.
    pub fn on_line(&mut self, line: usize, what: &str) {
        let what = match self.found.len() {
            ..MAX_FINDINGS => what,
            MAX_FINDINGS => "there are more findings, which are not listed",
            _ => return,
        };
        self.found.push(format!("{}:{line}: {what}", self.source));
    }

    /// Returns a finding as its text, without noting it: for what is wrong and does no harm.
    pub fn said(&self, offset: usize, what: &str) -> String {
        format!("{}: {what}", self.place(offset))
    }

    /// Returns the place of `offset`: `file:line`.
    pub fn place(&self, offset: usize) -> String {
        format!("{}:{}", self.source, line_of(self.text, offset))
    }

    /// Returns the error where what is wrong at `offset` keeps the rest from being looked at.
    pub fn stop(self, offset: usize, what: &str) -> FileError {
        let line = line_of(self.text, offset);
        self.stop_on_line(line, what)
    }

    /// Returns the error where what is wrong on `line` keeps the rest from being looked at.
    pub fn stop_on_line(mut self, line: usize, what: &str) -> FileError {
        self.on_line(line, what);
        FileError {
            findings: self.found,
        }
    }

    /// Returns `value` where nothing is wrong.
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
