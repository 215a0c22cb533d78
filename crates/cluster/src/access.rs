//! Who we are in the cluster, what we may do there, and what kind of API server it is.

use http::Request;
use jiff::Timestamp;
use serde_json::json;

use crate::connect::Cluster;
use crate::object::ObjectError;
use crate::pace::Urgency;
use crate::request::REQUEST_TIMEOUT;

const ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
/// Since Kubernetes 1.28.
const SELF_REVIEWS: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";

/// Something that a role can allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access<'a> {
    /// `get`, `list`, `watch`, `create`, `patch` ...
    pub verb: &'a str,
    /// API group; empty for the core group.
    pub group: &'a str,
    /// Resource, plural; with its subresource behind a `/`.
    pub resource: &'a str,
    /// Namespace; `None` for what has none.
    pub namespace: Option<&'a str>,
    /// The one object that is meant; `None` for all.
    pub name: Option<&'a str>,
}

/// What an API server says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// Its version: `v1.37.0`.
    pub version: String,
    /// The second number of the version; `None` where it has none.
    pub minor: Option<u32>,
    /// Its clock, to the second; `None` where its answer does not say.
    pub time: Option<Timestamp>,
}

// === impl Cluster ===

impl Cluster {
    /// Whether we may do this, as the API server sees it (`SelfSubjectAccessReview`). Asking
    /// needs no permission.
    pub async fn may(&self, access: Access<'_>) -> Result<bool, ObjectError> {
        let (resource, subresource) = access
            .resource
            .split_once('/')
            .unwrap_or((access.resource, ""));
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {
                "verb": access.verb,
                "group": access.group,
                "resource": resource,
                "subresource": subresource,
                "namespace": access.namespace.unwrap_or_default(),
                "name": access.name.unwrap_or_default(),
            }},
        });
        let answer = self
            .create_object(ACCESS_REVIEWS, &review, REQUEST_TIMEOUT)
            .await?;
        Ok(answer["status"]["allowed"] == true)
    }

    /// The name by which the API server knows us (`SelfSubjectReview`). Asking needs no
    /// permission.
    pub async fn own_name(&self) -> Result<String, ObjectError> {
        let review = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "SelfSubjectReview",
        });
        let answer = self
            .create_object(SELF_REVIEWS, &review, REQUEST_TIMEOUT)
            .await?;
        let name = answer["status"]["userInfo"]["username"].as_str();
        name.map(str::to_owned)
            .ok_or_else(|| ObjectError::unavailable("the answer names nobody"))
    }

    /// What the API server says of itself. One request, which also shows that it can be
    /// reached.
    pub async fn server_info(&self) -> Result<ServerInfo, ObjectError> {
        let request = Request::get("/version")
            .body(Vec::new())
            .map_err(ObjectError::unavailable)?;
        let reply = self.exchange(Urgency::Act, request).await;
        let reply = reply.map_err(ObjectError::unavailable)?;
        if !reply.status.is_success() {
            return Err(ObjectError::from_answer(reply.status, &reply.body));
        }
        let told: serde_json::Value =
            serde_json::from_slice(&reply.body).map_err(ObjectError::unavailable)?;
        let text = |key: &str| told[key].as_str().unwrap_or_default();
        // Managed clusters write "37+".
        let minor = text("minor").trim_end_matches('+').parse().ok();
        Ok(ServerInfo {
            version: text("gitVersion").to_owned(),
            minor,
            time: reply.date,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Answer, serve};

    #[tokio::test]
    async fn what_the_api_server_allows_is_what_it_says() {
        let review = |allowed: bool| json!({"status": {"allowed": allowed}}).to_string();
        let answers = vec![
            Answer::Now(201, review(true)),
            Answer::Now(201, review(false)),
            Answer::Now(500, String::new()),
            Answer::Now(
                201,
                json!({"status": {"userInfo": {"username": "ops"}}}).to_string(),
            ),
        ];
        let (cluster, mut requests) = serve(answers).await;
        let access = Access {
            verb: "patch",
            group: "",
            resource: "nodes/status",
            namespace: None,
            name: None,
        };
        assert!(cluster.may(access).await.unwrap());
        assert!(!cluster.may(access).await.unwrap());
        assert!(matches!(
            cluster.may(access).await,
            Err(ObjectError::Unavailable { .. })
        ));
        let [method, path, _] = requests.recv().await.unwrap();
        assert_eq!((method.as_str(), path.as_str()), ("POST", ACCESS_REVIEWS));
        assert_eq!(cluster.own_name().await.unwrap(), "ops");
    }

    #[tokio::test]
    async fn version_and_clock_are_those_of_the_answer() {
        let version = json!({"gitVersion": "v1.33.2-gke.1", "minor": "33+"}).to_string();
        let answers = vec![
            Answer::Now(200, version),
            Answer::Now(401, "Unauthorized".into()),
        ];
        let (cluster, _) = serve(answers).await;
        let info = cluster.server_info().await.unwrap();
        assert_eq!(
            (info.version.as_str(), info.minor),
            ("v1.33.2-gke.1", Some(33))
        );
        let there = info.time.unwrap();
        assert!(Timestamp::now().duration_since(there).abs().as_secs() < 60);
        let refused = cluster.server_info().await.unwrap_err().to_string();
        assert_eq!(refused, "refused: Unauthorized");
    }
}
