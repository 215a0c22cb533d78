//! The settings of the labels of nodes.

use std::collections::BTreeMap;

use contract::names;
use labels::pod::{DcgmVersion, PodRole};
use labels::{LabelConfig, classes};

use super::amount::{choice, parsed};
use super::{ActSettings, Mode, SettingsError};
use crate::args::LabelArgs;

/// Values of the label `app` of pods with DCGM: of the GPU Operator, without and with dynamic
/// resource allocation.
const DCGM: &str = "nvidia-dcgm,nvidia-dcgm-dra";
/// Value of the label `app` of pods that install the driver, of the GPU Operator.
const DRIVER: &str = "nvidia-driver-daemonset";
/// Value of the label `k8s-app` of pods that install the driver on GKE.
const INSTALLER: &str = "nvidia-driver-installer";

const CLASSES: &str = "--expected-device-counts-config-file";

/// Settings of the labels of nodes.
#[derive(Debug, Clone)]
pub struct LabelSettings {
    pub labels: LabelConfig,
    /// Label selector of the pods of each role.
    pub selectors: BTreeMap<PodRole, String>,
}

// === impl LabelSettings ===

impl LabelSettings {
    pub(super) fn resolve(
        args: LabelArgs,
        act: &ActSettings,
    ) -> Result<Option<Self>, SettingsError> {
        if !args.label_nodes.unwrap_or(false) {
            return if args.is_configured() {
                Err(SettingsError::Conflict(
                    "the settings of labels need --label-nodes: add it, or remove them",
                ))
            } else {
                Ok(None)
            };
        }
        if act.cluster.is_none() {
            return Err(SettingsError::Conflict(
                "--label-nodes needs a cluster: name one with --kubeconfig FILE or --context NAME",
            ));
        }
        if act.mode == Mode::DryRun {
            return Err(SettingsError::Conflict(
                "--label-nodes writes labels, and --dry-run writes nothing: remove one",
            ));
        }
        let selectors = [
            (
                PodRole::Dcgm,
                "--dcgm-app-label",
                "app",
                args.dcgm_app_label,
                DCGM,
            ),
            (
                PodRole::Driver,
                "--driver-app-label",
                "app",
                args.driver_app_label,
                DRIVER,
            ),
            (
                PodRole::Installer,
                "--gke-installer-app-label",
                "k8s-app",
                args.gke_installer_app_label,
                INSTALLER,
            ),
        ];
        let selectors = selectors
            .into_iter()
            .map(|(role, flag, key, given, default)| {
                let values = given.as_deref().unwrap_or(default);
                Ok((role, selector(flag, key, values)?))
            });
        let kata_label = args.kata_label.filter(|label| !label.is_empty());
        if let Some(label) = &kata_label {
            let checked = names::label_key(label);
            checked.map_err(|error| SettingsError::value("--kata-label", label, error.why))?;
        }
        let versions = [
            ("3.x", Some(DcgmVersion::V3)),
            ("4.x", Some(DcgmVersion::V4)),
        ];
        let dcgm_version = match args.dcgm_version.as_deref() {
            None => None,
            text => choice("--dcgm-version", text, versions)?,
        };
        let classes = match &args.expected_device_counts_config_file {
            None => classes::built_in()
                .map_err(|error| SettingsError::value(CLASSES, "", error.to_string()))?,
            Some(path) => parsed(CLASSES, path, classes::parse)?,
        };
        Ok(Some(Self {
            selectors: selectors.collect::<Result<_, SettingsError>>()?,
            labels: LabelConfig {
                kata_label,
                assume_driver: args.assume_driver_installed.unwrap_or(false),
                assume_dcgm: args.assume_dcgm_available.unwrap_or(false),
                dcgm_ready_first: args.require_dcgm_ready_for_bootstrap.unwrap_or(true),
                dcgm_version,
                classes,
            },
        }))
    }
}

// === impl LabelArgs ===

impl LabelArgs {
    /// Returns true if there is any setting beside `--label-nodes`.
    fn is_configured(&self) -> bool {
        let texts = [
            &self.dcgm_app_label,
            &self.driver_app_label,
            &self.gke_installer_app_label,
            &self.kata_label,
            &self.dcgm_version,
        ];
        let switches = [
            self.assume_driver_installed,
            self.assume_dcgm_available,
            self.require_dcgm_ready_for_bootstrap,
        ];
        texts.iter().any(|text| text.is_some())
            || switches.iter().any(Option::is_some)
            || self.expected_device_counts_config_file.is_some()
    }
}

/// Returns the selector of pods whose label `key` has one of the values.
fn selector(flag: &'static str, key: &str, values: &str) -> Result<String, SettingsError> {
    for value in values.split(',') {
        let wrong = |what: String| SettingsError::value(flag, values, what);
        if value.is_empty() {
            return Err(wrong("has an empty value".to_owned()));
        }
        names::label_value(value).map_err(|error| wrong(error.to_string()))?;
    }
    Ok(format!("{key} in ({values})"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::ControllerArgs;
    use crate::settings::resolve;

    type Edit<'a> = &'a dyn Fn(&mut ControllerArgs);

    fn resolved(edit: Edit<'_>) -> Result<Option<LabelSettings>, String> {
        let mut args = ControllerArgs::default();
        args.process.data_dir = Some("/nowhere".into());
        args.ingest.grpc_listen = Some("127.0.0.1:0".parse().unwrap());
        args.ingest.grpc_insecure = Some(true);
        args.act.kubeconfig = Some("/nowhere/kubeconfig".into());
        args.labels.label_nodes = Some(true);
        edit(&mut args);
        match resolve(args) {
            Ok(settings) => {
                assert!(settings.leader_elect || settings.labels.is_none());
                Ok(settings.labels)
            }
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn the_defaults_are_those_of_the_reference_and_its_flags_are_taken() {
        let labels = resolved(&|_| ()).unwrap().unwrap();
        let selectors: Vec<&str> = labels.selectors.values().map(String::as_str).collect();
        let expected = [
            "app in (nvidia-dcgm,nvidia-dcgm-dra)",
            "app in (nvidia-driver-daemonset)",
            "k8s-app in (nvidia-driver-installer)",
        ];
        assert_eq!(selectors, expected);
        let config = labels.labels;
        assert!(config.dcgm_ready_first && !config.assume_driver && !config.assume_dcgm);
        assert_eq!((config.classes.len(), config.dcgm_version), (3, None));
        let labels = resolved(&|args| {
            args.labels.dcgm_app_label = Some("a,b".into());
            args.labels.kata_label = Some(String::new());
            args.labels.dcgm_version = Some("4.x".into());
            args.labels.require_dcgm_ready_for_bootstrap = Some(false);
        });
        let labels = labels.unwrap().unwrap();
        assert_eq!(labels.selectors[&PodRole::Dcgm], "app in (a,b)");
        assert_eq!(labels.labels.kata_label, None);
        assert_eq!(labels.labels.dcgm_version, Some(DcgmVersion::V4));
        assert!(!labels.labels.dcgm_ready_first);
        assert!(
            resolved(&|args| args.labels = LabelArgs::default())
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("counts.toml");
        std::fs::write(&file, "[[classes]]\nname = \"gpu\"\n").unwrap();
        let cases: &[(&str, Edit<'_>)] = &[
            ("need --label-nodes", &|args| {
                args.labels.label_nodes = None;
                args.labels.assume_dcgm_available = Some(true);
            }),
            ("--label-nodes needs a cluster", &|args| {
                args.act.kubeconfig = None;
            }),
            ("--dry-run writes nothing", &|args| {
                args.act.quarantine = Some(true);
                args.act.dry_run = Some(true);
            }),
            ("--dcgm-app-label", &|args| {
                args.labels.dcgm_app_label = Some("a,,b".into());
            }),
            ("--driver-app-label", &|args| {
                args.labels.driver_app_label = Some("a b".into());
            }),
            ("--kata-label", &|args| {
                args.labels.kata_label = Some("a b".into());
            }),
            ("--dcgm-version", &|args| {
                args.labels.dcgm_version = Some("4.5".into());
            }),
            ("counts.toml:1: classes[0].enabled is missing", &|args| {
                args.labels.expected_device_counts_config_file = Some(file.clone());
            }),
        ];
        for (expected, edit) in cases {
            let error = resolved(edit).unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
