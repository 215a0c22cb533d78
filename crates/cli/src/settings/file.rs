//! The configuration file: the long names of the flags, in TOML.

use std::ops::Range;
use std::path::{Path, PathBuf};

use contract::findings::{line_of, start_of};
use contract::nearest::nearest;
use serde::de::DeserializeOwned;
use toml::de::DeTable;

use super::{AnyRole, SettingsError};

/// A configuration file whose keys are all known, or an empty one.
pub(crate) struct ConfigFile {
    path: PathBuf,
    text: String,
}

// === impl ConfigFile ===

impl ConfigFile {
    /// Reads the file, whose keys must be long names of `A`'s flags. Without a path, returns an empty
    /// file.
    pub(super) fn read<A: clap::Args>(path: Option<&Path>) -> Result<Self, SettingsError> {
        let Some(path) = path else {
            let (path, text) = (PathBuf::new(), String::new());
            return Ok(Self { path, text });
        };
        let text = std::fs::read_to_string(path).map_err(|source| SettingsError::Read {
            path: path.to_owned(),
            source,
        })?;
        let path = path.to_owned();
        let file = Self { path, text };
        let known = known::<A>();
        for (key, place) in file.entries()? {
            if !known.contains(&key) {
                let meant = nearest(&key, known.iter().map(String::as_str), 1);
                let hint = meant
                    .first()
                    .map(|meant| format!("; did you mean `{meant}`?"));
                let hint = hint.unwrap_or_default();
                return Err(file.at(place.start, format!("unknown field `{key}`{hint}")));
            }
        }
        Ok(file)
    }

    /// Returns the keys of the first level, with the byte range of key and value.
    fn entries(&self) -> Result<Vec<(String, Range<usize>)>, SettingsError> {
        let table = DeTable::parse(&self.text).map_err(|error| self.wrong(&error))?;
        let entries = table.get_ref().iter();
        Ok(entries
            .map(|(key, value)| {
                let place = key.span().start..value.span().end;
                (key.get_ref().clone().into_owned(), place)
            })
            .collect())
    }

    /// Reads the keys of a group, and ignores all others.
    pub(super) fn group<T: DeserializeOwned>(&self) -> Result<T, SettingsError> {
        toml::from_str(&self.text).map_err(|error| self.invalid(&error))
    }

    /// Adds the key to the error, which does not name it, and the form of its values.
    fn invalid(&self, error: &toml::de::Error) -> SettingsError {
        let start = start_of(error);
        let entries = self.entries().unwrap_or_default();
        let found = entries.iter().find(|(_, place)| place.contains(&start));
        let Some((key, place)) = found else {
            return self.wrong(error);
        };
        let what = format!("{key}: {}; {}", error.message(), form(key));
        self.at(place.start, what)
    }

    fn wrong(&self, error: &toml::de::Error) -> SettingsError {
        let start = start_of(error);
        self.at(start, error.message().to_owned())
    }

    fn at(&self, offset: usize, what: String) -> SettingsError {
        SettingsError::File {
            path: self.path.clone(),
            line: line_of(&self.text, offset),
            what,
        }
    }
}

/// Returns the form of the values of a key.
fn form(key: &str) -> &'static str {
    let command = <AnyRole as clap::Args>::augment_args(clap::Command::new("file"));
    let arg = command.get_arguments().find(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(key) || aliases.contains(&key)
    });
    let Some(arg) = arg else {
        return "write text in quotes";
    };
    if arg.get_value_delimiter().is_some() {
        return "write a list, such as [\"a\", \"b\"]";
    }
    let kind = arg.get_value_names().and_then(<[_]>::first);
    match kind.map(clap::builder::Str::as_str) {
        Some("BOOL") => "write true or false",
        Some("DURATION") => "write a duration, such as \"30d\" or \"15m\"",
        Some("SIZE") => "write a size, such as \"512MiB\"",
        Some("ADDRESS:PORT") => {
            "write ADDRESS:PORT, such as \"127.0.0.1:2112\"; names of hosts are not looked up"
        }
        _ => "write text in quotes",
    }
}

/// Returns the keys that a file for `A` may have.
fn known<A: clap::Args>() -> Vec<String> {
    let command = A::augment_args(clap::Command::new("file"));
    let names = command.get_arguments().flat_map(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long().into_iter().chain(aliases)
    });
    names
        .filter(|name| *name != "config")
        // Only for clients that read the same file.
        .chain(["server"])
        .map(str::to_owned)
        .collect()
}
