//! Port of a provider under attack: garbage, floods and foreign tokens. The test provides the
//! API server that reviews tokens.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use cluster::{Cluster, ConnectOptions};
use contract::janitor_provider as wire;
use contract::janitor_provider::csp_provider_service_client::CspProviderServiceClient;
use gpuwarden_janitor::server::{self, AUDIENCE, Callers};
use gpuwarden_janitor::{Provider, Signal};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use maintenance::janitor::{FoundOperation, ProviderFailure};
use serde_json::{Value, json};
use testkit::Log;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// Account that may send signals.
const ALLOWED: &str = "system:serviceaccount:gpuwarden:janitor";
/// Duration of a token review.
const REVIEW: Duration = Duration::from_millis(20);
const SOON: Duration = Duration::from_secs(30);

/// Provider that counts its signals.
#[derive(Default)]
struct Counts(AtomicUsize);

#[async_trait]
impl Provider for Counts {
    fn name(&self) -> &'static str {
        "counts"
    }

    async fn send(&self, _: &Signal) -> Result<String, ProviderFailure> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok("request-1".to_owned())
    }

    async fn find(&self, _: &Signal) -> Result<FoundOperation, ProviderFailure> {
        Ok(FoundOperation::NotSent)
    }

    async fn is_ready(&self, _: &Signal, _: &str) -> Result<bool, ProviderFailure> {
        Ok(true)
    }
}

/// API server that counts token reviews: running, most at a time, and in total.
#[derive(Default)]
struct Reviews {
    now: AtomicUsize,
    most: AtomicUsize,
    all: AtomicUsize,
}

impl Reviews {
    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Infallible> {
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(now, Ordering::Relaxed);
        self.all.fetch_add(1, Ordering::Relaxed);
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let asked: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(asked["spec"]["audiences"], json!([AUDIENCE]));
        tokio::time::sleep(REVIEW).await;
        let user = match asked["spec"]["token"].as_str() {
            Some("ours") => Some(ALLOWED),
            Some("theirs") => Some("system:serviceaccount:web:default"),
            _ => None,
        };
        let status = match user {
            Some(user) => json!({"authenticated": true, "audiences": [AUDIENCE],
                "user": {"username": user}}),
            None => json!({"authenticated": false, "error": "it is not known"}),
        };
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "metadata": {}, "spec": asked["spec"], "status": status});
        self.now.fetch_sub(1, Ordering::Relaxed);
        Ok(Response::new(Full::new(review.to_string().into())))
    }

    async fn listen(self: Arc<Self>) -> anyhow::Result<Cluster> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let server = format!("http://{}", listener.local_addr()?);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let this = Arc::clone(&self);
                let service = service_fn(move |request| Arc::clone(&this).answer(request));
                let http = hyper::server::conn::http1::Builder::new();
                tokio::spawn(http.serve_connection(TokioIo::new(stream), service));
            }
        });
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": server}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
        });
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("kubeconfig");
        std::fs::write(&path, kubeconfig.to_string())?;
        let options = ConnectOptions {
            kubeconfig: Some(path),
            ..ConnectOptions::default()
        };
        Ok(Cluster::connect(options).await?)
    }
}

/// Port of a provider.
struct Port {
    address: SocketAddr,
    reviews: Arc<Reviews>,
    provider: Arc<Counts>,
    _end: DropGuard,
}

impl Port {
    async fn open() -> anyhow::Result<Self> {
        let (reviews, provider) = (Arc::<Reviews>::default(), Arc::<Counts>::default());
        let cluster = Arc::new(Arc::clone(&reviews).listen().await?);
        let allowed = BTreeSet::from([ALLOWED.to_owned()]);
        let callers = Callers::by_token(cluster, AUDIENCE.to_owned(), allowed);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let end = CancellationToken::new();
        let served = Arc::clone(&provider) as Arc<dyn Provider>;
        tokio::spawn(server::serve(listener, None, served, callers, end.clone()));
        Ok(Self {
            address,
            reviews,
            provider,
            _end: end.drop_guard(),
        })
    }

    async fn client(&self) -> anyhow::Result<CspProviderServiceClient<Channel>> {
        let endpoint = Endpoint::try_from(format!("http://{}", self.address))?;
        Ok(CspProviderServiceClient::new(endpoint.connect().await?))
    }

    /// Requests a reboot, with a token if given.
    async fn reboot(
        &self,
        token: Option<&str>,
        node: String,
    ) -> anyhow::Result<Result<(), Status>> {
        let mut request = tonic::Request::new(wire::SendRebootSignalRequest {
            node_name: node,
            operation_id: "op".to_owned(),
        });
        if let Some(token) = token {
            let value = format!("Bearer {token}").parse()?;
            request.metadata_mut().insert("authorization", value);
        }
        let answer = self.client().await?.send_reboot_signal(request).await;
        Ok(answer.map(drop))
    }

    fn sent(&self) -> usize {
        self.provider.0.load(Ordering::Relaxed)
    }
}

#[tokio::test]
async fn a_flood_of_tokens_becomes_none_at_the_api_server_and_fills_no_log() -> anyhow::Result<()> {
    let log = Log::begin();
    let port = Port::open().await?;
    let flood = (0..200).map(|number| {
        let token = if number % 2 == 0 {
            "theirs".to_owned()
        } else {
            format!("made-up-{number}")
        };
        let port = &port;
        async move { port.reboot(Some(&token), "n1".to_owned()).await }
    });
    let ours = port.reboot(Some("ours"), "n1".to_owned());
    let (answers, ours) = tokio::join!(futures::future::join_all(flood), ours);
    for answer in answers {
        let code = answer?.unwrap_err().code();
        assert!(
            matches!(code, Code::PermissionDenied | Code::Unauthenticated),
            "{code:?}"
        );
    }
    ours?.unwrap();
    assert_eq!(port.sent(), 1);
    assert!(port.reviews.most.load(Ordering::Relaxed) <= 4);
    // A verified token is not reviewed again.
    let asked = port.reviews.all.load(Ordering::Relaxed);
    port.reboot(Some("ours"), "n1".to_owned()).await?.unwrap();
    assert_eq!(port.reviews.all.load(Ordering::Relaxed), asked);
    let lines = log.lines_with("a caller was turned away");
    assert!((1..10).contains(&lines.len()), "{lines:?}");
    Ok(())
}

#[tokio::test]
async fn rubbish_and_what_is_too_large_send_nothing_and_hold_up_nobody() -> anyhow::Result<()> {
    let log = Log::begin();
    let port = Port::open().await?;
    let mut held = Vec::new();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for rubbish in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        &[0; 4096],
        &[0xff; 4096],
        &preface[..],
        &preface[..10],
        b"",
    ] {
        for _ in 0..50 {
            let mut stream = TcpStream::connect(port.address).await?;
            // The server may close the connection at once.
            drop(stream.write_all(rubbish).await);
            held.push(stream);
        }
    }
    for (token, node, wanted) in [
        (None, "n1".to_owned(), Code::Unauthenticated),
        (Some(""), "n1".to_owned(), Code::Unauthenticated),
        (Some("ours"), String::new(), Code::InvalidArgument),
        (Some("ours"), "n".repeat(10_000), Code::InvalidArgument),
        // Refused before authentication.
        (None, "n".repeat(1_000_000), Code::OutOfRange),
    ] {
        let refused = port.reboot(token, node.clone()).await?.unwrap_err();
        assert_eq!(refused.code(), wanted, "{} bytes: {refused}", node.len());
    }
    for _ in 0..50 {
        let refused = port.reboot(Some("ours"), String::new()).await?;
        refused.unwrap_err();
    }
    assert_eq!(port.sent(), 0);
    let ours = port.reboot(Some("ours"), "n1".to_owned());
    tokio::time::timeout(SOON, ours).await??.unwrap();
    assert_eq!(port.sent(), 1);
    let lines = log.lines_with(" failed: ");
    assert!((1..10).contains(&lines.len()), "{lines:?}");
    drop(held);
    Ok(())
}
