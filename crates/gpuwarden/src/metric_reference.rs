//! Descriptions of all metrics. `cargo xtask generate` writes docs/metrics.md and the dashboards
//! from them, and checks the alert rules against them.

use std::io::Write as _;
use std::process::ExitCode;

use runtime::metrics::Group;

/// Prints the descriptions as JSON.
pub(crate) fn print() -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, &groups())?;
    writeln!(out)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns all metrics; those of groups of the same name together.
fn groups() -> Vec<Group> {
    let rooms = [
        agent::described_metrics(),
        connector::described_metrics(),
        devices::described_metrics(),
        controller::described_metrics(),
        janitor::described_metrics(),
        webhook::described_metrics(),
        runtime::described_metrics(),
        console::described_metrics(),
    ];
    let mut all: Vec<Group> = Vec::new();
    for group in rooms.into_iter().flatten() {
        match all.iter_mut().find(|known| known.name == group.name) {
            Some(known) => known.metrics.extend(group.metrics),
            None => all.push(group),
        }
    }
    all
}
