//! Requests for this client's own name and permissions, and for the version and clock of the API
//! server.

use http::Request;
use http::header::DATE;
use http_body_util::BodyExt as _;
use jiff::Timestamp;
use jiff::fmt::rfc2822;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::apimachinery::pkg::version::Info;
use kube::Api;
use kube::api::PostParams;
use kube::client::Body;

use crate::connect::Cluster;
use crate::error::ApiError;
use crate::pace::Urgency;

/// A permission that a role can grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access<'a> {
    /// Verb, such as `get`, `list`, `watch`, `create` or `patch`.
    pub verb: &'a str,
    /// API group; empty for the core group.
    pub group: &'a str,
    /// Resource, plural; a subresource follows after a `/`.
    pub resource: &'a str,
    /// Namespace; `None` for cluster-scoped resources.
    pub namespace: Option<&'a str>,
    /// Name of the object; `None` for all.
    pub name: Option<&'a str>,
}

/// Version and clock of the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// Version, such as `v1.37.0`.
    pub version: String,
    /// Minor version; `None` if it is not a number.
    pub minor: Option<u32>,
    /// Clock of the API server, to the second; `None` if the answer has no `Date`.
    pub time: Option<Timestamp>,
}

// === impl Cluster ===

impl Cluster {
    /// Returns true if the API server allows this client an access (`SelfSubjectAccessReview`).
    /// Takes no permission.
    pub async fn may(&self, access: Access<'_>) -> Result<bool, ApiError> {
        let (resource, subresource) = access
            .resource
            .split_once('/')
            .unwrap_or((access.resource, ""));
        let attributes = ResourceAttributes {
            verb: Some(access.verb.to_owned()),
            group: Some(access.group.to_owned()),
            resource: Some(resource.to_owned()),
            subresource: Some(subresource.to_owned()),
            namespace: access.namespace.map(str::to_owned),
            name: access.name.map(str::to_owned),
            ..ResourceAttributes::default()
        };
        let review = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(attributes),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        };
        let reviews = Api::all(self.client(Urgency::Act));
        let answer = reviews.create(&PostParams::default(), &review).await?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }

    /// Returns the user name that the API server has for this client (`SelfSubjectReview`, since
    /// Kubernetes 1.28). Takes no permission.
    pub async fn own_name(&self) -> Result<String, ApiError> {
        let reviews = Api::all(self.client(Urgency::Act));
        let review = SelfSubjectReview::default();
        let answer = reviews.create(&PostParams::default(), &review).await?;
        let user = answer.status.and_then(|status| status.user_info);
        user.and_then(|user| user.username)
            .ok_or_else(|| ApiError::unavailable("the answer names nobody"))
    }

    /// Returns the version and clock of the API server. One request, which also shows that the
    /// server can be reached.
    pub async fn server_info(&self) -> Result<ServerInfo, ApiError> {
        let request = Request::get("/version").body(Body::empty());
        let request = request.map_err(kube::Error::HttpError)?;
        let (head, body) = self.client(Urgency::Act).send(request).await?.into_parts();
        let date = head.headers.get(DATE).and_then(|value| value.to_str().ok());
        let body = body.collect().await?.to_bytes();
        let info: Info = serde_json::from_slice(&body).map_err(ApiError::unavailable)?;
        Ok(ServerInfo {
            // Managed clusters append a `+`, as in "37+".
            minor: info.minor.trim_end_matches('+').parse().ok(),
            version: info.git_version,
            time: date.and_then(|text| Some(rfc2822::parse(text).ok()?.timestamp())),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fake::{FakeAnswer, serve};

    #[tokio::test]
    async fn what_the_api_server_allows_is_what_it_says() {
        let review = |allowed: bool| json!({"status": {"allowed": allowed}}).to_string();
        let answers = vec![
            FakeAnswer::Now(201, review(true)),
            FakeAnswer::Now(201, review(false)),
            FakeAnswer::Now(500, String::new()),
            FakeAnswer::Now(
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
            Err(ApiError::Unavailable { .. })
        ));
        let reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let [method, path, _] = requests.recv().await.unwrap();
        assert_eq!((method.as_str(), path.as_str()), ("POST", reviews));
        assert_eq!(cluster.own_name().await.unwrap(), "ops");
    }

    #[tokio::test]
    async fn version_and_clock_are_those_of_the_answer() {
        let version = json!({"gitVersion": "v1.33.2-gke.1", "minor": "33+"}).to_string();
        let answers = vec![
            FakeAnswer::Now(200, version),
            FakeAnswer::Now(401, "Unauthorized".into()),
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
        assert_eq!(refused, "not allowed: Unauthorized");
    }
}
