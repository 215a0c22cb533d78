//! Arguments of the store, the policy and the cluster, for `run` and `controller`.

use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::roles::group;

group! {
    /// Store, policy and cluster.
    pub(crate) struct ActArgs {
        /// File that changes events before they are stored: `NVSentinel`'s config.json, which names
        /// the files of its transformers [default: none].
        #[arg(long, env = "GPUWARDEN_CONNECTOR_CONFIG", value_name = "FILE")]
        pub connector_config: Option<PathBuf>,
        /// Age limit of events; only those of open faults stay longer [default: 30d].
        #[arg(
            long,
            env = "GPUWARDEN_RETENTION",
            value_name = "DURATION",
            // A negative duration gets the error of the setting instead of clap's.
            allow_hyphen_values = true
        )]
        pub retention: Option<String>,
        /// Largest size of the event store; beyond it the oldest events are deleted [default: 1GiB].
        #[arg(long, env = "GPUWARDEN_STORE_SIZE", value_name = "SIZE")]
        pub store_size: Option<String>,
        /// Kubeconfig of the cluster [default: in a pod its own service account, else none].
        #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
        pub kubeconfig: Option<PathBuf>,
        /// Context of the kubeconfig [default: its current one].
        #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
        pub context: Option<String>,
        /// Only record and show faults: the default.
        #[arg(long, env = "GPUWARDEN_OBSERVE", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL", conflicts_with = "quarantine")]
        pub observe: Option<bool>,
        /// Take nodes with faults out of service, and return them.
        #[arg(long, env = "GPUWARDEN_QUARANTINE", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub quarantine: Option<bool>,
        /// With --quarantine: drain the pods of nodes that are out of service.
        #[arg(long, env = "GPUWARDEN_DRAIN", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub drain: Option<bool>,
        /// File that says how the pods of each namespace leave: `NVSentinel`'s for its node drainer,
        /// in TOML [default: each pod is waited for until it has ended].
        #[arg(long, env = "GPUWARDEN_DRAIN_CONFIG", value_name = "FILE")]
        pub drain_config: Option<PathBuf>,
        /// With --drain: remediate drained nodes, by custom resources that a janitor carries out.
        #[arg(long, env = "GPUWARDEN_REMEDIATE", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub remediate: Option<bool>,
        /// File that names the custom resource of each action: `NVSentinel`'s for its fault
        /// remediation, in TOML [default: reboots, and replacement for an event that recommends it].
        #[arg(long, env = "GPUWARDEN_REMEDIATE_CONFIG", value_name = "FILE")]
        pub remediate_config: Option<PathBuf>,
        /// Carry out custom resources such as `RebootNode`.
        #[arg(long, env = "GPUWARDEN_JANITOR", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub janitor: Option<bool>,
        /// File that names the providers of the janitor: `NVSentinel`'s, in YAML.
        #[arg(long, env = "GPUWARDEN_JANITOR_CONFIG", value_name = "FILE")]
        pub janitor_config: Option<PathBuf>,
        /// Time until finished resources are deleted; 0s: never [default: 336h].
        #[arg(long, env = "GPUWARDEN_JANITOR_TTL", value_name = "DURATION")]
        pub janitor_ttl: Option<String>,
        /// With --janitor: file of the tests that a `ValidationRequest` may name: `NVSentinel`'s for
        /// its lifecycle manager, in YAML.
        #[arg(long, env = "GPUWARDEN_VALIDATION_CONFIG", value_name = "FILE")]
        pub validation_config: Option<PathBuf>,
        /// File of the monitor of announced maintenance, which reads the notices of clouds on the nodes:
        /// `NVSentinel`'s for its CSP health monitor, in TOML [default: notices are not read].
        #[arg(long, env = "GPUWARDEN_MAINTENANCE", value_name = "FILE")]
        pub maintenance: Option<PathBuf>,
        /// With --quarantine: decide and show, but write nothing in the cluster.
        #[arg(long, env = "GPUWARDEN_DRY_RUN", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub dry_run: Option<bool>,
        /// Report fatal faults as conditions of their nodes [default: true with --quarantine].
        #[arg(long, env = "GPUWARDEN_NODE_CONDITIONS", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub node_conditions: Option<bool>,
        /// Add a condition that summarises the others: `GPUHealthy` [default: true].
        #[arg(long, env = "GPUWARDEN_GPU_HEALTHY", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub gpu_healthy: Option<bool>,
        /// Report faults that are not fatal as Kubernetes Events [default: true with --quarantine].
        #[arg(long, env = "GPUWARDEN_NODE_EVENTS", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub node_events: Option<bool>,
        /// Type of these Events: warning (Normal for a recovery), or check (the name of the check, as
        /// in `NVSentinel`) [default: warning].
        #[arg(long, env = "GPUWARDEN_NODE_EVENT_TYPE", value_name = "warning|check")]
        pub node_event_type: Option<String>,
        /// Policy: rule sets in TOML, in a file or a `ConfigMap` of the cluster (both are read again
        /// when they change), or a built-in one [default: quarantine for an event that is fatal or
        /// recommends `REPLACE_VM`; default key of a `ConfigMap`: config.toml].
        #[arg(long, env = "GPUWARDEN_POLICY",
              value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]|preset:NAME")]
        pub policy: Option<String>,
        /// Conclude from many events by rules, such as that a fault comes back again and again
        /// [default: true].
        #[arg(long, env = "GPUWARDEN_ANALYZE", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub analyze: Option<bool>,
        /// Rules of the analysis beside the built-in ones, or changes to those: TOML in a file or a
        /// `ConfigMap` of the cluster; both are read again when they change [default: none; default
        /// key of a `ConfigMap`: config.toml].
        #[arg(long, env = "GPUWARDEN_RULES", value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]")]
        pub rules: Option<String>,
        /// Limit the number of nodes that are taken out of service, by the budgets and the circuit
        /// breaker of the policy [default: true].
        #[arg(long, alias = "circuit-breaker-enabled", env = "GPUWARDEN_CIRCUIT_BREAKER",
              num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
        #[serde(alias = "circuit-breaker-enabled")]
        pub circuit_breaker: Option<bool>,
        /// Label of GPU nodes; limits in percent are of their number
        /// [default: nvidia.com/gpu.present=true].
        #[arg(long, env = "GPUWARDEN_GPU_NODE_LABEL", value_name = "KEY=VALUE")]
        pub gpu_node_label: Option<String>,
        /// Namespace of gpuwarden's own objects: the `ConfigMaps` of the circuit breaker and of
        /// pauses, and a controller's Lease [default: the pod's own, else gpuwarden].
        #[arg(long, env = "GPUWARDEN_NAMESPACE", value_name = "NAME")]
        pub namespace: Option<String>,
    }
}
