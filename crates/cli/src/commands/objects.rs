//! `gpuwarden objects`: checks and tests policies over Kubernetes objects.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use contract::findings::MAX_FILE_BYTES;
use objects::{ObjectPolicies, presets};
use runtime::text_file;
use trial::objects::{self as cases, ObjectCase};

use super::test_files;
use crate::args::{Format, ObjectsCommand};
use crate::exit_code;
use crate::output::{self, say};
use crate::policy_source::PRESET;

pub(super) fn execute(what: &ObjectsCommand) -> anyhow::Result<u8> {
    match what {
        ObjectsCommand::Lint { policies, output } => check(policies, output.output),
        ObjectsCommand::Test {
            policies,
            tests,
            output,
        } => {
            let loaded = load(policies)?.policies;
            let run = |case: &ObjectCase| cases::run(case, &loaded);
            test_files::execute(policies, tests, run, output.output)
        }
    }
}

fn check(source: &str, format: Format) -> anyhow::Result<u8> {
    let ObjectPolicies { policies, notes } = load(source)?;
    if !output::structured(format, &notes)? {
        for note in &notes {
            output::line(&output::plain(note))?;
        }
        if notes.is_empty() {
            let count = policies.len() as u64;
            let enabled = if count == 1 { "policy" } else { "policies" };
            say!("{source}: {count} {enabled} enabled, nothing odd")?;
        }
    }
    Ok(exit_code(notes.is_empty()))
}

fn load(source: &str) -> anyhow::Result<ObjectPolicies> {
    let text = match source.strip_prefix(PRESET) {
        Some(name) => {
            let preset = presets::find(name).map_err(|what| anyhow!("{source}: {what}"))?;
            preset.text.to_owned()
        }
        None => text_file::read(Path::new(source), MAX_FILE_BYTES)
            .with_context(|| format!("cannot read the policies {source}"))?,
    };
    Ok(objects::parse(&text, source)?)
}
