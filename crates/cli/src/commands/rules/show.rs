//! `gpuwarden rules show`: the rules in effect, or all keys of one.

use analysis::Rule;
use anyhow::bail;
use contract::nearest::hint;
use serde::Serialize;
use trial::rules::show::{ShownRule, shown, switched_off, text};

use crate::EXIT_OK;
use crate::args::{ConnectArgs, Format};
use crate::output::{self, Colour, say};
use crate::rules_source::{self, BUILT_IN};

/// Columns of the list, by key of a rule.
const COLUMNS: [&str; 7] = [
    "kind",
    "group_by",
    "window",
    "threshold",
    "action",
    "fatal",
    "strategy",
];

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Listed {
    source: String,
    rules: Vec<ShownRule>,
    /// Built-in rules that the file switches off.
    switched_off: Vec<String>,
}

pub(super) async fn execute(
    rule: Option<&str>,
    source: Option<&str>,
    connect: &ConnectArgs,
    format: Format,
) -> anyhow::Result<u8> {
    let source = source.unwrap_or(BUILT_IN);
    let rules = rules_source::load_from(source, connect).await?;
    if let Some(name) = rule {
        named(&rules, name)?;
        let found = shown(&rules).into_iter().find(|rule| rule.name == name);
        if let Some(rule) = found
            && !output::structured(format, &rule)?
        {
            one(&rule, source)?;
        }
        return Ok(EXIT_OK);
    }
    let listed = Listed {
        source: source.to_owned(),
        rules: shown(&rules),
        switched_off: switched_off(&rules),
    };
    if !output::structured(format, &listed)? {
        list(&listed)?;
    }
    Ok(EXIT_OK)
}

/// Finds a rule. The error names the nearest one.
pub(super) fn named<'a>(rules: &'a [Rule], name: &str) -> anyhow::Result<&'a Rule> {
    if let Some(rule) = rules.iter().find(|rule| rule.name == name) {
        return Ok(rule);
    }
    let names: Vec<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    match hint(name, &names) {
        Some(meant) => bail!("there is no rule {name:?}; {meant}"),
        None => bail!("there is no rule {name:?}; `gpuwarden rules show` lists them"),
    }
}

/// Writes a rule as a file has it.
fn one(rule: &ShownRule, source: &str) -> anyhow::Result<()> {
    let from = match rule.from {
        "changed" => format!("# built-in, changed by {source}"),
        "own" => format!("# from {source}"),
        other => format!("# {other}"),
    };
    output::line(&output::colour(&output::plain(&from), Colour::Grey))?;
    say!(
        "[[rules]]\nname = {}",
        output::plain(&text(&rule.name.as_str().into()))
    )?;
    for (key, value) in &rule.keys {
        say!("{key} = {}", output::plain(&text(value)))?;
    }
    Ok(())
}

fn list(listed: &Listed) -> anyhow::Result<()> {
    let heads = ["rule", "from"].into_iter().chain(COLUMNS.iter().copied());
    let heads: Vec<&str> = heads.collect();
    let row = |rule: &ShownRule| {
        let mut row = vec![output::plain(&rule.name), rule.from.to_owned()];
        row.extend(COLUMNS.iter().map(|key| match *key {
            "group_by" => output::plain(&rule.groups()),
            key => rule.text_of(key),
        }));
        row
    };
    let rows: Vec<_> = listed.rules.iter().map(row).collect();
    output::table(&heads, &rows)?;
    if !listed.switched_off.is_empty() {
        let names = listed.switched_off.join(", ");
        say!(
            "\nswitched off by {}: {names}",
            output::plain(&listed.source)
        )?;
    }
    Ok(())
}
