//! Arguments of a node's side of `run` and `agent`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::common::address;
use super::roles::group;

group! {
    /// Sources of events on a node, and the users who may report to it.
    pub(crate) struct NodeArgs {
        /// Name of this node in the cluster [default: `NODE_NAME`, else the host name in lower
        /// case, as the kubelet takes it].
        #[arg(long, env = "GPUWARDEN_NODE_NAME", value_name = "NAME")]
        pub node_name: Option<String>,
        /// Unix socket for the reports of monitors [default: /var/run/nvsentinel.sock as root with
        /// the default data directory, else gpuwarden.sock in the data directory].
        #[arg(long, env = "GPUWARDEN_SOCKET", value_name = "PATH")]
        pub socket: Option<PathBuf>,
        /// Permission bits of the socket's file, octal. With 666 every user may report, as checks in
        /// users' pods do; 600 admits root and gpuwarden's own user only, 660 also its group
        /// [default: 666].
        #[arg(long, env = "GPUWARDEN_SOCKET_MODE", value_name = "OCTAL")]
        pub socket_mode: Option<String>,
        /// Nodes that processes on this machine may report for over the socket: own or any
        /// [default: own].
        #[arg(long, env = "GPUWARDEN_ACCEPT_NODES", value_name = "own|any")]
        pub accept_nodes: Option<String>,
        /// Kernel log to read: kmsg (the running kernel's log), journal (that of systemd, or
        /// journal:DIRECTORY), auto (kmsg if it can be read, else journal), a file to follow, or - for
        /// standard input [default: auto].
        #[arg(long, env = "GPUWARDEN_KERNEL_LOG", value_name = "auto|kmsg|journal|FILE|-")]
        pub kernel_log: Option<String>,
        /// Age beyond which lines of the kernel log are shown on a first start but open no fault
        /// [default: 15m].
        #[arg(long, env = "GPUWARDEN_HISTORY", value_name = "DURATION")]
        pub history: Option<String>,
        /// Ignore records that programs wrote into the kernel's log; otherwise they count, and are
        /// marked.
        #[arg(long, env = "GPUWARDEN_REFUSE_USER_SPACE", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub refuse_user_space: Option<bool>,
        /// File that describes the GPUs to the monitors of this machine. gpuwarden writes it with the
        /// driver's data, unless another program has written it, and reads it without a driver
        /// [default: `/var/lib/nvsentinel/gpu_metadata.json`].
        #[arg(long, env = "GPUWARDEN_GPU_METADATA", value_name = "FILE")]
        pub gpu_metadata: Option<PathBuf>,
        /// Socket of the kubelet's pod resources, which lists the GPUs of pods; it may be missing
        /// [default: /var/lib/kubelet/pod-resources/kubelet.sock].
        #[arg(long, env = "GPUWARDEN_POD_RESOURCES", value_name = "PATH")]
        pub pod_resources: Option<PathBuf>,
        /// Cloud whose metadata service on this machine announces maintenance: aws, azure or gcp; the
        /// controller needs --maintenance [default: the service is not asked].
        #[arg(long, env = "GPUWARDEN_METADATA_SERVICE", value_name = "aws|azure|gcp")]
        pub metadata_service: Option<String>,
        /// File of changes to the fault catalogue (TOML); may be given several times, in the
        /// environment separated by commas.
        #[arg(long, env = "GPUWARDEN_CATALOG", value_name = "FILE", value_delimiter = ',')]
        #[serde(deserialize_with = "one_or_several")]
        pub catalog: Option<Vec<PathBuf>>,
    }
}

group! {
    /// GPUs of a node.
    pub(crate) struct GpuArgs {
        /// Watch the GPUs through the driver's library (NVML). gpuwarden waits for a missing library
        /// [default: true].
        #[arg(long, env = "GPUWARDEN_ENABLE_NVML_PROVIDER", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub enable_nvml_provider: Option<bool>,
        /// Root directory of the driver, as this process sees it; without the library below it, the
        /// system's library is used [default: /run/nvidia/driver].
        #[arg(long, env = "GPUWARDEN_NVML_DRIVER_ROOT", value_name = "DIRECTORY")]
        pub nvml_driver_root: Option<PathBuf>,
        /// XIDs that do not change a GPU's condition `NVMLReady`, beside 13, 31, 43, 45, 68 and 109.
        #[arg(long, env = "GPUWARDEN_NVML_IGNORED_XIDS", value_name = "XID", value_delimiter = ',')]
        pub nvml_ignored_xids: Option<Vec<u32>>,
        /// Time between two readings of the GPUs: a duration, or a number of seconds [default: 5].
        #[arg(long, env = "GPUWARDEN_NVML_HEALTH_INTERVAL", value_name = "DURATION")]
        pub nvml_health_interval: Option<String>,
        /// Time after which a call of the driver counts as hanging; drivers under load are slow
        /// [default: 60s].
        #[arg(long, env = "GPUWARDEN_NVML_DEADLINE", value_name = "DURATION")]
        pub nvml_deadline: Option<String>,
        /// Number of GPUs of this node; fewer are a fault [default: unknown].
        #[arg(long, env = "GPUWARDEN_EXPECTED_GPUS", value_name = "NUMBER")]
        pub expected_gpus: Option<u32>,
        /// Host engine of DCGM to read beside the driver, such as localhost or
        /// nvidia-dcgm.gpu-operator.svc:5555; needs DCGM's library (libdcgm.so) on this machine
        /// [default: none].
        #[arg(long, env = "GPUWARDEN_DCGM_ADDR", value_name = "HOST[:PORT]")]
        pub dcgm_addr: Option<String>,
        /// Fake GPUs for tests: a number of healthy ones, or those of a scenario file.
        #[arg(long, env = "GPUWARDEN_FAKE_GPUS", value_name = "NUMBER|FILE")]
        pub fake_gpus: Option<String>,
    }
}

group! {
    /// Device API of a node, and the gate of its jobs.
    pub(crate) struct DeviceArgs {
        /// Unix socket of the Device API, on which consumers read the state of the GPUs [default:
        /// /var/run/device-api/device.sock as root with the default data directory, else
        /// device-api.sock in the data directory].
        #[arg(long, env = "GPUWARDEN_DEVICE_API", value_name = "PATH")]
        pub device_api: Option<PathBuf>,
        /// Users who may write conditions of GPUs to the Device API: operators (root and gpuwarden's
        /// own user, not in a container of their own) or any user who may open the socket
        /// [default: operators].
        #[arg(long, env = "GPUWARDEN_DEVICE_API_PROVIDERS", value_name = "operators|any")]
        pub device_api_providers: Option<String>,
        /// Address for reading the Device API over TCP: with TLS for clients with a certificate,
        /// without TLS on a loopback address only [default: none].
        #[arg(long, env = "GPUWARDEN_DEVICE_API_LISTEN", value_name = "ADDRESS:PORT",
              value_parser = address)]
        pub device_api_listen: Option<SocketAddr>,
        /// Certificate for that address (PEM).
        #[arg(long, env = "GPUWARDEN_DEVICE_API_TLS_CERT", value_name = "FILE")]
        pub device_api_tls_cert: Option<PathBuf>,
        /// Key of that certificate (PEM).
        #[arg(long, env = "GPUWARDEN_DEVICE_API_TLS_KEY", value_name = "FILE")]
        pub device_api_tls_key: Option<PathBuf>,
        /// Certificates of the authority of clients that may read there (PEM).
        #[arg(long, env = "GPUWARDEN_DEVICE_API_CLIENT_CA", value_name = "FILE")]
        pub device_api_client_ca: Option<PathBuf>,
        /// Unix socket for launchers of training jobs, which ask whether this node is fit
        /// (`nvhcd.HealthCheckService`) [default: none].
        #[arg(long, env = "GPUWARDEN_JOB_GATE", value_name = "PATH")]
        pub job_gate: Option<PathBuf>,
    }
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
