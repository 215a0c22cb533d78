//! Authorization of callers: configured accounts, identified by a token for this audience.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cluster::{Cluster, TokenError};
use runtime::logging::{Seldom, chain};
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::metadata::MetadataMap;

/// Default audience of the tokens.
pub const AUDIENCE: &str = "nvsentinel-csp-provider";
/// Time that a verified token is trusted without another review. It bounds how long the token
/// of a deleted pod stays valid.
const TRUSTED: Duration = Duration::from_secs(60);
/// Most cached tokens. A janitor uses one, and a new one every hour.
const MAX_CACHED: usize = 64;
/// Most concurrent token reviews, so that a flood of callers causes no flood of requests to the
/// API server.
const MAX_REVIEWS: usize = 4;
/// Longest wait for a token review to start; then the caller must retry.
const TURN: Duration = Duration::from_secs(5);
/// Longest token (bytes); Kubernetes makes them of about 1 KiB.
const MAX_TOKEN: usize = 8 * 1024;

/// Rule that decides who may call.
pub struct Callers(Option<Tokens>);

struct Tokens {
    cluster: Arc<Cluster>,
    audience: String,
    /// Usernames of the form `system:serviceaccount:NAMESPACE:NAME`.
    allowed: BTreeSet<String>,
    good: Mutex<HashMap<[u8; 32], Instant>>,
    turns: Semaphore,
    refused: Seldom,
}

// === impl Callers ===

impl Callers {
    /// Creates a rule that accepts every caller, for tests and for local addresses.
    pub fn anybody() -> Self {
        Self(None)
    }

    /// Creates a rule that accepts tokens for `audience` whose username is in `allowed`.
    pub fn by_token(cluster: Arc<Cluster>, audience: String, allowed: BTreeSet<String>) -> Self {
        Self(Some(Tokens {
            cluster,
            audience,
            allowed,
            good: Mutex::default(),
            turns: Semaphore::new(MAX_REVIEWS),
            refused: Seldom::default(),
        }))
    }

    /// Checks the token of a call.
    pub(super) async fn check(&self, metadata: &MetadataMap) -> Result<(), Status> {
        let Some(tokens) = &self.0 else {
            return Ok(());
        };
        let header = metadata.get("authorization");
        let token = header.and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let token = token.filter(|token| !token.is_empty() && token.len() <= MAX_TOKEN);
        let token = token.ok_or_else(|| {
            Status::unauthenticated("the metadata authorization has no bearer token")
        })?;
        tokens.check(token).await
    }
}

// === impl Tokens ===

impl Tokens {
    async fn check(&self, token: &str) -> Result<(), Status> {
        // A digest instead of the token: what is not stored cannot leak.
        let key: [u8; 32] = Sha256::digest(token).into();
        if self.is_good(&key) {
            return Ok(());
        }
        let turn = tokio::time::timeout(TURN, self.turns.acquire()).await;
        let Ok(Ok(_turn)) = turn else {
            // This code promises that nothing was done, so the caller may retry.
            return Err(Status::unauthenticated(
                "too many tokens are being reviewed; retry",
            ));
        };
        // Another call may have verified the same token meanwhile.
        if self.is_good(&key) {
            return Ok(());
        }
        let owner = match self.cluster.review_token(token, &self.audience).await {
            Ok(owner) => owner,
            Err(error @ TokenError::Invalid { .. }) => {
                return Err(Status::unauthenticated(error.to_string()));
            }
            Err(error) => {
                let text = format!("cannot review the token: {}", chain(&error));
                // Nothing was done, so the caller may retry.
                return Err(Status::unauthenticated(text));
            }
        };
        if !self.allowed.contains(&owner.username) {
            let user = owner.username;
            if let Some(not_logged_before) = self.refused.now() {
                tracing::warn!(
                    user,
                    not_logged_before,
                    "a caller was turned away: it is not allowed to act on nodes"
                );
            }
            let text = format!("{user} is not listed in --callers");
            return Err(Status::permission_denied(text));
        }
        let mut good = self.good.lock().unwrap_or_else(PoisonError::into_inner);
        if good.len() >= MAX_CACHED {
            good.retain(|_, until| *until > Instant::now());
        }
        if good.len() < MAX_CACHED {
            good.insert(key, Instant::now() + TRUSTED);
        }
        Ok(())
    }

    fn is_good(&self, key: &[u8; 32]) -> bool {
        let good = self.good.lock().unwrap_or_else(PoisonError::into_inner);
        good.get(key).is_some_and(|until| *until > Instant::now())
    }
}
