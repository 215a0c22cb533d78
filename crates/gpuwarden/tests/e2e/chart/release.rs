//! A release of the chart, with the product as its pods would run it.

use anyhow::{Context as _, ensure};
use contract::HealthEvent;
use contract::pod_resources::{
    ClaimResource, ContainerDevices, ContainerResources, DynamicResource,
};
use serde_json::Value;
use testkit::{ControlPlane, Launch, Output, Private, Product, Version, wait_for};

use super::pod::Pod;
use super::{Helm, NAMESPACE, plane};
use crate::pods::Pods;
use crate::support::{SOON, event, send_to, xid};

/// Adds the namespace of the release to the arguments of kubectl.
pub(super) fn in_namespace<'a>(args: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    ["-n", NAMESPACE].into_iter().chain(args).collect()
}

/// A release: its cluster, and the processes of its first controller and of the agent of `gpu-1`.
pub(crate) struct Release {
    pub(crate) plane: Private,
    pub(crate) controller: Product,
    pub(crate) agent: Product,
    address: String,
    /// The data that the next pods find.
    controller_data: Launch,
    agent_data: Launch,
    controller_pod: Pod,
    agent_pod: Pod,
}

impl Release {
    /// Installs the chart with these values, and starts a controller and the agent of `gpu-1`.
    pub(crate) async fn start(
        address: &str,
        values: &[&str],
        more: &[&str],
    ) -> anyhow::Result<Option<Self>> {
        let Some((plane, helm)) = Self::cluster().await? else {
            return Ok(None);
        };
        helm.deploy(values, more).await?;
        Self::of(plane, address).await.map(Some)
    }

    /// Returns a cluster for a release, with Helm.
    pub(super) async fn cluster() -> anyhow::Result<Option<(Private, Helm)>> {
        let Some(plane) = plane(Version::V1_37).await? else {
            return Ok(None);
        };
        let helm = Helm::of(Some(&plane));
        Ok(helm.map(|helm| (plane, helm)))
    }

    /// Starts a controller and the agent of `gpu-1` in a cluster with the chart.
    pub(crate) async fn of(plane: Private, address: &str) -> anyhow::Result<Self> {
        let controller_data = Launch::controller()?;
        let agent_data = Launch::agent()?;
        let (controller_pod, controller) =
            started(&plane, "controller", &controller_data, address).await?;
        // The agent's pod waits for the authority that the controller publishes.
        let (agent_pod, agent) = started(&plane, "agent", &agent_data, address).await?;
        Ok(Self {
            plane,
            controller,
            agent,
            address: address.to_owned(),
            controller_data,
            agent_data,
            controller_pod,
            agent_pod,
        })
    }

    /// Ends both processes, as a roll-out ends its old pods.
    pub(crate) async fn ends(&mut self) -> anyhow::Result<()> {
        for product in [&mut self.controller, &mut self.agent] {
            let (status, _) = product.terminate().await?;
            ensure!(status.success(), "{}", product.failure(&status.to_string()));
        }
        Ok(())
    }

    /// Starts both processes again, as the pods that the cluster has now.
    pub(crate) async fn starts_again(&mut self) -> anyhow::Result<()> {
        for workload in [
            "deployment/gpuwarden-controller",
            "daemonset/gpuwarden-agent",
        ] {
            let status = ["rollout", "status", workload, "--timeout", "60s"];
            self.plane.kubectl(in_namespace(status)).await?;
        }
        let (plane, address) = (&self.plane, self.address.as_str());
        if !self.controller_pod.keeps_data() {
            self.controller_data = Launch::controller()?;
        }
        let data = &self.controller_data;
        (self.controller_pod, self.controller) =
            started(plane, "controller", data, address).await?;
        (self.agent_pod, self.agent) = started(plane, "agent", &self.agent_data, address).await?;
        Ok(())
    }

    /// Runs a client command in the controller's pod, with output for programs.
    pub(super) async fn in_controller(&self, args: &[&str]) -> anyhow::Result<Output> {
        self.in_pod(&self.controller_pod, &self.controller, args)
            .await
    }

    /// Runs a client command in the agent's pod, with output for programs.
    pub(super) async fn in_agent(&self, args: &[&str]) -> anyhow::Result<Output> {
        self.in_pod(&self.agent_pod, &self.agent, args).await
    }

    async fn in_pod(&self, pod: &Pod, product: &Product, args: &[&str]) -> anyhow::Result<Output> {
        // The test has set the data directory of the process.
        let data = product.data_dir().display().to_string();
        let args = [args, &["--data-dir", &data, "-o", "json"]].concat();
        pod.run(&self.plane, &self.address, &args).await
    }

    /// Writes an XID line into the kernel log of the node, and waits until the controller knows it.
    pub(crate) async fn fault(&self, code: u32) -> anyhow::Result<()> {
        self.agent
            .append_kernel_log(&xid(code, "a fault of the test"))?;
        let told = code.to_string();
        wait_for("the fault at the controller", SOON, || async {
            let status = self.controller.client(["status", "-o", "json"]).await;
            let status = status.map_err(|error| error.to_string())?.stdout;
            let status: Value = serde_json::from_str(&status).map_err(|error| error.to_string())?;
            let nodes = status["fleet"]["nodes"].as_array().into_iter().flatten();
            let mut faults = nodes.filter_map(|node| node["faults"].as_array()).flatten();
            if faults.any(|fault| fault["code"] == told.as_str()) {
                Ok(())
            } else {
                Err(self.controller.failure(&status.to_string()).to_string())
            }
        })
        .await
    }

    /// Reports a fault that is not fatal, of this second.
    pub(super) async fn mild(&self, second: i64) -> anyhow::Result<()> {
        let generated = prost_types::Timestamp {
            seconds: 1_800_000_000 + second,
            nanos: 0,
        };
        let mild = HealthEvent {
            is_fatal: false,
            generated_timestamp: Some(generated),
            ..event("gpu-1", "1")
        };
        let count = 1 + second;
        send_to(&self.agent, vec![mild]).await?;
        wait_for("the Event on the node", SOON, || async {
            let path = "jsonpath={.items[*].count}";
            let field = "involvedObject.name=gpu-1,type=Warning";
            let list = ["get", "events", "--field-selector", field, "-o", path];
            match self.plane.kubectl(list).await {
                Ok(counts) if counts.split(' ').any(|it| it == count.to_string()) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }

    /// Waits until the controller has a new certificate.
    pub(super) async fn rotated(&self) -> anyhow::Result<()> {
        wait_for("a new certificate", SOON, || async {
            let log = self.controller.stderr();
            match log.matches("a new certificate is made").count() {
                0 | 1 => Err(log),
                _ => Ok(()),
            }
        })
        .await
    }

    /// Damages the published authority, and waits until the controller has written it again.
    pub(super) async fn authority_returns(&self) -> anyhow::Result<()> {
        let patch = r#"{"data": {"ca.crt": "damaged"}}"#;
        let damage = ["patch", "configmap", "gpuwarden-ca", "-p", patch];
        self.plane.kubectl(in_namespace(damage)).await?;
        wait_for("the authority", SOON, || async {
            let get = ["get", "configmap", "gpuwarden-ca", "-o", "json"];
            match self.plane.kubectl(in_namespace(get)).await {
                Ok(map) if map.contains("BEGIN CERTIFICATE") => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }

    /// Runs a pod on the node whose GPU the kubelet names, and waits for its annotation.
    pub(super) async fn pod_with_a_gpu(&self) -> anyhow::Result<()> {
        let client = self.plane.client().await?;
        testkit::pod("default", "worker")
            .on("gpu-1")
            .create(&client)
            .await?;
        let socket = self
            .agent_pod
            .place("/var/lib/kubelet/pod-resources/kubelet.sock");
        let devices = ContainerDevices {
            resource_name: "nvidia.com/gpu".to_owned(),
            device_ids: vec!["GPU-1".to_owned()],
        };
        // For the GPUs of claims the controller reads the ResourceSlices.
        let claimed = ClaimResource {
            driver_name: "gpu.nvidia.com".to_owned(),
            pool_name: "gpu-1".to_owned(),
            device_name: "gpu-0".to_owned(),
        };
        let claim = DynamicResource {
            claim_name: "gpus".to_owned(),
            claim_namespace: "default".to_owned(),
            claim_resources: vec![claimed],
        };
        let container = ContainerResources {
            devices: vec![devices],
            dynamic_resources: vec![claim],
            ..ContainerResources::default()
        };
        let pods = Pods::default();
        pods.are([("worker".to_owned(), container)]);
        pods.serve(&socket.context("a mount of the kubelet's socket")?)?;
        wait_for("the annotation of the pod", SOON, || async {
            let get = ["get", "pod", "worker", "-o", "json"];
            match self.plane.kubectl(get).await {
                Ok(pod) if pod.contains("dgxc.nvidia.com/devices") => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }

    /// Trips the circuit breaker by the fault of a second node, and waits for its `ConfigMap`.
    pub(super) async fn breaker_trips(&self) -> anyhow::Result<()> {
        send_to(&self.controller, vec![event("gpu-2", "0")]).await?;
        wait_for("the circuit breaker", SOON, || async {
            let get = ["get", "configmap", "circuit-breaker", "-o", "json"];
            match self.plane.kubectl(in_namespace(get)).await {
                Ok(map) if map.contains("TRIPPED") => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }

    /// Marks a GPU, and marks it again. The first mark creates the `ConfigMap`, the other one changes it.
    pub(super) async fn gpu_is_marked(&self) -> anyhow::Result<()> {
        let socket = self.controller.socket().to_str().unwrap().to_owned();
        for mark in ["bad", "good"] {
            let command = [
                "ledger",
                "mark",
                "1655000000017",
                mark,
                "--reason",
                "a test",
            ];
            let command = command.into_iter().chain(["--socket", &socket]);
            self.controller.client(command).await?.expect(0)?;
            wait_for("the mark in the cluster", SOON, || async {
                let get = ["get", "configmap", "gpuwarden", "-o", "json"];
                match self.plane.kubectl(in_namespace(get)).await {
                    Ok(map) if map.contains(&format!(r#"\"kind\":\"{mark}\""#)) => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            })
            .await?;
        }
        Ok(())
    }

    /// Waits until the node is as a test wants it.
    pub(super) async fn node_is(
        &self,
        what: &str,
        is: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<()> {
        self.controller
            .wait_for(what, SOON, || async {
                let node = self.node().await.map_err(|error| error.to_string())?;
                if is(&node) {
                    Ok(())
                } else {
                    Err(node.to_string())
                }
            })
            .await
    }

    /// Waits until the label of the node has this state of a session.
    pub(super) async fn has_state(&self, wanted: &str) -> anyhow::Result<()> {
        self.node_is(wanted, |node| state(node) == wanted).await
    }

    /// Returns the node.
    pub(crate) async fn node(&self) -> anyhow::Result<Value> {
        let node = self
            .plane
            .kubectl(["get", "node", "gpu-1", "-o", "json"])
            .await?;
        Ok(serde_json::from_str(&node)?)
    }
}

/// Returns the state of a session in the label of a node.
pub(super) fn state(node: &Value) -> &Value {
    &node["metadata"]["labels"]["dgxc.nvidia.com/nvsentinel-state"]
}

/// Starts the product as the first pod of a part of the release, on this data.
async fn started(
    plane: &ControlPlane,
    part: &str,
    data: &Launch,
    address: &str,
) -> anyhow::Result<(Pod, Product)> {
    let pod = Pod::of(plane, part).await?;
    let mut launch = data.clone();
    if part == "controller" {
        launch = launch.option("--grpc-listen", format!("{address}:50051"));
    }
    let product = pod.arrange(plane, launch, address)?.start().await?;
    Ok((pod, product))
}
