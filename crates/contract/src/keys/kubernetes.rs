//! Names on Kubernetes objects: labels, annotations, taints, conditions and `ConfigMap`s.
//!
//! Keys without `gpuwarden.dev/` are NVSentinel's: other tools read them.

/// Annotation: JSON array of the events that a node is quarantined for.
pub const QUARANTINE_HEALTH_EVENT: &str = "quarantineHealthEvent";
/// Annotation: JSON array of the taints that the quarantine asked for.
pub const QUARANTINE_APPLIED_TAINTS: &str = "quarantineHealthEventAppliedTaints";
/// Annotation: `True` if the quarantine asked for a cordon.
pub const QUARANTINE_IS_CORDONED: &str = "quarantineHealthEventIsCordoned";
/// Annotation: `True` if the node was cordoned before the quarantine; it stays cordoned
/// afterwards.
pub const QUARANTINE_CORDON_PRE_EXISTING: &str = "quarantineHealthEventCordonPreExisting";
/// Annotation: `True` after a person uncordoned a quarantined node.
pub const UNCORDONED_MANUALLY: &str = "quarantinedNodeUncordonedManually";
/// Annotation: `True` after a person removed a quarantine taint.
pub const UNTAINTED_MANUALLY: &str = "quarantinedNodeUntaintedManually";
/// Value of the `True` annotations above.
pub const TRUE: &str = "True";

/// Label (after the configured prefix): author of the cordon.
pub const CORDON_BY: &str = "cordon-by";
/// Label (after the configured prefix): rule sets that asked for the cordon.
pub const CORDON_REASON: &str = "cordon-reason";
/// Label (after the configured prefix): time of the cordon, as `2006-01-02T15-04-05Z`.
pub const CORDON_TIMESTAMP: &str = "cordon-timestamp";
/// Value of [`CORDON_BY`] unless an override names another author. Existing dashboards and
/// scripts select on this name.
pub const CORDONED_BY_VALUE: &str = "NVSentinel";

/// Label: state of a node between fault and return to service.
pub const STATE_LABEL: &str = "dgxc.nvidia.com/nvsentinel-state";
/// Value of [`STATE_LABEL`] from the quarantine until draining starts.
pub const STATE_QUARANTINED: &str = "quarantined";
/// Value of [`STATE_LABEL`] while pods leave the node.
pub const STATE_DRAINING: &str = "draining";
/// Value of [`STATE_LABEL`] once all pods that must leave have left.
pub const STATE_DRAINED: &str = "drain-succeeded";

/// Value of [`STATE_LABEL`] while the node is remediated.
pub const STATE_REMEDIATING: &str = "remediating";
/// Value of [`STATE_LABEL`] once a remediation has succeeded, until the node's faults have
/// ended.
pub const STATE_REMEDIATED: &str = "remediation-succeeded";
/// Value of [`STATE_LABEL`] while a person is asked to remediate the node.
pub const STATE_REMEDIATION_FAILED: &str = "remediation-failed";
/// Annotation: remediations of a quarantined node, as JSON by group.
pub const REMEDIATION_STATE: &str = "latestFaultRemediationState";
/// Annotation of gpuwarden on a node that was validated before its first use: the uid of the
/// node.
pub const ADMITTED: &str = "gpuwarden.dev/admitted";
/// Taint of gpuwarden that new nodes may be registered with, to have them validated before
/// their first use.
pub const NOT_VALIDATED: &str = "gpuwarden.dev/not-validated";
/// Annotation of gpuwarden on the custom resource of a remediation: the attempt that it belongs
/// to.
pub const ATTEMPT: &str = "gpuwarden.dev/attempt";

/// Annotation of a node: last power cycle requested from its BMC (JSON), written before the
/// request.
pub const POWER_CYCLE: &str = "gpuwarden.dev/power-cycle";
/// Annotation of a node: reboot or termination that its owner is asked for by a label (JSON),
/// written and removed together with the label.
pub const LABEL_REQUEST: &str = "gpuwarden.dev/label-request";
/// Annotation of gpuwarden on a pod, set by its owner: longest time (`10m`) that the pod asks
/// for, to write a checkpoint before it is evicted.
pub const CHECKPOINT: &str = "gpuwarden.dev/checkpoint";
/// Annotation of gpuwarden on such a pod: time when the checkpoint was requested.
pub const CHECKPOINT_REQUESTED: &str = "gpuwarden.dev/checkpoint-requested";
/// Annotation of such a pod, set by its workload: the value of [`CHECKPOINT_REQUESTED`] once
/// the checkpoint is written.
pub const CHECKPOINT_DONE: &str = "gpuwarden.dev/checkpoint-done";

/// Label that excludes a node from gpuwarden's control (value `false`), set by an operator.
pub const MANAGED_LABEL: &str = "k8saas.nvidia.com/ManagedByNVSentinel";

/// Annotation of gpuwarden: the quarantine session and the values that it replaced, as JSON.
pub const SESSION: &str = "gpuwarden.dev/session";
/// Annotation of gpuwarden: time when a person ended the last session (RFC 3339). Older events
/// never start a session.
pub const RELEASED_AT: &str = "gpuwarden.dev/released-at";

/// Annotation of gpuwarden: name of the policy that applies to this node.
pub const POLICY: &str = "gpuwarden.dev/policy";
/// Annotation of gpuwarden: an operator's request to return the node to service, as JSON.
pub const RELEASE: &str = "gpuwarden.dev/release";
/// Annotation of gpuwarden: a person's temporary hold on the node's next drain or remediation,
/// as JSON.
pub const VETO: &str = "gpuwarden.dev/veto";
/// Annotation of gpuwarden: a person's approval of what the session on the node proposes, as JSON.
pub const APPROVE: &str = "gpuwarden.dev/approve";

/// Kubernetes' label for objects managed by a program; [`MANAGED_BY`] is the value for
/// gpuwarden's.
pub const MANAGED_BY_LABEL: &str = "app.kubernetes.io/managed-by";
/// Value of [`MANAGED_BY_LABEL`] on gpuwarden's objects.
pub const MANAGED_BY: &str = "gpuwarden";
/// Annotation of gpuwarden on a `DeviceTaintRule`: the device's node.
pub const RULE_NODE: &str = "gpuwarden.dev/node";
/// Annotation of gpuwarden on a `DeviceTaintRule`: UUID of the GPU, or its PCI address.
pub const RULE_GPU: &str = "gpuwarden.dev/gpu";
/// Annotation of gpuwarden on a `DeviceTaintRule`: kind of gpuwarden that created it,
/// `controller` or `node`.
pub const RULE_BY: &str = "gpuwarden.dev/by";
/// Annotation of gpuwarden on a `DeviceTaintRule`: store id of a node's own gpuwarden.
pub const RULE_STORE: &str = "gpuwarden.dev/store";

/// Lease of the controllers, in the product's namespace: its holder acts.
pub const LEASE: &str = "gpuwarden-controller";

/// Annotation of gpuwarden on the Lease: id of the event store in use, or last in use. A new
/// leader with another store starts without open faults.
pub const LEASE_STORE: &str = "gpuwarden.dev/store";

/// Annotation of the data-flow document: `true` while the node is quarantined.
pub const SEED_QUARANTINED: &str = "nvsentinel.nvidia.com/quarantined";
/// Annotation of the data-flow document: check that caused the quarantine.
pub const SEED_QUARANTINE_REASON: &str = "nvsentinel.nvidia.com/quarantine-reason";
/// Annotation of the data-flow document: start of the quarantine (RFC 3339, in seconds).
pub const SEED_QUARANTINE_TIMESTAMP: &str = "nvsentinel.nvidia.com/quarantine-timestamp";
/// Taint of the data-flow document, with the check as value.
pub const UNHEALTHY_TAINT: &str = "nvsentinel.nvidia.com/unhealthy";

/// Label (after the configured prefix): author of the uncordon.
pub const UNCORDON_BY: &str = "uncordon-by";
/// Label (after the configured prefix): reason of the cordon with the suffix `-removed`.
pub const UNCORDON_REASON: &str = "uncordon-reason";
/// Label (after the configured prefix): time of the uncordon, as `2006-01-02T15-04-05Z`.
pub const UNCORDON_TIMESTAMP: &str = "uncordon-timestamp";

/// Label of the GPU Operator: progress of the node's driver upgrade.
pub const DRIVER_UPGRADE_STATE: &str = "nvidia.com/gpu-driver-upgrade-state";
/// Values of [`DRIVER_UPGRADE_STATE`] while no upgrade is in progress.
pub const DRIVER_UPGRADE_ENDED: [&str; 3] = ["", "upgrade-done", "upgrade-failed"];

/// Label: `false` while a node is handed over to an external system for remediation.
pub const HANDED_OVER_LABEL: &str = "nvsentinel.dgxc.nvidia.com/managed";
/// Taint of a node that is handed over; the value is the name of the
/// `ExternalRemediationRequest`.
pub const HANDED_OVER_TAINT: &str = "nvsentinel.dgxc.nvidia.com/external-remediation";
/// Annotation of gpuwarden: request that a node is handed over for, and the label's previous
/// value, as JSON.
pub const HANDED_OVER: &str = "gpuwarden.dev/handed-over";
/// Annotation of gpuwarden: service labels changed for a reset of GPUs, with their previous
/// values, as JSON.
pub const RESET_STOPPED: &str = "gpuwarden.dev/gpu-reset";

/// Label of NVSentinel's labeler: major version of the DCGM on the node, such as `4.x`.
pub const DCGM_VERSION: &str = "nvsentinel.dgxc.nvidia.com/dcgm.version";
/// Label of NVSentinel's labeler: `true` on a node with a driver of GPUs.
pub const DRIVER_INSTALLED: &str = "nvsentinel.dgxc.nvidia.com/driver.installed";
/// Label of NVSentinel's labeler: `true` or `false`, whether the node runs Kata Containers.
pub const KATA_ENABLED: &str = "nvsentinel.dgxc.nvidia.com/kata.enabled";
/// Annotation of NVSentinel's labeler: `true` once the node had [`DCGM_VERSION`].
pub const DCGM_BOOTSTRAPPED: &str = "nvsentinel.dgxc.nvidia.com/dcgm-bootstrap-completed";
/// Label of Kata Containers on a node that runs them.
pub const KATA_RUNTIME: &str = "katacontainers.io/kata-runtime";

/// Driver of GPUs that are assigned by dynamic resource allocation.
pub const GPU_DRIVER: &str = "gpu.nvidia.com";
/// Driver of `ComputeDomain`s, whose pods on several machines share the memory of their GPUs,
/// as named by `kubernetes-sigs/dra-driver-nvidia-gpu`. A pod of a domain holds a device
/// `channel-N` of this driver.
pub const COMPUTE_DOMAIN_DRIVER: &str = "compute-domain.nvidia.com";
/// Prefix of the device of this driver held by a pod that runs IMEX itself.
pub const COMPUTE_DOMAIN_DAEMON: &str = "daemon";

/// Annotation of a pod: its GPUs, as `{"devices":{"nvidia.com/gpu":["GPU-..."]}}`.
pub const POD_DEVICES: &str = "dgxc.nvidia.com/devices";
/// Key in [`POD_DEVICES`] that lists GPUs.
pub const RESOURCE_GPU: &str = "nvidia.com/gpu";
/// Key in [`POD_DEVICES`] that lists GPUs given to a virtual machine as a whole.
pub const RESOURCE_PGPU: &str = "nvidia.com/pgpu";

/// Node condition that sums up all checks: `True` if no fatal fault is open.
pub const CONDITION_GPU_HEALTHY: &str = "GPUHealthy";
/// Condition of Kubernetes (KEP-5683): pods are leaving the node. Set and reset by the program
/// that drains.
pub const CONDITION_DRAIN_IN_PROGRESS: &str = "DrainInProgress";
/// Condition of Kubernetes (KEP-5683): all pods that must leave the node have left. Likewise.
pub const CONDITION_DRAINED: &str = "Drained";
/// Condition that AKS sets while an event of the node's virtual machine is scheduled.
pub const CONDITION_VM_EVENT: &str = "VMEventScheduled";
/// Reason that identifies gpuwarden as the author of these two conditions.
pub const REASON_DRAIN: &str = "GpuwardenDrain";
/// Suffix after the name of a check: reason of its node condition and its Events while it has
/// findings.
pub const REASON_NOT_HEALTHY: &str = "IsNotHealthy";
/// Suffix after the name of a check: reason of its node condition while it has none.
pub const REASON_HEALTHY: &str = "IsHealthy";
/// Message of a node condition whose check has no findings.
pub const NO_HEALTH_FAILURES: &str = "No Health Failures";

/// `ConfigMap` of NVSentinel's circuit breaker, in the product's namespace.
pub const BREAKER_CONFIG_MAP: &str = "circuit-breaker";
/// Key in [`BREAKER_CONFIG_MAP`]: [`BREAKER_CLOSED`] or [`BREAKER_TRIPPED`].
pub const BREAKER_STATUS: &str = "status";
/// Value of [`BREAKER_STATUS`]: new quarantines proceed.
pub const BREAKER_CLOSED: &str = "CLOSED";
/// Value of [`BREAKER_STATUS`]: new quarantines are held back.
pub const BREAKER_TRIPPED: &str = "TRIPPED";
/// Key in [`BREAKER_CONFIG_MAP`]: [`CURSOR_RESUME`] or [`CURSOR_CREATE`].
pub const BREAKER_CURSOR: &str = "cursor";
/// Value of [`BREAKER_CURSOR`]: accumulated events count.
pub const CURSOR_RESUME: &str = "RESUME";
/// Value of [`BREAKER_CURSOR`]: accumulated events are dropped, once.
pub const CURSOR_CREATE: &str = "CREATE";
/// Annotation of gpuwarden on [`BREAKER_CONFIG_MAP`]: time when the breaker tripped (RFC 3339).
pub const TRIPPED_AT: &str = "gpuwarden.dev/tripped-at";
/// Annotation of gpuwarden on [`BREAKER_CONFIG_MAP`]: time when a person last closed the
/// breaker.
pub const RESET_AT: &str = "gpuwarden.dev/reset-at";
/// Annotation of gpuwarden on [`BREAKER_CONFIG_MAP`]: time when accumulated events were last
/// dropped.
pub const DROPPED_AT: &str = "gpuwarden.dev/dropped-at";
/// `ConfigMap` of gpuwarden, in the product's namespace.
pub const CONFIG_MAP: &str = "gpuwarden";
/// Key in [`CONFIG_MAP`]: a pause of new quarantines, as JSON.
pub const PAUSE: &str = "pause";
/// Key in [`CONFIG_MAP`]: marks of GPUs that a controller with another store takes over, as JSON.
pub const GPU_MARKS: &str = "gpu-marks";
/// Default namespace of the product.
pub const NAMESPACE: &str = "gpuwarden";
/// Label selector of GPU nodes, as the GPU operator labels them.
pub const GPU_NODE_LABEL: &str = "nvidia.com/gpu.present=true";
/// Labels of the rack of a node: the usual one, and Topograph's of the first switch.
pub const RACK_LABELS: [&str; 2] = [
    "topology.kubernetes.io/rack",
    "network.topology.nvidia.com/leaf",
];
/// Labels of the NVLink domain of a node: the GPU Operator's, and Topograph's.
pub const NVLINK_DOMAIN_LABELS: [&str; 2] = [
    "nvidia.com/gpu.clique",
    "network.topology.nvidia.com/accelerator",
];
/// Topograph's label of the switches above those of the racks.
pub const SPINE_LABEL: &str = "network.topology.nvidia.com/spine";
/// Label of the zone of a node.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
