//! DCGM, where it is to be asked: whether its library is found and a host engine answers. It is asked
//! as the roles ask it, in a process of its own, for a call may hang or crash in the vendor's code.

use std::time::Duration;

use agent::gpu::Seen;
use agent::gpu::probe::{self, ProbeConfig};
use host::gpu_probe::ProbeSettings;
use tokio::sync::mpsc;

use super::{Finding, Installation};
use crate::settings::GpuSettings;

/// Longest wait for a call of the library: a person waits.
const DEADLINE: Duration = Duration::from_secs(10);

/// Asks DCGM, unless a gpuwarden that runs does so already and says itself how that goes.
pub(super) async fn check(installation: &Installation, running: bool) -> Option<Finding> {
    let gpu = &installation.node.as_ref()?.gpu;
    // Fake ones have a fake library, which is made at the start.
    if running || gpu.fake.is_some() {
        return None;
    }
    let address = gpu.dcgm.as_ref()?;
    let why =
        "what DCGM finds is not seen, and this gpuwarden is not ready; the driver is still asked";
    let well = format!("the host engine at {address} answers");
    let fix = "start nv-hostengine there, and have DCGM's library below --nvml-driver-root or where the \
               loader finds it; or leave --dcgm-addr out";
    let asked = ask(gpu, address).await;
    Some(Finding::tried("dcgm", well, asked, why).fix(fix))
}

/// Asks the host engine for a first word; fails with why there is none.
async fn ask(gpu: &GpuSettings, address: &str) -> Result<(), String> {
    let settings = ProbeSettings {
        library: None,
        dcgm: Some(address.to_owned()),
        driver_root: Some(gpu.driver_root.clone()),
        interval_ms: 0,
    };
    let config = ProbeConfig::of(&settings, gpu.deadline.min(DEADLINE));
    let config = config.map_err(|error| error.to_string())?;
    let (seen, mut told) = mpsc::channel(1);
    let watching = tokio::spawn(probe::watch(config, seen));
    let first = told.recv().await;
    // Then it ends.
    drop(told);
    let _ = watching.await;
    match first {
        Some(Seen::Blind { reason, .. }) => Err(reason),
        Some(_) => Ok(()),
        None => Err("the process that asks it has ended".to_owned()),
    }
}
