//! `cargo xtask fuzz`: runs the targets of `fuzz/` one after the other, each for a limited time.
//!
//! Each target is a libFuzzer program (crate `libfuzzer-sys`), started with the hand-written
//! inputs in `fuzz/corpus-seed/TARGET`, and with the words of `fuzz/dictionaries/TARGET.dict` if
//! that exists. Inputs found by a run are discarded, because loading them would make each run
//! start more slowly. Inputs that make a target fail are kept in `fuzz/artifacts/TARGET`. The
//! build is in the user's cache directory.

use std::{
    fmt,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Instant, SystemTime},
};

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use testkit::components::cache_dir;

use crate::{
    generate::workspace_root,
    shell::{cargo, output, run as run_command, step, target_dir},
};

/// Flags for libFuzzer's coverage and the address sanitizer. The sanitizer turns a stack
/// overflow, which otherwise just ends the process, into a finding with its input.
const RUSTFLAGS: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Zsanitizer=address",
];

/// Longest input in bytes: more than the longest line, message and name that the product
/// accepts.
const MAX_INPUT: u32 = 128 << 10;
/// Longest time for one input, in seconds.
const INPUT_TIMEOUT: u32 = 10;
/// Memory limit of a target, in MiB.
const MEMORY_LIMIT: u32 = 2048;
/// Lines of a target's output that are shown with a finding.
const SHOWN_LINES: usize = 60;

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask fuzz
  cargo xtask fuzz decoder --seconds 60
  cargo xtask fuzz decoder --input fuzz/artifacts/decoder/crash-3f2a")]
pub(crate) struct Args {
    /// The target; all of them unless given.
    target: Option<Target>,
    /// Seconds that each target runs.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Run the target on this file alone, to see a finding again.
    #[arg(
        long,
        value_name = "FILE",
        requires = "target",
        conflicts_with = "seconds"
    )]
    input: Option<PathBuf>,
    /// Only check that the targets compile, which takes seconds and no C++ compiler.
    #[arg(long, conflicts_with_all = ["target", "seconds"])]
    check: bool,
}

impl Args {
    /// Returns the arguments for all targets, each for `seconds`.
    pub(crate) fn all(seconds: u32) -> Self {
        Self {
            target: None,
            seconds,
            input: None,
            check: false,
        }
    }
}

/// A program of the package `fuzz`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Target {
    /// A record of the kernel log, raw or as a line of a file.
    KmsgRecord,
    /// A file of the systemd journal.
    Journal,
    /// A kernel log, decoded line by line.
    Decoder,
    /// A request to the platform connector.
    ConnectorInput,
    /// A policy file, and its rules evaluated.
    Policy,
    /// Rules of the analysis, and events for them.
    Rules,
    /// A client's bytes on the connector's socket.
    UnixGrpc,
    /// The webhook's configuration, a pod and its gang.
    Preflight,
    /// The configuration of remediation, a template, and the status of a custom resource.
    Remediation,
    /// What clouds announce: pages of their APIs, and documents of metadata services.
    Clouds,
}

/// Figures that a target prints at its end.
#[derive(Debug, Default, PartialEq, Eq)]
struct Summary {
    executions: u64,
    edges: u64,
    /// File with the failing input, as named by libFuzzer.
    input: Option<PathBuf>,
}

/// Runs the targets; fails if one has findings.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.check {
        return check();
    }
    let targets = match &args.target {
        Some(target) => std::slice::from_ref(target),
        None => Target::value_variants(),
    };
    let dir = cache_dir()?.join("fuzz");
    fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    // A lock, because other clones build into this directory, and a target uses a whole core.
    let lock = File::create(dir.join("lock"))?;
    if lock.try_lock().is_err() {
        println!("waiting for another 'cargo xtask fuzz' to end");
        lock.lock()?;
    }
    let mut programs = PathBuf::new();
    step("build of the fuzz targets", || {
        programs = build(&dir.join("target"), targets)?;
        Ok(())
    })?;
    if let (Some(target), Some(input)) = (args.target, &args.input) {
        let input = fs::canonicalize(input).with_context(|| format!("{}", input.display()))?;
        return run_command(program(&programs, target).arg(input));
    }
    let mut findings = 0;
    for target in targets {
        let log = dir.join(format!("{target}.log"));
        if !fuzz(*target, args.seconds, &programs, &log)? {
            findings += 1;
        }
    }
    match findings {
        0 => Ok(()),
        1 => bail!("1 target failed"),
        count => bail!("{count} targets failed"),
    }
}

/// Checks that the targets compile. The build is in the target directory of the workspace, which
/// has most of their dependencies.
pub(crate) fn check() -> anyhow::Result<()> {
    let manifest = locked()?;
    let mut command = cargo();
    command
        .args(["check", "--manifest-path"])
        .arg(&manifest)
        .arg("--target-dir")
        .arg(target_dir()?)
        // Nothing is linked: an arbitrary file stands in for the fuzzer's library, which avoids
        // the compilation of its C++ code.
        .env("CUSTOM_LIBFUZZER_PATH", &manifest);
    run_command(&mut command)
}

/// Returns the manifest of the targets, after locking their dependencies to the versions that
/// the product ships with.
fn locked() -> anyhow::Result<PathBuf> {
    let package = workspace_root().join("fuzz");
    let lock = package.join("Cargo.lock");
    let ours = workspace_root().join("Cargo.lock");
    if modified(&lock) < modified(&ours) {
        fs::copy(&ours, &lock).with_context(|| format!("write {}", lock.display()))?;
    }
    Ok(package.join("Cargo.toml"))
}

/// Builds the targets. Returns the directory of the programs.
fn build(into: &Path, targets: &[Target]) -> anyhow::Result<PathBuf> {
    let rustc = output(Command::new("rustc").arg("-vV"))?;
    let host = rustc.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("rustc -vV names no host")?;
    let mut command = cargo();
    command
        .args(["build", "--release", "--manifest-path"])
        .arg(locked()?)
        // With an explicit target, the flags do not apply to build scripts and procedural
        // macros.
        .args(["--target", host])
        .env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS.join("\x1f"))
        .env("CARGO_TARGET_DIR", into)
        // Allows the sanitizer flag with the stable toolchain.
        .env("RUSTC_BOOTSTRAP", "1");
    for target in targets {
        command.args(["--bin", &target.to_string()]);
    }
    run_command(&mut command)?;
    Ok(into.join(host).join("release"))
}

fn modified(file: &Path) -> Option<SystemTime> {
    fs::metadata(file).and_then(|file| file.modified()).ok()
}

fn program(programs: &Path, target: Target) -> Command {
    let mut command = Command::new(programs.join(target.to_string()));
    command
        .arg(format!("-rss_limit_mb={MEMORY_LIMIT}"))
        .arg(format!("-timeout={INPUT_TIMEOUT}"))
        .arg(format!("-max_len={MAX_INPUT}"))
        .env("RUST_BACKTRACE", "1")
        // Lazily created statics live as long as the process.
        .env("ASAN_OPTIONS", "detect_leaks=0:detect_odr_violation=0");
    command
}

/// Runs one target. Returns true if it found nothing.
fn fuzz(target: Target, seconds: u32, programs: &Path, log: &Path) -> anyhow::Result<bool> {
    println!("==> {target}: {seconds} s");
    // A directory for the inputs found; without it, libFuzzer would write them to the seeds.
    let corpus = tempfile::tempdir()?;
    let package = workspace_root().join("fuzz");
    let artifacts = package.join("artifacts").join(target.to_string());
    fs::create_dir_all(&artifacts).with_context(|| format!("create {}", artifacts.display()))?;
    let mut command = program(programs, target);
    let dictionary = package.join(format!("dictionaries/{target}.dict"));
    if dictionary.is_file() {
        command.arg(format!("-dict={}", dictionary.display()));
    }
    let out = File::create(log).with_context(|| format!("create {}", log.display()))?;
    let start = Instant::now();
    let status = command
        .arg(format!("-max_total_time={seconds}"))
        .arg("-print_final_stats=1")
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(corpus.path())
        .arg(package.join("corpus-seed").join(target.to_string()))
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .status()
        .with_context(|| format!("run {target}"))?;
    let took = start.elapsed().as_secs_f64();
    // The log quotes inputs, which may not be UTF-8.
    let said = fs::read(log).with_context(|| format!("read {}", log.display()))?;
    let said = String::from_utf8_lossy(&said);
    let summary = Summary::read(&said);
    let verdict = if status.success() { "ok" } else { "FAILED" };
    println!(
        "==> {target}: {verdict}, {} executions in {took:.0} s, {} edges covered",
        summary.executions, summary.edges
    );
    if status.success() {
        return Ok(true);
    }
    let lines: Vec<&str> = said.lines().collect();
    let tail = lines.len().saturating_sub(SHOWN_LINES);
    println!("{}", lines.get(tail..).unwrap_or_default().join("\n"));
    println!(
        "{target} ended with {status}; its whole output is in {}",
        log.display()
    );
    match summary.input {
        Some(input) => println!(
            "the input: {0}\nsee it again: cargo xtask fuzz {target} --input {0}\n\
             keep it, once mended: move it to fuzz/corpus-seed/{target}/",
            input.display()
        ),
        None => println!("it left no input behind"),
    }
    Ok(false)
}

// === impl Target ===

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_possible_value() {
            Some(value) => f.write_str(value.get_name()),
            None => Ok(()),
        }
    }
}

// === impl Summary ===

impl Summary {
    /// Parses the output of libFuzzer.
    fn read(said: &str) -> Self {
        let mut summary = Self::default();
        for line in said.lines() {
            // `#2097152	DONE   cov: 612 ft: 2011 corp: 301/12Kb ...`
            if line.starts_with('#')
                && let Some((_, rest)) = line.split_once(" cov: ")
                && let Some(edges) = rest.split_whitespace().next()
            {
                summary.edges = edges.parse().unwrap_or(summary.edges);
            }
            if let Some(count) = line.strip_prefix("stat::number_of_executed_units:") {
                summary.executions = count.trim().parse().unwrap_or_default();
            }
            if let Some((_, file)) = line.split_once("Test unit written to ") {
                summary.input = Some(PathBuf::from(file));
            }
        }
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clean_end_is_read() {
        let said = "INFO: Seed: 1\n#16\tINITED cov: 40 ft: 45 corp: 9/1Kb exec/s: 0 rss: 40Mb\n\
                    #512\tREDUCE cov: 41 ft: 46 corp: 9/1Kb lim: 8 exec/s: 0 rss: 40Mb L: 3/9 MS: 1 ShuffleBytes-\n\
                    #1024\tDONE   cov: 42 ft: 47 corp: 9/1Kb lim: 8 exec/s: 512 rss: 41Mb\n\
                    Done 1024 runs in 2 second(s)\n\
                    stat::number_of_executed_units: 1024\nstat::average_exec_per_sec:     512\n";
        let expected = Summary {
            executions: 1024,
            edges: 42,
            input: None,
        };
        assert_eq!(Summary::read(said), expected);
    }

    #[test]
    fn the_input_of_a_finding_is_read() {
        let said = "#5\tNEW    cov: 7 ft: 8 corp: 2/2b\nthread panicked\n\
                    artifact_prefix='/f/'; Test unit written to /f/crash-3f2a\nBase64: AA==\n\
                    stat::number_of_executed_units: 6\n";
        let expected = Summary {
            executions: 6,
            edges: 7,
            input: Some("/f/crash-3f2a".into()),
        };
        assert_eq!(Summary::read(said), expected);
        assert_eq!(Summary::read("Killed\n"), Summary::default());
    }

    #[test]
    fn each_target_has_a_program_and_seeds() {
        let package = workspace_root().join("fuzz");
        for target in Target::value_variants() {
            let program = package.join(format!("fuzz_targets/{target}.rs"));
            assert!(program.is_file(), "{}", program.display());
            let seeds = package.join(format!("corpus-seed/{target}"));
            assert!(fs::read_dir(&seeds).unwrap().next().is_some(), "{target}");
        }
        let programs = fs::read_dir(package.join("fuzz_targets")).unwrap().count();
        assert_eq!(programs, Target::value_variants().len());
    }
}
