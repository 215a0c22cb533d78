use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

use async_trait::async_trait;
use cluster::{ApiError, TokenError, TokenOwner};
use connector::AcceptNodes;
use contract::node::ListFaultsRequest;
use contract::node::ReportPodsRequest;
use contract::node::node_service_client::NodeServiceClient;
use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{HealthEvent, HealthEvents};
use fleet::view::FleetView;
use jiff::Timestamp;
use runtime::metrics::Metrics;
use runtime::tls::{CertificateFiles, ClientCertificates, ClientTls};
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventQuery, EventStore};
use testkit::{Authority, Purpose};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Code, Request, Status};

use super::*;
use crate::pods::PodDevices;

/// Reviewer that knows some tokens and counts reviews. For `later` it does not answer.
#[derive(Default)]
struct Known {
    tokens: HashMap<&'static str, (&'static str, Option<&'static str>)>,
    asked: Mutex<Vec<String>>,
}

#[async_trait]
impl Reviewer for Known {
    async fn review(&self, token: &str, audience: &str) -> Result<TokenOwner, TokenError> {
        assert_eq!(audience, "gpuwarden");
        self.asked.lock().unwrap().push(token.to_owned());
        if token == "later" {
            return Err(ApiError::unavailable("not now").into());
        }
        if token.starts_with("e30.") {
            return Ok(TokenOwner {
                username: "system:serviceaccount:g:agent".into(),
                node_name: Some("n1".into()),
                pod_name: None,
            });
        }
        let why = "not known".to_owned();
        let (username, node) = self.tokens.get(token).ok_or(TokenError::Invalid { why })?;
        Ok(TokenOwner {
            username: (*username).to_owned(),
            node_name: node.map(str::to_owned),
            pod_name: None,
        })
    }
}

fn rules() -> TokenRules {
    TokenRules {
        audience: "gpuwarden".into(),
        agents: vec!["g/agent".parse().unwrap()],
        central: vec!["g/cloud".parse().unwrap()],
    }
}

fn known() -> Arc<Known> {
    let account = |name| match name {
        "agent" => "system:serviceaccount:g:agent",
        "cloud" => "system:serviceaccount:g:cloud",
        _ => "system:serviceaccount:tenant:agent",
    };
    let tokens = HashMap::from([
        ("of-n1", (account("agent"), Some("n1"))),
        ("of-nowhere", (account("agent"), None)),
        ("of-cloud", (account("cloud"), Some("n9"))),
        ("of-tenant", (account("tenant"), Some("n1"))),
        ("of-admin", ("kubernetes-admin", None)),
    ]);
    Arc::new(Known {
        tokens,
        ..Known::default()
    })
}

/// Creates the service for agents of a cluster without faults.
fn agents() -> Agents {
    let fleet = FleetView {
        ready: true,
        ..FleetView::default()
    };
    Agents {
        pods: PodDevices::new(None),
        maintenance: None,
        fleet: watch::channel(Arc::new(fleet)).1,
        store_id: "s".to_owned(),
    }
}

struct Port {
    dir: tempfile::TempDir,
    store: Arc<SqliteStore>,
    url: String,
    cancel: CancellationToken,
}

impl Port {
    async fn new(identify: Identify) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new("ours").unwrap();
        std::fs::write(dir.path().join("ca.crt"), authority.pem()).unwrap();
        let sign = |purpose, name: &str, names: &[&str], file: &str| {
            let signed = authority.sign(purpose, name, names).unwrap();
            signed.write(dir.path(), file).unwrap();
        };
        sign(Purpose::Server, "controller", &["127.0.0.1"], "server");
        sign(Purpose::Client, "system:node:n1", &[], "n1");
        sign(Purpose::Client, "somebody", &[], "somebody");
        let clients = ClientCertificates::Optional(dir.path().join("ca.crt"));
        let tls = ServerTls::load(pair(dir.path(), "server"), clients).unwrap();
        let store = Arc::new(SqliteStore::open(&dir.path().join("data")).unwrap());
        let events: Arc<dyn EventStore> = Arc::clone(&store) as Arc<dyn EventStore>;
        let nodes = AcceptNodes::Any;
        let connector = Connector::new(events, nodes, &Metrics::default(), Timestamp::now);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let cancel = CancellationToken::new();
        let serving = serve(
            listener,
            Some(Arc::new(tls)),
            identify,
            connector,
            agents(),
            cancel.clone(),
        );
        tokio::spawn(serving);
        Self {
            dir,
            store,
            url,
            cancel,
        }
    }

    /// Reports an event of `node` with a certificate, a token, or both.
    async fn report(
        &self,
        certificate: Option<&str>,
        token: Option<&str>,
        node: &str,
    ) -> Result<(), Status> {
        let own = certificate.map(|name| pair(self.dir.path(), name));
        let tls = ClientTls::load(self.dir.path().join("ca.crt"), own).unwrap();
        let channel = tcp_grpc::channel(&self.url, Some(Arc::new(tls))).unwrap();
        let event = HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "c".into(),
            node_name: node.into(),
            ..HealthEvent::default()
        };
        let mut request = Request::new(HealthEvents {
            version: 1,
            events: vec![event],
        });
        if let Some(token) = token {
            let value = format!("Bearer {token}").parse().unwrap();
            request.metadata_mut().insert("authorization", value);
        }
        let mut client = PlatformConnectorClient::new(channel);
        client.health_event_occurred_v1(request).await.map(drop)
    }
}

fn pair(dir: &Path, name: &str) -> CertificateFiles {
    CertificateFiles {
        certificate: dir.join(format!("{name}.crt")),
        key: dir.join(format!("{name}.key")),
    }
}

#[tokio::test]
async fn who_calls_says_for_whom_they_speak() {
    let reviewer: Arc<dyn Reviewer> = known();
    let port = Port::new(Identify::new(Some((rules(), reviewer)))).await;
    let table = [
        // A node reports for itself, by certificate or token, and for no other node.
        (Some("n1"), None, "n1", None),
        (
            Some("n1"),
            None,
            "n2",
            Some((Code::PermissionDenied, "speaks for itself only")),
        ),
        (None, Some("of-n1"), "n1", None),
        (
            None,
            Some("of-n1"),
            "n2",
            Some((Code::PermissionDenied, "speaks for itself only")),
        ),
        (None, Some("of-cloud"), "n2", None),
        // Unknown callers are refused.
        (
            None,
            None,
            "n1",
            Some((Code::Unauthenticated, "neither a client certificate nor")),
        ),
        (
            Some("somebody"),
            None,
            "n1",
            Some((Code::Unauthenticated, "names no node")),
        ),
        (
            None,
            Some("wrong"),
            "n1",
            Some((Code::Unauthenticated, "not valid here")),
        ),
        (
            None,
            Some("of-tenant"),
            "n1",
            Some((Code::Unauthenticated, "tenant/agent may not")),
        ),
        (
            None,
            Some("of-admin"),
            "n1",
            Some((Code::Unauthenticated, "no ServiceAccount")),
        ),
        (
            None,
            Some("of-nowhere"),
            "n1",
            Some((Code::Unauthenticated, "names no node")),
        ),
        // A token has to be valid, even with a certificate.
        (
            Some("n1"),
            Some("wrong"),
            "n1",
            Some((Code::Unauthenticated, "not valid here")),
        ),
        (
            Some("n1"),
            Some("later"),
            "n1",
            Some((Code::Unavailable, "not now")),
        ),
    ];
    for (certificate, token, node, refusal) in table {
        let answer = port.report(certificate, token, node).await;
        let case = format!("{certificate:?} {token:?} {node}: {answer:?}");
        match refusal {
            None => assert!(answer.is_ok(), "{case}"),
            Some((code, text)) => {
                let status = answer.unwrap_err();
                assert_eq!(status.code(), code, "{case}");
                assert!(status.message().contains(text), "{case}");
            }
        }
    }
    let stored = port.store.events(EventQuery::default()).await.unwrap();
    let mut nodes: Vec<_> = stored.into_iter().map(|one| one.event.node_name).collect();
    nodes.sort();
    nodes.dedup();
    assert_eq!(nodes, ["n1", "n2"]);
    port.cancel.cancel();

    // Without a cluster, tokens are not accepted.
    let port = Port::new(Identify::new(None)).await;
    let status = port.report(None, Some("of-n1"), "n1").await.unwrap_err();
    assert!(
        status.message().contains("no cluster to review"),
        "{status}"
    );
    port.report(Some("n1"), None, "n1").await.unwrap();
}

#[tokio::test]
async fn what_an_agent_says_and_asks_beside_comes_in_by_the_same_identity() {
    let port = Port::new(Identify::new(None)).await;
    let ask = async |certificate: Option<&str>, node: &str| {
        let own = certificate.map(|name| pair(port.dir.path(), name));
        let tls = ClientTls::load(port.dir.path().join("ca.crt"), own).unwrap();
        let channel = tcp_grpc::channel(&port.url, Some(Arc::new(tls))).unwrap();
        let report = ReportPodsRequest {
            node_name: node.to_owned(),
            pods: Vec::new(),
        };
        let question = ListFaultsRequest {
            node_name: node.to_owned(),
        };
        let mut client = NodeServiceClient::new(channel);
        let taken = client.report_pods(report).await;
        let told = client.list_faults(question).await;
        assert_eq!(taken.is_ok(), told.is_ok(), "{told:?}");
        told.map_err(|status| status.code())
    };
    ask(Some("n1"), "n1").await.unwrap();
    let refused = ask(Some("n1"), "n2").await.unwrap_err();
    assert_eq!(refused, Code::PermissionDenied);
    let unknown = ask(None, "n1").await.unwrap_err();
    assert_eq!(unknown, Code::Unauthenticated);
}

#[tokio::test(start_paused = true)]
async fn answers_about_tokens_are_kept_for_a_while_and_are_bounded() {
    let reviewer = known();
    let shared: Arc<dyn Reviewer> = Arc::clone(&reviewer) as Arc<dyn Reviewer>;
    let identify = Identify::new(Some((rules(), shared)));
    let ask = |token: String| {
        let identify = identify.clone();
        async move {
            let value = format!("bearer {token}").parse().unwrap();
            identify.caller(None, Some(&value)).await
        }
    };
    let asked = || reviewer.asked.lock().unwrap().len();
    for _ in 0..3 {
        assert_eq!(
            ask("of-n1".into()).await.unwrap(),
            Caller::Node("n1".into())
        );
        ask("wrong".into()).await.unwrap_err();
    }
    assert_eq!(asked(), 2);
    // A refusal is cached for less time than an acceptance.
    tokio::time::advance(Duration::from_secs(11)).await;
    ask("wrong".into()).await.unwrap_err();
    ask("of-n1".into()).await.unwrap();
    assert_eq!(asked(), 3);
    tokio::time::advance(Duration::from_secs(120)).await;
    ask("of-n1".into()).await.unwrap();
    assert_eq!(asked(), 4);
    // A token with an end is cached until shortly before it.
    let now = Timestamp::now().as_second();
    for (claims, kept, over) in [
        (format!("{{\"exp\":{}}}", now + 200), 180, 30),
        (format!("{{\"exp\":{}}}", now + 86_400), 299, 302),
    ] {
        let before = asked();
        let bound = identity::tests::token(&claims);
        ask(bound.clone()).await.unwrap();
        tokio::time::advance(Duration::from_secs(kept)).await;
        ask(bound.clone()).await.unwrap();
        assert_eq!(asked(), before + 1, "{claims}");
        tokio::time::advance(Duration::from_secs(over)).await;
        ask(bound).await.unwrap();
        assert_eq!(asked(), before + 2, "{claims}");
    }
    ask("of-n1".into()).await.unwrap();
    let before = asked();
    // A missing answer is not cached.
    ask("later".into()).await.unwrap_err();
    ask("later".into()).await.unwrap_err();
    assert_eq!(asked(), before + 2);
    // Endless new tokens neither fill the memory nor replace valid ones.
    for index in 0..25_000 {
        ask(format!("wrong{index}")).await.unwrap_err();
    }
    let before = asked();
    let began = Instant::now();
    ask("of-n1".into()).await.unwrap();
    assert_eq!((asked(), began.elapsed()), (before, Duration::ZERO));
    let long = format!("x{}", "y".repeat(9_000));
    let status = ask(long).await.unwrap_err();
    assert_eq!((status.code(), asked()), (Code::Unauthenticated, before));
}

#[test]
fn a_service_account_has_a_namespace_and_a_name() {
    let account: ServiceAccount = "monitoring/cloud".parse().unwrap();
    assert_eq!(account.to_string(), "monitoring/cloud");
    for wrong in ["", "cloud", "/cloud", "monitoring/", "a/b/c"] {
        assert!(wrong.parse::<ServiceAccount>().is_err(), "{wrong}");
    }
}
