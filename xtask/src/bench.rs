//! `cargo xtask bench`: runs the benchmarks of `bench/` with a release build of the product.

use std::{env, ffi::OsString, process::Command};

use crate::shell::{cargo, run as run_command, target_dir};

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask bench
  cargo xtask bench burst --kubeconfig \"$(cargo xtask env up)\" -o json
  cargo xtask bench -- --help

The last lists all benchmarks and flags. All but decode, store, storm, gpus, binary and the first
figure of preflight load the API server that --kubeconfig names.")]
pub(crate) struct Args {
    /// Name of the benchmark, and its flags.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Builds the product and the benchmarks in release mode, and runs the benchmarks. Variables of
/// the product are removed from the environment: a cluster is loaded only if a flag names it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    // The fake GPUs are a library beside the program.
    let packages = ["gpuwarden", "gpuwarden-bench", "gpuwarden-fakes"];
    let packages = packages.iter().flat_map(|name| ["--package", name]);
    run_command(cargo().args(["build", "--release"]).args(packages))?;
    let release = target_dir()?.join("release");
    let mut bench = Command::new(release.join("gpuwarden-bench"));
    for (name, _) in env::vars_os() {
        let shown = name.to_string_lossy();
        if shown.starts_with("GPUWARDEN_") || shown == "KUBERNETES_SERVICE_HOST" {
            bench.env_remove(name);
        }
    }
    bench.env("GPUWARDEN_BIN", release.join("gpuwarden"));
    run_command(bench.args(&args.args))
}
