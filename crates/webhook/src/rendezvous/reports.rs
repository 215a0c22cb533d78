//! What checks report that cannot reach the connector of their node, as Pod Security forbids its socket there.
//!
//! The API server says whose a token is, and where that pod runs: a pod speaks for its own node, and weighs as
//! a user of that machine. What it says goes through a connector, as on a node, and straight on to the
//! controller; the check keeps it until that has it.

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

/// Largest report (bytes). A diagnosis of 16 GPUs of which each fails each test is less.
const MAX_REPORT: usize = 512 * 1024;

/// Longest time for a report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the routes of reports, which the rendezvous lets in.
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
    answer(take_events(&rendezvous, peer, request).await)
}

async fn count(
    State(rendezvous): State<Rendezvous>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Response {
    answer(take_count(&rendezvous, peer, request).await)
}

fn answer(taken: Result<(), Response>) -> Response {
    match taken {
        Ok(()) => StatusCode::OK.into_response(),
        Err(refused) => refused,
    }
}

fn refusal((status, what): Refusal) -> Response {
    (status, format!("{what}\n")).into_response()
}

async fn take_events(
    rendezvous: &Rendezvous,
    peer: Peer,
    request: Request,
) -> Result<(), Response> {
    // Who it is goes before what it says: of strangers nothing is read.
    let reporter = reporter(rendezvous, request.headers()).await;
    let (connector, caller, node) = reporter.map_err(refusal)?;
    let told: HealthEvents = read(rendezvous, peer, request).await?;
    let events = told.events.into_iter().map(|mut event| {
        event.node_name.clone_from(&node);
        event
    });
    let events = HealthEvents {
        version: EVENT_VERSION,
        events: events.collect(),
    };
    let taken = match connector.accept(events, &caller).await {
        Ok(_) => Ok(()),
        Err(error @ AcceptError::TooFast { .. }) => {
            Err((StatusCode::TOO_MANY_REQUESTS, chain(&error)))
        }
        Err(error) if error.is_retryable() => Err((StatusCode::SERVICE_UNAVAILABLE, chain(&error))),
        Err(error) => Err((StatusCode::UNPROCESSABLE_ENTITY, chain(&error))),
    };
    taken.map_err(refusal)
}

async fn take_count(rendezvous: &Rendezvous, peer: Peer, request: Request) -> Result<(), Response> {
    let reporter = reporter(rendezvous, request.headers()).await;
    let (connector, caller, node) = reporter.map_err(refusal)?;
    let told = ReportCheckRequest {
        node,
        ..read(rendezvous, peer, request).await?
    };
    let taken = match connector.count_check(&told, &caller) {
        Ok(()) => Ok(()),
        Err(error @ Uncounted::ForeignNode(_)) => Err((StatusCode::FORBIDDEN, error.to_string())),
        Err(error @ Uncounted::Invalid(_)) => {
            Err((StatusCode::UNPROCESSABLE_ENTITY, error.to_string()))
        }
    };
    taken.map_err(refusal)
}

/// Reads what somebody reports.
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

/// Returns where a report goes, who reports, and for which node.
async fn reporter<'a>(
    rendezvous: &'a Rendezvous,
    headers: &HeaderMap,
) -> Result<(&'a Connector, Caller, String), Refusal> {
    let Some((connector, config)) = rendezvous.reports() else {
        let what = "this webhook has no way to a controller; start it with --controller";
        return Err((StatusCode::NOT_FOUND, what.to_owned()));
    };
    let (asker, _) = rendezvous.asker(headers).await?;
    let name = format!("{}/{}", asker.namespace, asker.name);
    let pod = rendezvous.object(&asker).await?;
    let node = node(&pod, config).map_err(|what| (StatusCode::FORBIDDEN, what.to_owned()))?;
    let caller = Caller::Pod {
        node: node.clone(),
        name,
    };
    Ok((connector, caller, node))
}

/// Returns the node of a pod that may report.
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
            // Of a body that never comes nothing is waited for.
            let body = axum::body::Body::from_stream(futures::stream::pending::<
                Result<Vec<u8>, axum::Error>,
            >());
            let mut request = Request::new(body);
            *request.headers_mut() = headers.clone();
            let peer = Peer::of([127, 0, 0, 1].into());
            let taken = take_events(rendezvous, peer, request).await;
            taken.expect_err("no report").status()
        };
        // Nobody would bring it on.
        let status = refused(&rendezvous, &headers).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        let channel = tcp_grpc::channel("http://127.0.0.1:1", None).expect("an address");
        let direct = Direct::new(channel, token_header(None));
        let nodes = AcceptNodes::Own(String::new());
        let connector = Connector::new(direct, nodes, &Metrics::default(), Timestamp::now);
        let rendezvous = rendezvous.with_reports(connector, Arc::new(config));
        let status = refused(&rendezvous, &headers).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
        // Nobody says whose it is: the check tries again.
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
