//! `cargo xtask soak`: what takes too long for every run. The product killed a thousand times in
//! a stream of events and in the middle of a large burst, a simulation of ten million steps, an unprivileged
//! process and strangers at every port that do what they can, and minutes of every fuzz target.

use crate::{
    fuzz, setup,
    shell::{cargo, run as run_command, step, target_dir},
};

/// Steps of the simulation.
const STEPS: u32 = 10_000_000;
/// Nodes that fail at once in the burst: as many as NVSentinel was measured with, of which
/// it never cordoned 201 after a kill.
const BURST: u32 = 375;

#[derive(clap::Args)]
#[command(after_help = "Examples:\n  cargo xtask soak\n  \
                  cargo xtask soak --kills 100 --seconds 60\n  \
                  cargo xtask soak --hostile --seconds 60\n\n\
                  The defaults are those of a release. The second example is for a change that \
                  concerns crashes or parsers.")]
pub(crate) struct Args {
    /// Number of times that the product is killed with SIGKILL while 2,000 events come in: once as
    /// one process, and once as agent and controller.
    #[arg(long, default_value_t = 1_000)]
    kills: u32,
    /// Seconds that each fuzz target, the unprivileged process, strangers at the ports, and BMCs run; 0 leaves them
    /// out.
    #[arg(long, default_value_t = 600)]
    seconds: u32,
    /// Run only the unprivileged process, the strangers and the BMCs.
    #[arg(long, conflicts_with = "kills")]
    hostile: bool,
}

/// Runs it all; fails at the first finding.
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

/// Runs real faults beside a process of another user that attacks, then what somebody may ask beside strangers
/// at each port, then BMCs that answer anything; each ends with the round under way.
/// The second in which each has to cordon is that of the product as it is shipped.
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
                // Beside strangers no cordon need take less than a second.
                .args(["--test-threads", "1"])
                // A soak that is skipped is none.
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
