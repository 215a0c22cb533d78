//! `cargo xtask test`: set-up, build, all tests, and what was skipped.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    process::Command,
};

use anyhow::{Context as _, bail};
use testkit::{
    SKIP_FILE, Version,
    supervisor::{self, Programs},
};

use crate::{
    setup,
    shell::{cargo, run as run_command, step, target_dir},
};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask test
  cargo xtask test -- -p gpuwarden-testkit
  cargo xtask test -- -p gpuwarden --test e2e quarantine")]
pub(crate) struct Args {
    /// Take what is set up already, and install nothing.
    #[arg(long)]
    no_setup: bool,
    /// Arguments for 'cargo test': packages, names, and after another '--' those of the tests.
    #[arg(last = true)]
    args: Vec<String>,
}

/// Runs everything and fails when a test fails or, under CI, when one was skipped.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if !args.no_setup {
        step("set-up", || setup::for_tests().map(drop))?;
    }
    step("build", || {
        let mut build = cargo();
        build.args(["build", "--bins"]);
        if names_package(&args.args) {
            run_command(build.args(["--package", "gpuwarden"]))
        } else {
            // With the tests: the same features, so nothing is built twice.
            run_command(build.args(["--tests", "--workspace"]))
        }
    })?;
    let binary = target_dir()?.join("debug/gpuwarden");
    let skips = tempfile::NamedTempFile::new()?;
    // Between two test binaries nobody uses the shared control planes: keep them up.
    let _held = hold_control_planes()?;
    let tested = step("tests", || {
        run_command(
            test_command(&args.args)
                .env("GPUWARDEN_BIN", binary)
                .env(SKIP_FILE, skips.path()),
        )
    });
    let noted = fs::read_to_string(skips.path())?;
    let skipped = read_skips(&noted);
    for skip in &skipped {
        println!("skipped: {skip}");
    }
    println!("{} skipped", skipped.len());
    tested?;
    if setup::in_ci() && !skipped.is_empty() {
        bail!(
            "{} tests were skipped, which is a failure with CI=true",
            skipped.len()
        );
    }
    Ok(())
}

fn test_command(args: &[String]) -> Command {
    let mut command = cargo();
    command.args(["test", "--no-fail-fast"]);
    if !names_package(args) {
        command.arg("--workspace");
    }
    command.args(args);
    command
}

/// Whether the arguments for cargo, not those for the tests, choose packages.
fn names_package(args: &[String]) -> bool {
    args.iter()
        .take_while(|arg| *arg != "--")
        .any(|arg| arg.starts_with("--package") || arg.starts_with("-p"))
}

fn hold_control_planes() -> anyhow::Result<Vec<File>> {
    let mut held = Vec::new();
    for version in Version::ALL {
        if let Some(programs) = Programs::locate(version)? {
            let dir = supervisor::shared_dir(&programs, version)?;
            held.push(supervisor::hold(&dir).context("keep the shared control plane")?);
        }
    }
    Ok(held)
}

/// Each skip once: a test that needs a thing twice says so twice.
fn read_skips(noted: &str) -> BTreeSet<&str> {
    noted.lines().filter(|line| !line.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(args: &[&str]) -> Vec<String> {
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        test_command(&args)
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn all_packages_are_tested_unless_some_are_named() {
        assert_eq!(words(&[]), ["test", "--no-fail-fast", "--workspace"]);
        assert_eq!(words(&["-p", "a"]), ["test", "--no-fail-fast", "-p", "a"]);
        assert_eq!(
            words(&["--package=a"]),
            ["test", "--no-fail-fast", "--package=a"]
        );
        assert_eq!(
            words(&["name", "--", "-p"]),
            ["test", "--no-fail-fast", "--workspace", "name", "--", "-p"]
        );
    }

    #[test]
    fn a_skip_counts_once() {
        assert_eq!(read_skips("a needs go\na needs go\nb needs go\n").len(), 2);
    }
}
