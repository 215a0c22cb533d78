//! `gpuwarden approve`: approves what the session on a node, or on the nodes of an incident, proposes
//! to do.
//!
//! The approval is an annotation on the node that names the proposal, so that it works wherever
//! `kubectl` works, and never counts for a later proposal. The gpuwarden that made the proposal takes
//! it in. Only incidents are asked for: no node has them.

use anyhow::{Context as _, bail};
use cluster::Cluster;
use console::api::IncidentsView;
use contract::keys;
use fleet::view::IncidentView;
use jiff::{SignedDuration, Timestamp};
use model::node::NodeView;
use model::ownership::Ownership;
use model::proposal::{ApprovalRequest, LONGEST_APPROVAL, Proposal};

use super::{annotate, connect, file, length, person};
use crate::args::{ApproveArgs, ConnectArgs, RemoteArgs, ServerArgs};
use crate::client::Client;
use crate::output::{self, plain, plural, say};
use crate::{EXIT_FAILED, EXIT_OK};

pub(super) async fn execute(args: &ApproveArgs) -> anyhow::Result<u8> {
    let until = Timestamp::now().checked_add(duration(&args.duration)?)?;
    let cluster = connect(&args.cluster, file(&args.cluster)?).await?;
    let name = &args.name;
    if cluster.node(name).await?.is_some() {
        approve(&cluster, name, None, until).await?;
        return Ok(EXIT_OK);
    }
    let incidents = incidents(args).await.with_context(|| {
        format!("the cluster has no node {name:?}, and incidents cannot be asked for")
    })?;
    let incident = found(&incidents, name)?;
    let each =
        async |node: &str, shown: &Proposal| approve(&cluster, node, Some(shown), until).await;
    approve_all(incident, each).await
}

/// Approves the proposal that waits on a node; one that was shown only if it still is the same.
async fn approve(
    cluster: &Cluster,
    name: &str,
    shown: Option<&Proposal>,
    until: Timestamp,
) -> anyhow::Result<()> {
    let write = |node: &NodeView| Ok(Some(Some(approval(node, shown, until)?)));
    let node = annotate(cluster, name, keys::APPROVE, write).await?;
    let (_, proposal) = proposal(&node)?;
    let (name, title) = (&node.name, proposal.title());
    output::line(&plain(&format!(
        "{name}: approved: {title}; it has to begin before {until:.0}"
    )))?;
    Ok(())
}

/// Approves by `each` what waits on the nodes of an incident. Returns the exit code.
async fn approve_all(
    incident: &IncidentView,
    each: impl AsyncFn(&str, &Proposal) -> anyhow::Result<()>,
) -> anyhow::Result<u8> {
    let (mut nothing, mut code) = (Vec::new(), EXIT_OK);
    for node in &incident.nodes {
        let Some(shown) = &node.proposal else {
            nothing.push(plain(&node.name));
            continue;
        };
        if let Err(error) = each(&node.name, shown).await {
            output::error(&error.context(node.name.clone()));
            code = EXIT_FAILED;
        }
    }
    let names = nothing.join(", ");
    if nothing.len() == incident.nodes.len() {
        bail!(
            "nothing waits for an approval on the nodes of incident {}: {names}",
            incident.id
        );
    }
    if !nothing.is_empty() {
        say!(
            "nothing waits on {}: {names}",
            plural(nothing.len() as u64, "other node")
        )?;
    }
    Ok(code)
}

/// Asks for the incidents: the gpuwarden that the arguments name, else the controller of the cluster
/// that they name, else the gpuwarden of this machine.
async fn incidents(args: &ApproveArgs) -> anyhow::Result<Vec<IncidentView>> {
    let is_named = args.server.is_some() || args.data_dir.is_some();
    let ConnectArgs {
        kubeconfig,
        context,
    } = if is_named {
        ConnectArgs::default()
    } else {
        args.cluster.connect.clone()
    };
    let remote = RemoteArgs {
        server: ServerArgs {
            config: args.cluster.config.clone(),
            server: args.server.clone(),
            data_dir: args.data_dir.clone(),
        },
        kubeconfig,
        context,
        namespace: args.namespace.clone(),
    };
    let client = Client::remote(&remote).await?;
    let view: IncidentsView = client.get("/api/v1/incidents").await?;
    Ok(view.incidents)
}

/// Returns the incident of an id.
fn found<'a>(incidents: &'a [IncidentView], id: &str) -> anyhow::Result<&'a IncidentView> {
    let found = incidents.iter().find(|incident| incident.id == id);
    found.with_context(|| {
        let waiting = incidents.iter().filter(|incident| incident.proposals() > 0);
        let waiting: Vec<&str> = waiting.map(|incident| incident.id.as_str()).collect();
        let what = match waiting.as_slice() {
            [] => "nothing waits on the nodes of any incident".to_owned(),
            ids => format!("an approval is awaited in {}", ids.join(", ")),
        };
        format!(
            "{id:?} is neither a node of the cluster nor an incident with open faults; {what} \
             (gpuwarden incidents)"
        )
    })
}

/// Parses the time within which the first action has to begin.
fn duration(text: &str) -> anyhow::Result<SignedDuration> {
    let duration = length(text)?;
    if duration > LONGEST_APPROVAL {
        let hours = LONGEST_APPROVAL.as_hours();
        bail!("--for {text}: {hours} hours are the most");
    }
    Ok(duration)
}

/// Returns the value of the annotation.
fn approval(node: &NodeView, shown: Option<&Proposal>, until: Timestamp) -> anyhow::Result<String> {
    let (session, proposal) = proposal(node)?;
    if shown.is_some_and(|shown| *shown != proposal) {
        bail!("it proposes something else now: {}", proposal.title());
    }
    let request = ApprovalRequest {
        proposal: proposal.id(&session),
        by: person(),
        at: Some(Timestamp::now()),
        until,
    };
    Ok(serde_json::to_string(&request)?)
}

/// Returns the proposal of a node that waits, and the id of its session.
fn proposal(node: &NodeView) -> anyhow::Result<(String, Proposal)> {
    let own = Ownership::read(node);
    let waits = own.and_then(|own| Some((own.mark.proposal().cloned()?, own.session_id)));
    let (proposal, session) = waits.with_context(|| {
        let name = &node.name;
        format!(
            "nothing on node {name} waits for an approval; gpuwarden explain {name} shows its story"
        )
    })?;
    Ok((session, proposal))
}

#[cfg(test)]
mod tests {
    use model::proposal::DRAIN;
    use serde_json::json;

    use super::*;

    fn node(proposals: &[Proposal]) -> NodeView {
        let since = "2027-01-15T08:00:00Z";
        let session = json!({"id": "s", "since": since, "proposals": proposals});
        let annotations = json!({keys::SESSION: session.to_string()});
        let metadata = json!({"name": "n1", "annotations": annotations});
        NodeView::from_object(json!({ "metadata": metadata })).unwrap()
    }

    #[test]
    fn an_approval_names_the_proposal_that_waits_and_counts_for_it() {
        let now = Timestamp::now();
        let mut waits = [Proposal {
            since: now,
            actions: [DRAIN.to_owned()].into(),
            approved: None,
        }];
        let until = now.checked_add(duration("1h").unwrap()).unwrap();
        let mut node = node(&waits);
        let text = approval(&node, None, until).unwrap();
        node.annotations.insert(keys::APPROVE.into(), text);
        let request = ApprovalRequest::read(&node).unwrap().unwrap();
        request.approve("s", &mut waits, now).unwrap();
        assert_eq!(waits[0].approved.as_ref().unwrap().until, until);
        // Once it is approved, or without a session, nothing waits.
        for node in [self::node(&waits), NodeView::unknown("n1")] {
            let why = approval(&node, None, until).unwrap_err().to_string();
            assert!(why.starts_with("nothing on node n1 waits"), "{why}");
        }
    }

    #[test]
    fn what_was_shown_is_approved_and_what_came_after_it_is_not() {
        let waits = waits(1);
        let node = node(std::slice::from_ref(&waits));
        let until = Timestamp::now();
        assert!(approval(&node, Some(&waits), until).is_ok());
        let why = approval(&node, Some(&self::waits(2)), until).unwrap_err();
        let expected = "it proposes something else now: drain of the node";
        assert_eq!(why.to_string(), expected);
    }

    fn waits(second: i64) -> Proposal {
        Proposal {
            since: Timestamp::from_second(second).unwrap(),
            actions: [DRAIN.to_owned()].into(),
            approved: None,
        }
    }

    /// Returns an incident of nodes that propose something or nothing.
    fn incident(nodes: &[(&str, Option<Proposal>)]) -> IncidentView {
        let since = Timestamp::UNIX_EPOCH;
        let fault = json!({
            "agent": "a", "componentClass": "GPU", "check": "c", "code": "1", "subject": "s",
            "entities": [], "fatal": true, "recommendedAction": "NONE", "message": "",
            "firstSeen": since, "lastSeen": since, "count": 1, "eventId": "e",
        });
        let node = |(name, proposal): &(&str, Option<Proposal>)| {
            json!({
                "name": name, "state": "quarantined", "proposal": proposal, "faults": [fault],
            })
        };
        let nodes: Vec<_> = nodes.iter().map(node).collect();
        let incident = json!({
            "id": "i1", "since": since, "primaryNode": "a", "primary": fault, "nodes": nodes,
        });
        serde_json::from_value(incident).unwrap()
    }

    #[tokio::test]
    async fn all_that_waits_on_the_nodes_of_an_incident_is_approved_whichever_fails() {
        let table = [("a", Some(waits(1))), ("b", None), ("c", Some(waits(3)))];
        for (failing, expected) in [("a", EXIT_FAILED), ("b", EXIT_OK), ("c", EXIT_FAILED)] {
            let asked = std::sync::Mutex::new(Vec::new());
            let each = async |node: &str, shown: &Proposal| {
                asked
                    .lock()
                    .unwrap()
                    .push((node.to_owned(), shown.since.as_second()));
                anyhow::ensure!(node != failing, "it cannot be written");
                Ok(())
            };
            let code = approve_all(&incident(&table), each).await.unwrap();
            assert_eq!(code, expected, "{failing} fails");
            let asked = asked.into_inner().unwrap();
            assert_eq!(asked, [("a".to_owned(), 1), ("c".to_owned(), 3)]);
            assert_eq!(output::take_written(), "nothing waits on 1 other node: b\n");
        }
        let each = async |_: &str, _: &Proposal| anyhow::bail!("nothing was shown");
        let why = approve_all(&incident(&[("a", None)]), each)
            .await
            .unwrap_err();
        let expected = "nothing waits for an approval on the nodes of incident i1: a";
        assert_eq!(why.to_string(), expected);
    }

    #[test]
    fn what_is_neither_a_node_nor_an_incident_is_told_what_waits() {
        let waiting = [incident(&[("a", Some(waits(1))), ("b", None)])];
        assert_eq!(found(&waiting, "i1").unwrap(), &waiting[0]);
        let nothing = [incident(&[("a", None)])];
        for (incidents, what) in [
            (&waiting[..], "an approval is awaited in i1"),
            (&nothing, "nothing waits on the nodes of any incident"),
        ] {
            let why = found(incidents, "i2").unwrap_err().to_string();
            let expected = format!(
                "\"i2\" is neither a node of the cluster nor an incident with open faults; {what} \
                 (gpuwarden incidents)"
            );
            assert_eq!(why, expected);
        }
    }

    #[test]
    fn the_time_to_begin_is_bounded() {
        assert_eq!(duration("90m").unwrap().as_mins(), 90);
        for (text, why) in [
            ("0s", "is not a duration"),
            ("soon", "is not a duration"),
            ("25h", "24 hours are the most"),
        ] {
            let said = duration(text).unwrap_err().to_string();
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
