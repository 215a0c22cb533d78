//! Lists all objects of the cluster, and finds those that gpuwarden has written to.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use cluster::{Cluster, ObjectKind, Parts, ServedKind};
use contract::keys;
use futures::future::try_join_all;
use maintenance::validation_request::{self, ValidationRequest};
use maintenance::{Maintenance, MaintenanceResource};
use model::attempt::ResourceKind;
use model::resource::ResourceState;
use runtime::logging::chain;
use serde_json::Value;
use tokio::time::Instant;

use super::Choice;
use super::node::{self, NodePlan};
use super::object::{Verdict, judge};

/// Nodes in one answer: each has its images and conditions, and an answer has a limit.
const NODES_PAGE: u32 = 100;
/// Objects in one answer, by their metadata only.
const PAGE: u32 = 500;
/// Time for the holder of a Lease to renew it. Longer than the Lease lasts.
const LEASE_OBSERVED: Duration = Duration::from_secs(16);
/// Interval for reading a Lease.
const LEASE_POLL: Duration = Duration::from_millis(500);

/// Everything of gpuwarden in the cluster.
#[derive(Default)]
pub(super) struct Survey {
    /// Nodes with a mark of gpuwarden, or with a session that stays.
    pub(super) nodes: Vec<NodePlan>,
    /// Other objects, in the order of the API server's kinds.
    pub(super) objects: Vec<FoundObject>,
    /// Kinds that could not be listed, each with the error.
    pub(super) unread: Vec<String>,
    /// Requests that have not ended, by kind and name.
    pub(super) under_way: Vec<String>,
}

/// An object other than a node, with the decision about it.
#[derive(Debug)]
pub(super) struct FoundObject {
    pub(super) kind: ServedKind,
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) verdict: Verdict,
}

// === impl FoundObject ===

impl FoundObject {
    /// Returns kind, namespace and name for people.
    pub(super) fn title(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{} {namespace}/{}", self.kind.name, self.name),
            None => format!("{} {}", self.kind.name, self.name),
        }
    }

    /// Returns whether this is a Lease of gpuwarden.
    pub(super) fn is_lease(&self) -> bool {
        self.kind.kind.resource == "leases"
    }
}

// === impl Survey ===

impl Survey {
    /// Lists all objects. A kind that cannot be listed is noted, and the others are read.
    pub(super) async fn take(cluster: &Cluster, choice: Choice) -> anyhow::Result<Self> {
        let mut survey = Self::default();
        // Kinds of the resources that sessions wait for, by the key of the attempt.
        let mut attempts = BTreeMap::new();
        let mut requests = Vec::new();
        for kind in cluster.served_kinds().await? {
            let (group, plural) = (kind.kind.group.as_str(), kind.kind.resource.as_str());
            // The API server deletes Events within the hour.
            if plural == "events" {
                continue;
            }
            let is_node = (group, plural) == ("", "nodes");
            let (parts, limit) = if is_node {
                (Parts::All, NODES_PAGE)
            } else {
                (Parts::Metadata, PAGE)
            };
            let mut token = None;
            loop {
                let page = cluster
                    .page(&kind.kind, parts, limit, token.as_deref())
                    .await;
                let page = match page {
                    Ok(page) => page,
                    Err(error) if plural == "leases" => {
                        return Err(error).context(
                            "cannot list leases, so whether a gpuwarden still acts is unknown",
                        );
                    }
                    Err(error) => {
                        let error = chain(&error);
                        survey
                            .unread
                            .push(format!("cannot list {}: {error}", title(&kind.kind)));
                        break;
                    }
                };
                for object in page.objects {
                    if is_node {
                        let found = node::plan(&object, choice);
                        let attempt = found.as_ref().and_then(|plan| plan.attempt.clone());
                        attempts.extend(attempt);
                        survey.nodes.extend(found);
                    } else {
                        survey.note(&kind, &object, choice, &mut requests);
                    }
                }
                token = page.next;
                if token.is_none() {
                    break;
                }
            }
        }
        survey.find_under_way(cluster, &requests, &attempts).await;
        Ok(survey)
    }

    /// Stores an object that gpuwarden has written to, and its index in `requests` if the object may
    /// be a request that has not ended.
    fn note(
        &mut self,
        kind: &ServedKind,
        object: &Value,
        choice: Choice,
        requests: &mut Vec<(usize, Option<String>)>,
    ) {
        let Some(verdict) = judge(kind, object, choice) else {
            return;
        };
        let metadata = &object["metadata"];
        let text = |key: &str| metadata[key].as_str().map(str::to_owned);
        let attempt = metadata["annotations"][keys::ATTEMPT].as_str();
        if attempt.is_some() || is_request(&kind.kind) {
            requests.push((self.objects.len(), attempt.map(str::to_owned)));
        }
        self.objects.push(FoundObject {
            kind: kind.clone(),
            namespace: text("namespace"),
            name: text("name").unwrap_or_default(),
            uid: text("uid").unwrap_or_default(),
            verdict,
        });
    }

    /// Reads the status of requests, and stores those that have not ended. A status that cannot be
    /// read counts as such.
    async fn find_under_way(
        &mut self,
        cluster: &Cluster,
        requests: &[(usize, Option<String>)],
        attempts: &BTreeMap<String, ResourceKind>,
    ) {
        for (index, attempt) in requests {
            let Some(found) = self.objects.get(*index) else {
                continue;
            };
            let namespace = found.namespace.as_deref();
            let object = cluster
                .object(&found.kind.kind, namespace, &found.name)
                .await;
            let attempt = attempt.as_ref().and_then(|key| attempts.get(key));
            match object {
                Ok(Some(object)) if is_under_way(&found.kind.kind, &object, attempt) => {
                    self.under_way.push(found.title());
                }
                Ok(_) => {}
                Err(error) => {
                    let (title, error) = (found.title(), chain(&error));
                    self.under_way
                        .push(format!("{title} (its status cannot be read: {error})"));
                }
            }
        }
    }
}

/// Returns a kind for people: `rebootnodes.janitor.dgxc.nvidia.com`.
fn title(kind: &ObjectKind) -> String {
    let ObjectKind {
        group, resource, ..
    } = kind;
    if group.is_empty() {
        resource.clone()
    } else {
        format!("{resource}.{group}")
    }
}

/// Returns whether gpuwarden carries out objects of this kind.
fn is_request(kind: &ObjectKind) -> bool {
    let (group, plural) = (kind.group.as_str(), kind.resource.as_str());
    Maintenance::of_resource(group, plural).is_some()
        || (group, plural) == (validation_request::GROUP, validation_request::PLURAL)
}

/// Returns whether a request has not ended. `attempt` is the kind that a session names for its
/// attempt in progress.
fn is_under_way(kind: &ObjectKind, object: &Value, attempt: Option<&ResourceKind>) -> bool {
    let (group, plural) = (kind.group.as_str(), kind.resource.as_str());
    if let Some(kind) = Maintenance::of_resource(group, plural) {
        return MaintenanceResource::read(kind, object).is_ok_and(|one| !one.is_over());
    }
    if (group, plural) == (validation_request::GROUP, validation_request::PLURAL) {
        return ValidationRequest::read(object).is_ok_and(|one| !one.is_over());
    }
    attempt.is_some_and(|kind| ResourceState::read(object, kind).end.is_none())
}

/// Returns the holders of gpuwarden's Leases that are alive: those that renew their Lease within
/// its duration. Clocks of two machines are never compared.
pub(super) async fn holders(cluster: &Cluster, survey: &Survey) -> anyhow::Result<Vec<String>> {
    let leases = survey.objects.iter().filter(|one| one.is_lease());
    let leases = leases.filter(|one| matches!(one.verdict, Verdict::Delete(_)));
    let holders = try_join_all(leases.map(|lease| holder(cluster, lease))).await?;
    Ok(holders.into_iter().flatten().collect())
}

/// Returns the holder of a Lease once it has renewed the Lease; `None` if it does not.
async fn holder(cluster: &Cluster, lease: &FoundObject) -> anyhow::Result<Option<String>> {
    let until = Instant::now() + LEASE_OBSERVED;
    let namespace = lease.namespace.as_deref();
    let mut first = None;
    loop {
        let object = cluster
            .object(&lease.kind.kind, namespace, &lease.name)
            .await?;
        let spec = object.unwrap_or_default()["spec"].take();
        let holder = spec["holderIdentity"].as_str().unwrap_or_default();
        if holder.is_empty() || Instant::now() >= until {
            return Ok(None);
        }
        let renewed = spec["renewTime"].clone();
        if *first.get_or_insert_with(|| renewed.clone()) != renewed {
            return Ok(Some(format!("{holder} holds the {}", lease.title())));
        }
        tokio::time::sleep(LEASE_POLL).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_is_under_way_until_its_status_says_that_it_has_ended() {
        let (reboots, jobs) = (
            ObjectKind::new("janitor.dgxc.nvidia.com", "v1alpha1", "rebootnodes"),
            ObjectKind::new("batch", "v1", "jobs"),
        );
        let request = |status: Value| {
            json!({
                "metadata": {"name": "r", "uid": "u"}, "spec": {"nodeName": "n1"},
                "status": status,
            })
        };
        let ended = json!({"completionTime": "2027-01-15T08:00:00Z"});
        assert!(is_under_way(&reboots, &request(json!({})), None));
        assert!(!is_under_way(&reboots, &request(ended), None));
        let attempt = ResourceKind {
            condition: "Complete".to_owned(),
            ..ResourceKind::default()
        };
        let complete = json!({"conditions": [{"type": "Complete", "status": "True"}]});
        assert!(is_under_way(&jobs, &request(json!({})), Some(&attempt)));
        assert!(!is_under_way(&jobs, &request(complete), Some(&attempt)));
        // No session waits for it.
        assert!(!is_under_way(&jobs, &request(json!({})), None));
    }
}
