//! The tutorial as a reader follows it.

use rustix::process::{Pid, Signal, kill_process};
use testkit::wait_for;

use crate::monitoring::repository;
use crate::page::{Shell, steps};
use crate::support::SOON;

#[tokio::test]
async fn the_commands_of_the_tutorial_print_what_it_shows() -> anyhow::Result<()> {
    let steps = steps(&std::fs::read_to_string(repository("docs/tutorial.md"))?);
    let runs = steps
        .iter()
        .position(|step| step.command.starts_with("gpuwarden run "));
    let (before, after) = steps.split_at(runs.unwrap());
    let (run, after) = after.split_first().unwrap();

    let home = tempfile::tempdir()?;
    let terminal = || Shell::new(repository(""), &home.path().display().to_string());
    let mut first = terminal()?;
    first.follow(before).await?;
    let printed = home.path().join("printed");
    let mut running = first
        .command(&format!("exec {}", run.command))
        .stdout(std::fs::File::create(&printed)?)
        .spawn()?;
    wait_for("the greeting", SOON, || async {
        let printed = std::fs::read_to_string(&printed).map_err(|error| error.to_string())?;
        first.compare(&printed, &run.shown)
    })
    .await?;
    terminal()?.follow(after).await?;

    // Ctrl-C.
    let pid = running
        .id()
        .and_then(|id| Pid::from_raw(id.try_into().ok()?));
    kill_process(pid.unwrap(), Signal::INT)?;
    let ended = tokio::time::timeout(SOON, running.wait()).await??;
    assert!(ended.success(), "{ended}");
    Ok(())
}
