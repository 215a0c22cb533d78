//! Access tokens of GCP, by application default credentials: a file that the environment names,
//! else the metadata server.
//!
//! Forms of the files and of the exchanges: <https://google.aip.dev/auth/4112> (service account),
//! <https://google.aip.dev/auth/4117> (workload identity federation), and
//! <https://docs.cloud.google.com/compute/docs/access/authenticate-workloads> (metadata server).

use std::collections::BTreeMap;
use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use hyper::Method;
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::encoding::form;
use crate::http::{Failure, Http, Request, Response};
use crate::rsa::RsaKey;
use crate::{Environment, secret_file};

/// Variable with the path of a file of credentials.
const FILE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
/// Variable with another host of the metadata server.
const METADATA_HOST: &str = "GCE_METADATA_HOST";
/// Path of the token of the instance's or pod's service account.
const METADATA_PATH: &str = "computeMetadata/v1/instance/service-accounts/default/token";
/// Permissions that a token is asked for: to read logs and instances.
const SCOPES: [&str; 2] = [
    "https://www.googleapis.com/auth/logging.read",
    "https://www.googleapis.com/auth/compute.readonly",
];
/// Permission of a token that is only exchanged for the one of a service account.
const EXCHANGE_SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";
/// Lifetime of an assertion and of a token of a service account (seconds), as long as Google allows by
/// default.
const LIFETIME: i64 = 60 * 60;
/// Time before its end from which a token is replaced.
const SPARE: SignedDuration = SignedDuration::from_mins(5);

/// Source of access tokens.
#[derive(Debug)]
pub(super) struct Credentials {
    http: Http,
    environment: Environment,
    token: Option<Token>,
}

/// An access token. Its debug form does not show it.
#[derive(Clone)]
struct Token {
    text: String,
    end: Timestamp,
}

/// A file of credentials.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum File {
    ServiceAccount(ServiceAccount),
    ExternalAccount(Box<ExternalAccount>),
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct ServiceAccount {
    client_email: String,
    private_key: String,
    #[serde(default)]
    private_key_id: String,
    token_uri: String,
}

#[derive(Deserialize)]
struct ExternalAccount {
    audience: String,
    subject_token_type: String,
    token_url: String,
    credential_source: Subject,
    service_account_impersonation_url: Option<String>,
    #[serde(default)]
    service_account_impersonation: Impersonation,
}

#[derive(Default, Deserialize)]
struct Impersonation {
    token_lifetime_seconds: Option<i64>,
}

/// Place of the token of the identity provider.
#[derive(Deserialize)]
struct Subject {
    file: Option<String>,
    url: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    format: Form,
}

#[derive(Default, Deserialize)]
struct Form {
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(default)]
    subject_token_field_name: String,
}

/// Answer of a token endpoint (RFC 6749, 5.1).
#[derive(Deserialize)]
struct Granted {
    access_token: String,
    #[serde(default)]
    expires_in: i64,
}

/// Answer of `generateAccessToken`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Generated {
    access_token: String,
    expire_time: Timestamp,
}

// === impl Credentials ===

impl Credentials {
    /// Creates the source, without asking for a token.
    pub(super) fn new(http: Http, environment: Environment) -> Self {
        Self {
            http,
            environment,
            token: None,
        }
    }

    /// Returns the token that is in use, or a new one if that ends soon.
    pub(super) async fn token(&mut self, now: Timestamp) -> Result<String, Failure> {
        let fresh = self
            .token
            .as_ref()
            .filter(|token| token.end.duration_since(now) > SPARE);
        if let Some(token) = fresh {
            return Ok(token.text.clone());
        }
        let token = match self.environment.get(FILE) {
            Some(path) => self.by_file(Path::new(&path), now).await?,
            None => self.by_metadata(now).await?,
        };
        Ok(self.token.insert(token).text.clone())
    }

    /// Forgets the token, since it was refused.
    pub(super) fn forget(&mut self) {
        self.token = None;
    }

    async fn by_metadata(&self, now: Timestamp) -> Result<Token, Failure> {
        let host = self.environment.get(METADATA_HOST);
        let host = host.as_deref().unwrap_or("metadata.google.internal");
        let request = Request {
            method: Method::GET,
            url: format!("http://{host}/{METADATA_PATH}"),
            headers: vec![("metadata-flavor".to_owned(), "Google".to_owned())],
            body: Vec::new(),
        };
        let answer = self.http.ask(request).await.map_err(|failure| {
            let what = format!("{failure}; {FILE} names no file either");
            Failure { what, ..failure }
        })?;
        Token::granted(answer, now)
    }

    /// Gets a token by a file, which is read each time, since it may be rotated.
    async fn by_file(&self, path: &Path, now: Timestamp) -> Result<Token, Failure> {
        let place = path.display().to_string();
        let wrong = |what: String| Failure::new(format!("the credentials {place} {what}"));
        let text = secret_file::read(path).await?;
        let file = serde_json::from_str(&text)
            .map_err(|error| wrong(format!("cannot be used: {error}")))?;
        match file {
            File::ServiceAccount(account) => self.by_key(&account, &place, now).await,
            File::ExternalAccount(account) => self.by_exchange(&account, &place, now).await,
            File::Other => Err(wrong(
                "have a type that is not supported: write a file of type service_account or \
                 external_account"
                    .to_owned(),
            )),
        }
    }

    /// Signs an assertion with the key of a service account, and exchanges it (RFC 7523).
    async fn by_key(
        &self,
        account: &ServiceAccount,
        place: &str,
        now: Timestamp,
    ) -> Result<Token, Failure> {
        let place = format!("the private_key of {place}");
        let key = RsaKey::from_pem(&account.private_key, &place)?;
        let header = json!({"alg": "RS256", "typ": "JWT", "kid": account.private_key_id});
        let issued = now.as_second();
        let claims = json!({
            "iss": account.client_email,
            "scope": SCOPES.join(" "),
            "aud": account.token_uri,
            "iat": issued,
            "exp": issued + LIFETIME,
        });
        let encoded = |part: Value| BASE64_URL_SAFE_NO_PAD.encode(part.to_string());
        let message = format!("{}.{}", encoded(header), encoded(claims));
        let signature = BASE64_URL_SAFE_NO_PAD.encode(key.sign(message.as_bytes())?);
        let body = form(&[
            ("grant_type", "urn:ietf:params:oauth:grant-type:jwt-bearer"),
            ("assertion", &format!("{message}.{signature}")),
        ]);
        self.granted(&account.token_uri, body, now).await
    }

    /// Exchanges the token of an identity provider (RFC 8693), and the result for the token of a
    /// service account if the file names one.
    async fn by_exchange(
        &self,
        account: &ExternalAccount,
        place: &str,
        now: Timestamp,
    ) -> Result<Token, Failure> {
        let subject = self.subject(&account.credential_source, place).await?;
        let own = SCOPES.join(" ");
        let impersonated = account.service_account_impersonation_url.as_deref();
        let scope = impersonated.map_or(own.as_str(), |_| EXCHANGE_SCOPE);
        let body = form(&[
            (
                "grant_type",
                "urn:ietf:params:oauth:grant-type:token-exchange",
            ),
            ("audience", &account.audience),
            ("scope", scope),
            (
                "requested_token_type",
                "urn:ietf:params:oauth:token-type:access_token",
            ),
            ("subject_token_type", &account.subject_token_type),
            ("subject_token", &subject),
        ]);
        let token = self.granted(&account.token_url, body, now).await?;
        let Some(url) = impersonated else {
            return Ok(token);
        };
        let lifetime = account.service_account_impersonation.token_lifetime_seconds;
        let body = json!({
            "scope": SCOPES,
            "lifetime": format!("{}s", lifetime.unwrap_or(LIFETIME)),
        });
        let request = Request {
            method: Method::POST,
            url: url.to_owned(),
            headers: vec![
                ("authorization".to_owned(), format!("Bearer {}", token.text)),
                ("content-type".to_owned(), "application/json".to_owned()),
            ],
            body: body.to_string().into_bytes(),
        };
        let answer = self.http.ask(request).await?.success()?;
        let generated: Generated = parse(&answer)?;
        Ok(Token {
            text: generated.access_token,
            end: generated.expire_time,
        })
    }

    /// Returns the token of the identity provider.
    async fn subject(&self, source: &Subject, place: &str) -> Result<String, Failure> {
        let (text, from) = match (&source.file, &source.url) {
            (Some(path), None) => (secret_file::read(Path::new(path)).await?, path),
            (None, Some(url)) => {
                let request = Request {
                    method: Method::GET,
                    url: url.clone(),
                    headers: source.headers.clone().into_iter().collect(),
                    body: Vec::new(),
                };
                let answer = self.http.ask(request).await?.success()?;
                (String::from_utf8_lossy(&answer.body).into_owned(), url)
            }
            _ => {
                let what = "has a credential_source that is not supported: file and url are";
                return Err(Failure::new(format!("{place} {what}")));
            }
        };
        if source.format.kind != "json" {
            return Ok(text.trim().to_owned());
        }
        let name = &source.format.subject_token_field_name;
        let parsed: Value = serde_json::from_str(&text).unwrap_or_default();
        let token = parsed.get(name).and_then(Value::as_str);
        token
            .map(str::to_owned)
            .ok_or_else(|| Failure::new(format!("{from} is no JSON with the text {name:?}")))
    }

    /// Asks a token endpoint.
    async fn granted(&self, url: &str, body: String, now: Timestamp) -> Result<Token, Failure> {
        let kind = "application/x-www-form-urlencoded";
        let request = Request {
            method: Method::POST,
            url: url.to_owned(),
            headers: vec![("content-type".to_owned(), kind.to_owned())],
            body: body.into_bytes(),
        };
        Token::granted(self.http.ask(request).await?, now)
    }
}

// === impl Token ===

impl Token {
    fn granted(answer: Response, now: Timestamp) -> Result<Self, Failure> {
        let granted: Granted = parse(&answer.success()?)?;
        // A lifetime that no token has is one of a broken server.
        let lifetime = SignedDuration::from_secs(granted.expires_in.clamp(0, 24 * LIFETIME));
        Ok(Self {
            text: granted.access_token,
            end: now + lifetime,
        })
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut token = f.debug_struct("Token");
        token.field("end", &self.end).finish_non_exhaustive()
    }
}

/// Parses a response that holds a secret, so a failure does not quote it.
fn parse<T: serde::de::DeserializeOwned>(answer: &Response) -> Result<T, Failure> {
    serde_json::from_slice(&answer.body).map_err(|error| {
        let what = format!("{}: the token cannot be read", answer.asked);
        Failure::new(format!("{what}: {:?} error", error.classify()))
    })
}

#[cfg(test)]
mod tests;
