//! The monitor of Kubernetes objects, on a cluster whose objects change while it is killed, may not
//! see them, or hands over to another controller.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Private, Version, unique};

use crate::doctor::{apply_fix, kubeconfig_of, one};
use crate::leader::{EXPIRY, leads, stands_by};
use crate::support::{SOON, Scene};

/// Annotation of a node with its open matches.
const MATCHES: &str = "nvsentinel.nvidia.com/k8s-object-monitor-policy-matches";

/// Policies over `ConfigMap`s that name a node, and over a kind that the cluster does not have.
const MAPS: &str = r#"
[[policies]]
name = "marked"
enabled = true
[policies.resource]
version = "v1"
kind = "ConfigMap"
namespace = "default"
[policies.predicate]
expression = 'resource.data.fault == "true"'
[policies.nodeAssociation]
expression = 'resource.data.node'
[policies.healthEvent]
componentClass = "Node"
isFatal = true
message = "a ConfigMap says so"
recommendedAction = "CONTACT_SUPPORT"
errorCode = ["MARKED"]

[[policies]]
name = "absent"
enabled = true
[policies.resource]
group = "example.com"
version = "v1"
kind = "Nothing"
[policies.predicate]
expression = 'resource.spec.fault == true'
[policies.healthEvent]
componentClass = "Node"
recommendedAction = "NONE"
"#;

/// A policy over `Secret`s with a label that names a node.
const SECRETS: &str = r#"
[[policies]]
name = "locked"
enabled = true
[policies.resource]
version = "v1"
kind = "Secret"
namespace = "default"
[policies.predicate]
expression = 'has(resource.metadata.labels) && has(resource.metadata.labels.node)'
[policies.nodeAssociation]
expression = 'resource.metadata.labels.node'
[policies.healthEvent]
componentClass = "Node"
isFatal = true
message = "a Secret says so"
recommendedAction = "CONTACT_SUPPORT"
errorCode = ["LOCKED"]
"#;

/// A node, a controller with policies, and the cluster.
struct Watched {
    scene: Scene,
    client: Client,
    plane: Private,
    kubeconfig: PathBuf,
    policies: PathBuf,
    _dir: tempfile::TempDir,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns a controller with the policies of a file.
fn controller(kubeconfig: &Path, policies: &Path) -> anyhow::Result<Launch> {
    Ok(Launch::controller()?
        .kubeconfig(kubeconfig)
        .quarantine()
        .arg("--grpc-insecure")
        .option("--grpc-listen", "127.0.0.1:0")
        .option("--objects", policies))
}

impl Watched {
    async fn new(policies: &str) -> anyhow::Result<Option<Self>> {
        Self::arranged(policies, None, "false").await
    }

    /// Starts a controller, under an account that may do all but see Secrets if there is one, and
    /// with this value of `--leader-elect`.
    async fn arranged(
        policies: &str,
        account: Option<&str>,
        elects: &str,
    ) -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
            return Ok(None);
        };
        plane.namespace("gpuwarden").await?;
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("policies.toml");
        std::fs::write(&path, policies)?;
        let mut kubeconfig = plane.kubeconfig().to_owned();
        if let Some(account) = account {
            kubeconfig = kubeconfig_of(&plane, account, dir.path()).await?;
            let resources = "--resource=nodes,nodes/status,pods,events,configmaps,\
                             resourceslices.resource.k8s.io";
            let role = ["create", "clusterrole", account, "--verb=*", resources];
            plane.kubectl(role).await?;
            let bind = ["create", "clusterrolebinding", account];
            let subject = format!("--serviceaccount=default:{account}");
            let role = format!("--clusterrole={account}");
            plane
                .kubectl(bind.into_iter().chain([&*role, &*subject]))
                .await?;
        }
        let describe = |node: testkit::NodeBuilder| node.without_kubelet();
        let scene = Scene::with(&plane, describe, |_| {
            Ok(controller(&kubeconfig, &path)?.option("--leader-elect", elects))
        });
        Ok(Some(Self {
            scene: scene.await?,
            client: plane.client().await?,
            plane,
            kubeconfig,
            policies: path,
            _dir: dir,
        }))
    }

    async fn ready(&self, status: &str) -> anyhow::Result<()> {
        let condition = json!([{"type": "Ready", "status": status, "reason": "Test"}]);
        let patch = Patch::Strategic(json!({"status": {"conditions": condition}}));
        let nodes = &self.scene.nodes;
        let params = PatchParams::default();
        nodes
            .patch_status(&self.scene.node, &params, &patch)
            .await?;
        Ok(())
    }

    fn maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn mark(&self, name: &str, node: &str) -> anyhow::Result<()> {
        let map = json!({"metadata": {"name": name}, "data": {"fault": "true", "node": node}});
        let map = serde_json::from_value(map)?;
        self.maps().create(&PostParams::default(), &map).await?;
        Ok(())
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn lock(&self, name: &str, node: &str) -> anyhow::Result<()> {
        let secret = json!({"metadata": {"name": name, "labels": {"node": node}}});
        let secret = serde_json::from_value(secret)?;
        self.secrets()
            .create(&PostParams::default(), &secret)
            .await?;
        Ok(())
    }

    /// Waits until the status says, or no longer says, that `what` cannot be seen.
    async fn blind(&self, what: &str, blind: bool) -> anyhow::Result<()> {
        let said = || async {
            let status = self.scene.status().await;
            let sources = status.map_err(|error| error.to_string())?["sources"].to_string();
            if sources.contains(&format!("cannot see {what}")) == blind {
                Ok(())
            } else {
                Err(sources)
            }
        };
        let product = &self.scene.product;
        product
            .wait_for(&format!("blindness for {what}: {blind}"), SOON, said)
            .await
    }

    /// Waits until the node is in service.
    async fn returned(&self) -> anyhow::Result<()> {
        let in_service = |node: &Value| {
            if node["spec"]["unschedulable"] == true {
                return Err(node["metadata"]["annotations"].to_string());
            }
            Ok(())
        };
        self.scene.node_until("the return", in_service).await
    }

    async fn unmark(&self, name: &str) -> anyhow::Result<()> {
        self.maps().delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Waits until the node's annotation names these matches, or is not there.
    async fn matches(&self, expected: Option<Value>) -> anyhow::Result<()> {
        let found = |node: &Value| {
            let text = node["metadata"]["annotations"][MATCHES].as_str();
            let found: Option<Value> = text.map(|text| serde_json::from_str(text).unwrap());
            if found == expected {
                Ok(())
            } else {
                Err(format!("{found:?}"))
            }
        };
        self.scene
            .node_until("the matches on the node", found)
            .await
    }

    /// Returns the health of each stored event of a policy, oldest first.
    async fn events(&self, policy: &str) -> anyhow::Result<Vec<bool>> {
        let events = self.events_by_object(&self.scene.node, policy).await?;
        Ok(events.into_iter().map(|(_, healthy)| healthy).collect())
    }

    /// Returns object and health of each stored event of a node and a policy, oldest first.
    async fn events_by_object(
        &self,
        node: &str,
        policy: &str,
    ) -> anyhow::Result<Vec<(String, bool)>> {
        let args = ["events", "--node", node, "-o", "json"];
        let events = self.scene.product.client(args).await?.json(0)?;
        let events = events.as_array().unwrap().iter();
        let of = events.filter(|event| event["event"]["checkName"] == policy);
        let mut of: Vec<_> = of.collect();
        of.sort_unstable_by_key(|event| event["seq"].as_u64());
        let each = of.into_iter().map(|event| {
            let event = &event["event"];
            let object = text(&event["entitiesImpacted"][0]["entityValue"]);
            (object, event["isHealthy"] == true)
        });
        Ok(each.collect())
    }

    /// Waits until exactly these objects are open faults of a node, each once, and exactly these
    /// were reported as ended, each once.
    async fn told(&self, node: &str, open: &[&str], ended: &[&str]) -> anyhow::Result<()> {
        let named = |names: &[&str]| -> Vec<String> {
            names.iter().map(|name| format!("default/{name}")).collect()
        };
        let expected = (named(open), named(ended));
        let found = || async {
            let error = |error: anyhow::Error| error.to_string();
            let status = self.scene.status().await.map_err(error)?;
            let nodes = status["fleet"]["nodes"].as_array().into_iter().flatten();
            let faults = nodes.filter(|one| one["name"] == node);
            let faults = faults.filter_map(|one| one["faults"].as_array()).flatten();
            let mut open: Vec<String> = faults
                .filter(|fault| fault["check"] == "marked")
                .map(|fault| text(&fault["entities"][0]["entityValue"]))
                .collect();
            open.sort_unstable();
            let events = self.events_by_object(node, "marked").await.map_err(error)?;
            let ended = events.into_iter().filter(|(_, healthy)| *healthy);
            let mut ended: Vec<String> = ended.map(|(object, _)| object).collect();
            ended.sort_unstable();
            let found = (open, ended);
            if found == expected {
                Ok(())
            } else {
                Err(format!("{found:?}, not {expected:?}"))
            }
        };
        let product = &self.scene.product;
        product.wait_for("the faults of a node", SOON, found).await
    }
}

#[tokio::test]
async fn a_node_that_is_not_ready_leaves_and_returns_whatever_is_killed() -> anyhow::Result<()> {
    let preset = objects::presets::find("node-not-ready").unwrap().text;
    let quick = preset
        .replace("\"5m\"", "\"4s\"")
        .replace("\"1m\"", "\"2s\"");
    assert_ne!(quick, preset);
    let Some(mut watched) = Watched::new(&quick).await? else {
        return Ok(());
    };
    watched.ready("False").await?;
    watched.scene.product.restart().await?;
    watched.scene.cordoned().await?;
    let node = watched.scene.node.clone();
    let matches = json!({ format!("node-not-ready/{node}"): node });
    watched.matches(Some(matches.clone())).await?;
    // A silent kubelet is no recovery, and a restart is none.
    watched.ready("Unknown").await?;
    watched.scene.product.restart().await?;
    watched.scene.ready().await?;
    watched.ready("False").await?;
    watched.matches(Some(matches)).await?;
    let events = watched.events("node-not-ready").await?;
    assert!(!events.contains(&true), "{events:?}");

    watched.scene.product.kill9()?;
    watched.ready("True").await?;
    watched.scene.product.restart().await?;
    watched.scene.restored().await?;
    let events = watched.events("node-not-ready").await?;
    let ends = events.iter().filter(|is_end| **is_end).count();
    assert_eq!((ends, events.last()), (1, Some(&true)), "{events:?}");
    Ok(())
}

#[tokio::test]
async fn what_is_deleted_or_moved_while_nobody_looks_clears() -> anyhow::Result<()> {
    let Some(mut watched) = Watched::new(MAPS).await? else {
        return Ok(());
    };
    let node = watched.scene.node.clone();
    let other = unique("e2e");
    testkit::node(&other).create(&watched.client).await?;
    watched.mark("one", &node).await?;
    watched.mark("two", &node).await?;
    watched.scene.cordoned().await?;
    let both = json!({"marked/default/one": node, "marked/default/two": node});
    watched.matches(Some(both)).await?;

    // The absent kind blinds its policy alone, and the status says so.
    watched
        .blind("example.com/v1/Nothing (for absent)", true)
        .await?;

    // One is deleted, the other one moves: the store knows, and then only the annotation does.
    watched.scene.product.kill9()?;
    watched.unmark("one").await?;
    watched.scene.product.restart().await?;
    watched
        .matches(Some(json!({"marked/default/two": node})))
        .await?;
    watched.scene.product.kill9()?;
    watched.unmark("two").await?;
    watched.mark("two", &other).await?;
    let data = watched.scene.product.data_dir();
    std::fs::remove_dir_all(&data)?;
    std::fs::create_dir(&data)?;
    watched.scene.product.restart().await?;
    watched.matches(None).await?;
    watched.returned().await?;
    watched.scene.node = other;
    watched.scene.cordoned().await?;
    Ok(())
}

#[tokio::test]
async fn a_forbidden_kind_blinds_its_policy_alone_until_it_is_permitted() -> anyhow::Result<()> {
    let policies = format!("{MAPS}{SECRETS}");
    let account = "without-secrets";
    let Some(mut watched) = Watched::arranged(&policies, Some(account), "false").await? else {
        return Ok(());
    };
    let node = watched.scene.node.clone();
    let other = unique("e2e");
    testkit::node(&other).create(&watched.client).await?;
    watched.lock("key", &other).await?;
    watched.mark("one", &node).await?;
    watched.scene.cordoned().await?;
    let secrets = "v1/Secret in default (for locked)";
    watched.blind(secrets, true).await?;
    // The blindness is shown and counted.
    let counted = || async {
        let metrics = watched.scene.product.get("/metrics").await?;
        for line in [
            "gpuwarden_objects_blind_watches 2\n",
            "gpuwarden_source_up{source=\"objects\"} 0\n",
        ] {
            anyhow::ensure!(metrics.contains(line), "{metrics}");
        }
        Ok(())
    };
    let product = &watched.scene.product;
    product
        .wait_for("both blind watches", SOON, counted)
        .await?;
    watched.unmark("one").await?;
    watched.scene.restored().await?;
    watched.scene.node = other;
    assert_eq!(watched.events("locked").await?, [false; 0]);

    // The fix of doctor grants the permission, and the fault is seen.
    let [kubeconfig, policies] =
        [&watched.kubeconfig, &watched.policies].map(|path| path.display().to_string());
    let args = [
        "doctor",
        "controller",
        "-o",
        "json",
        "--quarantine",
        "--grpc-insecure",
        "--leader-elect=false",
        "--kubeconfig",
        &kubeconfig,
        "--objects",
        &policies,
    ];
    let found = watched.scene.product.command(args).await?;
    let found: Value = serde_json::from_str(&found.stdout)?;
    let missing = one(&found, "permissions");
    let who = format!("system:serviceaccount:default:{account}");
    let what = format!("{who} may not list, watch secrets in default");
    assert_eq!(missing["what"], what.as_str(), "{found:#}");
    let absent = one(&found, "object-kinds");
    let what = "the cluster has no example.com/v1/Nothing, which policies read: absent";
    assert_eq!(absent["what"], what, "{found:#}");
    apply_fix(&watched.plane, &missing["fix"]).await?;
    watched.scene.cordoned().await?;
    watched.blind(secrets, false).await?;
    assert_eq!(watched.events("locked").await?, [false]);

    // What cannot be seen any longer ends nothing, until it is seen. The controller is ready also
    // where its policies see nothing at all.
    watched.scene.product.kill9()?;
    std::fs::write(&watched.policies, SECRETS)?;
    let binding = "gpuwarden-objects-secrets";
    let delete = ["delete", "rolebinding", binding];
    watched.plane.kubectl(delete).await?;
    let key = DeleteParams::default();
    watched.secrets().delete("key", &key).await?;
    watched.scene.product.restart().await?;
    watched.blind(secrets, true).await?;
    watched.scene.ready().await?;
    assert_eq!(watched.events("locked").await?, [false]);
    watched.scene.cordoned().await?;
    let role = format!("--role={binding}");
    let subject = format!("--serviceaccount=default:{account}");
    let bind = ["create", "rolebinding", binding, &role, &subject];
    watched.plane.kubectl(bind).await?;
    watched.returned().await?;
    assert_eq!(watched.events("locked").await?, [false, true]);
    Ok(())
}

#[tokio::test]
async fn another_controller_takes_over_and_doubles_and_loses_nothing() -> anyhow::Result<()> {
    let Some(mut watched) = Watched::arranged(MAPS, None, "true").await? else {
        return Ok(());
    };
    let node = watched.scene.node.clone();
    let other = unique("e2e");
    testkit::node(&other).create(&watched.client).await?;
    leads(&watched.scene.product, SOON).await?;
    watched.mark("stays", &node).await?;
    watched.mark("gone", &node).await?;
    watched.scene.cordoned().await?;
    let both = json!({"marked/default/gone": node, "marked/default/stays": node});
    watched.matches(Some(both)).await?;
    watched.told(&node, &["gone", "stays"], &[]).await?;
    let second = controller(&watched.kubeconfig, &watched.policies)?;
    let second = second.start().await?;
    stands_by(&second, &watched.scene.product).await?;

    // The leader is killed, and the objects change while none leads. The next one has a store of its
    // own, where each fault is open once, and what ended meanwhile ends once.
    let mut first = std::mem::replace(&mut watched.scene.product, second);
    first.kill9()?;
    watched.unmark("gone").await?;
    watched.mark("new", &other).await?;
    leads(&watched.scene.product, EXPIRY).await?;
    watched
        .matches(Some(json!({"marked/default/stays": node})))
        .await?;
    watched.told(&node, &["stays"], &["gone"]).await?;
    watched.told(&other, &["new"], &[]).await?;

    // The first one takes over again, with its store of before.
    first.restart().await?;
    stands_by(&first, &watched.scene.product).await?;
    let mut second = std::mem::replace(&mut watched.scene.product, first);
    watched.scene.cordoned().await?;
    let (exit, _) = second.terminate().await?;
    assert!(exit.success(), "{exit} {}", second.stderr());
    watched.unmark("stays").await?;
    leads(&watched.scene.product, SOON).await?;
    watched.scene.restored().await?;
    watched.told(&node, &[], &["gone", "stays"]).await?;
    watched.told(&other, &["new"], &[]).await?;
    watched.scene.node = other;
    watched.scene.cordoned().await?;
    Ok(())
}
