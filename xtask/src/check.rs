//! `cargo xtask check`: the checks that are quick enough to run before every commit.

use crate::{
    fuzz, generate, lint,
    shell::{cargo, run as run_command, step},
};

/// Runs the steps in order and stops at the first failure.
pub(crate) fn run() -> anyhow::Result<()> {
    step("format", || {
        run_command(cargo().args(["fmt", "--all", "--check"]))
    })?;
    step("lint", lint::run)?;
    step("generated files", || generate::run(true))?;
    step("clippy", || {
        let clippy = [
            "clippy",
            "--workspace",
            "--all-targets",
            "--all-features",
            "--",
        ];
        run_command(cargo().args(clippy).args(["-D", "warnings"]))
    })?;
    step("fuzz targets", fuzz::check)?;
    step("unit tests", || {
        run_command(cargo().args(["test", "--quiet", "--workspace", "--lib", "--bins"]))
    })
}
