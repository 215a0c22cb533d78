//! Asks the webhook for the gang: it answers as soon as the gang is whole, and tells its secret.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use preflight::rendezvous::{AUTHORITIES_VARIABLE, Answer, TOKEN_VARIABLE, Topology, URL_VARIABLE};
use preflight::roster::Roster;
use runtime::logging::chain;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::environment::{BadVariable, Environment};

/// Time for which the webhook is asked to wait (seconds).
const WAIT: u64 = 20;
/// Longest time for an answer: that, and the way.
const DEADLINE: Duration = Duration::from_secs(WAIT + 10);
/// Largest answer (bytes): what a `ConfigMap` can hold, and a little more.
const MAX_ANSWER: usize = 2 * 1024 * 1024;

/// Where a pod asks, and how it shows who it is.
pub(super) struct Place {
    uri: Uri,
    host: String,
    port: u16,
    tls: Arc<ClientConfig>,
    token: PathBuf,
}

/// What the webhook tells.
pub(super) struct Told {
    pub(super) roster: Roster,
    /// The gang is whole without this pod.
    pub(super) full: bool,
    /// The gang's secret, once the gang is whole.
    pub(super) secret: Option<Vec<u8>>,
    /// The topology file of this machine, as far as it is known.
    pub(super) topology: Option<Topology>,
}

/// Returns a client's side of TLS that trusts these authorities, in PEM form. Not by a file: a container may
/// have none that it can write.
fn trusting(authorities: &str) -> Option<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authorities.as_bytes()) {
        roots.add(certificate.ok()?).ok()?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().ok()?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Some(Arc::new(config))
}

// === impl Place ===

impl Place {
    /// Reads where to ask; `None` where nobody is to be asked.
    pub(super) fn read(environment: &Environment) -> Result<Option<Self>, BadVariable> {
        let allowed = "an address such as https://HOST:PORT/gangs/NAMESPACE/NAME";
        let uri = environment.parsed(&[URL_VARIABLE], allowed, |url| {
            let uri: Uri = url.parse().ok()?;
            let is_whole = uri.scheme_str() == Some("https") && uri.host().is_some();
            is_whole.then_some(uri)
        })?;
        let Some(uri) = uri else {
            return Ok(None);
        };
        let allowed = "certificates in PEM form";
        let Some(tls) = environment.parsed(&[AUTHORITIES_VARIABLE], allowed, trusting)? else {
            return Ok(None);
        };
        let token = environment.required(&[TOKEN_VARIABLE], "the file with this pod's token")?;
        // IPv6 has brackets in a URL and none in a certificate.
        let host = uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Ok(Some(Self {
            host: host.to_owned(),
            port: uri.port_u16().unwrap_or(443),
            uri,
            tls,
            token: PathBuf::from(token),
        }))
    }

    /// Asks once. The error says why there is no answer.
    pub(super) async fn ask(&self) -> Result<Told, String> {
        let asked = tokio::time::timeout(DEADLINE, self.exchange()).await;
        let answer = asked.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        let answer = answer.map_err(|why| format!("{} does not say: {why}", self.uri))?;
        let roster = Roster::parse(|key| answer.data.get(key).cloned());
        let secret = answer.secret.map(|secret| BASE64_STANDARD.decode(secret));
        Ok(Told {
            roster: roster.map_err(|error| error.to_string())?,
            full: answer.full,
            secret: secret.transpose().map_err(|error| error.to_string())?,
            topology: answer.topology,
        })
    }

    async fn exchange(&self) -> Result<Answer, String> {
        // The kubelet makes a new one in time.
        let token = std::fs::read_to_string(&self.token)
            .map_err(|error| format!("{}: {error}", self.token.display()))?;
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await;
        let stream = stream.map_err(|error| chain(&error))?;
        let name = ServerName::try_from(self.host.clone()).map_err(|error| chain(&error))?;
        let connector = TlsConnector::from(Arc::clone(&self.tls));
        let stream = connector.connect(name, stream).await;
        let stream = TokioIo::new(stream.map_err(|error| chain(&error))?);
        let opened = hyper::client::conn::http1::handshake(stream).await;
        let (mut sender, connection) = opened.map_err(|error| chain(&error))?;
        let request = Request::get(format!("{}?wait={WAIT}", self.uri.path()))
            .header(HOST, self.uri.authority().map_or("", |it| it.as_str()))
            .header(AUTHORIZATION, format!("Bearer {}", token.trim()))
            .body(Empty::<Bytes>::new())
            .map_err(|error| chain(&error))?;
        let answer = async {
            let answer = sender.send_request(request).await;
            let answer = answer.map_err(|error| chain(&error))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
            let body = body.map_err(|error| error.to_string())?.to_bytes();
            if status != StatusCode::OK {
                let text: String = String::from_utf8_lossy(&body).chars().take(200).collect();
                return Err(format!("{status}: {}", text.trim()));
            }
            serde_json::from_slice(&body).map_err(|error| error.to_string())
        };
        tokio::pin!(connection);
        tokio::select! {
            answer = answer => answer,
            ended = &mut connection => Err(match ended {
                Ok(()) => "the connection was closed".to_owned(),
                Err(error) => chain(&error),
            }),
        }
    }
}
