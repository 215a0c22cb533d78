//! The settings of a process, and of a node's side.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clouds::metadata::Provider;
use connector::AcceptNodes;
use host::kernel_log::KernelLogSpec;
use jiff::SignedDuration;
use runtime::logging::LogFormat;

use super::amount::{self, choice};
use super::gpu::GpuSettings;
use super::node_name::node_name;
use super::{DEFAULT_PORT, SettingsError, default_data_dir, is_root};
use crate::args::{GpuArgs, NodeArgs, ProcessArgs};

/// Socket for the reports of NVSentinel's monitors.
const CONTRACT_SOCKET: &str = "/var/run/nvsentinel.sock";
/// File that NVSentinel's metadata collector writes.
const GPU_METADATA: &str = "/var/lib/nvsentinel/gpu_metadata.json";
const POD_RESOURCES: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";
/// Default mode of the socket: any user may report, since preflight checks run as the pod's user.
const SOCKET_MODE: &str = "666";
/// Older lines of the kernel log open no fault on a first start.
const HISTORY: &str = "15m";

/// Settings of every process.
#[derive(Debug, Clone)]
pub struct ProcessSettings {
    /// Directory of events and state.
    pub data_dir: PathBuf,
    /// True if clients find that directory without a flag.
    pub data_dir_is_default: bool,
    /// Address of the status page, API and metrics.
    pub listen: SocketAddr,
    pub log: String,
    pub log_format: LogFormat,
}

/// Settings of a node's side: its sources of events, and the users who may report to it.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    pub node_name: String,
    /// Unix socket of the connector.
    pub socket: PathBuf,
    /// Permission bits of the socket's file.
    pub socket_mode: u32,
    /// Nodes that processes on this machine may report for.
    pub accept_nodes: AcceptNodes,
    pub kernel_log: KernelLogSpec,
    /// On a first start, lines of the kernel log that are older open no fault.
    pub history: SignedDuration,
    /// True if records that programs wrote into the kernel's log are ignored.
    pub refuse_user_space: bool,
    /// File that describes the GPUs to other monitors, and to gpuwarden's own without a driver.
    pub gpu_metadata: PathBuf,
    /// Socket of the kubelet, which lists the GPUs of pods.
    pub pod_resources: PathBuf,
    /// Cloud whose metadata service announces maintenance; `None`: the service is not asked.
    pub metadata_service: Option<Provider>,
    /// Files of changes to the fault catalogue; a later file has precedence.
    pub catalog: Vec<PathBuf>,
    pub gpu: GpuSettings,
}

/// Returns the cloud of `--metadata-service`.
fn metadata_service(name: Option<&str>) -> Result<Option<Provider>, SettingsError> {
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        return Ok(None);
    };
    let found = Provider::ALL.into_iter().find(|one| one.name() == name);
    found.map(Some).ok_or_else(|| {
        let known = Provider::ALL.map(Provider::name).join(", ");
        SettingsError::value("--metadata-service", name, format!("is none of {known}"))
    })
}

/// Returns the log format of `--log-format`.
pub(super) fn log_format(name: Option<&str>) -> Result<LogFormat, SettingsError> {
    let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
    choice("--log-format", name, formats)
}

// === impl ProcessSettings ===

impl ProcessSettings {
    pub(super) fn resolve(args: ProcessArgs) -> Result<Self, SettingsError> {
        let log_format = log_format(args.log_format.as_deref())?;
        let data_dir_is_default = args.data_dir.is_none();
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT));
        Ok(Self {
            data_dir: args.data_dir.map_or_else(default_data_dir, Ok)?,
            data_dir_is_default,
            listen: args.listen.unwrap_or(loopback),
            log: args.log.unwrap_or_else(|| "info".to_owned()),
            log_format,
        })
    }
}

// === impl NodeSettings ===

impl NodeSettings {
    pub(super) fn resolve(
        args: NodeArgs,
        gpu: GpuArgs,
        process: &ProcessSettings,
    ) -> Result<Self, SettingsError> {
        let socket = args.socket.unwrap_or_else(|| {
            if is_root() && process.data_dir_is_default {
                PathBuf::from(CONTRACT_SOCKET)
            } else {
                process.data_dir.join("gpuwarden.sock")
            }
        });
        let kernel_log = args.kernel_log.unwrap_or_else(|| "auto".to_owned());
        let kernel_log = kernel_log.parse().map_err(|error| {
            SettingsError::value("--kernel-log", &kernel_log, format!("{error}"))
        })?;
        let node_name = node_name(args.node_name)?;
        let accepted = [
            ("own", AcceptNodes::Own(node_name.clone())),
            ("any", AcceptNodes::Any),
        ];
        let accept_nodes = choice("--accept-nodes", args.accept_nodes.as_deref(), accepted)?;
        let socket_mode = args.socket_mode.as_deref().unwrap_or(SOCKET_MODE);
        let history = args.history.as_deref().unwrap_or(HISTORY);
        Ok(Self {
            node_name,
            socket,
            socket_mode: amount::mode("--socket-mode", socket_mode)?,
            accept_nodes,
            kernel_log,
            history: amount::duration("--history", history)?,
            refuse_user_space: args.refuse_user_space.unwrap_or(false),
            gpu_metadata: args
                .gpu_metadata
                .unwrap_or_else(|| PathBuf::from(GPU_METADATA)),
            pod_resources: args
                .pod_resources
                .unwrap_or_else(|| PathBuf::from(POD_RESOURCES)),
            metadata_service: metadata_service(args.metadata_service.as_deref())?,
            catalog: args.catalog.unwrap_or_default(),
            gpu: GpuSettings::resolve(gpu)?,
        })
    }
}
