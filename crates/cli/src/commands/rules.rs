//! `gpuwarden rules`: checks, tests, explains, compares and shows rules of the analysis.

mod diff;
mod explain;
mod show;

use diagnosis::catalog::Catalog;
use trial::rules::cases::{self, RuleCase};
use trial::rules::lint::{RuleWarning, lint};

use super::test_files;
use crate::args::{ConnectArgs, Format, RulesCommand};
use crate::exit_code;
use crate::output::{self, plural, say};
use crate::rules_source;
use crate::settings::duration;

pub(super) async fn execute(what: &RulesCommand) -> anyhow::Result<u8> {
    match what {
        RulesCommand::Lint {
            rules,
            retention,
            connect,
            output,
        } => check(rules, retention, connect, output.output).await,
        RulesCommand::Test {
            rules: source,
            tests,
            connect,
            output,
        } => {
            let rules = rules_source::load_from(source, connect).await?;
            let run = |case: &RuleCase| cases::run(case, &rules, Catalog::builtin());
            test_files::execute(source, tests, run, output.output)
        }
        RulesCommand::Explain {
            rule,
            node,
            rules,
            events,
            nodes,
            remote,
            output,
        } => {
            let question = explain::Question {
                rule,
                node: node.as_deref(),
                rules: rules.as_deref(),
                files: events,
                nodes: nodes.as_deref(),
            };
            explain::execute(&question, remote, output.output).await
        }
        RulesCommand::Show {
            rule,
            rules,
            connect,
            output,
        } => show::execute(rule.as_deref(), rules.as_deref(), connect, output.output).await,
        RulesCommand::Diff {
            a,
            b,
            files,
            nodes,
            connect,
            output,
        } => {
            let first = rules_source::load_from(a, connect).await?;
            let second = rules_source::load_from(b, connect).await?;
            let sides = [(a.as_str(), first), (b, second)];
            diff::execute(sides, files, nodes.as_deref(), output.output)
        }
    }
}

async fn check(
    source: &str,
    retention: &str,
    connect: &ConnectArgs,
    format: Format,
) -> anyhow::Result<u8> {
    let retention = duration("--retention", retention)?;
    let rules = rules_source::load_from(source, connect).await?;
    let warnings = lint(&rules, retention, Catalog::builtin());
    if !output::structured(format, &warnings)? {
        for RuleWarning { rule, what, hint } in &warnings {
            let what = format!("{source}: rule '{rule}': {what}");
            output::line(&output::plain(&what))?;
            say!("  {}", output::plain(hint))?;
        }
        if warnings.is_empty() {
            let count = plural(rules.len() as u64, "rule");
            say!("{source}: {count} in effect, nothing odd")?;
        }
    }
    Ok(exit_code(warnings.is_empty()))
}
