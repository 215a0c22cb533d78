//! The fabric that joins GPUs across machines, by the newest structure that the driver knows.

use diagnosis::gpu::{Fabric, FabricState};
use nvml_wrapper_sys::bindings::{
    nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t,
};

use super::asking::Asking;
use super::error::{NvmlError, code_name};
use super::functions::{Device, Functions, Plain, version};

/// Returns what the driver says of the fabric; `None` where it says nothing.
pub(super) fn read(gpu: &mut Asking<'_>) -> Option<Fabric> {
    gpu.call(|nvml, device| {
        let versions = [
            version::<nvmlGpuFabricInfo_v3_t>(3),
            version::<nvmlGpuFabricInfo_v2_t>(2),
        ];
        for version in versions {
            match versioned(nvml, device, version) {
                Err(error) if error.is_other_version() => {}
                told => return told,
            }
        }
        unversioned(nvml, device)
    })
}

/// Returns what the driver says in a structure that has a version.
fn versioned(nvml: &Functions, device: Device, version: u32) -> Result<Fabric, NvmlError> {
    let mut told = nvmlGpuFabricInfo_v3_t {
        version,
        ..nvmlGpuFabricInfo_v3_t::zero()
    };
    nvml.nvmlDeviceGetGpuFabricInfoV(device, &mut told)?;
    let mut fabric = fabric(told.state, told.status, told.cliqueId, told.clusterUuid);
    fabric.health_mask = Some(told.healthMask);
    Ok(fabric)
}

/// Returns what a driver says that knows the first structure only.
fn unversioned(nvml: &Functions, device: Device) -> Result<Fabric, NvmlError> {
    let mut told = nvmlGpuFabricInfo_t::zero();
    nvml.nvmlDeviceGetGpuFabricInfo(device, &mut told)?;
    Ok(fabric(
        told.state,
        told.status,
        told.cliqueId,
        told.clusterUuid,
    ))
}

/// Returns what all versions tell. Without a cluster the number of the clique means nothing.
fn fabric(state: u8, status: u32, clique: u32, cluster: [u8; 16]) -> Fabric {
    let has_cluster = cluster != [0; 16];
    Fabric {
        state: FabricState::from(u32::from(state)),
        status: code_name(status),
        clique: has_cluster.then_some(clique),
        cluster: has_cluster.then(|| uuid(cluster)),
        health_mask: None,
    }
}

/// Returns a UUID as it is written, such as `00112233-4455-6677-8899-aabbccddeeff`.
fn uuid(bytes: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32];
    let parts = parts.map(|part| hex.get(part).unwrap_or_default());
    parts.join("-")
}
