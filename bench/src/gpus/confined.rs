//! An agent with GPUs and its GPU probe, in memory cgroups of several sizes: the source of the
//! limit in their manifests.
//!
//! The fake library allocates as much memory as NVIDIA's was measured to. The executable is a
//! fresh copy without pages in the page cache, because pages count for the cgroup that reads
//! them first.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use cli::bench::Figure;
use testkit::Launch;

use super::{GPUS, SETTLE, children, listed, used, with_gpus};
use crate::Args;

/// Limits under test, in MiB. That of the chart is larger.
pub(super) const LIMITS_MIB: [u64; 3] = [48, 64, 96];
/// Memory that NVML and libcuda allocated in the probe with a real H100 (driver 580, MiB).
const LIBRARY_MIB: usize = 15;
/// Mount points of the memory cgroups: version 1 first, if it is in use.
const ROOTS: [&str; 2] = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"];
/// File name of the limit, in both versions.
const LIMITS: [&str; 2] = ["memory.limit_in_bytes", "memory.max"];

/// Measures the pages that are read back from files. An idle agent with enough memory has none.
pub(super) async fn run(args: &Args, limit: u64) -> anyhow::Result<Figure> {
    let group = Group::new(limit)?;
    let home = tempfile::tempdir()?;
    let (copy, enter) = (home.path().join("gpuwarden"), home.path().join("enter"));
    let program = testkit::binary()?;
    fs::copy(&program, &copy)?;
    let library = program.with_file_name(fakes::BUILT);
    fs::copy(library, home.path().join(fakes::BUILT))?;
    let mut forget = Command::new("dd");
    forget.args([
        "oflag=nocache",
        "conv=notrunc,fdatasync",
        "count=0",
        "status=none",
    ]);
    let forgotten = forget.arg(format!("of={}", copy.display())).status()?;
    ensure!(forgotten.success(), "dd: {forgotten}");
    let text = format!(
        "#!/bin/sh\necho $$ >{}/cgroup.procs && exec {} \"$@\"\n",
        group.0.display(),
        copy.display()
    );
    fs::write(&enter, text)?;
    fs::set_permissions(&enter, Permissions::from_mode(0o755))?;
    let scenario = home.path().join("scenario.toml");
    fs::write(&scenario, format!("library_mib = {LIBRARY_MIB}\n"))?;

    let launch = Launch::agent()?
        .program(&enter)
        .option("--controller", "http://127.0.0.1:9");
    let agent = with_gpus(launch, &scenario).start().await?;
    listed(&agent, usize::from(GPUS[0])).await?;
    tokio::time::sleep(SETTLE).await;
    let probe = children(agent.pid())?;
    let probe = *probe.first().context("nobody asks the driver")?;
    let pids = [agent.pid(), probe];
    let (before, busy) = (group.faults()?, used(pids)?);
    tokio::time::sleep(Duration::from_secs(args.seconds.into())).await;
    let (after, now) = (group.faults()?, used(pids)?);
    listed(&agent, usize::from(GPUS[0])).await?;
    let busy = now
        .iter()
        .zip(busy)
        .map(|(now, before)| now.saturating_sub(before));
    let busy: Duration = busy.sum();
    let note = format!(
        "reads of pages back in, in a cgroup of {limit} MiB with {LIBRARY_MIB} MiB for the driver's libraries; \
         {} in the {} s before; {:.1} MiB that no file has; processor {:.1} m of a core",
        before,
        SETTLE.as_secs(),
        group.own()?,
        busy.as_secs_f64() * 1_000.0 / f64::from(args.seconds)
    );
    #[allow(clippy::cast_precision_loss)] // Thousands.
    let rate = (after - before) as f64 / f64::from(args.seconds);
    Ok(Figure::new(format!("gpus-8.confined-{limit}"), rate, "faults/s").note(note))
}

/// A cgroup with the limit. Dropping it waits for its processes to end, and removes it.
struct Group(PathBuf);

// === impl Group ===

impl Group {
    fn new(limit_mib: u64) -> anyhow::Result<Self> {
        let name = format!("gpuwarden-bench-{}", std::process::id());
        for (root, limit) in ROOTS.into_iter().zip(LIMITS) {
            let group = Self(Path::new(root).join(&name));
            if fs::create_dir(&group.0).is_err() {
                continue;
            }
            if fs::write(group.0.join(limit), (limit_mib << 20).to_string()).is_ok() {
                return Ok(group);
            }
        }
        anyhow::bail!(
            "no cgroup of memory can be made here: it takes root, and the memory controller"
        )
    }

    /// Returns the number of pages read from files so far.
    fn faults(&self) -> anyhow::Result<u64> {
        self.stat(&["total_pgmajfault", "pgmajfault"])
    }

    /// Returns the anonymous memory, in MiB.
    #[allow(clippy::cast_precision_loss)] // Millions.
    fn own(&self) -> anyhow::Result<f64> {
        let bytes = self.stat(&["total_rss", "anon"])?;
        Ok(bytes as f64 / 1_048_576.0)
    }

    /// Returns the value of the first of these names that exists.
    fn stat(&self, names: &[&str]) -> anyhow::Result<u64> {
        let path = self.0.join("memory.stat");
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let value = |name: &&str| {
            let mut lines = text.lines().filter_map(|line| line.split_once(' '));
            lines
                .find(|(first, _)| first == name)?
                .1
                .trim()
                .parse()
                .ok()
        };
        let value = names.iter().find_map(value);
        value.with_context(|| format!("{} has none of {names:?}", path.display()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The processes may take a moment to end.
        for _ in 0..50 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}
