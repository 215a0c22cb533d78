//! The groups of settings that the roles share, each checked and with its defaults.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use cluster::ConnectOptions;
use connector::{AcceptNodes, outbox};
use contract::{keys, names};
use controller::ingest::{ServiceAccount, TokenRules};
use controller::policy::PolicySource;
use fleet::brake::NodeLabel;
use fleet::drain::DrainConfig;
use fleet::remediation::RemediationConfig;
use host::kernel_log::Spec;
use jiff::SignedDuration;
pub use model::mode::Mode;
use runtime::logging::LogFormat;
use runtime::tls::CertificateFiles;

use super::gpu::GpuSettings;
use super::janitor::JanitorSettings;
use super::kubernetes::{connect_options, in_pod, namespace};
use super::node_name::node_name;
use super::reports::ReportSettings;
use super::{DEFAULT_PORT, SettingsError, amount, default_data_dir, is_root};
use crate::args::{ActArgs, DeliveryArgs, GpuArgs, IngestArgs, NodeArgs, ProcessArgs};
use crate::policy_source;

/// Socket on which monitors of NVSentinel report.
const CONTRACT_SOCKET: &str = "/var/run/nvsentinel.sock";
/// File that NVSentinel's metadata collector writes.
const POD_RESOURCES: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";
const GPU_METADATA: &str = "/var/lib/nvsentinel/gpu_metadata.json";
/// Long enough to look back on the last incident of a node.
const RETENTION: &str = "30d";
/// Any user may report: preflight checks run as the user's.
const SOCKET_MODE: &str = "666";
/// Least room of the event store (bytes), for tens of thousands of events: where there is less,
/// what has just happened is deleted by what comes next.
const SMALLEST_STORE: u64 = 64 * 1024 * 1024;
/// Shortest retention: `explain` has to reach back over the incident that is being looked at.
const SHORTEST_RETENTION: SignedDuration = SignedDuration::from_hours(1);
/// Hundreds of thousands of events.
const STORE_SIZE: &str = "1GiB";
/// Key of a `ConfigMap` with the policy: the file's name in NVSentinel's.
const POLICY_KEY: &str = "config.toml";
/// Port on which a controller takes events, as the data-flow document has it.
const GRPC_PORT: u16 = 50051;
/// Audience of the agents' tokens.
const AUDIENCE: &str = "gpuwarden";
/// `ServiceAccount` of the agents.
const AGENT: &str = "gpuwarden-agent";

/// `ProcessSettings` are the settings of every process.
#[derive(Debug, Clone)]
pub struct ProcessSettings {
    /// Directory of events and state.
    pub data_dir: PathBuf,
    /// True if clients look in that directory by themselves.
    pub data_dir_is_default: bool,
    /// Address of page, API and metrics.
    pub listen: SocketAddr,
    /// Log filter.
    pub log: String,
    /// Log format.
    pub log_format: LogFormat,
}

/// `NodeSettings` are the settings of a node's side: its sources, and who may report to it.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// Name of this node.
    pub node_name: String,
    /// Unix socket of the connector.
    pub socket: PathBuf,
    /// Permission bits of the socket's file.
    pub socket_mode: u32,
    /// The nodes for which processes on this machine may report.
    pub accept_nodes: AcceptNodes,
    /// The kernel log.
    pub kernel_log: Spec,
    /// On a first start, older lines open no fault.
    pub history: SignedDuration,
    /// True if records that programs wrote into the kernel's log are left out.
    pub refuse_user_space: bool,
    /// The file that describes the GPUs to other monitors, and to ours where the driver says nothing.
    pub gpu_metadata: PathBuf,
    /// Socket on which the kubelet says which pods have which GPUs.
    pub pod_resources: PathBuf,
    /// Files of changes to the fault catalogue; the last has the last word.
    pub catalog: Vec<PathBuf>,
    /// The GPUs.
    pub gpu: GpuSettings,
}

/// `ActSettings` are the settings of the store, the policy and the cluster.
#[derive(Debug, Clone)]
pub struct ActSettings {
    /// `NVSentinel`'s config.json, which changes events before they are stored.
    pub connector_config: Option<PathBuf>,
    /// The time for which events are kept.
    pub retention: SignedDuration,
    /// Room that the event store may take (bytes).
    pub store_size: u64,
    /// The cluster, if there is one.
    pub cluster: Option<ConnectOptions>,
    /// The mode, which says what may be done in the cluster.
    pub mode: Mode,
    /// The wishes for the pods of nodes that are out of service; `None`: they stay.
    pub drain: Option<DrainConfig>,
    /// The wishes for the repair of nodes that are drained; `None`: nothing is done.
    pub remediation: Option<RemediationConfig>,
    /// How custom resources are carried out that ask for something; `None`: they are left alone.
    pub janitor: Option<JanitorSettings>,
    /// The reports that are written on the nodes.
    pub reports: ReportSettings,
    /// The place of the policy.
    pub policy: PolicySource,
    /// True if the brake limits quarantines.
    pub circuit_breaker: bool,
    /// Label of GPU nodes.
    pub gpu_node_label: NodeLabel,
    /// Namespace of the product's own objects.
    pub namespace: String,
}

/// `DeliverySettings` are the settings of the way from a node to its controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliverySettings {
    /// Address of the controller.
    pub controller: String,
    /// The authority that it is trusted by; always there for https.
    pub authority: Option<PathBuf>,
    /// The certificate that names this node.
    pub certificate: Option<CertificateFiles>,
    /// The file of the token that names it instead.
    pub token_file: Option<PathBuf>,
    /// Room that waiting events may take (bytes).
    pub outbox_size: u64,
}

/// `IngestSettings` are the settings of a controller's port for events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IngestSettings {
    /// The address.
    pub listen: SocketAddr,
    /// With TLS, or in the open.
    pub transport: Transport,
    /// The rules for tokens; used where there is a cluster.
    pub tokens: TokenRules,
}

/// A `Transport` is the protection of events on the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transport {
    /// With TLS.
    Tls {
        /// The controller's own certificate.
        own: CertificateFiles,
        /// The authority of the nodes' certificates; `None`: only tokens count.
        clients: Option<PathBuf>,
    },
    /// In the open, on this machine only.
    Open,
}

/// Returns the format of log lines of this name.
pub(super) fn log_format(name: Option<&str>) -> Result<LogFormat, SettingsError> {
    match name {
        None | Some("text") => Ok(LogFormat::Text),
        Some("json") => Ok(LogFormat::Json),
        Some(other) => {
            let what = "is neither text nor json";
            Err(SettingsError::value("--log-format", other, what))
        }
    }
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
        let accept_nodes = match args.accept_nodes.as_deref() {
            None | Some("own") => AcceptNodes::Own(node_name.clone()),
            Some("any") => AcceptNodes::Any,
            Some(other) => {
                return Err(SettingsError::value(
                    "--accept-nodes",
                    other,
                    "is neither own nor any",
                ));
            }
        };
        let socket_mode = args.socket_mode.as_deref().unwrap_or(SOCKET_MODE);
        let history = args.history.as_deref().unwrap_or("15m");
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
            catalog: args.catalog.unwrap_or_default(),
            gpu: GpuSettings::resolve(gpu)?,
        })
    }
}

// === impl ActSettings ===

impl ActSettings {
    pub(super) fn resolve(args: ActArgs) -> Result<Self, SettingsError> {
        let retention_text = args.retention.as_deref().unwrap_or(RETENTION);
        let retention = amount::duration("--retention", retention_text)?;
        if retention < SHORTEST_RETENTION {
            let what = "is less than an hour: what has just happened could not be explained";
            return Err(SettingsError::value("--retention", retention_text, what));
        }
        let size_text = args.store_size.as_deref().unwrap_or(STORE_SIZE);
        let store_size = amount::bytes("--store-size", size_text)?;
        if store_size < SMALLEST_STORE {
            let what = "is less than 64MiB: what has just happened could not be explained";
            return Err(SettingsError::value("--store-size", size_text, what));
        }
        let label = args.gpu_node_label.as_deref();
        let label = label.unwrap_or(keys::GPU_NODE_LABEL);
        let gpu_node_label = NodeLabel::parse(label)
            .map_err(|what| SettingsError::value("--gpu-node-label", label, what))?;
        let namespace = namespace(args.namespace.clone())?;
        let named = args.kubeconfig.is_some() || args.context.is_some();
        let cluster = (named || in_pod())
            .then(|| connect_options(args.kubeconfig.clone(), args.context.clone()));
        let mode = mode(&args, cluster.is_some())?;
        let policy = match &args.policy {
            None => PolicySource::BuiltIn,
            Some(text) => policy(text)?,
        };
        if matches!(policy, PolicySource::ConfigMap { .. }) && cluster.is_none() {
            return Err(SettingsError::Conflict(
                "--policy configmap:... needs a cluster to read it from: name one with \
                 --kubeconfig FILE or --context NAME",
            ));
        }
        let drain = drain(&args, mode)?;
        let remediation = remediation(&args, drain.is_some())?;
        let janitor = JanitorSettings::resolve(&args, cluster.is_some())?;
        let reports = ReportSettings::resolve(&args, mode)?;
        Ok(Self {
            connector_config: args.connector_config,
            retention,
            store_size,
            cluster,
            mode,
            drain,
            remediation,
            janitor,
            reports,
            policy,
            circuit_breaker: args.circuit_breaker.unwrap_or(true),
            gpu_node_label,
            namespace,
        })
    }
}

/// Returns the mode that the switches choose together.
fn mode(args: &ActArgs, in_cluster: bool) -> Result<Mode, SettingsError> {
    let acts = args.quarantine.unwrap_or(false);
    let observes = args.observe.unwrap_or(false);
    let conflict = match (acts, observes, args.dry_run.unwrap_or(false)) {
        (false, _, false) => return Ok(Mode::Observe),
        (true, true, _) => "--observe and --quarantine exclude each other: remove one",
        (false, _, true) => {
            "--dry-run stands beside an acting switch, such as --quarantine: add one, or remove it \
             (without one nothing is decided at all)"
        }
        (true, false, _) if !in_cluster => {
            "--quarantine needs a cluster to act on: name one with --kubeconfig FILE or --context \
             NAME"
        }
        (true, false, true) => return Ok(Mode::DryRun),
        (true, false, false) => return Ok(Mode::Act),
    };
    Err(SettingsError::Conflict(conflict))
}

/// Returns what is wished for the pods of nodes that are out, where they are to leave.
fn drain(args: &ActArgs, mode: Mode) -> Result<Option<DrainConfig>, SettingsError> {
    if !args.drain.unwrap_or(false) {
        if args.drain_config.is_some() {
            return Err(SettingsError::Conflict(
                "--drain-config stands beside --drain: add it, or remove the file",
            ));
        }
        return Ok(None);
    }
    if !mode.decides() {
        return Err(SettingsError::Conflict(
            "--drain stands beside --quarantine: pods leave the nodes that it takes out",
        ));
    }
    let Some(path) = &args.drain_config else {
        return Ok(Some(DrainConfig::default()));
    };
    drain_config(path).map(Some)
}

/// Reads the file that says how pods leave nodes.
pub(crate) fn drain_config(path: &Path) -> Result<DrainConfig, SettingsError> {
    let source = path.display().to_string();
    let wrong = |what: String| SettingsError::value("--drain-config", &source, what);
    let text =
        std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let read = |path: &str| std::fs::read_to_string(path).map_err(|error| error.to_string());
    let config = DrainConfig::parse_with(&text, &source, read);
    config.map_err(|error| wrong(format!("is not right:\n{error}")))
}

/// Returns what is done to mend nodes, where they are to be repaired.
fn remediation(args: &ActArgs, drains: bool) -> Result<Option<RemediationConfig>, SettingsError> {
    if !args.remediate.unwrap_or(false) {
        if args.remediate_config.is_some() {
            return Err(SettingsError::Conflict(
                "--remediate-config stands beside --remediate: add it, or remove the file",
            ));
        }
        return Ok(None);
    }
    if !drains {
        return Err(SettingsError::Conflict(
            "--remediate stands beside --drain: a node is repaired once its pods have left",
        ));
    }
    let Some(path) = &args.remediate_config else {
        return Ok(Some(RemediationConfig::builtin()));
    };
    let source = path.display().to_string();
    let wrong = |what: String| SettingsError::value("--remediate-config", &source, what);
    let text =
        std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let read = |path: &str| std::fs::read_to_string(path).map_err(|error| error.to_string());
    RemediationConfig::parse(&text, &source, read)
        .map(Some)
        .map_err(|error| wrong(format!("is not right:\n{error}")))
}

/// Reads the place of the policy: a file, a preset, or a key of a `ConfigMap`.
pub(super) fn policy(text: &str) -> Result<PolicySource, SettingsError> {
    if let Some(name) = text.strip_prefix(policy_source::PRESET) {
        let preset = policy_source::preset(name)
            .map_err(|what| SettingsError::value("--policy", text, what))?;
        return Ok(PolicySource::Preset(preset));
    }
    let Some(place) = text.strip_prefix("configmap:") else {
        return Ok(PolicySource::File(PathBuf::from(text)));
    };
    let wrong = |what: String| SettingsError::value("--policy", text, what);
    let mut parts = place.splitn(3, '/');
    let (Some(namespace), Some(name)) = (parts.next(), parts.next()) else {
        return Err(wrong("is no configmap:NAMESPACE/NAME[/KEY]".to_owned()));
    };
    let key = parts.next().unwrap_or(POLICY_KEY);
    names::dns_label(namespace)
        .and_then(|()| names::object_name(name))
        // A key of a `ConfigMap` has the letters of a label's value.
        .and_then(|()| names::label_value(key))
        .map_err(|error| {
            wrong(format!(
                "configmap:NAMESPACE/NAME[/KEY] belongs here, and {error}"
            ))
        })?;
    Ok(PolicySource::ConfigMap {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        key: key.to_owned(),
    })
}

// === impl DeliverySettings ===

impl DeliverySettings {
    pub(in crate::settings) fn resolve(args: DeliveryArgs) -> Result<Self, SettingsError> {
        let controller = args.controller.ok_or(SettingsError::Conflict(
            "an agent needs a controller: name it with --controller https://HOST:50051 (a machine \
             on its own is watched by 'gpuwarden run')",
        ))?;
        let certificate = pair(
            args.tls_cert,
            args.tls_key,
            "--tls-cert and --tls-key go together: add the other one",
        )?;
        if controller.starts_with("https:") {
            if args.tls_ca.is_none() {
                return Err(SettingsError::Conflict(
                    "--controller https://... needs --tls-ca FILE: the authority that the \
                     controller is trusted by",
                ));
            }
            if certificate.is_none() && args.token_file.is_none() {
                return Err(SettingsError::Conflict(
                    "nothing says which node this is: add --tls-cert and --tls-key, or --token-file",
                ));
            }
        }
        let outbox_size = match args.outbox_size {
            None => outbox::DEFAULT_BYTES,
            Some(text) => amount::bytes("--outbox-size", &text)?,
        };
        if outbox_size < outbox::MIN_BYTES {
            let what = "is less than 16MiB: a large request would never fit";
            return Err(SettingsError::value(
                "--outbox-size",
                outbox_size.to_string(),
                what,
            ));
        }
        Ok(Self {
            controller,
            authority: args.tls_ca,
            certificate,
            token_file: args.token_file,
            outbox_size,
        })
    }
}

// === impl IngestSettings ===

impl IngestSettings {
    /// Checks the arguments and fills in the defaults. `namespace` is that of the product, where
    /// the agents are if nothing else is said.
    pub(super) fn resolve(
        args: IngestArgs,
        in_cluster: bool,
        namespace: &str,
    ) -> Result<Self, SettingsError> {
        let own = pair(
            args.grpc_tls_cert,
            args.grpc_tls_key,
            "--grpc-tls-cert and --grpc-tls-key go together: add the other one",
        )?;
        let open = args.grpc_insecure.unwrap_or(false);
        let everywhere = if open {
            Ipv4Addr::LOCALHOST
        } else {
            Ipv4Addr::UNSPECIFIED
        };
        let listen = args
            .grpc_listen
            .unwrap_or_else(|| SocketAddr::from((everywhere, GRPC_PORT)));
        let transport = transport(own, args.grpc_client_ca, open, listen, in_cluster)?;
        let agents = args
            .agents
            .unwrap_or_else(|| vec![format!("{namespace}/{AGENT}")]);
        let tokens = TokenRules {
            audience: args.token_audience.unwrap_or_else(|| AUDIENCE.to_owned()),
            agents: accounts("--agents", &agents)?,
            central: accounts(
                "--central-monitors",
                &args.central_monitors.unwrap_or_default(),
            )?,
        };
        Ok(Self {
            listen,
            transport,
            tokens,
        })
    }
}

/// Returns the protection that the settings of a controller's port come to.
fn transport(
    own: Option<CertificateFiles>,
    clients: Option<PathBuf>,
    open: bool,
    listen: SocketAddr,
    in_cluster: bool,
) -> Result<Transport, SettingsError> {
    let conflict = match (own, open) {
        (Some(_), true) => "--grpc-insecure and --grpc-tls-cert exclude each other: remove one",
        (None, true) if clients.is_some() => "--grpc-client-ca needs TLS: remove --grpc-insecure",
        (None, true) if !listen.ip().is_loopback() => {
            let what = "is reached from other machines, and --grpc-insecure asks nobody for a \
                        name: use a loopback address, or TLS";
            return Err(SettingsError::value(
                "--grpc-listen",
                listen.to_string(),
                what,
            ));
        }
        (None, true) => return Ok(Transport::Open),
        (None, false) => {
            "a controller needs a certificate: name it with --grpc-tls-cert and --grpc-tls-key \
             (for trying out on one machine: --grpc-insecure)"
        }
        (Some(_), false) if clients.is_none() && !in_cluster => {
            "nobody could say who they are: name the authority of the nodes' certificates with \
             --grpc-client-ca, or a cluster that knows their tokens with --kubeconfig"
        }
        (Some(own), false) => return Ok(Transport::Tls { own, clients }),
    };
    Err(SettingsError::Conflict(conflict))
}

fn accounts(name: &'static str, texts: &[String]) -> Result<Vec<ServiceAccount>, SettingsError> {
    let parse = |text: &String| {
        let parsed = text.trim().parse();
        parsed.map_err(|_| {
            SettingsError::value(name, text, "is no ServiceAccount; write NAMESPACE/NAME")
        })
    };
    texts.iter().map(parse).collect()
}

pub(super) fn pair(
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    half: &'static str,
) -> Result<Option<CertificateFiles>, SettingsError> {
    match (certificate, key) {
        (None, None) => Ok(None),
        (Some(certificate), Some(key)) => Ok(Some(CertificateFiles { certificate, key })),
        _ => Err(SettingsError::Conflict(half)),
    }
}
