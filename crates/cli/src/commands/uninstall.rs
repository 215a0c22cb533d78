//! `gpuwarden uninstall`: removes everything that gpuwarden has written from a cluster.
//!
//! The command runs with the caller's permissions, after gpuwarden itself has ended. It lists all
//! objects of the cluster (`survey.rs`), decides about each on its own (`node.rs`, `object.rs`),
//! and makes the changes: first to the webhook's registration, which may hold up pods, then to the
//! nodes, and to the Leases last. Each change is conditional on the state that its decision was
//! based on, and the decisions depend on nothing else, so that a second run finishes an interrupted
//! one.

mod node;
mod object;
mod owner;
mod report;
mod survey;

use std::time::Duration;

use anyhow::bail;
use cluster::{ApiError, Cluster, ObjectKind, Parts};
use futures::{StreamExt as _, stream};
use runtime::logging::chain;

use super::{ATTEMPTS, connect, file};
use crate::args::{NodesFate, UninstallArgs};
use crate::{exit_code, output};

use node::NodePlan;
use object::Verdict;
use report::Report;
use survey::{FoundObject, Survey, holders};

/// Most objects that are changed at the same time. The client's own pace may allow fewer.
const AT_ONCE: usize = 16;
/// First pause before another attempt; each further one is twice as long.
const RETRY: Duration = Duration::from_millis(250);

/// Decisions of the caller.
#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    nodes: Option<NodesFate>,
    machines: bool,
    crds: bool,
}

pub(super) async fn execute(args: &UninstallArgs) -> anyhow::Result<u8> {
    let cluster = connect(&args.cluster, file(&args.cluster)?).await?;
    let choice = Choice {
        nodes: args.nodes,
        machines: args.machines,
        crds: args.crds,
    };
    let survey = Survey::take(&cluster, choice).await?;
    let obstacles = obstacles(&survey, &holders(&cluster, &survey).await?, args);
    let mut report = Report::of(&survey, args.plan, obstacles);
    if !args.plan {
        if !report.obstacles.is_empty() {
            bail!("nothing is changed: {}", report.obstacles.join("\n"));
        }
        report.failed = apply(&cluster, survey, choice).await;
    }
    if !output::structured(args.output.output, &report)? {
        report.text()?;
    }
    Ok(exit_code(report.is_clean()))
}

/// Returns the reasons not to change anything yet, each with the command that ends it.
fn obstacles(survey: &Survey, holders: &[String], args: &UninstallArgs) -> Vec<String> {
    let mut obstacles = Vec::new();
    for holder in holders {
        obstacles.push(format!(
            "{holder}, and would write everything again: stop gpuwarden first, with helm \
             uninstall, or scale its Deployments to 0"
        ));
    }
    if !survey.under_way.is_empty() && !args.abandon {
        obstacles.push(format!(
            "under way: {}; let gpuwarden finish them (gpuwarden pause --repairs keeps new ones \
             from beginning), or name --abandon, which gives them up: a reboot or a reset that \
             has begun ends by itself",
            survey.under_way.join(", ")
        ));
    }
    let quarantined: Vec<&NodePlan> = (survey.nodes.iter())
        .filter(|plan| plan.faults.is_some())
        .collect();
    if !quarantined.is_empty() && args.nodes.is_none() {
        let mut text = String::from(
            "these nodes are quarantined; --nodes return returns them to service whatever their \
             faults, --nodes leave keeps them cordoned and tainted:",
        );
        for plan in quarantined {
            let faults = plan.faults.as_deref().unwrap_or_default();
            text.push_str(&format!("\n  {}: {faults}", plan.view.name));
        }
        obstacles.push(text);
    }
    obstacles
}

/// Makes the changes. Returns the failures.
async fn apply(cluster: &Cluster, survey: Survey, choice: Choice) -> Vec<String> {
    let mut failed = Vec::new();
    let (first, rest): (Vec<_>, Vec<_>) = (survey.objects.into_iter())
        .partition(|one| one.kind.kind.group == "admissionregistration.k8s.io");
    let (last, rest): (Vec<_>, Vec<_>) = rest
        .into_iter()
        .partition(|one| one.is_lease() || is_crd(one));
    failed.extend(objects(cluster, first).await);
    let nodes = stream::iter(survey.nodes).map(|plan| async move {
        let name = plan.view.name.clone();
        let result = patiently(async || node(cluster, &plan, choice).await).await;
        result.map_err(|error| format!("node {name}: {}", chain(&error)))
    });
    let nodes = nodes.buffer_unordered(AT_ONCE);
    failed.extend(
        nodes
            .filter_map(async |result| result.err())
            .collect::<Vec<_>>()
            .await,
    );
    failed.extend(objects(cluster, rest).await);
    failed.extend(objects(cluster, last).await);
    failed
}

fn is_crd(object: &FoundObject) -> bool {
    object.kind.kind.resource == "customresourcedefinitions"
}

async fn objects(cluster: &Cluster, objects: Vec<FoundObject>) -> Vec<String> {
    let changes = stream::iter(objects).map(|one| async move {
        let result = patiently(async || object(cluster, &one).await).await;
        result.map_err(|error| format!("{}: {}", one.title(), chain(&error)))
    });
    let changes = changes.buffer_unordered(AT_ONCE);
    changes
        .filter_map(async |result| result.err())
        .collect()
        .await
}

/// Retries `attempt` while its error is retryable.
async fn patiently(attempt: impl AsyncFn() -> Result<(), ApiError>) -> Result<(), ApiError> {
    let mut pause = RETRY;
    for _ in 1..ATTEMPTS {
        match attempt().await {
            // A deleted object has no marks.
            Ok(()) | Err(ApiError::NotFound { .. }) => return Ok(()),
            Err(error) if error.is_retryable() => tokio::time::sleep(pause).await,
            Err(error) => return Err(error),
        }
        pause *= 2;
    }
    attempt().await
}

/// Changes a node as planned; a node that has changed since is read and planned again.
async fn node(cluster: &Cluster, plan: &NodePlan, choice: Choice) -> Result<(), ApiError> {
    let nodes = ObjectKind::new("", "v1", "nodes");
    match change(cluster, &nodes, plan).await {
        Err(ApiError::Conflict { .. }) => {
            let object = cluster.object(&nodes, None, &plan.view.name).await?;
            let plan = object.and_then(|object| node::plan(&object, choice));
            match plan {
                Some(plan) => change(cluster, &nodes, &plan).await,
                None => Ok(()),
            }
        }
        result => result,
    }
}

async fn change(cluster: &Cluster, nodes: &ObjectKind, plan: &NodePlan) -> Result<(), ApiError> {
    let name = &plan.view.name;
    cluster
        .remove_parts(nodes, None, name, Some("status"), &plan.status)
        .await?;
    cluster.apply(&plan.view, &plan.change).await.map(drop)
}

async fn object(cluster: &Cluster, one: &FoundObject) -> Result<(), ApiError> {
    let (kind, namespace) = (&one.kind.kind, one.namespace.as_deref());
    match &one.verdict {
        Verdict::Left(_) => Ok(()),
        Verdict::Unmark(removal, _) => {
            cluster
                .remove_parts(kind, namespace, &one.name, None, removal)
                .await
        }
        Verdict::Delete(_) if is_crd(one) => delete_crd(cluster, one).await,
        Verdict::Delete(removal) => {
            cluster
                .remove_parts(kind, namespace, &one.name, None, removal)
                .await?;
            cluster
                .delete_object(kind, namespace, &one.name, &one.uid)
                .await
        }
    }
}

/// Deletes a custom resource definition if no object of its kind exists.
async fn delete_crd(cluster: &Cluster, one: &FoundObject) -> Result<(), ApiError> {
    let object = cluster.object(&one.kind.kind, None, &one.name).await?;
    let Some(object) = object else {
        return Ok(());
    };
    let text = |pointer: &str| object.pointer(pointer).and_then(|text| text.as_str());
    let group = text("/spec/group").unwrap_or_default();
    let version = text("/spec/versions/0/name").unwrap_or_default();
    let plural = text("/spec/names/plural").unwrap_or_default();
    let objects = ObjectKind::new(group, version, plural);
    if !cluster
        .page(&objects, Parts::Metadata, 1, None)
        .await?
        .objects
        .is_empty()
    {
        return Err(ApiError::Invalid {
            status: 400,
            message: format!("{plural} still exist; kubectl get {plural}.{group} lists them"),
        });
    }
    cluster
        .delete_object(&one.kind.kind, None, &one.name, &one.uid)
        .await
}
