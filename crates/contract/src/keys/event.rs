//! Names inside events: agents, checks, codes, entities and metadata.
//!
//! Keys without `gpuwarden.dev/` are NVSentinel's: other tools read them.

/// Prefix of the names of agents that are preflight checks of pods.
pub const PREFLIGHT_AGENTS: &str = "preflight-";

/// Agent of all events read from the kernel log.
pub const SYSLOG_AGENT: &str = "syslog-health-monitor";
/// Check of XID lines.
pub const CHECK_XID: &str = "SysLogsXIDError";
/// Check of SXID lines of switches.
pub const CHECK_SXID: &str = "SysLogsSXIDError";
/// Check of lines of network card drivers.
pub const CHECK_NIC_DRIVER: &str = "SysLogsNICDriverError";
/// Check of "GPU has fallen off the bus" lines that carry no XID.
pub const CHECK_GPU_FALLEN_OFF: &str = "SysLogsGPUFallenOff";
/// Code of [`CHECK_GPU_FALLEN_OFF`] events.
pub const CODE_GPU_FALLEN_OFF: &str = "GPU_FALLEN_OFF_BUS";
/// Check of GPUs that the driver cannot start.
pub const CHECK_GPU_INIT: &str = "SysLogsGPUInitFailed";
/// Code of [`CHECK_GPU_INIT`] events.
pub const CODE_GPU_INIT_FAILED: &str = "GPU_INIT_FAILED";
/// Code of [`CHECK_XID`] events about a failed reset.
pub const CODE_GPU_RESET_FAILURE: &str = "GPU_RESET_FAILURE";

/// Agent of all events about the state of GPUs as reported by the driver.
pub const GPU_AGENT: &str = "gpu-health-monitor";
/// Check of a GPU's PCIe link and of its presence.
pub const CHECK_GPU_PCIE: &str = "GpuPcieWatch";
/// Check of a GPU's memory.
pub const CHECK_GPU_MEMORY: &str = "GpuMemWatch";
/// Check for thermal throttling of a GPU.
pub const CHECK_GPU_THERMAL: &str = "GpuThermalWatch";
/// Check of the margin between a GPU's temperature and the start of throttling.
pub const CHECK_GPU_THERMAL_MARGIN: &str = "GpuThermalMarginWatch";
/// Check of a GPU's power supply.
pub const CHECK_GPU_POWER: &str = "GpuPowerWatch";
/// Check for recovery actions that the driver requests for a GPU.
pub const CHECK_GPU_DRIVER: &str = "GpuDriverWatch";
/// Check of a GPU's NVLinks and their fabric.
pub const CHECK_GPU_NVLINK: &str = "GpuNvlinkWatch";
/// Check of the number of GPUs in a machine, added by gpuwarden.
pub const CHECK_GPU_COUNT: &str = "GpuCountWatch";
/// Check of the healthy events that name the GPUs of a machine, added by gpuwarden. Opens and
/// closes no fault.
pub const CHECK_GPU_INVENTORY: &str = "GpuInventory";
/// Code of a GPU that does not answer beside others that do, of [`CHECK_GPU_PCIE`].
pub const CODE_GPU_LOST: &str = "DCGM_FR_FALLEN_OFF_BUS";

/// Check of a person's marks of GPUs in the ledger.
pub const CHECK_LEDGER_MARK: &str = "GpuLedgerMark";
/// Check of a GPU that was marked as bad and is in use again.
pub const CHECK_KNOWN_BAD_GPU: &str = "KnownBadGPU";

/// Check of a GPU's power management unit, by DCGM.
pub const CHECK_GPU_PMU: &str = "GpuPmuWatch";
/// Check of a GPU's microcontroller, by DCGM.
pub const CHECK_GPU_MCU: &str = "GpuMcuWatch";
/// Check of a GPU's multiprocessors, by DCGM.
pub const CHECK_GPU_SM: &str = "GpuSmWatch";
/// Check of a GPU's `InfoROM`, by DCGM.
pub const CHECK_GPU_INFOROM: &str = "GpuInforomWatch";
/// Check for switch errors that do not interrupt work, by DCGM.
pub const CHECK_NVSWITCH_NON_FATAL: &str = "GpuNvswitchNonfatalWatch";
/// Check for switch errors that interrupt work, by DCGM.
pub const CHECK_NVSWITCH_FATAL: &str = "GpuNvswitchFatalWatch";
/// Check of the service that lets machines share GPU memory (IMEX), by DCGM.
pub const CHECK_GPU_IMEX: &str = "GpuImexWatch";
/// Check of incidents from a DCGM watch that has no name here.
pub const CHECK_GPU_ALL: &str = "GpuAllWatch";
/// Check of the connection to DCGM.
pub const CHECK_DCGM_CONNECTIVITY: &str = "GpuDcgmConnectivityFailure";
/// Code of [`CHECK_DCGM_CONNECTIVITY`] events.
pub const CODE_DCGM_CONNECTIVITY: &str = "DCGM_CONNECTIVITY_ERROR";

/// Agent of conclusions from many events, the same as NVSentinel's.
pub const ANALYZER_AGENT: &str = "health-events-analyzer";
/// Check of [`ANALYZER_AGENT`]: a fault is back after each of several repairs.
pub const CHECK_REPAIR_NOT_WORKING: &str = "RepairNotWorking";
/// Check of the healthy events by which gpuwarden records that a repair has succeeded.
pub const CHECK_REPAIRED: &str = "NodeRepaired";
/// Check of a cloud's maintenance, the same as NVSentinel's.
pub const CHECK_CSP_MAINTENANCE: &str = "CSPMaintenance";

/// Code of gpuwarden's event about a node that has failed its validation.
pub const CODE_VALIDATION_FAILED: &str = "VALIDATION_FAILED";

/// Component class of GPUs.
pub const COMPONENT_GPU: &str = "GPU";
/// Component class of network cards.
pub const COMPONENT_NIC: &str = "NIC";
/// Component class of a cloud's maintenance.
pub const COMPONENT_CSP: &str = "CSP";

/// Entity type: PCI address of a GPU without function, `0000:b3:00`.
pub const ENTITY_PCI: &str = "PCI";
/// Entity type: UUID of a GPU, `GPU-...`.
pub const ENTITY_GPU_UUID: &str = "GPU_UUID";
/// Entity type: index of a GPU.
pub const ENTITY_GPU: &str = "GPU";
/// Entity type: PCI vendor and device, `10de:2330`.
pub const ENTITY_PCI_ID: &str = "PCI_ID";
/// Entity type: number of an `NVSwitch`.
pub const ENTITY_NVSWITCH: &str = "NVSWITCH";
/// Entity type: number of a device's `NVLink`.
pub const ENTITY_NVLINK: &str = "NVLINK";
/// Entity type: RDMA device of a NIC, `mlx5_0`, or another identifier if that is unknown.
pub const ENTITY_NIC: &str = "NIC";

/// Prefix of metadata keys reserved for gpuwarden: values from other senders are removed.
pub const OWN_PREFIX: &str = "gpuwarden.dev/";
/// Metadata: reporter of the event as identified by the connector: `monitor`, `operator uid=0
/// pid=7`, `user uid=1000 pid=7`, `node` or `central NAME`.
pub const META_REPORTED_BY: &str = "gpuwarden.dev/reported-by";
/// Metadata: the message was cut to the size limit; the value is its full length in bytes.
pub const META_MESSAGE_CUT: &str = "gpuwarden.dev/message-cut";
/// Metadata: the sender gave no timestamp; the event's is the time of receipt.
pub const META_TIME_OF_RECEIPT: &str = "gpuwarden.dev/time-of-receipt";
/// Metadata: timestamp in the future that the sender gave (RFC 3339); the event's is the time
/// of receipt.
pub const META_FUTURE_TIME: &str = "gpuwarden.dev/future-time";
/// Metadata only on the way from a monitor of gpuwarden to the connector, and from a node to
/// the controller, where it is removed: time when the monitor last observed the reported state,
/// or when the node's connector accepted the event, by the sender's clock (RFC 3339).
pub const META_ACCEPTED_AT: &str = "gpuwarden.dev/accepted-at";
/// gRPC metadata of a request from a node to the controller: sending time by the node's clock
/// (RFC 3339). Together with [`META_ACCEPTED_AT`] it gives the age of an event.
pub const HEADER_SENT_AT: &str = "gpuwarden-sent-at";
/// Metadata of [`CHECK_CSP_MAINTENANCE`]: scheduled begin (RFC 3339).
pub const META_MAINTENANCE_START: &str = "maintenance_start";
/// Metadata of [`CHECK_CSP_MAINTENANCE`]: scheduled end (RFC 3339).
pub const META_MAINTENANCE_END: &str = "maintenance_end";
/// Metadata of [`CHECK_CSP_MAINTENANCE`]: `reboot`, `migration`, `replacement` or `stop`.
pub const META_MAINTENANCE_KIND: &str = "maintenance_kind";
/// Metadata of [`CHECK_CSP_MAINTENANCE`]: id of the record.
pub const META_MAINTENANCE_ID: &str = "maintenance_id";
/// Metadata: boot id of the kernel that printed the line.
pub const META_BOOT_ID: &str = "gpuwarden.dev/boot-id";
/// Metadata: sequence number of the kernel log record.
pub const META_KERNEL_SEQUENCE: &str = "gpuwarden.dev/kernel-sequence";
/// Metadata: position of the line. In a log file, `device:inode:generation:offset`, where the
/// offset is that of the line's end, and the generation changes when the file is truncated. In
/// the journal, `journal:time:hash`, the monotonic time and the hash of the entry's cursor, in
/// hexadecimal.
pub const META_LOG_PLACE: &str = "gpuwarden.dev/log-place";
/// Metadata: the line was written by a program, not by the kernel itself.
pub const META_FROM_USER_SPACE: &str = "gpuwarden.dev/from-user-space";
/// Metadata: the line is older than the monitor's history at its first start; opens no fault.
pub const META_EARLIER_IN_BOOT: &str = "gpuwarden.dev/earlier-in-boot";
/// Metadata of a healthy event: the reason is a reboot; the event closes faults that a reboot
/// remediates.
pub const META_REBOOT: &str = "gpuwarden.dev/reboot";
/// Metadata of a healthy event: the machine that had the faults is gone. The event closes
/// faults without a report accepted after this time (RFC 3339); later reports are about another
/// machine.
pub const META_GONE_AFTER: &str = "gpuwarden.dev/gone-after";
/// Metadata: number of reports that the event stands for, as decimal digits, together with
/// [`META_FIRST_SEEN`] and [`META_LAST_SEEN`]. An event without it stands for one report.
pub const META_COUNT: &str = "count";
/// Metadata: time of the first of the reports (RFC 3339).
pub const META_FIRST_SEEN: &str = "first_seen";
/// Metadata: time of the last of the reports (RFC 3339).
pub const META_LAST_SEEN: &str = "last_seen";
/// Metadata: rule of the connector's overrides that changed the event.
pub const META_OVERRIDDEN_BY: &str = "gpuwarden.dev/overridden-by";
/// Metadata: id of the event that this one repeats; the repetition causes no reaction.
pub const META_REPEAT_OF: &str = "gpuwarden.dev/repeat-of";
/// Metadata: UUID of the GPU.
pub const META_GPU_UUID: &str = "gpu_uuid";
/// Metadata: serial number of the GPU's board, added by gpuwarden.
pub const META_GPU_SERIAL: &str = "gpu_serial";
/// Metadata: index of the GPU in the driver's tools.
pub const META_GPU_INDEX: &str = "gpu_index";
/// Metadata: version of the NVIDIA driver.
pub const META_DRIVER_VERSION: &str = "driver_version";
/// Metadata: serial number of the chassis. Key of NVSentinel.
pub const META_CHASSIS_SERIAL: &str = "chassis_serial";
/// Metadata: cloud's id of the node, `spec.providerID`. Key of NVSentinel.
pub const META_PROVIDER_ID: &str = "providerID";
/// Metadata: severity that DCGM assigns to a code, such as `ISOLATE`.
pub const META_SEVERITY: &str = "severity";
/// Metadata: sources that detected the fault, if DCGM is among them: `DCGM`, or `NVML, DCGM`.
pub const META_WITNESSES: &str = "gpuwarden.dev/witnesses";
/// Metadata: action that the catalogue recommends, if the event's differs.
pub const META_CATALOGUE_ACTION: &str = "gpuwarden.dev/catalogue-action";
/// Metadata: XID that ended the fault of this healthy event. Key of NVSentinel.
pub const META_CANCELLED_BY: &str = "nvsentinel.nvidia.com/cancel-source-error-code";
/// Metadata: description for people, as derived from the line by the monitor.
pub const META_MEANING: &str = "gpuwarden.dev/meaning";
/// Metadata: basis of the verdict, if it is not simply the catalogue's row of the code.
pub const META_VERDICT: &str = "gpuwarden.dev/verdict";
/// Metadata: XID that the driver names as the cause of this one (`caused by previous Xid 149`).
pub const META_CAUSED_BY_XID: &str = "gpuwarden.dev/caused-by-xid";
/// Metadata: driver's dump of its requests to the GPU's system processor (GSP).
pub const META_RPC_HISTORY: &str = "gpuwarden.dev/rpc-history";
/// Metadata: number of the affected GPU instance, on a GPU in MIG mode.
pub const META_GPU_INSTANCE: &str = "gpuwarden.dev/gpu-instance";
/// Metadata: number of the compute instance within it.
pub const META_COMPUTE_INSTANCE: &str = "gpuwarden.dev/compute-instance";
/// Metadata: job that used the GPU when the line was written. `ml/train` is that of the pods
/// `train`, `train-7x2kp` and `train-0` in the namespace `ml`: numbers and the random end, which
/// differ between the pods of a job, are left out. `slurm 42` is a job of Slurm. Equal for all
/// reports of a job on a node, and mostly on all its nodes. Absent if the job is not certain.
pub const META_JOB: &str = "gpuwarden.dev/job";
/// Metadata: the event was restored from the list on a quarantined node; the store lacked it,
/// or had it only in its history from before another store was in use.
pub const META_TAKEN_OVER: &str = "gpuwarden.dev/taken-over";
/// Metadata of [`CHECK_REPAIRED`]: action of the repair, such as `RESTART_BM`.
pub const META_REPAIR: &str = "gpuwarden.dev/repair";
/// Metadata of [`CHECK_REPAIRED`]: key of the attempt, so that two repairs are two events.
pub const META_REPAIR_KEY: &str = "gpuwarden.dev/repair-attempt";
/// Metadata: id of the conclusion that the event of the analysis reports, or ends.
pub const META_CONCLUSION: &str = "gpuwarden.dev/conclusion";
/// Metadata of a conclusion: ids of the events that it rests on, separated by commas, oldest first.
pub const META_EVIDENCE: &str = "gpuwarden.dev/evidence";
/// Metadata of a conclusion: monitor and check of the fault that it is about.
pub const META_ANALYSED_CHECK: &str = "gpuwarden.dev/analysed-check";
/// Metadata of a [`CHECK_LEDGER_MARK`] event: `bad`, `rma` or `good`. A node's agent may not set
/// this key: the mark holds on all nodes.
pub const META_LEDGER_MARK: &str = "gpuwarden.dev/ledger-mark";
/// Metadata of such an event: name of the person who marked the GPU.
pub const META_LEDGER_BY: &str = "gpuwarden.dev/ledger-by";
/// Metadata: the event was created by `gpuwarden inject`.
pub const META_INJECTED: &str = "gpuwarden.dev/injected";
