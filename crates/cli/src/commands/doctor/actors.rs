//! Other programs of a cluster that cordon, drain, reboot or replace nodes.
//!
//! Each is recognised by a sign: an API group, a label of nodes, or a part of the name of a
//! Deployment or `DaemonSet`. docs/who-else-acts.md describes what each does.

use std::collections::BTreeSet;

use cluster::{ApiError, Cluster, ObjectKind, Parts};

use super::{Finding, causes};

/// The programs: name, sign, and what makes it and gpuwarden live together.
const ACTORS: &str = include_str!("../../../data/actors.tsv");
/// Most objects in one answer.
const PAGE: u32 = 500;

/// Parts of a cluster that signs are about.
#[derive(Debug, Default)]
struct Seen {
    groups: BTreeSet<String>,
    labels: BTreeSet<String>,
    workloads: BTreeSet<String>,
}

/// Returns a finding for each program that the cluster shows.
pub(super) async fn check(cluster: &Cluster) -> Vec<Finding> {
    match Seen::read(cluster).await {
        Ok(seen) => found(&seen),
        Err(error) => {
            let what = format!("cannot be looked for: {}", causes(&error));
            vec![Finding::warning("others", what)]
        }
    }
}

fn found(seen: &Seen) -> Vec<Finding> {
    let mut findings: Vec<Finding> = actors()
        .filter(|(_, sign, _)| seen.has(sign))
        .map(|(actor, sign, advice)| {
            let what = format!("{actor} seems to act on the nodes ({sign})");
            Finding::warning("others", what).fix(advice)
        })
        .collect();
    if findings.is_empty() {
        let what = "no other program that acts on nodes was recognised";
        findings.push(Finding::ok("others", what));
    }
    findings
}

/// Returns name, sign and advice of each program.
fn actors() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    ACTORS.lines().skip(1).filter_map(|row| {
        let (actor, rest) = row.split_once('\t')?;
        let (sign, advice) = rest.split_once('\t')?;
        Some((actor, sign, advice))
    })
}

// === impl Seen ===

impl Seen {
    async fn read(cluster: &Cluster) -> Result<Self, ApiError> {
        let kinds = cluster.served_kinds().await?;
        let mut seen = Self {
            groups: kinds.into_iter().map(|kind| kind.kind.group).collect(),
            ..Self::default()
        };
        for resource in ["deployments", "daemonsets"] {
            let kind = ObjectKind::new("apps", "v1", resource);
            let workloads = &mut seen.workloads;
            metadata(cluster, &kind, |object| {
                workloads.extend(object["metadata"]["name"].as_str().map(str::to_owned));
            })
            .await?;
        }
        let labels = &mut seen.labels;
        metadata(cluster, &ObjectKind::new("", "v1", "nodes"), |object| {
            let keys = object["metadata"]["labels"].as_object().into_iter();
            labels.extend(keys.flat_map(|labels| labels.keys().cloned()));
        })
        .await?;
        Ok(seen)
    }

    fn has(&self, sign: &str) -> bool {
        match sign.split_once(' ') {
            Some(("group", group)) => self.groups.contains(group),
            Some(("label", key)) => self.labels.contains(key),
            Some(("workload", part)) => self.workloads.iter().any(|name| name.contains(part)),
            _ => false,
        }
    }
}

/// Calls `see` with the metadata of each object of a kind.
async fn metadata(
    cluster: &Cluster,
    kind: &ObjectKind,
    mut see: impl FnMut(&serde_json::Value),
) -> Result<(), ApiError> {
    let mut token = None;
    loop {
        let page = cluster
            .page(kind, Parts::Metadata, PAGE, token.as_deref())
            .await?;
        page.objects.iter().for_each(&mut see);
        token = page.next;
        if token.is_none() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Severity;

    #[test]
    fn each_program_is_recognised_by_its_sign_alone() {
        assert_eq!(actors().count(), ACTORS.lines().count() - 1);
        for (actor, sign, advice) in actors() {
            let mut seen = Seen::default();
            let (kind, value) = sign.split_once(' ').unwrap();
            match kind {
                "group" => seen.groups.insert(value.to_owned()),
                "label" => seen.labels.insert(value.to_owned()),
                "workload" => seen.workloads.insert(format!("site-{value}-1")),
                _ => panic!("{sign}"),
            };
            let found = found(&seen);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(found[0].result, Severity::Warning);
            assert!(found[0].what.starts_with(actor), "{found:?}");
            assert_eq!(found[0].fix.as_deref(), Some(advice));
        }
        let nothing = found(&Seen::default());
        assert_eq!(nothing[0].result, Severity::Ok, "{nothing:?}");
    }
}
