//! `gpuwarden rules diff`: how two sets of rules differ, also in their conclusions about past
//! events.

use std::path::Path;

use analysis::Rule;
use serde::Serialize;
use trial::rules::conclude::{Concluded, Conclusions};
use trial::rules::show::{RuleDifference, differences};

use crate::args::Format;
use crate::commands::replay::{self, Inputs, shown_time};
use crate::output::{self, plural, say};
use crate::{EXIT_FAILED, exit_code};

/// Conclusion of only one set of rules.
#[derive(Clone, Serialize)]
struct OnlyOne<'a> {
    /// `A` or `B`.
    only: &'static str,
    #[serde(flatten)]
    concluded: &'a Concluded,
}

pub(super) fn execute(
    sides: [(&str, Vec<Rule>); 2],
    files: &[String],
    nodes: Option<&Path>,
    format: Format,
) -> anyhow::Result<u8> {
    let [(a, first), (b, second)] = sides;
    let sources = [a, b];
    let found = differences(&first, &second);
    if files.is_empty() {
        let written = output::structured(format, &found).and_then(|is_written| {
            if is_written {
                return Ok(());
            }
            table(&found, sources)
        });
        output::even_if_unread(written)?;
        return Ok(exit_code(found.is_empty()));
    }
    // JSON and YAML have one document only, about the files. As text, the table precedes it.
    if matches!(format, Format::Text | Format::Wide) {
        let written = table(&found, sources).and_then(|()| Ok(output::line("")?));
        output::even_if_unread(written)?;
    }
    let code = compare([first, second], files, nodes, format)?;
    Ok(code.max(exit_code(found.is_empty())))
}

/// Compares the conclusions from files.
fn compare(
    rules: [Vec<Rule>; 2],
    files: &[String],
    nodes: Option<&Path>,
    format: Format,
) -> anyhow::Result<u8> {
    let nodes = nodes.map(replay::read_nodes).transpose()?;
    let listed = nodes.unwrap_or_default();
    let mut sides = rules.map(|rules| Conclusions::new(rules, &listed));
    let mut inputs = Inputs::open(files, &[])?;
    while let Some(item) = inputs.next()? {
        let record = item.record();
        for side in &mut sides {
            side.take(record.clone());
        }
    }
    inputs.clear_progress();
    inputs.warn_of_garbled();
    replay::warn_of_late(sides.iter().map(Conclusions::late).max());
    if let Some(error) = replay::unread(&inputs) {
        output::error(&error);
        return Ok(EXIT_FAILED);
    }
    let [a, b] = sides.each_ref().map(Conclusions::concluded);
    let (only_a, only_b) = (missing_in(b, "A", a), missing_in(a, "B", b));
    let same = plural((a.len() - only_a.len()) as u64, "conclusion");
    let counts = (only_a.len(), only_b.len());
    let mut different = [only_a, only_b].concat();
    different.sort_by_key(|one| one.concluded.since);
    let written = output::structured(format, &different).and_then(|is_written| {
        if is_written {
            return Ok(());
        }
        for one in &different {
            line(one)?;
        }
        let (only_a, only_b) = counts;
        say!("{same} the same, {only_a} only by A, {only_b} only by B")?;
        Ok(())
    });
    output::even_if_unread(written)?;
    Ok(exit_code(different.is_empty()))
}

/// Returns the conclusions of one set that the other does not have.
fn missing_in<'a>(
    other: &[Concluded],
    only: &'static str,
    own: &'a [Concluded],
) -> Vec<OnlyOne<'a>> {
    let own = own.iter().filter(|one| !other.contains(one));
    own.map(|concluded| OnlyOne { only, concluded }).collect()
}

fn line(one: &OnlyOne<'_>) -> anyhow::Result<()> {
    let Concluded {
        rule,
        group,
        since,
        ended,
        ..
    } = one.concluded;
    let end = match ended {
        Some(at) => format!("ended {}", shown_time(*at)),
        None => "open at the end".to_owned(),
    };
    let what = output::plain(&format!("{rule} about {group}"));
    say!("{}  {}  {what}, {end}", one.only, shown_time(*since))?;
    Ok(())
}

fn table(found: &[RuleDifference], [a, b]: [&str; 2]) -> anyhow::Result<()> {
    if found.is_empty() {
        output::line("No difference of the rules.")?;
        return Ok(());
    }
    let row = |one: &RuleDifference| {
        let cells = [&one.rule, one.key, &one.a, &one.b];
        cells.map(output::plain).to_vec()
    };
    let rows: Vec<_> = found.iter().map(row).collect();
    output::table(&["rule", "key", a, b], &rows)?;
    Ok(())
}
