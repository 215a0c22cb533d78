//! `cargo xtask mutants`: removes guards from the decisions, and checks that tests fail: the
//! simulation, for one guard at a time, and named tests for the parts that the simulation does
//! not cover. Tests that miss a removed guard would miss a bug of ours as well.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use crate::{
    generate::workspace_root,
    shell::{cargo, output, run as run_command, step, target_dir},
};

/// A guard: its file below `crates`, its text, and the replacement.
struct Guard {
    what: &'static str,
    file: &'static str,
    text: &'static str,
    without: &'static str,
}

/// A guard that is covered by a named test.
struct Held {
    guard: Guard,
    /// Package of the test.
    package: &'static str,
    test: &'static str,
}

/// Guards that the simulation covers.
const SIMULATED: [Guard; 18] = [
    Guard {
        what: "a cordon that was there before stays",
        file: "fleet/src/session/change.rs",
        text: "if !self.own.cordon_pre_existing && self.node.unschedulable {",
        without: "if self.node.unschedulable {",
    },
    Guard {
        what: "labels get the value that they had before",
        file: "fleet/src/session/change.rs",
        text: "if which(&label) && self.node.labels",
        without: "if label.is_empty() && self.node.labels",
    },
    Guard {
        what: "faults that a person has dismissed start no session",
        file: "fleet/src/session/dismissal.rs",
        text: "let released = released.map(",
        without: "let released = released.filter(|_| false).map(",
    },
    Guard {
        what: "the uncordon of a machine ends no session",
        file: "fleet/src/session/uncordon.rs",
        text: "if machines.is_none() && !self.is_undone() {",
        without: "if machines.is_none() || !self.is_undone() {",
    },
    Guard {
        what: "a node says that it is being drained before pods leave it",
        file: "fleet/src/stage/drain.rs",
        text: "if mark.is_none() {\n            return pods",
        without: "if false {\n            return pods",
    },
    Guard {
        what: "no pod is asked to leave against a veto",
        file: "fleet/src/stage/drain.rs",
        text: "if facts.veto.is_some() {\n            return;",
        without: "if false {\n            return;",
    },
    Guard {
        what: "nothing is drained whose pods are not known",
        file: "fleet/src/stage/drain.rs",
        text: "self.pods.as_ref().filter(|pods| pods.has_current_pods())",
        without: "self.pods.as_ref().filter(|_| true)",
    },
    Guard {
        what: "only DeleteAfterTimeout deletes pods without time to end",
        file: "fleet/src/drain.rs",
        text: "(configured == DrainMode::DeleteAfterTimeout",
        without: "(true",
    },
    Guard {
        what: "nothing is repaired before the pods have left",
        file: "fleet/src/stage/remediation.rs",
        text: "let drains = !drained && desired.drains().is_some();",
        without: "let drains = false;",
    },
    Guard {
        what: "what was repaired is validated before it comes back",
        file: "fleet/src/stage/validation.rs",
        text: "let remediated = (own.mark",
        without: "let remediated = false && (own.mark",
    },
    Guard {
        what: "a route of the policy skips the drain",
        file: "policy/src/assess.rs",
        text: "Some(RouteDrain::No) => None,",
        without: "Some(RouteDrain::No) => Some(false),",
    },
    Guard {
        what: "pods of other GPUs stay where single ones are drained",
        file: "fleet/src/drain/partial.rs",
        text: "(Fate::Leaves(..), Some(false)) => Fate::Stays",
        without: "(Fate::Leaves(..), Some(false)) if false => Fate::Stays",
    },
    Guard {
        what: "no device is out of service before its node says that it has a session",
        file: "fleet/src/stage/device_taints.rs",
        text: "if !in_session {",
        without: "if false {",
    },
    Guard {
        what: "no drain by a custom resource begins against a veto",
        file: "fleet/src/stage/drain/custom.rs",
        text: "facts.veto.is_none() && self.object",
        without: "self.object",
    },
    Guard {
        what: "no pod leaves before all of its gang have written their checkpoints",
        file: "fleet/src/drain.rs",
        text: "prepares.or_else(|| gang?.waits(now))",
        without: "prepares",
    },
    Guard {
        what: "a drain that asks for an approval waits for one",
        file: "fleet/src/stage/approval.rs",
        text: "one.unapproved = !drains.iter().all(has);",
        without: "one.unapproved = false;",
    },
    Guard {
        what: "a remediation that asks for an approval waits for one",
        file: "fleet/src/remediation/plan.rs",
        text: "if !approvals.iter().all(has) {",
        without: "if false {",
    },
    Guard {
        what: "an approval is for no other proposal",
        file: "model/src/proposal.rs",
        text: "named.find(|one| one.id(session) == self.proposal)",
        without: "named.find(|_| true)",
    },
];

/// Guards that named tests cover, each in another part of the decisions. All are removed
/// together, for a single build.
const HELD: [Held; 12] = [
    Held {
        guard: Guard {
            what: "a report that other faults are near is not alone",
            file: "analysis/src/condition/solo.rs",
            text: "report.count == 1 && !report.only_counts && self.others.is_empty();",
            without: "report.count == 1 && !report.only_counts;",
        },
        package: "gpuwarden-analysis",
        test: "tests::built_in::xid_74_stands_alone_on_its_own_gpu_only",
    },
    Held {
        guard: Guard {
            what: "the crash of one job counts once",
            file: "analysis/src/condition/tally.rs",
            text: "let same_job = |known: &Item| known.job.is_some() && known.job == item.job;",
            without: "let same_job = |known: &Item| known.job.is_some() && known.job != item.job;",
        },
        package: "gpuwarden-analysis",
        test: "tests::built_in::the_crash_of_one_job_counts_once",
    },
    Held {
        guard: Guard {
            what: "a late event has its group built anew",
            file: "analysis/src/history.rs",
            text: "if self.summed_up.as_ref().is_some_and(|last| key <= *last) {",
            without: "if self.summed_up.as_ref().is_some_and(|last| key < *last && key > *last) {",
        },
        package: "gpuwarden-analysis",
        test: "tests::what_follows_depends_on_the_set_of_entries_alone",
    },
    Held {
        guard: Guard {
            what: "one silent GPU of a group is an outlier, two are not",
            file: "analysis/src/condition/outlier.rs",
            text: "if silent.next().is_some() || self.speakers().count() < threshold {",
            without: "if self.speakers().count() < threshold {",
        },
        package: "gpuwarden-analysis",
        test: "tests::compared::a_gpu_is_silent_where_all_others_report",
    },
    Held {
        guard: Guard {
            what: "a job that has failed on another GPU does not count",
            file: "analysis/src/condition/exclusive.rs",
            text: "let own = |it: &&Seen| !is_elsewhere(&it.value, it.first, it.last);",
            without: "let own = |it: &&Seen| !is_elsewhere(&it.id, it.first, it.last);",
        },
        package: "gpuwarden-analysis",
        test: "tests::compared::jobs_count_that_have_failed_on_no_other_gpu",
    },
    Held {
        guard: Guard {
            what: "conclusions are no input of the analysis",
            file: "analysis/src/analyzer.rs",
            text: "if event.agent == AGENT {",
            without: "if event.agent == AGENT && event.is_healthy {",
        },
        package: "gpuwarden-analysis",
        test: "tests::analyzer::conclusions_and_events_that_are_only_stored_are_no_input",
    },
    Held {
        guard: Guard {
            what: "what repairs do not help against is not repaired",
            file: "fleet/src/stage/remediation.rs",
            text: "route.or_else(|| not_worked(&one.event, &desired.events))",
            without: "route.or_else(|| not_worked(&one.event, &[]))",
        },
        package: "gpuwarden-fleet",
        test: "stage::remediation::tests::analysis::what_repairs_do_not_help_against_is_not_repaired_and_a_person_is_asked",
    },
    Held {
        guard: Guard {
            what: "a node is drained once the custom resource of its drain says so",
            file: "fleet/src/stage/drain/custom.rs",
            text: "&& self.object.state == DrainResource::There(true)",
            without: "&& matches!(self.object.state, DrainResource::There(_))",
        },
        package: "gpuwarden-fleet",
        test: "stage::drain::tests::custom::one_that_does_not_end_asks_a_person_and_is_not_called_drained",
    },
    Held {
        guard: Guard {
            what: "the rules of devices that others have made stay",
            file: "fleet/src/state.rs",
            text: "Owns::All => rule.spec.by == Maker::Controller,",
            without: "Owns::All => true,",
        },
        package: "gpuwarden-fleet",
        test: "stage::device_taints::tests::each_kind_of_gpuwarden_leaves_the_rules_of_others_alone",
    },
    Held {
        guard: Guard {
            what: "a signal that another process may have sent is asked about, and not sent",
            file: "maintenance/src/janitor/sending.rs",
            text: "if record.by == self.process && unsent {",
            without: "if unsent {",
        },
        package: "gpuwarden-maintenance",
        test: "janitor::tests::a_crash_between_any_two_steps_makes_no_second_signal",
    },
    Held {
        guard: Guard {
            what: "a node stays held by each request that waits for it",
            file: "maintenance/src/validation_request/gate.rs",
            text: "one.name != request && !(one.failed && same)",
            without: "one.name != request && !same",
        },
        package: "gpuwarden-maintenance",
        test: "validation_request::tests::together::a_request_that_waits_holds_its_node_whatever_becomes_of_another",
    },
    Held {
        guard: Guard {
            what: "a node is remediating only while something is under way or waited for",
            file: "model/src/attempt.rs",
            text: "let goes_on = last.end.is_none() || self.waits_until.is_some();",
            without: "let goes_on = true;",
        },
        package: "gpuwarden-fleet",
        test: "stage::remediation::tests::ways_out::a_repair_that_nothing_asks_for_any_more_is_not_waited_for",
    },
];

/// Name of the simulation test, and its output for a finding.
const SIMULATION: (&str, &str) = (
    "simulate::tests::nothing_breaks_an_invariant",
    "violation: Some(",
);
/// Runs of the simulation per guard, each with another seed: one run misses the most rarely
/// needed guard in about one of ten cases.
const RUNS: usize = 4;
/// Output of a failed test.
const FAILED: &str = "test result: FAILED. 0 passed; 1 failed";

/// Removes each guard in a copy of the sources. Fails if its test still passes.
pub(crate) fn run() -> anyhow::Result<()> {
    let target = target_dir()?;
    let copy = target.join("mutants");
    copy_sources(&copy)?;
    let tests = |package| Tests {
        package,
        copy: &copy,
        target: &target,
    };
    without(HELD.iter().map(|one| &one.guard), &copy, || {
        HELD.iter().try_for_each(|held| {
            step(&format!("without: {}", held.guard.what), || {
                let tests = tests(held.package);
                tests.build()?;
                tests.notice(held.test, FAILED).map(drop)
            })
        })
    })?;
    let trial = tests("gpuwarden-trial");
    for guard in &SIMULATED {
        step(&format!("without: {}", guard.what), || {
            let said = without([guard], &copy, || {
                trial.build()?;
                let run = || trial.notice(SIMULATION.0, SIMULATION.1);
                (1..RUNS).find_map(|_| run().ok()).map_or_else(run, Ok)
            })?;
            let mut lines = said.lines().map(str::trim);
            let what = lines.find(|line| line.starts_with("what:"));
            println!("  {}", what.unwrap_or_default());
            Ok(())
        })?;
    }
    Ok(())
}

/// Copies the sources that the tests are built from. Crates of the registry are built once for
/// both.
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

/// Runs `work` while guards are removed in the copy.
fn without<'a, T>(
    guards: impl IntoIterator<Item = &'a Guard>,
    copy: &Path,
    run: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut before = Vec::new();
    for guard in guards {
        let file = copy.join("crates").join(guard.file);
        let text = fs::read_to_string(&file)?;
        ensure!(
            text.matches(guard.text).count() == 1,
            "{} has not once: {}",
            guard.file,
            guard.text
        );
        before.push((file, text, guard));
    }
    for (file, text, guard) in &before {
        fs::write(file, text.replacen(guard.text, guard.without, 1))?;
    }
    let ran = run();
    for (file, text, _) in before {
        fs::write(file, text)?;
    }
    ran
}

/// Unit tests of a package in the copy.
struct Tests<'a> {
    package: &'static str,
    copy: &'a Path,
    target: &'a Path,
}

// === impl Tests ===

impl Tests<'_> {
    fn command(&self, more: &[&str]) -> Command {
        let mut command = cargo();
        command
            .current_dir(self.copy)
            .env("CARGO_TARGET_DIR", self.target)
            .args(["test", "--quiet", "--package", self.package, "--lib"])
            .args(more);
        command
    }

    fn build(&self) -> anyhow::Result<()> {
        run_command(&mut self.command(&["--no-run"]))
    }

    /// Runs one test. Returns its output. Fails if the test passes, or if the output lacks
    /// `says`.
    fn notice(&self, test: &str, says: &str) -> anyhow::Result<String> {
        let ran = self.command(&["--", "--exact", test]).output()?;
        let said = String::from_utf8_lossy(&ran.stdout).into_owned();
        if ran.status.success() || !said.contains(says) {
            bail!("{test} does not notice that it is gone:\n{said}");
        }
        Ok(said)
    }
}
