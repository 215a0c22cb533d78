//! The settings of the roles, from flags, environment, configuration file and defaults.
//!
//! The groups that roles share are in `settings/parts.rs`, `act.rs` and `network.rs`, the file in
//! `settings/file.rs`.

mod act;
mod amount;
mod audit;
mod device_api;
mod file;
mod gpu;
mod janitor;
mod janitor_provider;
mod kubernetes;
mod labels;
mod network;
mod node_name;
mod parts;
mod reports;
mod role;
mod webhook;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use contract::findings::FileError;
use controller::objects::ObjectsSource;
use serde::{Deserialize, Serialize};

pub use act::{ActSettings, AnalysisRules, Mode};
pub(crate) use act::{drain_config, text_place};
pub(crate) use amount::duration;
pub use audit::AuditSettings;
pub use device_api::{DeviceNetwork, DeviceSettings};
pub use gpu::{FakeGpus, GpuSettings};
pub use janitor::JanitorSettings;
pub use janitor_provider::JanitorProviderSettings;
pub use labels::LabelSettings;
pub use network::{DeliverySettings, IngestSettings, ServerCertificate, Transport};
pub(crate) use node_name::node_name;
pub use parts::{NodeSettings, ProcessSettings};

pub(crate) use kubernetes::{connect_options, named, namespace};
pub use reports::ReportSettings;
pub(crate) use role::{Role, resolve};
pub use webhook::{Reached, WebhookSettings};

use crate::args::{
    ActArgs, DeliveryArgs, DeviceArgs, ElectionArgs, GpuArgs, IngestArgs, LabelArgs, NodeArgs,
    ObjectArgs, ProcessArgs,
};
use file::ConfigFile;

/// Default port of the status page, API and metrics: where NVSentinel has its metrics.
pub(crate) const DEFAULT_PORT: u16 = 2112;
/// Default data directory of root.
const SYSTEM_DATA_DIR: &str = "/var/lib/gpuwarden";
/// File in the data directory with the addresses of the process, for clients.
const ENDPOINT_FILE: &str = "endpoint.json";

#[derive(Debug, Clone)]
pub struct RunSettings {
    pub node: NodeSettings,
    pub devices: DeviceSettings,
    pub process: ProcessSettings,
    pub act: ActSettings,
    /// Audit log of writes to the API server, if there is one.
    pub audit: Option<AuditSettings>,
}

#[derive(Debug, Clone)]
pub struct AgentSettings {
    pub delivery: DeliverySettings,
    pub node: NodeSettings,
    pub devices: DeviceSettings,
    pub process: ProcessSettings,
}

#[derive(Debug, Clone)]
pub struct ControllerSettings {
    pub ingest: IngestSettings,
    pub process: ProcessSettings,
    pub act: ActSettings,
    /// `None`: no labels are written.
    pub labels: Option<LabelSettings>,
    /// Audit log of writes to the API server, if there is one.
    pub audit: Option<AuditSettings>,
    /// True if the controller acts only while it leads.
    pub leader_elect: bool,
    /// Source of the policies over Kubernetes objects; `None` to watch none.
    pub objects: Option<ObjectsSource>,
}

/// Addresses of a running gpuwarden, which writes them to its data directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// URL of the status page and the API.
    pub server: String,
    /// Unix socket of the connector.
    pub socket: PathBuf,
    /// Unix socket of the Device API; a controller has none.
    #[serde(default)]
    pub device_api: Option<PathBuf>,
    pub pid: u32,
}

/// Keys of a server's configuration file that its clients read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ClientSettings {
    /// URL of a server on another machine.
    pub(crate) server: Option<String>,
    pub(crate) data_dir: Option<PathBuf>,
    /// Unix socket of the connector.
    pub(crate) socket: Option<PathBuf>,
    /// Unix socket of the Device API.
    pub(crate) device_api: Option<PathBuf>,
    /// Address of the status page and the API.
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) context: Option<String>,
    /// Namespace of gpuwarden's own objects.
    pub(crate) namespace: Option<String>,
    /// Configuration file of drains.
    pub(crate) drain_config: Option<PathBuf>,
}

/// Keys of the configuration files of all roles.
#[derive(clap::Args)]
struct AnyRole {
    #[command(flatten)]
    _node: NodeArgs,
    #[command(flatten)]
    _gpu: GpuArgs,
    #[command(flatten)]
    _devices: DeviceArgs,
    #[command(flatten)]
    _process: ProcessArgs,
    #[command(flatten)]
    _act: ActArgs,
    #[command(flatten)]
    _delivery: DeliveryArgs,
    #[command(flatten)]
    _ingest: IngestArgs,
    #[command(flatten)]
    _election: ElectionArgs,
    #[command(flatten)]
    _labels: LabelArgs,
    #[command(flatten)]
    _objects: ObjectArgs,
}

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The configuration file has an error.
    #[error("{error}")]
    File { path: PathBuf, error: FileError },
    /// A value is invalid.
    #[error("{name} {value:?}: {what}")]
    Value {
        /// Name of the flag, with its dashes.
        name: &'static str,
        value: String,
        /// The error and, if it helps, a valid form.
        what: String,
    },
    /// Settings exclude each other, or one needs another one.
    #[error("{0}")]
    Conflict(&'static str),
}

// === impl SettingsError ===

impl SettingsError {
    pub(crate) fn value(
        name: &'static str,
        value: impl Into<String>,
        what: impl Into<String>,
    ) -> Self {
        Self::Value {
            name,
            value: value.into(),
            what: what.into(),
        }
    }
}

// === impl ClientSettings ===

impl ClientSettings {
    /// Reads the configuration file of a server in any role, if one is named. Keys for the server
    /// alone are ignored.
    pub(crate) fn read(path: Option<&Path>) -> Result<Self, SettingsError> {
        ConfigFile::read::<AnyRole>(path)?.group()
    }
}

// === impl Endpoint ===

impl Endpoint {
    /// Reads the endpoint of the process that uses `data_dir`, if there is one.
    pub fn read(data_dir: &Path) -> Option<Self> {
        let text = std::fs::read(data_dir.join(ENDPOINT_FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes the endpoint atomically.
    pub fn write(&self, data_dir: &Path) -> std::io::Result<()> {
        let new = data_dir.join("endpoint.json.new");
        std::fs::write(&new, serde_json::to_vec(self)?)?;
        std::fs::rename(new, data_dir.join(ENDPOINT_FILE))
    }

    /// Removes the endpoint at the end of the process, unless another process has replaced it.
    pub fn remove(data_dir: &Path) {
        if Self::read(data_dir).is_some_and(|noted| noted.pid != std::process::id()) {
            return;
        }
        // A stale endpoint is harmless: a client that reads it gets no answer.
        drop(std::fs::remove_file(data_dir.join(ENDPOINT_FILE)));
    }
}

/// Returns the default data directory.
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
            "there is no home directory for data: name a directory with --data-dir",
        ))
}

fn is_root() -> bool {
    host::identity::effective_uid() == 0
}

#[cfg(test)]
mod tests;
