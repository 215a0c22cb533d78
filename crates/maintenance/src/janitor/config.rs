//! Configuration of the janitor: NVSentinel's file (YAML), and gpuwarden's own keys `generic`,
//! `redfish` and `label`.

use std::collections::BTreeMap;

use contract::findings::{FileError, Findings, Format};
use contract::names;
use jiff::SignedDuration;
use model::selector::{LabelSelector, SelectorObject};
use serde::Deserialize;
use serde_json::Value;

use super::Action;
use super::generic::GenericConfig;
use super::label::LabelConfig;
use super::redfish::RedfishConfig;
use crate::gpu_reset::ResetSettings;

/// Default time limit of an action.
const TIMEOUT: SignedDuration = SignedDuration::from_mins(30);
/// Longest time limit that can be configured.
const MAX_TIMEOUT: SignedDuration = SignedDuration::from_hours(24);
/// Name of the only supported service manager.
const GPU_OPERATOR: &str = "gpu-operator";
/// Key of the settings for all actions.
const GLOBAL: &str = "global";
/// Key of the settings for GPU resets.
const RESETS: &str = "gpuResetController";
/// Default token file: that of the pod's service account.
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// Configuration of the janitor.
#[derive(Clone, Debug)]
pub struct JanitorConfig {
    rules: BTreeMap<Action, Rules>,
    exclusions: Vec<LabelSelector>,
    /// Settings for GPU resets. `None` if requests are ignored. The namespace is filled in by
    /// the caller.
    pub resets: Option<ResetSettings>,
    /// Provider that resets GPUs. `None` if a Job does.
    pub reset_provider: Option<ProviderPlace>,
    /// Settings of the built-in provider, used if no other is configured.
    pub generic: GenericConfig,
    /// Settings for BMCs. If set, reboots use BMCs instead of Jobs.
    pub redfish: RedfishConfig,
    /// Labels by which owners of machines are asked. Such an action uses no other provider.
    pub label: LabelConfig,
}

/// Rules for an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Time limit of the action.
    pub timeout: SignedDuration,
    /// True if a person sends the signals.
    pub manual: bool,
    /// Provider of the action.
    pub provider: ProviderPlace,
}

/// Address of a provider.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ProviderPlace {
    /// The generic provider in this process: a Job on the node.
    Generic,
    /// The Redfish provider in this process: the BMC of the node's machine.
    Redfish,
    /// The label provider in this process: a label of the node, for the machine's owner.
    Label,
    /// A gRPC server with TLS, and a token that is read for each call.
    Tls {
        /// Host and port of the server.
        host: String,
        /// File of the certificate authorities.
        authority: String,
        /// File of the token.
        token: String,
    },
    /// A gRPC server without TLS and token.
    Open {
        /// Host and port of the server.
        host: String,
    },
}

/// Top-level keys of the file.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct File {
    global: Global,
    reboot_node_controller: Controller,
    terminate_node_controller: Controller,
    gpu_reset_controller: ResetController,
    /// Settings of the built-in provider; a key of gpuwarden.
    generic: GenericConfig,
    redfish: RedfishConfig,
    label: LabelConfig,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Global {
    timeout: Option<String>,
    manual_mode: bool,
    nodes: Nodes,
    csp_provider_host: String,
    #[serde(rename = "cspProviderCAPath")]
    csp_provider_ca_path: String,
    csp_provider_insecure: bool,
    csp_provider_token_path: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Nodes {
    exclusions: Vec<SelectorObject>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Controller {
    enabled: bool,
    timeout: Option<String>,
    manual_mode: Option<bool>,
    csp_provider_host: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ResetController {
    /// Defaults to true if an image or a provider is configured.
    enabled: Option<bool>,
    timeout: Option<String>,
    /// Ignored: only the janitor sends this signal.
    #[serde(rename = "manualMode")]
    _manual_mode: Value,
    /// The global provider does not apply: providers that reboot nodes may not support resets.
    csp_provider_host: String,
    service_manager: ServiceManager,
    reset_job: ResetJob,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ServiceManager {
    name: String,
    /// Ignored: the services of the GPU operator are built in.
    #[serde(rename = "spec")]
    _spec: Value,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ResetJob {
    image_config: ImageConfig,
    resources: Value,
    runtime_class_name: String,
    write_sys_log_event: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ImageConfig {
    image: String,
    image_pull_secrets: Vec<Named>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    name: String,
}

// === impl JanitorConfig ===

impl JanitorConfig {
    /// Parses a configuration. `source` names the file in errors, which list everything that is
    /// wrong.
    pub fn parse(text: &str, source: &str) -> Result<Self, FileError> {
        let (file, mut findings) = Findings::read::<File>(text, source, Format::Yaml)?;
        file.redfish.check(&mut findings);
        file.label.check(&mut findings);
        let global = &file.global;
        let built_in = if file.redfish.is_used() {
            ProviderPlace::Redfish
        } else {
            ProviderPlace::Generic
        };
        let controllers = [
            (
                Action::Reboot,
                "rebootNodeController",
                &file.reboot_node_controller,
            ),
            (
                Action::Terminate,
                "terminateNodeController",
                &file.terminate_node_controller,
            ),
        ];
        let mut rules = BTreeMap::new();
        for (action, key, controller) in controllers {
            if controller.enabled {
                let built_in = match file.label.key(action) {
                    Some(_) => &ProviderPlace::Label,
                    None => &built_in,
                };
                rules.insert(
                    action,
                    controller.rules(key, global, built_in, &mut findings),
                );
            }
        }
        let exclusions = global.nodes.exclusions.iter().enumerate();
        let exclusions = exclusions.filter_map(|(at, selector)| {
            let selector = match LabelSelector::try_from(selector) {
                Ok(selector) => Ok(selector),
                Err(_) if *selector == SelectorObject::default() => {
                    Err("it is empty, and would exclude every node".to_owned())
                }
                Err(error) => Err(error.to_string()),
            };
            findings.check(&format!("global.nodes.exclusions[{at}]"), selector)
        });
        let exclusions = exclusions.collect();
        let longest = rules.values().map(|rules| rules.timeout).max();
        let resets = file.gpu_reset_controller.settings(global, &mut findings);
        let reset_provider = file.gpu_reset_controller.provider(global, &mut findings);
        file.generic
            .check(longest.unwrap_or_default(), &mut findings);
        findings.result(Self {
            rules,
            exclusions,
            reset_provider: reset_provider.filter(|_| resets.is_some()),
            resets,
            generic: file.generic,
            redfish: file.redfish,
            label: file.label,
        })
    }

    /// Returns the rules for an action. `None` if its resources are ignored.
    pub fn rules(&self, action: Action) -> Option<&Rules> {
        self.rules.get(&action)
    }

    /// Returns the enabled actions.
    pub fn actions(&self) -> impl Iterator<Item = Action> + '_ {
        self.rules.keys().copied()
    }

    /// Returns whether a node with these labels is excluded.
    pub fn excludes(&self, labels: &BTreeMap<String, String>) -> bool {
        self.exclusions.iter().any(|one| one.matches(labels))
    }
}

// === impl ResetController ===

impl ResetController {
    fn settings(&self, global: &Global, findings: &mut Findings<'_>) -> Option<ResetSettings> {
        let path = |key: &str| format!("{RESETS}.{key}");
        let job = &self.reset_job;
        let secrets = &job.image_config.image_pull_secrets;
        if !job.runtime_class_name.is_empty() {
            let checked = names::object_name(&job.runtime_class_name);
            findings.check(&path("resetJob.runtimeClassName"), checked);
        }
        for (at, secret) in secrets.iter().enumerate() {
            let path = path(&format!("resetJob.imageConfig.imagePullSecrets[{at}].name"));
            findings.check(&path, names::object_name(&secret.name));
        }
        let has_image = !job.image_config.image.is_empty();
        let has_provider = !self.csp_provider_host.is_empty();
        if !self.enabled.unwrap_or(has_image || has_provider) {
            return None;
        }
        if !has_image && !has_provider {
            let what = "it is missing: the image of the Job";
            findings.at_key(&path("resetJob.imageConfig.image"), what);
        }
        let services = match self.service_manager.name.as_str() {
            "" => Some(false),
            name => {
                let known = [(GPU_OPERATOR, true)];
                findings.one_of(&path("serviceManager.name"), name, &known)
            }
        };
        Some(ResetSettings {
            services: services.unwrap_or_default(),
            timeout: global.timeout(self.timeout.as_deref(), RESETS, findings),
            namespace: String::new(),
            image: job.image_config.image.clone(),
            pull_secrets: secrets.iter().map(|one| one.name.clone()).collect(),
            runtime_class: (!job.runtime_class_name.is_empty())
                .then(|| job.runtime_class_name.clone()),
            resources: job.resources.clone(),
            write_log: job.write_sys_log_event.unwrap_or(true),
        })
    }

    fn provider(&self, global: &Global, findings: &mut Findings<'_>) -> Option<ProviderPlace> {
        if self.csp_provider_host.is_empty() {
            return None;
        }
        global.provider(&self.csp_provider_host, RESETS, findings)
    }
}

// === impl Controller ===

impl Default for Controller {
    fn default() -> Self {
        Self {
            enabled: true,
            timeout: None,
            manual_mode: None,
            csp_provider_host: String::new(),
        }
    }
}

impl Controller {
    fn rules(
        &self,
        key: &str,
        global: &Global,
        built_in: &ProviderPlace,
        findings: &mut Findings<'_>,
    ) -> Rules {
        // A label is named for one action, and the global provider for all.
        let global_host: &str = match built_in {
            ProviderPlace::Label => "",
            _ => &global.csp_provider_host,
        };
        let hosts = [(&*self.csp_provider_host, key), (global_host, GLOBAL)];
        let host = hosts.into_iter().find(|(host, _)| !host.is_empty());
        let provider = host.and_then(|(host, key)| global.provider(host, key, findings));
        Rules {
            timeout: global.timeout(self.timeout.as_deref(), key, findings),
            manual: self.manual_mode.unwrap_or(global.manual_mode),
            provider: provider.unwrap_or_else(|| built_in.clone()),
        }
    }
}

// === impl Global ===

impl Global {
    /// Returns the time limit of the controller `key`: its own, or that of all.
    fn timeout(&self, own: Option<&str>, key: &str, findings: &mut Findings<'_>) -> SignedDuration {
        let of_all = self.timeout.as_deref().map(|text| (text, GLOBAL));
        let timeout = own
            .map(|text| (text, key))
            .or(of_all)
            .and_then(|(text, key)| {
                findings.duration(&format!("{key}.timeout"), text, MAX_TIMEOUT)
            });
        timeout.unwrap_or(TIMEOUT)
    }

    /// Returns the provider at the `host` that the table `key` names.
    fn provider(
        &self,
        host: &str,
        key: &str,
        findings: &mut Findings<'_>,
    ) -> Option<ProviderPlace> {
        let (name, port) = host.rsplit_once(':').unwrap_or((host, ""));
        if name.is_empty() || name.contains('/') || port.parse::<u16>().is_err() {
            findings.refuse(&format!("{key}.cspProviderHost"), "write HOST:PORT");
            return None;
        }
        let host = host.to_owned();
        if self.csp_provider_insecure {
            return Some(ProviderPlace::Open { host });
        }
        if self.csp_provider_ca_path.is_empty() {
            let what = format!(
                "{key}.cspProviderHost is named, and this is not: name the file of the authorities that \
                 its certificate is checked against, or set cspProviderInsecure"
            );
            findings.at_key("global.cspProviderCAPath", what);
            return None;
        }
        let token = match self.csp_provider_token_path.as_str() {
            "" => TOKEN,
            path => path,
        };
        Some(ProviderPlace::Tls {
            host,
            authority: self.csp_provider_ca_path.clone(),
            token: token.to_owned(),
        })
    }
}
