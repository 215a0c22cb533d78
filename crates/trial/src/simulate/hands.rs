//! Changes of nodes in the simulated cluster by people and machines.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use model::node::{NodeChange, Taint};
use model::ownership::Ownership;
use serde_json::json;

use super::happening::{Hand, MachineChange};
use super::node::{FOREIGN, SimNode};

/// Time after a boot when a machine may uncordon its node.
const LOADS_WITHIN: SignedDuration = SignedDuration::from_mins(5);

// === impl SimNode ===

impl SimNode {
    /// Changes the node as a person.
    pub(super) fn change_by_hand(&mut self, hand: Hand, now: Timestamp) {
        let mut change = NodeChange::default();
        match hand {
            Hand::Cordon => {
                // A cordon on top of gpuwarden's own changes nothing.
                let own = Ownership::read(&self.view);
                let ours = own.is_some_and(|own| own.cordoned && !own.cordon_pre_existing);
                self.cordoned_by_hand |= !self.view.unschedulable && !ours;
                change.unschedulable = Some(true);
            }
            Hand::Uncordon => {
                self.cordoned_by_hand = false;
                change.unschedulable = Some(false);
            }
            Hand::Untaint => {
                let taints = self.view.taints.iter().map(|on| on.taint.clone());
                let ours = taints.filter(|taint| !taint.key.starts_with(FOREIGN));
                change.remove_taints = ours.collect();
            }
            Hand::AskRelease => {
                let at = now.to_string();
                let asked = json!({"by": "alice", "reason": "a simulation", "at": at});
                let asked = (keys::RELEASE.to_owned(), Some(asked.to_string()));
                change.annotations = [asked].into_iter().collect();
            }
            Hand::Veto(hours) => {
                let until = now + SignedDuration::from_hours(i64::try_from(hours).unwrap_or(0));
                let veto = json!({"by": "alice", "reason": "a simulation", "until": until});
                let veto = (keys::VETO.to_owned(), Some(veto.to_string()));
                change.annotations = [veto].into_iter().collect();
            }
            Hand::Taint(number) => {
                let taint = foreign(number);
                if !self.view.has_taint(&taint) {
                    change.add_taints = vec![taint];
                }
            }
            Hand::TakeTaint(number) => change.remove_taints = vec![foreign(number)],
            Hand::Label(number) => {
                let label = (format!("{FOREIGN}{number}"), Some("x".to_owned()));
                change.labels = [label].into_iter().collect();
            }
        }
        self.change(&change);
    }

    /// Approves what is proposed for the node, as a person. Returns the id of the proposal.
    pub(super) fn approve(&mut self, now: Timestamp) -> Option<String> {
        let own = Ownership::read(&self.view)?;
        let id = own.mark.proposal()?.id(&own.session_id);
        let until = now + SignedDuration::from_hours(1);
        let approval = json!({"proposal": id, "by": "alice", "at": now, "until": until});
        let approval = (keys::APPROVE.to_owned(), Some(approval.to_string()));
        self.change(&NodeChange {
            annotations: [approval].into_iter().collect(),
            ..NodeChange::default()
        });
        Some(id)
    }

    /// Changes the node as a machine. `begun` means that its remediation has started.
    pub(super) fn change_by_machine(
        &mut self,
        machine: MachineChange,
        begun: bool,
        now: Timestamp,
    ) {
        match machine {
            MachineChange::Boots => self.boot(now),
            // Nodes that a person cordoned are left alone here.
            MachineChange::Uncordons if self.view.unschedulable && !self.cordoned_by_hand => {
                let booted = (self.booted).is_some_and(|at| now.duration_since(at) < LOADS_WITHIN);
                if booted || begun {
                    self.change(&NodeChange {
                        unschedulable: Some(false),
                        ..NodeChange::default()
                    });
                    self.uncordoned_by_machine = true;
                }
            }
            MachineChange::Uncordons => {}
        }
    }
}

fn foreign(number: usize) -> Taint {
    Taint {
        key: format!("{FOREIGN}{number}"),
        value: String::new(),
        effect: "NoSchedule".to_owned(),
    }
}
