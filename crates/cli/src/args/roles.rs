//! The arguments of `run`, `agent` and `controller`, in groups that they share.
//!
//! Each is also an environment variable and a key of the configuration file; a flag has
//! precedence over the environment, and that over the file.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

/// Defines a group of settings, each an argument for clap and a key of the file.
macro_rules! group {
    (
        $(#[$about:meta])*
        pub struct $group:ident {
            $($(#[$help:meta])* pub $name:ident: Option<$type:ty>,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Args, Clone, Debug, Default, Deserialize)]
        #[serde(rename_all = "kebab-case", default)]
        pub struct $group {
            $($(#[$help])* pub $name: Option<$type>,)*
        }

        impl $group {
            /// Takes from `lower` what is not set here.
            pub(crate) fn fill(&mut self, lower: Self) {
                $(self.$name = self.$name.take().or(lower.$name);)*
            }
        }
    };
}

/// Arguments of `run`.
#[derive(Args, Clone, Debug, Default)]
pub struct RunArgs {
    /// Configuration file (TOML; the keys are the long names of these flags).
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The node.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Its GPUs.
    #[command(flatten)]
    pub gpu: GpuArgs,
    /// The Device API.
    #[command(flatten)]
    pub devices: DeviceArgs,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
    /// The cluster.
    #[command(flatten)]
    pub act: ActArgs,
}

/// Arguments of `agent`.
#[derive(Args, Clone, Debug, Default)]
pub struct AgentArgs {
    /// Configuration file (TOML; the keys are the long names of these flags).
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The controller.
    #[command(flatten)]
    pub delivery: DeliveryArgs,
    /// The node.
    #[command(flatten)]
    pub node: NodeArgs,
    /// Its GPUs.
    #[command(flatten)]
    pub gpu: GpuArgs,
    /// The Device API.
    #[command(flatten)]
    pub devices: DeviceArgs,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// Arguments of `controller`.
#[derive(Args, Clone, Debug, Default)]
pub struct ControllerArgs {
    /// Configuration file (TOML; the keys are the long names of these flags).
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The agents.
    #[command(flatten)]
    pub ingest: IngestArgs,
    /// The other controllers.
    #[command(flatten)]
    pub election: ElectionArgs,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
    /// The cluster.
    #[command(flatten)]
    pub act: ActArgs,
}

group! {
    /// The election of the controller that acts.
    pub struct ElectionArgs {
        /// Act only while this process leads: it holds the Lease gpuwarden-controller in the
        /// namespace of --namespace, and stands by while another does [default: where it
        /// writes in the cluster].
        #[arg(long, env = "GPUWARDEN_LEADER_ELECT", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub leader_elect: Option<bool>,
    }
}

group! {
    /// The sources of a node's side, and who may report to it.
    pub struct NodeArgs {
        /// Name of this node in the cluster [default: `NODE_NAME`, else the host name in lower
        /// case, as the kubelet takes it].
        #[arg(long, env = "GPUWARDEN_NODE_NAME", value_name = "NAME")]
        pub node_name: Option<String>,
        /// Unix socket on which monitors report [default: /var/run/nvsentinel.sock as root with
        /// the default data directory, else gpuwarden.sock in the data directory].
        #[arg(long, env = "GPUWARDEN_SOCKET", value_name = "PATH")]
        pub socket: Option<PathBuf>,
        /// Permission bits of the socket's file, octal. With the default every user may report,
        /// as checks in users' pods do; 600 lets in root and gpuwarden's own user only, 660 also
        /// its group [default: 666].
        #[arg(long, env = "GPUWARDEN_SOCKET_MODE", value_name = "OCTAL")]
        pub socket_mode: Option<String>,
        /// For which nodes processes on this machine may report over the socket: own or any
        /// [default: own].
        #[arg(long, env = "GPUWARDEN_ACCEPT_NODES", value_name = "own|any")]
        pub accept_nodes: Option<String>,
        /// The kernel log to read: kmsg (the running kernel's log), journal (that of systemd, or
        /// journal:DIRECTORY), auto (kmsg if it may be read, else journal), a file to follow, or -
        /// for standard input [default: auto].
        #[arg(long, env = "GPUWARDEN_KERNEL_LOG", value_name = "auto|kmsg|journal|FILE|-")]
        pub kernel_log: Option<String>,
        /// On a first start, older lines are shown but open no fault [default: 15m].
        #[arg(long, env = "GPUWARDEN_HISTORY", value_name = "DURATION")]
        pub history: Option<String>,
        /// Leave out records that programs wrote into the kernel's log; without it they count,
        /// and are marked.
        #[arg(long, env = "GPUWARDEN_REFUSE_USER_SPACE", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub refuse_user_space: Option<bool>,
        /// File that describes the GPUs to the monitors of this machine: written from what the
        /// driver says, unless somebody else has written it; read where the driver says nothing
        /// [default: `/var/lib/nvsentinel/gpu_metadata.json`].
        #[arg(long, env = "GPUWARDEN_GPU_METADATA", value_name = "FILE")]
        pub gpu_metadata: Option<PathBuf>,
        /// Socket on which the kubelet says which pods have which GPUs; where there is none, nothing
        /// is said [default: /var/lib/kubelet/pod-resources/kubelet.sock].
        #[arg(long, env = "GPUWARDEN_POD_RESOURCES", value_name = "PATH")]
        pub pod_resources: Option<PathBuf>,
        /// File of changes to the fault catalogue (TOML); may be given several times, in the
        /// environment with commas between them.
        #[arg(long, env = "GPUWARDEN_CATALOG", value_name = "FILE", value_delimiter = ',')]
        #[serde(deserialize_with = "one_or_several")]
        pub catalog: Option<Vec<PathBuf>>,
    }
}

group! {
    /// The GPUs of a node.
    pub struct GpuArgs {
        /// Watch the GPUs by the driver's library (NVML). Where there is none it is waited for
        /// [default: true].
        #[arg(long, env = "GPUWARDEN_ENABLE_NVML_PROVIDER", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub enable_nvml_provider: Option<bool>,
        /// Root directory of the driver, as seen from here; where the library is not below it, the
        /// system's is taken [default: /run/nvidia/driver].
        #[arg(long, env = "GPUWARDEN_NVML_DRIVER_ROOT", value_name = "DIRECTORY")]
        pub nvml_driver_root: Option<PathBuf>,
        /// XIDs that leave a GPU's condition `NVMLReady` alone, beside 13, 31, 43, 45, 68 and 109.
        #[arg(long, env = "GPUWARDEN_NVML_IGNORED_XIDS", value_name = "XID", value_delimiter = ',')]
        pub nvml_ignored_xids: Option<Vec<u32>>,
        /// Time between two looks at the GPUs: a duration, or a number of seconds [default: 5].
        #[arg(long, env = "GPUWARDEN_NVML_HEALTH_INTERVAL", value_name = "DURATION")]
        pub nvml_health_interval: Option<String>,
        /// Time after which a call of the driver counts as hanging; loaded drivers are slow
        /// [default: 60s].
        #[arg(long, env = "GPUWARDEN_NVML_DEADLINE", value_name = "DURATION")]
        pub nvml_deadline: Option<String>,
        /// Number of GPUs that this node has; where fewer are seen, that is a fault [default: not
        /// known].
        #[arg(long, env = "GPUWARDEN_EXPECTED_GPUS", value_name = "NUMBER")]
        pub expected_gpus: Option<u32>,
        /// Host engine of DCGM that is asked beside the driver, such as localhost or
        /// nvidia-dcgm.gpu-operator.svc:5555; needs DCGM's library (libdcgm.so) here [default: none].
        #[arg(long, env = "GPUWARDEN_DCGM_ADDR", value_name = "HOST[:PORT]")]
        pub dcgm_addr: Option<String>,
        /// For trying out: GPUs that are not there, so many healthy ones or those of a scenario
        /// file.
        #[arg(long, env = "GPUWARDEN_FAKE_GPUS", value_name = "NUMBER|FILE")]
        pub fake_gpus: Option<String>,
    }
}

group! {
    /// The Device API of a node, and the gate of its jobs.
    pub struct DeviceArgs {
        /// Unix socket on which consumers read how the GPUs of this machine do [default:
        /// /var/run/device-api/device.sock as root with the default data directory, else
        /// device-api.sock in the data directory].
        #[arg(long, env = "GPUWARDEN_DEVICE_API", value_name = "PATH")]
        pub device_api: Option<PathBuf>,
        /// The users who may write conditions of GPUs there: operators (root and gpuwarden's own
        /// user, not in a container of their own) or any, which is whoever may open the socket
        /// [default: operators].
        #[arg(long, env = "GPUWARDEN_DEVICE_API_PROVIDERS", value_name = "operators|any")]
        pub device_api_providers: Option<String>,
        /// Address on which it is read over TCP: with TLS by whoever has a certificate, without on
        /// a loopback address only [default: none].
        #[arg(long, env = "GPUWARDEN_DEVICE_API_LISTEN", value_name = "ADDRESS:PORT",
              value_parser = address)]
        pub device_api_listen: Option<SocketAddr>,
        /// Certificate for that, PEM.
        #[arg(long, env = "GPUWARDEN_DEVICE_API_TLS_CERT", value_name = "FILE")]
        pub device_api_tls_cert: Option<PathBuf>,
        /// Its key.
        #[arg(long, env = "GPUWARDEN_DEVICE_API_TLS_KEY", value_name = "FILE")]
        pub device_api_tls_key: Option<PathBuf>,
        /// Authority of those who may read there.
        #[arg(long, env = "GPUWARDEN_DEVICE_API_CLIENT_CA", value_name = "FILE")]
        pub device_api_client_ca: Option<PathBuf>,
        /// Unix socket on which launchers of training jobs ask whether this node is fit
        /// (`nvhcd.HealthCheckService`) [default: none].
        #[arg(long, env = "GPUWARDEN_JOB_GATE", value_name = "PATH")]
        pub job_gate: Option<PathBuf>,
    }
}

pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    let hint = "write ADDRESS:PORT, such as 127.0.0.1:2112; names of hosts are not looked up";
    text.parse().map_err(|error| format!("{error}; {hint}"))
}

fn one_or_several<'de, D>(deserializer: D) -> Result<Option<Vec<PathBuf>>, D::Error>
where
    D: serde::Deserializer<'de>,
{
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Files {
        One(PathBuf),
        Several(Vec<PathBuf>),
    }
    Ok(Some(match Files::deserialize(deserializer)? {
        Files::One(file) => vec![file],
        Files::Several(files) => files,
    }))
}

group! {
    /// The arguments of every process.
    pub struct ProcessArgs {
        /// The directory of events and state [default: /var/lib/gpuwarden as root, else
        /// ~/.local/state/gpuwarden].
        #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY")]
        pub data_dir: Option<PathBuf>,
        /// Address of the status page, API and metrics [default: 127.0.0.1:2112].
        #[arg(long, env = "GPUWARDEN_LISTEN", value_name = "ADDRESS:PORT", value_parser = address)]
        pub listen: Option<SocketAddr>,
        /// The log filter: error, warn, info, debug, trace, also by crate [default: info].
        #[arg(long, env = "GPUWARDEN_LOG", value_name = "FILTER")]
        pub log: Option<String>,
        /// The format of log lines [default: text].
        #[arg(long, env = "GPUWARDEN_LOG_FORMAT", value_name = "text|json")]
        pub log_format: Option<String>,
    }
}

group! {
    /// The store, the policy and the cluster.
    pub struct ActArgs {
        /// The file that says what is done to events before they are stored: `NVSentinel`'s
        /// config.json, which names the files of its transformers [default: nothing].
        #[arg(long, env = "GPUWARDEN_CONNECTOR_CONFIG", value_name = "FILE")]
        pub connector_config: Option<PathBuf>,
        /// The time for which events are kept; those of open faults stay [default: 30d].
        #[arg(
            long,
            env = "GPUWARDEN_RETENTION",
            value_name = "DURATION",
            // A negative one gets the error of the setting.
            allow_hyphen_values = true
        )]
        pub retention: Option<String>,
        /// Room that the event store may take; beyond it the oldest events go [default: 1GiB].
        #[arg(long, env = "GPUWARDEN_STORE_SIZE", value_name = "SIZE")]
        pub store_size: Option<String>,
        /// Kubeconfig of the cluster [default: that of the pod, where this is one].
        #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
        pub kubeconfig: Option<PathBuf>,
        /// Context of the kubeconfig [default: its current one].
        #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
        pub context: Option<String>,
        /// Record and show only: the default.
        #[arg(long, env = "GPUWARDEN_OBSERVE", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL", conflicts_with = "quarantine")]
        pub observe: Option<bool>,
        /// Take nodes with faults out of service, and give them back.
        #[arg(long, env = "GPUWARDEN_QUARANTINE", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub quarantine: Option<bool>,
        /// Beside --quarantine: have the pods of nodes leave that are out of service.
        #[arg(long, env = "GPUWARDEN_DRAIN", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub drain: Option<bool>,
        /// The file that says how the pods of each namespace leave: `NVSentinel`'s for its node
        /// drainer, in TOML [default: each is waited for until it has ended].
        #[arg(long, env = "GPUWARDEN_DRAIN_CONFIG", value_name = "FILE")]
        pub drain_config: Option<PathBuf>,
        /// Beside --drain: have nodes repaired that are drained, by custom resources that a janitor
        /// carries out.
        #[arg(long, env = "GPUWARDEN_REMEDIATE", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub remediate: Option<bool>,
        /// The file that says which custom resource each action makes: `NVSentinel`'s for its fault
        /// remediation, in TOML [default: reboots, and replacement where an event asks for it].
        #[arg(long, env = "GPUWARDEN_REMEDIATE_CONFIG", value_name = "FILE")]
        pub remediate_config: Option<PathBuf>,
        /// Carry out what custom resources ask for, such as `RebootNode`.
        #[arg(long, env = "GPUWARDEN_JANITOR", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub janitor: Option<bool>,
        /// The file that says by which providers: `NVSentinel`'s for its janitor, in YAML.
        #[arg(long, env = "GPUWARDEN_JANITOR_CONFIG", value_name = "FILE")]
        pub janitor_config: Option<PathBuf>,
        /// Time for which these resources are kept after their end; 0s: for ever [default: 336h].
        #[arg(long, env = "GPUWARDEN_JANITOR_TTL", value_name = "DURATION")]
        pub janitor_ttl: Option<String>,
        /// Beside --janitor: the file that says which tests of nodes a `ValidationRequest` may ask for:
        /// `NVSentinel`'s for its lifecycle manager, in YAML.
        #[arg(long, env = "GPUWARDEN_VALIDATION_CONFIG", value_name = "FILE")]
        pub validation_config: Option<PathBuf>,
        /// Beside an acting switch: decide and show, but write nothing in the cluster.
        #[arg(long, env = "GPUWARDEN_DRY_RUN", num_args = 0..=1, default_missing_value = "true",
              value_name = "BOOL")]
        pub dry_run: Option<bool>,
        /// Show fatal faults as conditions of their nodes [default: where it acts].
        #[arg(long, env = "GPUWARDEN_NODE_CONDITIONS", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub node_conditions: Option<bool>,
        /// With the conditions of checks, one that sums them up: `GPUHealthy` [default: true].
        #[arg(long, env = "GPUWARDEN_GPU_HEALTHY", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub gpu_healthy: Option<bool>,
        /// Show faults that are not fatal as Kubernetes Events [default: where it acts].
        #[arg(long, env = "GPUWARDEN_NODE_EVENTS", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub node_events: Option<bool>,
        /// Type of these Events: warning (Normal for a recovery), or check, the name of the
        /// check, as `NVSentinel` has it [default: warning].
        #[arg(long, env = "GPUWARDEN_NODE_EVENT_TYPE", value_name = "warning|check")]
        pub node_event_type: Option<String>,
        /// Policy: rule sets in TOML, in a file, in a `ConfigMap` of the cluster (both are read
        /// again when they change), or one that is built in [default: a fatal event or one that
        /// asks for `REPLACE_VM` quarantines; default key of a `ConfigMap`: config.toml].
        #[arg(long, env = "GPUWARDEN_POLICY",
              value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]|preset:NAME")]
        pub policy: Option<String>,
        /// Limit how many nodes are taken out of service: the budgets and the circuit breaker of
        /// the policy [default: true].
        #[arg(long, alias = "circuit-breaker-enabled", env = "GPUWARDEN_CIRCUIT_BREAKER",
              num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
        #[serde(alias = "circuit-breaker-enabled")]
        pub circuit_breaker: Option<bool>,
        /// Label of GPU nodes, of whose number the limits' percentages are
        /// [default: nvidia.com/gpu.present=true].
        #[arg(long, env = "GPUWARDEN_GPU_NODE_LABEL", value_name = "KEY=VALUE")]
        pub gpu_node_label: Option<String>,
        /// Namespace of gpuwarden's own objects: the `ConfigMaps` of the circuit breaker and of
        /// pauses, and a controller's Lease [default: the pod's own, else gpuwarden].
        #[arg(long, env = "GPUWARDEN_NAMESPACE", value_name = "NAME")]
        pub namespace: Option<String>,
    }
}

group! {
    /// The way from a node to its controller.
    pub struct DeliveryArgs {
        /// Address of the controller, such as `https://controller.example:50051`.
        #[arg(long, env = "GPUWARDEN_CONTROLLER", value_name = "URL")]
        pub controller: Option<String>,
        /// Certificates of the authority that the controller is trusted by (PEM).
        #[arg(long, env = "GPUWARDEN_TLS_CA", value_name = "FILE")]
        pub tls_ca: Option<PathBuf>,
        /// Certificate that says which node this is (PEM); read again when it changes.
        #[arg(long, env = "GPUWARDEN_TLS_CERT", value_name = "FILE")]
        pub tls_cert: Option<PathBuf>,
        /// Key of the certificate (PEM).
        #[arg(long, env = "GPUWARDEN_TLS_KEY", value_name = "FILE")]
        pub tls_key: Option<PathBuf>,
        /// `ServiceAccount` token that says which node this is, instead of a certificate; read
        /// for every request.
        #[arg(long, env = "GPUWARDEN_TOKEN_FILE", value_name = "FILE")]
        pub token_file: Option<PathBuf>,
        /// Room that events may take while they wait for the controller [default: 64MiB].
        #[arg(long, env = "GPUWARDEN_OUTBOX_SIZE", value_name = "SIZE")]
        pub outbox_size: Option<String>,
    }
}

group! {
    /// A controller's port for events.
    pub struct IngestArgs {
        /// Address on which agents and central monitors report [default: 0.0.0.0:50051; with
        /// --grpc-insecure 127.0.0.1:50051].
        #[arg(long, env = "GPUWARDEN_GRPC_LISTEN", value_name = "ADDRESS:PORT",
              value_parser = address)]
        pub grpc_listen: Option<SocketAddr>,
        /// Certificate of that address (PEM); read again when it changes.
        #[arg(long, env = "GPUWARDEN_GRPC_TLS_CERT", value_name = "FILE")]
        pub grpc_tls_cert: Option<PathBuf>,
        /// Key of the certificate (PEM).
        #[arg(long, env = "GPUWARDEN_GRPC_TLS_KEY", value_name = "FILE")]
        pub grpc_tls_key: Option<PathBuf>,
        /// Certificates of the authority that nodes' certificates are checked by (PEM). A
        /// certificate speaks for the node in its common name `system:node:NAME`, or in its
        /// only DNS name.
        #[arg(long, env = "GPUWARDEN_GRPC_CLIENT_CA", value_name = "FILE")]
        pub grpc_client_ca: Option<PathBuf>,
        /// No TLS, and nobody is asked for a name: on this machine only, for trying out.
        #[arg(long, env = "GPUWARDEN_GRPC_INSECURE", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub grpc_insecure: Option<bool>,
        /// The audience that `ServiceAccount` tokens have to be made for [default: gpuwarden].
        #[arg(long, env = "GPUWARDEN_TOKEN_AUDIENCE", value_name = "AUDIENCE")]
        pub token_audience: Option<String>,
        /// `ServiceAccount`s whose pods speak for the node that they run on [default:
        /// gpuwarden-agent in the namespace of --namespace].
        #[arg(long, env = "GPUWARDEN_AGENTS", value_name = "NAMESPACE/NAME", value_delimiter = ',')]
        pub agents: Option<Vec<String>>,
        /// `ServiceAccount`s that speak for any node, such as monitors of clouds [default: none].
        #[arg(long, env = "GPUWARDEN_CENTRAL_MONITORS", value_name = "NAMESPACE/NAME",
              value_delimiter = ',')]
        pub central_monitors: Option<Vec<String>>,
    }
}
