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
mod image;
mod lint;
mod metrics;
mod mutants;
mod package;
mod reproduce;
mod sbom;
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
    /// Install and build the components that tests need, into the user's cache directory.
    ///
    /// They are kept in ~/.cache/gpuwarden, or below `$XDG_CACHE_HOME`, by a hash of their
    /// sources: other clones share them, and a second run has nothing to do. The first takes
    /// about twenty minutes on two cores, ten of them for an older Kubernetes. Exits with code 1
    /// if a component is missing that it cannot install.
    Setup(setup::Args),
    /// Run all tests, after the set-up.
    ///
    /// A test whose component is missing is skipped and listed at the end; with CI=true a skip
    /// is a failure.
    Test(test::Args),
    /// Run the quick checks: format, clippy, lint, fuzz targets, unit tests.
    Check,
    /// Check the rules of this repository: floors, purity, file sizes, prose, named tests,
    /// licences.
    Lint,
    /// Write the generated files: protobuf types, `docs/cli.md`, and what follows from the values
    /// of the chart.
    Generate {
        /// Write nothing; fail if a generated file is stale.
        #[arg(long)]
        check: bool,
    },
    /// Fuzz the parsers of untrusted input.
    Fuzz(fuzz::Args),
    /// Run the long tests: 1,000 kills in a stream of events, ten minutes beside a hostile
    /// process, and ten minutes of each fuzz target.
    Soak(soak::Args),
    /// Check that tests fail once a guard is removed from the decisions.
    Mutants,
    /// Measure the product under load, in a test cluster or on its own.
    Bench(bench::Args),
    /// Check gpuwarden on a machine with an NVIDIA GPU: its GPUs, XIDs, and the cost of
    /// watching.
    Gpu(gpu::Args),
    /// Build a container image of `Containerfile`, without a registry.
    Image(image::Args),
    /// Build the program twice, in two directories, and compare the bytes.
    Reproduce(reproduce::Args),
    /// Build the packages for machines without Kubernetes: .deb, .rpm and .tar.gz.
    Package(package::Args),
    /// Run a test control plane for manual use.
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
        Command::Image(args) => image::run(&args),
        Command::Reproduce(args) => reproduce::run(&args),
        Command::Package(args) => package::run(&args),
        Command::Env { command } => environment::run(&command),
    }?;
    Ok(ExitCode::SUCCESS)
}
