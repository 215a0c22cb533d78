//! Asking for one node.

use std::error::Error;

use domain::node::NodeView;
use http::Request;
use kube::core::Status;

use crate::apply::is_node_name;
use crate::connect::Cluster;
use crate::pace::Urgency;

/// Why a node could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// There is no node of this name.
    #[error("the cluster has no node {name:?}")]
    NotFound {
        /// The name.
        name: String,
    },
    /// The API server does not answer the question.
    #[error("the API server refuses: {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// What it says.
        message: String,
    },
    /// It cannot be reached, or its answer is none.
    #[error("the API server does not answer")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
}

// === impl Cluster ===

impl Cluster {
    /// The node of this name, as it is now. One request.
    pub async fn node(&self, name: &str) -> Result<NodeView, ReadError> {
        let not_found = || ReadError::NotFound {
            name: name.to_owned(),
        };
        if !is_node_name(name) {
            return Err(not_found());
        }
        let request = Request::get(format!("/api/v1/nodes/{name}"))
            .body(Vec::new())
            .map_err(|error| ReadError::Unavailable(error.into()))?;
        let answer = self
            .exchange(Urgency::Act, request)
            .await
            .map_err(ReadError::Unavailable)?;
        if answer.status == 404 {
            return Err(not_found());
        }
        if !answer.status.is_success() {
            let told: Option<Status> = serde_json::from_slice(&answer.body).ok();
            return Err(ReadError::Refused {
                status: answer.status.as_u16(),
                message: told.map_or_else(|| answer.status.to_string(), |told| told.message),
            });
        }
        let object = serde_json::from_slice(&answer.body)
            .map_err(|error| ReadError::Unavailable(error.into()))?;
        NodeView::from_object(object)
            .ok_or_else(|| ReadError::Unavailable("the answer is not a node".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{self, Answer};

    #[tokio::test]
    async fn what_the_answers_mean() {
        let refused = r#"{"kind":"Status","code":403,"message":"not yours"}"#;
        let answers = vec![
            Answer::Now(200, fake::node("n1", 7).to_string()),
            Answer::Now(404, String::new()),
            Answer::Now(403, refused.to_owned()),
            Answer::Now(200, "[]".to_owned()),
        ];
        let (cluster, mut requests) = fake::serve(answers).await;
        let node = cluster.node("n1").await.unwrap();
        assert_eq!(
            (node.name.as_str(), node.resource_version.as_str()),
            ("n1", "7")
        );
        let asked = requests.recv().await.unwrap();
        assert_eq!(
            asked[..2],
            ["GET".to_owned(), "/api/v1/nodes/n1".to_owned()]
        );
        for expected in [
            "the cluster has no node \"n1\"",
            "the API server refuses: not yours",
            "the API server does not answer",
        ] {
            assert_eq!(cluster.node("n1").await.unwrap_err().to_string(), expected);
        }
        // Nothing that could be another path is asked for.
        assert!(matches!(
            cluster.node("../pods").await,
            Err(ReadError::NotFound { .. })
        ));
    }
}
