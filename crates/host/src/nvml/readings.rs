//! Reads the current health of one GPU.

use diagnosis::gpu::{Readings, RecoveryAction};
use nvml_wrapper_sys::bindings::{
    self as sys, field_id as field, nvmlEccSramErrorStatus_v1_t, nvmlMarginTemperature_v1_t,
    nvmlTemperature_v1_t,
};

use super::functions::Functions;
use super::query::Query;
use super::types::version;
use super::{fabric, links};

/// Reads everything that the driver reports about a GPU.
pub(super) fn read(gpu: &mut Query<'_>, readings: &mut Readings) {
    heat_and_power(gpu, readings);
    load(gpu, readings);
    memory_errors(gpu, readings);
    rows_and_pages(gpu, readings);
    pcie(gpu, readings);
    readings.nvlinks = links::readings(gpu);
    readings.fabric = fabric::read(gpu);
    readings.recovery_action = recovery_action(gpu);
}

/// Returns the recovery action that the driver requests for a GPU or a partition.
pub(super) fn recovery_action(device: &mut Query<'_>) -> Option<RecoveryAction> {
    let [action] = device.fields([(field::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0)]);
    let action = action.and_then(|action| u32::try_from(action).ok());
    action.map(RecoveryAction::from)
}

fn heat_and_power(gpu: &mut Query<'_>, readings: &mut Readings) {
    readings.temperature_c = temperature(gpu);
    let [memory] = gpu.fields([(field::NVML_FI_DEV_MEMORY_TEMP, 0)]);
    // A GPU without the sensor reports 0.
    readings.memory_temperature_c = memory
        .and_then(|c| i32::try_from(c).ok())
        .filter(|c| *c > 0);
    let margin = gpu.value(|nvml, device, margin: &mut nvmlMarginTemperature_v1_t| {
        margin.version = version::<nvmlMarginTemperature_v1_t>(1);
        nvml.nvmlDeviceGetMarginTemperature(device, margin)
    });
    readings.margin_c = margin.map(|margin| margin.marginTemperature);
    let power: Option<u32> = gpu.value(Functions::nvmlDeviceGetPowerUsage);
    readings.power_mw = power.map(u64::from);
    let limit: Option<u32> = gpu.value(Functions::nvmlDeviceGetEnforcedPowerLimit);
    readings.power_limit_mw = limit.map(u64::from);
    // Named so since driver 535.
    let reasons = gpu.value(|nvml, device, reasons| {
        nvml.nvmlDeviceGetCurrentClocksEventReasons(device, reasons)
    });
    readings.clock_reasons = reasons.or_else(|| {
        gpu.value(|nvml, device, reasons| {
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device, reasons)
        })
    });
    let thermal = sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_THERMAL;
    let power = sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_POWER;
    readings.thermal_violation_ns = violation(gpu, thermal, field::NVML_FI_DEV_PERF_POLICY_THERMAL);
    readings.power_violation_ns = violation(gpu, power, field::NVML_FI_DEV_PERF_POLICY_POWER);
}

/// Returns the temperature. Only the newer of the two functions reports values below zero.
fn temperature(gpu: &mut Query<'_>) -> Option<i32> {
    let sensor = sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
    let reading = gpu.value(|nvml, device, reading: &mut nvmlTemperature_v1_t| {
        reading.version = version::<nvmlTemperature_v1_t>(1);
        reading.sensorType = sensor;
        nvml.nvmlDeviceGetTemperatureV(device, reading)
    });
    reading.map(|reading| reading.temperature).or_else(|| {
        let reading: Option<u32> = gpu
            .value(|nvml, device, reading| nvml.nvmlDeviceGetTemperature(device, sensor, reading));
        reading.and_then(|reading| i32::try_from(reading).ok())
    })
}

/// Returns how long a limit has slowed the GPU down, in nanoseconds. CUDA 14 removes the
/// function, so a field that counts the same is the fallback. Later fields have different
/// numbers in CUDA 12 and 13.
fn violation(gpu: &mut Query<'_>, policy: u32, count: u32) -> Option<u64> {
    let reading = gpu.value(|nvml, device, reading: &mut sys::nvmlViolationTime_t| {
        nvml.nvmlDeviceGetViolationStatus(device, policy, reading)
    });
    reading.map(|reading| reading.violationTime).or_else(|| {
        let [count] = gpu.fields([(count, 0)]);
        count.and_then(|nanoseconds| u64::try_from(nanoseconds).ok())
    })
}

fn load(gpu: &mut Query<'_>, readings: &mut Readings) {
    let load = gpu.value(|nvml, device, load: &mut sys::nvmlUtilization_t| {
        nvml.nvmlDeviceGetUtilizationRates(device, load)
    });
    readings.utilization_percent = load.map(|load| load.gpu);
    let memory = gpu.value(|nvml, device, memory: &mut sys::nvmlMemory_t| {
        nvml.nvmlDeviceGetMemoryInfo(device, memory)
    });
    readings.memory_used_bytes = memory.map(|memory| memory.used);
}

fn memory_errors(gpu: &mut Query<'_>, readings: &mut Readings) {
    let mut errors = |kind, counter| {
        gpu.value(|nvml, device, count| {
            nvml.nvmlDeviceGetTotalEccErrors(device, kind, counter, count)
        })
    };
    let corrected = sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED;
    let uncorrected = sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
    let volatile = sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC;
    let aggregate = sys::nvmlEccCounterType_enum_NVML_AGGREGATE_ECC;
    readings.ecc_corrected_volatile = errors(corrected, volatile);
    readings.ecc_uncorrected_volatile = errors(uncorrected, volatile);
    readings.ecc_corrected_aggregate = errors(corrected, aggregate);
    readings.ecc_uncorrected_aggregate = errors(uncorrected, aggregate);
    let sram = gpu.value(|nvml, device, sram: &mut nvmlEccSramErrorStatus_v1_t| {
        sram.version = version::<nvmlEccSramErrorStatus_v1_t>(1);
        nvml.nvmlDeviceGetSramEccErrorStatus(device, sram)
    });
    readings.sram_threshold_exceeded = sram.map(|sram| sram.bThresholdExceeded != 0);
}

fn rows_and_pages(gpu: &mut Query<'_>, readings: &mut Readings) {
    let mut retired = |cause| {
        gpu.call(|nvml, device| {
            let mut count = 0;
            // Without room for addresses, the call returns the number of pages.
            match nvml.nvmlDeviceGetRetiredPages(device, cause, &mut count, None) {
                Err(error) if !error.is_too_small() => Err(error),
                _ => Ok(count),
            }
        })
    };
    readings.retired_pages_sbe = retired(
        sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
    );
    readings.retired_pages_dbe =
        retired(sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR);
    let pending: Option<u32> = gpu.value(|nvml, device, pending| {
        nvml.nvmlDeviceGetRetiredPagesPendingStatus(device, pending)
    });
    readings.retired_pages_pending = pending.map(|pending| pending != 0);
    let rows = gpu.call(|nvml, device| {
        let [mut correctable, mut uncorrectable, mut pending, mut failed] = [0; 4];
        nvml.nvmlDeviceGetRemappedRows(
            device,
            &mut correctable,
            &mut uncorrectable,
            &mut pending,
            &mut failed,
        )?;
        Ok((correctable, uncorrectable, pending != 0, failed != 0))
    });
    if let Some((correctable, uncorrectable, pending, failed)) = rows {
        readings.remapped_rows_correctable = Some(correctable);
        readings.remapped_rows_uncorrectable = Some(uncorrectable);
        readings.remap_pending = Some(pending);
        readings.remap_failed = Some(failed);
    }
}

fn pcie(gpu: &mut Query<'_>, readings: &mut Readings) {
    let replays: Option<u32> = gpu.value(Functions::nvmlDeviceGetPcieReplayCounter);
    readings.pcie_replays = replays.map(u64::from);
    readings.pcie_generation = gpu.value(Functions::nvmlDeviceGetCurrPcieLinkGeneration);
    readings.pcie_width = gpu.value(Functions::nvmlDeviceGetCurrPcieLinkWidth);
}
