//! HTTP client of a BMC, and the mapping of its responses to failures of a signal.

use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use hyper::http::uri::{Authority, Scheme};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::TokioExecutor;
use jiff::SignedDuration;
use maintenance::janitor::redfish::{RedfishConfig, is_path};
use maintenance::janitor::{Class, ProviderFailure};
use runtime::logging::chain;
use runtime::tls::ClientTls;
use serde_json::Value;

use crate::node::unsent;

/// Timeout of a request; BMCs are slow.
const WITHIN: Duration = Duration::from_secs(60);
/// Largest response that is read, in bytes: pages of a log may be large.
const MAX_ANSWER: usize = 4 * 1024 * 1024;
/// Most characters of a response that are quoted in a failure.
const MAX_MESSAGE: usize = 300;

/// Client of one BMC.
pub(super) struct Bmc {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    scheme: Scheme,
    authority: Authority,
    authorization: Option<HeaderValue>,
}

// === impl Bmc ===

impl Bmc {
    /// Creates the client and reads the credentials, without connecting.
    pub(super) async fn new(
        address: &str,
        config: &RedfishConfig,
        tls: &ClientTls,
    ) -> Result<Self, ProviderFailure> {
        let (scheme, authority) = parts(address)?;
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        let mut tls = tls.config().as_ref().clone();
        // BMCs use HTTP/1.1.
        tls.alpn_protocols.clear();
        let https = HttpsConnectorBuilder::new().with_tls_config(tls);
        let https = https.https_or_http().enable_http1();
        Ok(Self {
            client: Client::builder(TokioExecutor::new()).build(https.wrap_connector(connector)),
            scheme,
            authority,
            authorization: authorization(config).await?,
        })
    }

    /// Reads a resource. Fails with a class that excludes any effect.
    pub(super) async fn get(&self, path: &str) -> Result<Value, ProviderFailure> {
        let answer = self.ask(Method::GET, path, Bytes::new()).await;
        let answer = answer.map_err(unsent)?;
        serde_json::from_slice(&answer).map_err(|error| {
            let what = format!("{}{} is not JSON: {error}", self.authority, truncated(path));
            ProviderFailure::new(Class::Transient, "UNREADABLE", what)
        })
    }

    /// Requests an action by POST.
    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<(), ProviderFailure> {
        let body = body.to_string().into();
        self.ask(Method::POST, path, body).await.map(drop)
    }

    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, ProviderFailure> {
        let uri = self.uri(path)?;
        let url = format!("{}://{}{}", self.scheme, self.authority, truncated(path));
        let ambiguous = |what: String| {
            ProviderFailure::new(
                Class::Ambiguous,
                "AMBIGUOUS_RESULT",
                format!("{url}: {what}"),
            )
        };
        let mut request = Request::builder().method(method).uri(uri);
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body));
        let request = request.map_err(|error| super::unusable(format!("{url}: {error}")))?;
        let answer = async {
            let answer = self.client.request(request).await.map_err(|error| {
                // Without a connection, nothing was sent.
                if error.is_connect() {
                    unreachable(&url, &error)
                } else {
                    ambiguous(chain(&error))
                }
            })?;
            let (status, headers) = (answer.status(), answer.headers().clone());
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
            let body = match body {
                Ok(body) => body.to_bytes(),
                // The error status alone is conclusive, whatever the body contains.
                Err(_) if !status.is_success() => Bytes::new(),
                Err(error) => return Err(ambiguous(chain(error.as_ref()))),
            };
            if status.is_success() {
                return Ok(body);
            }
            Err(refused(&url, status, &headers, &body))
        };
        match tokio::time::timeout(WITHIN, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(ambiguous(format!(
                "no answer within {} s",
                WITHIN.as_secs()
            ))),
        }
    }

    /// Returns the URL of a path on the configured BMC. A response of the BMC must not redirect
    /// the password or the reset to another host.
    fn uri(&self, path: &str) -> Result<Uri, ProviderFailure> {
        let refused = || {
            let path = truncated(path);
            super::unusable(format!(
                "{} names {path:?}, which is not a path on this BMC",
                self.authority
            ))
        };
        if !is_path(path) {
            return Err(refused());
        }
        let uri = Uri::builder()
            .scheme(self.scheme.clone())
            .authority(self.authority.clone())
            .path_and_query(path)
            .build();
        let uri = uri.map_err(|_| refused())?;
        let stays = uri.scheme() == Some(&self.scheme) && uri.authority() == Some(&self.authority);
        stays.then_some(uri).ok_or_else(refused)
    }
}

/// Splits a configured address into scheme and authority. A node's name may be part of the
/// address.
fn parts(address: &str) -> Result<(Scheme, Authority), ProviderFailure> {
    let wrong = || {
        let message = format!("{address:?} is not the address of a BMC");
        ProviderFailure::new(Class::Permanent, "INVALID_REQUEST", message)
    };
    let uri: Uri = address.parse().map_err(|_| wrong())?;
    let plain = uri.path_and_query().is_none_or(|path| path == "/");
    match (uri.scheme(), uri.authority()) {
        (Some(scheme), Some(authority)) if plain && !authority.as_str().contains('@') => {
            Ok((scheme.clone(), authority.clone()))
        }
        _ => Err(wrong()),
    }
}

/// Truncates a path for a failure.
fn truncated(path: &str) -> String {
    path.chars().take(MAX_MESSAGE).collect()
}

fn unreachable(url: &str, error: &Error) -> ProviderFailure {
    let what = format!("{url}: {}", chain(error));
    ProviderFailure::new(Class::Transient, "UNAVAILABLE", what)
}

/// Maps an HTTP status to a failure. By Redfish (DSP0266, 8.5), only 500 and 502 to 504 leave
/// open whether something was done.
fn refused(url: &str, status: StatusCode, headers: &HeaderMap, body: &Bytes) -> ProviderFailure {
    let (class, reason) = match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            (Class::Transient, "RATE_LIMITED")
        }
        StatusCode::CONFLICT => (Class::Transient, "RESOURCE_BUSY"),
        StatusCode::UNAUTHORIZED => (Class::Transient, "AUTHENTICATION_FAILED"),
        StatusCode::FORBIDDEN => (Class::Permanent, "PERMISSION_DENIED"),
        StatusCode::NOT_FOUND => (Class::Permanent, "RESOURCE_NOT_FOUND"),
        StatusCode::NOT_IMPLEMENTED => (Class::Permanent, "UNSUPPORTED_OPERATION"),
        other if other.is_client_error() => (Class::Permanent, "INVALID_REQUEST"),
        _ => (Class::Ambiguous, "AMBIGUOUS_RESULT"),
    };
    let failure = ProviderFailure::new(
        class,
        reason,
        format!("{url}: {status} {}", message_of(body)),
    );
    let wait = headers
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok());
    match wait.and_then(|seconds| seconds.trim().parse().ok()) {
        Some(seconds) => {
            failure.after(SignedDuration::from_secs(i64::from(u32::min(seconds, DAY))))
        }
        None => failure,
    }
}

/// Longest `Retry-After` that is honoured, in seconds.
const DAY: u32 = 24 * 60 * 60;

/// Returns the error message of a response: Redfish's extended one, if present.
fn message_of(body: &Bytes) -> String {
    let error: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = &error["error"];
    let detail = error["@Message.ExtendedInfo"][0]["Message"].as_str();
    let message = detail.or_else(|| error["message"].as_str());
    message
        .unwrap_or_default()
        .chars()
        .take(MAX_MESSAGE)
        .collect()
}

async fn authorization(config: &RedfishConfig) -> Result<Option<HeaderValue>, ProviderFailure> {
    if config.username_path.is_empty() {
        return Ok(None);
    }
    let user = secret(&config.username_path).await?;
    let password = secret(&config.password_path).await?;
    let text = BASE64_STANDARD.encode(format!("{user}:{password}"));
    let value = HeaderValue::from_str(&format!("Basic {text}"));
    Ok(value.ok().map(|mut value| {
        value.set_sensitive(true);
        value
    }))
}

async fn secret(path: &str) -> Result<String, ProviderFailure> {
    let text = tokio::fs::read_to_string(path).await;
    text.map(|text| text.trim_end_matches(['\r', '\n']).to_owned())
        .map_err(|error| {
            let what = format!("cannot read {path}: {error}");
            ProviderFailure::new(Class::Transient, "AUTHENTICATION_FAILED", what)
        })
}
