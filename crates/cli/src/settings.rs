//! What `run` is to do, from flags, environment, configuration file and defaults.

mod amount;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use cluster::ConnectOptions;
use connector::AcceptNodes;
use contract::keys;
use domain::brake::NodeLabel;
use domain::policy::presets::Preset;
use host::kernel_log::Spec;
use jiff::SignedDuration;
use runtime::logging::LogFormat;
use serde::{Deserialize, Serialize};

use crate::args::RunArgs;
use crate::policy_source;

/// Default port of the status page, API and metrics: where NVSentinel has its metrics.
pub(crate) const DEFAULT_PORT: u16 = 2112;
/// Socket on which monitors of NVSentinel report.
const CONTRACT_SOCKET: &str = "/var/run/nvsentinel.sock";
/// Where NVSentinel's metadata collector writes.
const GPU_METADATA: &str = "/var/lib/nvsentinel/gpu_metadata.json";
/// Data directory of root.
const SYSTEM_DATA_DIR: &str = "/var/lib/gpuwarden";
/// Key of a `ConfigMap` with the policy: the file's name in NVSentinel's.
const POLICY_KEY: &str = "config.toml";
/// Where a pod's service account has its namespace.
const POD_NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// File in the data directory that tells clients where to find the process.
/// Long enough to look back on the last incident of a node.
const RETENTION: &str = "30d";
const SHORTEST_RETENTION: SignedDuration = SignedDuration::from_hours(1);
/// Hundreds of thousands of events.
const STORE_SIZE: &str = "1GiB";
const ENDPOINT_FILE: &str = "endpoint.json";

/// What `run` is to do; everything decided.
#[derive(Debug, Clone)]
pub struct RunSettings {
    /// Name of this node.
    pub node_name: String,
    /// Where events and state are kept.
    pub data_dir: PathBuf,
    /// Whether that is the place where clients look by themselves.
    pub data_dir_is_default: bool,
    /// Unix socket of the connector.
    pub socket: PathBuf,
    /// For which nodes processes on this machine may report.
    pub accept_nodes: AcceptNodes,
    /// What is done to events before they are stored: a config.json of `NVSentinel`'s connector.
    pub connector_config: Option<PathBuf>,
    /// Address of page, API and metrics.
    pub listen: SocketAddr,
    /// What to read.
    pub kernel_log: Spec,
    /// On a first start, older lines open no fault.
    pub history: SignedDuration,
    /// Leave out what programs wrote into the kernel's log.
    pub refuse_user_space: bool,
    /// The file in which a collector describes the GPUs.
    pub gpu_metadata: PathBuf,
    /// How long events are kept.
    pub retention: SignedDuration,
    /// Room that the event store may take (bytes).
    pub store_size: u64,
    /// The cluster, if there is one.
    pub cluster: Option<ClusterSettings>,
    /// Whether to act.
    pub mode: ModeSetting,
    /// Where the policy is; `None`: the built-in one.
    pub policy: Option<PolicySetting>,
    /// Files of changes to the fault catalogue; the last has the last word.
    pub catalog: Vec<PathBuf>,
    /// Whether the brake holds.
    pub circuit_breaker: bool,
    /// Label of GPU nodes.
    pub gpu_node_label: NodeLabel,
    /// Namespace of the product's own objects.
    pub namespace: String,
    /// Log filter.
    pub log: String,
    /// Log format.
    pub log_format: LogFormat,
}

/// How to reach the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSettings {
    /// Kubeconfig; `None`: the usual places, or the pod's own service account.
    pub kubeconfig: Option<PathBuf>,
    /// Context.
    pub context: Option<String>,
}

/// Where the policy is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicySetting {
    /// A file.
    File(PathBuf),
    /// A named policy that is built in.
    Preset(&'static Preset),
    /// A key of a `ConfigMap`.
    ConfigMap {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
        /// Key.
        key: String,
    },
}

/// Whether to act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeSetting {
    /// Record and show.
    Observe,
    /// Decide and show.
    DryRun,
    /// Take nodes out and give them back.
    Quarantine,
}

/// Where a running gpuwarden is, as it writes it into its data directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Address of page and API.
    pub server: String,
    /// Unix socket of the connector.
    pub socket: PathBuf,
    /// Process id.
    pub pid: u32,
}

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The configuration file is wrong.
    #[error("{}:{line}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// A value is wrong.
    #[error("{name} {value:?}: {what}")]
    Value {
        /// Name of the setting, as a flag.
        name: &'static str,
        /// What it is.
        value: String,
        /// What is wrong, and what would be right.
        what: String,
    },
    /// The switches do not go together.
    #[error("{0}")]
    Conflict(&'static str),
}

/// The configuration file: the long names of the flags.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FileSettings {
    node_name: Option<String>,
    data_dir: Option<PathBuf>,
    socket: Option<PathBuf>,
    accept_nodes: Option<String>,
    connector_config: Option<PathBuf>,
    listen: Option<SocketAddr>,
    kernel_log: Option<String>,
    history: Option<String>,
    refuse_user_space: Option<bool>,
    gpu_metadata: Option<PathBuf>,
    retention: Option<String>,
    store_size: Option<String>,
    kubeconfig: Option<PathBuf>,
    context: Option<String>,
    observe: Option<bool>,
    quarantine: Option<bool>,
    dry_run: Option<bool>,
    policy: Option<String>,
    catalog: Option<Files>,
    #[serde(alias = "circuit-breaker-enabled")]
    circuit_breaker: Option<bool>,
    gpu_node_label: Option<String>,
    namespace: Option<String>,
    log: Option<String>,
    log_format: Option<String>,
}

/// One file or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Files {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

// === impl Files ===

impl Files {
    fn into_vec(self) -> Vec<PathBuf> {
        match self {
            Self::One(file) => vec![file],
            Self::Several(files) => files,
        }
    }
}

// === impl RunSettings ===

impl RunSettings {
    /// Resolves flags and environment (both in `args`), the file they name, and defaults.
    pub fn resolve(args: RunArgs) -> Result<Self, SettingsError> {
        let file = match &args.config {
            Some(path) => FileSettings::read(path)?,
            None => FileSettings::default(),
        };
        let data_dir = args.data_dir.or(file.data_dir);
        let own_place = data_dir.is_some();
        let data_dir = data_dir.map_or_else(default_data_dir, Ok)?;
        let socket = args.socket.or(file.socket).unwrap_or_else(|| {
            if is_root() && !own_place {
                PathBuf::from(CONTRACT_SOCKET)
            } else {
                data_dir.join("gpuwarden.sock")
            }
        });
        let history = args
            .history
            .or(file.history)
            .unwrap_or_else(|| "15m".to_owned());
        let history = amount::duration("--history", &history)?;
        let retention = args.retention.or(file.retention);
        let retention = amount::duration("--retention", retention.as_deref().unwrap_or(RETENTION))?;
        if retention < SHORTEST_RETENTION {
            return Err(SettingsError::Value {
                name: "--retention",
                value: retention.to_string(),
                what: "is less than an hour: what has just happened could not be explained"
                    .to_owned(),
            });
        }
        let store_size = args.store_size.or(file.store_size);
        let store_size =
            amount::bytes("--store-size", store_size.as_deref().unwrap_or(STORE_SIZE))?;
        let kernel_log = args
            .kernel_log
            .or(file.kernel_log)
            .unwrap_or_else(|| "kmsg".to_owned());
        let kernel_log = kernel_log.parse().map_err(|error| SettingsError::Value {
            name: "--kernel-log",
            value: kernel_log,
            what: format!("{error}"),
        })?;
        let log_format = match args.log_format.or(file.log_format).as_deref() {
            None | Some("text") => LogFormat::Text,
            Some("json") => LogFormat::Json,
            Some(other) => {
                return Err(SettingsError::Value {
                    name: "--log-format",
                    value: other.to_owned(),
                    what: "is neither text nor json".to_owned(),
                });
            }
        };
        let node_name = args
            .node_name
            .or(file.node_name)
            .map_or_else(default_node_name, Ok)?;
        let accept_nodes = match args.accept_nodes.or(file.accept_nodes).as_deref() {
            None | Some("own") => AcceptNodes::Own(node_name.clone()),
            Some("any") => AcceptNodes::Any,
            Some(other) => {
                return Err(SettingsError::Value {
                    name: "--accept-nodes",
                    value: other.to_owned(),
                    what: "is neither own nor any".to_owned(),
                });
            }
        };
        let gpu_node_label = args
            .gpu_node_label
            .or(file.gpu_node_label)
            .unwrap_or_else(|| keys::GPU_NODE_LABEL.to_owned());
        let gpu_node_label = NodeLabel::parse(&gpu_node_label).ok_or(SettingsError::Value {
            name: "--gpu-node-label",
            value: gpu_node_label,
            what: "is no label with its value, such as nvidia.com/gpu.present=true".to_owned(),
        })?;
        let namespace = namespace(args.namespace.or(file.namespace))?;
        let kubeconfig = args.kubeconfig.or(file.kubeconfig);
        let context = args.context.or(file.context);
        let cluster =
            (kubeconfig.is_some() || context.is_some() || in_pod()).then_some(ClusterSettings {
                kubeconfig,
                context,
            });
        // A flag for one of them beats the file's word for the other.
        let from_file = if args.observe.is_none() {
            file.quarantine
        } else {
            None
        };
        let quarantine = args.quarantine.or(from_file).unwrap_or(false);
        let observe = args.observe.or(if args.quarantine.is_none() {
            file.observe
        } else {
            None
        });
        let dry_run = args.dry_run.or(file.dry_run).unwrap_or(false);
        let mode = match (quarantine, observe.unwrap_or(false), dry_run) {
            (true, true, _) => {
                return Err(SettingsError::Conflict(
                    "--observe and --quarantine exclude each other: remove one",
                ));
            }
            (true, false, true) => ModeSetting::DryRun,
            (true, false, false) => ModeSetting::Quarantine,
            (false, _, true) => {
                return Err(SettingsError::Conflict(
                    "--dry-run stands beside an acting switch, such as --quarantine: add one, or \
                     remove it (without one nothing is decided at all)",
                ));
            }
            (false, _, false) => ModeSetting::Observe,
        };
        let policy = args
            .policy
            .or(file.policy)
            .map(|text| PolicySetting::parse(&text))
            .transpose()?;
        if matches!(policy, Some(PolicySetting::ConfigMap { .. })) && cluster.is_none() {
            return Err(SettingsError::Conflict(
                "--policy configmap:... needs a cluster to read it from: name one with \
                 --kubeconfig FILE or --context NAME",
            ));
        }
        if mode != ModeSetting::Observe && cluster.is_none() {
            return Err(SettingsError::Conflict(
                "--quarantine needs a cluster to act on: name one with --kubeconfig FILE or --context NAME",
            ));
        }
        Ok(Self {
            node_name,
            data_dir,
            data_dir_is_default: !own_place,
            socket,
            accept_nodes,
            connector_config: args.connector_config.or(file.connector_config),
            listen: args
                .listen
                .or(file.listen)
                .unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT))),
            kernel_log,
            history,
            refuse_user_space: args
                .refuse_user_space
                .or(file.refuse_user_space)
                .unwrap_or(false),
            gpu_metadata: args
                .gpu_metadata
                .or(file.gpu_metadata)
                .unwrap_or_else(|| PathBuf::from(GPU_METADATA)),
            retention,
            store_size,
            cluster,
            mode,
            policy,
            catalog: if args.catalog.is_empty() {
                file.catalog.map_or_else(Vec::new, Files::into_vec)
            } else {
                args.catalog
            },
            circuit_breaker: args
                .circuit_breaker
                .or(file.circuit_breaker)
                .unwrap_or(true),
            gpu_node_label,
            namespace,
            log: args.log.or(file.log).unwrap_or_else(|| "info".to_owned()),
            log_format,
        })
    }
}

// === impl PolicySetting ===

impl PolicySetting {
    fn parse(text: &str) -> Result<Self, SettingsError> {
        if let Some(name) = text.strip_prefix(policy_source::PRESET) {
            let preset = policy_source::preset(name).map_err(|what| SettingsError::Value {
                name: "--policy",
                value: text.to_owned(),
                what,
            })?;
            return Ok(Self::Preset(preset));
        }
        let Some(place) = text.strip_prefix("configmap:") else {
            return Ok(Self::File(PathBuf::from(text)));
        };
        let parts: Vec<&str> = place.split('/').collect();
        match parts.as_slice() {
            [namespace, name, key @ ..]
                if key.len() <= 1 && parts.iter().all(|part| is_object_name(part)) =>
            {
                Ok(Self::ConfigMap {
                    namespace: (*namespace).to_owned(),
                    name: (*name).to_owned(),
                    key: key.first().map_or(POLICY_KEY, |key| *key).to_owned(),
                })
            }
            _ => Err(SettingsError::Value {
                name: "--policy",
                value: text.to_owned(),
                what: "is no configmap:NAMESPACE/NAME[/KEY]".to_owned(),
            }),
        }
    }
}

// === impl ClusterSettings ===

impl ClusterSettings {
    /// How to connect. Without a file, and with a context or outside of a pod, it is
    /// looked for where kubectl looks.
    pub fn connect_options(&self) -> ConnectOptions {
        let kubeconfig = self.kubeconfig.clone().or_else(|| {
            if self.context.is_none() && in_pod() {
                return None;
            }
            let home =
                || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".kube/config"));
            std::env::var_os("KUBECONFIG")
                .map(PathBuf::from)
                .or_else(home)
        });
        ConnectOptions {
            in_cluster: kubeconfig.is_none(),
            kubeconfig,
            context: self.context.clone(),
        }
    }
}

/// Whether `text` can be the name of a `ConfigMap`, its namespace or a key of it.
fn is_object_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 253
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

// === impl FileSettings ===

impl FileSettings {
    fn read(path: &Path) -> Result<Self, SettingsError> {
        let text = std::fs::read_to_string(path).map_err(|source| SettingsError::Read {
            path: path.to_owned(),
            source,
        })?;
        toml::from_str(&text).map_err(|error| SettingsError::File {
            path: path.to_owned(),
            line: error.span().map_or(1, |span| {
                1 + text
                    .bytes()
                    .take(span.start)
                    .filter(|byte| *byte == b'\n')
                    .count()
            }),
            what: error.message().to_owned(),
        })
    }
}

// === impl Endpoint ===

impl Endpoint {
    /// Reads what the process that uses `data_dir` has written, if one has.
    pub fn read(data_dir: &Path) -> Option<Self> {
        let text = std::fs::read(data_dir.join(ENDPOINT_FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes it, as a whole.
    pub fn write(&self, data_dir: &Path) -> std::io::Result<()> {
        let new = data_dir.join("endpoint.json.new");
        std::fs::write(&new, serde_json::to_vec(self)?)?;
        std::fs::rename(new, data_dir.join(ENDPOINT_FILE))
    }

    /// Removes it at the end.
    pub fn remove(data_dir: &Path) {
        // Nothing depends on it: a client that finds it asks in vain.
        drop(std::fs::remove_file(data_dir.join(ENDPOINT_FILE)));
    }
}

/// The data directory where none is given.
pub(crate) fn default_data_dir() -> Result<PathBuf, SettingsError> {
    if is_root() {
        return Ok(PathBuf::from(SYSTEM_DATA_DIR));
    }
    let state = std::env::var_os("XDG_STATE_HOME")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from);
    let state = state
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state")));
    state
        .map(|state| state.join("gpuwarden"))
        .ok_or(SettingsError::Conflict(
            "there is no home directory to keep data in: name a place with --data-dir",
        ))
}

/// The namespace of the product's own objects: as given, else the pod's, else
/// [`keys::NAMESPACE`].
pub(crate) fn namespace(given: Option<String>) -> Result<String, SettingsError> {
    let of_pod = || {
        let variable = std::env::var("POD_NAMESPACE").ok();
        variable.or_else(|| std::fs::read_to_string(POD_NAMESPACE_FILE).ok())
    };
    let namespace = given
        .or_else(|| of_pod().map(|name| name.trim().to_owned()))
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| keys::NAMESPACE.to_owned());
    // It becomes part of a path.
    let letters = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    if namespace.len() > 63 || !namespace.bytes().all(letters) {
        return Err(SettingsError::Value {
            name: "--namespace",
            value: namespace,
            what: "is no name of a namespace".to_owned(),
        });
    }
    Ok(namespace)
}

fn in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

/// The node name where none is given: `NODE_NAME`, as pods get it, else the host name.
fn default_node_name() -> Result<String, SettingsError> {
    let from_pod = std::env::var("NODE_NAME")
        .ok()
        .filter(|name| !name.trim().is_empty());
    from_pod
        .or_else(host::identity::host_name)
        .ok_or(SettingsError::Conflict(
            "this machine has no host name: name the node with --node-name",
        ))
}

fn is_root() -> bool {
    host::identity::effective_uid() == 0
}

#[cfg(test)]
mod tests {
    use domain::policy::presets;

    use super::*;

    fn resolve(file: &str, edit: impl FnOnce(&mut RunArgs)) -> Result<RunSettings, SettingsError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        std::fs::write(&path, file).unwrap();
        let mut args = RunArgs {
            config: Some(path),
            data_dir: Some("/data".into()),
            node_name: Some("n1".into()),
            ..RunArgs::default()
        };
        edit(&mut args);
        RunSettings::resolve(args)
    }

    #[test]
    fn a_flag_beats_the_file_and_the_file_the_default() {
        let plain = resolve("", |_| ()).unwrap();
        assert_eq!(plain.socket, Path::new("/data/gpuwarden.sock"));
        assert_eq!(plain.accept_nodes, AcceptNodes::Own("n1".to_owned()));
        assert_eq!(
            (plain.listen.port(), plain.mode),
            (2112, ModeSetting::Observe)
        );
        assert_eq!(
            (plain.kernel_log, plain.history.as_secs()),
            (Spec::Kmsg, 900)
        );
        let any = resolve("accept-nodes = \"any\"\n", |_| ()).unwrap();
        assert_eq!(any.accept_nodes, AcceptNodes::Any);
        let connector = resolve("connector-config = \"/c.json\"\n", |_| ()).unwrap();
        assert_eq!(
            connector.connector_config.as_deref(),
            Some(Path::new("/c.json"))
        );
        let file =
            "listen = \"127.0.0.1:9\"\nhistory = \"1h\"\nkubeconfig = \"/k\"\nquarantine = true\n";
        let from_file = resolve(file, |_| ()).unwrap();
        assert_eq!(
            (from_file.listen.port(), from_file.history.as_secs()),
            (9, 3600)
        );
        assert_eq!(from_file.mode, ModeSetting::Quarantine);
        let flags = resolve(file, |args| {
            args.listen = Some("127.0.0.1:7".parse().unwrap());
            args.observe = Some(true);
        })
        .unwrap();
        assert_eq!((flags.listen.port(), flags.mode), (7, ModeSetting::Observe));
    }

    #[test]
    fn catalogue_files_are_one_or_several() {
        let files = |file: &str, given: &[&str]| {
            let given = given.iter().map(PathBuf::from).collect();
            let settings = resolve(file, |args| args.catalog = given).unwrap();
            let shown = settings
                .catalog
                .iter()
                .map(|file| file.display().to_string());
            shown.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(files("", &[]), "");
        assert_eq!(files("catalog = \"/a\"\n", &[]), "/a");
        assert_eq!(files("catalog = [\"/a\", \"/b\"]\n", &[]), "/a /b");
        assert_eq!(files("catalog = \"/a\"\n", &["/c", "/d"]), "/c /d");
    }

    #[test]
    fn what_is_wrong_is_named() {
        type Edit = fn(&mut RunArgs);
        let table: [(&str, Edit, &str); 11] = [
            ("accept-nodes = \"all\"\n", |_| (), "--accept-nodes \"all\""),
            ("lisen = \"x\"\n", |_| (), "c.toml:1: unknown field `lisen`"),
            ("\n\nlisten = \"nowhere\"\n", |_| (), "c.toml:3:"),
            (
                "",
                |args| args.history = Some("soon".into()),
                "--history \"soon\"",
            ),
            ("", |args| args.history = Some("-5m".into()), "--history"),
            (
                "",
                |args| args.log_format = Some("xml".into()),
                "--log-format",
            ),
            ("", |args| args.quarantine = Some(true), "--kubeconfig"),
            (
                "gpu-node-label = \"gpu\"\n",
                |_| (),
                "--gpu-node-label \"gpu\"",
            ),
            (
                "",
                |args| args.namespace = Some("a/b".into()),
                "--namespace \"a/b\"",
            ),
            (
                "",
                |args| args.namespace = Some("Team".into()),
                "--namespace \"Team\"",
            ),
            ("", |args| args.dry_run = Some(true), "--dry-run"),
        ];
        for (file, edit, expected) in table {
            let error = resolve(file, edit).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_policy_is_a_file_or_a_config_map() {
        let config_map = |namespace: &str, name: &str, key: &str| PolicySetting::ConfigMap {
            namespace: namespace.into(),
            name: name.into(),
            key: key.into(),
        };
        let file = |path: &str| PolicySetting::File(path.into());
        for (text, expected) in [
            ("p.toml", Some(file("p.toml"))),
            (
                "preset:gke",
                Some(PolicySetting::Preset(presets::find("gke").unwrap())),
            ),
            ("preset:mars", None),
            ("./configmap:a", Some(file("./configmap:a"))),
            ("configmap:ns/p", Some(config_map("ns", "p", "config.toml"))),
            (
                "configmap:ns/p/a.toml",
                Some(config_map("ns", "p", "a.toml")),
            ),
            ("configmap:p", None),
            ("configmap:ns/p/a/b", None),
            ("configmap:/p", None),
            ("configmap:ns/p?x=y", None),
        ] {
            assert_eq!(PolicySetting::parse(text).ok(), expected, "{text}");
        }
        let error = resolve("", |args| args.policy = Some("configmap:a/b".into()));
        assert!(error.unwrap_err().to_string().contains("--kubeconfig"));
    }

    #[test]
    fn the_brake_is_on_unless_it_is_switched_off_under_either_name() {
        let plain = resolve("", |_| ()).unwrap();
        assert!(plain.circuit_breaker);
        assert_eq!(plain.gpu_node_label.to_string(), keys::GPU_NODE_LABEL);
        assert_eq!(plain.namespace, "gpuwarden");
        for file in [
            "circuit-breaker = false\n",
            "circuit-breaker-enabled = false\n",
        ] {
            assert!(!resolve(file, |_| ()).unwrap().circuit_breaker, "{file}");
        }
        let flag = resolve("circuit-breaker = false\nnamespace = \"a\"\n", |args| {
            args.circuit_breaker = Some(true);
        })
        .unwrap();
        assert!(flag.circuit_breaker && flag.namespace == "a");
    }

    #[test]
    fn dry_run_stands_beside_quarantine() {
        let settings = resolve("", |args| {
            args.kubeconfig = Some("/k".into());
            args.quarantine = Some(true);
            args.dry_run = Some(true);
        })
        .unwrap();
        assert_eq!(settings.mode, ModeSetting::DryRun);
    }
}
