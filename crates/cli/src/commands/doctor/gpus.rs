//! The GPUs: whether their driver's library is found, where, and how many it tells of; and DCGM, where it is to be
//! asked. Both are asked as the roles ask them, in a process of its own, for a call may hang or crash in the
//! vendor's code.

use std::path::Path;
use std::time::Duration;

use agent::gpu::probe::{self, ProbeConfig};
use agent::gpu::way::Way;
use agent::gpu::{Seen, detail, in_short};
use host::gpu_probe::ProbeSettings;
use tokio::sync::mpsc;

use super::{Finding, Installation};
use crate::settings::GpuSettings;

/// Longest wait for a call of the library: a person waits.
const DEADLINE: Duration = Duration::from_secs(10);
/// The mend where the driver is not found, or does not answer.
const REACH: &str = "nvidia-smi -L; in a pod use one of the three ways of docs/gpu.md: RuntimeClass nvidia, the \
                     driver's directory at --nvml-driver-root, or a claim";

/// Asks the driver and DCGM, unless a gpuwarden that runs does so already and says itself how that goes.
pub(super) async fn check(installation: &Installation, running: bool) -> Vec<Finding> {
    let Some(node) = installation.node.as_ref().filter(|_| !running) else {
        return Vec::new();
    };
    let gpu = &node.gpu;
    // Fake ones have a fake library, which is made at the start.
    if gpu.fake.is_some() {
        return vec![Finding::ok(
            "gpus",
            "what is told of GPUs is made up (--fake-gpus)",
        )];
    }
    let mut findings = Vec::new();
    if gpu.enabled {
        findings.push(driver(gpu).await);
    }
    if let Some(address) = &gpu.dcgm {
        findings.push(dcgm(gpu, address).await);
    }
    findings
}

/// Asks the driver for its GPUs.
async fn driver(gpu: &GpuSettings) -> Finding {
    let why = "what the driver tells of its GPUs is not seen";
    let mut found = None;
    let asked = ask(gpu, None, |seen| hear(seen, &mut found, &gpu.driver_root));
    match asked.await {
        Ok(well) => Finding::ok("gpus", well),
        Err((true, reason)) => Finding::problem("gpus", reason, why).fix(REACH),
        Err((false, reason)) => {
            let (short, _) = in_short(&reason);
            Finding::warning(
                "gpus",
                format!("no driver of NVIDIA GPUs is found: {short}"),
                why,
            )
            .fix(REACH)
        }
    }
}

/// Returns the answer where what is seen is one; `found` is the library, once it was found.
fn hear(
    seen: Seen,
    found: &mut Option<String>,
    driver_root: &Path,
) -> Option<Result<String, (bool, String)>> {
    match seen {
        Seen::Library(library) => {
            let way = Way::of(&library, driver_root);
            *found = Some(format!("{library} {way}"));
            None
        }
        Seen::Inventory(inventory) => Some(Ok(detail(&inventory, found.as_deref()))),
        Seen::Blind {
            reason, is_said, ..
        } => {
            // One that hangs or crashes does so in a driver that is there.
            let is_trouble = found.is_some() || !is_said;
            Some(Err((is_trouble, reason)))
        }
        _ => None,
    }
}

async fn dcgm(gpu: &GpuSettings, address: &str) -> Finding {
    let why =
        "what DCGM finds is not seen, and this gpuwarden is not ready; the driver is still asked";
    let well = format!("the host engine at {address} answers");
    let fix = "start nv-hostengine there, and have DCGM's library below --nvml-driver-root or where the \
               loader finds it; or leave --dcgm-addr out";
    let asked = ask(gpu, Some(address), |seen| {
        Some(match seen {
            Seen::Blind { reason, .. } => Err((true, reason)),
            _ => Ok(()),
        })
    });
    let asked = asked.await.map_err(|(_, reason)| in_short(&reason).0);
    Finding::tried("dcgm", well, asked, why).fix(fix)
}

/// Runs a probe until `heard` has the answer; fails with whether that is a trouble, rather
/// than that there is no driver, and why there is none.
async fn ask<T>(
    gpu: &GpuSettings,
    dcgm: Option<&str>,
    mut heard: impl FnMut(Seen) -> Option<Result<T, (bool, String)>>,
) -> Result<T, (bool, String)> {
    let settings = ProbeSettings {
        library: None,
        dcgm: dcgm.map(str::to_owned),
        driver_root: Some(gpu.driver_root.clone()),
        interval_ms: 0,
    };
    let config = ProbeConfig::of(&settings, gpu.deadline.min(DEADLINE));
    let config = config.map_err(|error| (true, error.to_string()))?;
    let (seen, mut told) = mpsc::channel(1);
    let watching = tokio::spawn(probe::watch(config, seen));
    let mut answer = None;
    while answer.is_none() {
        let Some(seen) = told.recv().await else {
            break;
        };
        answer = heard(seen);
    }
    // Then it ends.
    drop(told);
    let _ = watching.await;
    answer.unwrap_or_else(|| Err((true, "the process that asks it has ended".to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_probe_that_says_so_finds_no_driver() {
        let library = Seen::Library("/usr/lib/libnvidia-ml.so.1".to_owned());
        for (is_found, is_said, is_trouble) in [
            (false, true, false),
            // It hangs in its start, or cannot be started.
            (false, false, true),
            (true, true, true),
            (true, false, true),
        ] {
            let mut found = None;
            if is_found {
                assert_eq!(hear(library.clone(), &mut found, Path::new("/")), None);
            }
            let blind = Seen::Blind {
                reason: "why".to_owned(),
                is_said,
                stuck: 0,
            };
            let answer = hear(blind, &mut found, Path::new("/"));
            assert_eq!(answer, Some(Err((is_trouble, "why".to_owned()))));
        }
    }
}
