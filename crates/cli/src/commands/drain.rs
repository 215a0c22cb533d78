//! `gpuwarden drain --plan`: the plan of a node's drain.
//!
//! The command reads the cluster, not a gpuwarden, so that it works where none runs, and with a
//! configuration that is not in use yet. The decisions about pods are those of a real drain.

use anyhow::Context as _;
use cluster::ApiError;
use contract::HealthEvent;
use fleet::drain::plan::{DrainPlan, PlannedPod, plan};
use fleet::drain::{Drain, DrainConfig, Fate, Next, fate};
use fleet::veto::Veto;
use jiff::Timestamp;
use model::node::NodeView;
use model::ownership::Ownership;
use model::proposal::Proposal;
use policy::Policy;
use policy::assess::Desired;
use preflight::config::Discovery;
use preflight::gang::Gang;
use serde_json::{Value, json};

use super::{connect, file, node};
use crate::EXIT_OK;
use crate::args::DrainArgs;
use crate::output::{self, Colour, say};
use crate::policy_source;
use crate::settings::drain_config;

pub(super) async fn execute(args: &DrainArgs) -> anyhow::Result<u8> {
    let file = file(&args.cluster)?;
    let path = args.drain_config.clone().or(file.drain_config.clone());
    let config = match &path {
        Some(path) => drain_config(path)?,
        None => DrainConfig::default(),
    };
    let cluster = connect(&args.cluster, file).await?;
    let name = &args.node;
    let node = node(&cluster, name).await?;
    let pods = cluster.pods_to_plan(name).await.with_context(|| {
        format!("cannot read the pods of node {name}; this needs `list` on pods and resourceclaims")
    })?;
    let policy = args.policy.as_deref().map(policy_source::load);
    let policy = policy.transpose()?;
    let own = Ownership::read(&node);
    let mark = own.as_ref().and_then(|own| own.mark.drain);
    let proposal = own.as_ref().and_then(|own| own.mark.proposal());
    let proposal = proposal.filter(|one| one.drains()).map(Proposal::title);
    let events = own.map(|own| own.events).unwrap_or_default();
    let begun = mark
        .filter(|mark| mark.done.is_none())
        .map(|mark| mark.since);
    let now = Timestamp::now();
    let wanted = wanted(&events, policy.as_ref(), &node);
    let drain = Drain {
        since: begun.unwrap_or(now),
        force: wanted == Ok(true),
    };
    let (mut facts, mut unasked) = (Vec::new(), None);
    for (mut one, pod) in pods {
        one.gang = gang(&pod, &one.pod.namespace);
        let leaves = fate(&one.pod, drain, &config, now);
        if wanted.is_ok() && unasked.is_none() && matches!(leaves, Fate::Leaves(_, Next::Evict(_)))
        {
            match cluster.refuses_eviction(&one.pod).await {
                Ok(why) => one.held_by = why,
                Err(error @ ApiError::Forbidden { .. }) => unasked = Some(error),
                Err(error) => {
                    return Err(error).context("cannot check whether pods may be evicted");
                }
            }
        }
        facts.push(one);
    }
    let drain = wanted.map(|_| drain);
    let mut plan = plan(name, facts, begun, drain, &config, now);
    let veto = Veto::of(&node, now).ok().flatten();
    plan.veto = veto.map(|veto| veto.to_string());
    plan.proposal = proposal;
    let custom = config
        .custom
        .as_ref()
        .filter(|one| one.applies_to(&node.labels));
    plan.custom_drain = custom.map(|custom| custom.resource.kind.clone());
    plan.budgets_unknown = unasked.map(|error| error.to_string());
    if !output::structured(args.output.output, &plan)? {
        let by = path.map_or_else(
            || "without a file: each pod is waited for".to_owned(),
            |path| format!("by {}", path.display()),
        );
        text(&plan, &by)?;
        if events.is_empty() && policy.is_some_and(|policy| !policy.routes.is_empty()) {
            say!("\nThe node's annotations name no event, so its route is unknown.")?;
        }
    }
    Ok(EXIT_OK)
}

/// Returns true if the events in the node's annotations force a drain without waiting. The error is
/// the reason why pods stay.
fn wanted(
    events: &[HealthEvent],
    policy: Option<&Policy>,
    node: &NodeView,
) -> Result<bool, String> {
    let desired = Desired::of_listed(events, policy, node);
    if let Some(force) = desired.drains() {
        return Ok(force);
    }
    if events.is_empty() {
        return Ok(false);
    }
    Err(match desired.skipped_by() {
        Some(routes) => format!("skipped by {routes}"),
        None => "the senders of its events ask that pods stay".to_owned(),
    })
}

/// Returns the gang in a pod's metadata, as `DISCOVERER NAMESPACE/NAME`.
fn gang(pod: &Value, namespace: &str) -> Option<String> {
    let volcano = Discovery::from_json(&json!({"method": "volcano"})).ok();
    let kinds = [Some(Discovery::Native), Some(Discovery::Kueue), volcano];
    let mut kinds = kinds.into_iter().flatten();
    kinds.find_map(|by| {
        let gang = Gang::of(pod, namespace, &by).ok().flatten()?;
        Some(format!(
            "{} {}/{}",
            gang.discoverer, gang.namespace, gang.name
        ))
    })
}

pub(super) fn text(plan: &DrainPlan, by: &str) -> anyhow::Result<()> {
    let DrainPlan {
        node,
        since,
        kept_by,
        veto,
        proposal,
        custom_drain,
        budgets_unknown,
        leaving,
        gpus,
        gpu_hours,
        groups,
        pods,
    } = plan;
    let begun = match since {
        Some(since) => format!("is being drained since {}", output::time(*since)),
        None => "is not being drained".to_owned(),
    };
    say!(
        "{} {begun}. The plan, {}:",
        output::plain(node),
        output::plain(by)
    )?;
    say!(
        "{leaving} of {} pods leave, with {gpus} GPUs and {gpu_hours:.1} GPU-hours since they started\n",
        pods.len()
    )?;
    for pod in pods {
        let word = if pod.leaves {
            output::colour("leaves", Colour::Yellow)
        } else {
            output::colour("stays ", Colour::Grey)
        };
        say!("{word}  {}", output::plain(&line(pod)))?;
    }
    if !groups.is_empty() {
        say!("\nGangs and jobs that lose pods here:")?;
    }
    for group in groups {
        let modes: Vec<&str> = group.modes.iter().copied().collect();
        say!(
            "  {}: {} of its pods, {} GPUs, {:.1} GPU-hours, {}",
            output::plain(&group.name),
            group.pods.len(),
            group.gpus,
            group.gpu_hours,
            modes.join(" and ")
        )?;
    }
    if let Some(why) = kept_by {
        say!("\nThere is no drain: {}.", output::plain(why))?;
    }
    if let Some(veto) = veto {
        say!("\nHeld back by {}.", output::plain(veto))?;
    }
    if let Some(title) = proposal {
        let (title, node) = (output::plain(title), output::plain(node));
        say!("\nIt waits for an approval of {title}: gpuwarden approve {node}")?;
    }
    if let Some(kind) = custom_drain {
        say!(
            "\nNo pod is evicted: a {kind} requests the drain from another controller, and names the pods."
        )?;
    }
    if let Some(why) = budgets_unknown {
        say!("\nThe pods that a disruption budget holds are unknown: {why}")?;
    }
    Ok(())
}

fn line(pod: &PlannedPod) -> String {
    let mut text = format!("{}/{}: {}", pod.namespace, pod.name, pod.what);
    if let Some(mode) = pod.mode {
        text += &format!(" ({})", mode.name());
    }
    if let Some(why) = &pod.held_by {
        text += &format!("; now refused: {why}");
    }
    if pod.gpus > 0 {
        text += &format!("; {} GPUs, {:.1} GPU-hours", pod.gpus, pod.gpu_hours);
    }
    if let Some(of) = pod.gang.as_ref().or(pod.owner.as_ref()) {
        text += &format!("; of {of}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gang_of_a_pod_is_known_by_whoever_schedules_it() {
        let marked = |metadata: Value, spec: Value| json!({"metadata": metadata, "spec": spec});
        let none = || json!({});
        for (pod, name) in [
            (
                marked(none(), json!({"schedulingGroup": {"podGroupName": "g"}})),
                Some("kubernetes ml/g"),
            ),
            (
                marked(
                    json!({"labels": {"kueue.x-k8s.io/workload-name": "w"}}),
                    none(),
                ),
                Some("kueue ml/w"),
            ),
            (
                marked(
                    json!({"annotations": {"scheduling.k8s.io/group-name": "v"}}),
                    none(),
                ),
                Some("volcano ml/v"),
            ),
            (marked(none(), none()), None),
        ] {
            assert_eq!(gang(&pod, "ml").as_deref(), name, "{pod}");
        }
    }
}
