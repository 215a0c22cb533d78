//! Carries out the effects of decisions.

use std::sync::Arc;

use cluster::Reason;
use fleet::{Effect, Level};
use model::journal::JournalEntry;

use super::Quarantine;
use super::requests::{Client, RequestAnswer, device_rule, event, node, pod, resource, store};

// === impl Quarantine ===

impl Quarantine {
    /// Carries out an effect, or starts a request for it.
    pub(super) fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::PatchNode(planned) => {
                if self.client.is_some() {
                    self.put_entry(node::call(&planned, (self.clock)()));
                    let why = planned.patch.intent.name();
                    let why = Reason::of_node(&planned.node, planned.session.as_deref(), why);
                    self.request(why, |client| node::patch(client, *planned));
                }
            }
            Effect::ChangeRule(planned) => {
                if let Some(api) = self.watches.device_api() {
                    let session = planned.session.as_deref();
                    let why = Reason::of_node(&planned.node, session, "taint of a device");
                    self.request(why, |client| device_rule::change(client, api, *planned));
                }
            }
            Effect::WatchPods { node, watch } => {
                if let Some(failed) = self.watches.watch_pods(node, watch) {
                    self.apply(failed);
                }
            }
            Effect::RemovePod(planned) => {
                let why = Reason::of_node(&planned.node, planned.session.as_deref(), "drain");
                self.request(why, |client| pod::remove(client, *planned));
            }
            Effect::RequestCheckpoint(planned) => {
                let session = planned.session.as_deref();
                let why = Reason::of_node(&planned.node, session, "checkpoint before the drain");
                self.request(why, |client| pod::request_checkpoint(client, *planned));
            }
            Effect::EmitEvent {
                node,
                since,
                reason,
                message,
            } => {
                if self.events {
                    let why = Reason::of_node(&node, None, "Event of a node");
                    self.request(why, |client| {
                        event::emit(client, node, since, reason, message)
                    });
                }
            }
            Effect::CreateResource(planned) => {
                let (session, action) = (planned.session.as_deref(), planned.action.as_str());
                let why = Reason::of_node(&planned.node, session, action);
                self.request(why, |client| resource::create(client, *planned));
            }
            Effect::WatchResource {
                node,
                kind,
                name,
                watch,
            } => {
                if let Some(failed) = self.watches.watch_resource(node, &kind, name, watch) {
                    self.apply(failed);
                }
            }
            Effect::DeleteResource {
                node,
                attempt,
                begun,
            } => {
                let why = Reason::of_node(&node, None, "withdrawal of a resource");
                self.request(why, |client| {
                    resource::delete(client, node, *attempt, begun)
                });
            }
            Effect::Remediation(news) => self.remediation_metrics.record(news),
            Effect::LookUp { node, ids } => {
                let (store, metrics) = (Arc::clone(&self.store), self.metrics.clone());
                (self.requests).start(store::look_up(store, metrics, node, ids));
            }
            Effect::Append {
                node,
                events,
                purpose,
            } => {
                let (store, metrics) = (Arc::clone(&self.store), self.metrics.clone());
                (self.requests).start(store::append(store, metrics, node, events, purpose));
            }
            Effect::Journal(entry, level) => {
                if let Some(level) = level {
                    log_entry(&entry, level);
                }
                self.put_entry(entry);
            }
            Effect::Status(status) => {
                self.drain_metrics.ended(&status);
                if self.statuses.try_send(status).is_err() {
                    tracing::error!(
                        "the store is too slow for the statuses of events: a status is dropped"
                    );
                    self.metrics.error("update_quarantine_status_error");
                }
            }
            Effect::Log { level, node, text } => match level {
                Level::Info => tracing::info!(node, "{text}"),
                Level::Warn => tracing::warn!(node, "{text}"),
            },
            Effect::Evaluated(outcomes) => self.metrics.evaluated(&outcomes),
            Effect::Decided(node) => self.feed.decided(&node),
            Effect::UpdateConditions(node) => self.update_conditions(&node),
            Effect::Restored(node) => {
                if let Some(board) = &self.board {
                    board.restored(&node);
                }
            }
            Effect::Trip => self.trip(),
        }
    }

    /// Starts a request to the API server, with the reason for the audit log. Without a cluster the fleet plans no such effect.
    fn request<F>(&mut self, why: Reason, request: impl FnOnce(Client) -> F)
    where
        F: Future<Output = RequestAnswer> + Send + 'static,
    {
        if let Some(client) = &self.client {
            self.requests.start(why.scope(request(client.clone())));
        }
    }

    /// Posts the faults and the state of a node to the task that writes conditions.
    fn update_conditions(&self, name: &str) {
        let Some(board) = &self.board else {
            return;
        };
        match self.fleet.view(name) {
            Some(view) => {
                let book = self.fleet.book();
                let (faults, checks) = (book.faults(name), book.reported_checks(name));
                board.post(faults, checks, view, (self.clock)());
            }
            None => board.gone(name),
        }
    }
}

/// Logs a journal entry.
fn log_entry(entry: &JournalEntry, level: Level) {
    let (node, session, kind) = (&entry.node, &entry.session, entry.kind.name());
    match level {
        Level::Info => tracing::info!(node, session, kind, "{}", entry.text),
        Level::Warn => tracing::warn!(node, session, kind, "{}", entry.text),
    }
}
