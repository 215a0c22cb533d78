//! Rendezvous of gangs: an HTTPS server that pods of a gang ask for each other.
//!
//! The kubelet updates a mounted `ConfigMap` only after about a minute; the rendezvous answers
//! at once. Besides the contents of the `ConfigMap`, it hands out the gang's secret, which is
//! stored nowhere else, and only to pods whose own spec names the gang. Checks that cannot
//! report on their node report here as well.

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
use cluster::{Cluster, ObjectKind, TokenError, TokenOwner};
use connector::Connector;
use preflight::config::Config;
use preflight::gang::Gang;
use preflight::rendezvous::{AUDIENCE, RendezvousAnswer, Topology};
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
use crate::kept::ObjectKey;
use rosters::{Contents, Rosters};

/// Longest wait that a pod may ask for; its connection stays open meanwhile.
const MAX_WAIT: Duration = Duration::from_secs(20);
/// Most pods that wait at a time, such as a gang of a thousand. Others get an immediate answer
/// and ask again. Below the connection limit, so that there is room to ask at all.
const MAX_WAITING: usize = 2048;
/// Client limits of the rendezvous: each waiting pod needs a connection.
const CLIENTS: Clients = Clients {
    connections: MAX_WAITING + 256,
    idle: Duration::from_secs(10),
};
/// Most bytes of reports that are read at a time: sixteen of the largest.
const MAX_READ_BYTES: usize = 8 * 1024 * 1024;
/// Most concurrent lookups of tokens and pods. A gang of a thousand takes a few seconds.
const MAX_REVIEWS: usize = 8;
/// Time that a verified token is trusted without another lookup; pods ask every few seconds.
const TRUSTED: Duration = Duration::from_secs(60);
const MAX_TOKENS: usize = 8192;
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// Server of the rendezvous. Cheap to clone.
#[derive(Clone)]
pub struct Rendezvous {
    cluster: Arc<Cluster>,
    key: Arc<hmac::Key>,
    rosters: Arc<Rosters>,
    waiting: Arc<Semaphore>,
    /// Limits lookups of tokens: anybody can send tokens, and the same API server is needed to
    /// create pods.
    reviews: Arc<Semaphore>,
    tokens: Arc<Mutex<Tokens>>,
    facts: Facts,
    discoveries: Discoveries,
    topologies: Arc<Topologies>,
    unread: Arc<Seldom>,
    /// Connector for reports of checks and the configured checks, if reports are accepted.
    reports: Option<(Connector, Arc<Config>)>,
    /// Memory for bodies of reports.
    bodies: Arc<Bodies>,
}

/// Verified tokens, by digest.
type Tokens = BTreeMap<Vec<u8>, Verified>;

/// Token that the API server has verified.
struct Verified {
    /// Time of the verification.
    at: Instant,
    pod: RequestingPod,
    /// Name of the `ConfigMap` of the pod's gang, or empty for no gang; `None` until it was
    /// looked up.
    gang: Option<String>,
}

/// Status and text of an error response.
type Refusal = (StatusCode, String);

/// Pod that sent a request.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RequestingPod {
    namespace: String,
    name: String,
    node: Option<String>,
}

#[derive(Deserialize)]
struct Waiting {
    /// Time to wait for a settled gang, in seconds.
    #[serde(default)]
    wait: u64,
}

// === impl Rendezvous ===

impl Rendezvous {
    /// Creates a rendezvous. `key` is the HMAC key for the secrets of gangs.
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

    /// Also accepts reports of checks, and forwards them through the connector.
    #[must_use]
    pub fn with_reports(self, connector: Connector, config: Arc<Config>) -> Self {
        let reports = Some((connector, config));
        Self { reports, ..self }
    }

    /// Returns the connector for reports, and the configuration with the known checks.
    fn reports(&self) -> Option<(&Connector, &Config)> {
        let (connector, config) = self.reports.as_ref()?;
        Some((connector, config))
    }

    /// Serves until `cancel`, and watches the `ConfigMap`s of gangs.
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

    /// Waits until the gang is complete, has started or cannot be tested, but at most for
    /// `wait`. Returns the gang's contents at that moment.
    async fn wait(&self, key: &ObjectKey, pod: &str, wait: Duration) -> Option<Arc<Contents>> {
        let mut changes = self.rosters.changes(key);
        let turn = self.waiting.try_acquire();
        let until = Instant::now() + wait;
        loop {
            let contents = self.rosters.contents(key).await;
            let is_settled = contents
                .as_ref()
                .is_some_and(|contents| contents.has(pod) && contents.is_settled());
            if is_settled || turn.is_err() {
                return contents;
            }
            let changed = tokio::time::timeout_at(until, changes.next());
            if changed.await.is_err() {
                return contents;
            }
        }
    }

    /// Returns the secret of a gang. It must not depend on the `ConfigMap`, which others may
    /// write.
    fn secret(&self, key: &ObjectKey) -> String {
        let secret = hmac::sign(&self.key, format!("{}/{}", key.0, key.1).as_bytes());
        BASE64_STANDARD.encode(secret.as_ref())
    }

    /// Returns true if the pod's own spec belongs to the gang with this `ConfigMap`. The member
    /// list in the `ConfigMap` is no proof, since others may write it.
    async fn is_of(&self, pod: &RequestingPod, digest: &[u8], map: &str) -> Result<bool, Refusal> {
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
        // Before the `PreflightConfig`s are listed, the discovery may be wrong, so it is not
        // cached.
        if let Some(known) = tokens.get_mut(digest)
            && self.discoveries.are_known()
        {
            known.gang = Some(gang);
        }
        Ok(is_of)
    }

    /// Returns the topology file of a pod's machine. The pod itself has no permission to read
    /// its node.
    async fn topology(&self, pod: &RequestingPod) -> Option<Topology> {
        let (by, label) = (&self.topologies, &self.topologies.label);
        let Some(node) = &pod.node else {
            return by.of(Err("the token does not say the node of its pod"));
        };
        match self.facts.label_of_node(node, label).await {
            Ok(Some(name)) => by.of(Ok(&name)),
            Ok(None) => by.of(Err(&format!("{node} has no label {label}"))),
            Err(why) => {
                if self.unread.now().is_some() {
                    tracing::warn!("cannot determine the topology file of a machine: {why}");
                }
                by.of(Err(&why))
            }
        }
    }

    /// Authenticates a request: returns the pod of its token, and the token's digest. The error
    /// is the response.
    async fn authenticate(&self, headers: &HeaderMap) -> Result<(RequestingPod, Vec<u8>), Refusal> {
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

    /// Fetches a pod from the API server.
    async fn object(&self, pod: &RequestingPod) -> Result<Value, Refusal> {
        let kind = ObjectKind::new("", "v1", "pods");
        let _turn = self.reviews.acquire().await;
        let read = self.cluster.object(&kind, Some(&pod.namespace), &pod.name);
        match read.await {
            Ok(Some(pod)) => Ok(pod),
            Ok(None) => Err((StatusCode::FORBIDDEN, "the pod is gone".to_owned())),
            Err(error) => Err((StatusCode::SERVICE_UNAVAILABLE, chain(&error))),
        }
    }

    /// Returns the pod that a token was issued for.
    async fn pod(&self, token: &str, digest: &[u8]) -> Result<RequestingPod, TokenError> {
        {
            let tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = tokens.get(digest).filter(|known| known.is_fresh()) {
                return Ok(known.pod.clone());
            }
        }
        let turn = self.reviews.acquire().await;
        let owner = self.cluster.review_token(token, AUDIENCE).await?;
        drop(turn);
        let pod = RequestingPod::of(owner).ok_or_else(|| TokenError::Invalid {
            why: "it was not made for a pod".to_owned(),
        })?;
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if tokens.len() >= MAX_TOKENS {
            tokens.retain(|_, known| known.is_fresh());
        }
        if tokens.len() < MAX_TOKENS {
            let known = Verified {
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
    let response = answer(&rendezvous, (namespace, name), &waiting, &headers).await;
    response.unwrap_or_else(|(status, what)| (status, format!("{what}\n")).into_response())
}

async fn answer(
    rendezvous: &Rendezvous,
    key: ObjectKey,
    waiting: &Waiting,
    headers: &HeaderMap,
) -> Result<Response, Refusal> {
    let (pod, digest) = rendezvous.authenticate(headers).await?;
    if pod.namespace != key.0 {
        let what = "a pod may only ask for gangs of its own namespace";
        return Err((StatusCode::FORBIDDEN, what.to_owned()));
    }
    if !rendezvous.is_of(&pod, &digest, &key.1).await? {
        let what = "a pod may only ask for its own gang";
        return Err((StatusCode::FORBIDDEN, what.to_owned()));
    }
    let wait = Duration::from_secs(waiting.wait).min(MAX_WAIT);
    let contents = rendezvous.wait(&key, &pod.name, wait).await;
    let Some(contents) = contents else {
        return Ok(axum::Json(RendezvousAnswer::default()).into_response());
    };
    // A pod that is not a member learns only whether the gang is complete.
    if !contents.has(&pod.name) {
        let answer = RendezvousAnswer {
            full: contents.is_complete(),
            ..RendezvousAnswer::default()
        };
        return Ok(axum::Json(answer).into_response());
    }
    let mut end = Ending {
        full: false,
        topology: None,
        secret: None,
    };
    if contents.is_complete() {
        end.secret = Some(rendezvous.secret(&key));
        end.topology = rendezvous.topology(&pod).await;
    }
    let end = serde_json::to_string(&end).unwrap_or_default();
    let end = Bytes::from(end.replacen('{', ",", 1));
    let length = HeaderValue::from(contents.data.len() + end.len());
    let parts = [contents.data.clone(), end].map(Ok::<_, std::convert::Infallible>);
    let body = Body::from_stream(futures::stream::iter(parts));
    let json = HeaderValue::from_static("application/json");
    Ok(([(CONTENT_TYPE, json), (CONTENT_LENGTH, length)], body).into_response())
}

/// Fields of a [`RendezvousAnswer`] after `data`.
#[derive(Serialize)]
struct Ending {
    full: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    topology: Option<Topology>,
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<String>,
}

// === impl Verified ===

impl Verified {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < TRUSTED
    }
}

// === impl RequestingPod ===

impl RequestingPod {
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
