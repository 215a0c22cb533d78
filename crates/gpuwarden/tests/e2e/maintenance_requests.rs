//! `MaintenanceRequest` objects, with a product that is killed after every step.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Version};

use crate::group::Group;
use crate::support::SOON;

const CRD: &str = include_str!("../../../../deploy/helm/gpuwarden/crds/maintenancerequests.yaml");
const CONFIG: &str = "clusterName = 'test'\nrequests = true\n";

/// Requests for the nodes of a group.
struct Requests {
    group: Group,
    requests: Api<DynamicObject>,
}

impl Requests {
    async fn new(
        plane: &ControlPlane,
        launch: impl FnOnce(Launch) -> Launch,
    ) -> anyhow::Result<Self> {
        let client = plane.client().await?;
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        let crd: CustomResourceDefinition = serde_saphyr::from_str(CRD)?;
        crds.create(&PostParams::default(), &crd).await?;
        let kind = GroupVersionKind::gvk("nvsentinel.dgxc.nvidia.com", "v1", "MaintenanceRequest");
        let resource = ApiResource::from_gvk_with_plural(&kind, "maintenancerequests");
        let requests: Api<DynamicObject> = Api::all_with(client, &resource);
        let served = || async { requests.list(&ListParams::default()).await.map(drop) };
        testkit::wait_for("the kind", SOON, || async {
            served().await.map_err(|error| error.to_string())
        })
        .await?;
        Ok(Self {
            group: Group::new(plane, 1, |_, node| node, launch).await?,
            requests,
        })
    }

    async fn creates(&mut self, name: &str, event: Value) -> anyhow::Result<()> {
        let object = serde_json::from_value(json!({
            "apiVersion": "nvsentinel.dgxc.nvidia.com/v1", "kind": "MaintenanceRequest",
            "metadata": {"name": name}, "spec": {"healthEvent": event},
        }))?;
        self.requests
            .create(&PostParams::default(), &object)
            .await?;
        self.group.kill().await
    }

    /// Creates a request for the node.
    async fn asks(&mut self, name: &str) -> anyhow::Result<()> {
        let event = json!({
            "version": 1, "agent": "my-tool", "componentClass": "Node",
            "checkName": "PlannedMaintenance", "nodeName": self.group.names[0],
            "isHealthy": false, "isFatal": false, "recommendedAction": "NONE",
            "message": "a disk is replaced",
        });
        self.creates(name, event).await
    }

    async fn deletes(&mut self, name: &str) -> anyhow::Result<()> {
        self.requests.delete(name, &DeleteParams::default()).await?;
        self.group.kill().await
    }

    /// Waits until the condition of a request is this.
    async fn says(&self, name: &str, status: &str, reason: &str) -> anyhow::Result<()> {
        let is = || async {
            let object = self.requests.get(name).await?;
            let condition = &object.data["status"]["conditions"][0];
            let found = [&condition["status"], &condition["reason"]];
            anyhow::ensure!(found == [status, reason], "{condition}");
            Ok(())
        };
        let what = format!("{name} to be {reason}");
        self.group.product.wait_for(&what, SOON, is).await
    }

    async fn is_gone(&self, name: &str) -> anyhow::Result<()> {
        let gone = || async {
            match self.requests.get_opt(name).await {
                Ok(None) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        };
        self.group
            .product
            .wait_for("the deletion", SOON, gone)
            .await
    }

    /// Returns the events of the requests: the name of the request, and whether it is healthy.
    async fn events(&self) -> anyhow::Result<Vec<(String, bool)>> {
        let events = self.group.events().await?.into_iter();
        let own = events.filter(|event| event["agent"] == "lifecycle-manager");
        let told = own.map(|event| {
            let name = event["metadata"]["maintenanceRequestName"].as_str();
            (
                name.unwrap_or_default().to_owned(),
                event["isHealthy"] == true,
            )
        });
        Ok(told.collect())
    }
}

#[tokio::test]
async fn a_node_is_out_while_a_request_for_it_exists() -> anyhow::Result<()> {
    // One of its own: the CustomResourceDefinition is for all.
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), CONFIG)?;
    let launch = |launch: Launch| launch.quarantine().option("--maintenance", file.path());
    let mut world = Requests::new(&plane, launch).await?;
    let node = world.group.names.clone();

    world.asks("first").await?;
    world.group.until_out(&node).await?;
    world.says("first", "True", "Emitted").await?;
    world.asks("second").await?;
    world.says("second", "False", "Blocked").await?;
    let no_event = json!({"nodeName": node[0], "isFatal": "perhaps"});
    world.creates("third", no_event).await?;
    world.says("third", "False", "Invalid").await?;

    world.deletes("first").await?;
    world.is_gone("first").await?;
    world.says("second", "True", "Emitted").await?;
    world.group.until_out(&node).await?;
    world.deletes("second").await?;
    world.is_gone("second").await?;
    world.group.until_out(&[]).await?;
    world.deletes("third").await?;
    world.is_gone("third").await?;
    let told = |name: &str, healthy| (name.to_owned(), healthy);
    assert_eq!(
        world.events().await?,
        [
            told("first", false),
            told("first", true),
            told("second", false),
            told("second", true),
        ]
    );
    Ok(())
}
