//! How the settings of a role are put together: flags and environment over the file over
//! defaults. The first error ends it.

use std::path::Path;

use super::file::ConfigFile;
use super::{
    ActSettings, AgentSettings, ControllerSettings, DeliverySettings, IngestSettings, Mode,
    NodeSettings, ProcessSettings, RunSettings, SettingsError,
};
use crate::args::{ActArgs, AgentArgs, ControllerArgs, RunArgs};

/// A `Role` is the arguments of one.
pub(crate) trait Role: clap::Args {
    /// What they come to.
    type Settings;

    /// Returns the file that they name.
    fn config(&self) -> Option<&Path>;
    /// Reads what a file says.
    fn from_file(file: &ConfigFile) -> Result<Self, SettingsError>;
    /// Returns what is set here, and the rest as in `lower`.
    fn over(self, lower: Self) -> Self;
    /// Checks them, and fills in the defaults.
    fn settle(self) -> Result<Self::Settings, SettingsError>;
}

/// Returns the settings, or the first thing that is wrong.
pub(crate) fn resolve<R: Role>(args: R) -> Result<R::Settings, SettingsError> {
    let file = ConfigFile::read::<R>(args.config())?;
    args.over(R::from_file(&file)?).settle()
}

/// Puts flags over the file; one for one of two switches beats the file's word for the other.
fn act_over(args: ActArgs, mut file: ActArgs) -> ActArgs {
    if args.observe.is_some() {
        file.quarantine = None;
    }
    if args.quarantine.is_some() {
        file.observe = None;
    }
    args.over(file)
}

/// What the roles have in common: their groups of arguments.
macro_rules! groups {
    ($($group:ident: $over:expr),*) => {
        fn config(&self) -> Option<&Path> {
            self.config.as_deref()
        }

        fn from_file(file: &ConfigFile) -> Result<Self, SettingsError> {
            Ok(Self {
                config: None,
                $($group: file.group()?,)*
            })
        }

        fn over(self, lower: Self) -> Self {
            Self {
                config: self.config,
                $($group: $over(self.$group, lower.$group),)*
            }
        }
    };
}

impl Role for RunArgs {
    type Settings = RunSettings;

    groups!(node: crate::args::NodeArgs::over, process: crate::args::ProcessArgs::over, act: act_over);

    fn settle(self) -> Result<RunSettings, SettingsError> {
        let process = ProcessSettings::resolve(self.process)?;
        let node = NodeSettings::resolve(self.node, &process)?;
        let act = ActSettings::resolve(self.act)?;
        Ok(RunSettings { node, process, act })
    }
}

impl Role for AgentArgs {
    type Settings = AgentSettings;

    groups!(delivery: crate::args::DeliveryArgs::over, node: crate::args::NodeArgs::over,
            process: crate::args::ProcessArgs::over);

    fn settle(self) -> Result<AgentSettings, SettingsError> {
        let process = ProcessSettings::resolve(self.process)?;
        let node = NodeSettings::resolve(self.node, &process)?;
        let delivery = DeliverySettings::resolve(self.delivery)?;
        Ok(AgentSettings {
            delivery,
            node,
            process,
        })
    }
}

impl Role for ControllerArgs {
    type Settings = ControllerSettings;

    groups!(ingest: crate::args::IngestArgs::over, election: crate::args::ElectionArgs::over,
            process: crate::args::ProcessArgs::over, act: act_over);

    fn settle(self) -> Result<ControllerSettings, SettingsError> {
        let process = ProcessSettings::resolve(self.process)?;
        let act = ActSettings::resolve(self.act)?;
        let in_cluster = act.cluster.is_some();
        let ingest = IngestSettings::resolve(self.ingest, in_cluster, &act.namespace)?;
        let leader_elect = match (self.election.leader_elect, in_cluster) {
            (Some(true), false) => {
                return Err(SettingsError::Conflict(
                    "--leader-elect needs a cluster to hold the Lease in: name one with \
                     --kubeconfig FILE or --context NAME",
                ));
            }
            (Some(wanted), _) => wanted,
            // Who only looks must neither keep an acting one from the lead nor write anything.
            (None, _) => act.mode == Mode::Quarantine,
        };
        Ok(ControllerSettings {
            ingest,
            process,
            act,
            leader_elect,
        })
    }
}
