//! Reads the fabric that joins GPUs across machines, by the newest structure that the driver
//! supports.

use diagnosis::gpu::{Fabric, FabricState};
use nvml_wrapper_sys::bindings::{
    nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t,
};

use super::error::{NvmlError, code_name};
use super::functions::{Device, Functions, Plain};
use super::query::Query;
use super::types::{FabricInfoV4, version};

/// Kind of the clique in structures before version 4: access by unicast pointers.
const UNICAST_POINTER: u8 = 0;

/// Returns the state of the fabric; `None` if the driver does not report it.
pub(super) fn read(gpu: &mut Query<'_>) -> Option<Fabric> {
    gpu.call(|nvml, device| {
        match newest(nvml, device) {
            Err(error) if error.is_other_version() => {}
            result => return result,
        }
        let versions = [
            version::<nvmlGpuFabricInfo_v3_t>(3),
            version::<nvmlGpuFabricInfo_v2_t>(2),
        ];
        for version in versions {
            match versioned(nvml, device, version) {
                Err(error) if error.is_other_version() => {}
                result => return result,
            }
        }
        unversioned(nvml, device)
    })
}

/// Reads the structure of version 4, which has a function of its own.
fn newest(nvml: &Functions, device: Device) -> Result<Fabric, NvmlError> {
    let mut info = FabricInfoV4::zero();
    nvml.nvmlDeviceGetGpuFabricInfo_v4(device, &mut info)?;
    let count = usize::try_from(info.clique_count).unwrap_or(usize::MAX);
    let mut cliques = info.cliques.iter().take(count);
    let clique = cliques.find(|clique| clique.kind == UNICAST_POINTER);
    let mut fabric = fabric(info.state, info.status, 0, info.cluster);
    fabric.clique = clique
        .filter(|_| fabric.cluster.is_some())
        .map(|clique| clique.id);
    fabric.health_mask = Some(info.health_mask);
    Ok(fabric)
}

/// Reads a structure with a version number.
fn versioned(nvml: &Functions, device: Device, version: u32) -> Result<Fabric, NvmlError> {
    let mut info = nvmlGpuFabricInfo_v3_t {
        version,
        ..nvmlGpuFabricInfo_v3_t::zero()
    };
    nvml.nvmlDeviceGetGpuFabricInfoV(device, &mut info)?;
    let mut fabric = fabric(info.state, info.status, info.cliqueId, info.clusterUuid);
    fabric.health_mask = Some(info.healthMask);
    Ok(fabric)
}

/// Reads the first structure, the only one of old drivers.
fn unversioned(nvml: &Functions, device: Device) -> Result<Fabric, NvmlError> {
    let mut info = nvmlGpuFabricInfo_t::zero();
    nvml.nvmlDeviceGetGpuFabricInfo(device, &mut info)?;
    Ok(fabric(
        info.state,
        info.status,
        info.cliqueId,
        info.clusterUuid,
    ))
}

/// Returns the attributes that all versions have. Without a cluster the clique number is
/// meaningless.
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

/// Formats a UUID, such as `00112233-4455-6677-8899-aabbccddeeff`.
fn uuid(bytes: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32];
    let parts = parts.map(|part| hex.get(part).unwrap_or_default());
    parts.join("-")
}
