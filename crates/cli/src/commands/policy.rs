//! `gpuwarden policy`: checks, tests, compares and shows policies.

mod show;

use std::path::Path;

use anyhow::bail;
use diagnosis::catalog::Catalog;
use policy::Policy;
use serde::Serialize;
use trial::cases::{self, Case};
use trial::compare::{Difference, SettingDifference, differences, settings, untried};
use trial::lint::{Warning, lint};
use trial::presets::{self, Preset};

use super::{replay, test_files};
use crate::args::{Format, PolicyCommand};
use crate::output::{self, Colour, plural, say};
use crate::policy_source;
use crate::{EXIT_OK, exit_code};

pub(super) fn execute(what: &PolicyCommand) -> anyhow::Result<u8> {
    match what {
        PolicyCommand::Lint { policy, output } => check(policy, output.output),
        PolicyCommand::Test {
            policy,
            tests,
            output,
        } => {
            let loaded = policy_source::load(policy)?;
            let run = |case: &Case| cases::run(case, &loaded, Catalog::builtin());
            test_files::execute(policy, tests, run, output.output)
        }
        PolicyCommand::Diff {
            a,
            b,
            files,
            nodes,
            output,
        } => compare(a, b, files, nodes.as_deref(), output.output),
        PolicyCommand::Show { policy, output } => show::execute(policy.as_deref(), output.output),
        PolicyCommand::Presets { name, output } => list(name.as_deref(), output.output),
    }
}

fn check(source: &str, format: Format) -> anyhow::Result<u8> {
    let policy = policy_source::load(source)?;
    let warnings = lint(&policy, Catalog::builtin());
    if !output::structured(format, &warnings)? {
        for Warning {
            rule_set,
            what,
            hint,
        } in &warnings
        {
            let what = match rule_set {
                Some(name) => format!("{source}: rule set '{name}': {what}"),
                None => policy_source::placed(source, what),
            };
            output::line(&output::plain(&what))?;
            say!("  {}", output::plain(hint))?;
        }
        if warnings.is_empty() {
            let sets = plural(policy.rule_sets.len() as u64, "rule set");
            say!("{source}: {sets}, nothing odd")?;
        }
    }
    Ok(exit_code(warnings.is_empty()))
}

fn compare(
    a: &str,
    b: &str,
    files: &[String],
    nodes: Option<&Path>,
    format: Format,
) -> anyhow::Result<u8> {
    let (first, second) = (policy_source::load(a)?, policy_source::load(b)?);
    let nodes = nodes.map(replay::read_nodes).transpose()?;
    let listed = nodes.as_deref().unwrap_or_default();
    let found = differences(&first, &second, Catalog::builtin(), listed);
    let settings = settings(&first, &second);
    let found_any = !found.is_empty() || !settings.is_empty();
    if listed.is_empty() {
        for (policy, other) in [(&first, &second), (&second, &first)] {
            if let Some(text) = not_compared(policy, other) {
                output::warning(&text);
            }
        }
    }
    if files.is_empty() {
        let settings_first: Vec<Compared<'_>> = (settings.iter().map(Compared::Setting))
            .chain(found.iter().map(Compared::Event))
            .collect();
        let written = output::structured(format, &settings_first).and_then(|is_written| {
            if is_written {
                return Ok(());
            }
            table(&first, &second, &found, &settings)
        });
        output::even_if_unread(written)?;
        return Ok(exit_code(!found_any));
    }
    // JSON and YAML have one document only, about the files. As text, the table precedes it.
    if matches!(format, Format::Text | Format::Wide) {
        let written =
            table(&first, &second, &found, &settings).and_then(|()| Ok(output::line("")?));
        if written.as_ref().is_err_and(output::is_broken_pipe) {
            return Ok(exit_code(!found_any));
        }
        written?;
    }
    let mut inputs = replay::Inputs::open(files, &[])?;
    let mut sides = [
        replay::Side::new(first, nodes.clone()),
        replay::Side::new(second, nodes),
    ];
    let code = replay::run(&mut sides, &mut inputs, format)?;
    Ok(code.max(exit_code(!found_any)))
}

/// Returns the warning about rules that cannot be compared without a list of nodes.
fn not_compared(policy: &Policy, other: &Policy) -> Option<String> {
    let names = untried(policy, other);
    let sets = match names.len() {
        0 => return None,
        1 => "the rule set",
        _ => "the rule sets",
    };
    Some(format!(
        "only {} has the rules about nodes in {sets} '{}', and they were tried on an empty node; \
         --nodes FILE (kubectl get nodes -o json) tries them on your nodes",
        policy.source,
        names.join("', '")
    ))
}

/// Line of `policy diff`.
#[derive(Serialize)]
#[serde(untagged)]
enum Compared<'a> {
    Setting(&'a SettingDifference),
    Event(&'a Difference),
}

fn table(
    a: &Policy,
    b: &Policy,
    found: &[Difference],
    settings: &[SettingDifference],
) -> anyhow::Result<()> {
    if !settings.is_empty() {
        let row = |one: &SettingDifference| {
            vec![
                one.setting.clone(),
                output::plain(&one.a),
                output::plain(&one.b),
            ]
        };
        let rows: Vec<_> = settings.iter().map(row).collect();
        output::table(&["setting", &a.source, &b.source], &rows)?;
        output::line("")?;
    }
    if found.is_empty() {
        output::line("No difference on the events of known monitors.")?;
        return Ok(());
    }
    let row = |one: &Difference| {
        let event = match &one.node {
            Some(node) => format!("{} on {}", one.event, output::plain(node)),
            None => one.event.clone(),
        };
        let decisions = [&one.a, &one.b].map(|decision| output::plain(&decision.to_string()));
        [vec![event, one.judged.clone()], decisions.to_vec()].concat()
    };
    let rows: Vec<_> = found.iter().map(row).collect();
    output::table(&["event", "judged", &a.source, &b.source], &rows)?;
    let count = |which: fn(&Difference) -> bool| found.iter().filter(|one| which(one)).count();
    say!(
        "\n{} differences: {} only {} cordons for, {} only {}",
        found.len(),
        count(|one| one.a.cordon && !one.b.cordon),
        a.source,
        count(|one| one.b.cordon && !one.a.cordon),
        b.source
    )?;
    Ok(())
}

#[derive(Serialize)]
struct Listed {
    name: &'static str,
    what: &'static str,
    source: &'static str,
}

fn list(name: Option<&str>, format: Format) -> anyhow::Result<u8> {
    if let Some(name) = name {
        match policy_source::preset(name) {
            Ok(preset) => output::part(preset.text)?,
            Err(what) => bail!("{name}: {what}"),
        }
        return Ok(EXIT_OK);
    }
    let listed: Vec<Listed> = presets::all()
        .iter()
        .map(
            |Preset {
                 name, what, source, ..
             }| Listed { name, what, source },
        )
        .collect();
    if !output::structured(format, &listed)? {
        for Listed { name, what, source } in listed {
            say!("{:<18} {what}", format!("preset:{name}"))?;
            say!("{:19}{}", "", output::colour(source, Colour::Grey))?;
        }
    }
    Ok(EXIT_OK)
}
