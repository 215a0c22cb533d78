//! Answers to probes and scrapers.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::metrics::Metrics;

/// Content type of metrics.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the answer to a liveness probe: 200, or 503 and the name of the part that does not
/// respond.
pub fn liveness(silent: Option<&str>) -> Response {
    match silent {
        None => "ok\n".into_response(),
        Some(who) => {
            let text = format!("{who} does not answer\n");
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
    }
}

/// Returns the answer to a readiness probe: 200, or 503 and the reasons, one per line.
pub fn readiness(reasons: &[String]) -> Response {
    if reasons.is_empty() {
        return "ready\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response()
}

/// Returns all metrics in the form that a scraper reads.
pub async fn metrics(metrics: &Metrics) -> Response {
    let text = metrics.encode_in_turn().await;
    ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response()
}
