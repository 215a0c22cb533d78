//! Loader of configuration files: TOML, YAML and JSON. It reports every finding about a file
//! with its line and key, so that one edit can fix the file.

mod keys;
mod words;

use std::cell::OnceCell;
use std::fmt::Display;
use std::ops::RangeInclusive;

use jiff::SignedDuration;
use serde::de::DeserializeOwned;
use toml::Spanned;

pub use keys::Key;
use keys::Keys;

/// Largest configuration file (bytes): the limit of a `ConfigMap`.
pub const MAX_FILE_BYTES: usize = 1024 * 1024;
/// Most findings that are listed; a file with more gets a line that says so.
const MAX_FINDINGS: usize = 100;

/// Format of a configuration file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Most files: `name = "value"`.
    Toml,
    /// Files of the janitor, its tests and preflight: `name: value`.
    Yaml,
    /// File of the connector: `{"name": "value"}`.
    Json,
}

/// File that cannot be used, with every finding, one per line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", findings.join("\n"))]
pub struct FileError {
    /// Findings as `file:line: what`.
    pub findings: Vec<String>,
    /// Line of the first finding.
    pub line: usize,
}

/// Collector of the findings about a file.
#[derive(Clone, Debug)]
pub struct Findings<'a> {
    text: &'a str,
    source: &'a str,
    format: Format,
    keys: OnceCell<Keys>,
    /// Path of the table that holds the configuration; empty for the whole file.
    root: String,
    found: Vec<String>,
    /// Number of findings so far, with equal ones, up to the first one beyond the limit.
    count: usize,
    /// Line of the first finding.
    line: usize,
    /// Start of the entry being read (byte offset).
    entry_at: usize,
    /// Title of that entry for people.
    entry: String,
}

/// Returns the line, from 1, of the byte at `offset`.
fn line_of(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().iter().take(offset);
    1 + before.filter(|byte| **byte == b'\n').count()
}

/// Returns the byte offset of the begin of a line.
fn start_of_line(text: &str, line: usize) -> usize {
    let lines = text.split_inclusive('\n').take(line.saturating_sub(1));
    lines.map(str::len).sum()
}

// === impl Findings ===

impl<'a> Findings<'a> {
    /// Reads a file. `source` names it in findings. A file that cannot be deserialized has one
    /// finding; the returned collector is for those about its values.
    pub fn read<T: DeserializeOwned>(
        text: &'a str,
        source: &'a str,
        format: Format,
    ) -> Result<(T, Self), FileError> {
        let findings = Self::new(text, source, format)?;
        Ok((findings.parse()?, findings))
    }

    /// Creates an empty collector for a file that is not too large.
    pub fn new(text: &'a str, source: &'a str, format: Format) -> Result<Self, FileError> {
        let findings = Self {
            text,
            source,
            format,
            keys: OnceCell::new(),
            root: String::new(),
            found: Vec::new(),
            count: 0,
            line: 1,
            entry_at: 0,
            entry: String::new(),
        };
        if text.len() > MAX_FILE_BYTES {
            let found = text.len();
            let what = format!("it has {found} bytes, at most {MAX_FILE_BYTES} are taken");
            return Err(findings.stop(0, &what));
        }
        Ok(findings)
    }

    /// Deserializes the file; the first error is the only finding.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, FileError> {
        self.parse_with(|_| None)
    }

    /// Deserializes the file. `example` returns the form of a key's values, if it knows that
    /// better than the type says.
    pub fn parse_with<T: DeserializeOwned>(
        &self,
        example: impl Fn(&Key) -> Option<String>,
    ) -> Result<T, FileError> {
        words::deserialize(self.text, self.format).map_err(|error| {
            let (at, what) = error.explain(self.text, self.keys(), example);
            self.clone().stop(at, &what)
        })
    }

    /// Returns the keys of the file.
    pub fn keys(&self) -> &[Key] {
        self.by_path().all()
    }

    fn by_path(&self) -> &Keys {
        let read = || Keys::read(self.text, self.format);
        self.keys.get_or_init(read)
    }

    /// Reads the configuration from below a key of the file, if the file has that key: paths of
    /// findings begin there.
    pub fn enter_table(&mut self, root: &str) -> bool {
        let is_there = self.by_path().get(root).is_some();
        if is_there {
            root.clone_into(&mut self.root);
        }
        is_there
    }

    /// Records a problem with the value at `path`, such as `validation.action` or
    /// `taints[0].key`. If the file has no such key, the finding is on the line of the table
    /// that misses it.
    pub fn at_key(&mut self, path: &str, what: impl Display) {
        if self.is_full() {
            return;
        }
        let path = keys::joined(&self.root, path);
        self.at(self.offset_of(&path), &format!("{path}: {what}"));
    }

    /// Records that the value at `path`, which is shown as the file has it, is not what belongs
    /// there.
    pub fn refuse(&mut self, path: &str, wanted: impl Display) {
        if self.is_full() {
            return;
        }
        let path = keys::joined(&self.root, path);
        let what = match self.by_path().get(&path) {
            Some(key) => format!("{path} is {}; {wanted}", words::shown(self.text, key)),
            None if self.is_elsewhere(&path) => format!("the value of {path} is wrong; {wanted}"),
            None => format!("{path} is missing; {wanted}"),
        };
        self.at(self.offset_of(&path), &what);
    }

    /// Records that the key at `path` is none of those that its table may have.
    pub fn unknown_key(&mut self, path: &str, known: &[&str]) {
        if self.is_full() {
            return;
        }
        let path = keys::joined(&self.root, path);
        let name = self.by_path().get(&path).map_or(&*path, |key| &key.name);
        let what = words::unknown_key(&path, name, known);
        self.at(self.offset_of(&path), &what);
    }

    /// Returns the value of a check or of a conversion; its error is recorded.
    pub fn check<T, E: Display>(&mut self, path: &str, checked: Result<T, E>) -> Option<T> {
        checked.map_err(|error| self.at_key(path, error)).ok()
    }

    /// Returns a number within `range`, and records any other. `unit` names what it counts, such
    /// as ` of minutes`, and may be empty.
    pub fn whole_number(
        &mut self,
        path: &str,
        number: Option<i64>,
        range: RangeInclusive<i64>,
        unit: &str,
    ) -> Option<i64> {
        let number = number?;
        if range.contains(&number) {
            return Some(number);
        }
        let (least, most) = range.into_inner();
        let wanted = format!("write a whole number{unit} from {least} to {most}");
        self.refuse(path, wanted);
        None
    }

    /// Returns a number of minutes within `range`.
    pub fn minutes(
        &mut self,
        path: &str,
        number: Option<i64>,
        range: RangeInclusive<i64>,
    ) -> Option<SignedDuration> {
        let minutes = self.whole_number(path, number, range, " of minutes");
        minutes.map(SignedDuration::from_mins)
    }

    /// Returns a duration above zero and up to `most`.
    pub fn duration(
        &mut self,
        path: &str,
        text: &str,
        most: SignedDuration,
    ) -> Option<SignedDuration> {
        let duration = text.trim().parse::<SignedDuration>().ok();
        let fits = |one: &SignedDuration| one.is_positive() && *one <= most;
        let duration = duration.filter(fits);
        if duration.is_none() {
            let limit = if most == SignedDuration::MAX {
                String::new()
            } else {
                format!(", at most {most:#}")
            };
            let wanted = format!("write a duration above zero such as 90s, 3m or 1h{limit}");
            self.refuse(path, wanted);
        }
        duration
    }

    /// Returns the choice with this name.
    pub fn one_of<T: Copy>(&mut self, path: &str, name: &str, choices: &[(&str, T)]) -> Option<T> {
        let found = choices.iter().find(|(known, _)| *known == name);
        if found.is_none() {
            let names: Vec<&str> = choices.iter().map(|(known, _)| *known).collect();
            self.refuse(path, words::one_of(name, &names));
        }
        found.map(|(_, choice)| *choice)
    }

    /// Returns the offset of the key at `path`, or else of the nearest table around it.
    fn offset_of(&self, path: &str) -> usize {
        let key = self.nearest(path);
        key.map_or(0, |key| key.at.unwrap_or(key.value.start))
    }

    /// Returns the key at `path`, or else of the nearest table around it.
    fn nearest(&self, path: &str) -> Option<&Key> {
        let mut path = path;
        loop {
            if let Some(key) = self.by_path().get(path) {
                return Some(key);
            }
            path = path.get(..path.rfind(['.', '['])?)?;
        }
    }

    /// Returns true if there can be a value at a `path` without a key: from an alias or a merge
    /// of YAML, or beyond the elements of lists that have keys.
    fn is_elsewhere(&self, path: &str) -> bool {
        let key = self.nearest(path);
        let above = key.map_or("", |key| &key.path);
        let is_from_key = key.is_some_and(|key| {
            let value = self.text.get(key.value.start..).unwrap_or_default();
            keys::is_list(key) || value.starts_with('*')
        });
        is_from_key || self.by_path().get(&keys::joined(above, "<<")).is_some()
    }

    /// Starts an entry of the file. `title` returns the entry's name for people.
    pub fn begin_entry<T>(&mut self, entry: Spanned<T>, title: impl Fn(&T) -> String) -> T {
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

    /// Returns the place of the key at `path`: `file:line`.
    pub fn place_of(&self, path: &str) -> String {
        self.place(self.offset_of(path))
    }

    /// Returns the place of the current entry: `file:line`.
    pub fn entry_place(&self) -> String {
        self.place(self.entry_at)
    }

    /// Returns true if further findings are dropped. Equal ones count as well: each costs the
    /// search for its line.
    fn is_full(&self) -> bool {
        self.count > MAX_FINDINGS
    }

    /// Records a problem at `offset`. The same one is listed once.
    pub fn at(&mut self, offset: usize, what: &str) {
        if self.is_full() {
            return;
        }
        self.count += 1;
        let what = if self.is_full() {
            "there are more findings, which are not listed"
        } else {
            what
        };
        let line = line_of(self.text, offset);
        if self.found.is_empty() {
            self.line = line;
        }
        let finding = format!("{}:{line}: {what}", self.source);
        if !self.found.contains(&finding) {
            self.found.push(finding);
        }
    }

    /// Returns the text of a finding without recording it, for problems that do no harm.
    pub fn text_at(&self, offset: usize, what: &str) -> String {
        format!("{}: {what}", self.place(offset))
    }

    /// Returns the place of `offset`: `file:line`.
    pub fn place(&self, offset: usize) -> String {
        format!("{}:{}", self.source, line_of(self.text, offset))
    }

    /// Returns the error for a problem at `offset` that prevents further checks.
    pub fn stop(mut self, offset: usize, what: &str) -> FileError {
        self.at(offset, what);
        self.error()
    }

    fn error(self) -> FileError {
        FileError {
            findings: self.found,
            line: self.line,
        }
    }

    /// Returns the number of findings so far.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns `value` if there are no findings.
    pub fn result<T>(self, value: T) -> Result<T, FileError> {
        if self.found.is_empty() {
            return Ok(value);
        }
        Err(self.error())
    }
}

#[cfg(test)]
mod tests;
