//! `gpuwarden release`: returns a quarantined node, whatever its faults.
//!
//! The request is an annotation on the node, which the gpuwarden that quarantined the node carries
//! out. It works wherever `kubectl` works, and the journal records the person and the reason.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Context as _;
use cluster::Cluster;
use contract::keys;
use fleet::session::foreign_session;
use jiff::Timestamp;
use model::node::NodeView;
use model::ownership::{Ownership, REASON_BYTES, ReleaseRequest};
use tokio::time::Instant;

use super::{annotate, connect, file, node, person, reason};
use crate::args::ReleaseArgs;
use crate::output::{self, say};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// Pause between two reads of the node.
const POLL: Duration = Duration::from_millis(250);

pub(super) async fn execute(args: &ReleaseArgs) -> anyhow::Result<u8> {
    let request = ReleaseRequest {
        by: person(),
        reason: reason(&args.reason, REASON_BYTES)?,
        at: Some(Timestamp::now()),
    };
    let cluster = connect(&args.cluster, file(&args.cluster)?).await?;
    let (before, own) = ask(&cluster, &args.node, &request).await?;
    if args.no_wait {
        say!("{}: the release is requested", args.node)?;
        return Ok(EXIT_OK);
    }
    let limit = Duration::from_secs(args.timeout);
    let Some(after) = wait(&cluster, &args.node, &own, limit).await? else {
        output::line(&output::plain(&unanswered(&before, &own, args.timeout)))?;
        return Ok(EXIT_UNHEALTHY);
    };
    report(&before, &own, &after)
}

/// Writes the request on the node. Returns the node before the request, and gpuwarden's session on it.
async fn ask(
    cluster: &Cluster,
    name: &str,
    request: &ReleaseRequest,
) -> anyhow::Result<(NodeView, Ownership)> {
    let text = serde_json::to_string(request)?;
    let owned = |node: &NodeView| {
        let cordoned = if node.unschedulable {
            "; somebody else cordoned it: kubectl uncordon returns it"
        } else {
            ""
        };
        let own = Ownership::read(node);
        own.with_context(|| format!("node {name} is not quarantined by gpuwarden{cordoned}"))
    };
    let request = |node: &NodeView| owned(node).map(|_| Some(Some(text.clone())));
    let node = annotate(cluster, name, keys::RELEASE, request).await?;
    let own = owned(&node)?;
    Ok((node, own))
}

/// Waits until the session has left the node. Returns `None` if it has not after `limit`.
async fn wait(
    cluster: &Cluster,
    name: &str,
    own: &Ownership,
    limit: Duration,
) -> anyhow::Result<Option<NodeView>> {
    let until = Instant::now() + limit;
    loop {
        let node = node(cluster, name).await?;
        let asked = node.annotations.contains_key(keys::RELEASE);
        let session = Ownership::read(&node).map(|now| now.session_id);
        if !asked && session.as_ref() != Some(&own.session_id) {
            return Ok(Some(node));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Returns the text for a request that is not carried out: the gpuwarden that should, and what a
/// person can do.
fn unanswered(node: &NodeView, own: &Ownership, seconds: u64) -> String {
    let name = &node.name;
    format!(
        "{name}: nothing has happened for {seconds} s. Its session belongs to {}{}, which has to run \
         with --quarantine to end it. The request stays: kubectl annotate node {name} {}- withdraws \
         it. If that gpuwarden is gone for good: {}",
        foreign_session::owner(own, name),
        foreign_session::since(own),
        keys::RELEASE,
        foreign_session::end_command(own, node)
    )
}

/// Writes the changes of the node.
fn report(before: &NodeView, own: &Ownership, after: &NodeView) -> anyhow::Result<u8> {
    let name = &after.name;
    let again = Ownership::read(after).is_some();
    let mut done = Vec::new();
    if before.unschedulable && !after.unschedulable {
        done.push("uncordoned".to_owned());
    }
    if own.cordon_pre_existing && after.unschedulable && !again {
        done.push("still cordoned, as before".to_owned());
    }
    for on_node in &before.taints {
        let ours = own
            .taints
            .iter()
            .any(|applied| applied.taint == on_node.taint);
        if ours && !after.has_taint(&on_node.taint) {
            done.push(format!("taint {} removed", on_node.taint));
        }
    }
    if done.is_empty() {
        done.push("released".to_owned());
    }
    output::line(&output::plain(&format!("{name}: {}", done.join(", "))))?;
    let mut faults = BTreeSet::new();
    for event in &own.events {
        let codes = event.error_code.join(",");
        faults.insert(
            format!("{} {codes}", event.check_name)
                .trim_end()
                .to_owned(),
        );
    }
    for fault in faults {
        output::line(&output::plain(&format!(
            "  dismissed until it is reported again: {fault}"
        )))?;
    }
    if again {
        say!(
            "{name} is quarantined again: a fault was reported after the release; see \
             'gpuwarden explain {name}'"
        )?;
        return Ok(EXIT_UNHEALTHY);
    }
    Ok(EXIT_OK)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn who_does_not_answer_a_request_is_named_with_what_to_do() {
        let session = json!({"id": "s", "since": "2027-01-15T08:00:00Z", "by": "node"});
        let annotations = json!({keys::SESSION: session.to_string()});
        let metadata = json!({"name": "n1", "annotations": annotations});
        let node = NodeView::from_object(json!({ "metadata": metadata })).unwrap();
        let own = Ownership::read(&node).unwrap();
        let text = unanswered(&node, &own, 8);
        for part in [
            "the gpuwarden on n1 itself since 2027-01-15T08:00:00Z",
            "gone for good: kubectl annotate node n1 gpuwarden.dev/session-",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
