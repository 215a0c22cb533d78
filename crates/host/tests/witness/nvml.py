"""Prints what NVIDIA's Python bindings read from the first GPU, under the names of our fields."""

import json

import pynvml as nvml


def pci(info):
    return info.busId.lower()[4:]


def field(gpu, number, scope=0):
    value = nvml.nvmlDeviceGetFieldValues(gpu, [(number, scope)])[0]
    assert value.nvmlReturn == nvml.NVML_SUCCESS, number
    assert value.valueType == nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, number
    return value.value.sllVal


def identity(gpu):
    platform = nvml.c_nvmlPlatformInfo_v2_t()
    fn = nvml._nvmlGetFunctionPointer("nvmlDeviceGetPlatformInfo")
    assert fn(gpu, nvml.byref(platform)) == nvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetArchitecture(gpu) == nvml.NVML_DEVICE_ARCH_HOPPER
    return {
        "uuid": nvml.nvmlDeviceGetUUID(gpu),
        "pci": pci(nvml.nvmlDeviceGetPciInfo_v3(gpu)),
        "product": nvml.nvmlDeviceGetName(gpu),
        "architecture": "Hopper",
        "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(gpu).total,
        "serial": nvml.nvmlDeviceGetSerial(gpu),
        "board_part_number": nvml.nvmlDeviceGetBoardPartNumber(gpu),
        "chassis_serial": platform.chassisSerialNumber,
        "numa_node": nvml.nvmlDeviceGetNumaNodeId(gpu),
        "slowdown_margin_c": field(gpu, nvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT),
        "pcie_max_generation": nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
        "pcie_max_width": nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
        "mig_enabled": nvml.nvmlDeviceGetMigMode(gpu)[0] == 1,
    }


def link(gpu, number):
    return {
        "link": number,
        "up": nvml.nvmlDeviceGetNvLinkState(gpu, number) == nvml.NVML_FEATURE_ENABLED,
        "replays": field(gpu, nvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, number),
        "recoveries": field(gpu, nvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY, number),
        "crc_errors": field(gpu, nvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC, number),
        "effective_errors": field(gpu, nvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS, number),
    }


def fabric(gpu):
    newest = nvml.c_nvmlGpuFabricInfo_v4_t()
    nvml.nvmlDeviceGetGpuFabricInfo_v4(gpu, nvml.byref(newest))
    third = nvml.c_nvmlGpuFabricInfo_v3_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, nvml.byref(third))
    second = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, nvml.byref(second))
    of_one = nvml.NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER
    cliques = newest.cliques[: newest.numCliques]
    clique = next(clique.id for clique in cliques if clique.type == of_one)
    for older in (third, second):
        assert older.cliqueId == clique
        assert bytes(older.clusterUuid) == bytes(newest.clusterUuid)
        assert older.healthMask == newest.healthMask
        assert older.state == newest.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED
    return {"clique": clique, "health_mask": newest.healthMask}


def readings(gpu):
    def ecc(kind, counter):
        return nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, counter)

    def violation(policy):
        return nvml.nvmlDeviceGetViolationStatus(gpu, policy).violationTime

    def retired(cause):
        return len(nvml.nvmlDeviceGetRetiredPages(gpu, cause))

    corrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    sram = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(gpu, nvml.byref(sram))
    rows = nvml.nvmlDeviceGetRemappedRows(gpu)
    return {
        "temperature_c": nvml.nvmlDeviceGetTemperatureV(gpu, nvml.NVML_TEMPERATURE_GPU),
        "memory_temperature_c": field(gpu, nvml.NVML_FI_DEV_MEMORY_TEMP),
        "margin_c": nvml.nvmlDeviceGetMarginTemperature(gpu),
        "power_mw": nvml.nvmlDeviceGetPowerUsage(gpu),
        "power_limit_mw": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu),
        "clock_reasons": nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
        "thermal_violation_ns": violation(nvml.NVML_PERF_POLICY_THERMAL),
        "power_violation_ns": violation(nvml.NVML_PERF_POLICY_POWER),
        "utilization_percent": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "memory_used_bytes": nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "ecc_corrected_volatile": ecc(corrected, nvml.NVML_VOLATILE_ECC),
        "ecc_uncorrected_volatile": ecc(uncorrected, nvml.NVML_VOLATILE_ECC),
        "ecc_corrected_aggregate": ecc(corrected, nvml.NVML_AGGREGATE_ECC),
        "ecc_uncorrected_aggregate": ecc(uncorrected, nvml.NVML_AGGREGATE_ECC),
        "retired_pages_sbe": retired(nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS),
        "retired_pages_dbe": retired(nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR),
        "retired_pages_pending": nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu) == 1,
        "remapped_rows_correctable": rows[0],
        "remapped_rows_uncorrectable": rows[1],
        "remap_pending": rows[2] == 1,
        "remap_failed": rows[3] == 1,
        "sram_threshold_exceeded": sram.bThresholdExceeded == 1,
        "pcie_replays": nvml.nvmlDeviceGetPcieReplayCounter(gpu),
        "pcie_generation": nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "pcie_width": nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        "nvlinks": [link(gpu, 0)],
    }


def event(gpu):
    events = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
    heard = nvml.nvmlEventSetWait_v2(events, 1000)
    assert heard.eventType == nvml.nvmlEventTypeXidCriticalError
    return {
        "code": heard.eventData,
        "gpu_instance": heard.gpuInstanceId,
        "compute_instance": heard.computeInstanceId,
    }


def main():
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    told = {
        "gpu": identity(gpu),
        "readings": readings(gpu),
        "fabric": fabric(gpu),
        "action": field(gpu, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
        "xid": event(gpu),
    }
    print(json.dumps(told))


main()
