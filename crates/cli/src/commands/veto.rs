//! `gpuwarden veto`: holds back the next drain or remediation of a node, without ending its session.
//!
//! The veto is an annotation on the node, so that it works wherever `kubectl` works; every gpuwarden
//! that acts on the node watches it.

use anyhow::bail;
use contract::keys;
use fleet::veto::{LONGEST, Veto};
use jiff::Timestamp;
use model::node::NodeView;
use model::ownership::Ownership;

use super::{annotate, connect, file, length, person, reason};
use crate::EXIT_OK;
use crate::args::VetoArgs;
use crate::output::{self, say};

/// Longest reason (bytes), which is shown in one line.
const REASON_BYTES: usize = 200;

pub(super) async fn execute(args: &VetoArgs) -> anyhow::Result<u8> {
    let veto = if args.end { None } else { Some(read(args)?) };
    let cluster = connect(&args.cluster, file(&args.cluster)?).await?;
    let text = veto.as_ref().map(serde_json::to_string).transpose()?;
    let node = &args.node;
    let has_veto = |node: &NodeView| node.annotations.contains_key(keys::VETO);
    let write = |node: &NodeView| Ok((text.is_some() || has_veto(node)).then(|| text.clone()));
    let before = annotate(&cluster, node, keys::VETO, write).await?;
    let Some(veto) = veto else {
        if has_veto(&before) {
            say!("{node}: the veto is withdrawn")?;
        } else {
            say!("{node}: there is no veto")?;
        }
        return Ok(EXIT_OK);
    };
    let without = if Ownership::read(&before).is_some() {
        ""
    } else {
        "; the node is in service now"
    };
    output::line(&output::plain(&format!(
        "{node}: no drain and no remediation begins: {veto}{without}"
    )))?;
    say!(
        "Those that have begun are finished; a recovery and a release are not held back. To end the \
         veto: gpuwarden veto {node} --end"
    )?;
    Ok(EXIT_OK)
}

/// Returns the veto of the arguments.
fn read(args: &VetoArgs) -> anyhow::Result<Veto> {
    let duration = length(&args.duration)?;
    if duration > LONGEST {
        let (text, hours) = (&args.duration, LONGEST.as_hours());
        bail!("--for {text}: {hours} hours are the most");
    }
    Ok(Veto {
        by: person(),
        reason: reason(args.reason.as_deref().unwrap_or_default(), REASON_BYTES)?,
        until: Timestamp::now().checked_add(duration)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::ClusterArgs;

    #[test]
    fn a_veto_needs_a_reason_and_an_end_that_counts() {
        let veto = |duration: &str, reason: Option<&str>| {
            read(&VetoArgs {
                node: "n1".to_owned(),
                end: false,
                duration: duration.to_owned(),
                reason: reason.map(str::to_owned),
                cluster: ClusterArgs::default(),
            })
        };
        assert_eq!(veto("4h", Some("the link")).unwrap().reason, "the link");
        let long = "x".repeat(201);
        for (duration, reason, why) in [
            ("0s", Some("x"), "is not a duration"),
            ("soon", Some("x"), "is not a duration"),
            ("169h", Some("x"), "168 hours are the most"),
            ("4h", None, "--reason is empty"),
            ("4h", Some(long.as_str()), "shorten it"),
        ] {
            let said = veto(duration, reason).unwrap_err().to_string();
            assert!(said.contains(why), "{duration} {reason:?}: {said}");
        }
    }
}
