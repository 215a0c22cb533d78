//! `cargo xtask gpu`: checks on a machine with an NVIDIA GPU, against NVIDIA's own tools. They
//! need a gpuwarden binary, `nvidia-smi` and, except for the enumeration, `python3`, but no
//! Rust.

mod cost;
mod enumeration;
mod fault;
mod watcher;

use std::{
    fmt, fs,
    path::PathBuf,
    process::{Command, ExitCode},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::{cost::Cost, enumeration::Listed, fault::FAULTS, watcher::Watcher};
use crate::shell::{cargo, output, run as run_command, target_dir};

/// Exit code if the machine has no GPU.
const NO_GPU: u8 = 2;
/// Python program with the jobs for the GPU.
const JOBS: &str = include_str!("../gpu/cuda.py");
/// Time limit of a job in seconds, including start and compilation, in case the GPU hangs.
const JOB_LIMIT_S: &str = "120";
/// Longest time from a fault until it is reported. Repeats of a kernel log line within a minute
/// are only counted, so a second run within a minute may miss its own fault.
const SIGHT_LIMIT: Duration = Duration::from_secs(15);
/// Time after the last event to wait for unwanted ones: the driver's event and the line of the
/// kernel log arrive one after the other.
const SETTLE: Duration = Duration::from_secs(1);
/// Interval between two requests for events.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// Number of rounds with gpuwarden, and of rounds without.
const ROUNDS: usize = 5;
/// Length of a round in seconds.
const ROUND_S: f64 = 5.0;
/// Launches that are timed to choose the number per round.
const TRIED_LAUNCHES: u32 = 1_000;

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask gpu
  cargo xtask gpu enumeration fault --output gpu.json
  ./xtask gpu --gpuwarden ./gpuwarden

The last is for a machine without Rust: copy target/debug/xtask and target/release/gpuwarden there.
Exits with 0 where all that could be seen is right, 1 where something is wrong, 2 without a GPU.")]
pub(crate) struct Args {
    /// Checks to run [default: all].
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Binary of gpuwarden to check [default: a new release build].
    #[arg(long, value_name = "PATH")]
    gpuwarden: Option<PathBuf>,
    /// Write the results to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Part {
    /// Compare gpuwarden's list of GPUs with that of nvidia-smi.
    Enumeration,
    /// Run a CUDA program that faults, and check that gpuwarden reports it as an application
    /// error.
    Fault,
    /// Compare the run time of a CUDA job with and without gpuwarden.
    Cost,
}

/// Result of a check, or of a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    Right,
    NotSeen,
    Wrong,
}

/// A check with its result.
#[derive(Serialize)]
struct Finding {
    part: Part,
    verdict: Verdict,
    said: String,
    details: Value,
}

/// Output of a job.
#[derive(Deserialize)]
struct Answer {
    pci: String,
    #[serde(default)]
    seconds: f64,
    #[serde(default)]
    error: String,
}

/// The machine, and the tools for the checks.
struct Bench {
    gpuwarden: PathBuf,
    listed: Vec<Listed>,
    /// File with the jobs; removed on drop.
    jobs: tempfile::NamedTempFile,
}

/// Runs the checks. A check that cannot run counts as failed, and the next one is run.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let listed = match enumeration::nvidia_smi() {
        Ok(listed) => listed,
        Err(error) => {
            eprintln!("no NVIDIA GPU on this machine, so nothing is checked: {error:#}");
            return Ok(ExitCode::from(NO_GPU));
        }
    };
    let gpuwarden = if let Some(path) = &args.gpuwarden {
        fs::canonicalize(path).with_context(|| format!("find {}", path.display()))?
    } else {
        run_command(cargo().args(["build", "--release", "--package", "gpuwarden"]))?;
        target_dir()?.join("release/gpuwarden")
    };
    let jobs = tempfile::Builder::new().suffix(".py").tempfile()?;
    fs::write(&jobs, JOBS)?;
    let bench = Bench {
        gpuwarden,
        listed,
        jobs,
    };
    let parts = match args.parts.as_slice() {
        [] => Part::value_variants(),
        chosen => chosen,
    };
    let findings: Vec<Finding> = parts.iter().map(|part| bench.check(*part)).collect();
    if let Some(path) = &args.output {
        let text = serde_json::to_string_pretty(&findings)? + "\n";
        fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    let wrong = findings.iter().any(|found| found.verdict == Verdict::Wrong);
    Ok(ExitCode::from(u8::from(wrong)))
}

// === impl Bench ===

impl Bench {
    fn check(&self, part: Part) -> Finding {
        let checked = match part {
            Part::Enumeration => self.enumeration(),
            Part::Fault => self.fault(),
            Part::Cost => self.cost(),
        };
        let (verdict, said, details) =
            checked.unwrap_or_else(|error| (Verdict::Wrong, format!("{error:#}"), Value::Null));
        println!("{part:?}: {verdict}: {said}");
        Finding {
            part,
            verdict,
            said,
            details,
        }
    }

    fn enumeration(&self) -> anyhow::Result<(Verdict, String, Value)> {
        let mut watcher = Watcher::start(&self.gpuwarden, Some("auto"))?;
        let devices = watcher.wait_for_gpus(self.listed.len())?;
        let rows = enumeration::compare(&self.listed, &devices, &watcher.metadata());
        enumeration::print(&rows);
        let differ = rows.iter().filter(|row| !row.is_same).count();
        let verdict = match differ {
            0 => Verdict::Right,
            _ => Verdict::Wrong,
        };
        let (gpus, all) = (self.listed.len(), rows.len());
        let said = format!("{differ} of {all} values of {gpus} GPUs differ from nvidia-smi's");
        Ok((verdict, said, json!(rows)))
    }

    /// Runs the faults under two instances of gpuwarden: one that reads the kernel log ignores
    /// the driver's own events, so each source needs an instance.
    fn fault(&self) -> anyhow::Result<(Verdict, String, Value)> {
        let mut watchers = [
            ("kernel-log", Watcher::start(&self.gpuwarden, Some("auto"))?),
            ("gpu-health", Watcher::start(&self.gpuwarden, None)?),
        ];
        for (_, watcher) in &mut watchers {
            watcher.wait_for_gpus(self.listed.len())?;
        }
        let (mut sights, mut verdicts) = (Vec::new(), Vec::new());
        for (job, xid) in FAULTS {
            let last = |(_, watcher): &(_, Watcher)| {
                let events = watcher.events_after(0);
                let positions = events.iter().filter_map(|event| event["seq"].as_u64());
                positions.max().unwrap_or(0)
            };
            let before = watchers.each_ref().map(last);
            let answer = match self.job(&[job]) {
                Ok(answer) if answer.error != "CUDA_SUCCESS" => answer,
                Ok(_) => return Ok(not_run(&anyhow::anyhow!("{job} made no fault"))),
                Err(error) => return Ok(not_run(&error)),
            };
            let start = Instant::now();
            let is_seen = |((_, watcher), before): (&(_, Watcher), &u64)| {
                let mut events = watcher.events_after(*before).into_iter();
                events.any(|event| fault::is_xid(&event, xid, &answer.pci))
            };
            while !watchers.iter().zip(&before).all(is_seen) && start.elapsed() < SIGHT_LIMIT {
                sleep(ASK_AGAIN);
            }
            sleep(SETTLE);
            for ((by, watcher), before) in watchers.iter().zip(before) {
                let events = watcher.events_after(before);
                let (verdict, said) = fault::judge(&events, &watcher.devices()?, xid, &answer.pci);
                let (error, source) = (&answer.error, watcher.source(by));
                println!("  XID {xid}, {error}, by {by} ({source}): {verdict}: {said}");
                let events: Vec<String> = events.iter().map(fault::text).collect();
                sights.push(
                    json!({"xid": xid, "by": by, "source": source, "verdict": verdict,
                                   "said": said, "cuda": error, "events": events}),
                );
                verdicts.push(verdict);
            }
        }
        let count = |of| verdicts.iter().filter(|verdict| **verdict == of).count();
        let counts = [Verdict::Right, Verdict::NotSeen, Verdict::Wrong].map(count);
        let [right, unseen, wrong] = counts;
        let said = format!(
            "XIDs 31 and 13, two ways each: {right} right, {unseen} not seen, {wrong} wrong"
        );
        let worst = verdicts.into_iter().max().unwrap_or(Verdict::NotSeen);
        Ok((worst, said, json!(sights)))
    }

    fn cost(&self) -> anyhow::Result<(Verdict, String, Value)> {
        let seconds = |launches: u32| Ok(self.job(&["work", &launches.to_string()])?.seconds);
        let tried: anyhow::Result<f64> = seconds(TRIED_LAUNCHES);
        let each = match tried {
            Ok(tried) => tried / f64::from(TRIED_LAUNCHES),
            Err(error) => return Ok(not_run(&error)),
        };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let launches = (ROUND_S / each).ceil() as u32;
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            without.push(seconds(launches)?);
            let mut watcher = Watcher::start(&self.gpuwarden, Some("auto"))?;
            watcher.wait_for_gpus(self.listed.len())?;
            with.push(seconds(launches)?);
        }
        let cost = Cost::of(&with, &without).context("no rounds")?;
        let (verdict, word) = if cost.is_noise {
            (Verdict::Right, "within")
        } else {
            (Verdict::Wrong, "beyond")
        };
        let (slow, plain) = (cost.median_with, cost.median_without);
        let said = format!(
            "{launches} launches take {slow:.3} s with gpuwarden and {plain:.3} s without, ratio {:.4}, \
             {word} the spread of {:.3} s",
            slow / plain,
            cost.spread,
        );
        Ok((
            verdict,
            said,
            json!({"rounds_with": with, "rounds_without": without, "cost": cost}),
        ))
    }

    /// Runs a job on the GPU. Returns its output.
    fn job(&self, args: &[&str]) -> anyhow::Result<Answer> {
        let mut command = Command::new("timeout");
        command.args([JOB_LIMIT_S, "python3"]).arg(self.jobs.path());
        let said = output(command.args(args))?;
        serde_json::from_str(said.trim()).with_context(|| format!("a job said: {said}"))
    }
}

/// Returns the result of a check whose job did not run, as on a machine without python3 or CUDA.
fn not_run(error: &anyhow::Error) -> (Verdict, String, Value) {
    let said = format!("{error:#}");
    let last = said.lines().last().unwrap_or_default();
    let said = format!("the CUDA program did not run: {last}");
    (Verdict::NotSeen, said, Value::Null)
}

// === impl Verdict ===

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Right => "right",
            Self::NotSeen => "not seen",
            Self::Wrong => "wrong",
        })
    }
}
