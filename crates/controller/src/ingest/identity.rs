//! Identification of the controller's callers: by token, or else by certificate.
//!
//! The API server reviews a token. Valid or not, the answer is cached for a while, in a table of
//! limited size. While the API server does not answer, every caller gets `UNAVAILABLE`: agents
//! keep their events and retry.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use cluster::{Cluster, TokenError, TokenOwner};
use connector::Caller;
use contract::names;
use jiff::{SignedDuration, Timestamp};
use runtime::logging::{Seldom, chain};
use runtime::tcp_grpc::TcpPeer;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tonic::Status;
use tonic::codegen::http::HeaderValue;

/// Shortest and longest time that the review of a valid token is cached, at most until
/// [`BEFORE_END`]. The time depends on the token, so that agents that came together do not
/// return together. It bounds how long a token outlives its pod: with 5,000 agents it makes some
/// ten reviews a second, where two minutes made forty.
const KEEP_GOOD: (Duration, Duration) = (Duration::from_secs(300), Duration::from_secs(600));
/// Time before the end of a token when it is reviewed again.
const BEFORE_END: SignedDuration = SignedDuration::from_secs(10);
/// Time that the review of a token without an end is cached. The API server itself caches
/// reviews for two minutes.
const KEEP_ENDLESS: Duration = Duration::from_secs(120);
/// Time that the refusal of a token is cached: the token may become valid.
const KEEP_BAD: Duration = Duration::from_secs(10);
/// Most cached reviews: one for each node of a large cluster, and some more.
const MAX_KEPT: usize = 20_480;
/// Longest token (bytes). Those of Kubernetes have about 1 KiB.
const MAX_TOKEN: usize = 8 * 1024;
/// Most reviews in flight.
const MAX_REVIEWS: usize = 16;
/// Longest wait for a review to begin, after which the caller is asked to retry.
const TURN: Duration = Duration::from_secs(5);
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// Rules to identify callers. Cheap to clone.
#[derive(Clone)]
pub struct Identify {
    /// Reviewer of tokens; `None` if tokens are not accepted.
    tokens: Option<Arc<Tokens>>,
    /// True if callers are not identified, on a local port without TLS.
    anybody: bool,
    seldom: Arc<Seldom>,
}

/// Rules to map the owner of a token to a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRules {
    /// Audience that tokens have to be valid for.
    pub audience: String,
    /// Accounts whose pods report for the node that they run on.
    pub agents: Vec<ServiceAccount>,
    /// Accounts that report for any node.
    pub central: Vec<ServiceAccount>,
}

/// A `ServiceAccount`, in text as `NAMESPACE/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccount {
    /// Namespace of the account.
    pub namespace: String,
    /// Name of the account.
    pub name: String,
}

/// Error of a text that is not a `ServiceAccount`.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no ServiceAccount; write NAMESPACE/NAME")]
pub struct ServiceAccountError(String);

/// A service that reviews tokens.
#[async_trait]
pub trait Reviewer: Send + Sync + 'static {
    /// Returns the owner of `token`, if it is valid for `audience`.
    async fn review(&self, token: &str, audience: &str) -> Result<TokenOwner, TokenError>;
}

struct Tokens {
    rules: TokenRules,
    reviewer: Arc<dyn Reviewer>,
    turns: Semaphore,
    kept: Mutex<HashMap<[u8; 32], SavedState>>,
}

/// The cached review of a token.
#[derive(Clone)]
struct SavedState {
    until: Instant,
    answer: Result<Caller, String>,
}

// === impl Identify ===

impl Identify {
    /// Creates rules that identify callers by the node in their certificate, or by the review of
    /// their token and `rules`. Without `tokens` only certificates are accepted.
    pub fn new(tokens: Option<(TokenRules, Arc<dyn Reviewer>)>) -> Self {
        let tokens = tokens.map(|(rules, reviewer)| {
            Arc::new(Tokens {
                rules,
                reviewer,
                turns: Semaphore::new(MAX_REVIEWS),
                kept: Mutex::default(),
            })
        });
        Self {
            tokens,
            anybody: false,
            seldom: Arc::default(),
        }
    }

    /// Creates rules that let every caller report for any node: for tests, and on this machine
    /// only.
    pub fn anybody() -> Self {
        Self {
            anybody: true,
            ..Self::new(None)
        }
    }

    /// Identifies a caller. The error is the answer to an unknown one.
    pub(super) async fn caller(
        &self,
        peer: Option<&TcpPeer>,
        authorization: Option<&HeaderValue>,
    ) -> Result<Caller, Status> {
        let found = self.find(peer, authorization).await;
        if let Err(status) = &found
            && let Some(before) = self.seldom.now()
        {
            tracing::warn!(
                peer = peer.map(|peer| peer.address.ip().to_string()),
                not_logged_before = before,
                "a caller was refused: {}",
                status.message()
            );
        }
        found
    }

    async fn find(
        &self,
        peer: Option<&TcpPeer>,
        authorization: Option<&HeaderValue>,
    ) -> Result<Caller, Status> {
        if self.anybody {
            return Ok(Caller::Anybody);
        }
        if let Some(value) = authorization {
            let token = value.to_str().ok().and_then(|text| {
                let (scheme, token) = text.split_once(' ')?;
                scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
            });
            let token = token.filter(|token| !token.is_empty() && token.len() <= MAX_TOKEN);
            return match (token, &self.tokens) {
                (None, _) => Err(Status::unauthenticated(
                    "the authorization header has no bearer token",
                )),
                (Some(_), None) => Err(Status::unauthenticated(
                    "tokens are not accepted: the controller has no cluster to review them",
                )),
                (Some(token), Some(tokens)) => tokens.caller(token).await,
            };
        }
        let names = peer.and_then(|peer| peer.certificate.as_ref());
        match names.map(|names| (names.node(), names)) {
            Some((Some(node), _)) => Ok(Caller::Node(node.to_owned())),
            Some((None, names)) => Err(Status::unauthenticated(format!(
                "the certificate of {:?} names no node: its common name has to be \
                 system:node:NAME, or its only DNS name the node's",
                names.common_name.as_deref().unwrap_or_default()
            ))),
            None => Err(Status::unauthenticated(
                "the caller has neither a client certificate nor a token",
            )),
        }
    }
}

// === impl Tokens ===

impl Tokens {
    async fn caller(&self, token: &str) -> Result<Caller, Status> {
        // A hash, so that the table cannot leak tokens.
        let key: [u8; 32] = Sha256::digest(token).into();
        if let Some(answer) = self.kept(&key) {
            return answer.map_err(Status::unauthenticated);
        }
        let turn = tokio::time::timeout(TURN, self.turns.acquire()).await;
        let Ok(Ok(_turn)) = turn else {
            return Err(Status::unavailable(
                "too many tokens are under review; try again",
            ));
        };
        // Another call with the same token may have cached its review meanwhile.
        if let Some(answer) = self.kept(&key) {
            return answer.map_err(Status::unauthenticated);
        }
        let review = self.reviewer.review(token, &self.rules.audience).await;
        let answer = match review {
            Ok(owner) => self.rules.judge(owner),
            Err(error @ TokenError::Invalid { .. }) => Err(error.to_string()),
            Err(error) => {
                let text = format!("tokens cannot be reviewed: {}", chain(&error));
                return Err(Status::unavailable(text));
            }
        };
        let keep = match &answer {
            Ok(_) => good_for(token, &key, Timestamp::now()),
            Err(_) => KEEP_BAD,
        };
        self.keep(key, &answer, keep);
        answer.map_err(Status::unauthenticated)
    }

    fn kept(&self, key: &[u8; 32]) -> Option<Result<Caller, String>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept.get(key).filter(|kept| kept.until > Instant::now())?;
        Some(found.answer.clone())
    }

    fn keep(&self, key: [u8; 32], answer: &Result<Caller, String>, keep: Duration) {
        let now = Instant::now();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= MAX_KEPT {
            kept.retain(|_, one| one.until > now);
        }
        if kept.len() >= MAX_KEPT {
            // A caller sends ever new tokens: refused ones are dropped before valid ones.
            kept.retain(|_, one| one.answer.is_ok());
        }
        if kept.len() < MAX_KEPT {
            let answer = answer.clone();
            let until = now + keep;
            kept.insert(key, SavedState { until, answer });
        }
    }
}

/// Returns how long the review of a valid token is cached.
fn good_for(token: &str, key: &[u8; 32], now: Timestamp) -> Duration {
    let Some(end) = end_of(token) else {
        return KEEP_ENDLESS;
    };
    // The hash serves as a random number that stays the same for a token.
    let share = f64::from(key[0]) / f64::from(u8::MAX);
    let (least, most) = KEEP_GOOD;
    let keep = least + most.saturating_sub(least).mul_f64(share);
    let left = end.duration_since(now) - BEFORE_END;
    keep.min(Duration::try_from(left).unwrap_or_default())
}

/// Reads the end of a token. To be called only for a token that the API server has accepted: its
/// signature is not checked here.
fn end_of(token: &str) -> Option<Timestamp> {
    #[derive(Deserialize)]
    struct Claims {
        exp: i64,
    }
    let claims = base64_url(token.split('.').nth(1)?)?;
    let Claims { exp } = serde_json::from_slice(&claims).ok()?;
    Timestamp::from_second(exp).ok()
}

/// Decodes base64 in the URL alphabet without padding.
fn base64_url(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let (mut bits, mut held) = (0_u32, 0);
    for letter in text.bytes() {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'-' => 62,
            b'_' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push(u8::try_from((bits >> held) & 0xff).ok()?);
        }
    }
    Some(bytes)
}

// === impl TokenRules ===

impl TokenRules {
    /// Returns the caller that the owner of a valid token is. The error is the reason to refuse
    /// the owner.
    fn judge(&self, owner: TokenOwner) -> Result<Caller, String> {
        let TokenOwner {
            username,
            node_name,
            ..
        } = owner;
        let account = username
            .strip_prefix(SERVICE_ACCOUNT)
            .and_then(|rest| rest.split_once(':'))
            .map(|(namespace, name)| ServiceAccount {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            });
        let Some(account) = account else {
            return Err(format!("{username:?} is no ServiceAccount"));
        };
        if self.central.contains(&account) {
            return Ok(Caller::Central(account.to_string()));
        }
        if !self.agents.contains(&account) {
            return Err(format!(
                "the ServiceAccount {account} may not report: neither --agents nor \
                 --central-monitors names it"
            ));
        }
        match node_name.filter(|name| !name.is_empty()) {
            Some(node) => Ok(Caller::Node(node)),
            None => Err(format!(
                "the token of {account} names no node: it has to be a projected one, of a pod \
                 (Kubernetes 1.30 or later)"
            )),
        }
    }
}

// === impl ServiceAccount ===

impl FromStr for ServiceAccount {
    type Err = ServiceAccountError;

    fn from_str(text: &str) -> Result<Self, ServiceAccountError> {
        match text.split_once('/') {
            Some((namespace, name))
                if names::dns_label(namespace).is_ok() && names::object_name(name).is_ok() =>
            {
                Ok(Self {
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                })
            }
            _ => Err(ServiceAccountError(text.to_owned())),
        }
    }
}

impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

// === impl Cluster ===

#[async_trait]
impl Reviewer for Cluster {
    async fn review(&self, token: &str, audience: &str) -> Result<TokenOwner, TokenError> {
        self.review_token(token, audience).await
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Creates a token with these claims. A test compares the encoding with a known one.
    pub(in crate::ingest) fn token(claims: &str) -> String {
        const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        let bits: Vec<String> = claims.bytes().map(|byte| format!("{byte:08b}")).collect();
        let bits = bits.concat();
        let letters: String = bits
            .as_bytes()
            .chunks(6)
            .map(|six| {
                let six = std::str::from_utf8(six).unwrap();
                let value = usize::from_str_radix(&format!("{six:0<6}"), 2).unwrap();
                char::from(LETTERS[value])
            })
            .collect();
        format!("e30.{letters}.sig")
    }

    #[test]
    fn the_end_of_a_token_is_read_and_nothing_else_is_one() {
        assert_eq!(base64_url("eyJleHAiOjF9").unwrap(), br#"{"exp":1}"#);
        assert_eq!(base64_url("-_8").unwrap(), [0xfb, 0xff]);
        let end = Timestamp::from_second(1_790_000_000).unwrap();
        let whole = r#"{"aud":["gpuwarden"],"exp":1790000000,"sub":"system:serviceaccount:g:a"}"#;
        assert_eq!(end_of(&token(whole)), Some(end));
        for odd in [
            "of-n1",
            "a.b",
            "e30.!.x",
            &token("{}"),
            &token(r#"{"exp":"soon"}"#),
            &token(r#"{"exp":9223372036854775807}"#),
        ] {
            assert_eq!(end_of(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_good_token_counts_until_shortly_before_its_end_and_ten_minutes_at_most() {
        let now = Timestamp::from_second(1_790_000_000).unwrap();
        let ends_in = |seconds: i64| token(&format!(r#"{{"exp":{}}}"#, now.as_second() + seconds));
        let good_for = |token: &str, first: u8| {
            let mut key = [7; 32];
            key[0] = first;
            good_for(token, &key, now).as_secs()
        };
        for first in 0..=255 {
            let kept = good_for(&ends_in(3600), first);
            assert!((300..=600).contains(&kept), "{kept}");
            assert_eq!(good_for(&ends_in(120), first), 110);
            assert_eq!(good_for("opaque", first), 120);
        }
        // Spread over the range.
        let kept = [0, 64, 128, 255].map(|first| good_for(&ends_in(3600), first));
        assert_eq!(kept, [300, 375, 450, 600]);
        for over in [5, 0, -1, i64::from(i32::MIN)] {
            assert_eq!(good_for(&ends_in(over), 0), 0);
        }
    }
}
