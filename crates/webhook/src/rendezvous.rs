//! The rendezvous: pods of a gang ask here for each other, and hear of it at once, where the kubelet brings
//! them a changed `ConfigMap` after a minute. It tells what the `ConfigMap` says, and the gang's secret, which
//! stands nowhere else. Checks that cannot report on their node report here, too.

mod reports;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cluster::{Cluster, Kind, Signal, TokenError, TokenOwner};
use connector::Connector;
use preflight::config::Config;
use preflight::rendezvous::{AUDIENCE, Answer, Topology};
use preflight::roster::{MANAGED_BY, MANAGED_BY_LABEL, PREFIX, Roster, STARTED, UNTESTABLE};
use preflight::topology::Topologies;
use ring::hmac;
use runtime::http_server;
use runtime::logging::{Seldom, chain};
use runtime::tls::ServerTls;
use serde::Deserialize;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::facts::Facts;

/// Longest wait that a pod may ask for. Its connection is kept so long.
const MAX_WAIT: Duration = Duration::from_secs(20);
/// Pods that may wait at a time; others are answered at once, and ask again. Below what the server keeps
/// as connections, so that there is room to ask at all.
const MAX_WAITING: usize = 200;
/// Tokens that are asked about at a time.
const MAX_REVIEWS: usize = 4;
/// Time for which a token that was good is believed: pods ask every few seconds.
const BELIEVED: Duration = Duration::from_secs(60);
/// Tokens that are remembered.
const MAX_TOKENS: usize = 8192;
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// A gang, by the namespace and name of its `ConfigMap`.
type Key = (String, String);

/// The rendezvous. Cheap to clone.
#[derive(Clone)]
pub struct Rendezvous {
    cluster: Arc<Cluster>,
    key: Arc<hmac::Key>,
    rosters: Arc<Mutex<BTreeMap<Key, Roster>>>,
    /// Changes with each change of the rosters.
    changed: watch::Sender<u64>,
    waiting: Arc<Semaphore>,
    /// Tokens that are asked about at a time: anybody can send some, and pods that are created ask the
    /// same API server.
    reviews: Arc<Semaphore>,
    tokens: Arc<Mutex<Tokens>>,
    facts: Facts,
    topologies: Arc<Topologies>,
    unread: Arc<Seldom>,
    /// Where reports of checks go, if they go anywhere.
    reports: Option<(Connector, Arc<Config>)>,
}

/// When a token was good, and whose it is, by its digest.
type Tokens = BTreeMap<Vec<u8>, (Instant, Pod)>;

/// A pod that asks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pod {
    namespace: String,
    name: String,
    node: Option<String>,
}

#[derive(Deserialize)]
struct Waiting {
    /// Seconds.
    #[serde(default)]
    wait: u64,
}

// === impl Rendezvous ===

impl Rendezvous {
    /// Returns a rendezvous whose gangs get secrets under a key.
    pub fn new(cluster: Arc<Cluster>, key: &str, facts: Facts, topologies: Topologies) -> Self {
        Self {
            cluster,
            key: Arc::new(hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes())),
            rosters: Arc::default(),
            changed: watch::Sender::default(),
            waiting: Arc::new(Semaphore::new(MAX_WAITING)),
            reviews: Arc::new(Semaphore::new(MAX_REVIEWS)),
            tokens: Arc::default(),
            facts,
            topologies: Arc::new(topologies),
            unread: Arc::default(),
            reports: None,
        }
    }

    /// Takes reports of checks too, which the connector brings to the controller.
    #[must_use]
    pub fn with_reports(self, connector: Connector, config: Arc<Config>) -> Self {
        let reports = Some((connector, config));
        Self { reports, ..self }
    }

    /// Returns where reports of checks go, and which checks there are.
    fn reports(&self) -> Option<(&Connector, &Config)> {
        let (connector, config) = self.reports.as_ref()?;
        Some((connector, config))
    }

    /// Serves until `cancel`, and follows the `ConfigMap`s of gangs.
    pub async fn serve(
        self,
        listener: TcpListener,
        tls: Arc<ServerTls>,
        cancel: CancellationToken,
    ) {
        let routes = Router::new()
            .route("/gangs/{namespace}/{name}", get(gang))
            .merge(reports::routes())
            .with_state(self.clone());
        let serving = http_server::serve(listener, Some(tls), routes, cancel.clone());
        tokio::join!(serving, self.follow(cancel));
    }

    async fn follow(&self, cancel: CancellationToken) {
        let managed = format!("{MANAGED_BY_LABEL}={MANAGED_BY}");
        let kind = Kind::new("", "v1", "configmaps");
        let select = |all: cluster::Selection| all.with_labels(&managed);
        let mut signals = self
            .cluster
            .watch_objects(&kind, None, select, cancel.clone());
        // Those that a list has delivered; what it has not is gone.
        let mut listed: Option<BTreeMap<Key, Roster>> = None;
        let follow = async {
            while let Some(signal) = signals.recv().await {
                match signal {
                    Signal::Restarted => listed = Some(BTreeMap::new()),
                    Signal::Applied(map) => {
                        let Some((key, roster)) = roster_of(&map) else {
                            continue;
                        };
                        match &mut listed {
                            Some(listed) => drop(listed.insert(key, roster)),
                            None => self.change(|rosters| drop(rosters.insert(key, roster))),
                        }
                    }
                    Signal::Listed => {
                        let all = listed.take().unwrap_or_default();
                        self.change(|rosters| *rosters = all);
                    }
                    Signal::Deleted(full) => {
                        if let Some((namespace, name)) = full.split_once('/') {
                            let key = (namespace.to_owned(), name.to_owned());
                            self.change(|rosters| drop(rosters.remove(&key)));
                        }
                    }
                    Signal::Failing { .. } | Signal::Recovered => {}
                }
            }
        };
        cancel.run_until_cancelled(follow).await;
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<Key, Roster>)) {
        change(&mut self.rosters.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.send_modify(|version| *version += 1);
    }

    /// Returns what a pod is told of a gang now.
    fn tell(&self, key: &Key, pod: &str) -> Answer {
        let rosters = self.rosters.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(roster) = rosters.get(key) else {
            return Answer::default();
        };
        if roster.rank(pod).is_none() {
            // Who is not of the gang learns nothing else of it.
            return Answer {
                full: roster.is_complete(),
                ..Answer::default()
            };
        }
        // Not of what stands in the ConfigMap, which others may write.
        let secret = hmac::sign(&self.key, format!("{}/{}", key.0, key.1).as_bytes());
        Answer {
            data: roster.data(),
            full: false,
            topology: None,
            secret: Some(BASE64_STANDARD.encode(secret.as_ref())).filter(|_| roster.is_complete()),
        }
    }

    /// Waits until the gang is whole, has started or cannot be tested, or until it is time to answer.
    async fn wait(&self, key: &Key, pod: &str, wait: Duration) -> Answer {
        let mut changes = self.changed.subscribe();
        let Ok(_turn) = self.waiting.try_acquire() else {
            return self.tell(key, pod);
        };
        let until = Instant::now() + wait;
        loop {
            let answer = self.tell(key, pod);
            let changed = tokio::time::timeout_at(until, changes.changed());
            let is_over = |key| answer.data.contains_key(key);
            let is_settled = answer.secret.is_some() || is_over(STARTED) || is_over(UNTESTABLE);
            if is_settled || !matches!(changed.await, Ok(Ok(()))) {
                return answer;
            }
        }
    }

    /// Returns what is known of the topology file of the machine of a pod, which itself may not read its node.
    async fn topology(&self, pod: &Pod) -> Option<Topology> {
        let (by, label) = (&self.topologies, &self.topologies.label);
        let Some(node) = &pod.node else {
            return by.of(Err("the token does not say the node of its pod"));
        };
        match self.facts.label_of_node(node, label).await {
            Ok(Some(name)) => by.of(Ok(&name)),
            Ok(None) => by.of(Err(&format!("{node} has no label {label}"))),
            Err(why) => {
                if self.unread.now().is_some() {
                    tracing::warn!("the topology file of a machine is not known: {why}");
                }
                by.of(Err(&why))
            }
        }
    }

    /// Returns the pod whose token a request has. The error is the answer where it has none that is good.
    async fn asker(&self, headers: &HeaderMap) -> Result<Pod, (StatusCode, String)> {
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok());
        let Some(token) = token.and_then(|value| value.strip_prefix("Bearer ")) else {
            let what = "a token of the pod's ServiceAccount is needed";
            return Err((StatusCode::UNAUTHORIZED, what.to_owned()));
        };
        match self.pod(token.trim()).await {
            Ok(pod) => Ok(pod),
            Err(TokenError::Invalid { why }) => Err((StatusCode::UNAUTHORIZED, why)),
            Err(TokenError::Api(error)) => Err((StatusCode::SERVICE_UNAVAILABLE, chain(&error))),
        }
    }

    /// Returns a pod as the API server has it now.
    async fn object(&self, pod: &Pod) -> Result<Value, (StatusCode, String)> {
        let kind = Kind::new("", "v1", "pods");
        let _turn = self.reviews.acquire().await;
        let read = self.cluster.object(&kind, Some(&pod.namespace), &pod.name);
        match read.await {
            Ok(Some(pod)) => Ok(pod),
            Ok(None) => Err((StatusCode::FORBIDDEN, "the pod is gone".to_owned())),
            Err(error) => Err((StatusCode::SERVICE_UNAVAILABLE, chain(&error))),
        }
    }

    /// Returns the pod that a token was made for.
    async fn pod(&self, token: &str) -> Result<Pod, TokenError> {
        let digest = ring::digest::digest(&ring::digest::SHA256, token.as_bytes());
        let digest = digest.as_ref().to_vec();
        let known = {
            let tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            tokens.get(&digest).cloned()
        };
        if let Some((_, pod)) = known.filter(|(at, _)| at.elapsed() < BELIEVED) {
            return Ok(pod);
        }
        let turn = self.reviews.acquire().await;
        let owner = self.cluster.review_token(token, AUDIENCE).await?;
        drop(turn);
        let pod = Pod::of(owner).ok_or_else(|| TokenError::Invalid {
            why: "it was not made for a pod".to_owned(),
        })?;
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if tokens.len() >= MAX_TOKENS {
            tokens.retain(|_, (at, _)| at.elapsed() < BELIEVED);
        }
        if tokens.len() < MAX_TOKENS {
            tokens.insert(digest, (Instant::now(), pod.clone()));
        }
        Ok(pod)
    }
}

async fn gang(
    State(rendezvous): State<Rendezvous>,
    Path((namespace, name)): Path<(String, String)>,
    Query(waiting): Query<Waiting>,
    headers: HeaderMap,
) -> Response {
    let pod = match rendezvous.asker(&headers).await {
        Ok(pod) => pod,
        Err((status, what)) => return (status, format!("{what}\n")).into_response(),
    };
    if pod.namespace != namespace {
        let what = "a pod is told of gangs of its own namespace only\n";
        return (StatusCode::FORBIDDEN, what).into_response();
    }
    let wait = Duration::from_secs(waiting.wait).min(MAX_WAIT);
    let mut answer = rendezvous.wait(&(namespace, name), &pod.name, wait).await;
    if answer.secret.is_some() {
        answer.topology = rendezvous.topology(&pod).await;
    }
    axum::Json(answer).into_response()
}

// === impl Pod ===

impl Pod {
    fn of(owner: TokenOwner) -> Option<Self> {
        let account = owner.username.strip_prefix(SERVICE_ACCOUNT)?;
        let (namespace, _) = account.split_once(':')?;
        Some(Self {
            namespace: namespace.to_owned(),
            name: owner.pod_name?,
            node: owner.node_name,
        })
    }
}

/// Returns the gang of a `ConfigMap`, if it is one of a gang.
fn roster_of(map: &Value) -> Option<(Key, Roster)> {
    let text = |pointer: &str| map.pointer(pointer).and_then(Value::as_str);
    let name = text("/metadata/name").filter(|name| name.starts_with(PREFIX))?;
    let key = (text("/metadata/namespace")?.to_owned(), name.to_owned());
    let data = map.get("data")?;
    let roster = Roster::parse(|key| data.get(key)?.as_str().map(str::to_owned));
    Some((key, roster.ok()?))
}
