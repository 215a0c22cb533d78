//! The Helm chart: real Helm, real API servers, and the product as the chart's pods would run it.
//!
//! Objects of the chart have fixed names, so each test that installs it has a private control
//! plane. No kubelet is there: kwok reports the pods as running.

#[path = "chart/doctor.rs"]
mod doctor;
#[path = "chart/least.rs"]
pub(crate) mod least;
#[path = "chart/pod.rs"]
mod pod;
#[path = "chart/release.rs"]
mod release;
#[path = "chart/removal.rs"]
mod removal;
#[path = "chart/repair.rs"]
mod repair;
#[path = "chart/upgrade.rs"]
mod upgrade;
#[path = "chart/values.rs"]
mod values;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use testkit::{Component, ControlPlane, Options, Private, Version, require};

use crate::support::SOON;

/// Namespace of the releases.
pub(crate) const NAMESPACE: &str = "gpuwarden";
/// Files of values, in the order of the ladder; the last goes beside any.
const LADDER: [&str; 4] = ["observe", "quarantine", "repair", "preflight"];
/// Longest time of a call of Helm that waits for pods: Helm's own.
const HELM_LIMIT: Duration = Duration::from_secs(300);

/// Helm, and the chart.
pub(crate) struct Helm {
    program: PathBuf,
    kubeconfig: Option<PathBuf>,
}

impl Helm {
    /// Returns Helm for a cluster, or for none. Returns `None` if Helm is not installed; the skip is
    /// then already reported.
    #[track_caller]
    pub(crate) fn of(plane: Option<&ControlPlane>) -> Option<Self> {
        let program = require(Component::Helm)?;
        let kubeconfig = plane.map(|plane| plane.kubeconfig().to_owned());
        Some(Self {
            program,
            kubeconfig,
        })
    }

    /// Runs Helm. Returns its standard output, or an error with its output.
    pub(crate) async fn run(&self, args: &[&str]) -> anyhow::Result<String> {
        let home = tempfile::tempdir()?;
        let mut command = tokio::process::Command::new(&self.program);
        command.args(args).kill_on_drop(true);
        for kind in ["CACHE", "CONFIG", "DATA"] {
            command.env(format!("HELM_{kind}_HOME"), home.path());
        }
        // A cluster that the user of this machine has configured is not touched.
        let kubeconfig = self.kubeconfig.as_deref();
        command.env(
            "KUBECONFIG",
            kubeconfig.unwrap_or(Path::new("/nonexistent")),
        );
        let output = tokio::time::timeout(HELM_LIMIT, command.output()).await??;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "helm {args:?}: {errors}");
        // The API server's warnings about objects.
        let warnings: Vec<&str> = errors.lines().filter(|it| it.contains("arning")).collect();
        ensure!(warnings.is_empty(), "helm {args:?}: {warnings:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Installs the chart, or upgrades to these values, and waits until its pods are ready.
    pub(crate) async fn deploy(&self, values: &[&str], more: &[&str]) -> anyhow::Result<()> {
        self.deploy_from(&chart(), values, more).await
    }

    /// Does the same with the chart of this directory.
    async fn deploy_from(&self, chart: &str, values: &[&str], more: &[&str]) -> anyhow::Result<()> {
        let files: Vec<String> = values.iter().map(|name| values_file(name)).collect();
        let mut args = vec!["upgrade", "--install", "gpuwarden", chart];
        args.extend(["--namespace", NAMESPACE, "--create-namespace", "--wait"]);
        for file in &files {
            args.extend(["--values", file]);
        }
        args.extend(more);
        self.run(&args).await.map(drop)
    }

    /// Renders the chart without a cluster.
    pub(crate) async fn template(&self, more: &[&str]) -> anyhow::Result<String> {
        let chart = chart();
        let mut args = vec!["template", "gpuwarden", &chart, "--namespace", NAMESPACE];
        args.extend(["--kube-version", "1.37.0"]);
        args.extend(more);
        self.run(&args).await
    }
}

fn chart() -> String {
    format!("{}/../../deploy/helm/gpuwarden", env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn values_file(name: &str) -> String {
    format!("{}/values-{name}.yaml", chart())
}

/// Returns a control plane for a release, with two nodes that get an agent.
pub(crate) async fn plane(version: Version) -> anyhow::Result<Option<Private>> {
    let Some(plane) = ControlPlane::private(version, Options::default()).await? else {
        return Ok(None);
    };
    for name in ["gpu-1", "gpu-2"] {
        let node = testkit::node(name).label("nvidia.com/gpu.present", "true");
        node.create(&plane.client().await?).await?;
    }
    Ok(Some(plane))
}

/// Returns the objects of the release: `KIND/NAME` by namespace, without those of controllers.
async fn objects(plane: &ControlPlane) -> anyhow::Result<Vec<String>> {
    let kinds = "serviceaccounts,clusterroles,clusterrolebindings,roles,rolebindings,configmaps,\
                 services,deployments,daemonsets,networkpolicies,poddisruptionbudgets,\
                 priorityclasses,persistentvolumeclaims,resourceclaimtemplates,secrets,leases";
    let label = "app.kubernetes.io/name=gpuwarden";
    let list = ["get", kinds, "-A", "-l", label, "-o", "name"];
    let names = plane.kubectl(list).await?;
    Ok(names.lines().map(str::to_owned).collect())
}

async fn installs_upgrades_and_goes(version: Version) -> anyhow::Result<()> {
    let Some(plane) = plane(version).await? else {
        return Ok(());
    };
    let Some(helm) = Helm::of(Some(&plane)) else {
        return Ok(());
    };
    helm.deploy(&[], &[]).await?;
    let ready = ["-n", NAMESPACE, "get", "pods", "-o", "json"];
    let pods: Value = serde_json::from_str(&plane.kubectl(ready).await?)?;
    let pods = pods["items"].as_array().context("a list of pods")?;
    assert_eq!(pods.len(), 3, "two agents and a controller: {pods:?}");

    // Each step up, and back to the first one.
    helm.deploy(&["quarantine"], &[]).await?;
    helm.deploy(&["repair", "preflight"], &[]).await?;
    // Helm does not wait for the end of the pods of before.
    let of_each = "jsonpath={range .items[*]}{.metadata.name}={.status.readyReplicas} {end}";
    let replicas = ["-n", NAMESPACE, "get", "deployments", "-o", of_each];
    testkit::wait_for("two replicas of each", SOON, || async {
        let replicas = plane.kubectl(replicas).await?;
        let both = "gpuwarden-controller=2 gpuwarden-webhook=2 ";
        ensure!(replicas == both, "{replicas}");
        Ok(())
    })
    .await?;
    let back = ["rollback", "gpuwarden", "1", "-n", NAMESPACE, "--wait"];
    helm.run(&back).await?;
    let role = ["get", "clusterrole", "gpuwarden-controller", "-o", "json"];
    let role: Value = serde_json::from_str(&plane.kubectl(role).await?)?;
    assert_eq!(role["rules"][0]["verbs"], json!(["list", "watch"]));

    let remove = ["uninstall", "gpuwarden", "-n", NAMESPACE, "--wait"];
    helm.run(&remove).await?;
    testkit::wait_for("no object of the release", SOON, || async {
        match objects(&plane).await {
            Ok(left) if left.is_empty() => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

#[tokio::test]
async fn helm_installs_it_climbs_the_ladder_and_takes_it_away() -> anyhow::Result<()> {
    installs_upgrades_and_goes(Version::V1_37).await
}

#[tokio::test]
async fn helm_installs_it_on_an_older_kubernetes() -> anyhow::Result<()> {
    installs_upgrades_and_goes(Version::V1_35).await
}

#[tokio::test]
async fn the_way_to_the_gpus_follows_the_cluster_and_a_missing_class_is_reported()
-> anyhow::Result<()> {
    let Some(plane) = plane(Version::V1_37).await? else {
        return Ok(());
    };
    let Some(helm) = Helm::of(Some(&plane)) else {
        return Ok(());
    };
    let chart = chart();
    let upgrade = ["upgrade", "--install", "gpuwarden", &chart, "-n", NAMESPACE];
    let upgrade: Vec<&str> = upgrade.into_iter().chain(["--create-namespace"]).collect();
    let agent = || async {
        let get = [
            "-n",
            NAMESPACE,
            "get",
            "daemonset",
            "gpuwarden-agent",
            "-o",
            "json",
        ];
        let agent: Value = serde_json::from_str(&plane.kubectl(get).await?)?;
        anyhow::Ok(agent["spec"]["template"]["spec"].clone())
    };
    let notes = helm.run(&upgrade).await?;
    let missing = "WARNING: the cluster has no RuntimeClass nvidia and no DeviceClass";
    assert!(notes.contains(missing), "{notes}");
    let pod = agent().await?;
    assert_eq!(
        (&pod["runtimeClassName"], &pod["resourceClaims"]),
        (&Value::Null, &Value::Null)
    );

    let devices = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\n\
                   metadata: {name: gpu.nvidia.com}\nspec: {}\n";
    crate::gangs::apply(&plane, devices).await?;
    let notes = helm.run(&upgrade).await?;
    assert!(
        notes.contains("their claim needs a label of the namespace"),
        "{notes}"
    );
    let label = "resource.kubernetes.io/admin-access=true";
    plane
        .kubectl(["label", "namespace", NAMESPACE, label])
        .await?;
    let notes = helm.run(&upgrade).await?;
    assert!(!notes.contains("WARNING"), "{notes}");
    let pod = agent().await?;
    assert_eq!(
        pod["resourceClaims"][0]["resourceClaimTemplateName"],
        "gpuwarden-agent"
    );

    let class = "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\n\
                 metadata: {name: nvidia}\nhandler: nvidia\n";
    crate::gangs::apply(&plane, class).await?;
    helm.run(&upgrade).await?;
    let pod = agent().await?;
    assert_eq!(pod["runtimeClassName"], "nvidia");
    let other = [
        &upgrade[..],
        &["--set", "gpuAccess=runtimeClass,runtimeClassName=other"],
    ]
    .concat();
    let notes = helm.run(&other).await?;
    let missing = "WARNING: the cluster has no RuntimeClass other, so no agent can start";
    assert!(notes.contains(missing), "{notes}");
    Ok(())
}

/// Creates the pod of a workload's template in a namespace with this level of Pod Security.
/// Returns the reason of the refusal; empty if it is accepted.
async fn refusal(plane: &ControlPlane, workload: &str, level: &str) -> anyhow::Result<String> {
    let get = ["-n", NAMESPACE, "get", workload, "-o", "json"];
    let found: Value = serde_json::from_str(&plane.kubectl(get).await?)?;
    let mut spec = found["spec"]["template"]["spec"].clone();
    spec["serviceAccountName"] = json!("default");
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tried"}, "spec": spec,
    });
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), pod.to_string())?;
    let path = file.path().display().to_string();
    let create = ["-n", level, "create", "--dry-run=server", "-f", &path];
    match plane.kubectl(create).await {
        Ok(_) => Ok(String::new()),
        Err(error) => {
            let error = error.to_string();
            let (_, reason) = (error.split_once(&format!("\"{level}:latest\": ")))
                .with_context(|| format!("no refusal by Pod Security: {error}"))?;
            Ok(reason.to_owned())
        }
    }
}

#[tokio::test]
async fn pod_security_refuses_the_host_paths_of_the_agent_and_nothing_else() -> anyhow::Result<()> {
    let Some(plane) = plane(Version::V1_37).await? else {
        return Ok(());
    };
    let Some(helm) = Helm::of(Some(&plane)) else {
        return Ok(());
    };
    helm.deploy(&["repair", "preflight"], &[]).await?;
    for level in ["baseline", "restricted"] {
        plane.namespace(level).await?;
        let label = format!("pod-security.kubernetes.io/enforce={level}");
        plane.kubectl(["label", "namespace", level, &label]).await?;
    }
    for workload in [
        "deployment/gpuwarden-controller",
        "deployment/gpuwarden-webhook",
    ] {
        assert_eq!(
            refusal(&plane, workload, "restricted").await?,
            "",
            "{workload}"
        );
    }
    let agent = "daemonset/gpuwarden-agent";
    let paths = "(volumes \"data\", \"socket\", \"device-api\", \"nvsentinel\", \"pod-resources\", \
                 \"journal\", \"volatile-journal\")";
    let baseline = refusal(&plane, agent, "baseline").await?;
    assert_eq!(baseline, format!("hostPath volumes {paths}"));
    let restricted = refusal(&plane, agent, "restricted").await?;
    // The files of other monitors and the kubelet's socket are root's.
    let volumes = "use restricted volume type \"hostPath\")";
    let root = "runAsUser=0 (pod must not set runAsUser=0)";
    assert!(
        restricted.contains(volumes) && restricted.contains(root),
        "{restricted}"
    );
    let others = restricted.split("), ").filter(|violation| {
        !["restricted volume types", "runAsUser=0", "runAsNonRoot"]
            .iter()
            .any(|known| violation.contains(known))
    });
    assert_eq!(others.collect::<Vec<_>>(), [""; 0], "{restricted}");
    Ok(())
}
