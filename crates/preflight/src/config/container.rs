//! Containers of the checks, as configured.

use std::collections::BTreeSet;

use contract::findings::Findings;
use contract::names;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::valid::{self, Wrong};
use super::{MAX_CHECKS, older, yes};

/// Name of each check of this program, and its subcommand.
const OWN: [(&str, &str); 3] = [
    ("preflight-dcgm-diag", "dcgm-diag"),
    ("preflight-nccl-loopback", LOOPBACK),
    ("preflight-nccl-allreduce", ALLREDUCE),
];
const LOOPBACK: &str = "nccl-loopback";
const ALLREDUCE: &str = "nccl-allreduce";

/// Check that runs as an init container, and the conditions under which it is added.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckContainer {
    /// Name of the container.
    pub name: String,
    /// Container in the form of the Kubernetes API.
    pub container: Map<String, Value>,
    /// True if the check is added to pods that choose no checks by annotation.
    pub default_enabled: bool,
    /// True if the check inherits environment variables from the user's containers.
    pub inherits_env: bool,
    /// True if the check inherits volume mounts from the user's containers.
    pub inherits_mounts: bool,
    /// True if the check is only meaningful in a gang.
    pub gang_only: bool,
    /// Fewest GPUs that the check needs to be meaningful.
    pub min_gpus: u32,
}

/// Element of `initContainers` or `checks`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Entry {
    name: String,
    #[serde(default)]
    image: Option<Image>,
    #[serde(default = "yes")]
    default_enabled: bool,
    #[serde(default = "yes")]
    inherit_user_env: bool,
    #[serde(default = "yes")]
    inherit_user_volume_mounts: bool,
    #[serde(default)]
    gang_only: Option<bool>,
    #[serde(default)]
    min_gpus: Option<u32>,
    #[serde(flatten)]
    container: Map<String, Value>,
}

/// Image, as one name or as repository and tag.
#[derive(Deserialize, Clone)]
#[serde(
    untagged,
    expecting = "expected an image: its name, or `repository` and `tag`"
)]
pub(crate) enum Image {
    Name(String),
    Parts {
        repository: String,
        #[serde(default)]
        tag: String,
        #[serde(default, rename = "pullPolicy")]
        pull_policy: Option<String>,
    },
}

/// Variables that ADR-026 has keys for.
pub(super) struct Variables<'a> {
    pub(super) dcgm: &'a older::Dcgm,
    pub(super) nccl: &'a older::Nccl,
    /// Variables of the check of a gang, in the form of the Kubernetes API.
    pub(super) allreduce: &'a [Value],
}

/// Returns the configured checks, of the configuration document, or else of the ADR's key. If
/// neither is set, all checks of this program run in `image`.
pub(super) fn checks(
    lists: (Option<Vec<Entry>>, Option<Vec<Entry>>),
    image: Option<&Image>,
    variables: &Variables<'_>,
    findings: &mut Findings<'_>,
) -> Vec<CheckContainer> {
    let (entries, list): (Vec<Entry>, _) = match lists {
        (Some(entries), _) => (entries, Some("initContainers")),
        (None, Some(adr)) => (adr.iter().map(Entry::with_prefix).collect(), Some("checks")),
        (None, None) => (OWN.iter().map(|(name, _)| Entry::own(name)).collect(), None),
    };
    if let Some(list) = list.filter(|_| entries.is_empty() || entries.len() > MAX_CHECKS) {
        let found = entries.len();
        let what = format!("it has {found} checks; write 1 to {MAX_CHECKS}");
        findings.at_key(list, what);
        return Vec::new();
    }
    let is_used = entries.iter().any(|entry| entry.name.ends_with(ALLREDUCE));
    for (at, variable) in variables.allreduce.iter().enumerate() {
        if is_used && crate::field::name(variable).is_empty() {
            let what = format!("the variable {variable} has no name");
            findings.at_key(&format!("ncclAllreduceExtraEnv[{at}]"), what);
        }
    }
    let mut known = BTreeSet::new();
    let mut checks = Vec::new();
    for (at, entry) in entries.into_iter().enumerate() {
        // Our own checks have no entry in the file.
        let path = |key: &str| match list {
            Some(list) => format!("{list}[{at}].{key}"),
            None => key.to_owned(),
        };
        let name = entry.name.clone();
        findings.check(&path("name"), names::dns_label(&name));
        if !known.insert(name.clone()) {
            let what = format!("two checks have the name {name}; give each its own");
            findings.at_key(&path("name"), what);
        }
        let check = entry.check(image).map(|check| check.with_env(variables));
        let check = check.and_then(|check| {
            valid::container(&check.container)?;
            Ok(check)
        });
        match check {
            Ok(check) => checks.push(check),
            Err((key, what)) => findings.at_key(&path(key), what),
        }
    }
    checks
}

// === impl Entry ===

impl Entry {
    fn own(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            image: None,
            default_enabled: true,
            inherit_user_env: true,
            inherit_user_volume_mounts: true,
            gang_only: None,
            min_gpus: None,
            container: Map::new(),
        }
    }

    /// Converts an entry of ADR-026's `checks`, whose container name gets a prefix.
    fn with_prefix(&self) -> Self {
        let mut entry = Self::own(&format!("preflight-{}", self.name));
        entry.image.clone_from(&self.image);
        entry.default_enabled = self.default_enabled;
        entry.container.clone_from(&self.container);
        entry
    }

    fn check(self, image: Option<&Image>) -> Result<CheckContainer, Wrong> {
        let own = OWN.iter().find(|(name, _)| *name == self.name);
        let own = own.map(|(_, command)| *command);
        let mut container = self.container;
        container.insert("name".to_owned(), self.name.clone().into());
        match (self.image, image, own) {
            (Some(image), ..) => image.write(&mut container),
            (None, Some(image), Some(command)) => {
                image.write(&mut container);
                let all = json!(["gpuwarden", "check", command]);
                container.entry("command").or_insert(all);
                if command == ALLREDUCE {
                    // RDMA pins the memory that it sends.
                    let locks = json!({"capabilities": {"add": ["IPC_LOCK"]}});
                    container.entry("securityContext").or_insert(locks);
                }
            }
            (None, Some(_), None) => {
                let what = "it is missing; the common one has only our own checks";
                return Err(("image", what.to_owned()));
            }
            (None, None, _) => {
                let what = "it is missing: name one here, or one for all of our own checks by the \
                            key `image` of the file";
                return Err(("image", what.to_owned()));
            }
        }
        for (key, is_right) in [
            ("env", Value::is_array as fn(&Value) -> bool),
            ("volumeMounts", Value::is_array),
            ("resources", Value::is_object),
        ] {
            if !container.get(key).is_none_or(is_right) {
                let what = "it does not have the form that it has in a container";
                return Err((key, what.to_owned()));
            }
        }
        Ok(CheckContainer {
            gang_only: self.gang_only.unwrap_or(own == Some(ALLREDUCE)),
            min_gpus: self
                .min_gpus
                .unwrap_or(if own == Some(LOOPBACK) { 2 } else { 1 }),
            name: self.name,
            container,
            default_enabled: self.default_enabled,
            inherits_env: self.inherit_user_env,
            inherits_mounts: self.inherit_user_volume_mounts,
        })
    }
}

// === impl CheckContainer ===

impl CheckContainer {
    /// Returns true for a check of this program, false for one from another image.
    pub fn is_ours(&self) -> bool {
        let command = self
            .container
            .get("command")
            .and_then(|it| it.get(0)?.as_str());
        command.is_some_and(|command| command.rsplit('/').next() == Some("gpuwarden"))
    }

    /// Returns true if the check measures between the nodes of a gang.
    pub fn is_allreduce(&self) -> bool {
        self.name.ends_with(ALLREDUCE)
    }

    /// Returns the check with further variables. The container's own variables win.
    fn with_env(mut self, variables: &Variables<'_>) -> Self {
        let Variables { dcgm, nccl, .. } = variables;
        let mut added: Vec<Value> = Vec::new();
        let mut add = |name: &str, value: Option<String>| {
            added.extend(value.map(|value| json!({"name": name, "value": value})));
        };
        if self.name.ends_with("dcgm-diag") {
            add("DCGM_HOSTENGINE_ADDR", dcgm.hostengine_addr.clone());
            add(
                "DCGM_DIAG_LEVEL",
                dcgm.diag_level.map(|level| level.to_string()),
            );
        } else if self.name.ends_with(LOOPBACK) {
            add(
                "BW_THRESHOLD_GBPS",
                nccl.loopback.map(|limit| limit.to_string()),
            );
        } else if self.is_allreduce() {
            add(
                "BW_THRESHOLD_GBPS",
                nccl.allreduce.map(|limit| limit.to_string()),
            );
            added.extend(variables.allreduce.iter().cloned());
        }
        let env = self.container.entry("env").or_insert_with(|| json!([]));
        for variable in added {
            let name = crate::field::name(&variable);
            if let Some(env) = env.as_array_mut()
                && env.iter().all(|own| crate::field::name(own) != name)
            {
                env.push(variable);
            }
        }
        self
    }
}

// === impl Image ===

impl Image {
    fn write(&self, container: &mut Map<String, Value>) {
        let name = match self {
            Self::Name(name) => name.clone(),
            Self::Parts {
                repository, tag, ..
            } if tag.is_empty() => repository.clone(),
            Self::Parts {
                repository, tag, ..
            } => format!("{repository}:{tag}"),
        };
        container.insert("image".to_owned(), name.into());
        if let Self::Parts {
            pull_policy: Some(policy),
            ..
        } = self
        {
            container.insert("imagePullPolicy".to_owned(), policy.clone().into());
        }
    }
}
