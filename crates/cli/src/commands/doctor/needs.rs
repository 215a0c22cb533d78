//! The permissions that an installation needs in the cluster, and the commands that grant them.

use std::borrow::Cow;

use cluster::Access;
use contract::keys;
use controller::policy::PolicySource;
use maintenance::Maintenance;
use maintenance::janitor::{Action, JanitorConfig, ProviderPlace};
use maintenance::validation_request::{self, ValidationConfiguration};
use model::attempt::ResourceKind;
use model::shell;

use super::Installation;
use crate::settings::{Mode, Transport};

/// Namespace in which Kubernetes Events of nodes are made.
const EVENTS_NAMESPACE: &str = "default";

/// A `Need` is a kind of object in the cluster that is read or written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    /// A short name, for roles that are made for it.
    name: Cow<'static, str>,
    group: Cow<'static, str>,
    resource: Cow<'static, str>,
    namespace: Option<String>,
    pub(super) verbs: &'static [&'static str],
    /// The names of the objects; empty: any.
    objects: Vec<String>,
    /// The consequence where it is not allowed.
    pub(super) why: &'static str,
    /// True if gpuwarden does all else without it, and a site may want it so.
    pub(super) may_lack: bool,
}

/// Returns the needs of an installation.
pub(super) fn of(installation: &Installation) -> Vec<Need> {
    let Some(act) = &installation.act else {
        return Vec::new();
    };
    let acts = act.mode.writes();
    let mut needs = vec![Need {
        name: Cow::Borrowed("nodes"),
        resource: Cow::Borrowed("nodes"),
        verbs: if acts {
            &["list", "watch", "patch"]
        } else {
            &["list", "watch"]
        },
        why: "without it nodes are not seen, taken out of service or given back",
        ..Need::default()
    }];
    if acts && act.reports.conditions {
        needs.push(Need {
            name: Cow::Borrowed("node-status"),
            resource: Cow::Borrowed("nodes/status"),
            verbs: &["patch"],
            why: "without it no condition of a node tells of its faults (--node-conditions false wants none)",
            ..Need::default()
        });
    }
    if acts && act.reports.events.is_some() {
        needs.push(Need {
            name: Cow::Borrowed("events"),
            resource: Cow::Borrowed("events"),
            namespace: Some(EVENTS_NAMESPACE.to_owned()),
            verbs: &["create", "patch"],
            why: "without it faults are not told as Kubernetes Events (--node-events false wants none)",
            ..Need::default()
        });
    }
    if act.mode != Mode::Observe {
        needs.push(Need {
            name: Cow::Borrowed("switches"),
            resource: Cow::Borrowed("configmaps"),
            namespace: Some(act.namespace.clone()),
            verbs: if acts {
                &["list", "watch", "create", "patch"]
            } else {
                &["list", "watch"]
            },
            objects: [keys::BREAKER_CONFIG_MAP, keys::CONFIG_MAP]
                .map(str::to_owned)
                .to_vec(),
            why: "without it the circuit breaker and pauses are not known, or not kept",
            ..Need::default()
        });
    }
    if let PolicySource::ConfigMap {
        namespace, name, ..
    } = &act.policy
    {
        needs.push(Need {
            name: Cow::Borrowed("policy"),
            resource: Cow::Borrowed("configmaps"),
            namespace: Some(namespace.clone()),
            verbs: &["list", "watch"],
            objects: vec![name.clone()],
            why: "without it there is no policy, and nothing is decided",
            ..Need::default()
        });
    }
    if installation.leader_elect {
        needs.push(Need {
            name: Cow::Borrowed("lease"),
            group: Cow::Borrowed("coordination.k8s.io"),
            resource: Cow::Borrowed("leases"),
            namespace: Some(act.namespace.clone()),
            verbs: &["get", "create", "patch"],
            objects: vec![keys::LEASE.to_owned()],
            why: "without it no controller leads, and none acts (--leader-elect false for a single one)",
            ..Need::default()
        });
    }
    // A node of its own without a kubelet has no pods.
    let has_pods = (installation.node.as_ref()).is_none_or(|node| node.pod_resources.exists());
    if acts && has_pods {
        needs.extend(of_pods());
    }
    if act.drain.is_some() {
        needs.extend(of_drain(acts));
    }
    if let Some(janitor) = &act.janitor {
        needs.extend(of_janitor(&janitor.config, &act.namespace));
        needs.extend(of_requests(&janitor.config, &act.namespace));
        let validation = janitor.validation.as_ref();
        needs.extend(
            validation
                .into_iter()
                .flat_map(|config| of_validation(config, &act.namespace)),
        );
    }
    let ingest = installation.ingest.as_ref();
    if ingest.is_some_and(|ingest| matches!(ingest.transport, Transport::Tls { .. })) {
        needs.push(of_tokens(
            "without it agents that show a ServiceAccount token are turned away",
        ));
    }
    needs
}

/// Returns the need of whoever asks whose token a caller shows.
fn of_tokens(why: &'static str) -> Need {
    Need {
        name: Cow::Borrowed("tokens"),
        group: Cow::Borrowed("authentication.k8s.io"),
        resource: Cow::Borrowed("tokenreviews"),
        verbs: &["create"],
        why,
        ..Need::default()
    }
}

/// Returns the needs of a drain, which in a dry run removes nothing.
fn of_drain(acts: bool) -> Vec<Need> {
    let need = |name, resource, verbs, why| Need {
        name: Cow::Borrowed(name),
        resource: Cow::Borrowed(resource),
        verbs,
        why,
        ..Need::default()
    };
    let seen = need(
        "drained-pods",
        "pods",
        if acts {
            &["list", "watch", "delete"]
        } else {
            &["list", "watch"]
        },
        "without it the pods of nodes that are drained are not seen, or not deleted at last",
    );
    let evicted = need(
        "evictions",
        "pods/eviction",
        &["create"],
        "without it no pod leaves a node that is drained",
    );
    let checkpoints = Need {
        may_lack: true,
        ..need(
            "checkpoints",
            "pods",
            &["patch"],
            "without it pods that ask for it are not told to write a checkpoint before they are \
             evicted; nothing else needs it",
        )
    };
    let acting = acts.then_some([evicted, checkpoints]);
    [seen]
        .into_iter()
        .chain(acting.into_iter().flatten())
        .collect()
}

/// Returns the needs of a janitor.
fn of_janitor(config: &JanitorConfig, namespace: &str) -> Vec<Need> {
    let mut needs = Vec::new();
    for action in config.actions() {
        let (group, _, plural) = action.kind().resource();
        let need = |resource, verbs, why| Need {
            name: Cow::Owned(format!("janitor-{resource}").replace('/', "-")),
            group: Cow::Borrowed(group),
            resource: Cow::Owned(resource),
            verbs,
            why,
            ..Need::default()
        };
        needs.push(need(
            plural.to_owned(),
            &["list", "watch", "patch", "delete"],
            "without it nobody does what these resources ask for, or old ones are not deleted",
        ));
        needs.push(need(
            format!("{plural}/status"),
            &["patch"],
            "without it nothing is begun, for it could not be written",
        ));
        if action == Action::Terminate {
            needs.push(Need {
                name: Cow::Borrowed("janitor-nodes"),
                resource: Cow::Borrowed("nodes"),
                verbs: &["delete"],
                why: "without it nodes that were terminated stay until somebody else deletes them",
                ..Need::default()
            });
        }
    }
    let reboots_by = config.rules(Action::Reboot).map(|rules| &rules.provider);
    match reboots_by {
        Some(ProviderPlace::Generic) => {
            let own = &config.generic.namespace;
            let namespace = if own.is_empty() { namespace } else { own };
            needs.extend(of_reboot_jobs(namespace));
        }
        Some(ProviderPlace::Redfish) => needs.push(of_boots()),
        _ => {}
    }
    needs
}

/// Returns the needs of whoever reboots nodes by Jobs in `namespace`: a janitor. A `janitor-provider` has the same,
/// and nobody asks for those but the test of SECURITY.md.
fn of_reboot_jobs(namespace: &str) -> [Need; 3] {
    let need = |name, group, resource, verbs| Need {
        name: Cow::Borrowed(name),
        group: Cow::Borrowed(group),
        resource: Cow::Borrowed(resource),
        namespace: Some(namespace.to_owned()),
        verbs,
        why: "without it no node is rebooted, or it is not seen that its Job cannot start",
        ..Need::default()
    };
    [
        need("janitor-jobs", "batch", "jobs", &["get", "create"]),
        need("janitor-pods", "", "pods", &["list"]),
        of_boots(),
    ]
}

/// Returns the need of whoever reads the boot of a node before it reboots that node.
fn of_boots() -> Need {
    Need {
        name: Cow::Borrowed("janitor-node"),
        resource: Cow::Borrowed("nodes"),
        verbs: &["get"],
        why: "without it the boot of a node is not known, and it is not rebooted",
        ..Need::default()
    }
}

/// Returns the needs of resets of GPUs and of hand-overs of nodes.
fn of_requests(config: &JanitorConfig, namespace: &str) -> Vec<Need> {
    let need = |name, group, resource, verbs, why| Need {
        name: Cow::Borrowed(name),
        group: Cow::Borrowed(group),
        resource: Cow::Borrowed(resource),
        verbs,
        why,
        ..Need::default()
    };
    let nodes = "without it no node is handed over, and no service stopped for a reset";
    let mut needs = vec![need(
        "requests-nodes",
        "",
        "nodes",
        &["list", "watch", "patch"],
        nodes,
    )];
    let resets = (
        Maintenance::Reset,
        ["gpu-resets", "gpu-resets-status"],
        "gpuresets/status",
    );
    let hand_overs = (
        Maintenance::HandOver,
        ["hand-overs", "hand-overs-status"],
        "externalremediationrequests/status",
    );
    for (kind, [name, of_status], status) in [resets, hand_overs] {
        if kind == Maintenance::Reset && config.resets.is_none() {
            continue;
        }
        let (group, _, plural) = kind.resource();
        let why =
            "without it nobody does what these resources ask for, or old ones are not deleted";
        let verbs = &["list", "watch", "patch", "delete"];
        needs.push(need(name, group, plural, verbs, why));
        needs.push(need(of_status, group, status, &["patch"], why));
    }
    needs.push(Need {
        namespace: Some(EVENTS_NAMESPACE.to_owned()),
        may_lack: true,
        ..need(
            "hand-overs-events",
            "",
            "events",
            &["create"],
            "without it hand-overs are not told as Kubernetes Events; nothing else needs it",
        )
    });
    if config.resets.is_some() {
        let why = "without it no GPU is reset";
        needs.push(need("gpu-resets-pods", "", "pods", &["list", "watch"], why));
        needs.push(Need {
            namespace: Some(namespace.to_owned()),
            ..need(
                "gpu-resets-jobs",
                "batch",
                "jobs",
                &["list", "watch", "create", "delete"],
                why,
            )
        });
    }
    needs
}

/// Returns the needs of `ValidationRequest`s.
fn of_validation(config: &ValidationConfiguration, namespace: &str) -> Vec<Need> {
    let need = |name: String, group: &str, resource: &str, verbs| Need {
        name: Cow::Owned(name),
        group: Cow::Owned(group.to_owned()),
        resource: Cow::Owned(resource.to_owned()),
        verbs,
        why: "without it nobody carries ValidationRequests out",
        ..Need::default()
    };
    let plural = validation_request::PLURAL;
    let group = validation_request::GROUP;
    let reads: &[&str] = &["list", "watch"];
    let changes: &[&str] = &["list", "watch", "patch"];
    let mut needs = vec![
        need("validation".to_owned(), group, plural, changes),
        need(
            "validation-status".to_owned(),
            group,
            "validationrequests/status",
            &["patch"],
        ),
        need("validation-nodes".to_owned(), "", "nodes", changes),
    ];
    if config.reads_slices() {
        let group = "resource.k8s.io";
        let name = "validation-slices".to_owned();
        needs.push(need(name, group, "resourceslices", reads));
    }
    for (name, provider) in &config.providers {
        needs.push(Need {
            namespace: Some(namespace.to_owned()),
            ..need(
                format!("validation-{name}"),
                &provider.group,
                &provider.plural,
                &["get", "list", "watch", "create", "delete"],
            )
        });
    }
    needs
}

/// Returns the need of repairs, or drains, by a kind of custom resources, which the cluster calls `resource`. In a dry
/// run none is made.
pub(super) fn of_remediation(mode: Mode, kind: &ResourceKind, resource: String) -> Option<Need> {
    mode.writes().then(|| Need {
        name: Cow::Owned(format!("repairs-{resource}")),
        group: Cow::Owned(kind.group.clone()),
        resource: Cow::Owned(resource),
        namespace: kind.namespace.clone(),
        verbs: &["get", "list", "watch", "create", "delete"],
        why: "without it nodes are not drained, or not repaired, by it",
        ..Need::default()
    })
}

/// Returns the needs for writing on pods which GPUs they have.
fn of_pods() -> [Need; 2] {
    let need = |name, group, resource, verbs, why| Need {
        name: Cow::Borrowed(name),
        group: Cow::Borrowed(group),
        resource: Cow::Borrowed(resource),
        verbs,
        why,
        may_lack: true,
        ..Need::default()
    };
    [
        need(
            "pods",
            "",
            "pods",
            &["list", "patch"],
            "without it pods do not say which GPUs they have (dgxc.nvidia.com/devices); nothing \
             else needs it",
        ),
        need(
            "pod-devices",
            "resource.k8s.io",
            "resourceslices",
            &["list"],
            "without it pods do not say which GPUs they have by claims; nothing else needs it",
        ),
    ]
}

/// Returns the needs of a policy that taints single devices.
pub(super) fn of_device_taints(mode: Mode) -> [Need; 3] {
    const GROUP: &str = "resource.k8s.io";
    let rules: &[&str] = if mode.writes() {
        &["list", "watch", "create", "patch", "delete"]
    } else {
        &["list", "watch"]
    };
    let need = |name, resource, verbs, why| Need {
        name: Cow::Borrowed(name),
        group: Cow::Borrowed(GROUP),
        resource: Cow::Borrowed(resource),
        verbs,
        why,
        ..Need::default()
    };
    [
        need(
            "device-slices",
            "resourceslices",
            &["list", "watch"],
            "without it devices are not known, and where one is faulty its node is taken out",
        ),
        need(
            "device-taints",
            "devicetaintrules",
            rules,
            "without it no device is tainted, and where one is faulty its node is taken out",
        ),
        need(
            "device-claims",
            "resourceclaims",
            &["list", "watch"],
            "without it nobody is told which pods use a device that is tainted",
        ),
    ]
}

// === impl Need ===

impl Need {
    /// Returns each question to the API server.
    pub(super) fn accesses(&self) -> impl Iterator<Item = Access<'_>> {
        let access = |verb, name| Access {
            verb,
            group: &self.group,
            resource: &self.resource,
            namespace: self.namespace.as_deref(),
            name,
        };
        self.verbs.iter().flat_map(move |&verb| {
            // An object that is yet to be made has no name.
            let any = self.objects.is_empty() || verb == "create";
            let named = self.objects.iter().filter(move |_| !any);
            let named = named.map(|name| Some(name.as_str()));
            let any = any.then_some(None);
            any.into_iter()
                .chain(named)
                .map(move |name| access(verb, name))
        })
    }

    /// Returns the need for people: `list, watch nodes`.
    pub(super) fn described(&self, verbs: &[&str]) -> String {
        let place = match &self.namespace {
            Some(namespace) => format!(" in {namespace}"),
            None => String::new(),
        };
        format!("{} {}{place}", verbs.join(", "), self.resource)
    }

    /// Returns the resource with its group as kubectl takes it: `gpuresets.janitor.dgxc.nvidia.com/status`.
    fn full_name(&self) -> String {
        if self.group.is_empty() {
            return self.resource.to_string();
        }
        match self.resource.split_once('/') {
            Some((resource, part)) => format!("{resource}.{}/{part}", self.group),
            None => format!("{}.{}", self.resource, self.group),
        }
    }

    /// Returns the commands that grant the need to `who`: a user, as the API server calls him.
    pub(super) fn grant(&self, who: &str) -> String {
        let account = who
            .strip_prefix("system:serviceaccount:")
            .filter(|account| account.split(':').count() == 2);
        let subject = match account {
            Some(account) => format!("--serviceaccount={}", shell::word(account)),
            None => format!("--user={}", shell::word(who)),
        };
        let verbs = self.verbs.join(",");
        let name = format!("gpuwarden-{}", self.name);
        let resource = self.full_name();
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
