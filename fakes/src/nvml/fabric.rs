//! Functions about the fabric of a GPU, with all structures that drivers have used.

use nvml_wrapper_sys::bindings as sys;

use super::{Device, Handle, of_device, tell, versioned, write};
use crate::code;
use crate::scenario::Fabric;

/// Version 4 of the structure, which the bindings lack.
#[repr(C)]
struct FabricInfoV4 {
    cluster: [u8; 16],
    status: u32,
    cliques: [FabricClique; 64],
    clique_count: u32,
    state: u8,
    health_mask: u32,
    health_summary: u8,
}

/// A clique for one kind of access.
#[repr(C)]
#[derive(Clone, Copy)]
struct FabricClique {
    kind: u8,
    id: u32,
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfo(
    device: Handle,
    told: *mut sys::nvmlGpuFabricInfo_t,
) -> u32 {
    of_fabric("nvmlDeviceGetGpuFabricInfo", device, |fabric, _| {
        let info = sys::nvmlGpuFabricInfo_t {
            clusterUuid: fabric.cluster,
            status: fabric.status,
            cliqueId: fabric.clique,
            state: fabric.state,
        };
        write(told, info)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfoV(
    device: Handle,
    told: *mut sys::nvmlGpuFabricInfo_v3_t,
) -> u32 {
    of_fabric("nvmlDeviceGetGpuFabricInfoV", device, |fabric, newest| {
        let code = match newest {
            1 => return code::FUNCTION_NOT_FOUND,
            2 => code::ARGUMENT_VERSION_MISMATCH,
            _ => tell(versioned(told, 3), |told| {
                told.clusterUuid = fabric.cluster;
                told.status = fabric.status;
                told.cliqueId = fabric.clique;
                told.state = fabric.state;
                told.healthMask = fabric.health_mask;
            }),
        };
        if code != code::ARGUMENT_VERSION_MISMATCH {
            return code;
        }
        tell(
            versioned(told.cast::<sys::nvmlGpuFabricInfo_v2_t>(), 2),
            |told| {
                told.clusterUuid = fabric.cluster;
                told.status = fabric.status;
                told.cliqueId = fabric.clique;
                told.state = fabric.state;
                told.healthMask = fabric.health_mask;
            },
        )
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfo_v4(device: Handle, told: *mut FabricInfoV4) -> u32 {
    of_fabric("nvmlDeviceGetGpuFabricInfo_v4", device, |fabric, newest| {
        if newest < 4 {
            return code::FUNCTION_NOT_FOUND;
        }
        let clique = |kind, id| FabricClique { kind, id };
        let mut cliques = [clique(0, 0); 64];
        // Drivers may report a clique of another kind, with another number, first.
        cliques[0] = clique(1, fabric.clique + 1);
        cliques[1] = clique(0, fabric.clique);
        let info = FabricInfoV4 {
            cluster: fabric.cluster,
            status: fabric.status,
            cliques,
            clique_count: 2,
            state: fabric.state,
            health_mask: fabric.health_mask,
            health_summary: 0,
        };
        write(told, info)
    })
}

/// Runs a call about the fabric of a GPU, with the newest structure that the driver supports.
fn of_fabric(call: &str, device: Handle, answer: impl FnOnce(&Fabric, u32) -> u32) -> u32 {
    of_device(call, device, |device, scenario| {
        let (Device::Gpu(gpu) | Device::Partition(gpu, _)) = device;
        match &gpu.fabric {
            Some(fabric) => answer(fabric, scenario.fabric_version),
            None => code::NOT_SUPPORTED,
        }
    })
}
