//! The configuration file: the long names of the flags, in TOML.

use std::path::{Path, PathBuf};

use contract::findings::{FileError, Findings, Format, Key, MAX_FILE_BYTES};
use runtime::text_file;
use serde::de::DeserializeOwned;

use super::{AnyRole, SettingsError};

/// A configuration file whose keys are all known, or an empty one.
pub(crate) struct ConfigFile {
    path: PathBuf,
    /// Path for findings.
    shown: String,
    text: String,
}

// === impl ConfigFile ===

impl ConfigFile {
    /// Reads the file, whose keys must be long names of `A`'s flags. Without a path, returns an empty
    /// file.
    pub(super) fn read<A: clap::Args>(path: Option<&Path>) -> Result<Self, SettingsError> {
        let text = path.map_or_else(
            || Ok(String::new()),
            |path| {
                text_file::read(path, MAX_FILE_BYTES).map_err(|source| SettingsError::Read {
                    path: path.to_owned(),
                    source,
                })
            },
        )?;
        let path = path.unwrap_or(Path::new("")).to_owned();
        let shown = path.display().to_string();
        let file = Self { path, shown, text };
        file.check(&known::<A>())
            .map_err(|error| file.wrong(error))?;
        Ok(file)
    }

    /// Checks the syntax, and that all keys are `known`.
    fn check(&self, known: &[String]) -> Result<(), FileError> {
        let (table, mut findings) =
            Findings::read::<toml::Table>(&self.text, &self.shown, Format::Toml)?;
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        for key in table.keys().filter(|key| !known.contains(&key.as_str())) {
            findings.unknown_key(key, &known);
        }
        findings.result(())
    }

    /// Reads the keys of a group, and ignores all others.
    pub(super) fn group<T: DeserializeOwned>(&self) -> Result<T, SettingsError> {
        let findings = Findings::new(&self.text, &self.shown, Format::Toml);
        let form = |key: &Key| {
            // The type of an element of a list says its form.
            let is_element = key.path.ends_with(']');
            (!is_element).then(|| form(&key.name).to_owned())
        };
        let group = findings.and_then(|findings| findings.parse_with(form));
        group.map_err(|error| self.wrong(error))
    }

    fn wrong(&self, error: FileError) -> SettingsError {
        let path = self.path.clone();
        SettingsError::File { path, error }
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
        return "text in quotes";
    };
    if arg.get_value_delimiter().is_some() {
        return "a list, such as [\"a\", \"b\"]";
    }
    let kind = arg.get_value_names().and_then(<[_]>::first);
    match kind.map(clap::builder::Str::as_str) {
        Some("BOOL") => "true or false",
        Some("DURATION") => "a duration, such as \"30d\" or \"15m\"",
        Some("SIZE") => "a size, such as \"512MiB\"",
        Some("ADDRESS:PORT") => {
            "ADDRESS:PORT, such as \"127.0.0.1:2112\"; names of hosts are not looked up"
        }
        _ => "text in quotes",
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
