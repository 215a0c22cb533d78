//! The rendezvous: pods of a gang ask here for each other, and hear of it at once, where the kubelet brings
//! them a changed `ConfigMap` after a minute. It tells what the `ConfigMap` says, and the gang's secret, which
//! stands nowhere else, to pods that are of the gang by their own words. Checks that cannot report on their node report here, too.

mod reports;
mod rosters;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use cluster::{Cluster, Kind, TokenError, TokenOwner};
use connector::Connector;
use preflight::config::Config;
use preflight::gang::Gang;
use preflight::rendezvous::{AUDIENCE, Answer, Topology};
use preflight::roster::config_map_name;
use preflight::topology::Topologies;
use ring::hmac;
use runtime::http_server::{self, Bodies, Clients};
use runtime::logging::{Seldom, chain};
use runtime::tls::ServerTls;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::discoveries::Discoveries;
use crate::facts::Facts;
use crate::kept::Key;
use rosters::{Rosters, Told};

/// Longest wait that a pod may ask for. Its connection is kept so long.
const MAX_WAIT: Duration = Duration::from_secs(20);
/// Pods that may wait at a time, such as a gang of a thousand; others are answered at once, and ask again. Below what
/// the server keeps as connections, so that there is room to ask at all.
const MAX_WAITING: usize = 2048;
/// The clients of the rendezvous: a pod that waits has a connection.
const CLIENTS: Clients = Clients {
    connections: MAX_WAITING + 256,
    idle: Duration::from_secs(10),
};
/// Most bytes of reports that are read at a time: sixteen of the largest.
const MAX_READ_BYTES: usize = 8 * 1024 * 1024;
/// Tokens and pods that are asked about at a time: a gang of a thousand has a few seconds.
const MAX_REVIEWS: usize = 8;
/// Time for which a token that was good is believed: pods ask every few seconds.
const BELIEVED: Duration = Duration::from_secs(60);
/// Tokens that are remembered.
const MAX_TOKENS: usize = 8192;
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// The rendezvous. Cheap to clone.
#[derive(Clone)]
pub struct Rendezvous {
    cluster: Arc<Cluster>,
    key: Arc<hmac::Key>,
    rosters: Arc<Rosters>,
    waiting: Arc<Semaphore>,
    /// Tokens that are asked about at a time: anybody can send some, and pods that are created ask the
    /// same API server.
    reviews: Arc<Semaphore>,
    tokens: Arc<Mutex<Tokens>>,
    facts: Facts,
    discoveries: Discoveries,
    topologies: Arc<Topologies>,
    unread: Arc<Seldom>,
    /// Where reports of checks go, if they go anywhere.
    reports: Option<(Connector, Arc<Config>)>,
    /// The room for bodies of reports.
    bodies: Arc<Bodies>,
}

/// Tokens that were good, by their digests.
type Tokens = BTreeMap<Vec<u8>, Known>;

/// A token that was good.
struct Known {
    /// The time at which it was good.
    at: Instant,
    pod: Pod,
    /// Name of the `ConfigMap` of the gang that the pod says it is of, empty for none; `None` until somebody asked.
    gang: Option<String>,
}

/// Why a request is not answered.
type Refusal = (StatusCode, String);

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
    pub fn new(
        cluster: Arc<Cluster>,
        key: &str,
        facts: Facts,
        discoveries: Discoveries,
        topologies: Topologies,
    ) -> Self {
        Self {
            rosters: Arc::new(Rosters::new(Arc::clone(&cluster))),
            cluster,
            key: Arc::new(hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes())),
            waiting: Arc::new(Semaphore::new(MAX_WAITING)),
            reviews: Arc::new(Semaphore::new(MAX_REVIEWS)),
            tokens: Arc::default(),
            facts,
            discoveries,
            topologies: Arc::new(topologies),
            unread: Arc::default(),
            reports: None,
            bodies: Bodies::new(MAX_READ_BYTES),
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
        let routes = self.routes();
        let serving =
            http_server::serve_clients(CLIENTS, listener, Some(tls), routes, cancel.clone());
        tokio::join!(serving, self.rosters.follow(cancel));
    }

    fn routes(&self) -> Router {
        Router::new()
            .route("/gangs/{namespace}/{name}", get(gang))
            .merge(reports::routes())
            .with_state(self.clone())
    }

    /// Waits until the gang is whole, has started or cannot be tested, or until it is time to answer; returns it as it
    /// is then.
    async fn wait(&self, key: &Key, pod: &str, wait: Duration) -> Option<Arc<Told>> {
        let mut changes = self.rosters.changes(key);
        let turn = self.waiting.try_acquire();
        let until = Instant::now() + wait;
        loop {
            let told = self.rosters.told(key).await;
            let is_settled = told
                .as_ref()
                .is_some_and(|told| told.has(pod) && told.is_settled());
            if is_settled || turn.is_err() {
                return told;
            }
            let changed = tokio::time::timeout_at(until, changes.next());
            if changed.await.is_err() {
                return told;
            }
        }
    }

    /// Returns the secret of a gang: not of what stands in the `ConfigMap`, which others may write.
    fn secret(&self, key: &Key) -> String {
        let secret = hmac::sign(&self.key, format!("{}/{}", key.0, key.1).as_bytes());
        BASE64_STANDARD.encode(secret.as_ref())
    }

    /// Returns whether a pod says of itself that it is of a gang, by the name of its `ConfigMap`. Who may write that
    /// may write any names into it.
    async fn is_of(&self, pod: &Pod, digest: &[u8], map: &str) -> Result<bool, Refusal> {
        let known = {
            let tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            tokens.get(digest).and_then(|known| known.gang.clone())
        };
        if let Some(gang) = known {
            return Ok(gang == map);
        }
        let object = self.object(pod).await?;
        let by = self.discoveries.of(&pod.namespace);
        let gang = Gang::of(&object, &pod.namespace, &by).ok().flatten();
        let gang = gang.map_or_else(String::new, |gang| config_map_name(&gang.id()));
        let is_of = gang == map;
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        // How gangs are known may be listed yet.
        if let Some(known) = tokens.get_mut(digest)
            && self.discoveries.are_known()
        {
            known.gang = Some(gang);
        }
        Ok(is_of)
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

    /// Returns the pod whose token a request has, and the token's digest. The error is the answer where it has none that is good.
    async fn asker(&self, headers: &HeaderMap) -> Result<(Pod, Vec<u8>), Refusal> {
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok());
        let Some(token) = token.and_then(|value| value.strip_prefix("Bearer ")) else {
            let what = "a token of the pod's ServiceAccount is needed";
            return Err((StatusCode::UNAUTHORIZED, what.to_owned()));
        };
        let digest = ring::digest::digest(&ring::digest::SHA256, token.trim().as_bytes());
        let digest = digest.as_ref().to_vec();
        match self.pod(token.trim(), &digest).await {
            Ok(pod) => Ok((pod, digest)),
            Err(TokenError::Invalid { why }) => Err((StatusCode::UNAUTHORIZED, why)),
            Err(TokenError::Api(error)) => Err((StatusCode::SERVICE_UNAVAILABLE, chain(&error))),
        }
    }

    /// Returns a pod as the API server has it now.
    async fn object(&self, pod: &Pod) -> Result<Value, Refusal> {
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
    async fn pod(&self, token: &str, digest: &[u8]) -> Result<Pod, TokenError> {
        {
            let tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = tokens.get(digest).filter(|known| known.is_believed()) {
                return Ok(known.pod.clone());
            }
        }
        let turn = self.reviews.acquire().await;
        let owner = self.cluster.review_token(token, AUDIENCE).await?;
        drop(turn);
        let pod = Pod::of(owner).ok_or_else(|| TokenError::Invalid {
            why: "it was not made for a pod".to_owned(),
        })?;
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if tokens.len() >= MAX_TOKENS {
            tokens.retain(|_, known| known.is_believed());
        }
        if tokens.len() < MAX_TOKENS {
            let known = Known {
                at: Instant::now(),
                pod: pod.clone(),
                gang: None,
            };
            tokens.insert(digest.to_vec(), known);
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
    let told = tell(&rendezvous, (namespace, name), &waiting, &headers).await;
    told.unwrap_or_else(|(status, what)| (status, format!("{what}\n")).into_response())
}

async fn tell(
    rendezvous: &Rendezvous,
    key: Key,
    waiting: &Waiting,
    headers: &HeaderMap,
) -> Result<Response, Refusal> {
    let (pod, digest) = rendezvous.asker(headers).await?;
    if pod.namespace != key.0 {
        let what = "a pod is told of gangs of its own namespace only";
        return Err((StatusCode::FORBIDDEN, what.to_owned()));
    }
    if !rendezvous.is_of(&pod, &digest, &key.1).await? {
        let what = "a pod is told of its own gang only";
        return Err((StatusCode::FORBIDDEN, what.to_owned()));
    }
    let wait = Duration::from_secs(waiting.wait).min(MAX_WAIT);
    let told = rendezvous.wait(&key, &pod.name, wait).await;
    let Some(told) = told else {
        return Ok(axum::Json(Answer::default()).into_response());
    };
    // Who is not of the gang learns nothing else of it.
    if !told.has(&pod.name) {
        let answer = Answer {
            full: told.is_complete(),
            ..Answer::default()
        };
        return Ok(axum::Json(answer).into_response());
    }
    let mut end = Ending {
        full: false,
        topology: None,
        secret: None,
    };
    if told.is_complete() {
        end.secret = Some(rendezvous.secret(&key));
        end.topology = rendezvous.topology(&pod).await;
    }
    let end = serde_json::to_string(&end).unwrap_or_default();
    let end = Bytes::from(end.replacen('{', ",", 1));
    let length = HeaderValue::from(told.data.len() + end.len());
    let parts = [told.data.clone(), end].map(Ok::<_, std::convert::Infallible>);
    let body = Body::from_stream(futures::stream::iter(parts));
    let json = HeaderValue::from_static("application/json");
    Ok(([(CONTENT_TYPE, json), (CONTENT_LENGTH, length)], body).into_response())
}

/// The fields of an [`Answer`] behind the data.
#[derive(Serialize)]
struct Ending {
    full: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    topology: Option<Topology>,
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<String>,
}

// === impl Known ===

impl Known {
    fn is_believed(&self) -> bool {
        self.at.elapsed() < BELIEVED
    }
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

#[cfg(test)]
mod tests;
