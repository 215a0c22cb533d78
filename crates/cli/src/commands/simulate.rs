//! `gpuwarden simulate`: searches for a sequence of events that breaks an invariant.

use jiff::Timestamp;
use trial::simulate::{SimulationReport, Violation, run};

use crate::args::SimulateArgs;
use crate::exit_code;
use crate::output::{self, say};

pub(super) fn execute(args: &SimulateArgs) -> anyhow::Result<u8> {
    let now = u64::try_from(Timestamp::now().as_second());
    let seed = args.seed.unwrap_or_else(|| now.unwrap_or_default());
    let report = run(seed, args.steps);
    if !output::structured(args.output.output, &report)? {
        text(&report)?;
    }
    Ok(exit_code(report.violation.is_none()))
}

pub(super) fn text(report: &SimulationReport) -> anyhow::Result<()> {
    let SimulationReport {
        seed,
        steps,
        sessions,
        crashes,
        effects,
        violation,
    } = report;
    say!("seed {seed}: {steps} steps, {sessions} sessions, {crashes} crashes of the controller")?;
    let rows = effects.iter();
    let rows = rows.map(|(kind, count)| vec![(*kind).to_owned(), count.to_string()]);
    output::table(&["EFFECT", "COUNT"], &rows.collect::<Vec<_>>())?;
    match violation {
        None => say!("no invariant was broken")?,
        Some(violation) => story(violation)?,
    }
    Ok(())
}

fn story(violation: &Violation) -> anyhow::Result<()> {
    let Violation {
        seed,
        steps,
        what,
        story,
    } = violation;
    say!("an invariant was broken: {what}")?;
    say!("again: gpuwarden simulate --steps {steps} --seed {seed}")?;
    for (number, step) in story.iter().enumerate() {
        say!("  {}. {step}", number + 1)?;
    }
    Ok(())
}
