//! The settings of `run`, `agent` and `controller`, from flags, environment, configuration file
//! and defaults.
//!
//! Each role has its settings here; the groups that they share are in `settings/parts.rs`,
//! the file in `settings/file.rs`.

mod act;
mod amount;
mod device_api;
mod file;
mod gpu;
mod janitor;
mod janitor_provider;
mod kubernetes;
mod network;
mod node_name;
mod parts;
mod reports;
mod role;
mod webhook;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub(crate) use act::drain_config;
pub use act::{ActSettings, Mode};
pub use device_api::{DeviceNetwork, DeviceSettings};
pub use gpu::{FakeGpus, GpuSettings};
pub use janitor::JanitorSettings;
pub use janitor_provider::JanitorProviderSettings;
pub use network::{DeliverySettings, IngestSettings, Transport};
pub(crate) use node_name::node_name;
pub use parts::{NodeSettings, ProcessSettings};

pub(crate) use kubernetes::{connect_options, named, namespace};
pub use reports::ReportSettings;
pub(crate) use role::{Role, resolve};
pub use webhook::{Reached, WebhookSettings};

use crate::args::{
    ActArgs, DeliveryArgs, DeviceArgs, ElectionArgs, GpuArgs, IngestArgs, NodeArgs, ProcessArgs,
};
use file::ConfigFile;

/// Default port of the status page, API and metrics: where NVSentinel has its metrics.
pub(crate) const DEFAULT_PORT: u16 = 2112;
/// Data directory of root.
const SYSTEM_DATA_DIR: &str = "/var/lib/gpuwarden";
/// File in the data directory that tells clients where to find the process.
const ENDPOINT_FILE: &str = "endpoint.json";

/// `RunSettings` are the settings of `run`, with all defaults.
#[derive(Debug, Clone)]
pub struct RunSettings {
    /// The node.
    pub node: NodeSettings,
    /// The Device API.
    pub devices: DeviceSettings,
    /// The process.
    pub process: ProcessSettings,
    /// The cluster.
    pub act: ActSettings,
}

/// `AgentSettings` are the settings of `agent`, with all defaults.
#[derive(Debug, Clone)]
pub struct AgentSettings {
    /// The controller.
    pub delivery: DeliverySettings,
    /// The node.
    pub node: NodeSettings,
    /// The Device API.
    pub devices: DeviceSettings,
    /// The process.
    pub process: ProcessSettings,
}

/// `ControllerSettings` are the settings of `controller`, with all defaults.
#[derive(Debug, Clone)]
pub struct ControllerSettings {
    /// The agents.
    pub ingest: IngestSettings,
    /// The process.
    pub process: ProcessSettings,
    /// The cluster.
    pub act: ActSettings,
    /// True if the controller acts only while it leads.
    pub leader_elect: bool,
}

/// An `Endpoint` is the address of a running gpuwarden, which writes it into its data directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Address of page and API.
    pub server: String,
    /// Unix socket of the connector.
    pub socket: PathBuf,
    /// Unix socket of the Device API; a controller has none.
    #[serde(default)]
    pub device_api: Option<PathBuf>,
    /// Process id.
    pub pid: u32,
}

/// `ClientSettings` are the keys of a server's configuration file that its clients read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ClientSettings {
    /// Address of the server, where it is not on this machine.
    pub(crate) server: Option<String>,
    /// Its data directory.
    pub(crate) data_dir: Option<PathBuf>,
    /// Unix socket of its connector.
    pub(crate) socket: Option<PathBuf>,
    /// Unix socket of its Device API.
    pub(crate) device_api: Option<PathBuf>,
    /// Address on which it listens.
    pub(crate) listen: Option<SocketAddr>,
    /// Kubeconfig of its cluster.
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig.
    pub(crate) context: Option<String>,
    /// Namespace of its own objects in the cluster.
    pub(crate) namespace: Option<String>,
    /// File that says how pods leave nodes.
    pub(crate) drain_config: Option<PathBuf>,
}

/// `AnyRole` has the keys of the files of all roles.
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
}

/// A `SettingsError` is the reason why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
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
        /// The problem.
        what: String,
    },
    /// A value is wrong.
    #[error("{name} {value:?}: {what}")]
    Value {
        /// Name of the setting, as a flag.
        name: &'static str,
        /// Its value.
        value: String,
        /// The problem, and what would be right.
        what: String,
    },
    /// The switches do not go together.
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
    /// Reads them from a server's configuration file, whichever its role, if one is named. The
    /// other keys are for the server alone.
    pub(crate) fn read(path: Option<&Path>) -> Result<Self, SettingsError> {
        ConfigFile::read::<AnyRole>(path)?.group()
    }
}

// === impl Endpoint ===

impl Endpoint {
    /// Reads the endpoint of the process that uses `data_dir`, if it has written one.
    pub fn read(data_dir: &Path) -> Option<Self> {
        let text = std::fs::read(data_dir.join(ENDPOINT_FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes the endpoint, as a whole.
    pub fn write(&self, data_dir: &Path) -> std::io::Result<()> {
        let new = data_dir.join("endpoint.json.new");
        std::fs::write(&new, serde_json::to_vec(self)?)?;
        std::fs::rename(new, data_dir.join(ENDPOINT_FILE))
    }

    /// Removes the endpoint at the end, unless it is another process's by now.
    pub fn remove(data_dir: &Path) {
        if Self::read(data_dir).is_some_and(|noted| noted.pid != std::process::id()) {
            return;
        }
        // Nothing depends on it: a client that finds it asks in vain.
        drop(std::fs::remove_file(data_dir.join(ENDPOINT_FILE)));
    }
}

/// Returns the data directory where none is given.
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

fn is_root() -> bool {
    host::identity::effective_uid() == 0
}

#[cfg(test)]
mod tests;
