//! One look at what is watched otherwise, with the permissions of the watches: `list`, and
//! where one object is meant, of its name only.

use domain::brake::NodeLabel;
use domain::node::NodeView;
use serde_json::Value;

use crate::config_map::{ConfigMap, path};
use crate::connect::Cluster;
use crate::object::ObjectError;
use crate::request::REQUEST_TIMEOUT;

const NODES: &str = "/api/v1/nodes";

// === impl Cluster ===

impl Cluster {
    /// The node of this name; `None` where there is none.
    pub async fn find_node(&self, name: &str) -> Result<Option<NodeView>, ObjectError> {
        let selector = format!("metadata.name={name}");
        let found = self.first(NODES, "fieldSelector", &selector).await?;
        let read = |object| {
            NodeView::from_object(object)
                .ok_or_else(|| ObjectError::unavailable("the answer is not a node"))
        };
        found.map(read).transpose()
    }

    /// Whether any node has this label.
    pub async fn any_node_with(&self, label: &NodeLabel) -> Result<bool, ObjectError> {
        let found = self
            .first(NODES, "labelSelector", &label.to_string())
            .await?;
        Ok(found.is_some())
    }

    /// How many nodes there are.
    pub async fn count_nodes(&self) -> Result<u64, ObjectError> {
        let path = format!("{NODES}?limit=1");
        let answer = self.get_object(&path, REQUEST_TIMEOUT).await?;
        let first = answer["items"].as_array().map_or(0, Vec::len) as u64;
        let rest = answer["metadata"]["remainingItemCount"].as_u64();
        Ok(first + rest.unwrap_or(0))
    }

    /// The `ConfigMap` of this name; `None` where there is none, or no such namespace.
    pub async fn find_config_map(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<ConfigMap>, ObjectError> {
        let selector = format!("metadata.name={name}");
        let found = self
            .first(&path(namespace), "fieldSelector", &selector)
            .await?;
        let read = |object: Value| {
            ConfigMap::from_object(&object)
                .ok_or_else(|| ObjectError::unavailable("the answer is not a ConfigMap"))
        };
        found.map(read).transpose()
    }

    /// Whether the namespace exists.
    pub async fn has_namespace(&self, name: &str) -> Result<bool, ObjectError> {
        let path = format!("/api/v1/namespaces/{}", encoded(name));
        match self.get_object(&path, REQUEST_TIMEOUT).await {
            Ok(_) => Ok(true),
            Err(ObjectError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn first(
        &self,
        list: &str,
        kind: &str,
        selector: &str,
    ) -> Result<Option<Value>, ObjectError> {
        let path = format!("{list}?limit=1&{kind}={}", encoded(selector));
        let mut answer = self.get_object(&path, REQUEST_TIMEOUT).await?;
        Ok(answer.pointer_mut("/items/0").map(Value::take))
    }
}

/// As a part of a URL (RFC 3986, section 2.3).
fn encoded(text: &str) -> String {
    let letter = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(letter).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fake::{Answer, node, serve};

    #[tokio::test]
    async fn one_is_asked_for_by_name_or_label_and_may_be_missing() {
        let list = |items: &[Value]| Answer::Now(200, json!({"items": items}).to_string());
        let map = json!({"metadata": {"name": "m", "resourceVersion": "1"}, "data": {"k": "v"}});
        let answers = vec![
            list(&[node("n 1", 7)]),
            list(&[]),
            list(&[node("n1", 7)]),
            list(&[map]),
            list(&[]),
            Answer::Now(403, "not yours".into()),
            Answer::Now(404, String::new()),
            list(&[]),
            list(&[node("n1", 7)]),
            Answer::Now(
                200,
                json!({"items": [node("n1", 7)], "metadata": {"remainingItemCount": 49}})
                    .to_string(),
            ),
        ];
        let (cluster, mut requests) = serve(answers).await;
        let found = cluster.find_node("n 1").await.unwrap();
        assert_eq!(found.unwrap().name, "n 1");
        assert_eq!(cluster.find_node("n2").await.unwrap(), None);
        let label = NodeLabel::parse("a.b/c=true").unwrap();
        assert!(cluster.any_node_with(&label).await.unwrap());
        let map = cluster.find_config_map("ns", "m").await.unwrap().unwrap();
        assert_eq!(map.data["k"], "v");
        assert_eq!(cluster.find_config_map("ns", "m").await.unwrap(), None);
        assert!(matches!(
            cluster.find_config_map("ns", "m").await,
            Err(ObjectError::Refused { status: 403, .. })
        ));
        assert!(!cluster.has_namespace("ns").await.unwrap());
        for expected in [0, 1, 50] {
            assert_eq!(cluster.count_nodes().await.unwrap(), expected);
        }
        let mut paths = Vec::new();
        while let Ok([_, path, _]) = requests.try_recv() {
            paths.push(path);
        }
        assert_eq!(
            paths[..3],
            [
                "/api/v1/nodes?limit=1&fieldSelector=metadata.name%3Dn%201",
                "/api/v1/nodes?limit=1&fieldSelector=metadata.name%3Dn2",
                "/api/v1/nodes?limit=1&labelSelector=a.b%2Fc%3Dtrue",
            ]
        );
    }
}
