//! Reports of checks that cannot reach the connector of their node because Pod Security forbids
//! its socket.
//!
//! The API server identifies the pod of a token and its node, so a pod reports for its own node
//! only, with the rights of an ordinary user of that machine. Reports pass through a connector,
//! as on a node, and are forwarded to the controller at once. The check retries until the
//! controller has accepted them.

use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use connector::{AcceptError, Caller, Connector, Uncounted};
use contract::preflight::ReportCheckRequest;
use contract::{EVENT_VERSION, HealthEvents};
use preflight::config::Config;
use preflight::inject::has_checks;
use preflight::rendezvous::{COUNTS_PATH, EVENTS_PATH};
use prost::Message;
use runtime::http_server::Peer;
use runtime::logging::chain;
use serde_json::Value;

use super::{Refusal, Rendezvous};

/// Largest report in bytes. A diagnosis of 16 GPUs with every test failed is smaller.
const MAX_REPORT: usize = 512 * 1024;

/// Timeout for the body of a report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the routes for reports.
pub(super) fn routes() -> Router<Rendezvous> {
    Router::new()
        .route(EVENTS_PATH, post(events))
        .route(COUNTS_PATH, post(count))
}

async fn events(
    State(rendezvous): State<Rendezvous>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Response {
    answer(accept_events(&rendezvous, peer, request).await)
}

async fn count(
    State(rendezvous): State<Rendezvous>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Response {
    answer(accept_count(&rendezvous, peer, request).await)
}

fn answer(accepted: Result<(), Response>) -> Response {
    match accepted {
        Ok(()) => StatusCode::OK.into_response(),
        Err(refused) => refused,
    }
}

fn refusal((status, what): Refusal) -> Response {
    (status, format!("{what}\n")).into_response()
}

async fn accept_events(
    rendezvous: &Rendezvous,
    peer: Peer,
    request: Request,
) -> Result<(), Response> {
    // Authenticate first: nothing is read from strangers.
    let reporter = reporter(rendezvous, request.headers()).await;
    let (connector, caller, node) = reporter.map_err(refusal)?;
    let report: HealthEvents = read(rendezvous, peer, request).await?;
    let events = report.events.into_iter().map(|mut event| {
        event.node_name.clone_from(&node);
        event
    });
    let events = HealthEvents {
        version: EVENT_VERSION,
        events: events.collect(),
    };
    let accepted = match connector.accept(events, &caller).await {
        Ok(_) => Ok(()),
        Err(error @ AcceptError::TooFast { .. }) => {
            Err((StatusCode::TOO_MANY_REQUESTS, chain(&error)))
        }
        Err(error) if error.is_retryable() => Err((StatusCode::SERVICE_UNAVAILABLE, chain(&error))),
        Err(error) => Err((StatusCode::UNPROCESSABLE_ENTITY, chain(&error))),
    };
    accepted.map_err(refusal)
}

async fn accept_count(
    rendezvous: &Rendezvous,
    peer: Peer,
    request: Request,
) -> Result<(), Response> {
    let reporter = reporter(rendezvous, request.headers()).await;
    let (connector, caller, node) = reporter.map_err(refusal)?;
    let report = ReportCheckRequest {
        node,
        ..read(rendezvous, peer, request).await?
    };
    let accepted = match connector.count_check(&report, &caller) {
        Ok(()) => Ok(()),
        Err(error @ Uncounted::ForeignNode(_)) => Err((StatusCode::FORBIDDEN, error.to_string())),
        Err(error @ Uncounted::Invalid(_)) => {
            Err((StatusCode::UNPROCESSABLE_ENTITY, error.to_string()))
        }
    };
    accepted.map_err(refusal)
}

/// Decodes the body of a report.
async fn read<T: Message + Default>(
    rendezvous: &Rendezvous,
    peer: Peer,
    request: Request,
) -> Result<T, Response> {
    let body = request.into_body();
    let reading = rendezvous
        .bodies
        .read(peer, body, MAX_REPORT, REPORT_TIMEOUT);
    let body = reading.await.map_err(IntoResponse::into_response)?;
    T::decode(&*body).map_err(|error| refusal((StatusCode::BAD_REQUEST, error.to_string())))
}

/// Returns the connector for reports, the caller and the caller's node.
async fn reporter<'a>(
    rendezvous: &'a Rendezvous,
    headers: &HeaderMap,
) -> Result<(&'a Connector, Caller, String), Refusal> {
    let Some((connector, config)) = rendezvous.reports() else {
        let what = "this webhook has no way to a controller; start it with --controller";
        return Err((StatusCode::NOT_FOUND, what.to_owned()));
    };
    let (pod_of_token, _) = rendezvous.authenticate(headers).await?;
    let name = format!("{}/{}", pod_of_token.namespace, pod_of_token.name);
    let pod = rendezvous.object(&pod_of_token).await?;
    let node = node(&pod, config).map_err(|what| (StatusCode::FORBIDDEN, what.to_owned()))?;
    let caller = Caller::Pod {
        node: node.clone(),
        name,
    };
    Ok((connector, caller, node))
}

/// Returns the node of a pod, if the pod may report.
fn node(pod: &Value, config: &Config) -> Result<String, &'static str> {
    if !has_checks(pod, config) {
        return Err("only pods with preflight checks report here");
    }
    let node = pod.pointer("/spec/nodeName").and_then(Value::as_str);
    node.map(str::to_owned)
        .ok_or("the pod is on no node, so it has tested none")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::http::{HeaderValue, header};
    use connector::{AcceptNodes, Direct, token_header};
    use jiff::Timestamp;
    use runtime::metrics::Metrics;
    use runtime::tcp_grpc;
    use serde_json::json;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::discoveries::Discoveries;
    use crate::facts::Facts;

    #[tokio::test]
    async fn a_report_is_taken_from_nobody_whom_the_api_server_does_not_name() {
        let cluster = crate::server::tests::away().await;
        let config = Config::parse("image: i", "test").expect("a configuration");
        let over = CancellationToken::new();
        let (facts, _following) = Facts::new(Arc::clone(&cluster), over.clone());
        let by = Discoveries::new(config.discovery.clone());
        let topologies = config.topologies.clone();
        let rendezvous = Rendezvous::new(cluster, "key", facts, by, topologies);
        let mut headers = HeaderMap::new();
        let refused = async |rendezvous: &Rendezvous, headers: &HeaderMap| {
            // The body never arrives: the refusal must not wait for it.
            let body = axum::body::Body::from_stream(futures::stream::pending::<
                Result<Vec<u8>, axum::Error>,
            >());
            let mut request = Request::new(body);
            *request.headers_mut() = headers.clone();
            let peer = Peer::of([127, 0, 0, 1].into());
            let accepted = accept_events(rendezvous, peer, request).await;
            accepted.expect_err("no report").status()
        };
        // Without a connector, reports are not accepted.
        let status = refused(&rendezvous, &headers).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        let channel = tcp_grpc::channel("http://127.0.0.1:1", None).expect("an address");
        let direct = Direct::new(channel, token_header(None));
        let nodes = AcceptNodes::Own(String::new());
        let connector = Connector::new(direct, nodes, &Metrics::default(), Timestamp::now);
        let rendezvous = rendezvous.with_reports(connector, Arc::new(config));
        let status = refused(&rendezvous, &headers).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
        // The API server cannot verify the token, so the check has to retry.
        let token = HeaderValue::from_static("Bearer abc");
        headers.insert(header::AUTHORIZATION, token);
        let status = refused(&rendezvous, &headers).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    }

    #[test]
    fn a_pod_with_checks_speaks_for_the_node_that_the_api_server_names() {
        let config = Config::parse("image: i", "test").expect("a configuration");
        let pod = |check: &str, node: Option<&str>| json!({"spec": {"nodeName": node, "initContainers": [{"name": check}]}});
        let check = "preflight-dcgm-diag";
        assert_eq!(node(&pod(check, Some("n")), &config), Ok("n".to_owned()));
        for (pod, part) in [
            (pod("mine", Some("n")), "preflight checks"),
            (pod(check, None), "no node"),
        ] {
            let error = node(&pod, &config).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
    }
}
