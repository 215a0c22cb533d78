//! Compares structures and constants with NVIDIA's Python bindings, which are of DCGM 3.

use std::process::Command;

use diagnosis::catalog::Catalog;
use diagnosis::gpu::dcgm::all_watches;
use serde_json::{Value as Json, json};
use testkit::Component;

use super::super::response::{LAYOUTS, Response};
use super::super::{INDEX, PCI, UUID};
use super::*;

/// Returns the layouts and numbers of the bindings; `None` if they are not installed.
fn bindings() -> Option<Json> {
    let python = testkit::require(Component::PythonGrpc)?;
    let wheels = testkit::require(Component::VendorWheels)?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/witness/dcgm.py");
    let mut ask = Command::new(python);
    let output = ask.arg(script).env("PYTHONPATH", wheels).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn the_structures_are_those_of_nvidias_bindings() {
    let Some(theirs) = bindings() else {
        return;
    };
    let ours = json!({
        "connect": {
            "size": size_of::<ConnectParams>(),
            "places": {
                "version": mem::offset_of!(ConnectParams, version),
                "persistAfterDisconnect": mem::offset_of!(ConnectParams, persists),
                "timeoutMs": mem::offset_of!(ConnectParams, timeout_ms),
                "addressIsUnixSocket": mem::offset_of!(ConnectParams, is_unix_socket),
            },
        },
        "value": {
            "size": size_of::<Value>(),
            "places": {
                "version": mem::offset_of!(Value, version),
                "entityGroupId": mem::offset_of!(Value, entity_group),
                "entityId": mem::offset_of!(Value, entity),
                "fieldId": mem::offset_of!(Value, field),
                "fieldType": mem::offset_of!(Value, kind),
                "status": mem::offset_of!(Value, status),
                "unused": mem::offset_of!(Value, unused),
                "ts": mem::offset_of!(Value, time),
                "value": mem::offset_of!(Value, bytes),
            },
        },
        "version": {
            "size": size_of::<VersionInfo>(),
            "places": {
                "version": mem::offset_of!(VersionInfo, version),
                "rawBuildInfoString": mem::offset_of!(VersionInfo, text),
            },
        },
        "entity": {
            "size": size_of::<Entity>(),
            "places": {
                "entityGroupId": mem::offset_of!(Entity, group),
                "entityId": mem::offset_of!(Entity, id),
            },
        },
        // One word each; in the bindings, text and code form one structure.
        "health": {
            "size": Response::new(LAYOUTS[4]).words_mut().len() * 4,
            "places": {"version": 0, "overallHealth": 4, "incidentCount": 8, "incidents": 12},
        },
        "incident": {
            "size": 4 * (5 + LAYOUTS[4].text),
            "places": {
                "system": 0,
                "health": 4,
                "error": 8,
                "entityInfo": 4 * (3 + LAYOUTS[4].text),
            },
        },
    });
    assert_eq!(ours, theirs["layouts"]);
    let numbers = &theirs["numbers"];
    let versions = [
        (
            version::<ConnectParams>(2),
            "c_dcgmConnectV2Params_version2",
        ),
        (version::<Value>(2), "dcgmFieldValue_version2"),
        (version::<VersionInfo>(2), "dcgmVersionInfo_version2"),
        (
            Response::new(LAYOUTS[4]).words_mut()[0],
            "dcgmHealthResponse_version4",
        ),
    ];
    for (ours, name) in versions {
        assert_eq!(json!(ours), numbers[name], "{name}");
    }
}

#[test]
fn the_numbers_are_those_of_nvidias_bindings() {
    let Some(theirs) = bindings() else {
        return;
    };
    let numbers = &theirs["numbers"];
    for (ours, name) in [
        (json!(EMPTY), "DCGM_GROUP_EMPTY"),
        (json!(ONLY_SUPPORTED), "DCGM_GEGE_FLAG_ONLY_SUPPORTED"),
        (json!(LIVE), "DCGM_FV_FLAG_LIVE_DATA"),
        (json!(VALUE_BYTES), "DCGM_MAX_BLOB_LENGTH"),
        (json!(BLANK_NUMBER), "DCGM_INT64_BLANK"),
        (json!(FUNCTION_NOT_FOUND), "DCGM_ST_FUNCTION_NOT_FOUND"),
        (json!(DcgmEntity::GPU), "DCGM_FE_GPU"),
        (json!(DcgmEntity::SWITCH), "DCGM_FE_SWITCH"),
        (json!(INDEX), "DCGM_FI_DEV_NVML_INDEX"),
        (json!(UUID), "DCGM_FI_DEV_UUID"),
        (json!(PCI), "DCGM_FI_DEV_PCI_BUSID"),
    ] {
        assert_eq!(ours, numbers[name], "{name}");
    }
    let mut all = 0;
    for (name, number) in numbers.as_object().unwrap() {
        let watch = name.strip_prefix("DCGM_HEALTH_WATCH_");
        let kinds = ["ALL", "COUNT_V1", "COUNT_V2", "MAX_INCIDENTS"];
        if watch.is_some_and(|watch| !kinds.contains(&watch)) {
            all |= number.as_u64().unwrap();
        }
    }
    // The bindings are older than the IMEX watch.
    assert_eq!(u64::from(all_watches()), all | 0x2000);
}

#[test]
fn the_catalogue_has_the_codes_of_nvidias_bindings() {
    let Some(theirs) = bindings() else {
        return;
    };
    let errors = theirs["errors"].as_object().unwrap();
    assert!(errors.len() > 90, "{errors:?}");
    let catalog = Catalog::builtin();
    // The last one is not a code but the number of codes before it.
    for (name, number) in errors
        .iter()
        .filter(|(name, _)| *name != "DCGM_FR_ERROR_SENTINEL")
    {
        let code = catalog.dcgm_named(name).and_then(|row| row.code);
        assert_eq!(json!(code), *number, "{name}");
    }
}
