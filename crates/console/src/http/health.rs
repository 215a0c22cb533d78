//! Health of the process, for probes and for the status page.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use runtime::http_server;

use super::App;
use crate::api::LeadershipView;

/// Answers 200 while the process is alive and the thread of its disk answers, even with an
/// error: a restart frees a hung thread, but not a full disk.
pub(super) async fn healthz(State(app): State<Arc<App>>) -> Response {
    let (controller, agent) = (&app.console.controller, &app.console.agent);
    let mut silent = None;
    if let Some(controller) = controller
        && !controller.is_alive().await
    {
        silent = Some("the event store's writer");
    }
    if let Some(agent) = agent
        && !agent.is_alive().await
    {
        silent = Some("the outbox");
    }
    http_server::liveness(silent)
}

/// Answers 200, or 503 with one reason per line.
pub(super) async fn readyz(State(app): State<Arc<App>>) -> Response {
    http_server::readiness(&app.not_ready().await)
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    http_server::metrics(&app.console.metrics).await
}

// === impl App ===

impl App {
    /// Returns the reasons why the process does not observe and do everything it should; empty
    /// if it does.
    pub(super) async fn not_ready(&self) -> Vec<String> {
        let console = &self.console;
        let mut reasons = console.sources.not_seen();
        reasons.extend(console.places.borrow().iter().cloned());
        if let Some(controller) = &console.controller {
            reasons.extend(controller.not_ready(console.process.mode).await);
        }
        if let Some(agent) = &console.agent {
            reasons.extend(agent.not_ready());
        }
        reasons.extend(self.stands_by());
        reasons
    }

    /// Returns which leader a standby process waits behind, or why there is no leader. A
    /// standby is not ready, so that a Service routes agents to the leader.
    pub(super) fn stands_by(&self) -> Option<String> {
        let console = &self.console;
        if console.controller.is_some() || console.agent.is_some() {
            return None;
        }
        let leadership = console.leadership.as_ref()?;
        Some(standby(&leadership()))
    }
}

fn standby(leadership: &LeadershipView) -> String {
    let LeadershipView {
        lease,
        leader,
        error,
        ..
    } = leadership;
    match (error, leader.as_str()) {
        (Some(error), _) => format!(
            "standby: the Lease {lease} cannot be asked for: {error} (the namespace has to exist, \
             and we need to get, create and patch leases.coordination.k8s.io in it)"
        ),
        (None, "") => "standby: nobody leads yet".to_owned(),
        (None, leader) => format!("standby: {leader} leads"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stands_by_says_for_whom_or_why() {
        let view = |leader: &str, error: Option<&str>| LeadershipView {
            lease: "g/c".into(),
            identity: "me".into(),
            leader: leader.into(),
            leads: false,
            error: error.map(str::to_owned),
        };
        let table = [
            (view("other", None), "standby: other leads"),
            (view("", None), "standby: nobody leads yet"),
            (
                view("other", Some("refused: no")),
                "standby: the Lease g/c cannot be asked for: refused: no (",
            ),
        ];
        for (view, expected) in table {
            let text = standby(&view);
            assert!(text.starts_with(expected), "{text}");
        }
    }
}
