//! Names that gpuwarden writes on, or reads from, Kubernetes nodes, and the names
//! of agents and checks on the wire.
//!
//! Keys without `gpuwarden.dev/` are NVSentinel's: other tools read them.

/// The beginning of the names of agents that are preflight checks of pods.
pub const PREFLIGHT_AGENTS: &str = "preflight-";

/// Annotation: JSON array of the events for which a node is quarantined.
pub const QUARANTINE_HEALTH_EVENT: &str = "quarantineHealthEvent";
/// Annotation: JSON array of the taints that the quarantine asked for.
pub const QUARANTINE_APPLIED_TAINTS: &str = "quarantineHealthEventAppliedTaints";
/// Annotation: `True` where the quarantine asked for a cordon.
pub const QUARANTINE_IS_CORDONED: &str = "quarantineHealthEventIsCordoned";
/// Annotation: `True` where the node was cordoned before the quarantine; it stays so afterwards.
pub const QUARANTINE_CORDON_PRE_EXISTING: &str = "quarantineHealthEventCordonPreExisting";
/// Annotation: `True` after somebody uncordoned a quarantined node by hand.
pub const UNCORDONED_MANUALLY: &str = "quarantinedNodeUncordonedManually";
/// Annotation: `True` after somebody removed a quarantine taint by hand.
pub const UNTAINTED_MANUALLY: &str = "quarantinedNodeUntaintedManually";
/// Value of the `True` annotations above.
pub const TRUE: &str = "True";

/// Label (behind the configured prefix): who cordoned.
pub const CORDON_BY: &str = "cordon-by";
/// Label (behind the configured prefix): the rule sets that asked for it.
pub const CORDON_REASON: &str = "cordon-reason";
/// Label (behind the configured prefix): when, as `2006-01-02T15-04-05Z`.
pub const CORDON_TIMESTAMP: &str = "cordon-timestamp";
/// Value of [`CORDON_BY`] unless an override names somebody else. The name that
/// existing dashboards and scripts select on.
pub const CORDONED_BY_VALUE: &str = "NVSentinel";

/// Label: where a node stands between fault and return.
pub const STATE_LABEL: &str = "dgxc.nvidia.com/nvsentinel-state";
/// Value of [`STATE_LABEL`] from the quarantine on, until draining starts.
pub const STATE_QUARANTINED: &str = "quarantined";
/// Value of [`STATE_LABEL`] while pods leave the node.
pub const STATE_DRAINING: &str = "draining";
/// Value of [`STATE_LABEL`] once all pods that are to leave have left.
pub const STATE_DRAINED: &str = "drain-succeeded";

/// Value of [`STATE_LABEL`] while the node is repaired.
pub const STATE_REMEDIATING: &str = "remediating";
/// Value of [`STATE_LABEL`] once a repair has succeeded, until its faults are over.
pub const STATE_REMEDIATED: &str = "remediation-succeeded";
/// Value of [`STATE_LABEL`] while a person is asked to repair the node.
pub const STATE_REMEDIATION_FAILED: &str = "remediation-failed";
/// Annotation: the repairs of a quarantined node, as JSON by group.
pub const REMEDIATION_STATE: &str = "latestFaultRemediationState";
/// Annotation of our own on a node that was validated before it began: its uid.
pub const ADMITTED: &str = "gpuwarden.dev/admitted";
/// Taint of our own with which nodes may be registered that are to be validated before they begin.
pub const NOT_VALIDATED: &str = "gpuwarden.dev/not-validated";
/// Annotation of our own on the custom resource of a repair: the attempt for which it was made.
pub const ATTEMPT: &str = "gpuwarden.dev/attempt";

/// Annotation of a node: the last power cycle that its BMC was asked for (JSON), written before it is asked.
pub const POWER_CYCLE: &str = "gpuwarden.dev/power-cycle";
/// Annotation of our own on a pod, by its owner: it asks for the time to write a checkpoint before it is
/// evicted, at most this long (`10m`).
pub const CHECKPOINT: &str = "gpuwarden.dev/checkpoint";
/// Annotation of our own on such a pod: when it was told to write one.
pub const CHECKPOINT_REQUESTED: &str = "gpuwarden.dev/checkpoint-requested";
/// Annotation of such a pod, by its workload: the value of [`CHECKPOINT_REQUESTED`] once it is written.
pub const CHECKPOINT_DONE: &str = "gpuwarden.dev/checkpoint-done";

/// Label with which an operator takes a node out of gpuwarden's hands (value `false`).
pub const MANAGED_LABEL: &str = "k8saas.nvidia.com/ManagedByNVSentinel";

/// Annotation of our own: the quarantine session and what it replaced, as JSON.
pub const SESSION: &str = "gpuwarden.dev/session";
/// Annotation of our own: when a person ended the last session, RFC 3339.
/// Events older than this never act.
pub const RELEASED_AT: &str = "gpuwarden.dev/released-at";

/// Annotation of our own: the name of the policy that holds for this node.
pub const POLICY: &str = "gpuwarden.dev/policy";
/// Annotation of our own: an operator's request to give the node back, as JSON.
pub const RELEASE: &str = "gpuwarden.dev/release";
/// Annotation of our own: a person holds back the next drain or repair of the node for a while, as JSON.
pub const VETO: &str = "gpuwarden.dev/veto";

/// Label of objects of ours, Kubernetes' own, with [`MANAGED_BY`] as its value.
pub const MANAGED_BY_LABEL: &str = "app.kubernetes.io/managed-by";
/// Value of [`MANAGED_BY_LABEL`].
pub const MANAGED_BY: &str = "gpuwarden";
/// Annotation of our own on a `DeviceTaintRule`: the node that its device is of.
pub const RULE_NODE: &str = "gpuwarden.dev/node";
/// Annotation of our own on a `DeviceTaintRule`: UUID, or else PCI address, of the GPU.
pub const RULE_GPU: &str = "gpuwarden.dev/gpu";
/// Annotation of our own on a `DeviceTaintRule`: the kind of gpuwarden that made it, `controller`
/// or `node`.
pub const RULE_BY: &str = "gpuwarden.dev/by";
/// Annotation of our own on a `DeviceTaintRule`: id of the store of a node's own gpuwarden.
pub const RULE_STORE: &str = "gpuwarden.dev/store";

/// Lease of the controllers, in the namespace of the product: who holds it acts.
pub const LEASE: &str = "gpuwarden-controller";

/// Annotation of our own on the Lease: the id of the event store that is, or was last, acted
/// on. Who leads with another one begins with no open faults.
pub const LEASE_STORE: &str = "gpuwarden.dev/store";

/// Annotation of the data-flow document: `true` while the node is quarantined.
pub const SEED_QUARANTINED: &str = "nvsentinel.nvidia.com/quarantined";
/// Annotation of the data-flow document: the check for which it is quarantined.
pub const SEED_QUARANTINE_REASON: &str = "nvsentinel.nvidia.com/quarantine-reason";
/// Annotation of the data-flow document: since when, RFC 3339 in seconds.
pub const SEED_QUARANTINE_TIMESTAMP: &str = "nvsentinel.nvidia.com/quarantine-timestamp";
/// Taint of the data-flow document, with the check as value.
pub const UNHEALTHY_TAINT: &str = "nvsentinel.nvidia.com/unhealthy";

/// Label (behind the configured prefix): who uncordoned.
pub const UNCORDON_BY: &str = "uncordon-by";
/// Label (behind the configured prefix): the reason of the cordon, with `-removed` behind it.
pub const UNCORDON_REASON: &str = "uncordon-reason";
/// Label (behind the configured prefix): when, as `2006-01-02T15-04-05Z`.
pub const UNCORDON_TIMESTAMP: &str = "uncordon-timestamp";

/// Label of the GPU Operator: how far the upgrade of the node's driver is.
pub const DRIVER_UPGRADE_STATE: &str = "nvidia.com/gpu-driver-upgrade-state";
/// Values of [`DRIVER_UPGRADE_STATE`] where none is under way.
pub const DRIVER_UPGRADE_ENDED: [&str; 3] = ["", "upgrade-done", "upgrade-failed"];

/// Label: `false` while a node is handed over to an external system for its repair.
pub const HANDED_OVER_LABEL: &str = "nvsentinel.dgxc.nvidia.com/managed";
/// Taint: beside it, with the name of the `ExternalRemediationRequest` as value.
pub const HANDED_OVER_TAINT: &str = "nvsentinel.dgxc.nvidia.com/external-remediation";
/// Annotation of our own: the request for which a node is handed over, and what the label was before, as JSON.
pub const HANDED_OVER: &str = "gpuwarden.dev/handed-over";
/// Annotation of our own: the labels of services that a reset of GPUs has changed, and what they were, as JSON.
pub const RESET_STOPPED: &str = "gpuwarden.dev/gpu-reset";

/// Driver of GPUs that are given by dynamic resource allocation.
pub const GPU_DRIVER: &str = "gpu.nvidia.com";
/// Driver of `ComputeDomain`s, in which pods of several machines share the memory of their GPUs, as
/// `kubernetes-sigs/dra-driver-nvidia-gpu` names it. A pod that does holds a device `channel-N` of it.
pub const COMPUTE_DOMAIN_DRIVER: &str = "compute-domain.nvidia.com";
/// Beginning of the name of its device that a pod holds in which it runs IMEX itself.
pub const COMPUTE_DOMAIN_DAEMON: &str = "daemon";

/// Annotation of a pod: the GPUs that it has, as `{"devices":{"nvidia.com/gpu":["GPU-..."]}}`.
pub const POD_DEVICES: &str = "dgxc.nvidia.com/devices";
/// Name in it under which GPUs are listed.
pub const RESOURCE_GPU: &str = "nvidia.com/gpu";
/// Name in it under which GPUs are listed that were given to a virtual machine as a whole.
pub const RESOURCE_PGPU: &str = "nvidia.com/pgpu";

/// Node condition that sums all checks up: `True` where no fatal fault is open.
pub const CONDITION_GPU_HEALTHY: &str = "GPUHealthy";
/// Condition: pods are leaving the node. Kubernetes' own (KEP-5683), set and taken back by whoever drains.
pub const CONDITION_DRAIN_IN_PROGRESS: &str = "DrainInProgress";
/// Condition: the pods that were to leave the node have left. Likewise.
pub const CONDITION_DRAINED: &str = "Drained";
/// Reason of these two, by which ours are known.
pub const REASON_DRAIN: &str = "GpuwardenDrain";
/// Behind the name of a check: reason of its node condition, and of its Events, when it has
/// found something.
pub const REASON_NOT_HEALTHY: &str = "IsNotHealthy";
/// Behind the name of a check: reason of its node condition when it is well.
pub const REASON_HEALTHY: &str = "IsHealthy";
/// Message of a node condition of a check that is well.
pub const NO_HEALTH_FAILURES: &str = "No Health Failures";

/// `ConfigMap` of NVSentinel's circuit breaker, in the namespace of the product.
pub const BREAKER_CONFIG_MAP: &str = "circuit-breaker";
/// Key in its data: [`BREAKER_CLOSED`] or [`BREAKER_TRIPPED`].
pub const BREAKER_STATUS: &str = "status";
/// New quarantines go on.
pub const BREAKER_CLOSED: &str = "CLOSED";
/// New quarantines are held back.
pub const BREAKER_TRIPPED: &str = "TRIPPED";
/// Key in its data: [`CURSOR_RESUME`] or [`CURSOR_CREATE`].
pub const BREAKER_CURSOR: &str = "cursor";
/// The word by which what has accumulated counts.
pub const CURSOR_RESUME: &str = "RESUME";
/// The word by which what has accumulated is dropped, once.
pub const CURSOR_CREATE: &str = "CREATE";
/// Annotation of our own on it: when it was tripped, RFC 3339.
pub const TRIPPED_AT: &str = "gpuwarden.dev/tripped-at";
/// Annotation of our own on it: when a person last closed it.
pub const RESET_AT: &str = "gpuwarden.dev/reset-at";
/// Annotation of our own on it: when what had accumulated was last dropped.
pub const DROPPED_AT: &str = "gpuwarden.dev/dropped-at";
/// `ConfigMap` of our own, in the namespace of the product.
pub const CONFIG_MAP: &str = "gpuwarden";
/// Key in its data: a pause of new quarantines, as JSON.
pub const PAUSE: &str = "pause";
/// Namespace of the product where nothing else is said.
pub const NAMESPACE: &str = "gpuwarden";
/// Label that GPU nodes carry, as the GPU operator writes it.
pub const GPU_NODE_LABEL: &str = "nvidia.com/gpu.present=true";

/// Agent of all events read from the kernel log.
pub const SYSLOG_AGENT: &str = "syslog-health-monitor";
/// Check of XID lines.
pub const CHECK_XID: &str = "SysLogsXIDError";
/// Check of SXID lines of switches.
pub const CHECK_SXID: &str = "SysLogsSXIDError";
/// Check of lines of drivers of network cards.
pub const CHECK_NIC_DRIVER: &str = "SysLogsNICDriverError";
/// Check of "GPU has fallen off the bus" lines that carry no XID.
pub const CHECK_GPU_FALLEN_OFF: &str = "SysLogsGPUFallenOff";
/// Code of [`CHECK_GPU_FALLEN_OFF`] events.
pub const CODE_GPU_FALLEN_OFF: &str = "GPU_FALLEN_OFF_BUS";
/// Check of GPUs that the driver cannot start.
pub const CHECK_GPU_INIT: &str = "SysLogsGPUInitFailed";
/// Code of [`CHECK_GPU_INIT`] events.
pub const CODE_GPU_INIT_FAILED: &str = "GPU_INIT_FAILED";
/// Code of [`CHECK_XID`] events about a reset that failed.
pub const CODE_GPU_RESET_FAILURE: &str = "GPU_RESET_FAILURE";

/// Agent of all events about what the driver tells of its GPUs.
pub const GPU_AGENT: &str = "gpu-health-monitor";
/// Check of a GPU's PCIe link, and of whether the GPU is there.
pub const CHECK_GPU_PCIE: &str = "GpuPcieWatch";
/// Check of a GPU's memory.
pub const CHECK_GPU_MEMORY: &str = "GpuMemWatch";
/// Check of whether heat slows a GPU down.
pub const CHECK_GPU_THERMAL: &str = "GpuThermalWatch";
/// Check of how far a GPU is from where heat slows it down.
pub const CHECK_GPU_THERMAL_MARGIN: &str = "GpuThermalMarginWatch";
/// Check of a GPU's power.
pub const CHECK_GPU_POWER: &str = "GpuPowerWatch";
/// Check of what the driver asks for to mend a GPU.
pub const CHECK_GPU_DRIVER: &str = "GpuDriverWatch";
/// Check of a GPU's NVLinks and of the fabric that they make.
pub const CHECK_GPU_NVLINK: &str = "GpuNvlinkWatch";
/// Check of how many GPUs a machine has. Our own.
pub const CHECK_GPU_COUNT: &str = "GpuCountWatch";

/// Check of a GPU's power management unit, by DCGM.
pub const CHECK_GPU_PMU: &str = "GpuPmuWatch";
/// Check of a GPU's microcontroller, by DCGM.
pub const CHECK_GPU_MCU: &str = "GpuMcuWatch";
/// Check of a GPU's multiprocessors, by DCGM.
pub const CHECK_GPU_SM: &str = "GpuSmWatch";
/// Check of a GPU's `InfoROM`, by DCGM.
pub const CHECK_GPU_INFOROM: &str = "GpuInforomWatch";
/// Check of errors of a switch that stop nothing, by DCGM.
pub const CHECK_NVSWITCH_NON_FATAL: &str = "GpuNvswitchNonfatalWatch";
/// Check of errors of a switch that stop work, by DCGM.
pub const CHECK_NVSWITCH_FATAL: &str = "GpuNvswitchFatalWatch";
/// Check of the service by which machines share the memory of their GPUs (IMEX), by DCGM.
pub const CHECK_GPU_IMEX: &str = "GpuImexWatch";
/// Check of incidents of a watch of DCGM that has no name here.
pub const CHECK_GPU_ALL: &str = "GpuAllWatch";
/// Check of whether DCGM answers.
pub const CHECK_DCGM_CONNECTIVITY: &str = "GpuDcgmConnectivityFailure";
/// Code of [`CHECK_DCGM_CONNECTIVITY`] events.
pub const CODE_DCGM_CONNECTIVITY: &str = "DCGM_CONNECTIVITY_ERROR";

/// Component class of GPUs.
pub const COMPONENT_GPU: &str = "GPU";
/// Component class of network cards.
pub const COMPONENT_NIC: &str = "NIC";

/// Entity type: GPU by its PCI address without function, `0000:b3:00`.
pub const ENTITY_PCI: &str = "PCI";
/// Entity type: GPU by its UUID, `GPU-...`.
pub const ENTITY_GPU_UUID: &str = "GPU_UUID";
/// Entity type: GPU by its index.
pub const ENTITY_GPU: &str = "GPU";
/// Entity type: PCI vendor and device, `10de:2330`.
pub const ENTITY_PCI_ID: &str = "PCI_ID";
/// Entity type: `NVSwitch` by its number.
pub const ENTITY_NVSWITCH: &str = "NVSWITCH";
/// Entity type: an `NVLink` of a device by its number.
pub const ENTITY_NVLINK: &str = "NVLINK";
/// Entity type: NIC by its RDMA device, `mlx5_0`, else by what is known of it.
pub const ENTITY_NIC: &str = "NIC";

/// Beginning of the metadata keys that are ours: what others write there is taken off.
pub const OWN_PREFIX: &str = "gpuwarden.dev/";
/// Metadata: who reported the event, as the connector has seen it: `monitor`, `operator
/// uid=0 pid=7`, `user uid=1000 pid=7`, `node` or `central NAME`.
pub const META_REPORTED_BY: &str = "gpuwarden.dev/reported-by";
/// Metadata: the message was cut to the size limit; the value is its full length in bytes.
pub const META_MESSAGE_CUT: &str = "gpuwarden.dev/message-cut";
/// Metadata: the sender gave no timestamp; ours is the time of receipt.
pub const META_TIME_OF_RECEIPT: &str = "gpuwarden.dev/time-of-receipt";
/// Metadata: the time in the future that the sender gave, RFC 3339; ours is the time of receipt.
pub const META_FUTURE_TIME: &str = "gpuwarden.dev/future-time";
/// Metadata on the way from a monitor of ours to the connector, and from a node to the
/// controller, only: when the monitor saw what it reports last, or the node's connector accepted
/// the event, RFC 3339, by its clock. It is taken off there.
pub const META_ACCEPTED_AT: &str = "gpuwarden.dev/accepted-at";
/// gRPC metadata of a request from a node to the controller: what the node's clock says, RFC
/// 3339, when it is sent. With it [`META_ACCEPTED_AT`] tells how old an event is.
pub const HEADER_SENT_AT: &str = "gpuwarden-sent-at";
/// Metadata: boot id of the kernel that printed the line.
pub const META_BOOT_ID: &str = "gpuwarden.dev/boot-id";
/// Metadata: sequence number of the kernel log record.
pub const META_KERNEL_SEQUENCE: &str = "gpuwarden.dev/kernel-sequence";
/// Metadata: where in a log file the line stands, as `device:inode:generation:offset`,
/// the offset being that of the line's end; the generation changes when the file is truncated.
/// Of an entry of the journal: `journal:time:hash`, the monotonic time and the hash of its
/// cursor in hexadecimal.
pub const META_LOG_PLACE: &str = "gpuwarden.dev/log-place";
/// Metadata: the line was written by a program, not by the kernel itself.
pub const META_FROM_USER_SPACE: &str = "gpuwarden.dev/from-user-space";
/// Metadata: the line is older than the monitor's history at its first start; opens no fault.
pub const META_EARLIER_IN_BOOT: &str = "gpuwarden.dev/earlier-in-boot";
/// Metadata, on a healthy event: the reason is a reboot; it closes what a reboot heals.
pub const META_REBOOT: &str = "gpuwarden.dev/reboot";
/// Metadata, on a healthy event: the machine that the faults were of is gone. It closes those of
/// which no report was accepted after this time, RFC 3339: what is newer is of another machine.
pub const META_GONE_AFTER: &str = "gpuwarden.dev/gone-after";
/// Metadata: how many reports the event stands for, as decimal digits; the two below come
/// with it. An event without them stands for one.
pub const META_COUNT: &str = "count";
/// Metadata: when the first of the reports was made, RFC 3339.
pub const META_FIRST_SEEN: &str = "first_seen";
/// Metadata: when the last of the reports was made, RFC 3339.
pub const META_LAST_SEEN: &str = "last_seen";
/// Metadata: the rule of the connector's overrides that has changed the event.
pub const META_OVERRIDDEN_BY: &str = "gpuwarden.dev/overridden-by";
/// Metadata: the id of the event that this one repeats, for which it was kept from the
/// reactions.
pub const META_REPEAT_OF: &str = "gpuwarden.dev/repeat-of";
/// Metadata: UUID of the GPU.
pub const META_GPU_UUID: &str = "gpu_uuid";
/// Metadata: index by which the driver's tools number the GPU.
pub const META_GPU_INDEX: &str = "gpu_index";
/// Metadata: version of the NVIDIA driver.
pub const META_DRIVER_VERSION: &str = "driver_version";
/// Metadata: serial number of the chassis. NVSentinel's key.
pub const META_CHASSIS_SERIAL: &str = "chassis_serial";
/// Metadata: DCGM's own word for how grave a code of it is, such as `ISOLATE`.
pub const META_SEVERITY: &str = "severity";
/// Metadata: the sources that see the fault, where DCGM is one: `DCGM`, or `NVML, DCGM`.
pub const META_WITNESSES: &str = "gpuwarden.dev/witnesses";
/// Metadata: what the catalogue recommends where the event says something else.
pub const META_CATALOGUE_ACTION: &str = "gpuwarden.dev/catalogue-action";
/// Metadata: the XID that ended the fault of this healthy event. NVSentinel's key.
pub const META_CANCELLED_BY: &str = "nvsentinel.nvidia.com/cancel-source-error-code";
/// Metadata: what happened, for people, as the monitor read it from the line.
pub const META_MEANING: &str = "gpuwarden.dev/meaning";
/// Metadata: what the verdict rests on, where it is not simply the catalogue's row of the code.
pub const META_VERDICT: &str = "gpuwarden.dev/verdict";
/// Metadata: what the driver dumped of its requests to the GPU's system processor (GSP).
pub const META_RPC_HISTORY: &str = "gpuwarden.dev/rpc-history";
/// Metadata: number of the GPU instance that is meant, on a GPU under MIG.
pub const META_GPU_INSTANCE: &str = "gpuwarden.dev/gpu-instance";
/// Metadata: number of the compute instance in it.
pub const META_COMPUTE_INSTANCE: &str = "gpuwarden.dev/compute-instance";
/// Metadata: the event was taken over from what a quarantined node lists; the store did not
/// have it, or had it from before another store was acted on.
pub const META_TAKEN_OVER: &str = "gpuwarden.dev/taken-over";
/// Metadata: made by `gpuwarden inject`.
pub const META_INJECTED: &str = "gpuwarden.dev/injected";
