//! `cargo xtask test`: set-up, build, all tests, and the list of skips.

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

/// Concurrent tests of the whole product. They wait for processes and for the cluster; two cores are busy
/// with four of them, and with five, control planes took minutes to start.
const PRODUCT_THREADS: usize = 4;

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask test
  cargo xtask test -- -p gpuwarden-testkit
  cargo xtask test -- -p gpuwarden --test e2e quarantine")]
pub(crate) struct Args {
    /// Use the installed components, and install nothing.
    #[arg(long)]
    no_setup: bool,
    /// Arguments for 'cargo test': packages, names, and after another '--' arguments for the
    /// tests.
    #[arg(last = true)]
    args: Vec<String>,
}

/// Runs all tests. Fails if a test fails or, under CI, is skipped.
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
            // Built with the tests, with the same features, so that nothing is built twice.
            run_command(build.args(["--tests", "--workspace"]))
        }
    })?;
    let binary = target_dir()?.join("debug/gpuwarden");
    let skips = tempfile::NamedTempFile::new()?;
    // Keeps the shared control planes running between two test binaries.
    let _held = hold_control_planes()?;
    let mut tested = Ok(());
    for (name, mut command) in test_commands(&args.args) {
        command.env("GPUWARDEN_BIN", &binary);
        command.env(SKIP_FILE, skips.path());
        // A log that is cut to its end should end with why tests failed.
        command.env("RUST_BACKTRACE", "0");
        tested = tested.and(step(name, || run_command(&mut command)));
    }
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

/// Returns the named `cargo test` commands: one for the tests that `args` select, or two for
/// all.
fn test_commands(args: &[String]) -> Vec<(&'static str, Command)> {
    let test = |all: &[&str]| {
        let mut command = cargo();
        command.args(["test", "--no-fail-fast"]).args(all);
        command
    };
    if !args.is_empty() {
        let all: &[&str] = if names_package(args) {
            &[]
        } else {
            &["--workspace"]
        };
        let mut chosen = test(all);
        chosen.args(args);
        return vec![("tests", chosen)];
    }
    // All are of one package, but selected in the workspace: with the same features, nothing is
    // built twice.
    let product = ["--workspace", "--bin", "gpuwarden", "--test", "e2e"];
    let mut product = test(&product);
    product.args(["--", "--test-threads", &PRODUCT_THREADS.to_string()]);
    let rooms = test(&["--workspace", "--exclude", "gpuwarden"]);
    vec![
        ("tests of the rooms", rooms),
        ("tests of the product", product),
    ]
}

/// Returns true if the arguments for cargo, not those for the tests, select packages.
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

/// Returns each skip once: a test may report the same skip several times.
fn read_skips(noted: &str) -> BTreeSet<&str> {
    noted.lines().filter(|line| !line.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(args: &[&str]) -> Vec<String> {
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let words = |(_, command): (&str, Command)| {
            let words = command.get_args().map(|arg| arg.to_string_lossy());
            words.collect::<Vec<_>>().join(" ")
        };
        test_commands(&args).into_iter().map(words).collect()
    }

    #[test]
    fn all_packages_are_tested_unless_some_are_named() {
        let product = format!(
            "test --no-fail-fast --workspace --bin gpuwarden --test e2e -- --test-threads {PRODUCT_THREADS}"
        );
        assert_eq!(
            words(&[]),
            [
                "test --no-fail-fast --workspace --exclude gpuwarden",
                &product,
            ]
        );
        assert_eq!(words(&["-p", "a"]), ["test --no-fail-fast -p a"]);
        assert_eq!(words(&["--package=a"]), ["test --no-fail-fast --package=a"]);
        assert_eq!(
            words(&["name", "--", "-p"]),
            ["test --no-fail-fast --workspace name -- -p"]
        );
    }

    #[test]
    fn a_skip_counts_once() {
        assert_eq!(read_skips("a needs go\na needs go\nb needs go\n").len(), 2);
    }
}
