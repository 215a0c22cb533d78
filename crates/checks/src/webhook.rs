//! HTTPS client of the webhook, authenticated by the token of the check's pod.

use std::path::PathBuf;
use std::sync::Arc;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use preflight::rendezvous::{AUTHORITIES_VARIABLE, TOKEN_VARIABLE};
use runtime::logging::chain;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::environment::{BadVariable, Environment};

/// Largest answer (bytes): the limit of a `ConfigMap`, with a margin.
const MAX_ANSWER: usize = 2 * 1024 * 1024;

/// Address of the webhook, and credentials of the pod.
#[derive(Clone)]
pub(crate) struct Webhook {
    uri: Uri,
    host: String,
    port: u16,
    tls: Arc<ClientConfig>,
    token: PathBuf,
}

/// Returns a TLS configuration that trusts these authorities, in PEM form. Takes no file, since
/// a container may have none that it can write.
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

// === impl Webhook ===

impl Webhook {
    /// Reads the address from a variable; `None` if it is not set.
    pub(crate) fn read(
        environment: &Environment,
        variable: &'static str,
    ) -> Result<Option<Self>, BadVariable> {
        let allowed = "an address such as https://HOST:PORT";
        let uri = environment.parsed(&[variable], allowed, |url| {
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
        // An IPv6 address has brackets in a URL and none in a certificate.
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

    /// Returns the address of the webhook.
    pub(crate) fn uri(&self) -> &Uri {
        &self.uri
    }

    /// Sends one request, with a path relative to the address. The error is the reason why
    /// there is no answer.
    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Bytes), String> {
        // Read each time, since the kubelet replaces the token.
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
        let path = format!("{}{path}", self.uri.path().trim_end_matches('/'));
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, self.uri.authority().map_or("", |it| it.as_str()))
            .header(AUTHORIZATION, format!("Bearer {}", token.trim()))
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| chain(&error))?;
        let answer = async {
            let answer = sender.send_request(request).await;
            let answer = answer.map_err(|error| chain(&error))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
            let body = body.map_err(|error| error.to_string())?.to_bytes();
            Ok((status, body))
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

/// Returns the text of an error response, on one line.
pub(crate) fn refusal(status: StatusCode, body: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
    format!("{status}: {}", text.trim())
}
