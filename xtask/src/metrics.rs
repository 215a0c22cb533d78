//! Files made from the descriptions of all metrics, which the program prints
//! (`gpuwarden reference --metrics`): the tables of docs/metrics.md ([`page`]) and the dashboards
//! ([`dashboards`]). The alert rules are checked against them ([`alerts`]).

mod alerts;
mod dashboards;
mod expression;
mod page;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde::Deserialize;

/// Units of names that Prometheus' conventions convert to a base unit.
const NOT_BASE_UNITS: [&str; 8] = [
    "percent",
    "milliseconds",
    "microseconds",
    "minutes",
    "hours",
    "kilobytes",
    "megabytes",
    "milliwatts",
];
/// Ends of names that belong to the series of counters and histograms.
const RESERVED: [&str; 5] = ["total", "count", "sum", "bucket", "created"];

/// Metrics of one part of the program.
#[derive(Debug, Deserialize)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) metrics: Vec<Metric>,
}

/// Description of a metric, as the program prints it.
#[derive(Debug, Deserialize)]
pub(crate) struct Metric {
    name: String,
    pub(crate) kind: Kind,
    pub(crate) labels: Vec<String>,
    pub(crate) help: String,
}

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    Counter,
    LegacyCounter,
    Gauge,
    Histogram,
}

/// Returns the files made from the metrics. Fails if a name breaks the conventions.
pub(crate) fn files(root: &Path) -> anyhow::Result<Vec<(PathBuf, Vec<u8>)>> {
    let groups = read(root)?;
    let wrong: Vec<String> = all(&groups).filter_map(wrong_name).collect();
    if !wrong.is_empty() {
        bail!("names of metrics: {}", wrong.join("; "));
    }
    alerts::check(root, &groups)?;
    let mut files = dashboards::files(root, &groups)?;
    files.push(page::file(root, &groups)?);
    Ok(files)
}

/// Returns the metrics of all groups.
fn all(groups: &[Group]) -> impl Iterator<Item = &Metric> {
    groups.iter().flat_map(|group| &group.metrics)
}

fn read(root: &Path) -> anyhow::Result<Vec<Group>> {
    let output = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--package", "gpuwarden"])
        .args(["--", "reference", "--metrics"])
        .current_dir(root)
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("run 'gpuwarden reference --metrics'")?;
    if !output.status.success() {
        bail!("'gpuwarden reference --metrics' failed: {}", output.status);
    }
    serde_json::from_slice(&output.stdout).context("read the descriptions of the metrics")
}

/// Returns how a name of ours breaks Prometheus' conventions.
fn wrong_name(metric: &Metric) -> Option<String> {
    let name = &metric.name;
    if !name.starts_with("gpuwarden_") {
        return None;
    }
    if let Some(unit) = name.split('_').find(|part| NOT_BASE_UNITS.contains(part)) {
        return Some(format!("{name}: {unit} is not a base unit"));
    }
    let end = name.rsplit('_').next().filter(|end| RESERVED.contains(end));
    if let Some(end) = end {
        return Some(format!("{name}: must not end in {end}"));
    }
    (metric.kind == Kind::LegacyCounter).then(|| format!("{name}: a counter of ours is a Counter"))
}

// === impl Metric ===

impl Metric {
    /// Returns the name as written in `/metrics`.
    pub(crate) fn written(&self) -> String {
        match self.kind {
            Kind::Counter => format!("{}_total", self.name),
            Kind::LegacyCounter | Kind::Gauge | Kind::Histogram => self.name.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metric(name: &str, kind: Kind) -> Metric {
        Metric {
            name: name.to_owned(),
            kind,
            labels: vec![],
            help: String::new(),
        }
    }

    #[test]
    fn names_of_ours_follow_the_conventions() {
        for (name, kind, refused) in [
            ("gpuwarden_a_seconds", Kind::Gauge, false),
            ("gpuwarden_a", Kind::Counter, false),
            ("gpuwarden_a_percent", Kind::Gauge, true),
            ("gpuwarden_a_milliseconds_b", Kind::Histogram, true),
            ("gpuwarden_a_total", Kind::Gauge, true),
            ("gpuwarden_total_a", Kind::Gauge, false),
            ("gpuwarden_a", Kind::LegacyCounter, true),
            ("x_percent_total", Kind::LegacyCounter, false),
        ] {
            assert_eq!(wrong_name(&metric(name, kind)).is_some(), refused, "{name}");
        }
    }
}
