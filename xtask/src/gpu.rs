//! `cargo xtask gpu`: what only a machine with an NVIDIA GPU can show, held against NVIDIA's own
//! tools. It needs a gpuwarden, `nvidia-smi` and, but for the enumeration, `python3`, and no Rust.

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

/// Exit code where there is no GPU.
const NO_GPU: u8 = 2;
/// The jobs for the GPU.
const JOBS: &str = include_str!("../gpu/cuda.py");
/// Longest time of a job in seconds, start and compilation included, for a GPU that hangs.
const JOB_LIMIT_S: &str = "120";
/// Longest time from a fault until it is seen. A line that says what one within the last minute has
/// said is only counted, so a second run within a minute may not see its own.
const SIGHT_LIMIT: Duration = Duration::from_secs(15);
/// Time after the last sight in which what must not follow would: the driver's event and the line of
/// the kernel log come one after the other.
const SETTLE: Duration = Duration::from_secs(1);
/// Pause before the events are asked for again.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// Rounds of work with gpuwarden, and as many without.
const ROUNDS: usize = 5;
/// Length of a round.
const ROUND_S: f64 = 5.0;
/// Launches from which the length of a round is told.
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
    /// What to check; all unless given.
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// The gpuwarden that is checked [default: a release build, made now].
    #[arg(long, value_name = "PATH")]
    gpuwarden: Option<PathBuf>,
    /// File that the results are written to, as JSON.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Part {
    /// Are the GPUs those that nvidia-smi lists?
    Enumeration,
    /// Is a CUDA program that faults seen, and judged as the application's doing?
    Fault,
    /// Does a job that computes take longer beside gpuwarden?
    Cost,
}

/// How a part, or something in it, came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    Right,
    NotSeen,
    Wrong,
}

/// The result of a part.
#[derive(Serialize)]
struct Finding {
    part: Part,
    verdict: Verdict,
    said: String,
    details: Value,
}

/// The answer of a job.
#[derive(Deserialize)]
struct Answer {
    pci: String,
    #[serde(default)]
    seconds: f64,
    #[serde(default)]
    error: String,
}

/// The machine, and what it is checked with.
struct Bench {
    gpuwarden: PathBuf,
    listed: Vec<Listed>,
    /// The file with the jobs; removed on drop.
    jobs: tempfile::NamedTempFile,
}

/// Runs the parts; a part that fails is wrong, and the next is run.
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

    /// Faults beside two: where the kernel's log is read the driver's own events are left out, so
    /// each way takes a gpuwarden of its own.
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

    /// Runs a job on the GPU, and returns its answer.
    fn job(&self, args: &[&str]) -> anyhow::Result<Answer> {
        let mut command = Command::new("timeout");
        command.args([JOB_LIMIT_S, "python3"]).arg(self.jobs.path());
        let said = output(command.args(args))?;
        serde_json::from_str(said.trim()).with_context(|| format!("a job said: {said}"))
    }
}

/// Returns the result of a part whose job did not run, as on a machine without python3 or CUDA.
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
