//! Who may ask the provider: accounts that are listed, by a token that was made for it.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cluster::{Cluster, TokenError};
use runtime::logging::{Seldom, chain};
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::metadata::MetadataMap;

/// The audience that a token has to be made for, unless another is configured.
pub const AUDIENCE: &str = "nvsentinel-csp-provider";
/// The time for which a good token is not asked about again. A pod that is deleted speaks no longer.
const KEEP: Duration = Duration::from_secs(60);
/// Most tokens that are remembered: a janitor has one, and a new one every hour.
const MAX_KEPT: usize = 64;
/// Most tokens that the API server is asked about at once: a flood of strangers must not become one of ours.
const MAX_ASKED: usize = 4;
/// A caller whose token cannot be asked about by then is told to come again.
const TURN: Duration = Duration::from_secs(5);
/// Longest token (bytes); Kubernetes makes them of about 1 KiB.
const MAX_TOKEN: usize = 8 * 1024;

/// The rule by which callers are taken.
pub struct Callers(Option<Tokens>);

struct Tokens {
    cluster: Arc<Cluster>,
    audience: String,
    /// User names, `system:serviceaccount:NAMESPACE:NAME`.
    allowed: BTreeSet<String>,
    good: Mutex<HashMap<[u8; 32], Instant>>,
    turns: Semaphore,
    turned_away: Seldom,
}

// === impl Callers ===

impl Callers {
    /// Returns the rule by which everybody is taken: for tests, and on this machine only.
    pub fn anybody() -> Self {
        Self(None)
    }

    /// Returns the rule by which those are taken whose token is for `audience`, and of one of the user
    /// names `allowed`.
    pub fn by_token(cluster: Arc<Cluster>, audience: String, allowed: BTreeSet<String>) -> Self {
        Self(Some(Tokens {
            cluster,
            audience,
            allowed,
            good: Mutex::default(),
            turns: Semaphore::new(MAX_ASKED),
            turned_away: Seldom::default(),
        }))
    }

    /// Returns the answer to a call of somebody who is not taken.
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
        // Not the token itself: what is not kept cannot leak.
        let key: [u8; 32] = Sha256::digest(token).into();
        if self.is_good(&key) {
            return Ok(());
        }
        let turn = tokio::time::timeout(TURN, self.turns.acquire()).await;
        let Ok(Ok(_turn)) = turn else {
            // By this code nothing was done, and the caller may come again.
            return Err(Status::unauthenticated(
                "too many tokens are being asked about; come again",
            ));
        };
        // Another call with the same token may have been before us.
        if self.is_good(&key) {
            return Ok(());
        }
        let owner = match self.cluster.review_token(token, &self.audience).await {
            Ok(owner) => owner,
            Err(error @ TokenError::Invalid { .. }) => {
                return Err(Status::unauthenticated(error.to_string()));
            }
            Err(error) => {
                let text = format!("the token cannot be asked about: {}", chain(&error));
                // Nothing was done: the caller may come again.
                return Err(Status::unauthenticated(text));
            }
        };
        if !self.allowed.contains(&owner.username) {
            let user = owner.username;
            if let Some(not_logged_before) = self.turned_away.now() {
                tracing::warn!(
                    user,
                    not_logged_before,
                    "a caller was turned away: it is not allowed to act on nodes"
                );
            }
            let text = format!("{user} is not among those that --callers names");
            return Err(Status::permission_denied(text));
        }
        let mut good = self.good.lock().unwrap_or_else(PoisonError::into_inner);
        if good.len() >= MAX_KEPT {
            good.retain(|_, until| *until > Instant::now());
        }
        if good.len() < MAX_KEPT {
            good.insert(key, Instant::now() + KEEP);
        }
        Ok(())
    }

    fn is_good(&self, key: &[u8; 32]) -> bool {
        let good = self.good.lock().unwrap_or_else(PoisonError::into_inner);
        good.get(key).is_some_and(|until| *until > Instant::now())
    }
}
