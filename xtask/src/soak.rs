//! `cargo xtask soak`: tests that take too long for every run. They kill the product a thousand
//! times in a stream of events and during a large burst, run a simulation of ten million steps,
//! attack the product from an unprivileged process and at every port, and run every fuzz target
//! for minutes.

use crate::{
    fuzz, setup,
    shell::{cargo, run as run_command, step, target_dir},
};

/// Steps of the simulation.
const STEPS: u32 = 10_000_000;
/// Nodes that fail at once in the burst: as many as in the measurement of NVSentinel, which
/// after a kill never cordoned 201 of them.
const BURST: u32 = 375;

#[derive(clap::Args)]
#[command(after_help = "Examples:\n  cargo xtask soak\n  \
                  cargo xtask soak --kills 100 --seconds 60\n  \
                  cargo xtask soak --hostile --seconds 60\n\n\
                  The defaults are those of a release. The second example is for a change that \
                  concerns crashes or parsers.")]
pub(crate) struct Args {
    /// Number of kills with SIGKILL while 2,000 events arrive: once with a single process, and
    /// once with agent and controller.
    #[arg(long, default_value_t = 1_000)]
    kills: u32,
    /// Seconds for each fuzz target, the unprivileged process, the attacks on ports, and the
    /// BMCs; 0 skips them.
    #[arg(long, default_value_t = 600)]
    seconds: u32,
    /// Run only the unprivileged process, the attacks on ports and the BMCs.
    #[arg(long, conflicts_with = "kills")]
    hostile: bool,
}

/// Runs all parts. Fails at the first finding.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    step("set-up", || setup::for_soak().map(drop))?;
    if args.hostile {
        return hostile(args.seconds);
    }
    step(
        &format!("{} kills in a stream of events", args.kills),
        || {
            run_command(
                cargo()
                    .args(["test", "--package", "gpuwarden", "--test", "e2e"])
                    .args(["--", "killed_at_random_moments", "--nocapture"])
                    .args(["--test-threads", "1"])
                    .env("GPUWARDEN_SOAK_KILLS", args.kills.to_string()),
            )
        },
    )?;
    step(&format!("kills in bursts of {BURST} nodes"), || {
        run_command(
            cargo()
                .args(["test", "--package", "gpuwarden", "--test", "e2e"])
                .args(["--", "killed_in_the_middle_of_a_burst", "--nocapture"])
                .env("GPUWARDEN_SOAK_NODES", BURST.to_string()),
        )
    })?;
    if args.seconds == 0 {
        return Ok(());
    }
    step(&format!("a simulation of {STEPS} steps"), || {
        let simulate = ["--", "simulate", "--steps", &STEPS.to_string()];
        run_command(
            cargo()
                .args(["run", "--release", "--package", "gpuwarden"])
                .args(simulate),
        )
    })?;
    hostile(args.seconds)?;
    step("fuzz targets", || fuzz::run(&fuzz::Args::all(args.seconds)))
}

/// Runs real faults beside an attacking process of another user, then requests beside attackers
/// at each port, then BMCs that send arbitrary responses. Each part ends after the round in
/// progress. Uses the release build, because each cordon must take less than a second.
fn hostile(seconds: u32) -> anyhow::Result<()> {
    step("release build", || {
        run_command(cargo().args(["build", "--release", "--package", "gpuwarden"]))
    })?;
    let product = target_dir()?.join("release/gpuwarden");
    step(&format!("{seconds} s beside a hostile process"), || {
        run_command(
            cargo()
                .args(["test", "--package", "gpuwarden", "--test", "e2e"])
                .args(["--", "whatever_an_unprivileged_process_does"])
                .args(["whatever_strangers_do", "--nocapture"])
                // One at a time: the test with attackers at the ports sets no limit for a
                // cordon, and must not slow down the other one.
                .args(["--test-threads", "1"])
                // Under CI, a skip is a failure.
                .env("CI", "true")
                .env("GPUWARDEN_BIN", &product)
                .env("GPUWARDEN_SOAK_SECONDS", seconds.to_string()),
        )
    })?;
    step(&format!("{seconds} s of what BMCs answer"), || {
        run_command(
            cargo()
                .args([
                    "test",
                    "--package",
                    "gpuwarden-janitor",
                    "--test",
                    "janitor",
                ])
                .args(["--", "whatever_a_bmc_answers", "--nocapture"])
                .env("CI", "true")
                .env("GPUWARDEN_SOAK_SECONDS", seconds.to_string()),
        )
    })
}
