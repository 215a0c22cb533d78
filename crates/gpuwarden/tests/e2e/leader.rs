//! Two controllers of one cluster: one leads, and the other takes over.

use std::time::Duration;

use anyhow::Context as _;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Private, Product, Program, Version, unique};

use crate::support::{SOON, event, object, own_port, recovery, send, send_to, shape};

/// Duration of a Lease, plus a poll of the standby, plus the delay of a very busy machine.
pub(crate) const EXPIRY: Duration = Duration::from_secs(15 + 2 + SOON.as_secs());
/// Exit code of a controller that has lost the lead.
const DEPOSED: Option<i32> = Some(3);

/// A cluster with the product's namespace.
struct Cluster {
    plane: Private,
    nodes: Api<Node>,
}

impl Cluster {
    async fn new() -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
            return Ok(None);
        };
        let client = plane.client().await?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let namespace = json!({"metadata": {"name": "gpuwarden"}});
        namespaces
            .create(&PostParams::default(), &serde_json::from_value(namespace)?)
            .await?;
        Ok(Some(Self {
            plane,
            nodes: Api::all(client),
        }))
    }

    /// Creates a node. Returns its name and its shape.
    async fn node(&self) -> anyhow::Result<(String, Value)> {
        let name = unique("led");
        testkit::node(&name)
            .create(&self.plane.client().await?)
            .await?;
        let marked = || async {
            let node = object(&self.nodes, &name).await;
            let node = node.map_err(|error| error.to_string())?;
            if node["metadata"]["annotations"]["node.alpha.kubernetes.io/ttl"].is_string() {
                Ok(shape(&node))
            } else {
                Err(node.to_string())
            }
        };
        let before = testkit::wait_for("the controller manager's marks", SOON, marked).await?;
        Ok((name, before))
    }

    async fn controller(&self) -> anyhow::Result<Product> {
        self.controller_at(0).await
    }

    /// Returns a controller that listens for agents on this port while it leads.
    async fn controller_at(&self, port: u16) -> anyhow::Result<Product> {
        Launch::controller()?
            .kubeconfig(self.plane.kubeconfig())
            .quarantine()
            .arg("--grpc-insecure")
            .option("--grpc-listen", format!("127.0.0.1:{port}"))
            .start()
            .await
    }

    async fn cordoned(&self, by: &Product, name: &str) -> anyhow::Result<()> {
        by.wait_for("the cordon", SOON, || async {
            let node = object(&self.nodes, name).await;
            let node = node.map_err(|error| error.to_string())?;
            // The controller manager adds a taint to the node.
            let tainted = node["spec"]["taints"].is_array();
            if node["spec"]["unschedulable"] == true && tainted {
                Ok(())
            } else {
                Err(shape(&node).to_string())
            }
        })
        .await
    }

    async fn restored(&self, by: &Product, name: &str, before: &Value) -> anyhow::Result<()> {
        by.wait_for("the node as it was before", SOON, || async {
            let node = object(&self.nodes, name).await;
            let now = shape(&node.map_err(|error| error.to_string())?);
            if now == *before {
                Ok(())
            } else {
                Err(now.to_string())
            }
        })
        .await
    }

    /// Waits until a node's agent has delivered all events, with `changes` more changes of
    /// store.
    async fn brought(&self, agent: &Product, changes: u64) -> anyhow::Result<()> {
        agent
            .wait_for("the agent to be rid of all", SOON, || async {
                let output = agent.client(["status", "-o", "json"]).await;
                let status = output
                    .and_then(|output| Ok(serde_json::from_str::<Value>(&output.stdout)?))
                    .map_err(|error| format!("{error:#}"))?;
                let delivery = &status["delivery"];
                let waits = status["store"]["events"] != 0 || delivery["failing"].is_string();
                if delivery["storeChanges"] == changes && !waits && delivery["kept"] != 0 {
                    Ok(())
                } else {
                    Err(status.to_string())
                }
            })
            .await
    }

    async fn lease(&self) -> anyhow::Result<Value> {
        let leases: Api<Lease> = Api::namespaced(self.plane.client().await?, "gpuwarden");
        let lease = leases.get("gpuwarden-controller").await?;
        Ok(serde_json::to_value(lease)?["spec"].clone())
    }

    async fn holder(&self) -> anyhow::Result<Value> {
        Ok(self.lease().await?["holderIdentity"].clone())
    }
}

async fn leadership(product: &Product) -> Result<Value, String> {
    let output = product.client(["status", "-o", "json"]).await;
    let status = output
        .and_then(|output| Ok(serde_json::from_str::<Value>(&output.stdout)?))
        .map_err(|error| format!("{error:#}"))?;
    Ok(status["leadership"].clone())
}

/// Waits until a product leads and acts.
pub(crate) async fn leads(product: &Product, limit: Duration) -> anyhow::Result<()> {
    product
        .wait_for("it to lead", limit, || async {
            let seen = leadership(product).await?;
            let ready = product.get("/readyz").await;
            match ready {
                Ok(ready) if seen["leads"] == true && ready == "ready\n" => Ok(()),
                ready => Err(format!("{seen} {ready:?}")),
            }
        })
        .await
}

/// Waits until a product stands by for `leader`.
pub(crate) async fn stands_by(product: &Product, leader: &Product) -> anyhow::Result<()> {
    let leader = leadership(leader).await.map_err(anyhow::Error::msg)?;
    let leader = leader["identity"].as_str().unwrap_or_default();
    product
        .wait_for("it to stand by", SOON, || async {
            let ready = product.get("/readyz").await;
            let ready = ready.map_err(|error| error.to_string())?;
            if ready == format!("standby: {leader} leads\n") {
                Ok(())
            } else {
                Err(ready)
            }
        })
        .await
}

#[tokio::test]
async fn one_of_two_controllers_acts_and_the_other_takes_over() -> anyhow::Result<()> {
    let Some(cluster) = Cluster::new().await? else {
        return Ok(());
    };
    let (name, before) = cluster.node().await?;
    let mut first = cluster.controller().await?;
    leads(&first, SOON).await?;
    let mut second = cluster.controller().await?;
    stands_by(&second, &first).await?;
    let metric = |value: u32| {
        format!("leader_election_master_status{{name=\"gpuwarden-controller\"}} {value}\n")
    };
    for (product, value) in [(&first, 1), (&second, 0)] {
        let metrics = product.get("/metrics").await?;
        assert!(metrics.contains(&metric(value)), "{metrics}");
    }
    assert_eq!(second.get("/healthz").await?, "ok\n");
    let shown = second.client(["status"]).await?;
    assert!(shown.expect(1)?.contains("this process stands by"));
    // A standby has neither store nor socket, so it cannot receive events.
    assert!(!second.socket().exists());
    assert!(!second.data_dir().join("events.db").exists());

    send_to(&first, vec![event(&name, "0")]).await?;
    cluster.cordoned(&first, &name).await?;
    // After an orderly shutdown the Lease is released, and the other one need not wait for its
    // expiry.
    second.stop().await?;
    let (exit, _) = first.terminate().await?;
    assert!(exit.success(), "{exit} {}", first.stderr());
    assert_eq!(cluster.holder().await?, "");
    second.cont()?;
    // The new leader takes over the node's session.
    leads(&second, SOON).await?;
    send_to(&second, vec![recovery(&name, "0")]).await?;
    cluster.restored(&second, &name, &before).await?;

    // After a kill, the Lease has to expire.
    first.restart().await?;
    stands_by(&first, &second).await?;
    second.kill9()?;
    let held = cluster.lease().await?;
    leads(&first, EXPIRY).await?;
    let taken = cluster.lease().await?;
    assert_ne!(taken["holderIdentity"], held["holderIdentity"]);
    let at = |lease: &Value, field: &str| lease[field].as_str().map(str::parse::<Timestamp>);
    let last = at(&held, "renewTime").context("a renewal")??;
    let acquired = at(&taken, "acquireTime").context("a taking over")??;
    let duration = held["leaseDurationSeconds"].as_i64().context("an age")?;
    assert!(
        acquired.duration_since(last).as_secs() >= duration,
        "{held} {taken}"
    );
    send_to(&first, vec![event(&name, "0")]).await?;
    cluster.cordoned(&first, &name).await
}

#[tokio::test]
async fn who_was_stopped_or_cut_off_makes_no_write_and_ends() -> anyhow::Result<()> {
    let Some(cluster) = Cluster::new().await? else {
        return Ok(());
    };
    let (name, _) = cluster.node().await?;
    let (untouched, before) = cluster.node().await?;
    let mut first = cluster.controller().await?;
    leads(&first, SOON).await?;
    let mut second = cluster.controller().await?;
    stands_by(&second, &first).await?;

    // A stopped process, as on a hanging machine. Both get one fault; the stopped one also gets
    // a fault of another node, which it finds when it resumes.
    first.stop().await?;
    leads(&second, EXPIRY).await?;
    let late = vec![event(&name, "0"), event(&untouched, "0")];
    let socket = first.socket().to_owned();
    let brought = tokio::spawn(async move { send(&socket, late).await });
    send_to(&second, vec![event(&name, "0")]).await?;
    cluster.cordoned(&second, &name).await?;
    let whole = object(&cluster.nodes, &name).await?;
    first.cont()?;
    let exit = first.wait_exit(SOON).await?;
    assert_eq!(exit.code(), DEPOSED, "{}", first.stderr());
    assert!(first.stderr().contains("this process stops acting"));
    brought.abort();
    // The deposed one has written no field of either node, and the other one holds the Lease.
    let now = object(&cluster.nodes, &name).await?;
    assert_eq!(shape(&now), shape(&whole));
    let now = object(&cluster.nodes, &untouched).await?;
    assert_eq!(shape(&now), before);
    let leader = leadership(&second).await.map_err(anyhow::Error::msg)?;
    assert_eq!(cluster.holder().await?, leader["identity"]);

    // Restarted by its supervisor, it stands by.
    first.restart().await?;
    stands_by(&first, &second).await?;

    // During an outage of the API server, the leader ends before its Lease expires.
    cluster.plane.kill(Program::ApiServer)?;
    let exit = second.wait_exit(EXPIRY).await?;
    assert_eq!(exit.code(), DEPOSED, "{}", second.stderr());
    assert!(second.stderr().contains("could not be renewed for 10 s"));
    cluster.plane.restart(Program::ApiServer)?;
    cluster.plane.wait_ready().await?;
    leads(&first, EXPIRY).await
}

async fn agent(node: &str, port: u16) -> anyhow::Result<Product> {
    Launch::agent()?
        .node_name(node)
        .option("--controller", format!("http://127.0.0.1:{port}"))
        .start()
        .await
}

#[tokio::test]
async fn a_fault_that_only_the_leader_before_has_is_acted_on_by_the_next() -> anyhow::Result<()> {
    let Some(cluster) = Cluster::new().await? else {
        return Ok(());
    };
    let (name, before) = cluster.node().await?;
    // A port of the leader, whichever it is: as behind a Kubernetes Service.
    let place = own_port()?;
    let port = place.local_addr()?.port();
    let mut first = cluster.controller_at(port).await?;
    leads(&first, SOON).await?;
    let second = cluster.controller_at(port).await?;
    stands_by(&second, &first).await?;
    let agent = agent(&name, port).await?;

    // Without the API server the leader still receives events, and cannot act on them.
    cluster.plane.stop(Program::ApiServer)?;
    send_to(&agent, vec![event(&name, "0")]).await?;
    cluster.brought(&agent, 0).await?;
    first.kill9()?;
    cluster.plane.cont(Program::ApiServer)?;
    leads(&second, EXPIRY + SOON).await?;
    // The node reports no new events.
    cluster.cordoned(&second, &name).await?;
    cluster.brought(&agent, 1).await?;
    send_to(&agent, vec![recovery(&name, "0")]).await?;
    cluster.restored(&second, &name, &before).await
}

#[tokio::test]
async fn a_leader_that_comes_back_does_not_act_on_what_is_over() -> anyhow::Result<()> {
    let Some(cluster) = Cluster::new().await? else {
        return Ok(());
    };
    let (name, before) = cluster.node().await?;
    let (other, _) = cluster.node().await?;
    // A port of the leader, whichever it is: as behind a Kubernetes Service.
    let place = own_port()?;
    let port = place.local_addr()?.port();
    let mut first = cluster.controller_at(port).await?;
    leads(&first, SOON).await?;
    let mut second = cluster.controller_at(port).await?;
    stands_by(&second, &first).await?;
    let (agent, others) = (agent(&name, port).await?, agent(&other, port).await?);
    send_to(&agent, vec![event(&name, "0")]).await?;
    cluster.cordoned(&first, &name).await?;
    send_to(&others, vec![event(&other, "0")]).await?;
    cluster.cordoned(&first, &other).await?;

    // The other one leads, and takes over the first one's session. It alone receives the
    // recovery of one node; the other node stays quarantined.
    first.terminate().await?;
    leads(&second, SOON).await?;
    cluster.brought(&agent, 1).await?;
    send_to(&agent, vec![recovery(&name, "0")]).await?;
    cluster.restored(&second, &name, &before).await?;
    cluster.cordoned(&second, &other).await?;
    // An agent without events asks every ten seconds which controller leads.
    cluster.brought(&others, 1).await?;

    // The first one returns: in its store, the recovered fault is still open.
    first.restart().await?;
    stands_by(&first, &second).await?;
    second.terminate().await?;
    leads(&first, SOON).await?;
    cluster.brought(&agent, 2).await?;
    cluster.brought(&others, 2).await?;
    let node = object(&cluster.nodes, &name).await?;
    assert_eq!(shape(&node), before);
    // The first one acts on new faults, ...
    send_to(&agent, vec![event(&name, "1")]).await?;
    cluster.cordoned(&first, &name).await?;
    let out = object(&cluster.nodes, &name).await?;
    let listed = out["metadata"]["annotations"]["quarantineHealthEvent"].to_string();
    assert!(!listed.contains("entityValue\\\":\\\"0"), "{listed}");
    // ... knows the open ones, ...
    cluster.cordoned(&first, &other).await?;
    // ... and shows the old ones.
    let story = first.client(["explain", &name]).await?;
    assert!(story.stdout.contains("GpuMemWatch"), "{}", story.stdout);
    assert!(first.stderr().contains("another store was acted on before"));
    Ok(())
}
