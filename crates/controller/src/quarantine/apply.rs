//! Carrying out what a session decided: one patch, and its answer.

use std::sync::Arc;
use std::time::Duration;

use cluster::ApplyError;
use domain::assess::Desired;
use domain::journal::EntryKind;
use domain::node::{NodeChange, NodeView};
use domain::session::{Failure, Intent, Patch, Phase};
use jiff::SignedDuration;
use runtime::logging::chain;
use serde_json::json;
use tokio::task::JoinError;

use super::{Mode, Quarantine};

/// A patch that was answered.
pub(super) struct Applied {
    node: String,
    session: Option<String>,
    intent: Intent,
    change: NodeChange,
    took: Duration,
    result: Result<NodeView, ApplyError>,
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
        self.entry(name).in_flight = true;
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
                result,
            }
        });
    }

    /// Takes the answer to a patch in.
    pub(super) fn applied(&mut self, done: Result<Applied, JoinError>) {
        let Applied {
            node,
            session,
            intent,
            change,
            took,
            result,
        } = match done {
            Ok(applied) => applied,
            Err(error) => {
                // A bug. Which node it was is not known: all are looked at again.
                tracing::error!(err = %error, "a patch ended without an answer");
                self.metrics.error("patch_panicked");
                for entry in self.nodes.values_mut() {
                    entry.in_flight = false;
                }
                self.dirty.extend(self.nodes.keys().cloned());
                return;
            }
        };
        let now = (self.clock)();
        let took_ms = took.as_secs_f64() * 1_000.0;
        self.entry(&node).in_flight = false;
        let (text, detail) = match result {
            Ok(view) => {
                self.metrics.applied(&node, intent, &change);
                self.entry(&node).see(Arc::new(view));
                (
                    format!("200 OK in {took_ms:.1} ms"),
                    json!({"status": 200, "tookMs": took_ms}),
                )
            }
            Err(error) => {
                let failure = match &error {
                    ApplyError::Conflict { .. } => Failure::Conflict,
                    ApplyError::Throttled { retry_after } => Failure::Error {
                        retry_after: retry_after
                            .and_then(|wait| SignedDuration::try_from(wait).ok()),
                    },
                    _ => Failure::Error { retry_after: None },
                };
                if failure != Failure::Conflict {
                    tracing::warn!(node, err = %chain(&error), "{} failed; it is tried again", intent.name());
                    self.metrics.error("taint_and_cordon_error");
                }
                let entry = self.entry(&node);
                if matches!(error, ApplyError::NotFound) {
                    entry.view = None;
                }
                entry.session.failed(failure, now);
                (
                    format!("failed in {took_ms:.1} ms: {}", chain(&error)),
                    json!({"status": error.status(), "tookMs": took_ms}),
                )
            }
        };
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
        self.dirty.insert(name.to_owned());
    }
}
