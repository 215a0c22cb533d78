//! The Job that resets GPUs.

use model::event::floor_char_boundary;
use serde_json::{Value, json};

use super::ResetSettings;
use crate::{Maintenance, MaintenanceResource};

/// Time limit of a Job including its retries, in seconds, as in NVSentinel.
pub(super) const JOB_SECONDS: i64 = 300;
/// Retries of a Job, as in NVSentinel.
const JOB_RETRIES: i64 = 2;
/// Time until a finished Job is deleted, in seconds, as in NVSentinel.
const JOB_KEPT_SECONDS: i64 = 86_400;
/// Longest name of a Job: its pods carry the name as the value of a label.
const NAME_BYTES: usize = 63;
/// Suffix after the name of the request.
const SUFFIX: &str = "-reset-job";
/// Number of hash characters in a shortened name.
const HASH_CHARS: usize = 10;

/// GPUs to reset. Empty for all GPUs of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResetGpus {
    /// GPUs named by UUID.
    pub uuids: Vec<String>,
    /// GPUs named by PCI bus id.
    pub pci_bus_ids: Vec<String>,
}

// === impl ResetGpus ===

impl ResetGpus {
    /// Returns the GPUs that a request names.
    pub(crate) fn of(request: &MaintenanceResource) -> Self {
        Self::in_spec(&request.spec)
    }

    /// Returns the GPUs named in the `spec` of a request.
    pub(crate) fn in_spec(spec: &Value) -> Self {
        let list = |pointer: &str| {
            let list = spec.pointer(pointer).and_then(Value::as_array);
            let texts = list.into_iter().flatten().filter_map(Value::as_str);
            texts.map(str::to_owned).collect()
        };
        Self {
            uuids: list("/selector/uuids"),
            pci_bus_ids: list("/selector/pciBusIDs"),
        }
    }

    /// Returns whether both may have a GPU in common. Whether a UUID and a bus id belong to the
    /// same GPU is not known here.
    pub(crate) fn overlap(&self, others: &Self) -> bool {
        let shares = |ours: &[String], theirs: &[String]| ours.iter().any(|it| theirs.contains(it));
        self.is_all()
            || others.is_all()
            || shares(&self.uuids, &others.uuids)
            || shares(&self.pci_bus_ids, &others.pci_bus_ids)
    }

    fn is_all(&self) -> bool {
        self.uuids.is_empty() && self.pci_bus_ids.is_empty()
    }

    /// Returns the GPUs in the format of the Job's program.
    fn list(&self) -> String {
        [self.uuids.as_slice(), &self.pci_bus_ids]
            .concat()
            .join(",")
    }
}

/// Returns the name of the Job of a request.
pub fn job_name(request: &str) -> String {
    if request.len() + SUFFIX.len() <= NAME_BYTES {
        return format!("{request}{SUFFIX}");
    }
    // FNV-1a, since the name must be the same in all versions of gpuwarden.
    let hash = request
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    let room = NAME_BYTES - SUFFIX.len() - HASH_CHARS - 1;
    let stem = &request[..floor_char_boundary(request, room)];
    let stem = stem.trim_end_matches(['-', '.']);
    let hash: String = format!("{hash:016x}").chars().take(HASH_CHARS).collect();
    format!("{stem}-{hash}{SUFFIX}")
}

/// Returns the Job of a request, owned by the request.
pub(super) fn job_of(request: &MaintenanceResource, settings: &ResetSettings) -> Value {
    let (name, gpus) = (job_name(&request.name), ResetGpus::of(request));
    let mut job = job(&name, &request.node, &gpus, settings);
    job["metadata"]["ownerReferences"] = json!([owner(request)]);
    job
}

/// Returns a Job without an owner that resets GPUs of a node.
pub fn job(name: &str, node: &str, gpus: &ResetGpus, settings: &ResetSettings) -> Value {
    let directory = |name: &str, path: &str| json!({"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}});
    let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path});
    let mut pod = json!({
        "restartPolicy": "Never",
        // Also runs on a node out of service.
        "nodeName": node,
        "tolerations": [{"operator": "Exists"}],
        // Needed to name the processes that hold a GPU.
        "hostPID": true,
        "automountServiceAccountToken": false,
        "imagePullSecrets": settings.pull_secrets.iter().map(|name| json!({"name": name})).collect::<Vec<_>>(),
        "containers": [{
            "name": "gpu-reset",
            "image": settings.image,
            "imagePullPolicy": "Always",
            "args": ["gpu-reset"],
            "env": [
                {"name": "NVIDIA_GPU_RESETS", "value": gpus.list()},
                {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
                {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
                {"name": "WRITE_SYSLOG_EVENT", "value": settings.write_log.to_string()},
            ],
            // The user of gpuwarden's image is another one.
            "securityContext": {"privileged": true, "runAsUser": 0},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": settings.resources,
            "volumeMounts": [
                mount("dev", "/dev"),
                mount("journal", "/run/systemd/journal"),
                mount("driver", "/run/nvidia/driver"),
                mount("sys", "/sys"),
            ],
        }],
        "volumes": [
            directory("dev", "/dev"),
            directory("journal", "/run/systemd/journal"),
            directory("driver", "/run/nvidia/driver"),
            directory("sys", "/sys"),
        ],
    });
    if let (Some(class), Some(pod)) = (&settings.runtime_class, pod.as_object_mut()) {
        pod.insert("runtimeClassName".to_owned(), json!(class));
    }
    let labels = json!({
        contract::keys::MANAGED_BY_LABEL: contract::keys::MANAGED_BY,
        "app": "gpu-reset",
    });
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": labels,
        },
        "spec": {
            "activeDeadlineSeconds": JOB_SECONDS,
            "backoffLimit": JOB_RETRIES,
            "ttlSecondsAfterFinished": JOB_KEPT_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    })
}

/// Returns the owner reference to a request.
fn owner(request: &MaintenanceResource) -> Value {
    let (group, version, _) = Maintenance::Reset.resource();
    json!({
        "apiVersion": format!("{group}/{version}"),
        "kind": Maintenance::Reset.name(),
        "name": request.name,
        "uid": request.uid,
        "controller": true,
        "blockOwnerDeletion": true,
    })
}
