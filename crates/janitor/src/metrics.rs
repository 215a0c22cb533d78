//! Metrics of the janitor, under NVSentinel's names.

use std::time::Duration;

use jiff::SignedDuration;
use maintenance::handover::HandoverPhase;
use maintenance::janitor::{Action, ResourceEvent};
use maintenance::validation_request::{Phase as TestPhase, Status, ValidationRequest};
use maintenance::{Maintenance, ResourceKey};
use model::resource::CompletionReason;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets, linear_buckets};
use runtime::metrics::{Labels, LegacyCounter};

/// Buckets for the duration of an action: 10 s, doubling up to 85 min.
const ACTION_TIMES: fn() -> Histogram = || Histogram::new(exponential_buckets(10.0, 2.0, 10));
/// Buckets for the duration of a reset: steps of 30 s up to 5 min.
const RESET_TIMES: fn() -> Histogram = || Histogram::new(linear_buckets(30.0, 30.0, 10));
/// Buckets for the age of a handover: 10 s, quadrupling up to two days.
const AGES: fn() -> Histogram = || Histogram::new(exponential_buckets(10.0, 4.0, 8));

type Times<L> = Family<L, Histogram, fn() -> Histogram>;

runtime::metrics! {
    #[derive(Clone)]
    pub(crate) struct JanitorMetrics {
        /// Actions by `status`: `started`, `succeeded`, `failed`. Nothing is locked, so the
        /// types `lock` and `unlock` do not occur.
        actions: Family<Labels<3, String>, LegacyCounter> =
            "janitor_actions_count" {action_type, status, node},
        /// From the begin of an action that succeeded to its end.
        mttr: Times<Labels<1>> = "janitor_action_mttr_seconds" {action_type} (ACTION_TIMES),
        /// Resources that were deleted because they had ended long ago.
        deleted: Family<Labels<1>, Counter> = "janitor_ttl_deletions" {kind},
        /// Resets of GPUs that were begun.
        resets: Family<Labels<1, String>, Counter> = "gpu_reset_requests" {node},
        /// Resets of GPUs that have ended: `succeeded`, `failed`.
        completed: Family<Labels<2, String>, Counter> =
            "gpu_reset_requests_completed" {node, status},
        /// Resets of GPUs that have failed, by the reason of their condition `Complete`.
        failures: Family<Labels<2, String>, Counter> = "gpu_reset_failure_reasons" {node, reason},
        /// From the begin of a reset of GPUs to its end.
        duration: Times<Labels<2, String>> =
            "gpu_reset_duration_seconds" {node, status} (RESET_TIMES),
        /// Resets of GPUs that are under way.
        active: Family<Labels<1, String>, Gauge> = "gpu_reset_active_requests" {node},
        /// Steps of requests to hand nodes over: `created`, `released`, `external_response`
        /// (`true`, `false`), `closed` (`completed`, `deleted`, `node_not_found`).
        hand_overs: Family<Labels<2, String>, Counter> =
            "nvsentinel_external_remediation" {phase, result},
        /// Open requests to hand nodes over: `pending`, `released`, `parked`.
        open: Family<Labels<3, String>, Gauge> =
            "nvsentinel_external_remediation_open" {node, recommended_action, state},
        /// Age of requests to hand nodes over at their end.
        age: Times<Labels<2, String>> =
            "nvsentinel_external_remediation_age_seconds" {recommended_action, result} (AGES),
    }
}

runtime::metrics! {
    #[derive(Clone)]
    pub(crate) struct ValidationMetrics {
        /// ValidationRequests that were begun.
        begun: Counter = "validation_requests",
        /// ValidationRequests that have ended: `success`, `failure`.
        completed: Family<Labels<1>, Counter> = "validation_requests_completed" {status},
        /// From the begin of a ValidationRequest to its end.
        duration: Times<Labels<1>> =
            "validation_requests_duration_seconds" {status} (ACTION_TIMES),
    }
}

// === impl JanitorMetrics ===

impl JanitorMetrics {
    /// Updates the metrics for an event of the board.
    pub(crate) fn happened(&self, event: &ResourceEvent) {
        match event {
            ResourceEvent::Begun { key, node } => self.count(key, node, "started"),
            ResourceEvent::Ended {
                key,
                node,
                outcome,
                took,
                ..
            } => {
                let succeeded = outcome == CompletionReason::Succeeded.name();
                self.count(key, node, if succeeded { "succeeded" } else { "failed" });
                if succeeded && let Some(took) = took {
                    let labels = [("action_type", action_type(key))];
                    let took = Duration::try_from(*took).unwrap_or_default();
                    self.mttr.get_or_create(&labels).observe(took.as_secs_f64());
                }
            }
            ResourceEvent::ResetBegun { node } => {
                self.resets.get_or_create(&[("node", node.clone())]).inc();
                self.active.get_or_create(&[("node", node.clone())]).set(1);
            }
            ResourceEvent::ResetEnded {
                node,
                failure,
                took,
                active,
            } => self.reset_ended(node, failure.as_ref(), *took, *active),
            ResourceEvent::HandOver {
                node,
                action,
                before,
                after,
                reason,
                age,
                ..
            } => self.handed_over(node, action, (*before, *after), reason, *age),
        }
    }

    /// Counts a deleted resource.
    pub(crate) fn deleted(&self, kind: Maintenance) {
        self.deleted.get_or_create(&[("kind", kind.name())]).inc();
    }

    fn count(&self, key: &ResourceKey, node: &str, status: &str) {
        let labels = [
            ("action_type", action_type(key).to_owned()),
            ("status", status.to_owned()),
            ("node", node.to_owned()),
        ];
        self.actions.get_or_create(&labels).inc();
    }

    fn reset_ended(
        &self,
        node: &str,
        failure: Option<&String>,
        took: Option<SignedDuration>,
        active: usize,
    ) {
        let status = if failure.is_none() {
            "succeeded"
        } else {
            "failed"
        };
        let labels = [("node", node.to_owned()), ("status", status.to_owned())];
        self.completed.get_or_create(&labels).inc();
        if let Some(took) = took.and_then(|took| Duration::try_from(took).ok()) {
            self.duration
                .get_or_create(&labels)
                .observe(took.as_secs_f64());
        }
        if let Some(reason) = failure {
            let labels = [("node", node.to_owned()), ("reason", reason.clone())];
            self.failures.get_or_create(&labels).inc();
        }
        let active = i64::try_from(active).unwrap_or(i64::MAX);
        self.active
            .get_or_create(&[("node", node.to_owned())])
            .set(active);
    }

    fn handed_over(
        &self,
        node: &str,
        action: &str,
        (before, after): (Option<HandoverPhase>, Option<HandoverPhase>),
        reason: &str,
        age: SignedDuration,
    ) {
        let missing = reason == "NodeNotFound";
        let count = |phase: &str, result: &str| {
            let labels = [("phase", phase.to_owned()), ("result", result.to_owned())];
            self.hand_overs.get_or_create(&labels).inc();
        };
        for (at, by) in [(before, -1), (after, 1)] {
            if let Some(state) = at.and_then(state) {
                let labels = [
                    ("node", node.to_owned()),
                    ("recommended_action", action.to_owned()),
                    ("state", state.to_owned()),
                ];
                self.open.get_or_create(&labels).inc_by(by);
            }
        }
        let result = match after {
            Some(HandoverPhase::Created) => return count("created", "success"),
            Some(HandoverPhase::Released) => return count("released", "success"),
            Some(HandoverPhase::Parked) => return count("external_response", "false"),
            Some(HandoverPhase::Closed) if missing => "node_not_found",
            Some(HandoverPhase::Closed) => {
                count("external_response", "true");
                "completed"
            }
            None if before == Some(HandoverPhase::Closed) => return,
            None => "deleted",
        };
        count("closed", result);
        let labels = [
            ("recommended_action", action.to_owned()),
            ("result", result.to_owned()),
        ];
        if let Ok(age) = Duration::try_from(age) {
            self.age.get_or_create(&labels).observe(age.as_secs_f64());
        }
    }
}

/// Returns the label value of an open request.
fn state(phase: HandoverPhase) -> Option<&'static str> {
    match phase {
        HandoverPhase::Created => Some("pending"),
        HandoverPhase::Released => Some("released"),
        HandoverPhase::Parked => Some("parked"),
        HandoverPhase::Closed => None,
    }
}

fn action_type(key: &ResourceKey) -> &'static str {
    Action::of(key.kind).map_or("", Action::name)
}

// === impl ValidationMetrics ===

impl ValidationMetrics {
    /// Counts the start and the end of a request, from its change of status.
    pub(crate) fn changed(&self, request: &ValidationRequest, now: &Status) {
        let before = request.status.phase;
        if before.is_none() {
            self.begun.inc();
        }
        let Some(phase) = now.phase.filter(|phase| phase.is_over()) else {
            return;
        };
        let status = match phase {
            TestPhase::Succeeded => "success",
            _ => "failure",
        };
        let labels = [("status", status)];
        self.completed.get_or_create(&labels).inc();
        if let Some((begin, end)) = now.start_time.zip(now.completion_time) {
            let took = end.duration_since(begin).as_secs_f64();
            self.duration.get_or_create(&labels).observe(took);
        }
    }
}
