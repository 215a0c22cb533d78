//! The hand-over stage: while an external system has the node, its session makes no new changes.

use std::ops::ControlFlow;

use jiff::Timestamp;
use model::node::Taint;
use policy::assess::Desired;

use super::{Facts, Stage, StageRequests};

/// Hand-over of one node. Its whole state is on the node.
#[derive(Debug, Default)]
pub(crate) struct HandOver;

impl Stage for HandOver {
    /// Removes from `desired` the cordon and taints that the session has not applied yet.
    fn plan(
        &mut self,
        facts: &Facts<'_>,
        desired: &mut Desired,
        _requests: &mut StageRequests<'_>,
    ) -> ControlFlow<()> {
        let ours = facts.session_on_node();
        if let Some((_, own)) = ours.filter(|(observed, _)| observed.view.is_handed_over()) {
            desired.cordon &= own.cordoned;
            let has = |taint: &Taint| own.taints.iter().any(|one| one.taint == *taint);
            desired.taints.retain(has);
        }
        ControlFlow::Continue(())
    }

    fn act(&mut self, _facts: &Facts<'_>, _desired: &Desired, _requests: &mut StageRequests<'_>) {}

    fn wake_at(&self, _now: Timestamp) -> Option<Timestamp> {
        None
    }

    fn awaits_answer(&self) -> bool {
        false
    }

    fn clock_moved_back(&mut self, _now: Timestamp) {}

    fn answers_lost(&mut self) {}
}
