//! `cargo xtask mutants`: takes guards out of the decisions, one at a time, and looks whether the simulation
//! notices. One that does not would find no fault of ours either.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use crate::{
    generate::workspace_root,
    shell::{cargo, output, run as run_command, step, target_dir},
};

/// A guard: its file below `crates/domain/src`, its text, and what is put in its place.
struct Guard {
    what: &'static str,
    file: &'static str,
    text: &'static str,
    without: &'static str,
}

const GUARDS: [Guard; 9] = [
    Guard {
        what: "a cordon that was there before stays",
        file: "session/change.rs",
        text: "if !self.own.cordon_pre_existing && self.node.unschedulable {",
        without: "if self.node.unschedulable {",
    },
    Guard {
        what: "labels get the value that they had before",
        file: "session/change.rs",
        text: "if which(&label) && self.node.labels",
        without: "if label.is_empty() && self.node.labels",
    },
    Guard {
        what: "faults that a person has dismissed start no session",
        file: "session/dismissal.rs",
        text: "let released = released.map(",
        without: "let released = released.filter(|_| false).map(",
    },
    Guard {
        what: "a node says that it is being drained before pods leave it",
        file: "fleet/drain.rs",
        text: "if mark.is_none() {\n            return;",
        without: "if false {\n            return;",
    },
    Guard {
        what: "no pod is asked to leave against a veto",
        file: "fleet/drain.rs",
        text: "if self.veto(name).is_some() {\n            return;",
        without: "if false {\n            return;",
    },
    Guard {
        what: "nothing is drained whose pods are not known",
        file: "fleet/drain.rs",
        text: "state.filter(|state| state.sees_pods())",
        without: "state.filter(|_| true)",
    },
    Guard {
        what: "only DeleteAfterTimeout deletes pods without time to end",
        file: "drain.rs",
        text: "(wished == DrainMode::DeleteAfterTimeout",
        without: "(true",
    },
    Guard {
        what: "nothing is repaired before the pods have left",
        file: "fleet/remedy.rs",
        text: "if !drained && desired.drains().is_some() {",
        without: "if false {",
    },
    Guard {
        what: "what was repaired is validated before it comes back",
        file: "fleet/validation.rs",
        text: "let repaired = (own.mark",
        without: "let repaired = false && (own.mark",
    },
];

/// The test that has to fail.
const TEST: &str = "simulate::tests::nothing_breaks_an_invariant";

/// Takes each guard out of a copy of the sources; fails where the simulation does not notice.
pub(crate) fn run() -> anyhow::Result<()> {
    let target = target_dir()?;
    let copy = target.join("mutants");
    copy_sources(&copy)?;
    for guard in &GUARDS {
        step(&format!("without: {}", guard.what), || {
            notices(guard, &copy, &target)
        })?;
    }
    Ok(())
}

/// Copies what the simulation is built from; registry crates are built once for both.
fn copy_sources(copy: &Path) -> anyhow::Result<()> {
    let mut git = Command::new("git");
    git.current_dir(workspace_root()).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
    ]);
    for file in output(&mut git)?.lines() {
        let (from, to) = (workspace_root().join(file), copy.join(file));
        let Ok(text) = fs::read(&from) else {
            continue; // deleted, and not committed
        };
        if fs::read(&to).is_ok_and(|there| there == text) {
            continue;
        }
        fs::create_dir_all(to.parent().context("a directory")?)?;
        fs::write(&to, text).with_context(|| format!("write {}", to.display()))?;
    }
    Ok(())
}

fn notices(guard: &Guard, copy: &Path, target: &Path) -> anyhow::Result<()> {
    let file = copy.join("crates/domain/src").join(guard.file);
    let text = fs::read_to_string(&file)?;
    ensure!(
        text.matches(guard.text).count() == 1,
        "{} has not once: {}",
        guard.file,
        guard.text
    );
    let test = |more: &[&str]| {
        let mut command = cargo();
        command
            .current_dir(copy)
            .env("CARGO_TARGET_DIR", target)
            .args(["test", "--quiet", "--package", "gpuwarden-trial", "--lib"])
            .args(more);
        command
    };
    fs::write(&file, text.replacen(guard.text, guard.without, 1))?;
    let built = run_command(&mut test(&["--no-run"]));
    let ran = built.and_then(|()| Ok(test(&["--", "--exact", TEST]).output()?));
    fs::write(&file, text)?;
    let ran = ran?;
    let said = String::from_utf8_lossy(&ran.stdout);
    if ran.status.success() || !said.contains("violation: Some(") {
        bail!("the simulation does not notice that it is gone:\n{said}");
    }
    let what = said
        .lines()
        .find(|line| line.trim_start().starts_with("what:"));
    println!("  {}", what.unwrap_or_default().trim());
    Ok(())
}
