//! The generic provider: a privileged Job on the node reboots it, and its pod shows failures.
//! Another Job resets GPUs, as for a janitor without a provider.
//!
//! The name of the Job follows from the operation, so a repeated signal creates no second Job.
//! The pod names its node, so it needs no scheduler and no taint keeps it away.

use contract::findings::Findings;
use contract::names;
use jiff::SignedDuration;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::failure::{Class, ProviderFailure};
use crate::gpu_reset::{self, ResetGpus, ResetSettings, ResetState};

/// Image that provides `sh`, `chroot` and `sync` for the Job.
const IMAGE: &str = "public.ecr.aws/docker/library/busybox:1.37.0";
/// Default lifetime of a finished Job.
const TTL_SECONDS: u32 = 3600;
/// Label of the Jobs, with the value `true`.
pub const JOB_LABEL: &str = "nvsentinel.nvidia.com/reboot-job";
/// Label of the Jobs with the node's name. Left out if the name is too long for a label's value.
pub const NODE_LABEL: &str = "nvsentinel.nvidia.com/reboot-node";
/// Annotation of gpuwarden on the Jobs, with the operation.
pub const OPERATION: &str = "gpuwarden.dev/operation";
/// Annotation of gpuwarden with the node's boot id before the reboot, which is the request id.
const BOOT_ID: &str = "gpuwarden.dev/boot-id";
/// Longest value of a label (bytes).
const LABEL_BYTES: usize = 63;
/// Longest part of a node's name in the name of a Job, which leaves room for the suffix of pod
/// names.
const NAME_BYTES: usize = 36;

/// Settings of the generic provider.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct GenericConfig {
    /// Container image of the Job.
    pub image: String,
    /// Namespace of the Jobs. Empty for that of the product.
    pub namespace: String,
    /// True to reboot by the kernel at once, without stopping anything (sysrq b).
    pub use_sysrq: bool,
    /// True to write a line to the host's log before.
    pub write_syslog: bool,
    /// Lifetime of a finished Job, in seconds.
    pub job_ttl_seconds: u32,
    /// Names of the image pull secrets.
    pub image_pull_secrets: Vec<String>,
}

// === impl GenericConfig ===

impl Default for GenericConfig {
    fn default() -> Self {
        Self {
            image: IMAGE.to_owned(),
            namespace: String::new(),
            use_sysrq: false,
            write_syslog: false,
            job_ttl_seconds: TTL_SECONDS,
            image_pull_secrets: Vec::new(),
        }
    }
}

impl GenericConfig {
    /// Checks for errors that would show only at the first reboot. `timeout` is the longest one
    /// of all actions: a Job that is deleted earlier would not be recognised.
    pub(super) fn check(&self, timeout: SignedDuration, findings: &mut Findings<'_>) {
        if self.image.trim().is_empty() {
            findings.at_key("generic.image", "it is empty");
        }
        if i64::from(self.job_ttl_seconds) < timeout.as_secs() {
            let (ttl, timeout) = (self.job_ttl_seconds, timeout.as_secs());
            let what =
                format!("it is {ttl}, and has to be {timeout} at least, the longest timeout");
            findings.at_key("generic.jobTtlSeconds", what);
        }
        if !self.namespace.is_empty() {
            findings.check("generic.namespace", names::dns_label(&self.namespace));
        }
        for (at, secret) in self.image_pull_secrets.iter().enumerate() {
            let path = format!("generic.imagePullSecrets[{at}]");
            findings.check(&path, names::object_name(secret));
        }
    }

    /// Returns the Job that reboots a node.
    pub fn job(&self, node: &str, boot_id: &str, operation: &str) -> Value {
        let (command, mounts) = self.command(node);
        let mut labels = json!({JOB_LABEL: "true"});
        if node.len() <= LABEL_BYTES {
            labels[NODE_LABEL] = json!(node);
        }
        let volumes: Vec<Value> = mounts
            .iter()
            .map(|(name, _, host)| json!({"name": name, "hostPath": {"path": host}}))
            .collect();
        let mounts: Vec<Value> = mounts
            .iter()
            .map(|(name, path, _)| json!({"name": name, "mountPath": path}))
            .collect();
        let secrets: Vec<Value> = (self.image_pull_secrets.iter())
            .map(|name| json!({"name": name}))
            .collect();
        json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": job_name(node, operation),
                "namespace": self.namespace,
                "labels": labels,
                "annotations": {OPERATION: operation, BOOT_ID: boot_id},
            },
            "spec": {
                // A second pod would cause a second reboot.
                "backoffLimit": 0,
                "ttlSecondsAfterFinished": self.job_ttl_seconds,
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "nodeName": node,
                        "restartPolicy": "Never",
                        "automountServiceAccountToken": false,
                        "imagePullSecrets": secrets,
                        "tolerations": [{"operator": "Exists"}],
                        "containers": [{
                            "name": "reboot",
                            "image": self.image,
                            "command": command,
                            "securityContext": {"privileged": true},
                            "volumeMounts": mounts,
                        }],
                        "volumes": volumes,
                    },
                },
            },
        })
    }

    /// Returns the command, and the host directories to mount: name, mount path and host path.
    fn command(
        &self,
        node: &str,
    ) -> (Vec<String>, Vec<(&'static str, &'static str, &'static str)>) {
        const ROOT: (&str, &str, &str) = ("host-root", "/host", "/");
        const PROC: (&str, &str, &str) = ("host-proc", "/host-proc", "/proc");
        let reboot = if self.use_sysrq {
            "sync; echo b > /host-proc/sysrq-trigger"
        } else {
            "exec chroot /host reboot"
        };
        // Names of nodes have no special characters for a shell.
        let log = format!(
            "chroot /host logger -t nvsentinel-reboot -p daemon.notice 'gpuwarden reboots {node}' || true; "
        );
        let mounts = match (self.use_sysrq, self.write_syslog) {
            (true, false) => vec![PROC],
            (true, true) => vec![PROC, ROOT],
            (false, _) => vec![ROOT],
        };
        let script = if self.write_syslog {
            log + reboot
        } else {
            reboot.to_owned()
        };
        (vec!["sh".to_owned(), "-c".to_owned(), script], mounts)
    }
}

/// Returns the Job that resets GPUs of a node for an operation.
pub fn reset_job(node: &str, operation: &str, gpus: &ResetGpus, settings: &ResetSettings) -> Value {
    let mut job = gpu_reset::job(&reset_job_name(node, operation), node, gpus, settings);
    job["metadata"]["annotations"] = json!({OPERATION: operation});
    job
}

/// Returns whether a Job was created for an operation.
pub fn is_of(job: &Value, operation: &str) -> bool {
    let annotations = job.pointer("/metadata/annotations");
    annotations.is_some_and(|all| all[OPERATION] == operation)
}

/// Returns whether a Job has reset its GPUs. `why` is the termination message of its pods.
pub fn is_reset(job: &Value, why: Option<&str>) -> Result<bool, ProviderFailure> {
    match ResetState::read(job, why) {
        ResetState::Active(_) => Ok(false),
        ResetState::Succeeded => Ok(true),
        ResetState::Failed(why) => Err(ProviderFailure::new(
            Class::Permanent,
            "GPU_RESET_FAILED",
            why,
        )),
        ResetState::Deleting => {
            let why = "the Job was deleted before it had ended";
            Err(ProviderFailure::new(
                Class::Ambiguous,
                "AMBIGUOUS_RESULT",
                why,
            ))
        }
    }
}

/// Returns the name of the Job that resets GPUs for an operation.
pub fn reset_job_name(node: &str, operation: &str) -> String {
    named("gpu-reset", node, operation)
}

/// Returns the name of the Job that reboots a node for an operation.
pub fn job_name(node: &str, operation: &str) -> String {
    named("reboot", node, operation)
}

fn named(what: &str, node: &str, operation: &str) -> String {
    let hash = Sha256::digest(operation);
    let hash = hash
        .iter()
        .take(8)
        .fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    let node: String = node.chars().take(NAME_BYTES).collect();
    // A name must not have a dot before a dash.
    format!("{what}-{}-{hash:016x}", node.trim_end_matches(['.', '-']))
}

/// Returns the node's boot id before the Job was created. `None` if the Job belongs to another
/// operation.
pub fn boot_before(job: &Value, operation: &str) -> Option<String> {
    let annotations = job.pointer("/metadata/annotations")?;
    (annotations.get(OPERATION)?.as_str() == Some(operation))
        .then(|| annotations.get(BOOT_ID)?.as_str().map(str::to_owned))?
}

/// Returns the failure of a reboot Job, as far as its pods show one.
pub fn failure_of<'a>(pods: impl IntoIterator<Item = &'a Value>) -> Option<ProviderFailure> {
    pods.into_iter().find_map(|pod| {
        let name = pod["metadata"]["name"].as_str().unwrap_or_default();
        let what = what_failed(&pod["status"])?;
        let message = format!("the pod {name} {what}");
        Some(ProviderFailure::new(
            Class::Permanent,
            "REBOOT_JOB_FAILED",
            message,
        ))
    })
}

/// Returns the failure of a pod, from its status. `None` also if the reboot ended the pod.
fn what_failed(status: &Value) -> Option<String> {
    let containers = status["containerStatuses"].as_array();
    for container in containers.into_iter().flatten() {
        let waiting = container["state"]["waiting"]["reason"].as_str();
        let starting = ["", "ContainerCreating", "PodInitializing"];
        if let Some(reason) = waiting.filter(|reason| !starting.contains(reason)) {
            return Some(format!("cannot start: {reason}"));
        }
        // Codes from 128 on stand for a signal or an unknown cause, as in a reboot.
        let code = container["state"]["terminated"]["exitCode"].as_i64();
        if let Some(code) = code.filter(|code| (1..128).contains(code)) {
            return Some(format!("ended with exit code {code}"));
        }
    }
    // A kubelet that shuts down gracefully reports that it ended the pod, but that pod had
    // containers.
    let refused = containers.is_none_or(Vec::is_empty) && status["phase"] == "Failed";
    let reason = status["reason"].as_str().filter(|_| refused)?;
    Some(format!("is refused by the kubelet: {reason}"))
}
