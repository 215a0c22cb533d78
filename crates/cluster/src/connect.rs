//! From a kubeconfig or the in-cluster environment to a client.

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
use crate::counters::{Counters, Requests};
use crate::pace::{Pace, PaceLayer, Urgency};
use crate::request;
use crate::tenure::{Tenure, TenureLayer};

mod transport;

/// The name that the client gives itself; the API server's audit log and `managedFields` show it.
const AGENT: &str = concat!("gpuwarden/", env!("CARGO_PKG_VERSION"));

/// The cluster to connect to, and the user to connect as.
#[derive(Clone, Debug, Default)]
pub struct ConnectOptions {
    /// Kubeconfig file. Goes before `in_cluster`.
    pub kubeconfig: Option<PathBuf>,
    /// Context in that file; its current context where `None`.
    pub context: Option<String>,
    /// Use the service account of the pod that this runs in.
    pub in_cluster: bool,
}

/// The reason why there is no client. None of these is about the API server: it is not asked.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Neither a kubeconfig nor `in_cluster`.
    #[error("no cluster is named: name a kubeconfig file, or run inside a cluster")]
    NoCluster,
    /// The file cannot be read.
    #[error("cannot read the kubeconfig {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is no kubeconfig.
    #[error("{} is not a kubeconfig", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The problem, and where it is.
        source: KubeconfigError,
    },
    /// The file has no such context.
    #[error(
        "the kubeconfig {} has no context `{context}`; it has: {}",
        path.display(),
        list(known)
    )]
    UnknownContext {
        /// The file.
        path: PathBuf,
        /// The context asked for, or the current one.
        context: String,
        /// The contexts that it has.
        known: Vec<String>,
    },
    /// No context was asked for, and the file has no current one.
    #[error(
        "the kubeconfig {} has no current context: name one of its contexts: {}",
        path.display(),
        list(known)
    )]
    NoCurrentContext {
        /// The file.
        path: PathBuf,
        /// The contexts that it has.
        known: Vec<String>,
    },
    /// A part that the context names is missing or unusable: cluster, certificates.
    #[error("cannot use the context `{context}` of the kubeconfig {}", path.display())]
    Context {
        /// The file.
        path: PathBuf,
        /// The context.
        context: String,
        /// The error with it.
        source: KubeconfigError,
    },
    /// The environment that Kubernetes gives to pods is missing or broken.
    #[error("cannot use the service account of this pod (is this a pod?)")]
    InCluster(#[source] InClusterError),
    /// The certificate authority of the cluster is there, but without any certificate.
    #[error("the certificate authority of {server} contains no certificate in PEM form")]
    EmptyCertificateAuthority {
        /// The API server.
        server: String,
    },
    /// Credentials or certificates are there, but do not fit.
    #[error("cannot use the credentials or certificates for {server}")]
    Credentials {
        /// The API server.
        server: String,
        /// The error with it.
        source: Box<kube::Error>,
    },
    /// The kubeconfig asks for a proxy.
    #[error("the proxy {proxy} on the way to {server} is not supported: remove `proxy-url`")]
    Proxy {
        /// The API server.
        server: String,
        /// The proxy.
        proxy: String,
    },
    /// `tls-server-name` of the kubeconfig is no name.
    #[error("the tls-server-name {name:?} for {server} is neither a DNS name nor an address")]
    ServerName {
        /// The API server.
        server: String,
        /// The name that is wrong.
        name: String,
    },
}

/// A Kubernetes cluster. Cheap to clone; all clones share their connections, and the limit
/// of what is under way at once, which follows from the API server's answers (`pace.rs`).
///
/// No number of requests a second is set: the API server's own fairness decides, and its
/// answer 429 is passed on as [`crate::ApiError::Throttled`].
#[derive(Clone)]
pub struct Cluster {
    /// The client for watches, which last: they wait for no turn and are not counted.
    pub(crate) watching: Client,
    acting: Client,
    telling: Client,
    /// `None`: its requests are few, and none waits for a turn.
    pub(crate) pace: Option<Arc<Pace>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) known: KnownNodes,
    config: Arc<Config>,
    server: String,
}

// === impl Cluster ===

impl fmt::Debug for Cluster {
    // Not its configuration, which holds secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// Makes the client. Sends no request: an API server that cannot be reached is
    /// reported by the watch and by every call, not here.
    ///
    /// `HTTPS_PROXY` is ignored, and a proxy in the kubeconfig is an error: requests go to
    /// the API server directly.
    ///
    /// TLS uses the process's default provider of rustls, which is ring where nothing
    /// else is compiled in; the binary need not install it.
    pub async fn connect(options: ConnectOptions) -> Result<Self, ConnectError> {
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
        let client = transport::client(&config, &server, transport::Pings::DEFAULT)?;
        let cluster = Self {
            watching: client.clone(),
            acting: client.clone(),
            telling: client,
            pace: Some(Pace::new()),
            counters: Arc::default(),
            known: KnownNodes::default(),
            config: Arc::new(config),
            server,
        };
        Ok(cluster.with_layers(None))
    }

    /// Returns a client of the same cluster over a connection that nobody else uses, and that is
    /// found dead soon; without turns. Whoever makes one request at a time needs no pace, and one
    /// would only ever fall: with each slow answer, but never back, for it is never reached.
    pub(crate) fn with_own_connection(&self) -> Result<Self, ConnectError> {
        let cluster = Self {
            watching: transport::client(&self.config, &self.server, transport::Pings::SOON)?,
            pace: None,
            ..self.clone()
        };
        Ok(cluster.with_layers(None))
    }

    /// Returns the same cluster for somebody who leads: writes are made only while `tenure`
    /// lasts, and end before another can lead. To be called within a tokio runtime.
    #[must_use]
    pub fn under(&self, tenure: &Tenure) -> Self {
        self.clone().with_layers(Some(tenure))
    }

    /// Puts the layers of `request.rs` over the connections anew.
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
        (self.acting, self.telling) = (over(Urgency::Act), over(Urgency::Tell));
        self
    }

    /// Returns the number of requests to the API server so far, and the limit on those under way.
    pub fn requests(&self) -> Requests {
        Requests {
            sent: self.counters.sent.load(Ordering::Relaxed),
            throttled: self.counters.throttled.load(Ordering::Relaxed),
            failed: self.counters.failed.load(Ordering::Relaxed),
            warned: self.counters.warnings.count(),
            limit: self.pace.as_ref().map_or(1, |pace| pace.limit()),
        }
    }

    /// Returns the client for what is so urgent, whatever the request: as an `Api`, or as
    /// what `kube::core::Request` builds. Its errors become [`crate::ApiError`]s.
    pub fn client(&self, urgency: Urgency) -> Client {
        match urgency {
            Urgency::Act => self.acting.clone(),
            Urgency::Tell => self.telling.clone(),
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
            // kube takes HTTPS_PROXY from the environment, but not NO_PROXY.
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
