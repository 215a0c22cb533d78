//! Single reads of objects that are watched elsewhere, with the permissions of the watches:
//! `list`, and for one object only by its name.

use k8s_openapi::api::core::v1::{ConfigMap as Object, Namespace, Node};
use kube::Api;
use kube::api::ListParams;
use kube::core::{ObjectList, PartialObjectMeta, Request};
use model::node::NodeView;
use serde::Deserialize;

use crate::apply::NODES;
use crate::config_map::ConfigMap;
use crate::connect::Cluster;
use crate::error::{ApiError, found};
use crate::pace::Urgency;
use crate::request::ask;

/// A list of nodes.
#[derive(Deserialize)]
struct Nodes {
    items: Vec<NodeView>,
}

// === impl Cluster ===

impl Cluster {
    /// Returns the node of a name; `None` if it does not exist.
    pub async fn find_node(&self, name: &str) -> Result<Option<NodeView>, ApiError> {
        let request = Request::new(NODES).list(&named(name));
        let found: Nodes = ask(&self.client(Urgency::Act), request).await?;
        Ok(found.items.into_iter().next())
    }

    /// Returns true if a label selector, such as `key` or `key=value`, selects any node.
    pub async fn any_node_with(&self, labels: &str) -> Result<bool, ApiError> {
        let params = ListParams::default().labels(labels);
        Ok(!self.some_nodes(params).await?.items.is_empty())
    }

    /// Returns the number of nodes.
    pub async fn count_nodes(&self) -> Result<u64, ApiError> {
        let first = self.some_nodes(ListParams::default()).await?;
        let rest = first.metadata.remaining_item_count.unwrap_or(0);
        Ok(first.items.len() as u64 + u64::try_from(rest).unwrap_or(0))
    }

    /// Returns the names of all nodes.
    pub async fn node_names(&self) -> Result<Vec<String>, ApiError> {
        let nodes: Api<Node> = Api::all(self.client(Urgency::Act));
        let listed = nodes.list_metadata(&ListParams::default()).await?;
        let names = listed.items.into_iter();
        Ok(names.filter_map(|node| node.metadata.name).collect())
    }

    /// Returns a `ConfigMap`; `None` if it or its namespace does not exist.
    pub async fn find_config_map(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<ConfigMap>, ApiError> {
        let maps: Api<Object> = Api::namespaced(self.client(Urgency::Act), namespace);
        let found = maps.list(&named(name)).await?;
        Ok(found.items.into_iter().next().map(ConfigMap::from))
    }

    /// Returns true if the namespace exists.
    pub async fn has_namespace(&self, name: &str) -> Result<bool, ApiError> {
        let namespaces: Api<Namespace> = Api::all(self.client(Urgency::Act));
        Ok(found(namespaces.get_metadata(name).await)?.is_some())
    }

    /// Lists the metadata of at most one node, and the number of the others.
    async fn some_nodes(
        &self,
        params: ListParams,
    ) -> Result<ObjectList<PartialObjectMeta<Node>>, ApiError> {
        let nodes: Api<Node> = Api::all(self.client(Urgency::Act));
        Ok(nodes.list_metadata(&params.limit(1)).await?)
    }
}

fn named(name: &str) -> ListParams {
    ListParams::default()
        .fields(&format!("metadata.name={name}"))
        .limit(1)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fake::{FakeAnswer, node, serve};

    #[tokio::test]
    async fn one_is_asked_for_by_name_or_label_and_may_be_missing() {
        let list = |items: &[Value]| FakeAnswer::Now(200, json!({"items": items}).to_string());
        let map = json!({"metadata": {"name": "m", "resourceVersion": "1"}, "data": {"k": "v"}});
        let answers = vec![
            list(&[node("n 1", 7)]),
            list(&[]),
            list(&[node("n1", 7)]),
            list(&[map]),
            list(&[]),
            FakeAnswer::Now(403, "not yours".into()),
            FakeAnswer::Now(404, String::new()),
            list(&[]),
            list(&[node("n1", 7)]),
            FakeAnswer::Now(
                200,
                json!({"items": [node("n1", 7)], "metadata": {"remainingItemCount": 49}})
                    .to_string(),
            ),
        ];
        let (cluster, mut requests) = serve(answers).await;
        let found = cluster.find_node("n 1").await.unwrap();
        assert_eq!(found.unwrap().name, "n 1");
        assert_eq!(cluster.find_node("n2").await.unwrap(), None);
        assert!(cluster.any_node_with("a.b/c=true").await.unwrap());
        let map = cluster.find_config_map("ns", "m").await.unwrap().unwrap();
        assert_eq!(map.data["k"], "v");
        assert_eq!(cluster.find_config_map("ns", "m").await.unwrap(), None);
        assert!(matches!(
            cluster.find_config_map("ns", "m").await,
            Err(ApiError::Forbidden { status: 403, .. })
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
                "/api/v1/nodes?&fieldSelector=metadata.name%3Dn+1&limit=1",
                "/api/v1/nodes?&fieldSelector=metadata.name%3Dn2&limit=1",
                "/api/v1/nodes?&labelSelector=a.b%2Fc%3Dtrue&limit=1",
            ]
        );
    }
}
