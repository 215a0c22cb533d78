//! Build, test and maintenance commands: `cargo xtask --help`.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a tool talks to its user"
)]

mod bench;
mod check;
mod environment;
mod fuzz;
mod generate;
mod gpu;
mod lint;
mod mutants;
mod setup;
mod shell;
mod soak;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
#[command(about = "Build, test and maintenance commands of gpuwarden")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install and build what the tests need, into the user's cache directory.
    ///
    /// Kept in ~/.cache/gpuwarden, or below `$XDG_CACHE_HOME`, by a hash of the sources: other
    /// clones share it, and a second run has nothing to do. The first takes about twenty minutes on
    /// two cores, ten of them for an older Kubernetes. Ends with exit code 1 where something is
    /// missing that it cannot install.
    Setup(setup::Args),
    /// Run all tests, set-up included.
    ///
    /// A test whose component is missing is skipped and listed at the end; with CI=true a skip is
    /// a failure.
    Test(test::Args),
    /// Check what is quick to check: format, clippy, lint, fuzz targets, unit tests.
    Check,
    /// Check the rules of the house: floors, purity, file sizes, named tests, licences.
    Lint,
    /// Write the generated files: protobuf types and `docs/cli.md`.
    Generate {
        /// Write nothing; fail when a generated file is stale.
        #[arg(long)]
        check: bool,
    },
    /// Feed arbitrary input to what takes input from outside.
    Fuzz(fuzz::Args),
    /// Run what takes long: 1,000 kills in a stream of events, ten minutes beside a hostile process
    /// and of each fuzz target.
    Soak(soak::Args),
    /// Look whether the simulation notices guards that are taken out of the decisions.
    Mutants,
    /// Measure the product under a load, in a test cluster or on its own.
    Bench(bench::Args),
    /// Check what only a machine with an NVIDIA GPU shows: its GPUs, XIDs, and the cost of watching.
    Gpu(gpu::Args),
    /// Keep a test control plane for hand use.
    Env {
        #[command(subcommand)]
        command: environment::Command,
    },
}

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Gpu(args) => return gpu::run(&args),
        Command::Setup(args) => setup::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Check => check::run(),
        Command::Lint => lint::run(),
        Command::Generate { check } => generate::run(check),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Mutants => mutants::run(),
        Command::Bench(args) => bench::run(&args),
        Command::Env { command } => environment::run(&command),
    }?;
    Ok(ExitCode::SUCCESS)
}
