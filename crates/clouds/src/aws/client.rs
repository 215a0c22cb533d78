//! Signed requests to the services of AWS: credentials, retries of overload, and errors in plain words.

use std::time::Duration;

use hyper::{Method, Uri};
use jiff::Timestamp;
use serde_json::Value;

use super::credentials::Keys;
use super::sign::{self, Scope, Unsigned};
use super::xml::Element;
use crate::Failure;
use crate::http::{Http, Request, Response};

/// Most attempts of one request that the service is too busy for.
const ATTEMPTS: u32 = 4;
/// Pause before the second attempt, doubled for each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause within a poll; a longer one ends it.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Error codes of overload.
const BUSY: [&str; 6] = [
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequestsException",
    "ServiceUnavailable",
    "InternalFailure",
];
/// Error codes of credentials that have ended, or were replaced.
const EXPIRED: [&str; 6] = [
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "AuthFailure",
];

/// A service in a region.
pub(super) struct Service {
    /// Name in signatures.
    pub(super) name: &'static str,
    /// Region in signatures.
    pub(super) region: String,
    /// URL.
    pub(super) url: String,
}

/// Client of the services of one account.
pub(super) struct Client {
    http: Http,
    keys: Keys,
}

/// Refusal of a request.
pub(super) struct Refused {
    /// Error code of the service; empty if there is none.
    pub(super) code: String,
    /// Description.
    pub(super) failure: Failure,
}

// === impl Client ===

impl Client {
    pub(super) fn new(http: Http, keys: Keys) -> Self {
        Self { http, keys }
    }

    /// Sends a request by POST, and returns the response of success. A request that the service is too busy for
    /// is sent again, and one with credentials that have ended once with new ones.
    pub(super) async fn ask(
        &mut self,
        service: &Service,
        headers: &[(&str, String)],
        body: String,
    ) -> Result<Response, Refused> {
        let mut pause = FIRST_PAUSE;
        let mut is_renewed = false;
        let mut attempt = 1;
        loop {
            let refused = match self.send(service, headers, &body).await {
                Ok(response) => return Ok(response),
                Err(refused) => refused,
            };
            let code = refused.code.as_str();
            if EXPIRED.contains(&code) && !is_renewed {
                is_renewed = true;
                self.keys.forget();
                continue;
            }
            let wait = refused.failure.retry_after.unwrap_or(pause);
            if !BUSY.contains(&code) || attempt >= ATTEMPTS || wait > LONGEST_PAUSE {
                return Err(refused);
            }
            tokio::time::sleep(wait).await;
            pause *= 2;
            attempt += 1;
        }
    }

    async fn send(
        &mut self,
        service: &Service,
        headers: &[(&str, String)],
        body: &str,
    ) -> Result<Response, Refused> {
        // The clock of each attempt: a signature is valid for five minutes.
        let now = Timestamp::now();
        let credentials = self.keys.current(now).await?;
        let uri: Uri = service
            .url
            .parse()
            .map_err(|error| Failure::new(format!("{:?} is not a URL: {error}", service.url)))?;
        let mut headers: Vec<(String, String)> = (headers.iter())
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        let unsigned = Unsigned {
            method: "POST",
            host: uri.authority().map_or("", |authority| authority.as_str()),
            path: uri.path(),
            headers: &headers,
            body: body.as_bytes(),
        };
        let scope = Scope {
            region: &service.region,
            service: service.name,
        };
        let signature = sign::headers(&unsigned, &credentials, scope, now);
        headers.extend(signature);
        let request = Request {
            method: Method::POST,
            url: service.url.clone(),
            headers,
            body: body.as_bytes().to_vec(),
        };
        let response = self.http.ask(request).await?;
        if response.is_success() {
            return Ok(response);
        }
        Err(refused(&response))
    }
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self {
            code: String::new(),
            failure,
        }
    }
}

/// Reads the error of a response, which is JSON or XML.
fn refused(response: &Response) -> Refused {
    let body = String::from_utf8_lossy(&response.body);
    let found = of_json(&response.body).or_else(|| of_xml(&response.body));
    let (mut code, says) = match found {
        Some((code, message)) => {
            let says = format!("{code}: {message}");
            (code, says)
        }
        None => (String::new(), body.into_owned()),
    };
    // A proxy in front of the service has no code.
    if code.is_empty() && (response.status == 429 || response.status >= 500) {
        "ServiceUnavailable".clone_into(&mut code);
    }
    Refused {
        code,
        failure: response.failure(&says),
    }
}

/// Returns code and message of `{"__type": "prefix#Code", "message": "..."}`.
fn of_json(body: &[u8]) -> Option<(String, String)> {
    let error: Value = serde_json::from_slice(body).ok()?;
    let kind = error["__type"].as_str()?;
    let code = kind.rsplit('#').next().unwrap_or(kind);
    let message = error["message"].as_str().or(error["Message"].as_str());
    Some((code.to_owned(), message.unwrap_or_default().to_owned()))
}

/// Returns code and message of `<Response><Errors><Error>` (EC2) or `<ErrorResponse><Error>` (STS).
fn of_xml(body: &[u8]) -> Option<(String, String)> {
    let root = Element::parse(body).ok()?;
    let error = root.at(&["Errors", "Error"]).or(root.child("Error"))?;
    let text = |name| error.text_of(name).to_owned();
    Some((text("Code"), text("Message")))
}
