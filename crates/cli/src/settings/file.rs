//! The configuration file: the long names of the flags, in TOML.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use toml::de::DeTable;

use super::SettingsError;

/// A file whose keys are all known, or no file.
pub(super) struct ConfigFile {
    path: PathBuf,
    text: String,
}

// === impl ConfigFile ===

impl ConfigFile {
    /// Reads the file, which may have the long names of `A`'s flags as keys; without a path, an
    /// empty one.
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
        let table = DeTable::parse(&file.text).map_err(|error| file.wrong(&error))?;
        let command = A::augment_args(clap::Command::new("file"));
        let known: Vec<&str> = command
            .get_arguments()
            .flat_map(|arg| {
                let aliases = arg.get_all_aliases().unwrap_or_default();
                arg.get_long().into_iter().chain(aliases)
            })
            .filter(|name| *name != "config")
            // Of no use to a server: for the clients that are given the same file.
            .chain(["server"])
            .collect();
        for key in table.get_ref().keys() {
            if !known.contains(&key.get_ref().as_ref()) {
                let what = format!("unknown field `{}`", key.get_ref());
                return Err(file.at(key.span().start, what));
            }
        }
        Ok(file)
    }

    /// The keys of a group; those of others are left out.
    pub(super) fn group<T: DeserializeOwned>(&self) -> Result<T, SettingsError> {
        toml::from_str(&self.text).map_err(|error| self.wrong(&error))
    }

    fn wrong(&self, error: &toml::de::Error) -> SettingsError {
        let start = error.span().map_or(0, |span| span.start);
        self.at(start, error.message().to_owned())
    }

    fn at(&self, offset: usize, what: String) -> SettingsError {
        let before = self.text.bytes().take(offset);
        SettingsError::File {
            path: self.path.clone(),
            line: 1 + before.filter(|byte| *byte == b'\n').count(),
            what,
        }
    }
}
