//! Duration of a check process, compared with the duration of its tests: `nccl-loopback` with
//! libraries that return at once, reporting to the gpuwarden of its node. The start of a
//! container is not included.

use std::fs;
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context as _, bail};
use cli::bench::{Figure, median, percentile, progress};
use fakes::Scenario;
use testkit::binary;
use tokio::process::Command;

use super::millis;
use crate::mib;
use crate::product;

/// Number of checks to run.
const CHECKS: usize = 50;
const NODE: &str = "gpuwarden-bench-check";
const BASELINE: &str = "--version";

pub(super) async fn run() -> anyhow::Result<Figure> {
    progress("start of a check ...");
    let path = binary()?;
    let product = product::start(product::alone(NODE)?).await?;
    let gpus = tempfile::tempdir()?;
    fakes::install(gpus.path(), &Scenario::healthy(2))?;
    let mut check = Command::new(&path);
    check
        .args(["check", "nccl-loopback"])
        .env("NODE_NAME", NODE)
        .env("PLATFORM_CONNECTOR_SOCKET", product.socket())
        .env(
            "GPUWARDEN_CUDA_LIBRARY",
            gpus.path().join(fakes::CUDA_LIBRARY),
        )
        .env(
            "GPUWARDEN_NCCL_LIBRARY",
            gpus.path().join(fakes::NCCL_LIBRARY),
        )
        .env("GPUWARDEN_NVML_LIBRARY", gpus.path().join(fakes::LIBRARY))
        .env("GPUWARDEN_TERMINATION_LOG", "/dev/null")
        .env("MESSAGE_SIZES", "64K");
    let mut version = Command::new(&path);
    version.arg("--version");
    let (mut took, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..CHECKS {
        bare.push(time(&mut version).await?);
        took.push(time(&mut check).await?);
    }
    let size = fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?;
    let note = format!(
        "three processes one after the other, two of them with the libraries; p99 {:.1} ms; the executable \
         has {:.1} MiB",
        percentile(&took, 99),
        mib(size.len())
    );
    let figure = Figure::new("preflight.check-start", median(&took), "ms");
    Ok(figure.beside(BASELINE, median(&bare)).note(note))
}

/// Returns the duration of a command in milliseconds.
async fn time(command: &mut Command) -> anyhow::Result<f64> {
    let began = Instant::now();
    let output = command
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    let took = millis(began);
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(took)
}
