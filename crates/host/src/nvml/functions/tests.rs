//! Compares bindings, structures and constants with NVIDIA's header and libraries.

use std::path::Path;

use nvml_wrapper_sys::bindings::{field_id as field, nvmlGpuFabricInfo_v2_t};
use testkit::Component;

use super::super::ARCH_RUBIN;
use super::super::error::code_name;
use super::super::types::{FabricClique, version};
use super::*;
use crate::c_header::{Header, Signature, layout};

/// C types of the parameters.
const TYPES: &[(&str, &str)] = &[
    ("&mut Text", "char *"),
    ("Length", "unsigned int"),
    ("c_uint", "unsigned int"),
    ("c_int", "int"),
    ("c_ulonglong", "unsigned long long"),
    ("&mut c_uint", "unsigned int *"),
    ("&mut c_int", "int *"),
    ("&mut c_ulonglong", "unsigned long long *"),
    ("Option<&Infallible>", "unsigned long long *"),
    ("&mut nvmlPciInfo_t", "nvmlPciInfo_t *"),
    ("&mut nvmlPlatformInfo_v2_t", "nvmlPlatformInfo_v2_t *"),
    ("&mut nvmlMemory_t", "nvmlMemory_t *"),
    ("&mut nvmlTemperature_v1_t", "nvmlTemperature_v1_t *"),
    (
        "&mut nvmlMarginTemperature_v1_t",
        "nvmlMarginTemperature_v1_t *",
    ),
    ("&mut nvmlViolationTime_t", "nvmlViolationTime_t *"),
    ("&mut nvmlUtilization_t", "nvmlUtilization_t *"),
    (
        "&mut nvmlEccSramErrorStatus_v1_t",
        "nvmlEccSramErrorStatus_v1_t *",
    ),
    ("&mut nvmlGpuFabricInfo_t", "nvmlGpuFabricInfo_t *"),
    ("&mut nvmlGpuFabricInfo_v3_t", "nvmlGpuFabricInfo_v3_t *"),
    ("&mut FabricInfoV4", "nvmlGpuFabricInfo_v4_t *"),
    ("nvmlDevice_t", "nvmlDevice_t"),
    ("*mut nvmlDevice_t", "nvmlDevice_t *"),
    ("*mut nvmlFieldValue_t", "nvmlFieldValue_t *"),
    ("nvmlEventSet_t", "nvmlEventSet_t"),
    ("*mut nvmlEventSet_t", "nvmlEventSet_t *"),
    ("*mut nvmlEventData_t", "nvmlEventData_t *"),
    ("nvmlReturn_t", "nvmlReturn_t"),
    ("nvmlEnableState_t", "nvmlEnableState_t"),
    ("&mut nvmlEnableState_t", "nvmlEnableState_t *"),
    ("*mut c_uint", "unsigned int *"),
    ("*mut nvmlProcessInfo_t", "nvmlProcessInfo_t *"),
];

#[test]
fn the_functions_are_those_of_the_header() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let ours: Vec<Signature> = Functions::SIGNATURES
        .iter()
        .map(|(name, takes)| (*name, "nvmlReturn_t", *takes))
        .collect();
    Header::nvml(&wheels).assert_signatures(&ours, TYPES);
}

#[test]
fn the_structures_are_those_of_the_header() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let ours = [
        layout!(FabricInfoV4, "nvmlGpuFabricInfo_v4_t" {
            cluster: "clusterUuid",
            status: "status",
            cliques: "cliques",
            clique_count: "numCliques",
            state: "state",
            health_mask: "healthMask",
            health_summary: "healthSummary",
        }),
        layout!(FabricClique, "nvmlGpuFabricClique_v1_t" { kind: "type", id: "id" }),
        layout!(nvmlGpuFabricInfo_t, "nvmlGpuFabricInfo_t" {
            clusterUuid, status, cliqueId, state;
        }),
        layout!(nvmlGpuFabricInfo_v2_t, "nvmlGpuFabricInfo_v2_t" {
            version, clusterUuid, status, cliqueId, state, healthMask;
        }),
        layout!(nvmlGpuFabricInfo_v3_t, "nvmlGpuFabricInfo_v3_t" {
            version, clusterUuid, status, cliqueId, state, healthMask;
        }),
        layout!(nvmlPciInfo_t, "nvmlPciInfo_t" { busId; }),
        layout!(nvmlPlatformInfo_v2_t, "nvmlPlatformInfo_v2_t" { version, chassisSerialNumber; }),
        layout!(nvmlMemory_t, "nvmlMemory_t" { total, used; }),
        layout!(nvmlProcessInfo_t, "nvmlProcessInfo_t" {
            pid, usedGpuMemory, gpuInstanceId, computeInstanceId;
        }),
        layout!(nvmlTemperature_v1_t, "nvmlTemperature_v1_t" { version, sensorType, temperature; }),
        layout!(nvmlMarginTemperature_v1_t, "nvmlMarginTemperature_v1_t" {
            version, marginTemperature;
        }),
        layout!(nvmlUtilization_t, "nvmlUtilization_t" { gpu; }),
        layout!(nvmlViolationTime_t, "nvmlViolationTime_t" { violationTime; }),
        layout!(nvmlEccSramErrorStatus_v1_t, "nvmlEccSramErrorStatus_v1_t" {
            version, bThresholdExceeded;
        }),
        layout!(nvmlFieldValue_t, "nvmlFieldValue_t" {
            fieldId, scopeId, valueType, nvmlReturn, value;
        }),
        layout!(nvmlEventData_t, "nvmlEventData_t" {
            device, eventType, eventData, gpuInstanceId, computeInstanceId;
        }),
        vec![
            ("sizeof(((nvmlFieldValue_t *)0)->value)".to_owned(), 8),
            ("NVML_GPU_FABRIC_CLIQUE_MAX".to_owned(), 64),
        ],
    ];
    Header::nvml(&wheels).assert_numbers(&ours.concat());
}

#[test]
fn the_versions_of_structures_are_those_of_the_header() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let ours = [
        ("nvmlGpuFabricInfo_v2", version::<nvmlGpuFabricInfo_v2_t>(2)),
        ("nvmlGpuFabricInfo_v3", version::<nvmlGpuFabricInfo_v3_t>(3)),
        ("nvmlPlatformInfo_v2", version::<nvmlPlatformInfo_v2_t>(2)),
        ("nvmlTemperature_v1", version::<nvmlTemperature_v1_t>(1)),
        (
            "nvmlMarginTemperature_v1",
            version::<nvmlMarginTemperature_v1_t>(1),
        ),
        (
            "nvmlEccSramErrorStatus_v1",
            version::<nvmlEccSramErrorStatus_v1_t>(1),
        ),
    ];
    let ours = ours.map(|(name, version)| (name.to_owned(), i64::from(version)));
    Header::nvml(&wheels).assert_numbers(&ours);
}

/// Lists constants of the bindings by their header names, which for enumerations are a suffix.
macro_rules! numbers {
    ($($module:ident: $prefix:literal $($name:ident)*;)*) => {
        [$($((
            stringify!($name).strip_prefix($prefix).unwrap().to_owned(),
            i64::from($module::$name),
        )),*),*]
    };
}

#[test]
fn the_numbers_are_those_of_the_header() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let ours = numbers! {
        field: ""
            NVML_FI_DEV_GET_GPU_RECOVERY_ACTION NVML_FI_DEV_MEMORY_TEMP
            NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS
            NVML_FI_DEV_NVLINK_ERROR_DL_CRC NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY
            NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY NVML_FI_DEV_NVLINK_LINK_COUNT
            NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT
            NVML_FI_DEV_PERF_POLICY_POWER NVML_FI_DEV_PERF_POLICY_THERMAL;
        sys: ""
            NVML_DEVICE_ARCH_KEPLER NVML_DEVICE_ARCH_MAXWELL NVML_DEVICE_ARCH_PASCAL
            NVML_DEVICE_ARCH_VOLTA NVML_DEVICE_ARCH_TURING NVML_DEVICE_ARCH_AMPERE
            NVML_DEVICE_ARCH_ADA NVML_DEVICE_ARCH_HOPPER NVML_DEVICE_ARCH_BLACKWELL
            NVML_DEVICE_ARCH_UNKNOWN
            nvmlEventTypeXidCriticalError nvmlEventTypeSingleBitEccError
            nvmlEventTypeDoubleBitEccError nvmlEventTypeDramRetirementEvent
            nvmlEventTypeDramRetirementFailure nvmlEventTypeNonFatalPoisonError
            nvmlEventTypeFatalPoisonError nvmlEventTypeGpuUnavailableError
            nvmlEventTypeGpuRecoveryAction;
        sys: "nvmlEccCounterType_enum_"
            nvmlEccCounterType_enum_NVML_AGGREGATE_ECC nvmlEccCounterType_enum_NVML_VOLATILE_ECC;
        sys: "nvmlEnableState_enum_" nvmlEnableState_enum_NVML_FEATURE_ENABLED;
        sys: "nvmlIntNvLinkDeviceType_enum_"
            nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU
            nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH
            nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
        sys: "nvmlMemoryErrorType_enum_"
            nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED
            nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
        sys: "nvmlPageRetirementCause_enum_"
            nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
            nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS;
        sys: "nvmlPerfPolicyType_enum_"
            nvmlPerfPolicyType_enum_NVML_PERF_POLICY_POWER
            nvmlPerfPolicyType_enum_NVML_PERF_POLICY_THERMAL;
        sys: "nvmlTemperatureSensors_enum_" nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
        sys: "nvmlValueType_enum_"
            nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT
            nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG
            nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG
            nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT
            nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_SHORT;
    };
    let header = Header::nvml(&wheels);
    header.assert_numbers(&ours);
    // CUDA 12 numbers some fields differently; those in use must be the same in both.
    Header::nvml_12(&wheels).assert_numbers(&ours);
    // All codes with the names shown to users, including 999, which is out of sequence.
    header.assert_numbers(&[("NVML_DEVICE_ARCH_RUBIN".to_owned(), ARCH_RUBIN.into())]);
    let codes = (0..31).chain([999]);
    let codes = codes.map(|code: u32| (code_name(code), code.into()));
    header.assert_numbers(&codes.collect::<Vec<_>>());
}

/// Numbers of the driver that `diagnosis` gives names of its own.
#[test]
fn the_numbers_that_decide_are_those_of_the_header() {
    use diagnosis::gpu::{FabricState, RecoveryAction};

    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let number = |of: &dyn Fn(u32) -> bool| (0..100).find(|number| of(*number)).unwrap();
    let action = |of: RecoveryAction| number(&|number| RecoveryAction::from(number) == of);
    let state = |of: FabricState| number(&|number| FabricState::from(number) == of);
    let actions = [
        ("NONE", RecoveryAction::None),
        ("GPU_RESET", RecoveryAction::Reset),
        ("NODE_REBOOT", RecoveryAction::Reboot),
        ("DRAIN_P2P", RecoveryAction::DrainPeers),
        ("DRAIN_AND_RESET", RecoveryAction::DrainAndReset),
        ("RECOVER_IMEX_DOMAIN", RecoveryAction::RecoverImexDomain),
        ("BUS_RESET", RecoveryAction::BusReset),
        ("SYSTEM_REBOOT", RecoveryAction::SystemReboot),
    ];
    let states = [
        ("NOT_SUPPORTED", FabricState::NotSupported),
        ("NOT_STARTED", FabricState::NotStarted),
        ("IN_PROGRESS", FabricState::InProgress),
        ("COMPLETED", FabricState::Completed),
    ];
    let actions =
        actions.map(|(name, of)| (format!("NVML_GPU_RECOVERY_ACTION_{name}"), action(of)));
    let states = states.map(|(name, of)| (format!("NVML_GPU_FABRIC_STATE_{name}"), state(of)));
    let ours = actions.into_iter().chain(states);
    let ours: Vec<_> = ours
        .map(|(name, number)| (name, i64::from(number)))
        .collect();
    Header::nvml(&wheels).assert_numbers(&ours);
}

#[test]
fn each_driver_has_the_functions_of_its_time() {
    let Some(drivers) = testkit::require(Component::DriverLibraries) else {
        return;
    };
    // Added in 520, 530, 535 and so on; none of the available drivers has what one of 550
    // lacks.
    let of_later = [
        "nvmlDeviceGetPlatformInfo",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetMarginTemperature",
        "nvmlDeviceGetGpuFabricInfo_v4",
    ];
    let of_550 = ["nvmlDeviceGetNumaNodeId", "nvmlDeviceGetGpuFabricInfoV"];
    let of_535 = [
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetSramEccErrorStatus",
    ];
    let of_525 = [
        "nvmlDeviceGetGpuFabricInfo",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
    ];
    let mut opened = 0;
    for (driver, lacks) in [
        ("550.163.01", vec![&of_later[..]]),
        ("535.261.03", vec![&of_later[..], &of_550]),
        ("525.147.05", vec![&of_later[..], &of_550, &of_535]),
        ("470.256.02", vec![&of_later[..], &of_550, &of_535, &of_525]),
    ] {
        // Debian may have another version by now.
        if !drivers.join(driver).exists() {
            continue;
        }
        opened += 1;
        let functions = open(&drivers.join(driver));
        let has = functions.has();
        assert!(has.len() > 40, "{has:?}");
        let mut lacking: Vec<_> = has.iter().filter(|(_, has)| !has).collect();
        lacking.sort_unstable();
        let mut expected = lacks.concat();
        expected.sort_unstable();
        let lacking: Vec<_> = lacking.into_iter().map(|(name, _)| *name).collect();
        assert_eq!(lacking, expected, "{driver}");
    }
    assert!(opened > 2, "{opened} drivers");
}

/// Opens the library of a driver that is not running.
fn open(directory: &Path) -> Functions {
    let places = LibraryPlaces {
        path: Some(directory.join(NAMES[0])),
        driver_root: None,
    };
    Functions::open(&places, Box::new(|_, _| {})).unwrap()
}
