//! The permissions that an installation needs in the cluster, and the commands that grant them.
//!
//! `data/permissions.tsv` has a row for each: the setting that needs the permission, a name for the
//! role that grants it, API group and resource, the namespace and the names of the objects (`-`:
//! any), the verbs (those behind a `|` only where gpuwarden writes), `extra` if gpuwarden does all
//! else without it, and the consequence where it is missing.

use cluster::Access;
use controller::policy::PolicySource;
use controller::text_place::TextPlace;
use maintenance::janitor::{Action, ProviderPlace};
use maintenance::validation_request::ValidationConfiguration;
use model::attempt::ResourceKind;
use model::shell;
use objects::Watched;

use super::Installation;
use crate::settings::{ActSettings, Mode, ServerCertificate, Transport};

const TABLE: &str = include_str!("../../../data/permissions.tsv");

/// A permission in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    /// Short name, for the role that grants the permission.
    name: String,
    group: String,
    resource: String,
    namespace: Option<String>,
    /// Names of the objects; empty: any.
    objects: Vec<String>,
    pub(super) verbs: Vec<&'static str>,
    /// True if gpuwarden does all else without the permission.
    pub(super) may_lack: bool,
    /// Consequence without the permission.
    pub(super) why: &'static str,
}

/// Returns the needs of an installation, whose policy may taint single devices.
pub(super) fn of(installation: &Installation, taints_devices: bool) -> Vec<Need> {
    let Some(act) = &installation.act else {
        return Vec::new();
    };
    let mut needs = rows(&settings(installation, act, taints_devices), act);
    let validation = act.janitor.as_ref().and_then(|it| it.validation.as_ref());
    let providers = validation.iter().flat_map(|config| &config.providers);
    needs.extend(providers.map(|(name, provider)| Need {
        name: format!("validation-{name}"),
        group: provider.group.clone(),
        resource: provider.plural.clone(),
        namespace: Some(act.namespace.clone()),
        verbs: vec!["get", "list", "watch", "create", "delete"],
        why: "without it no ValidationRequest is carried out",
        ..Need::default()
    }));
    needs
}

/// Returns the need of drains, or of remediation, by custom resources of a kind that the cluster
/// calls `resource`. A dry run creates none.
pub(super) fn of_remediation(mode: Mode, kind: &ResourceKind, resource: String) -> Option<Need> {
    mode.writes().then(|| Need {
        name: format!("repairs-{resource}"),
        group: kind.group.clone(),
        resource,
        namespace: kind.namespace.clone(),
        verbs: vec!["get", "list", "watch", "create", "delete"],
        why: "without it nodes are not drained, or not remediated, by it",
        ..Need::default()
    })
}

/// Returns the need of policies over objects that the cluster calls `resource`.
pub(super) fn of_objects(watched: &Watched, resource: String) -> Need {
    Need {
        name: format!("objects-{resource}"),
        group: watched.kind.group.clone(),
        resource,
        namespace: watched.namespace.clone(),
        verbs: vec!["list", "watch"],
        why: "without it the policies of --objects that read this kind find nothing",
        ..Need::default()
    }
}

/// Returns the need of policies over objects in a `ConfigMap`.
pub(super) fn of_objects_map(place: &TextPlace) -> Option<Need> {
    let TextPlace::ConfigMap {
        namespace, name, ..
    } = place
    else {
        return None;
    };
    Some(Need {
        name: "objects".to_owned(),
        resource: "configmaps".to_owned(),
        namespace: Some(namespace.clone()),
        objects: vec![name.clone()],
        verbs: vec!["list", "watch"],
        why: "without it there are no policies over objects, and none is watched",
        ..Need::default()
    })
}

/// Returns the settings that need permissions, by their names in the table.
fn settings(
    installation: &Installation,
    act: &ActSettings,
    taints_devices: bool,
) -> Vec<&'static str> {
    let acts = act.mode.writes();
    let janitor = act.janitor.as_ref();
    let config = janitor.map(|janitor| &janitor.config);
    let reboots = config.and_then(|config| config.rules(Action::Reboot));
    let by = reboots.map(|rules| &rules.provider);
    let validation = janitor.and_then(|janitor| janitor.validation.as_ref());
    // A node without a kubelet has no pods.
    let has_pods = (installation.node.as_ref()).is_none_or(|node| node.pod_resources.exists());
    let ingest = installation.ingest.as_ref();
    let labels = installation.labels.as_ref();
    let uses_tls = |transport: &Transport| matches!(transport, Transport::Tls { .. });
    let asks_owners = config.is_some_and(|config| {
        let mut rules = config.actions().filter_map(|action| config.rules(action));
        rules.any(|rules| rules.provider == ProviderPlace::Label)
    });
    let terminates = config.is_some_and(|config| config.rules(Action::Terminate).is_some());
    let all = [
        ("cluster", true),
        ("conditions", acts && act.reports.conditions),
        ("events", acts && act.reports.events.is_some()),
        ("switches", act.mode != Mode::Observe),
        // A standby takes them over; `run` keeps its store.
        (
            "marks",
            act.mode != Mode::Observe && installation.node.is_none(),
        ),
        ("policy", map_of(&act.policy).is_some()),
        ("election", installation.leader_elect),
        ("pods", acts && has_pods),
        ("drain", act.drain.is_some()),
        ("evictions", act.drain.is_some() && acts),
        ("reboots", reboots.is_some()),
        ("terminates", terminates),
        ("reboot-jobs", by == Some(&ProviderPlace::Generic)),
        ("redfish", by == Some(&ProviderPlace::Redfish)),
        ("label", asks_owners),
        ("janitor", janitor.is_some()),
        ("resets", config.is_some_and(|it| it.resets.is_some())),
        ("validation", validation.is_some()),
        (
            "slices",
            validation.is_some_and(ValidationConfiguration::reads_slices),
        ),
        (
            "requests",
            acts && act.maintenance.as_ref().is_some_and(|it| it.requests),
        ),
        ("labels", labels.is_some()),
        (
            "label-slices",
            labels.is_some_and(|it| it.labels.reads_slices()),
        ),
        ("tokens", ingest.is_some_and(|it| uses_tls(&it.transport))),
        ("certificate", issues_certificate(installation)),
        ("device-taints", taints_devices),
    ];
    let holding = all.into_iter().filter(|(_, holds)| *holds);
    holding.map(|(name, _)| name).collect()
}

/// Returns true if the installation is a controller that issues its certificate itself.
pub(super) fn issues_certificate(installation: &Installation) -> bool {
    let transport = installation.ingest.as_ref().map(|it| &it.transport);
    let Some(Transport::Tls { own, .. }) = transport else {
        return false;
    };
    matches!(own, ServerCertificate::Own { .. })
}

/// Returns namespace and name of the policy's `ConfigMap`.
fn map_of(policy: &PolicySource) -> Option<(&str, &str)> {
    match policy {
        PolicySource::Place(TextPlace::ConfigMap {
            namespace, name, ..
        }) => Some((namespace, name)),
        _ => None,
    }
}

/// Returns the rows of these settings.
fn rows(settings: &[&str], act: &ActSettings) -> Vec<Need> {
    let policy = map_of(&act.policy);
    let janitor = act.janitor.as_ref();
    let jobs = janitor.map(|janitor| janitor.config.generic.namespace.as_str());
    let need = |line: &'static str| {
        let columns: Vec<&str> = line.split('\t').collect();
        let [
            with,
            name,
            group,
            resource,
            place,
            objects,
            verbs,
            need,
            why,
        ] = columns[..]
        else {
            return None;
        };
        let namespace = match place {
            "own" => Some(act.namespace.as_str()),
            "jobs" => jobs.filter(|it| !it.is_empty()).or(Some(&act.namespace)),
            "policy" => policy.map(|(namespace, _)| namespace),
            "cluster" => None,
            other => Some(other),
        };
        let objects = match (place, policy) {
            ("policy", Some((_, name))) => name,
            _ => objects,
        };
        let objects = objects.split(' ').filter(|name| *name != "-");
        let (reads, writes) = verbs.split_once(" | ").unwrap_or((verbs, ""));
        let writes = writes.split_whitespace().filter(|_| act.mode.writes());
        settings.contains(&with).then(|| Need {
            name: name.to_owned(),
            group: group.trim_matches('-').to_owned(),
            resource: resource.to_owned(),
            namespace: namespace.map(str::to_owned),
            objects: objects.map(str::to_owned).collect(),
            verbs: reads.split(' ').chain(writes).collect(),
            may_lack: need == "extra",
            why,
        })
    };
    TABLE.lines().skip(1).filter_map(need).collect()
}

// === impl Need ===

impl Need {
    /// Returns each question to the API server.
    pub(super) fn accesses(&self) -> impl Iterator<Item = Access<'_>> {
        self.verbs.iter().flat_map(move |&verb| {
            // An object that is yet to be created has no name.
            let any = self.objects.is_empty() || verb == "create";
            let names = self.objects.iter().filter(move |_| !any);
            let names = names.map(|name| Some(name.as_str()));
            names.chain(any.then_some(None)).map(move |name| Access {
                verb,
                group: &self.group,
                resource: &self.resource,
                namespace: self.namespace.as_deref(),
                name,
            })
        })
    }

    /// Returns verbs, resource and namespace for people: `list, watch nodes`.
    pub(super) fn described(&self, verbs: &[&str]) -> String {
        let place = match &self.namespace {
            Some(namespace) => format!(" in {namespace}"),
            None => String::new(),
        };
        format!("{} {}{place}", verbs.join(", "), self.resource)
    }

    /// Returns the resource with its group, in kubectl's form:
    /// `gpuresets.janitor.dgxc.nvidia.com/status`.
    fn full_name(&self) -> String {
        let (resource, part) = match self.resource.split_once('/') {
            Some((resource, part)) => (resource, format!("/{part}")),
            None => (self.resource.as_str(), String::new()),
        };
        let dot = if self.group.is_empty() { "" } else { "." };
        format!("{resource}{dot}{}{part}", self.group)
    }

    /// Returns the commands that grant the need to `who`, a user by the API server's name.
    pub(super) fn grant(&self, who: &str) -> String {
        let account = who
            .strip_prefix("system:serviceaccount:")
            .filter(|account| account.split(':').count() == 2);
        let subject = match account {
            Some(account) => format!("--serviceaccount={}", shell::word(account)),
            None => format!("--user={}", shell::word(who)),
        };
        let (verbs, resource) = (self.verbs.join(","), self.full_name());
        let name = format!("gpuwarden-{}", self.name);
        let (kubectl, kind) = match &self.namespace {
            Some(namespace) => (format!("kubectl -n {}", shell::word(namespace)), "role"),
            None => ("kubectl".to_owned(), "clusterrole"),
        };
        format!(
            "{kubectl} create {kind} {name} --verb={verbs} --resource={resource} && {kubectl} create \
             {kind}binding {name} --{kind}={name} {subject}"
        )
    }
}

#[cfg(test)]
mod tests;
