//! Identification of the owner of a token, by a `TokenReview` of the API server.

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::api::PostParams;
use kube::core::Request;

use crate::connect::Cluster;
use crate::error::ApiError;
use crate::pace::Urgency;
use crate::request::ask;

/// Extra field with the node of the pod that a token is bound to (Kubernetes 1.30 and later; on
/// by default from 1.32).
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
/// Extra field with the name of the pod that a token is bound to.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

/// Owner of a valid token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenOwner {
    /// User name, for example `system:serviceaccount:NAMESPACE:NAME`.
    pub username: String,
    /// Node of the pod that the token is bound to; `None` if it is not bound.
    pub node_name: Option<String>,
    /// Name of the pod that the token is bound to; `None` if it is not bound.
    pub pod_name: Option<String>,
}

/// Reason why the owner of a token is not known.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The token is not valid, or not for this audience.
    #[error("the token is not valid here: {why}")]
    Invalid {
        /// Message of the API server.
        why: String,
    },
    /// The review failed, or its answer cannot be read.
    #[error(transparent)]
    Api(#[from] ApiError),
}

// === impl Cluster ===

impl Cluster {
    /// Returns the owner of `token`, if it is valid for `audience`.
    pub async fn review_token(
        &self,
        token: &str,
        audience: &str,
    ) -> Result<TokenOwner, TokenError> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: Some(vec![audience.to_owned()]),
            },
            ..TokenReview::default()
        };
        let body = serde_json::to_vec(&review).map_err(ApiError::unavailable)?;
        let request = Request::new(PATH).create(&PostParams::default(), body);
        // Reports from the token's owner may lead to a quarantine, so the review is as urgent as
        // one.
        let answer = ask(&self.client(Urgency::Act), request).await;
        owner(answer.map_err(ApiError::from)?, audience)
    }
}

fn owner(review: TokenReview, audience: &str) -> Result<TokenOwner, TokenError> {
    let invalid = |why: String| Err(TokenError::Invalid { why });
    let status = review.status.unwrap_or_default();
    let (Some(true), Some(user)) = (status.authenticated, status.user) else {
        return invalid(status.error.unwrap_or_else(|| "it is not known".to_owned()));
    };
    // An API server without support of audiences leaves the list empty.
    if !status
        .audiences
        .unwrap_or_default()
        .iter()
        .any(|one| one == audience)
    {
        return invalid(format!("it is not for the audience {audience}"));
    }
    let mut extra = user.extra.unwrap_or_default();
    let mut first = |key| extra.remove(key)?.into_iter().next();
    Ok(TokenOwner {
        username: user.username.unwrap_or_default(),
        node_name: first(NODE_NAME),
        pod_name: first(POD_NAME),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fake::{FakeAnswer, serve};

    #[tokio::test]
    async fn what_the_api_server_says_of_a_token() {
        let review = |status: Value| {
            let body = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
                "metadata": {}, "spec": {}, "status": status});
            FakeAnswer::Now(201, body.to_string())
        };
        let user = json!({"username": "system:serviceaccount:g:agent",
            "extra": {"authentication.kubernetes.io/node-name": ["n1"],
                "authentication.kubernetes.io/pod-name": ["agent-x"]}});
        let forbidden = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
            "message": "no, you may not", "code": 403});
        let (cluster, mut requests) = serve(vec![
            review(json!({"authenticated": true, "audiences": ["us"], "user": user})),
            review(json!({"authenticated": true, "user": user})),
            review(json!({"authenticated": true, "audiences": ["them"], "user": user})),
            review(json!({"authenticated": false, "error": "it has expired"})),
            FakeAnswer::Now(403, forbidden.to_string()),
            FakeAnswer::Now(500, "oh".into()),
        ])
        .await;
        let owner = cluster.review_token("t", "us").await.unwrap();
        assert_eq!(owner.username, "system:serviceaccount:g:agent");
        assert_eq!(owner.node_name.as_deref(), Some("n1"));
        assert_eq!(owner.pod_name.as_deref(), Some("agent-x"));
        let seen = requests.recv().await.unwrap();
        assert_eq!(seen[..2], ["POST", PATH]);
        for expected in [
            "not for the audience us",
            "not for the audience us",
            "it has expired",
            "no, you may not",
            "does not answer",
        ] {
            let error = cluster.review_token("t", "us").await.unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
