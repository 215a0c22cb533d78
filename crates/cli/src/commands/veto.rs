//! `gpuwarden veto`: hold back the next drain or repair of a node for a while, without ending its session.
//!
//! The veto is an annotation of the node, so it works from wherever `kubectl` does; whoever acts on the node
//! sees it at once.

use anyhow::{Context as _, bail};
use cluster::Cluster;
use contract::keys;
use fleet::veto::{LONGEST, Veto};
use jiff::{SignedDuration, Timestamp};
use model::node::NodeChange;
use model::ownership::Ownership;

use super::{connect, person};
use crate::EXIT_OK;
use crate::args::VetoArgs;
use crate::output::{self, say};
use crate::settings::ClientSettings;

/// Most attempts to write the veto where the node changes meanwhile.
const ATTEMPTS: u32 = 5;
/// Longest reason, in bytes: it is shown in one line.
const REASON_BYTES: usize = 200;

pub(super) async fn execute(args: &VetoArgs) -> anyhow::Result<u8> {
    let veto = if args.end { None } else { Some(read(args)?) };
    let file = ClientSettings::read(args.config.as_deref())?;
    let cluster = connect(args.kubeconfig.clone(), args.context.clone(), file).await?;
    let text = veto.as_ref().map(serde_json::to_string).transpose()?;
    let node = &args.node;
    let (before, in_session) = write(&cluster, node, text).await?;
    let Some(veto) = veto else {
        if before {
            say!("{node}: the veto is taken back")?;
        } else {
            say!("{node}: there is no veto")?;
        }
        return Ok(EXIT_OK);
    };
    let without = if in_session {
        ""
    } else {
        "; the node is in service now"
    };
    output::line(&output::plain(&format!(
        "{node}: no drain and no repair begins: {veto}{without}"
    )))?;
    say!(
        "What is under way goes to its end; a recovery and a release wait for nothing. To end it: \
         gpuwarden veto {node} --end"
    )?;
    Ok(EXIT_OK)
}

/// Returns the veto that is asked for.
fn read(args: &VetoArgs) -> anyhow::Result<Veto> {
    let text = args.duration.as_str();
    let duration = text.parse::<SignedDuration>().ok();
    let duration = duration
        .filter(SignedDuration::is_positive)
        .with_context(|| format!("--for {text:?} is no duration such as 4h or 30m"))?;
    if duration > LONGEST {
        bail!("--for {text}: {} hours are the most", LONGEST.as_hours());
    }
    let reason = args.reason.as_deref().unwrap_or_default().trim();
    if reason.is_empty() {
        bail!("--reason is empty: say why, for whoever reads the node's story");
    }
    if reason.len() > REASON_BYTES {
        bail!("--reason has more than {REASON_BYTES} bytes: shorten it");
    }
    Ok(Veto {
        by: person(),
        reason: reason.to_owned(),
        until: Timestamp::now().checked_add(duration)?,
    })
}

/// Writes the veto on the node, or takes it back. Returns whether one was there, and whether the node is in
/// a session.
async fn write(
    cluster: &Cluster,
    name: &str,
    text: Option<String>,
) -> anyhow::Result<(bool, bool)> {
    let mut attempt = 1;
    loop {
        let node = cluster.node(name).await?;
        let node = node.with_context(|| format!("the cluster has no node {name:?}"))?;
        let there = node.annotations.contains_key(keys::VETO);
        let in_session = Ownership::read(&node).is_some();
        if text.is_none() && !there {
            return Ok((false, in_session));
        }
        let change = NodeChange {
            annotations: [(keys::VETO.to_owned(), text.clone())].into(),
            ..NodeChange::default()
        };
        match cluster.apply(&node, &change).await {
            Ok(_) => return Ok((there, in_session)),
            Err(error) if error.is_retryable() && attempt < ATTEMPTS => attempt += 1,
            Err(error) => {
                return Err(error).with_context(|| format!("cannot write on node {name}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_veto_needs_a_reason_and_an_end_that_counts() {
        let veto = |duration: &str, reason: Option<&str>| {
            read(&VetoArgs {
                node: "n1".to_owned(),
                end: false,
                duration: duration.to_owned(),
                reason: reason.map(str::to_owned),
                config: None,
                kubeconfig: None,
                context: None,
            })
        };
        assert_eq!(veto("4h", Some("the link")).unwrap().reason, "the link");
        let long = "x".repeat(201);
        for (duration, reason, why) in [
            ("0s", Some("x"), "is no duration"),
            ("soon", Some("x"), "is no duration"),
            ("169h", Some("x"), "168 hours are the most"),
            ("4h", None, "--reason is empty"),
            ("4h", Some(long.as_str()), "shorten it"),
        ] {
            let said = veto(duration, reason).unwrap_err().to_string();
            assert!(said.contains(why), "{duration} {reason:?}: {said}");
        }
    }
}
