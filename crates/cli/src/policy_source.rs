//! Policies that a command names: a file, or one of the named ones that are built in.

use std::path::Path;

use anyhow::Context as _;
use contract::nearest::nearest;
use policy::{MAX_POLICY_BYTES, Policy};
use runtime::text_file;
use trial::presets::{self, Preset};

/// The prefix of the name of a preset.
pub(crate) const PRESET: &str = "preset:";

/// Reads a policy: a file, or `preset:NAME`.
pub(crate) fn load(source: &str) -> anyhow::Result<Policy> {
    Ok(Policy::parse(&text(source)?, source)?)
}

/// Returns what is odd in a policy, after its name; a text that begins with that, and a line, keeps
/// it.
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
    text_file::read(Path::new(source), MAX_POLICY_BYTES)
        .with_context(|| format!("cannot read the policy {source}"))
}

/// Finds the preset of this name; the error says what names there are.
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
