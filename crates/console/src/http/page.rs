//! Static files of the page, which uses only the JSON API, and the plain text that processes
//! without events serve instead.

use std::sync::Arc;

use axum::extract::State;

use super::App;

/// Static file of the page.
#[derive(Clone, Copy)]
pub(super) struct File {
    pub(super) path: &'static str,
    pub(super) content_type: &'static str,
    pub(super) content: &'static str,
}

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

pub(super) const FILES: [File; 6] = [
    File {
        path: "/",
        content_type: "text/html; charset=utf-8",
        content: include_str!("../page/index.html"),
    },
    File {
        path: "/style.css",
        content_type: "text/css; charset=utf-8",
        content: include_str!("../page/style.css"),
    },
    File {
        path: "/page.js",
        content_type: JAVASCRIPT,
        content: include_str!("../page/page.js"),
    },
    File {
        path: "/view.js",
        content_type: JAVASCRIPT,
        content: include_str!("../page/view.js"),
    },
    File {
        path: "/dom.js",
        content_type: JAVASCRIPT,
        content: include_str!("../page/dom.js"),
    },
    File {
        path: "/icon.svg",
        content_type: "image/svg+xml",
        content: include_str!("../page/icon.svg"),
    },
];

/// Returns the text that an agent or a standby controller serves instead of the page.
pub(super) async fn text(State(app): State<Arc<App>>) -> String {
    let node = &app.console.process.node_name;
    let head = match (&app.console.agent, app.stands_by()) {
        (Some(agent), _) => format!(
            "gpuwarden agent on {node}, for the controller at {}",
            agent.controller
        ),
        (None, standby) => format!(
            "gpuwarden controller on {node}\n{}",
            standby.unwrap_or_default()
        ),
    };
    format!("{head}\n\n/api/v1/status\n/metrics\n/healthz\n/readyz\n")
}
