//! Proposals of a session: parts of it that wait for a person's approval, as stored in the session
//! annotation of the node, and the approval, which is an annotation of its own.

use std::collections::BTreeSet;

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::attempt::Attempt;
use crate::event::floor_char_boundary;
use crate::node::NodeView;

/// Longest time that an approval waits to be used, from now on: the state of a node changes.
pub const LONGEST_APPROVAL: SignedDuration = SignedDuration::from_hours(24);
/// Action of a proposal: the drain of all pods of the node.
pub const DRAIN: &str = "drain of the node";
/// Begin of the actions that drain pods.
const DRAIN_OF: &str = "drain of ";
/// Longest name of a person that is kept, in bytes.
const NAME_BYTES: usize = 253;

/// A proposal: actions that the policy or the configuration lets happen only once a person has
/// approved them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proposal {
    /// Time of the proposal, which tells it from others of its session.
    pub since: Timestamp,
    /// Proposed actions: those of [`drain_actions`] and [`repair_action`].
    pub actions: BTreeSet<String>,
    /// Approval of a person; `None` while the proposal waits for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approved: Option<Approval>,
}

/// Approval of a proposal, as recorded in the session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Approval {
    /// Name of the person.
    pub by: String,
    /// Time of the approval.
    pub at: Timestamp,
    /// Time by which the first of the actions has to begin.
    pub until: Timestamp,
}

/// A person's approval of a proposal: the annotation [`keys::APPROVE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApprovalRequest {
    /// Id of the proposal ([`Proposal::id`]). An approval counts for no other one.
    pub proposal: String,
    /// Name of the person, unverified.
    #[serde(default)]
    pub by: String,
    /// Time of the approval on the person's own clock; the time of its observation if left out.
    #[serde(default)]
    pub at: Option<Timestamp>,
    /// Time by which the first of the actions has to begin.
    pub until: Timestamp,
}

/// Returns the actions that drain these GPUs, or the whole node if there are none.
pub fn drain_actions(gpus: &[String]) -> BTreeSet<String> {
    if gpus.is_empty() {
        return [DRAIN.to_owned()].into();
    }
    gpus.iter().map(|gpu| format!("{DRAIN_OF}{gpu}")).collect()
}

/// Returns whether an action drains.
pub fn is_drain(action: &str) -> bool {
    action.starts_with(DRAIN_OF)
}

/// Returns the action of a repair by the custom resource of the action `name`, of `entity` alone
/// if not empty.
pub fn repair_action(name: &str, entity: &str) -> String {
    match entity {
        "" => name.to_owned(),
        entity => format!("{name} {entity}"),
    }
}

// === impl Proposal ===

impl Proposal {
    /// Returns the id of the proposal, which an approval names.
    pub fn id(&self, session: &str) -> String {
        format!("{session}/{}", self.since)
    }

    /// Returns the actions for people: `drain of the node, RESTART_BM`.
    pub fn title(&self) -> String {
        let mut actions: Vec<&str> = self.actions.iter().map(String::as_str).collect();
        // The drain precedes the repairs.
        actions.sort_by_key(|action| !is_drain(action));
        actions.join(", ")
    }

    /// Returns whether pods leave.
    pub fn drains(&self) -> bool {
        self.actions.iter().any(|action| is_drain(action))
    }

    /// Returns whether the proposal has `action`. That of the whole node includes those of its GPUs.
    pub fn has(&self, action: &str) -> bool {
        let drains_all = is_drain(action) && self.actions.contains(DRAIN);
        drains_all || self.actions.contains(action)
    }

    /// Returns whether an attempt is one of the actions, and was made after the proposal.
    pub fn led_to(&self, attempt: &Attempt) -> bool {
        let action = repair_action(&attempt.action, &attempt.entity);
        attempt.since >= self.since && self.actions.contains(&action)
    }
}

// === impl ApprovalRequest ===

impl ApprovalRequest {
    /// Parses the approval on a node; `None` without one. The error says why it does not count.
    pub fn read(node: &NodeView) -> Option<Result<Self, String>> {
        let text = node.annotations.get(keys::APPROVE)?;
        Some(serde_json::from_str(text.trim()).map_err(|why| does_not_count(&why.to_string())))
    }

    /// Approves the proposal that the request names, among those of the session. A proposal that is
    /// approved already is left unchanged. The error says why the request does not count.
    pub fn approve(
        self,
        session: &str,
        proposals: &mut [Proposal],
        now: Timestamp,
    ) -> Result<(), String> {
        let mut named = proposals.iter_mut();
        let Some(named) = named.find(|one| one.id(session) == self.proposal) else {
            let why = "it approves another proposal than the one that waits now";
            return Err(does_not_count(why));
        };
        if named.approved.is_some() {
            return Ok(());
        }
        let until = self.until;
        if until <= now {
            return Err(does_not_count(&format!("it has expired at {until:.0}")));
        }
        if until.duration_since(now) > LONGEST_APPROVAL {
            let most = LONGEST_APPROVAL.as_hours();
            let why = format!("it ends at {until:.0}, and {most} hours from now are the most");
            return Err(does_not_count(&why));
        }
        let mut by = self.by;
        by.truncate(floor_char_boundary(&by, NAME_BYTES));
        if by.is_empty() {
            "somebody".clone_into(&mut by);
        }
        let at = self.at.map_or(now, |at| at.min(now));
        named.approved = Some(Approval { by, at, until });
        Ok(())
    }
}

fn does_not_count(why: &str) -> String {
    let key = keys::APPROVE;
    format!("the annotation {key} does not count: {why}; `gpuwarden approve` writes it")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn proposal(actions: &[&str]) -> Proposal {
        Proposal {
            since: at(5),
            actions: actions.iter().map(|one| (*one).to_owned()).collect(),
            approved: None,
        }
    }

    /// Returns the approval that an annotation gives to the only proposal of a session.
    fn approve(text: &str, now: i64) -> Result<Option<Approval>, String> {
        let mut node = NodeView::unknown("n1");
        node.annotations.insert(keys::APPROVE.into(), text.into());
        let mut proposals = [proposal(&[DRAIN])];
        let request = ApprovalRequest::read(&node).unwrap()?;
        request.clone().approve("s", &mut proposals, at(now))?;
        let before = proposals.clone();
        assert_eq!(
            request.approve("s", &mut proposals, at(now)),
            Ok(()),
            "sent twice"
        );
        assert_eq!(proposals, before);
        Ok(proposals[0].approved.clone())
    }

    #[test]
    fn an_approval_counts_up_to_its_end_and_no_longer_than_a_day() {
        let text =
            r#"{"proposal":"s/1970-01-01T00:00:05Z","by":"anna","until":"1970-01-03T00:00:00Z"}"#;
        let end = 2 * 86_400;
        let approval = approve(text, end - 1).unwrap().unwrap();
        assert_eq!((approval.by.as_str(), approval.until), ("anna", at(end)));
        assert_eq!(approval.at, at(end - 1), "it does not say when");
        assert!(approve(text, end - 86_400).is_ok());
        let long = "24 hours from now are the most";
        for (now, why) in [(end, "has expired"), (end - 86_401, long)] {
            let said = approve(text, now).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
        assert!(ApprovalRequest::read(&NodeView::unknown("n1")).is_none());
    }

    #[test]
    fn what_cannot_be_read_or_names_another_proposal_approves_nothing() {
        let other = r#"{"proposal":"s/1970-01-01T00:00:04Z","until":"1970-01-01T01:00:00Z"}"#;
        let nothing = r#"{"until":"1970-01-01T01:00:00Z"}"#;
        for text in ["", "true", "{}", nothing, other] {
            let why = approve(text, 0).unwrap_err();
            let said = "gpuwarden.dev/approve does not count";
            assert!(why.contains(said), "{text}: {why}");
        }
    }

    #[test]
    fn the_drain_of_a_node_includes_its_gpus_and_a_repair_nothing_else() {
        let whole = proposal(&[DRAIN, "RESTART_BM"]);
        assert_eq!(whole.title(), "drain of the node, RESTART_BM");
        let of_gpu = drain_actions(&["a".into()]);
        assert!(of_gpu.iter().all(|one| whole.has(one)));
        assert!(whole.has("RESTART_BM") && !whole.has(&repair_action("RESTART_BM", "a")));
        let gpu = proposal(&["COMPONENT_RESET a", "drain of a"]);
        assert_eq!(gpu.title(), "drain of a, COMPONENT_RESET a");
        assert!(gpu.has(&repair_action("COMPONENT_RESET", "a")));
        assert!(!gpu.has(&repair_action("COMPONENT_RESET", "b")));
        assert!(!gpu.has(DRAIN) && !gpu.has("drain of b"));
    }
}
