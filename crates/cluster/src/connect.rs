//! Creates a client from a kubeconfig or the in-cluster environment.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::HeaderValue;
use http::header::USER_AGENT;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

use crate::KnownNodes;
use crate::audit::Audit;
use crate::counters::{Counters, RequestCounts};
use crate::pace::{Pace, PaceLayer, Urgency};
use crate::request;
use crate::tenure::{Tenure, TenureLayer};

mod transport;

/// User agent of the client, which the API server's audit log and `managedFields` show.
const AGENT: &str = concat!("gpuwarden/", env!("CARGO_PKG_VERSION"));

/// Cluster to connect to, and the user to connect as.
#[derive(Clone, Debug, Default)]
pub struct ConnectOptions {
    /// Kubeconfig file. Takes precedence over `in_cluster`.
    pub kubeconfig: Option<PathBuf>,
    /// Context in the kubeconfig; `None` for its current context.
    pub context: Option<String>,
    /// True to use the service account of the pod that this process runs in.
    pub in_cluster: bool,
}

/// Reasons why no client can be created. None of them is about the API server, which is not
/// contacted.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Neither a kubeconfig nor `in_cluster` is set.
    #[error("no cluster is named: name a kubeconfig file, or run inside a cluster")]
    NoCluster,
    /// The kubeconfig cannot be read.
    #[error("cannot read the kubeconfig {}", path.display())]
    Read {
        /// Path of the kubeconfig.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file is not a kubeconfig.
    #[error("{} is not a kubeconfig", path.display())]
    Parse {
        /// Path of the kubeconfig.
        path: PathBuf,
        /// Error of the parser, with its position.
        source: KubeconfigError,
    },
    /// The kubeconfig does not have the context.
    #[error(
        "the kubeconfig {} has no context `{context}`; it has: {}",
        path.display(),
        list(known)
    )]
    UnknownContext {
        /// Path of the kubeconfig.
        path: PathBuf,
        /// Name of the context: the requested one, or the current one.
        context: String,
        /// Names of the contexts in the kubeconfig.
        known: Vec<String>,
    },
    /// No context was requested, and the kubeconfig has no current one.
    #[error(
        "the kubeconfig {} has no current context: name one of its contexts: {}",
        path.display(),
        list(known)
    )]
    NoCurrentContext {
        /// Path of the kubeconfig.
        path: PathBuf,
        /// Names of the contexts in the kubeconfig.
        known: Vec<String>,
    },
    /// The cluster or user that the context names is missing or unusable.
    #[error("cannot use the context `{context}` of the kubeconfig {}", path.display())]
    Context {
        /// Path of the kubeconfig.
        path: PathBuf,
        /// Name of the context.
        context: String,
        /// Error of the client library.
        source: KubeconfigError,
    },
    /// The environment variables or files that Kubernetes gives to pods are missing or broken.
    #[error("cannot use the service account of this pod (is this a pod?)")]
    InCluster(#[source] InClusterError),
    /// The certificate authority of the cluster contains no certificate.
    #[error("the certificate authority of {server} contains no certificate in PEM form")]
    EmptyCertificateAuthority {
        /// URL of the API server.
        server: String,
    },
    /// Credentials or certificates cannot be used.
    #[error("cannot use the credentials or certificates for {server}")]
    Credentials {
        /// URL of the API server.
        server: String,
        /// Error of the client library.
        source: Box<kube::Error>,
    },
    /// The kubeconfig names a proxy.
    #[error("the proxy {proxy} on the way to {server} is not supported: remove `proxy-url`")]
    Proxy {
        /// URL of the API server.
        server: String,
        /// URL of the proxy.
        proxy: String,
    },
    /// The `tls-server-name` of the kubeconfig is not a valid name.
    #[error("the tls-server-name {name:?} for {server} is neither a DNS name nor an address")]
    ServerName {
        /// URL of the API server.
        server: String,
        /// The name as the kubeconfig has it.
        name: String,
    },
}

/// Client of a Kubernetes cluster. Cheap to clone; all clones share the connections and the
/// limit of requests in flight, which follows from the API server's answers (`pace.rs`).
///
/// There is no fixed rate of requests: the API server's own fairness decides, and its answer 429
/// is passed on as [`crate::ApiError::Throttled`].
#[derive(Clone)]
pub struct Cluster {
    /// Client for watches. These are long, so they wait for no turn and are not counted.
    pub(crate) watching: Client,
    acting: Client,
    reporting: Client,
    /// Limit of the requests in flight; `None` for a connection of its own, whose requests wait
    /// for no turn.
    pub(crate) pace: Option<Arc<Pace>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) known: KnownNodes,
    config: Arc<Config>,
    server: String,
    /// Audit log of all writes; `None` for none.
    audit: Option<Audit>,
}

// === impl Cluster ===

impl fmt::Debug for Cluster {
    // Without the configuration, which holds secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// Creates the client without sending a request. The watch and every call report an API
    /// server that cannot be reached.
    ///
    /// `HTTPS_PROXY` is ignored and a proxy in the kubeconfig is an error: requests go to the
    /// API server directly.
    ///
    /// TLS uses the process's default provider of rustls, which is ring if nothing else is
    /// compiled in. The binary need not install it.
    pub async fn connect(options: ConnectOptions) -> Result<Self, ConnectError> {
        Self::connect_audited(options, None).await
    }

    /// Creates the client as [`connect`](Self::connect) does, with an audit log of its writes.
    pub async fn connect_audited(
        options: ConnectOptions,
        audit: Option<Audit>,
    ) -> Result<Self, ConnectError> {
        let mut config = match (options.kubeconfig, options.in_cluster) {
            (Some(path), _) => from_file(&path, options.context).await?,
            (None, true) => Config::incluster().map_err(ConnectError::InCluster)?,
            (None, false) => return Err(ConnectError::NoCluster),
        };
        config
            .headers
            .push((USER_AGENT, HeaderValue::from_static(AGENT)));

        let server = config
            .cluster_url
            .to_string()
            .trim_end_matches('/')
            .to_owned();
        if config.root_cert.as_ref().is_some_and(Vec::is_empty) {
            return Err(ConnectError::EmptyCertificateAuthority { server });
        }
        let client = transport::client(&config, &server, transport::Pings::DEFAULT, audit.clone())?;
        let cluster = Self {
            watching: client.clone(),
            acting: client.clone(),
            reporting: client,
            pace: Some(Pace::new()),
            counters: Arc::default(),
            known: KnownNodes::default(),
            config: Arc::new(config),
            server,
            audit,
        };
        Ok(cluster.with_layers(None))
    }

    /// Creates a client of the same cluster over a connection of its own, without turns, that is
    /// soon detected when dead. A caller that makes one request at a time needs no pace, and its
    /// limit would only fall with each slow answer: a limit that is never reached is never
    /// raised.
    pub(crate) fn with_own_connection(&self) -> Result<Self, ConnectError> {
        let cluster = Self {
            watching: transport::client(
                &self.config,
                &self.server,
                transport::Pings::SOON,
                self.audit.clone(),
            )?,
            pace: None,
            ..self.clone()
        };
        Ok(cluster.with_layers(None))
    }

    /// Returns the cluster for a leader: writes are made only while `tenure` lasts, and end
    /// before another process can lead. Must be called within a tokio runtime.
    #[must_use]
    pub fn under(&self, tenure: &Tenure) -> Self {
        self.clone().with_layers(Some(tenure))
    }

    /// Rebuilds the clients for acting and reporting, with the layers of `request.rs`.
    fn with_layers(mut self, tenure: Option<&Tenure>) -> Self {
        let over = |urgency| {
            let counters = || Arc::clone(&self.counters);
            let pace = self.pace.clone().map(|pace| PaceLayer { pace, urgency });
            let tenure = tenure.cloned().map(|tenure| TenureLayer {
                tenure,
                counters: counters(),
            });
            request::client(self.watching.clone(), counters(), pace, tenure)
        };
        (self.acting, self.reporting) = (over(Urgency::Act), over(Urgency::Report));
        self
    }

    /// Returns the numbers of requests to the API server so far, and the limit of those in
    /// flight.
    pub fn requests(&self) -> RequestCounts {
        RequestCounts {
            sent: self.counters.sent.load(Ordering::Relaxed),
            throttled: self.counters.throttled.load(Ordering::Relaxed),
            failed: self.counters.failed.load(Ordering::Relaxed),
            warned: self.counters.warnings.count(),
            limit: self.pace.as_ref().map_or(1, |pace| pace.limit()),
        }
    }

    /// Returns the client for requests of an urgency. It takes any request: of an `Api`, or one
    /// that `kube::core::Request` builds. Its errors convert into [`crate::ApiError`].
    pub fn client(&self, urgency: Urgency) -> Client {
        match urgency {
            Urgency::Act => self.acting.clone(),
            Urgency::Report => self.reporting.clone(),
        }
    }

    /// Returns the URL of the API server.
    pub fn server(&self) -> &str {
        &self.server
    }
}

async fn from_file(path: &Path, context: Option<String>) -> Result<Config, ConnectError> {
    let path = path.to_owned();
    let kubeconfig = match Kubeconfig::read_from(&path) {
        Ok(kubeconfig) => kubeconfig,
        Err(KubeconfigError::ReadConfig(source, _)) => {
            return Err(ConnectError::Read { path, source });
        }
        Err(source) => return Err(ConnectError::Parse { path, source }),
    };
    let known: Vec<String> = kubeconfig
        .contexts
        .iter()
        .map(|context| context.name.clone())
        .collect();
    let current = kubeconfig
        .current_context
        .clone()
        .filter(|name| !name.is_empty());
    let Some(context) = context.or(current) else {
        return Err(ConnectError::NoCurrentContext { path, known });
    };
    if !known.contains(&context) {
        return Err(ConnectError::UnknownContext {
            path,
            context,
            known,
        });
    }

    let proxied = kubeconfig
        .contexts
        .iter()
        .find(|named| named.name == context)
        .and_then(|named| named.context.as_ref())
        .and_then(|context| {
            kubeconfig
                .clusters
                .iter()
                .find(|named| named.name == context.cluster)
        })
        .and_then(|named| named.cluster.as_ref())
        .is_some_and(|cluster| cluster.proxy_url.is_some());
    let options = KubeConfigOptions {
        context: Some(context.clone()),
        ..Default::default()
    };
    match Config::from_custom_kubeconfig(kubeconfig, &options).await {
        Ok(mut config) => {
            // kube reads HTTPS_PROXY from the environment, but not NO_PROXY.
            config.proxy_url = config.proxy_url.filter(|_| proxied);
            Ok(config)
        }
        Err(source) => Err(ConnectError::Context {
            path,
            context,
            source,
        }),
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::causes::chain;

    /// Connects with `text` as the kubeconfig.
    async fn connect(text: &str, context: Option<&str>) -> Result<Cluster, ConnectError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kubeconfig");
        std::fs::write(&path, text).unwrap();
        Cluster::connect(ConnectOptions {
            kubeconfig: Some(path),
            context: context.map(str::to_owned),
            in_cluster: false,
        })
        .await
    }

    /// Returns a kubeconfig with the contexts `lab` (current) and `prod`.
    fn kubeconfig(cluster: &str, user: &str) -> String {
        format!(
            "{{apiVersion: v1, kind: Config, current-context: lab, \
             clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:1/', {cluster}}}}}], \
             users: [{{name: u, user: {{{user}}}}}], \
             contexts: [{{name: lab, context: {{cluster: c, user: u}}}}, \
             {{name: prod, context: {{cluster: gone, user: u}}}}]}}"
        )
    }

    #[tokio::test]
    async fn an_unreachable_server_is_no_error() {
        let cluster = connect(&kubeconfig("", "token: t"), None).await.unwrap();
        assert_eq!(cluster.server(), "https://127.0.0.1:1");
    }

    #[tokio::test]
    async fn errors_say_what_and_where() {
        let empty = "{apiVersion: v1, kind: Config}";
        let key = "client-certificate-data: bm90IGEgY2VydA==, client-key-data: bm90IGEga2V5";
        let cases: [(&str, String, Option<&str>, &[&str]); 11] = [
            (
                "not YAML",
                "{clusters: [".into(),
                None,
                &["is not a kubeconfig"],
            ),
            (
                "wrong shape",
                "clusters: 5".into(),
                None,
                &["is not a kubeconfig"],
            ),
            (
                "no current context",
                empty.into(),
                None,
                &["no current context", "none"],
            ),
            (
                "unknown context",
                kubeconfig("", ""),
                Some("x"),
                &["no context `x`", "lab, prod"],
            ),
            (
                "context without its cluster",
                kubeconfig("", ""),
                Some("prod"),
                &["cannot use the context `prod`", "gone"],
            ),
            (
                "authority not base64",
                kubeconfig("certificate-authority-data: '%%'", ""),
                None,
                &[
                    "cannot use the context `lab`",
                    "certificate authority",
                    "base64",
                ],
            ),
            (
                "authority without a certificate",
                kubeconfig("certificate-authority-data: bm90IGEgY2VydA==", ""),
                None,
                &["https://127.0.0.1:1 contains no certificate"],
            ),
            (
                "authority file missing",
                kubeconfig("certificate-authority: nowhere.crt", ""),
                None,
                &["cannot use the context `lab`", "nowhere.crt"],
            ),
            (
                "client certificate of garbage",
                kubeconfig("", key),
                None,
                &["credentials or certificates for https://127.0.0.1:1"],
            ),
            (
                "a proxy",
                kubeconfig("proxy-url: 'http://proxy.lab:3128'", ""),
                None,
                &["http://proxy.lab:3128", "remove `proxy-url`"],
            ),
            (
                "a server name that is none",
                kubeconfig("tls-server-name: 'a b'", ""),
                None,
                &[
                    "tls-server-name \"a b\"",
                    "neither a DNS name nor an address",
                ],
            ),
        ];
        for (what, text, context, expected) in cases {
            let Err(error) = connect(&text, context).await else {
                panic!("{what}: no error")
            };
            let text = chain(&error);
            for part in expected {
                assert!(text.contains(part), "{what}: {text:?} lacks {part:?}");
            }
        }
    }

    #[tokio::test]
    async fn a_missing_file_is_named() {
        let kubeconfig = Some(PathBuf::from("/nowhere/kubeconfig"));
        let options = ConnectOptions {
            kubeconfig,
            ..Default::default()
        };
        let Err(error) = Cluster::connect(options).await else {
            panic!("connected")
        };
        assert!(
            chain(&error).contains("/nowhere/kubeconfig: No such file"),
            "{}",
            chain(&error)
        );
    }

    #[tokio::test]
    async fn no_cluster_is_an_error() {
        let result = Cluster::connect(ConnectOptions::default()).await;
        assert!(matches!(result, Err(ConnectError::NoCluster)));
    }
}
