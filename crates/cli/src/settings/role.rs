//! Merges the settings of a role: flags and environment, then the file, then defaults.

use std::path::Path;

use super::act::text_place_with_key;
use super::file::ConfigFile;
use super::{
    ActSettings, AgentSettings, AuditSettings, ControllerSettings, DeliverySettings,
    DeviceSettings, IngestSettings, LabelSettings, NodeSettings, ProcessSettings, RunSettings,
    SettingsError,
};
use crate::args::{ActArgs, AgentArgs, ControllerArgs, RunArgs};
use crate::policy_source::PRESET;
use controller::objects::ObjectsSource;
use objects::presets;

/// Default key of a `ConfigMap` with policies over objects: the file's name in NVSentinel's.
const OBJECTS_KEY: &str = "policies.toml";

/// Arguments of `run`, `agent` or `controller`.
pub(crate) trait Role: clap::Args {
    type Settings;

    /// Returns the path of the configuration file.
    fn config(&self) -> Option<&Path>;
    /// Sets the missing arguments from the file.
    fn fill(&mut self, file: &ConfigFile) -> Result<(), SettingsError>;
    /// Checks the arguments, and fills in the defaults.
    fn settle(self) -> Result<Self::Settings, SettingsError>;
}

/// Returns the settings, or the first error.
pub(crate) fn resolve<R: Role>(mut args: R) -> Result<R::Settings, SettingsError> {
    let file = ConfigFile::read::<R>(args.config())?;
    args.fill(&file)?;
    args.settle()
}

/// Sets the missing arguments of the group. The flag of one of two exclusive switches overrides the
/// file's value for the other.
fn fill_act(args: &mut ActArgs, file: &ConfigFile) -> Result<(), SettingsError> {
    let mut lower: ActArgs = file.group()?;
    if args.observe.is_some() {
        lower.quarantine = None;
    }
    if args.quarantine.is_some() {
        lower.observe = None;
    }
    args.fill(lower);
    Ok(())
}

impl Role for RunArgs {
    type Settings = RunSettings;

    fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    fn fill(&mut self, file: &ConfigFile) -> Result<(), SettingsError> {
        self.node.fill(file.group()?);
        self.gpu.fill(file.group()?);
        self.devices.fill(file.group()?);
        self.process.fill(file.group()?);
        self.audit.fill(file.group()?);
        fill_act(&mut self.act, file)
    }

    fn settle(self) -> Result<RunSettings, SettingsError> {
        let process = ProcessSettings::resolve(self.process)?;
        let node = NodeSettings::resolve(self.node, self.gpu, &process)?;
        let devices = DeviceSettings::resolve(self.devices, &process)?;
        let act = ActSettings::resolve(self.act)?;
        if node.metadata_service.is_some() && act.maintenance.is_none() {
            return Err(SettingsError::Conflict(
                "--metadata-service needs --maintenance FILE, which says what maintenance leads to",
            ));
        }
        Ok(RunSettings {
            node,
            devices,
            process,
            act,
            audit: AuditSettings::resolve(self.audit),
        })
    }
}

impl Role for AgentArgs {
    type Settings = AgentSettings;

    fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    fn fill(&mut self, file: &ConfigFile) -> Result<(), SettingsError> {
        self.delivery.fill(file.group()?);
        self.node.fill(file.group()?);
        self.gpu.fill(file.group()?);
        self.devices.fill(file.group()?);
        self.process.fill(file.group()?);
        Ok(())
    }

    fn settle(self) -> Result<AgentSettings, SettingsError> {
        let process = ProcessSettings::resolve(self.process)?;
        let node = NodeSettings::resolve(self.node, self.gpu, &process)?;
        let devices = DeviceSettings::resolve(self.devices, &process)?;
        let delivery = DeliverySettings::resolve(self.delivery)?;
        Ok(AgentSettings {
            delivery,
            node,
            devices,
            process,
        })
    }
}

impl Role for ControllerArgs {
    type Settings = ControllerSettings;

    fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    fn fill(&mut self, file: &ConfigFile) -> Result<(), SettingsError> {
        self.ingest.fill(file.group()?);
        self.election.fill(file.group()?);
        self.labels.fill(file.group()?);
        self.objects.fill(file.group()?);
        self.process.fill(file.group()?);
        self.audit.fill(file.group()?);
        fill_act(&mut self.act, file)
    }

    fn settle(self) -> Result<ControllerSettings, SettingsError> {
        let process = ProcessSettings::resolve(self.process)?;
        let act = ActSettings::resolve(self.act)?;
        let in_cluster = act.cluster.is_some();
        let ingest = IngestSettings::resolve(self.ingest, in_cluster, &act.namespace)?;
        let labels = LabelSettings::resolve(self.labels, &act)?;
        let leader_elect = match (self.election.leader_elect, in_cluster) {
            (Some(true), false) => {
                return Err(SettingsError::Conflict(
                    "--leader-elect needs a cluster to hold the Lease in: name one with \
                     --kubeconfig FILE or --context NAME",
                ));
            }
            (Some(wanted), _) => wanted,
            // An observer must neither keep an acting controller from the lead nor write anything.
            (None, _) => act.mode.writes() || act.janitor.is_some() || labels.is_some(),
        };
        Ok(ControllerSettings {
            objects: objects(self.objects.objects.as_deref(), in_cluster)?,
            ingest,
            process,
            act,
            labels,
            audit: AuditSettings::resolve(self.audit),
            leader_elect,
        })
    }
}

/// Returns the source of the policies over objects.
fn objects(text: Option<&str>, in_cluster: bool) -> Result<Option<ObjectsSource>, SettingsError> {
    let flag = "--objects";
    let Some(text) = text else {
        return Ok(None);
    };
    if !in_cluster {
        return Err(SettingsError::Conflict(
            "--objects needs a cluster whose objects are watched: name one with --kubeconfig FILE or \
             --context NAME",
        ));
    }
    let Some(name) = text.strip_prefix(PRESET) else {
        let place = text_place_with_key(flag, text, OBJECTS_KEY)?;
        return Ok(Some(ObjectsSource::Place(place)));
    };
    let preset = presets::find(name).map_err(|what| SettingsError::value(flag, text, what))?;
    Ok(Some(ObjectsSource::Preset(preset)))
}
