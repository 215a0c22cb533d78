//! The monitoring loop over DCGM, in place of the one over the driver.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Parent, ProbeEnd, ProbeSettings, SOONEST, Said};
use crate::dcgm::Dcgm;

/// Polls DCGM at each interval, until the host engine cannot be reached or the parent stops
/// reading.
pub(super) fn watch(
    settings: &ProbeSettings,
    address: &str,
    parent: &Arc<Parent>,
) -> Result<(), ProbeEnd> {
    let listener = Parent::listener(parent);
    let mut dcgm = Dcgm::connect(&settings.places(), address, listener)
        .map_err(|error| ProbeEnd::Cannot(error.to_string()))?;
    parent.greet(dcgm.found_at())?;
    let interval = Duration::from_millis(settings.interval_ms);
    loop {
        let began = Instant::now();
        match dcgm.look() {
            Ok(look) => parent.send(&Said::Dcgm(look))?,
            // Sent before the connection is closed, which may hang.
            Err(error) => {
                let why = format!("the host engine at {address}: {error}");
                return Ok(parent.send(&Said::Cannot(why))?);
            }
        }
        let next = (began + interval).max(Instant::now() + SOONEST);
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}
