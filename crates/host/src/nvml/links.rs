//! Reads NVLinks: which exist, what they connect to, and their state.

use diagnosis::gpu::{Nvlink, NvlinkReadings, pci_address};
use nvml_wrapper_sys::bindings::{self as sys, field_id as field, nvmlPciInfo_t};

use super::error::NvmlError;
use super::functions::Plain;
use super::query::Query;
use super::types::text;

/// Most links of a GPU that are read: twice those of the largest announced one.
const MAX_LINKS: u32 = 144;
/// Number of links to try if the driver does not report it: the most that GPUs had at the time
/// of such drivers.
const UNTOLD_LINKS: u32 = 18;

/// Returns the links of a GPU, and true for each that is up.
fn links(gpu: &mut Query<'_>) -> Vec<(u32, bool)> {
    let [count] = gpu.fields([(field::NVML_FI_DEV_NVLINK_LINK_COUNT, 0)]);
    let count = count.and_then(|count| u32::try_from(count).ok());
    let count = count.unwrap_or(UNTOLD_LINKS).min(MAX_LINKS);
    let mut links = Vec::new();
    for link in 0..count {
        let state = gpu.call(|nvml, device| {
            let mut up = 0;
            match nvml.nvmlDeviceGetNvLinkState(device, link, &mut up) {
                Ok(()) => Ok(Some(up == sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED)),
                Err(error) if error.is_out_of_range() => Ok(None),
                Err(error) => Err(error),
            }
        });
        if let Some(Some(up)) = state {
            links.push((link, up));
        }
    }
    links
}

/// Returns the links that are up, or whose remote end the driver knows.
pub(super) fn ends(gpu: &mut Query<'_>) -> Vec<Nvlink> {
    let mut ends = Vec::new();
    for (link, up) in links(gpu) {
        let remote_pci = gpu.call(|nvml, device| {
            let mut pci = nvmlPciInfo_t::zero();
            let result = nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &mut pci);
            optional(result.map(|()| pci_address(&text(&pci.busId))))
        });
        let remote_is_switch = gpu.call(|nvml, device| {
            let mut kind = 0;
            let result = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link, &mut kind);
            optional(result.map(|()| kind))
        });
        let [remote_link] = gpu.fields([(field::NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID, link)]);
        let remote_pci = remote_pci.flatten().filter(|pci| !pci.is_empty());
        if up || remote_pci.is_some() {
            ends.push(Nvlink {
                link,
                remote_pci,
                remote_is_switch: remote_is_switch.flatten().and_then(is_switch),
                remote_link: remote_link.and_then(|link| u32::try_from(link).ok()),
            });
        }
    }
    ends
}

/// Returns the readings of each link.
pub(super) fn readings(gpu: &mut Query<'_>) -> Vec<NvlinkReadings> {
    let mut readings = Vec::new();
    for (link, up) in links(gpu) {
        let [replays, recoveries, crc, recovered, effective] = gpu.fields([
            (field::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, link),
            (field::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY, link),
            (field::NVML_FI_DEV_NVLINK_ERROR_DL_CRC, link),
            (field::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, link),
            (field::NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS, link),
        ]);
        let count = |value: Option<i64>| value.and_then(|count| u64::try_from(count).ok());
        readings.push(NvlinkReadings {
            link,
            up: Some(up),
            replays: count(replays),
            recoveries: count(recoveries.or(recovered)),
            crc_errors: count(crc),
            effective_errors: count(effective),
        });
    }
    readings
}

/// Treats any failure but the loss of the GPU as unsupported: for a link that is down or
/// unconnected, drivers return many codes.
fn optional<T>(result: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_lost() => Err(error),
        Err(_) => Ok(None),
    }
}

/// Returns true if the device type is a switch; `None` if the driver does not know the type.
fn is_switch(kind: u32) -> Option<bool> {
    match kind {
        sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN => None,
        other => Some(other == sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH),
    }
}
