//! Policies that a command names: files, and built-in ones.

use std::path::Path;

use anyhow::Context as _;
use contract::findings::MAX_FILE_BYTES;
use contract::nearest::nearest;
use policy::Policy;
use runtime::text_file;
use trial::presets::{self, Preset};

/// Prefix of the name of a built-in policy.
pub(crate) const PRESET: &str = "preset:";

/// Reads a policy from a file, or `preset:NAME`.
pub(crate) fn load(source: &str) -> anyhow::Result<Policy> {
    Ok(Policy::parse(&text(source)?, source)?)
}

/// Prefixes a warning about a policy with the policy's name, unless the warning begins with the name
/// and a line.
pub(crate) fn placed(source: &str, what: &str) -> String {
    let has_place = what
        .strip_prefix(source)
        .is_some_and(|rest| rest.starts_with(':'));
    if has_place {
        what.to_owned()
    } else {
        format!("{source}: {what}")
    }
}

/// Reads the text of a policy.
pub(crate) fn text(source: &str) -> anyhow::Result<String> {
    if let Some(name) = source.strip_prefix(PRESET) {
        let preset = preset(name).map_err(|what| anyhow::anyhow!("{source}: {what}"))?;
        return Ok(preset.text.to_owned());
    }
    text_file::read(Path::new(source), MAX_FILE_BYTES)
        .with_context(|| format!("cannot read the policy {source}"))
}

/// Finds the built-in policy of this name. The error lists the nearest name, or all.
pub(crate) fn preset(name: &str) -> Result<&'static Preset, String> {
    presets::find(name).ok_or_else(|| {
        let names: Vec<&str> = presets::all().iter().map(|preset| preset.name).collect();
        match nearest(name, names.iter().copied(), 1).first() {
            Some(meant) => format!("there is no such preset; did you mean {PRESET}{meant}?"),
            None => format!("there is no such preset; there are {}", names.join(", ")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_said_once() {
        for (what, expected) in [
            ("no brake", "p.toml: no brake"),
            ("p.toml:21: unknown key", "p.toml:21: unknown key"),
            ("p.tomls are odd", "p.toml: p.tomls are odd"),
        ] {
            assert_eq!(placed("p.toml", what), expected);
        }
    }
}
