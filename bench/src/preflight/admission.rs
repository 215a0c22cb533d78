//! Admission requests sent straight to the webhook over HTTPS at a fixed rate, and readiness
//! probes of the same server as a baseline.
//!
//! Each request has a scheduled time, independent of earlier responses, and its latency counts
//! from then.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use cli::bench::{Figure, Usage, median, percentile, progress};
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use super::{NAME, PODS, Webhook, make_group, member};

/// Admission requests per second, and for how long.
const PACE: u32 = 1_000;
const TIME: Duration = Duration::from_secs(60);
/// Connections that share them, as an API server under load opens.
const CONNECTIONS: u32 = 50;
/// Probes per second, and their connections.
const PROBES: u32 = 100;
const PROBE_CONNECTIONS: u32 = 5;
/// Gangs of the pods in the requests.
const GANGS: u32 = 16;
const SECRET: &str = "gpuwarden-webhook-tls";
const BASELINE: &str = "GET /readyz";

/// Share of the rate that one connection sends.
#[derive(Clone)]
struct Share {
    requests: Arc<Vec<Bytes>>,
    /// Interval between two requests of this connection.
    every: Duration,
    /// Time of its first request, from the start.
    after: Duration,
    count: u32,
}

pub(super) async fn run(webhook: &Webhook, client: &Client) -> anyhow::Result<Vec<Figure>> {
    for gang in 0..GANGS {
        make_group(client, &format!("asked-{gang}"), 8).await?;
    }
    let tls = trusting(client).await?;
    let before = Usage::read(webhook.pid)?.rss;
    let seconds = TIME.as_secs();
    progress(&format!("{PACE} questions per second for {seconds} s ..."));
    let questions: Vec<Bytes> = (0..GANGS).map(question).collect();
    let asking = spread(webhook.port, &tls, PACE, CONNECTIONS, questions);
    let probing = spread(webhook.port, &tls, PROBES, PROBE_CONNECTIONS, Vec::new());
    let (asked, probed) = tokio::try_join!(asking, probing)?;
    let usage = Usage::read(webhook.pid)?;
    let figure = |kind: &str, of: &dyn Fn(&[f64]) -> f64| {
        let figure = Figure::new(format!("preflight.admission-{kind}"), of(&asked), "ms");
        figure.beside(BASELINE, of(&probed))
    };
    let note = format!(
        "{} questions, {PACE} per second over {CONNECTIONS} connections, {PROBES} probes beside them",
        asked.len()
    );
    Ok(vec![
        figure("p50", &median).note(note),
        figure("p99", &|values| percentile(values, 99)),
        Figure::new("preflight.memory", usage.rss, "MiB").note(format!(
            "RSS after the questions, {:.1} MiB its own, {before:.1} MiB before them, {:.1} MiB at most",
            usage.own, usage.peak
        )),
    ])
}

/// Returns an admission request for a new pod of a gang.
fn question(number: u32) -> Bytes {
    let gang = format!("asked-{}", number % GANGS);
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": format!("00000000-0000-4000-8000-{number:012}"),
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "requestResource": {"group": "", "version": "v1", "resource": "pods"},
            "name": format!("{gang}-0"),
            "namespace": PODS,
            "operation": "CREATE",
            "userInfo": {"username": "bench", "groups": ["system:authenticated"]},
            "object": member(&gang, &format!("{gang}-0")),
            "oldObject": null,
            "dryRun": false,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    });
    review.to_string().into()
}

/// Returns TLS that trusts the webhook's authority.
async fn trusting(client: &Client) -> anyhow::Result<TlsConnector> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAME);
    let secret = secrets.get(SECRET).await?;
    let data = secret.data.unwrap_or_default();
    let authorities = data.get("ca.crt").context("the Secret has no authority")?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&authorities.0) {
        roots.add(certificate?)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config).into())
}

/// Sends requests at a fixed rate over `connections` connections; without admission requests,
/// probes for readiness. Returns the latency of each response, in ms.
async fn spread(
    port: u16,
    tls: &TlsConnector,
    pace: u32,
    connections: u32,
    questions: Vec<Bytes>,
) -> anyhow::Result<Vec<f64>> {
    let requests = Arc::new(questions);
    let mut senders = Vec::new();
    for _ in 0..connections {
        senders.push(connect(port, tls).await?);
    }
    let every = Duration::from_secs(1) * connections / pace;
    let each = pace / connections * u32::try_from(TIME.as_secs()).unwrap_or(u32::MAX);
    let began = Instant::now();
    let mut asking = JoinSet::new();
    for (number, sender) in (0_u32..).zip(senders) {
        let share = Share {
            requests: Arc::clone(&requests),
            every,
            after: every * number / connections,
            count: each,
        };
        asking.spawn(ask(sender, share, began));
    }
    let mut took = Vec::new();
    while let Some(of_one) = asking.join_next().await {
        took.extend(of_one??);
    }
    Ok(took)
}

async fn connect(port: u16, tls: &TlsConnector) -> anyhow::Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.set_nodelay(true)?;
    let stream = tls
        .connect(ServerName::try_from("127.0.0.1")?, stream)
        .await?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn ask(
    mut sender: SendRequest<Full<Bytes>>,
    share: Share,
    began: Instant,
) -> anyhow::Result<Vec<f64>> {
    let mut took = Vec::new();
    for turn in 0..share.count {
        let due = began + share.after + share.every * turn;
        tokio::time::sleep_until(due).await;
        let requests = &share.requests;
        let number = usize::try_from(turn)?;
        let body = requests.get(number % requests.len().max(1)).cloned();
        let (method, path) = match &body {
            Some(_) => ("POST", "/mutate"),
            None => ("GET", "/readyz"),
        };
        let is_question = body.is_some();
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "127.0.0.1")
            .header("content-type", "application/json")
            .body(Full::new(body.unwrap_or_default()))?;
        sender.ready().await?;
        let answer = sender.send_request(request).await?;
        let status = answer.status();
        let answer = answer.into_body().collect().await?.to_bytes();
        took.push(due.elapsed().as_secs_f64() * 1_000.0);
        ensure!(status.is_success(), "{path} is answered by {status}");
        // The response for a pod of a gang holds a patch.
        if is_question && !answer.windows(9).any(|part| part == b"JSONPatch") {
            bail!("no checks: {}", String::from_utf8_lossy(&answer));
        }
    }
    Ok(took)
}
