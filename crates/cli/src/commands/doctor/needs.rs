//! What an installation has to be allowed in the cluster, and how to allow it.

use cluster::Access;
use contract::keys;
use controller::policy::PolicySource;
use domain::shell;

use super::Installation;
use crate::settings::{Mode, Transport};

/// Where Kubernetes Events of nodes are made.
const EVENTS_NAMESPACE: &str = "default";

/// A `Need` is something in the cluster that is read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Need {
    /// A short name, for roles that are made for it.
    pub(super) name: &'static str,
    pub(super) group: &'static str,
    pub(super) resource: &'static str,
    pub(super) namespace: Option<String>,
    /// What is done, and to which objects of a name; to any where there are none.
    pub(super) verbs: Vec<(&'static str, Vec<String>)>,
    /// What does not happen without it.
    pub(super) why: &'static str,
}

/// Returns all that this installation reads and writes.
pub(super) fn of(installation: &Installation) -> Vec<Need> {
    let Some(act) = &installation.act else {
        return Vec::new();
    };
    let acts = act.mode == Mode::Quarantine;
    let any = |verbs: &[&'static str]| verbs.iter().map(|verb| (*verb, Vec::new())).collect();
    let core = |name, resource, verbs, why| Need {
        name,
        group: "",
        resource,
        namespace: None,
        verbs,
        why,
    };
    let mut needs = vec![core(
        "nodes",
        "nodes",
        any(if acts {
            &["list", "watch", "patch"]
        } else {
            &["list", "watch"]
        }),
        "without it nodes are not seen, taken out of service or given back",
    )];
    if acts && act.reports.conditions {
        needs.push(core(
            "node-status",
            "nodes/status",
            any(&["patch"]),
            "without it no condition of a node tells of its faults (--node-conditions false wants none)",
        ));
    }
    if acts && act.reports.events.is_some() {
        needs.push(Need {
            namespace: Some(EVENTS_NAMESPACE.to_owned()),
            ..core(
                "events",
                "events",
                any(&["create", "patch"]),
                "without it faults are not told as Kubernetes Events (--node-events false wants none)",
            )
        });
    }
    if act.mode != Mode::Observe {
        let both = vec![
            keys::BREAKER_CONFIG_MAP.to_owned(),
            keys::CONFIG_MAP.to_owned(),
        ];
        let mut verbs = vec![("list", both.clone()), ("watch", both.clone())];
        if acts {
            // What is to be made has no name yet.
            verbs.extend([("create", Vec::new()), ("patch", both)]);
        }
        needs.push(Need {
            namespace: Some(act.namespace.clone()),
            ..core(
                "switches",
                "configmaps",
                verbs,
                "without it the circuit breaker and pauses are not known, or not kept",
            )
        });
    }
    if let PolicySource::ConfigMap {
        namespace, name, ..
    } = &act.policy
    {
        let only = vec![name.clone()];
        needs.push(Need {
            namespace: Some(namespace.clone()),
            ..core(
                "policy",
                "configmaps",
                vec![("list", only.clone()), ("watch", only)],
                "without it there is no policy, and nothing is decided",
            )
        });
    }
    if installation.leader_elect {
        let only = vec![keys::LEASE.to_owned()];
        needs.push(Need {
            group: "coordination.k8s.io",
            namespace: Some(act.namespace.clone()),
            ..core(
                "lease",
                "leases",
                vec![("get", only.clone()), ("create", Vec::new()), ("patch", only)],
                "without it no controller leads, and none acts (--leader-elect false for a single one)",
            )
        });
    }
    let by_token = installation
        .ingest
        .as_ref()
        .is_some_and(|ingest| matches!(ingest.transport, Transport::Tls { .. }));
    if by_token {
        needs.push(Need {
            group: "authentication.k8s.io",
            ..core(
                "tokens",
                "tokenreviews",
                any(&["create"]),
                "without it agents that show a ServiceAccount token are turned away",
            )
        });
    }
    needs
}

// === impl Need ===

impl Need {
    /// Returns each thing to ask the API server about.
    pub(super) fn accesses(&self) -> impl Iterator<Item = Access<'_>> {
        let access = |verb, name| Access {
            verb,
            group: self.group,
            resource: self.resource,
            namespace: self.namespace.as_deref(),
            name,
        };
        self.verbs.iter().flat_map(move |(verb, names)| {
            let each = names.iter().map(|name| Some(name.as_str()));
            let all = names.is_empty().then_some(None);
            all.into_iter()
                .chain(each)
                .map(move |name| access(verb, name))
                .collect::<Vec<_>>()
        })
    }

    /// Returns it for people: `list, watch nodes`.
    pub(super) fn described(&self, verbs: &[&str]) -> String {
        let place = match &self.namespace {
            Some(namespace) => format!(" in {namespace}"),
            None => String::new(),
        };
        format!("{} {}{place}", verbs.join(", "), self.resource)
    }

    /// Returns the commands that allow all of it to `who`: a user, as the API server knows him.
    pub(super) fn grant(&self, who: &str) -> String {
        let account = who
            .strip_prefix("system:serviceaccount:")
            .filter(|account| account.split(':').count() == 2);
        let subject = match account {
            Some(account) => format!("--serviceaccount={}", shell::word(account)),
            None => format!("--user={}", shell::word(who)),
        };
        let verbs: Vec<&str> = self.verbs.iter().map(|(verb, _)| *verb).collect();
        let verbs = verbs.join(",");
        let name = format!("gpuwarden-{}", self.name);
        let resource = match self.group {
            "" => self.resource.to_owned(),
            group => format!("{}.{group}", self.resource),
        };
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
