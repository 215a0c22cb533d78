//! NVLinks: which there are, what is at their other ends, and how they do.

use diagnosis::gpu::{Nvlink, NvlinkReadings, pci_address};
use nvml_wrapper_sys::bindings::{self as sys, field_id as field, nvmlPciInfo_t};

use super::asking::Asking;
use super::error::NvmlError;
use super::functions::{Plain, text};

/// Most links of a GPU that are looked at: twice those of the largest that is announced.
const MAX_LINKS: u32 = 144;
/// Links that are looked for where the driver does not tell their number: the most that GPUs had when
/// drivers did not.
const UNTOLD_LINKS: u32 = 18;

/// Returns the links of a GPU, and whether each is up.
fn links(gpu: &mut Asking<'_>) -> Vec<(u32, bool)> {
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

/// Returns the links that are up, or of which the driver knows the other end.
pub(super) fn ends(gpu: &mut Asking<'_>) -> Vec<Nvlink> {
    let mut ends = Vec::new();
    for (link, up) in links(gpu) {
        let remote_pci = gpu.call(|nvml, device| {
            let mut pci = nvmlPciInfo_t::zero();
            let told = nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &mut pci);
            optional(told.map(|()| pci_address(&text(&pci.busId))))
        });
        let remote_is_switch = gpu.call(|nvml, device| {
            let mut kind = 0;
            let told = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link, &mut kind);
            optional(told.map(|()| kind))
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

/// Returns how each link does.
pub(super) fn readings(gpu: &mut Asking<'_>) -> Vec<NvlinkReadings> {
    let mut readings = Vec::new();
    for (link, up) in links(gpu) {
        let [replays, recoveries, crc, recovered, effective] = gpu.fields([
            (field::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, link),
            (field::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY, link),
            (field::NVML_FI_DEV_NVLINK_ERROR_DL_CRC, link),
            (field::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, link),
            (field::NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS, link),
        ]);
        let count = |told: Option<i64>| told.and_then(|count| u64::try_from(count).ok());
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

/// Takes any failure but the loss of the GPU as not told: of a link that is down, or that leads
/// nowhere, drivers answer with many codes.
fn optional<T>(told: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match told {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_lost() => Err(error),
        Err(_) => Ok(None),
    }
}

/// Returns whether a kind of device is a switch; `None` where the driver does not know it.
fn is_switch(kind: u32) -> Option<bool> {
    match kind {
        sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN => None,
        other => Some(other == sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH),
    }
}
