//! HTTPS client of all clouds: one request, one bounded response, and a failure in plain words.
//!
//! The client trusts the authorities of the system. It follows no redirect and uses no proxy: a signed request
//! or a token must not go to another host. `http://` is for metadata services, private endpoints and
//! tests.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::header::RETRY_AFTER;
use hyper::{HeaderMap, Method, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use jiff::Timestamp;
use jiff::fmt::rfc2822;
use runtime::logging::chain;
use runtime::tls::ClientTls;
use serde::de::DeserializeOwned;

/// Time in which a request has to be answered.
pub const WITHIN: Duration = Duration::from_secs(10);
/// Largest response that is read (bytes): a page of a list.
pub const MAX_BODY: usize = 4 * 1024 * 1024;
/// Most characters of a response that are quoted in a failure.
const MAX_QUOTE: usize = 300;
/// Longest `Retry-After` that is honoured.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);

/// Client of all clouds. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// Reason why no server can be trusted.
    untrusting: Option<String>,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Method.
    pub method: Method,
    /// URL with scheme and host.
    pub url: String,
    /// Headers, beside `host` and `content-length`.
    pub headers: Vec<(String, String)>,
    /// Body; empty for none.
    pub body: Vec<u8>,
}

/// A response, of any status.
#[derive(Clone, Debug)]
pub struct Response {
    /// Host and path that were asked, for failures.
    pub asked: String,
    /// Status code.
    pub status: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body, of at most [`MAX_BODY`].
    pub body: Bytes,
}

/// Reason why a cloud could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Failure {
    /// Description of what failed and where: host, path, status and the beginning of the response.
    pub what: String,
    /// Pause that the server asks for, of at most an hour.
    pub retry_after: Option<Duration>,
}

// === impl Http ===

impl Http {
    /// Creates a client, which connects once it is asked. Without authorities on this system every
    /// request by `https://` fails.
    pub fn new() -> Result<Self, Failure> {
        let mut untrusting = None;
        let tls = ClientTls::trusting_system().or_else(|error| {
            untrusting = Some(chain(&error));
            ClientTls::trusting_none()
        });
        let tls = tls.map_err(|error| Failure::new(chain(&error)))?;
        Ok(Self::with(&tls, untrusting))
    }

    /// Creates a client that trusts the authorities in this file only, in PEM form.
    pub fn trusting(authority: PathBuf) -> Result<Self, Failure> {
        let tls = ClientTls::load(authority, None);
        let tls = tls.map_err(|error| Failure::new(chain(&error)))?;
        Ok(Self::with(&tls, None))
    }

    fn with(tls: &ClientTls, untrusting: Option<String>) -> Self {
        let mut tls = tls.config().as_ref().clone();
        // The connector sets the protocols itself.
        tls.alpn_protocols.clear();
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        let https = HttpsConnectorBuilder::new().with_tls_config(tls);
        let https = https.https_or_http().enable_http1();
        Self {
            client: Client::builder(TokioExecutor::new()).build(https.wrap_connector(connector)),
            untrusting,
        }
    }

    /// Sends a request, and returns the response of whatever status. Fails if there is none within
    /// [`WITHIN`], or if it is larger than [`MAX_BODY`].
    pub async fn ask(&self, request: Request) -> Result<Response, Failure> {
        let uri: Uri = request.url.parse().map_err(|error| {
            Failure::new(format!("{:?} is not a URL: {error}", quoted(&request.url)))
        })?;
        let host = uri.authority().map_or("", |authority| authority.as_str());
        let asked = quoted(&format!("{host}{}", uri.path()));
        let failed = |what: String| Failure::new(format!("{asked}: {what}"));
        if let Some(why) = self
            .untrusting
            .as_ref()
            .filter(|_| uri.scheme_str() == Some("https"))
        {
            return Err(failed(format!("no server can be trusted: {why}")));
        }
        let mut built = hyper::Request::builder().method(request.method).uri(uri);
        for (name, value) in &request.headers {
            built = built.header(name, value);
        }
        let built = built.body(Full::new(Bytes::from(request.body)));
        let built =
            built.map_err(|error| failed(format!("the request cannot be made: {error}")))?;
        let answer = async {
            let sent = self.client.request(built).await;
            let response = sent.map_err(|error| failed(chain(&error)))?;
            let (status, headers) = (response.status().as_u16(), response.headers().clone());
            let body = Limited::new(response.into_body(), MAX_BODY).collect().await;
            let body = body.map_err(|error| {
                failed(format!(
                    "status {status}, and the response cannot be read: {}",
                    chain(error.as_ref())
                ))
            })?;
            Ok(Response {
                asked: asked.clone(),
                status,
                headers,
                body: body.to_bytes(),
            })
        };
        match tokio::time::timeout(WITHIN, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(failed(format!("no answer within {} s", WITHIN.as_secs()))),
        }
    }
}

// === impl Response ===

impl Response {
    /// Returns whether the status is one of success.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Returns the response if its status is one of success, else a failure that quotes it.
    pub fn success(self) -> Result<Self, Failure> {
        if self.is_success() {
            Ok(self)
        } else {
            Err(self.failure(&String::from_utf8_lossy(&self.body)))
        }
    }

    /// Returns a failure with the status, this text, and the pause that the server asks for.
    pub fn failure(&self, says: &str) -> Failure {
        Failure {
            what: format!(
                "{}: status {}: {}",
                self.asked,
                self.status,
                quoted(says.trim())
            ),
            retry_after: retry_after(&self.headers, Timestamp::now()),
        }
    }

    /// Parses the body as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_slice(&self.body).map_err(|error| {
            let body = String::from_utf8_lossy(&self.body);
            Failure::new(format!(
                "{}: the response is not understood: {error}: {}",
                self.asked,
                quoted(&body)
            ))
        })
    }

    /// Returns the value of a header that is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

// === impl Failure ===

impl Failure {
    /// Creates a failure after which the caller chooses the pause.
    pub fn new(what: impl fmt::Display) -> Self {
        Self {
            what: what.to_string(),
            retry_after: None,
        }
    }
}

/// Returns the pause that a server asks for: a number of seconds, or a date.
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = if let Ok(seconds) = text.parse() {
        Duration::from_secs(seconds)
    } else {
        let until = rfc2822::parse(text).ok()?.timestamp();
        Duration::try_from(until.duration_since(now)).ok()?
    };
    Some(wait.min(LONGEST_WAIT))
}

/// Returns the beginning of a text in one line.
fn quoted(text: &str) -> String {
    let line = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    line.take(MAX_QUOTE).collect()
}

#[cfg(test)]
mod tests;
