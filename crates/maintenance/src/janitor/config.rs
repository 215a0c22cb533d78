//! Configuration of the janitor: NVSentinel's file (YAML), and gpuwarden's own keys `generic`
//! and `redfish`.

use std::collections::BTreeMap;

use contract::findings;
use contract::names::{self, WrongName};
use jiff::SignedDuration;
use model::selector::{LabelSelector, SelectorObject};
use serde::Deserialize;
use serde_json::Value;

use super::Action;
use super::generic::GenericConfig;
use super::redfish::RedfishConfig;
use crate::gpu_reset::ResetSettings;

/// Largest configuration, in bytes: as large as a `ConfigMap` can be.
pub const MAX_CONFIG_BYTES: usize = 1024 * 1024;
/// Default time limit of an action.
const TIMEOUT: SignedDuration = SignedDuration::from_mins(30);
/// Longest time limit that can be configured.
const MAX_TIMEOUT: SignedDuration = SignedDuration::from_hours(24);
/// Name of the only supported service manager.
const GPU_OPERATOR: &str = "gpu-operator";
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
    /// Parses a configuration. The error lists all findings, one per line.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_CONFIG_BYTES {
            let found = text.len();
            return Err(format!(
                "it has {found} bytes, at most {MAX_CONFIG_BYTES} are taken"
            ));
        }
        let file: File = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        let mut wrong = Vec::new();
        file.redfish.check(&mut wrong);
        let global = &file.global;
        let built_in = if file.redfish.is_used() {
            ProviderPlace::Redfish
        } else {
            ProviderPlace::Generic
        };
        let rules = [
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
        let rules: BTreeMap<Action, Rules> = rules
            .into_iter()
            .filter(|(.., controller)| controller.enabled)
            .map(|(action, key, controller)| {
                let rules = controller.rules(key, global, &built_in, &mut wrong);
                (action, rules)
            })
            .collect();
        let exclusions = global.nodes.exclusions.iter().enumerate();
        let exclusions = exclusions
            .filter_map(|(at, selector)| {
                let read = exclusion(selector, text);
                read.map_err(|why| wrong.push(format!("global.nodes.exclusions[{at}]: {why}")))
                    .ok()
            })
            .collect();
        let longest = rules.values().map(|rules| rules.timeout).max();
        let resets = file.gpu_reset_controller.settings(global, &mut wrong);
        let reset_provider = file.gpu_reset_controller.provider(global, &mut wrong);
        if let Err(why) = file.generic.check(longest.unwrap_or_default()) {
            wrong.push(format!("generic.{why}"));
        }
        for (key, checked) in file.names() {
            if let Err(error) = checked {
                let line = findings::on_line_with(text, &error.text);
                wrong.push(format!("{line}{key}: {error}"));
            }
        }
        if wrong.is_empty() {
            Ok(Self {
                rules,
                exclusions,
                reset_provider: reset_provider.filter(|_| resets.is_some()),
                resets,
                generic: file.generic,
                redfish: file.redfish,
            })
        } else {
            Err(wrong.join("\n"))
        }
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

// === impl File ===

impl File {
    /// Returns the object names in the file, by key, with the result of their validation.
    fn names(&self) -> Vec<(&'static str, Result<(), WrongName>)> {
        let job = &self.gpu_reset_controller.reset_job;
        let filled = |text: &str, check: fn(&str) -> Result<(), WrongName>| match text {
            "" => Ok(()),
            text => check(text),
        };
        let mut names = vec![
            (
                "generic.namespace",
                filled(&self.generic.namespace, names::dns_label),
            ),
            (
                "gpuResetController.resetJob.runtimeClassName",
                filled(&job.runtime_class_name, names::object_name),
            ),
        ];
        let own = self.generic.image_pull_secrets.iter();
        names.extend(own.map(|name| ("generic.imagePullSecrets", names::object_name(name))));
        let of_resets = job.image_config.image_pull_secrets.iter();
        names.extend(of_resets.map(|one| {
            let key = "gpuResetController.resetJob.imageConfig.imagePullSecrets";
            (key, names::object_name(&one.name))
        }));
        names
    }
}

// === impl ResetController ===

impl ResetController {
    fn settings(&self, global: &Global, wrong: &mut Vec<String>) -> Option<ResetSettings> {
        const KEY: &str = RESETS;
        let job = &self.reset_job;
        let has_image = !job.image_config.image.is_empty();
        let has_provider = !self.csp_provider_host.is_empty();
        if !self.enabled.unwrap_or(has_image || has_provider) {
            return None;
        }
        if !has_image && !has_provider {
            wrong.push(format!(
                "{KEY}.resetJob.imageConfig.image is missing: the image of the Job"
            ));
        }
        let services = match self.service_manager.name.as_str() {
            "" => false,
            GPU_OPERATOR => true,
            other => {
                wrong.push(format!(
                    "{KEY}.serviceManager.name is {other:?}; {GPU_OPERATOR} belongs here, or nothing"
                ));
                false
            }
        };
        let timeout = match (&self.timeout, &global.timeout) {
            (Some(own), _) => read_timeout(own, KEY, wrong),
            (None, Some(all)) => read_timeout(all, "global", wrong),
            (None, None) => TIMEOUT,
        };
        let secrets = job.image_config.image_pull_secrets.iter();
        Some(ResetSettings {
            services,
            timeout,
            namespace: String::new(),
            image: job.image_config.image.clone(),
            pull_secrets: secrets.map(|one| one.name.clone()).collect(),
            runtime_class: (!job.runtime_class_name.is_empty())
                .then(|| job.runtime_class_name.clone()),
            resources: job.resources.clone(),
            write_log: job.write_sys_log_event.unwrap_or(true),
        })
    }

    fn provider(&self, global: &Global, wrong: &mut Vec<String>) -> Option<ProviderPlace> {
        if self.csp_provider_host.is_empty() {
            return None;
        }
        let place = global.provider(&self.csp_provider_host, RESETS);
        place.map_err(|why| wrong.push(why)).ok()
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
        wrong: &mut Vec<String>,
    ) -> Rules {
        let timeout = match (&self.timeout, &global.timeout) {
            (Some(own), _) => read_timeout(own, key, wrong),
            (None, Some(all)) => read_timeout(all, "global", wrong),
            (None, None) => TIMEOUT,
        };
        let host = [&self.csp_provider_host, &global.csp_provider_host]
            .into_iter()
            .find(|host| !host.is_empty());
        let provider = match host {
            None => built_in.clone(),
            Some(host) => global.provider(host, key).unwrap_or_else(|why| {
                wrong.push(why);
                built_in.clone()
            }),
        };
        Rules {
            timeout,
            manual: self.manual_mode.unwrap_or(global.manual_mode),
            provider,
        }
    }
}

// === impl Global ===

impl Global {
    fn provider(&self, host: &str, key: &str) -> Result<ProviderPlace, String> {
        let (name, port) = host.rsplit_once(':').unwrap_or((host, ""));
        if name.is_empty() || name.contains('/') || port.parse::<u16>().is_err() {
            return Err(format!(
                "{key}: cspProviderHost is {host:?}; HOST:PORT belongs here"
            ));
        }
        let host = host.to_owned();
        if self.csp_provider_insecure {
            return Ok(ProviderPlace::Open { host });
        }
        if self.csp_provider_ca_path.is_empty() {
            return Err(format!(
                "{key}: cspProviderHost is named, and global.cspProviderCAPath is not: name the file of \
                 the authorities that its certificate is checked against, or set cspProviderInsecure"
            ));
        }
        let token = match self.csp_provider_token_path.as_str() {
            "" => TOKEN,
            path => path,
        };
        Ok(ProviderPlace::Tls {
            host,
            authority: self.csp_provider_ca_path.clone(),
            token: token.to_owned(),
        })
    }
}

/// Reads a selector of excluded nodes. `file` is the configuration, for line numbers.
fn exclusion(selector: &SelectorObject, file: &str) -> Result<LabelSelector, String> {
    let checked = selector.check_names();
    checked.map_err(|error| format!("{}{error}", findings::on_line_with(file, &error.text)))?;
    if *selector == SelectorObject::default() {
        return Err("it is empty, and would exclude every node".to_owned());
    }
    LabelSelector::try_from(selector).map_err(|error| error.to_string())
}

fn read_timeout(text: &str, key: &str, wrong: &mut Vec<String>) -> SignedDuration {
    let read = text.parse::<SignedDuration>().ok();
    read.filter(|time| time.is_positive() && *time <= MAX_TIMEOUT)
        .unwrap_or_else(|| {
            wrong.push(format!(
                "{key}.timeout is {text:?}; a time of at most 24h belongs here, such as 25m"
            ));
            TIMEOUT
        })
}
