//! Least privilege: under the accounts of the chart nothing is refused, and each verb of each rule
//! is used, by the audit log of the API server.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use testkit::{ControlPlane, wait_for};

use super::NAMESPACE;
use super::release::Release;
use crate::brake;
use crate::doctor::one;
use crate::monitoring::repository;
use crate::support::{SOON, event, recovery, send_to, shape};

/// A verb that a role permits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Permission {
    /// Namespace of the role; `None`: the cluster.
    namespace: Option<String>,
    group: String,
    resource: String,
    /// Name of the object; empty: any.
    name: String,
    verb: String,
}

/// A request in the audit log.
#[derive(Clone, Debug)]
struct Request {
    permission: Permission,
    refused: bool,
}

/// Returns the permissions of the roles of an account of the chart.
pub(crate) async fn permissions(
    plane: &ControlPlane,
    account: &str,
) -> anyhow::Result<BTreeSet<Permission>> {
    let mut found = BTreeSet::new();
    for kinds in ["clusterrolebindings", "rolebindings"] {
        let list = plane.kubectl(["get", kinds, "-A", "-o", "json"]).await?;
        let list: Value = serde_json::from_str(&list)?;
        for binding in list["items"].as_array().into_iter().flatten() {
            let subjects = binding["subjects"].as_array().into_iter().flatten();
            let mut ours =
                subjects.filter(|it| it["name"] == account && it["namespace"] == NAMESPACE);
            if ours.next().is_none() {
                continue;
            }
            let namespace = binding["metadata"]["namespace"].as_str();
            let name = binding["roleRef"]["name"].as_str().unwrap_or_default();
            let role = match namespace {
                Some(namespace) => {
                    let get = ["-n", namespace, "get", "role", name, "-o", "json"];
                    plane.kubectl(get).await?
                }
                None => {
                    plane
                        .kubectl(["get", "clusterrole", name, "-o", "json"])
                        .await?
                }
            };
            let role: Value = serde_json::from_str(&role)?;
            for rule in role["rules"].as_array().into_iter().flatten() {
                found.extend(of_rule(rule, namespace));
            }
        }
    }
    Ok(found)
}

pub(super) fn texts(value: &Value) -> Vec<String> {
    let texts = value.as_array().into_iter().flatten();
    texts
        .filter_map(|it| Some(it.as_str()?.to_owned()))
        .collect()
}

fn of_rule(rule: &Value, namespace: Option<&str>) -> Vec<Permission> {
    let mut names = texts(&rule["resourceNames"]);
    if names.is_empty() {
        names.push(String::new());
    }
    let mut permissions = Vec::new();
    for group in texts(&rule["apiGroups"]) {
        for resource in texts(&rule["resources"]) {
            for name in &names {
                permissions.extend(texts(&rule["verbs"]).into_iter().map(|verb| Permission {
                    namespace: namespace.map(str::to_owned),
                    group: group.clone(),
                    resource: resource.clone(),
                    name: name.clone(),
                    verb,
                }));
            }
        }
    }
    permissions
}

/// Returns the requests of an account so far.
fn requests(plane: &ControlPlane, account: &str) -> anyhow::Result<Vec<Request>> {
    let log = std::fs::read_to_string(plane.dir().join("log/audit.json"))?;
    let user = format!("system:serviceaccount:{NAMESPACE}:{account}");
    let mut requests = Vec::new();
    for line in log.lines() {
        // The last line may not be complete yet.
        let Ok(entry) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let object = &entry["objectRef"];
        // Requests for no object are discovery, which everybody may use.
        if entry["user"]["username"] != user.as_str() || !object["resource"].is_string() {
            continue;
        }
        let text = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
        let resource = match text("subresource") {
            part if part.is_empty() => text("resource"),
            part => format!("{}/{part}", text("resource")),
        };
        requests.push(Request {
            permission: Permission {
                namespace: object["namespace"].as_str().map(str::to_owned),
                group: text("apiGroup"),
                resource,
                name: text("name"),
                verb: entry["verb"].as_str().unwrap_or_default().to_owned(),
            },
            refused: entry["responseStatus"]["code"] == 403,
        });
    }
    Ok(requests)
}

/// Returns the requests that were refused.
fn refused(requests: &[Request]) -> BTreeSet<Permission> {
    let refused = requests.iter().filter(|request| request.refused);
    refused.map(|request| request.permission.clone()).collect()
}

/// Returns how many requests of an account for any object are written like this, such as
/// `create pods/eviction in default`.
pub(crate) fn requested(
    plane: &ControlPlane,
    account: &str,
    written: &str,
) -> anyhow::Result<usize> {
    let requests = requests(plane, account)?;
    let of = |request: &Request| {
        let any = Permission {
            name: String::new(),
            ..request.permission.clone()
        };
        any.to_string() == written
    };
    Ok(requests.iter().filter(|request| of(request)).count())
}

/// Returns what was refused to an account.
pub(super) fn refused_to(plane: &ControlPlane, account: &str) -> anyhow::Result<Vec<String>> {
    let refused = refused(&requests(plane, account)?);
    Ok(refused.iter().map(Permission::to_string).collect())
}

/// Checks that no request of an account was refused.
pub(super) fn nothing_refused(plane: &ControlPlane, account: &str) -> anyhow::Result<()> {
    let refused = refused_to(plane, account)?;
    assert_eq!(refused, [""; 0], "refused to {account}");
    Ok(())
}

/// Returns the permissions that no request used.
fn unused(permissions: &BTreeSet<Permission>, requests: &[Request]) -> Vec<Permission> {
    let uses = |permission: &Permission, request: &Permission| {
        let in_namespace =
            permission.namespace.is_none() || permission.namespace == request.namespace;
        in_namespace
            && permission.group == request.group
            && permission.resource == request.resource
            && permission.verb == request.verb
            && (permission.name.is_empty() || permission.name == request.name)
    };
    let used = |permission: &&Permission| {
        !requests
            .iter()
            .any(|request| !request.refused && uses(permission, &request.permission))
    };
    permissions.iter().filter(used).cloned().collect()
}

impl std::fmt::Display for Permission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        for part in [&self.group, &self.name] {
            if !part.is_empty() {
                write!(f, " {part}")?;
            }
        }
        match &self.namespace {
            Some(namespace) => write!(f, " in {namespace}"),
            None => Ok(()),
        }
    }
}

/// Checks the requests of an account against its permissions. The test may leave `except`
/// unused.
pub(crate) async fn check(
    plane: &ControlPlane,
    account: &str,
    except: &[&str],
) -> anyhow::Result<()> {
    let permissions = permissions(plane, account).await?;
    let requests = requests(plane, account)?;
    assert!(!requests.is_empty(), "{account} made no request");
    nothing_refused(plane, account)?;
    let unused = unused(&permissions, &requests);
    let unused = unused.iter().map(Permission::to_string);
    let unused: Vec<String> = unused.filter(|it| !except.contains(&it.as_str())).collect();
    assert_eq!(
        unused, [""; 0],
        "permissions of {account} that it did not use"
    );

    // The comparison finds a spare permission, and a missing one.
    let spare = of_rule(
        &json!({"apiGroups": [""], "resources": ["nodes"], "verbs": ["deletecollection"]}),
        None,
    );
    let with_spare = permissions.iter().cloned().chain(spare.clone()).collect();
    let found = self::unused(&with_spare, &requests);
    assert!(found.contains(&spare[0]), "a spare permission is not found");
    Ok(())
}

#[tokio::test]
async fn observing_takes_and_uses_the_permissions_to_see() -> anyhow::Result<()> {
    let more = ["--set", "controller.extraArgs={--certificate-lifetime=10s}"];
    let Some(release) = Release::start("127.77.1.1", &["observe"], &more).await? else {
        return Ok(());
    };
    let before = release.node().await?;
    release.fault(79).await?;
    release.rotated().await?;
    release.authority_returns().await?;
    let after = release.node().await?;
    assert_eq!(before["spec"], after["spec"]);
    assert_eq!(
        before["metadata"]["annotations"],
        after["metadata"]["annotations"]
    );
    check(&release.plane, "gpuwarden-controller", &[]).await
}

#[tokio::test]
async fn labelling_takes_and_uses_its_permissions() -> anyhow::Result<()> {
    let more = [
        "--set",
        "labeler.enabled=true,controller.extraArgs={--certificate-lifetime=10s}",
    ];
    let Some(release) = Release::start("127.77.1.8", &["observe"], &more).await? else {
        return Ok(());
    };
    let label = "nvsentinel.dgxc.nvidia.com/kata.enabled";
    release
        .node_is("labelled", |node| {
            node["metadata"]["labels"][label] == "false"
        })
        .await?;
    release.fault(79).await?;
    release.rotated().await?;
    release.authority_returns().await?;
    check(&release.plane, "gpuwarden-controller", &[]).await
}

#[tokio::test]
async fn watching_objects_takes_and_uses_its_permissions() -> anyhow::Result<()> {
    let policies = repository("examples/objects.toml");
    let policies = format!("objects.config={}", policies.display());
    let more = [
        "--set",
        "objects.resources[0].resource=pods,objects.resources[1].group=events.k8s.io,\
         objects.resources[1].resource=events,controller.extraArgs={--certificate-lifetime=10s}",
        "--set-file",
        &policies,
    ];
    let Some(release) = Release::start("127.77.1.9", &["observe"], &more).await? else {
        return Ok(());
    };
    let followed = || async {
        let status = release.controller.client(["status", "-o", "json"]).await;
        let status = status.map_err(|error| error.to_string())?.stdout;
        let status: Value = serde_json::from_str(&status).map_err(|error| error.to_string())?;
        let mut sources = status["sources"].as_array().into_iter().flatten();
        match sources.find(|source| source["name"] == "objects") {
            Some(source) if source["state"] == "following" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    let controller = &release.controller;
    controller
        .wait_for("the watches of objects", SOON, followed)
        .await?;
    release.fault(79).await?;
    release.rotated().await?;
    release.authority_returns().await?;
    check(&release.plane, "gpuwarden-controller", &[]).await?;
    let found = release.in_controller(&["doctor", "controller"]).await?;
    let found = found.json(0)?;
    let may = one(&found, "permissions")["what"].to_string();
    assert!(
        may.contains("list, watch pods; list, watch events"),
        "{may}"
    );
    assert_eq!(one(&found, "objects")["result"], "ok", "{found:#}");
    Ok(())
}

/// Returns a policy with a circuit breaker, whose `ConfigMap` gpuwarden writes.
pub(super) fn policy() -> String {
    format!(
        "[circuitBreaker]\npercentage = 50\nduration = \"10m\"\n{}",
        brake::RULES
    )
}

#[tokio::test]
async fn quarantine_takes_and_uses_its_permissions_and_one_less_is_noticed() -> anyhow::Result<()> {
    let policy = tempfile::NamedTempFile::new()?;
    std::fs::write(policy.path(), self::policy())?;
    let policy = format!("policy.config={}", policy.path().display());
    let more = [
        "--set",
        "controller.extraArgs={--certificate-lifetime=10s}",
        "--set-file",
        &policy,
    ];
    let Some(release) = Release::start("127.77.1.2", &["quarantine"], &more).await? else {
        return Ok(());
    };
    let before = shape(&release.node().await?);
    release.pod_with_a_gpu().await?;
    send_to(&release.agent, vec![event("gpu-1", "0")]).await?;
    release
        .node_is("cordoned", |node| node["spec"]["unschedulable"] == true)
        .await?;
    release.breaker_trips().await?;
    release.gpu_is_marked().await?;
    // Twice: the second report changes the Event of the first.
    for second in 0..2 {
        release.mild(second).await?;
    }
    release.rotated().await?;
    release.authority_returns().await?;
    send_to(&release.agent, vec![recovery("gpu-1", "0")]).await?;
    release
        .node_is("as before", |node| {
            let now = shape(node);
            now["spec"] == before["spec"] && now["annotations"] == before["annotations"]
        })
        .await?;
    check(&release.plane, "gpuwarden-controller", &[]).await?;

    // Without one verb something is refused.
    let role = ["get", "clusterrole", "gpuwarden-controller", "-o", "json"];
    let mut role: Value = serde_json::from_str(&release.plane.kubectl(role).await?)?;
    let rules = role["rules"].as_array_mut().into_iter().flatten();
    for rule in rules.filter(|rule| rule["resources"] == json!(["nodes/status"])) {
        rule["verbs"] = json!(["get"]);
    }
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), role.to_string())?;
    let file = file.path().display().to_string();
    release.plane.kubectl(["replace", "-f", &file]).await?;
    release.fault(74).await?;
    wait_for("the refusal of a patch", SOON, || async {
        let requests = requests(&release.plane, "gpuwarden-controller");
        let refused = refused(&requests.map_err(|error| error.to_string())?);
        match refused
            .iter()
            .find(|it| it.verb == "patch" && it.resource == "nodes/status")
        {
            Some(_) => Ok(()),
            None => Err(format!("{refused:?}")),
        }
    })
    .await
}
