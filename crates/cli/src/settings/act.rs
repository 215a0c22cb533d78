//! The settings of the store, the policy and the cluster.

use std::path::{Path, PathBuf};

use cluster::ConnectOptions;
use contract::{keys, names};
use controller::policy::PolicySource;
use controller::text_place::TextPlace;
use fleet::brake::NodeLabel;
use fleet::drain::DrainConfig;
use fleet::remediation::RemediationConfig;
use jiff::SignedDuration;
pub use model::mode::Mode;
use notices::MaintenanceConfig;

use super::amount::parsed;
use super::janitor::JanitorSettings;
use super::kubernetes::{connect_options, in_pod, namespace};
use super::reports::ReportSettings;
use super::{SettingsError, amount};
use crate::args::{ActArgs, ConnectArgs};
use crate::policy_source;

/// Default retention: long enough for the last incident of a node.
const RETENTION: &str = "30d";
/// Shortest retention: `explain` has to show the incident that a person investigates.
const SHORTEST_RETENTION: SignedDuration = SignedDuration::from_hours(1);
/// Default size of the event store: hundreds of thousands of events.
const STORE_SIZE: &str = "1GiB";
/// Smallest size of the event store (bytes): tens of thousands of events. In a smaller store new
/// events would delete those of a moment ago.
const SMALLEST_STORE: u64 = 64 * 1024 * 1024;
/// Default key of a `ConfigMap` with a policy or rules: the file's name in NVSentinel's.
const POLICY_KEY: &str = "config.toml";

/// Rules of the analysis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnalysisRules {
    /// Nothing is analysed.
    Off,
    /// The built-in rules.
    BuiltIn,
    /// A file or `ConfigMap`, beside the built-in rules.
    Place(TextPlace),
}

/// Settings of the store, the policy and the cluster.
#[derive(Debug, Clone)]
pub struct ActSettings {
    /// `NVSentinel`'s config.json, which changes events before they are stored.
    pub connector_config: Option<PathBuf>,
    pub retention: SignedDuration,
    /// Largest size of the event store (bytes).
    pub store_size: u64,
    pub cluster: Option<ConnectOptions>,
    pub mode: Mode,
    /// `None`: pods stay on nodes that are out of service.
    pub drain: Option<DrainConfig>,
    /// `None`: drained nodes are not remediated.
    pub remediation: Option<RemediationConfig>,
    /// `None`: custom resources are not carried out.
    pub janitor: Option<JanitorSettings>,
    /// `None`: notices of maintenance are not read.
    pub maintenance: Option<Box<MaintenanceConfig>>,
    pub reports: ReportSettings,
    pub policy: PolicySource,
    /// Rules of the analysis beside the built-in ones.
    pub rules: AnalysisRules,
    /// True if the policy's brake limits quarantines.
    pub circuit_breaker: bool,
    pub gpu_node_label: NodeLabel,
    /// Namespace of gpuwarden's own objects.
    pub namespace: String,
}

// === impl ActSettings ===

impl ActSettings {
    pub(super) fn resolve(args: ActArgs) -> Result<Self, SettingsError> {
        let retention_text = args.retention.as_deref().unwrap_or(RETENTION);
        let retention = amount::duration("--retention", retention_text)?;
        if retention < SHORTEST_RETENTION {
            let what = "is less than an hour: `explain` needs the events of the last incident";
            return Err(SettingsError::value("--retention", retention_text, what));
        }
        let size_text = args.store_size.as_deref().unwrap_or(STORE_SIZE);
        let store_size = amount::bytes("--store-size", size_text)?;
        if store_size < SMALLEST_STORE {
            let what = "is less than 64MiB: `explain` needs the events of the last incident";
            return Err(SettingsError::value("--store-size", size_text, what));
        }
        let label = args.gpu_node_label.as_deref();
        let label = label.unwrap_or(keys::GPU_NODE_LABEL);
        let gpu_node_label = NodeLabel::parse(label)
            .map_err(|what| SettingsError::value("--gpu-node-label", label, what))?;
        let namespace = namespace(args.namespace.clone())?;
        let named = args.kubeconfig.is_some() || args.context.is_some();
        let connect = || ConnectArgs {
            kubeconfig: args.kubeconfig.clone(),
            context: args.context.clone(),
        };
        let cluster = (named || in_pod()).then(|| connect_options(connect()));
        let mode = mode(&args, cluster.is_some())?;
        let policy = match &args.policy {
            None => PolicySource::BuiltIn,
            Some(text) => policy(text)?,
        };
        let place = match &policy {
            PolicySource::Place(place) => Some(place),
            _ => None,
        };
        if is_unreachable(place, cluster.is_some()) {
            return Err(SettingsError::Conflict(
                "--policy configmap:... needs a cluster to read it from: name one with \
                 --kubeconfig FILE or --context NAME",
            ));
        }
        let rules = rules(&args, cluster.is_some())?;
        let drain = drain(&args, mode)?;
        let remediation = remediation(&args, drain.is_some())?;
        let janitor = JanitorSettings::resolve(&args, cluster.is_some())?;
        let maintenance = maintenance(&args, cluster.is_some())?;
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
            maintenance,
            reports,
            policy,
            rules,
            circuit_breaker: args.circuit_breaker.unwrap_or(true),
            gpu_node_label,
            namespace,
        })
    }
}

/// Returns the settings of `--maintenance`.
fn maintenance(
    args: &ActArgs,
    in_cluster: bool,
) -> Result<Option<Box<MaintenanceConfig>>, SettingsError> {
    let Some(path) = &args.maintenance else {
        return Ok(None);
    };
    if !in_cluster {
        return Err(SettingsError::Conflict(
            "--maintenance needs a cluster, on whose nodes it reads notices: name one with --kubeconfig \
             FILE or --context NAME",
        ));
    }
    let config = parsed("--maintenance", path, MaintenanceConfig::parse)?;
    Ok(Some(Box::new(config)))
}

/// Returns the mode of `--observe`, `--quarantine` and `--dry-run`.
fn mode(args: &ActArgs, in_cluster: bool) -> Result<Mode, SettingsError> {
    let acts = args.quarantine.unwrap_or(false);
    let observes = args.observe.unwrap_or(false);
    let conflict = match (acts, observes, args.dry_run.unwrap_or(false)) {
        (false, _, false) => return Ok(Mode::Observe),
        (true, true, _) => "--observe and --quarantine exclude each other: remove one",
        (false, _, true) => {
            "--dry-run needs --quarantine: add it, or remove --dry-run (without --quarantine nothing is \
             decided)"
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

/// Returns the configuration of drains; `None` without `--drain`.
fn drain(args: &ActArgs, mode: Mode) -> Result<Option<DrainConfig>, SettingsError> {
    if !args.drain.unwrap_or(false) {
        if args.drain_config.is_some() {
            return Err(SettingsError::Conflict(
                "--drain-config needs --drain: add it, or remove the file",
            ));
        }
        return Ok(None);
    }
    if !mode.decides() {
        return Err(SettingsError::Conflict(
            "--drain needs --quarantine: pods leave the nodes that are taken out of service",
        ));
    }
    let Some(path) = &args.drain_config else {
        return Ok(Some(DrainConfig::default()));
    };
    drain_config(path).map(Some)
}

/// Reads the configuration file of drains.
pub(crate) fn drain_config(path: &Path) -> Result<DrainConfig, SettingsError> {
    parsed("--drain-config", path, |text, source| {
        DrainConfig::parse_with(text, source, read_text)
    })
}

/// Returns the configuration of remediation; `None` without `--remediate`.
fn remediation(args: &ActArgs, drains: bool) -> Result<Option<RemediationConfig>, SettingsError> {
    if !args.remediate.unwrap_or(false) {
        if args.remediate_config.is_some() {
            return Err(SettingsError::Conflict(
                "--remediate-config needs --remediate: add it, or remove the file",
            ));
        }
        return Ok(None);
    }
    if !drains {
        return Err(SettingsError::Conflict(
            "--remediate needs --drain: a node is remediated once its pods have left",
        ));
    }
    let Some(path) = &args.remediate_config else {
        return Ok(Some(RemediationConfig::builtin()));
    };
    let config = parsed("--remediate-config", path, |text, source| {
        RemediationConfig::parse(text, source, read_text)
    });
    config.map(Some)
}

/// Reads a file that a configuration file names.
fn read_text(path: &str) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| error.to_string())
}

/// Parses the source of the policy: a file, a preset, or a key of a `ConfigMap`.
pub(super) fn policy(text: &str) -> Result<PolicySource, SettingsError> {
    if let Some(name) = text.strip_prefix(policy_source::PRESET) {
        let preset = policy_source::preset(name)
            .map_err(|what| SettingsError::value("--policy", text, what))?;
        return Ok(PolicySource::Preset(preset));
    }
    text_place("--policy", text).map(PolicySource::Place)
}

/// Returns the rules of `--analyze` and `--rules`.
fn rules(args: &ActArgs, has_cluster: bool) -> Result<AnalysisRules, SettingsError> {
    let analyzes = args.analyze.unwrap_or(true);
    let Some(text) = &args.rules else {
        let built_in = AnalysisRules::BuiltIn;
        return Ok(if analyzes {
            built_in
        } else {
            AnalysisRules::Off
        });
    };
    if !analyzes {
        return Err(SettingsError::Conflict(
            "--rules and --analyze=false exclude each other: remove one",
        ));
    }
    let place = text_place("--rules", text)?;
    if is_unreachable(Some(&place), has_cluster) {
        return Err(SettingsError::Conflict(
            "--rules configmap:... needs a cluster to read it from: name one with \
             --kubeconfig FILE or --context NAME",
        ));
    }
    Ok(AnalysisRules::Place(place))
}

/// Returns true if a text is in a cluster and there is none.
fn is_unreachable(place: Option<&TextPlace>, has_cluster: bool) -> bool {
    matches!(place, Some(TextPlace::ConfigMap { .. })) && !has_cluster
}

/// Parses the place of a text: a file, or a key of a `ConfigMap`.
pub(crate) fn text_place(flag: &'static str, text: &str) -> Result<TextPlace, SettingsError> {
    text_place_with_key(flag, text, POLICY_KEY)
}

/// Does the work of [`text_place`] for a text whose default key is `key`.
pub(super) fn text_place_with_key(
    flag: &'static str,
    text: &str,
    key: &str,
) -> Result<TextPlace, SettingsError> {
    let Some(place) = text.strip_prefix("configmap:") else {
        return Ok(TextPlace::File(PathBuf::from(text)));
    };
    let wrong = |what: String| SettingsError::value(flag, text, what);
    let mut parts = place.splitn(3, '/');
    let (Some(namespace), Some(name)) = (parts.next(), parts.next()) else {
        return Err(wrong("is not configmap:NAMESPACE/NAME[/KEY]".to_owned()));
    };
    let key = parts.next().unwrap_or(key);
    names::dns_label(namespace)
        .and_then(|()| names::object_name(name))
        // A key of a `ConfigMap` has the letters of a label's value.
        .and_then(|()| names::label_value(key))
        .map_err(|error| {
            wrong(format!(
                "must be configmap:NAMESPACE/NAME[/KEY], and {error}"
            ))
        })?;
    Ok(TextPlace::ConfigMap {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        key: key.to_owned(),
    })
}
