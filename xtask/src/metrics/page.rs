//! The tables of docs/metrics.md. The text around them is written by hand.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::{Group, Kind};

const PAGE: &str = "docs/metrics.md";
/// Start and end of the line before a table, around the name of its group.
const BEGIN: (&str, &str) = ("<!-- metrics: ", " -->");
/// Line behind a table.
const END: &str = "<!-- end -->";

/// Returns the page with the tables of these groups.
pub(super) fn file(root: &Path, groups: &[Group]) -> anyhow::Result<(PathBuf, Vec<u8>)> {
    let path = root.join(PAGE);
    let page = std::fs::read_to_string(&path).with_context(|| format!("read {PAGE}"))?;
    let page = with_tables(&page, groups).with_context(|| PAGE.to_owned())?;
    Ok((path, page.into_bytes()))
}

fn with_tables(page: &str, groups: &[Group]) -> anyhow::Result<String> {
    let mut waiting: Vec<&Group> = groups.iter().collect();
    let mut out = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        out.push_str(line);
        out.push('\n');
        let name = line.strip_prefix(BEGIN.0);
        let Some(name) = name.and_then(|rest| rest.strip_suffix(BEGIN.1)) else {
            continue;
        };
        let Some(at) = waiting.iter().position(|group| group.name == name) else {
            bail!("there are no metrics {name:?} for a table, or it is the second one");
        };
        out.push_str(&table(waiting.swap_remove(at)));
        if !lines.any(|line| line == END) {
            bail!("the table {name:?} has no line {END:?} behind it");
        }
        out.push_str(END);
        out.push('\n');
    }
    if let Some(group) = waiting.first() {
        bail!(
            "the metrics {0:?} have no table: add the lines '{1}{0}{2}' and '{END}'",
            group.name,
            BEGIN.0,
            BEGIN.1
        );
    }
    Ok(out)
}

/// Returns the table of a group, with an empty line before and behind it.
fn table(group: &Group) -> String {
    let mut out = String::from("\n| metric | kind | labels | meaning |\n|---|---|---|---|\n");
    for metric in &group.metrics {
        let labels: Vec<String> = metric.labels.iter().map(|it| format!("`{it}`")).collect();
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::LegacyCounter => "unknown",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let (name, labels) = (metric.written(), labels.join(", "));
        let help = metric.help.replace('|', "\\|");
        // Writing into a String does not fail.
        let _ = writeln!(out, "| `{name}` | {kind} | {labels} | {help} |");
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::super::Metric;
    use super::*;

    fn group(name: &str) -> Group {
        let metric = Metric {
            name: format!("gpuwarden_{name}"),
            kind: Kind::Counter,
            labels: vec!["node".to_owned()],
            help: "This | that".to_owned(),
        };
        Group {
            name: name.to_owned(),
            metrics: vec![metric],
        }
    }

    #[test]
    fn a_table_replaces_what_is_between_its_lines() {
        let page = "# Page\n\n<!-- metrics: a -->\nold\n<!-- end -->\n\nText.\n";
        let new = with_tables(page, &[group("a")]).unwrap();
        let expected = "# Page\n\n<!-- metrics: a -->\n\n| metric | kind | labels | meaning |\n\
                        |---|---|---|---|\n\
                        | `gpuwarden_a_total` | counter | `node` | This \\| that |\n\n\
                        <!-- end -->\n\nText.\n";
        assert_eq!(new, expected);
        assert_eq!(with_tables(&new, &[group("a")]).unwrap(), expected);
    }

    #[test]
    fn a_group_without_a_table_and_a_table_without_a_group_fail() {
        let page = "<!-- metrics: a -->\n<!-- end -->\n";
        let error =
            |page: &str, groups: &[Group]| with_tables(page, groups).unwrap_err().to_string();
        let missing = error(page, &[group("a"), group("b")]);
        assert!(
            missing.starts_with("the metrics \"b\" have no table"),
            "{missing}"
        );
        let unknown = error(page, &[]);
        assert!(
            unknown.starts_with("there are no metrics \"a\""),
            "{unknown}"
        );
        let endless = error("<!-- metrics: a -->\n", &[group("a")]);
        assert!(
            endless.starts_with("the table \"a\" has no line"),
            "{endless}"
        );
    }
}
