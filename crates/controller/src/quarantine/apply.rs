//! Carries out the effects of decisions: patches with their answers, and what is told.

use std::sync::Arc;
use std::time::Duration;

use cluster::ApiError;
use contract::keys;
use fleet::session::{Intent, Patch};
use fleet::{Effect, FleetInput, Level, PatchAnswer, Planned};
use jiff::SignedDuration;
use model::journal::{Entry, EntryKind};
use model::node::{NodeChange, NodeView};
use runtime::logging::chain;
use serde_json::{Value, json};

use super::{Answered, Quarantine};

/// A patch that was answered.
pub(super) struct Applied {
    planned: Planned,
    took: Duration,
    result: Result<NodeView, ApiError>,
}

impl Quarantine {
    /// Does what was decided, or starts it.
    pub(super) fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::PatchNode(planned) => self.apply(*planned),
            Effect::ChangeRule(planned) => self.change_rule(*planned),
            Effect::WatchPods { node, watch } => self.watch_pods(node, watch),
            Effect::RemovePod(planned) => self.remove_pod(*planned),
            Effect::RequestCheckpoint(planned) => self.ask_for_checkpoint(*planned),
            Effect::EmitEvent {
                node,
                since,
                reason,
                message,
            } => self.emit_event(&node, since, reason, message),
            Effect::CreateResource(planned) => self.make_resource(*planned),
            Effect::WatchResource {
                node,
                kind,
                name,
                watch,
            } => self.watch_resource(node, &kind, name, watch),
            Effect::DeleteResource {
                node,
                attempt,
                begun,
            } => self.withdraw_resource(node, *attempt, begun),
            Effect::Remediation(news) => self.remediation_metrics.took_in(news),
            Effect::LookUp { node, ids } => self.look_up(node, ids),
            Effect::Append {
                node,
                events,
                purpose,
            } => self.append(node, events, purpose),
            Effect::Note(entry, level) => {
                if let Some(level) = level {
                    log_entry(&entry, level);
                }
                self.put_entry(entry);
            }
            Effect::Status(status) => {
                self.drain_metrics.told(&status);
                self.write_status(status);
            }
            Effect::Log { level, node, text } => match level {
                Level::Info => tracing::info!(node, "{text}"),
                Level::Warn => tracing::warn!(node, "{text}"),
            },
            Effect::Evaluated(outcomes) => self.metrics.evaluated(&outcomes),
            Effect::Decided(node) => {
                if let Some((since, events)) = self.undecided.remove(&node) {
                    self.metrics.handled(events, since.elapsed());
                }
            }
            Effect::UpdateConditions(node) => self.post_on_board(&node),
            Effect::Restored(node) => {
                if let Some(board) = &self.board {
                    board.restored(&node);
                }
            }
            Effect::Trip => self.trip(),
        }
    }

    /// Posts on the board what is known of a node.
    fn post_on_board(&self, name: &str) {
        let Some(board) = &self.board else {
            return;
        };
        match self.fleet.view(name) {
            Some(view) => {
                let book = self.fleet.book();
                let (faults, heard) = (book.faults(name), book.heard(name));
                board.post(faults, heard, view, (self.clock)());
            }
            None => board.gone(name),
        }
    }

    /// Starts a patch.
    fn apply(&mut self, planned: Planned) {
        let Some(cluster) = self.cluster.clone() else {
            return; // Without one nothing is planned.
        };
        let call = cluster::patch::describe(&planned.view, &planned.patch.change);
        let text = format!("{} {}", call.verb, call.path);
        let detail = json!({"patch": call.patch});
        self.note(&planned, EntryKind::Call, text, detail);
        self.requests.spawn(async move {
            let began = std::time::Instant::now();
            let result = cluster.apply(&planned.view, &planned.patch.change).await;
            Answered::Patch(Box::new(Applied {
                planned,
                took: began.elapsed(),
                result,
            }))
        });
    }

    /// Takes the answer to a patch.
    pub(super) fn patched(&mut self, applied: Applied) {
        let Applied {
            planned,
            took,
            result,
        } = applied;
        let took_ms = took.as_secs_f64() * 1_000.0;
        let (node, Patch { intent, change }) = (planned.node.clone(), &planned.patch);
        let (answer, text, status) = match result {
            Ok(view) => {
                if change.dropped(&view).is_empty() {
                    self.metrics.applied(&node, *intent, change);
                    let first_seen = planned.first_seen;
                    if let Some(first_seen) = first_seen.filter(|_| *intent == Intent::Quarantine) {
                        let now = (self.clock)();
                        self.metrics.taken_out(now.duration_since(first_seen));
                    }
                } else {
                    self.metrics.error(error_type(*intent, change));
                }
                let text = format!("200 OK in {took_ms:.1} ms");
                (PatchAnswer::Made(Arc::new(view)), text, json!(200))
            }
            Err(error) => {
                let text = format!("failed in {took_ms:.1} ms: {}", chain(&error));
                let status = json!(error.status());
                let answer = answer(&error);
                if !matches!(answer, PatchAnswer::Conflict) {
                    let what = intent.name();
                    tracing::warn!(node, err = %chain(&error), "{what} failed; it is tried again");
                    self.metrics.error(error_type(*intent, change));
                }
                (answer, text, status)
            }
        };
        let detail = json!({"status": status, "tookMs": took_ms});
        self.note(&planned, EntryKind::Answer, text, detail);
        self.take(FleetInput::NodePatched { node, answer });
    }

    /// Notes a call or its answer for the story of a node. Does not wait for the disk.
    fn note(&mut self, planned: &Planned, kind: EntryKind, text: String, detail: Value) {
        self.put_entry(Entry {
            at: (self.clock)(),
            node: planned.node.clone(),
            session: planned.session.clone(),
            kind,
            text,
            detail,
        });
    }
}

/// Returns the answer that a failure is: whether the patch was made.
fn answer(error: &ApiError) -> PatchAnswer {
    match error {
        ApiError::Conflict { .. } => PatchAnswer::Conflict,
        ApiError::NotFound { .. } => PatchAnswer::NotFound,
        // It may have been made all the same; anything else is a clear answer.
        error if error.is_in_doubt() => PatchAnswer::Unknown,
        ApiError::Throttled { retry_after } => PatchAnswer::Refused {
            retry_after: retry_after.and_then(|wait| SignedDuration::try_from(wait).ok()),
        },
        _ => PatchAnswer::Refused { retry_after: None },
    }
}

/// Logs what is noted for the story of a node.
fn log_entry(entry: &Entry, level: Level) {
    let (node, session, kind) = (&entry.node, &entry.session, entry.kind.name());
    match level {
        Level::Info => tracing::info!(node, session, kind, "{}", entry.text),
        Level::Warn => tracing::warn!(node, session, kind, "{}", entry.text),
    }
}

/// Returns NVSentinel's name of the failure.
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
