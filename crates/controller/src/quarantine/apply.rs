//! Carrying out what a session decided: one patch, and its answer.

use std::sync::Arc;
use std::time::Duration;

use cluster::ApiError;
use contract::keys;
use domain::assess::Desired;
use domain::brake::DOUBT;
use domain::journal::EntryKind;
use domain::node::{NodeChange, NodeView};
use domain::session::{Failure, Intent, Patch, Phase};
use jiff::{SignedDuration, Timestamp};
use runtime::logging::chain;
use serde_json::json;
use tokio::task::JoinError;
use tokio::time::Instant;

use super::{Mode, Quarantine, ROUND};

/// A patch that was answered.
pub(super) struct Applied {
    node: String,
    session: Option<String>,
    intent: Intent,
    change: NodeChange,
    took: Duration,
    /// When the oldest of the faults was first seen.
    first_seen: Option<Timestamp>,
    result: Result<NodeView, ApiError>,
}

impl Quarantine {
    /// Starts a patch; in a dry run only says so.
    pub(super) fn carry_out(
        &mut self,
        name: &str,
        view: &Arc<NodeView>,
        patch: Patch,
        desired: &Desired,
    ) {
        let Patch { intent, change } = patch;
        let session = self.entry(name).session.id.clone();
        let summary = format!("{}: {}", intent.name(), change.summary());
        let detail = json!({
            "intent": intent,
            "change": change,
            "ruleSets": desired.rule_sets,
            "events": desired.events.iter().map(|one| &one.event.id).collect::<Vec<_>>(),
        });
        if self.mode == Mode::DryRun {
            tracing::info!(node = name, "dry run: {summary}");
            self.note(name, session.as_deref(), EntryKind::DryRun, summary, detail);
            self.pretend(name, change);
            return;
        }
        let Some(cluster) = self.cluster.clone() else {
            return;
        };
        tracing::info!(node = name, session, "{summary}");
        self.note(
            name,
            session.as_deref(),
            EntryKind::Decision,
            summary,
            detail,
        );
        let call = cluster::patch::describe(view, &change);
        let text = format!("{} {}", call.verb, call.path);
        self.note(
            name,
            session.as_deref(),
            EntryKind::Call,
            text,
            json!({"patch": call.patch}),
        );
        let entry = self.entry(name);
        entry.in_flight = true;
        // Whoever let it go has counted it.
        entry.taking_out = intent == Intent::Quarantine;
        let first_seen = desired.events.iter().map(|one| one.first_seen).min();
        let (node, view) = (name.to_owned(), Arc::clone(view));
        self.applying.spawn(async move {
            let began = std::time::Instant::now();
            let result = cluster.apply(&view, &change).await;
            Applied {
                node,
                session,
                intent,
                change,
                took: began.elapsed(),
                first_seen,
                result,
            }
        });
    }

    /// Takes in what else was answered by now.
    pub(super) fn answers(&mut self) {
        for _ in 1..ROUND {
            let Some(done) = self.applying.try_join_next() else {
                return;
            };
            self.applied(done);
        }
    }

    /// Takes the answer to a patch in.
    pub(super) fn applied(&mut self, done: Result<Applied, JoinError>) {
        let Applied {
            node,
            session,
            intent,
            change,
            took,
            first_seen,
            result,
        } = match done {
            Ok(applied) => applied,
            Err(error) => {
                // A bug. Which node it was is not known: all are looked at again.
                tracing::error!(err = %error, "a patch ended without an answer");
                self.metrics.error("patch_panicked");
                let until = (self.clock)() + DOUBT;
                for entry in self.nodes.values_mut() {
                    if entry.taking_out {
                        entry.in_doubt = Some(until);
                    }
                    (entry.in_flight, entry.taking_out) = (false, false);
                }
                self.brake.doubt(Some(until));
                self.touch_all();
                return;
            }
        };
        let now = (self.clock)();
        let took_ms = took.as_secs_f64() * 1_000.0;
        let entry = self.entry(&node);
        let counted = entry.counted(now);
        entry.in_flight = false;
        // It may have been made all the same; anything else is a clear answer.
        let unknown = result.as_ref().is_err_and(ApiError::is_in_doubt);
        let in_doubt = (entry.taking_out && unknown).then(|| now + DOUBT);
        entry.in_doubt = in_doubt;
        self.brake.doubt(in_doubt);
        let (text, detail) = match result {
            Ok(view) => {
                self.metrics.applied(&node, intent, &change);
                if let Some(first_seen) = first_seen.filter(|_| intent == Intent::Quarantine) {
                    self.metrics.taken_out(now.duration_since(first_seen));
                }
                self.entry(&node).patched_at = Some(Instant::now());
                self.see(Arc::new(view));
                (
                    format!("200 OK in {took_ms:.1} ms"),
                    json!({"status": 200, "tookMs": took_ms}),
                )
            }
            Err(error) => {
                let failure = match &error {
                    ApiError::Conflict { .. } => Failure::Conflict,
                    ApiError::Throttled { retry_after } => Failure::Error {
                        retry_after: retry_after
                            .and_then(|wait| SignedDuration::try_from(wait).ok()),
                    },
                    _ => Failure::Error { retry_after: None },
                };
                if failure != Failure::Conflict {
                    tracing::warn!(node, err = %chain(&error), "{} failed; it is tried again", intent.name());
                    self.metrics.error(error_type(intent, &change));
                }
                let entry = self.entry(&node);
                if matches!(error, ApiError::NotFound { .. }) {
                    entry.gone();
                }
                entry.session.failed(failure, now);
                self.session_changed(&node);
                (
                    format!("failed in {took_ms:.1} ms: {}", chain(&error)),
                    json!({"status": error.status(), "tookMs": took_ms}),
                )
            }
        };
        let entry = self.entry(&node);
        entry.taking_out = false;
        if entry.counted(now) != counted {
            self.brake.changed();
        }
        self.note(&node, session.as_deref(), EntryKind::Answer, text, detail);
        self.remember_wake(&node);
        self.touch(&node);
    }

    /// In a dry run: goes on as if the change had been made.
    fn pretend(&mut self, name: &str, change: NodeChange) {
        let entry = self.entry(name);
        entry.pretended = std::mem::take(&mut entry.pretended).then(change);
        let back = entry.effective_view().is_some_and(|pretended| {
            entry.view.as_deref().is_some_and(|real| {
                pretended.annotations == real.annotations && pretended.labels == real.labels
            })
        });
        if back || entry.session.phase == Phase::Idle {
            entry.pretended = NodeChange::default();
        }
        entry.read_own();
        self.brake.changed();
        self.dirty.insert(name.to_owned());
    }
}

/// What NVSentinel calls a failure of this.
fn error_type(intent: Intent, change: &NodeChange) -> &'static str {
    match intent {
        Intent::Quarantine | Intent::Update => "taint_and_cordon_error",
        Intent::Release => "untaint_and_uncordon_error",
        Intent::StandDown if change.annotations.contains_key(keys::UNTAINTED_MANUALLY) => {
            "manual_untaint_cleanup_error"
        }
        Intent::StandDown => "manual_uncordon_cleanup_error",
    }
}
