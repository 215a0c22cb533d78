//! Checks of the NVIDIA driver and of DCGM.
//!
//! Both are asked by the probe process of the roles, since a call may hang or crash in the vendor's
//! code.

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

/// Asks the driver and DCGM, unless a running gpuwarden reports on them already.
pub(super) async fn check(installation: &Installation, running: bool) -> Vec<Finding> {
    let Some(node) = installation.node.as_ref().filter(|_| !running) else {
        return Vec::new();
    };
    let gpu = &node.gpu;
    // The library of fake GPUs is created at the start.
    if gpu.fake.is_some() {
        return vec![Finding::ok("gpus", "the GPUs are made up (--fake-gpus)")];
    }
    let mut findings = Vec::new();
    if gpu.enabled {
        findings.push(match ask(gpu, None).await {
            Ok(well) => Finding::ok("gpus", well),
            Err((true, reason)) => Finding::problem("gpus", reason),
            Err((false, reason)) => {
                let what = format!("no driver of NVIDIA GPUs is found: {}", in_short(&reason).0);
                Finding::warning("gpus", what)
            }
        });
    }
    if let Some(address) = &gpu.dcgm {
        let asked = ask(gpu, Some(address)).await;
        let asked = asked.map_err(|(_, reason)| in_short(&reason).0);
        findings.push(Finding::tried("dcgm", asked));
    }
    findings
}

/// Runs a probe of the driver, or of DCGM at an address, until it answers. An error says whether
/// the library was found and has a fault, and the reason.
async fn ask(gpu: &GpuSettings, dcgm: Option<&str>) -> Result<String, (bool, String)> {
    let settings = ProbeSettings {
        library: None,
        dcgm: dcgm.map(str::to_owned),
        driver_root: Some(gpu.driver_root.clone()),
        interval_ms: 0,
    };
    let config = ProbeConfig::of(&settings, gpu.deadline.min(DEADLINE));
    let config = config.map_err(|error| (true, error.to_string()))?;
    let (sender, mut receiver) = mpsc::channel(1);
    let watching = tokio::spawn(probe::watch(config, sender));
    let (mut found, mut answer) = (None, None);
    while answer.is_none()
        && let Some(seen) = receiver.recv().await
    {
        answer = match (seen, dcgm) {
            (seen @ Seen::Blind { .. }, _) | (seen, None) => {
                answer_of(seen, &mut found, &gpu.driver_root)
            }
            (_, Some(address)) => Some(Ok(format!("the host engine at {address} answers"))),
        };
    }
    // The probe ends once nobody receives.
    drop(receiver);
    let _ = watching.await;
    answer.unwrap_or_else(|| Err((true, "the probe process has ended".to_owned())))
}

/// Returns the driver's answer, if the message has one. `found` keeps the library's path.
fn answer_of(
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
        // A probe that hangs or crashes does so in a driver that is there.
        Seen::Blind {
            reason, is_said, ..
        } => Some(Err((found.is_some() || !is_said, reason))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_probe_that_says_so_finds_no_driver() {
        let library = Seen::Library("/usr/lib/libnvidia-ml.so.1".to_owned());
        for (is_found, is_said, is_trouble) in [
            (false, true, false),
            // The probe hangs in its start, or cannot be started.
            (false, false, true),
            (true, true, true),
            (true, false, true),
        ] {
            let mut found = None;
            if is_found {
                assert_eq!(answer_of(library.clone(), &mut found, Path::new("/")), None);
            }
            let blind = Seen::Blind {
                reason: "why".to_owned(),
                is_said,
                stuck: 0,
            };
            let answer = answer_of(blind, &mut found, Path::new("/"));
            assert_eq!(answer, Some(Err((is_trouble, "why".to_owned()))));
        }
    }
}
