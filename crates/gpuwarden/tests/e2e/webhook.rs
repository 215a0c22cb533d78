//! The preflight webhook on a real API server: the checks of each pod, gangs, and that no pod is
//! refused while replicas and certificates change.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use k8s_openapi::ByteString;
use kube::Client;
use kube::api::{Api, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    Authority, Balancer, ControlPlane, NodeBuilder, Options, Program, Purpose, Version, binary,
    unique, wait_for,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::gangs::apply;
use crate::player::{note_end, play};
use crate::support::{SOON, Scene};

pub(crate) const CONFIG: &str = "image: registry.example/gpuwarden:1\n";
pub(crate) const NAMESPACE: &str = "gpuwarden-webhook-test";

/// A `gpuwarden webhook` process, killed on drop.
pub(crate) struct Webhook {
    child: Child,
    home: TempDir,
    pub(crate) address: SocketAddr,
}

impl Webhook {
    /// Starts a webhook that registers itself with `url`, and waits until it responds.
    pub(crate) async fn start(
        plane: &ControlPlane,
        url: &str,
        more: &[&str],
    ) -> anyhow::Result<Self> {
        Self::start_with(plane, url, CONFIG, more).await
    }

    pub(crate) async fn start_with(
        plane: &ControlPlane,
        url: &str,
        config: &str,
        more: &[&str],
    ) -> anyhow::Result<Self> {
        let namespace = ["--namespace", NAMESPACE];
        let flags: Vec<&str> = namespace.iter().chain(more).copied().collect();
        Self::start_as(plane.kubeconfig(), url, config, &flags).await
    }

    /// Starts a webhook with the account of a kubeconfig.
    pub(crate) async fn start_as(
        kubeconfig: &Path,
        url: &str,
        config: &str,
        more: &[&str],
    ) -> anyhow::Result<Self> {
        let flags = [&["--register-url", url], more].concat();
        Self::start_reached(kubeconfig, config, &flags).await
    }

    /// Starts a webhook with these flags for its address.
    pub(crate) async fn start_reached(
        kubeconfig: &Path,
        config: &str,
        flags: &[&str],
    ) -> anyhow::Result<Self> {
        let home = tempfile::tempdir()?;
        let file = home.path().join("preflight.yaml");
        std::fs::write(&file, config)?;
        let output = std::fs::File::create(home.path().join("log"))?;
        let child = Command::new(binary()?)
            .arg("webhook")
            .arg("--config")
            .arg(&file)
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(["--listen", "127.0.0.1:0"])
            .args(["--metrics-listen", "127.0.0.1:0"])
            .env("GPUWARDEN_WEBHOOK_RENDEZVOUS_LISTEN", "127.0.0.1:0")
            .args(flags)
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()?;
        let mut webhook = Self {
            child,
            home,
            address: SocketAddr::from(([0; 4], 0)),
        };
        webhook.address = wait_for("the address of the webhook", SOON, || async {
            webhook.greeted()
        })
        .await
        .with_context(|| webhook.log())?;
        Ok(webhook)
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.home.path().join("log")).unwrap_or_default()
    }

    fn greeted(&self) -> Result<SocketAddr, String> {
        let log = self.log();
        let line = log
            .lines()
            .find_map(|line| line.strip_prefix("admission    https://"));
        let address = line.and_then(|line| line.strip_suffix("/mutate")?.parse().ok());
        address.ok_or(log)
    }

    async fn metrics(&self) -> anyhow::Result<String> {
        testkit::get(&self.metrics_address()?, "/metrics").await
    }

    /// Returns the address of metrics, as `http://HOST:PORT`.
    pub(crate) fn metrics_address(&self) -> anyhow::Result<String> {
        let log = self.log();
        let address = log
            .lines()
            .find_map(|line| line.strip_prefix("metrics      ")?.strip_suffix("/metrics"));
        Ok(address.context("an address of metrics")?.to_owned())
    }

    /// Waits until the readiness response of the webhook is `words`.
    async fn says(&self, words: &str) -> anyhow::Result<()> {
        let log = self.log();
        let at = (log.lines())
            .find_map(|line| line.strip_prefix("metrics      ")?.strip_suffix("/metrics"));
        let at = at.context("an address of probes")?;
        wait_for("the readiness of the webhook", SOON, || async {
            match testkit::get(at, "/readyz").await {
                Ok(said) if said.starts_with(words) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn tell_to_end(&self) -> anyhow::Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        Ok(())
    }

    /// Ends the webhook with SIGTERM, and waits until it has ended.
    pub(crate) async fn end(mut self) -> anyhow::Result<()> {
        self.tell_to_end()?;
        let child = &mut self.child;
        let status = wait_for("the end of the webhook", SOON, || {
            let ended = child.try_wait().ok().flatten();
            async move { ended.ok_or("it runs") }
        });
        let status = status.await?;
        if !status.success() {
            bail!("{status}\n{}", self.log());
        }
        Ok(())
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        let log = self.log();
        if std::thread::panicking() {
            drop(writeln!(std::io::stderr(), "{log}"));
        } else if let Some(line) = testkit::warning_in(&log) {
            panic!("the webhook: {line}");
        }
    }
}

/// Starts a control plane for a webhook.
async fn plane() -> anyhow::Result<Option<testkit::Private>> {
    plane_of(Version::LATEST, Options::default()).await
}

async fn plane_of(version: Version, options: Options) -> anyhow::Result<Option<testkit::Private>> {
    let Some(plane) = ControlPlane::private(version, options).await? else {
        return Ok(None);
    };
    plane.namespace(NAMESPACE).await?;
    Ok(Some(plane))
}

/// Creates a namespace whose pods get checks.
pub(crate) async fn opted_in(plane: &ControlPlane) -> anyhow::Result<String> {
    let name = unique("training");
    let label = ("nvsentinel.nvidia.com/preflight", "enabled");
    plane.labelled_namespace(&name, [label]).await?;
    Ok(name)
}

pub(crate) fn pod(name: &str, limits: impl Into<Value>) -> Value {
    let limits: Value = limits.into();
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "containers": [{"name": "main", "image": "training", "resources": {"limits": limits}}],
        },
    })
}

pub(crate) async fn create(client: &Client, namespace: &str, pod: &Value) -> anyhow::Result<Value> {
    create_with(&PostParams::default(), client, namespace, pod).await
}

pub(crate) async fn create_with(
    params: &PostParams,
    client: &Client,
    namespace: &str,
    pod: &Value,
) -> anyhow::Result<Value> {
    // Not a typed pod, which lacks the gang fields of 1.35.
    let body = serde_json::to_vec(pod)?;
    let request = kube::core::Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
    Ok(client.request(request.create(params, body)?).await?)
}

pub(crate) fn names(pod: &Value, list: &str) -> Vec<String> {
    let list = pod["spec"][list].as_array().cloned().unwrap_or_default();
    list.iter()
        .filter_map(|one| Some(one["name"].as_str()?.to_owned()))
        .collect()
}

pub(crate) const DIAG: &str = "preflight-dcgm-diag";
pub(crate) const LOOPBACK: &str = "preflight-nccl-loopback";
pub(crate) const ALLREDUCE: &str = "preflight-nccl-allreduce";

/// Our three checks, one of them with resource limits.
const LIMITED: &str = "image: registry.example/gpuwarden:1\ninitContainers:\n  - {name: preflight-dcgm-diag, \
                       resources: {limits: {cpu: '3', memory: 4Gi}}}\n  - {name: preflight-nccl-loopback}\n  \
                       - {name: preflight-nccl-allreduce}\n";

#[tokio::test]
async fn pods_get_the_checks_that_can_say_something() -> anyhow::Result<()> {
    pods_get_checks(Version::LATEST, Options::default()).await
}

#[tokio::test]
async fn pods_of_1_35_get_the_checks_that_can_say_something() -> anyhow::Result<()> {
    // In that version, classes that map to a resource are behind a feature gate.
    let gate = "--feature-gates=DRAExtendedResource=true";
    let options = Options::default().arg(Program::ApiServer, gate);
    pods_get_checks(Version::V1_35, options).await
}

#[tokio::test]
async fn pods_of_1_36_get_the_checks_that_can_say_something() -> anyhow::Result<()> {
    pods_get_checks(Version::V1_36, Options::default()).await
}

async fn pods_get_checks(version: Version, options: Options) -> anyhow::Result<()> {
    let Some(plane) = plane_of(version, options).await? else {
        return Ok(());
    };
    let balancer = Balancer::start().await?;
    let url = format!("https://{}", balancer.address());
    let webhook = Webhook::start_with(&plane, &url, LIMITED, &[]).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    let (client, namespace) = (plane.client().await?, opted_in(&plane).await?);

    for (name, limits, expected) in [
        ("no-gpu", json!({"cpu": "1"}), vec![]),
        ("one", json!({"nvidia.com/gpu": "1"}), vec![DIAG]),
        (
            "several",
            json!({"nvidia.com/gpu": "8"}),
            vec![DIAG, LOOPBACK],
        ),
    ] {
        let made = create(&client, &namespace, &pod(name, limits)).await?;
        assert_eq!(names(&made, "initContainers"), expected, "{name}");
        if name != "no-gpu" {
            // Although a check has resource limits.
            assert_eq!(made["status"]["qosClass"], "BestEffort", "{name}");
        }
    }

    // With claims, also if the class maps to a resource.
    claims(&client, &namespace).await?;
    let mut claimed = pod("claimed", json!({}));
    claimed["spec"]["resourceClaims"] = json!([{"name": "g", "resourceClaimTemplateName": "gpus"}]);
    claimed["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "g"}]});
    let made = create(&client, &namespace, &claimed).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG, LOOPBACK]);
    let claims = &made["spec"]["initContainers"][0]["resources"]["claims"];
    assert_eq!(*claims, json!([{"name": "g"}]));
    let by_class = pod("by-class", json!({"vendor.example/gpu": "1"}));
    let made = create(&client, &namespace, &by_class).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG]);

    // The API server would reject a check that requests more.
    let mut bounded = pod("bounded", json!({"nvidia.com/gpu": "1"}));
    bounded["spec"]["resources"] = json!({
        "requests": {"cpu": "50m", "memory": "64Mi"},
        "limits": {"cpu": "1", "memory": "1Gi"},
    });
    let made = create(&client, &namespace, &bounded).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG]);
    let limits = &made["spec"]["initContainers"][0]["resources"]["limits"];
    assert_eq!(
        *limits,
        json!({"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"})
    );
    let limits = json!({"nvidia.com/gpu": "1", "cpu": "2", "memory": "1Gi"});
    let made = create(&client, &namespace, &pod("guaranteed", limits)).await?;
    assert_eq!(made["status"]["qosClass"], "Guaranteed");

    // A reference to a missing object is reported.
    let mut wrong = pod("wrong", json!({"nvidia.com/gpu": "1"}));
    wrong["metadata"]["annotations"] = json!({"nvsentinel.nvidia.com/preflight-checks": "dcgm"});
    let error = create(&client, &namespace, &wrong)
        .await
        .expect_err("it is denied");
    assert!(
        error
            .to_string()
            .contains("which is not known; there are: preflight-"),
        "{error}"
    );

    let elsewhere = unique("plain");
    plane.namespace(&elsewhere).await?;
    let made = create(
        &client,
        &elsewhere,
        &pod("plain", json!({"nvidia.com/gpu": "8"})),
    )
    .await?;
    assert_eq!(names(&made, "initContainers"), [] as [&str; 0]);

    // Security levels under which the API server would reject the injected containers.
    let strict = opted_in(&plane).await?;
    let label = "pod-security.kubernetes.io/enforce=baseline";
    plane
        .kubectl(["label", "namespace", &strict, label])
        .await?;
    let made = create(
        &client,
        &strict,
        &pod("strict", json!({"nvidia.com/gpu": "8"})),
    )
    .await?;
    assert_eq!(names(&made, "initContainers"), [] as [&str; 0]);

    let metrics = webhook.metrics().await?;
    for line in [
        "preflight_injection_total{result=\"injected\"} ",
        "preflight_injection_total{result=\"skipped\"} ",
        "preflight_injection_total{result=\"denied\"} 1",
        "preflight_webhook_latency_seconds_count ",
    ] {
        let mut lines = metrics.lines();
        let found = lines.find_map(|found| found.strip_prefix(line));
        assert!(found.is_some_and(|count| count != "0"), "{line}: {metrics}");
    }

    // The webhook removes its registration when it ends: no pod waits for a missing webhook.
    webhook.end().await?;
    let made = create(
        &client,
        &namespace,
        &pod("after", json!({"nvidia.com/gpu": "8"})),
    )
    .await?;
    assert_eq!(names(&made, "initContainers"), [] as [&str; 0]);
    let left = plane
        .kubectl(["get", "mutatingwebhookconfigurations", "-o", "name"])
        .await?;
    assert_eq!(left, "");

    // A killed webhook leaves its registration behind, and pods do not wait for it either.
    let killed = Webhook::start_with(&plane, &url, LIMITED, &[]).await?;
    balancer.send_to(&[killed.address]);
    registered(&plane).await?;
    drop(killed);
    let limits = json!({"nvidia.com/gpu": "8"});
    let made = create(&client, &namespace, &pod("after-a-kill", limits)).await?;
    assert_eq!(names(&made, "initContainers"), [] as [&str; 0]);
    Ok(())
}

/// Waits until the API server calls the webhook: it learns of a registration with a delay.
pub(crate) async fn registered(plane: &ControlPlane) -> anyhow::Result<()> {
    let (client, namespace) = (plane.client().await?, opted_in(plane).await?);
    gets_checks(&client, &namespace, "nvidia.com/gpu").await
}

/// Waits until a pod that requests a resource gets checks, with a dry run.
async fn gets_checks(client: &Client, namespace: &str, resource: &str) -> anyhow::Result<()> {
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    wait_for("a pod that gets checks", SOON, || async {
        let probe = pod(&unique("probe"), json!({resource: "1"}));
        let made = create_with(&dry_run, client, namespace, &probe).await;
        let made = made.map_err(|error| error.to_string())?;
        let found = names(&made, "initContainers");
        if found.is_empty() {
            Err("it has none".to_owned())
        } else {
            Ok(())
        }
    })
    .await
}

pub(crate) async fn claims(client: &Client, namespace: &str) -> anyhow::Result<()> {
    let object = |kind: &str, plural: &str| {
        let kind = GroupVersionKind::gvk("resource.k8s.io", "v1", kind);
        ApiResource::from_gvk_with_plural(&kind, plural)
    };
    let classes: Api<DynamicObject> =
        Api::all_with(client.clone(), &object("DeviceClass", "deviceclasses"));
    let class: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "gpu.nvidia.com"},
        "spec": {"extendedResourceName": "vendor.example/gpu"},
    }))?;
    classes.create(&PostParams::default(), &class).await?;
    let kind = object("ResourceClaimTemplate", "resourceclaimtemplates");
    let templates: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &kind);
    let request =
        json!({"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}});
    let template: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "gpus"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }))?;
    templates.create(&PostParams::default(), &template).await?;
    // The webhook watches device classes.
    gets_checks(client, namespace, "vendor.example/gpu").await
}

#[tokio::test]
async fn replicas_and_certificates_change_and_no_pod_is_refused() -> anyhow::Result<()> {
    let Some(plane) = plane().await? else {
        return Ok(());
    };
    let balancer = Balancer::start().await?;
    let url = format!("https://{}", balancer.address());
    let flags = [
        "--keep-registration",
        "--failure-policy",
        "Fail",
        // Renewed when ten seconds are left, also by a busy machine in time.
        "--certificate-lifetime",
        "30s",
        "--drain",
        "4s",
    ];
    let first = Webhook::start(&plane, &url, &flags).await?;
    let second = Webhook::start(&plane, &url, &flags).await?;
    first.says("ready\n").await?;
    second.says("ready\n").await?;
    balancer.send_to(&[first.address, second.address]);
    registered(&plane).await?;
    let mut creating = Creating::start(plane.client().await?, opted_in(&plane).await?);
    creating.goes_on().await?;
    // A roll-out as in a Deployment: the new replica starts before the old one ends. The old one
    // receives requests until it closes its port, because nodes learn late of removed endpoints.
    let third = Webhook::start(&plane, &url, &flags).await?;
    balancer.send_to(&[first.address, second.address, third.address]);
    creating.goes_on().await?;
    first.tell_to_end()?;
    first.says("it is about to end").await?;
    first.end().await?;
    creating.goes_on().await?;
    let fourth = Webhook::start(&plane, &url, &flags).await?;
    balancer.send_to(&[second.address, third.address, fourth.address]);
    second.end().await?;
    let certificates = || async {
        let logs = fourth.log() + &third.log();
        match logs.matches("a new certificate is made").count() {
            0 | 1 => Err(logs),
            _ => Ok(()),
        }
    };
    wait_for("two new certificates", SOON * 2, certificates).await?;
    // With the certificate that is served then.
    creating.goes_on().await?;
    creating.end().await?;
    third.end().await?;
    fourth.end().await
}

/// Pods that are created one after the other; each must get its checks.
struct Creating {
    made: watch::Receiver<u32>,
    enough: Arc<AtomicBool>,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Creating {
    fn start(client: kube::Client, namespace: String) -> Self {
        let (count, made) = watch::channel(0);
        let enough = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&enough);
        let task = tokio::spawn(async move {
            while !ends.load(Ordering::Relaxed) {
                let name = format!("p-{}", *count.borrow());
                let pod = pod(&name, json!({"nvidia.com/gpu": "2"}));
                let pod = create(&client, &namespace, &pod).await?;
                anyhow::ensure!(names(&pod, "initContainers") == [DIAG, LOOPBACK]);
                count.send_modify(|made| *made += 1);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(())
        });
        Self { made, enough, task }
    }

    /// Waits until more pods were created and none was refused.
    async fn goes_on(&mut self) -> anyhow::Result<()> {
        let wanted = *self.made.borrow() + 20;
        let made = self.made.wait_for(|made| *made >= wanted);
        let made = tokio::time::timeout(SOON, made).await;
        match made.context("no pods are made")?.map(drop) {
            Ok(()) => Ok(()),
            // A pod was refused, and the creating task has ended.
            Err(_) => (&mut self.task).await?,
        }
    }

    async fn end(self) -> anyhow::Result<()> {
        self.enough.store(true, Ordering::Relaxed);
        self.task.await?
    }
}

/// Registers the webhook as the issuer of its certificate does.
async fn register(plane: &ControlPlane, url: &str, authority: &Authority) -> anyhow::Result<()> {
    let registration = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "somebody-elses"},
        "webhooks": [{
            "name": "preflight.nvsentinel.nvidia.com",
            "clientConfig": {
                "url": format!("{url}/mutate"),
                "caBundle": ByteString(authority.pem().into()),
            },
            "rules": [{
                "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"],
                "operations": ["CREATE"],
            }],
            "namespaceSelector": {"matchLabels": {"nvsentinel.nvidia.com/preflight": "enabled"}},
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }],
    });
    apply(plane, &registration.to_string()).await
}

/// cert-manager, and the service CA of `OpenShift`, keep files in the pod and the authority in
/// the registration.
#[tokio::test]
async fn a_certificate_of_somebody_else_is_served_as_it_changes() -> anyhow::Result<()> {
    let Some(plane) = plane().await? else {
        return Ok(());
    };
    let (balancer, files) = (Balancer::start().await?, tempfile::tempdir()?);
    let url = format!("https://{}", balancer.address());
    let sign = || {
        let authority = Authority::new("somebody else")?;
        let signed = authority.sign(Purpose::Server, "webhook", &["127.0.0.1"])?;
        signed.write(files.path(), "webhook")?;
        anyhow::Ok(authority)
    };
    let authority = sign()?;
    let file = |name: &str| files.path().join(name).display().to_string();
    let flags = [
        "--namespace",
        NAMESPACE,
        "--tls-cert",
        &file("webhook.crt"),
        "--tls-key",
        &file("webhook.key"),
    ];
    let webhook = Webhook::start_reached(plane.kubeconfig(), CONFIG, &flags).await?;
    balancer.send_to(&[webhook.address]);
    register(&plane, &url, &authority).await?;
    registered(&plane).await?;

    register(&plane, &url, &sign()?).await?;
    registered(&plane).await?;
    let there = ["get", "mutatingwebhookconfigurations", "-o", "name"];
    let there = plane.kubectl(there).await?;
    assert!(there.trim().ends_with("/somebody-elses"), "{there}");
    assert_eq!(there.lines().count(), 1, "{there}");
    webhook.end().await
}

/// With slow links between its GPUs, a pod does not start, and its node is quarantined. The node
/// returns once the same check passes.
#[tokio::test]
async fn a_pod_on_bad_links_does_not_start_and_its_node_goes_out() -> anyhow::Result<()> {
    let Some(plane) = plane().await? else {
        return Ok(());
    };
    let balancer = Balancer::start().await?;
    let url = format!("https://{}", balancer.address());
    let webhook = Webhook::start(&plane, &url, &[]).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    // kwok would complete the containers by itself.
    let scene = Scene::new(&plane, NodeBuilder::without_kubelet, |launch| launch).await?;
    let (client, namespace) = (plane.client().await?, opted_in(&plane).await?);
    let mut asked = pod("slow", json!({"nvidia.com/gpu": "2"}));
    asked["spec"]["nodeName"] = scene.node.clone().into();
    let made = create(&client, &namespace, &asked).await?;

    let gpus = tempfile::tempdir()?;
    let library = |name: &str| gpus.path().join(name).display().to_string();
    let socket = format!("unix://{}", scene.product.socket().display());
    let (cuda, nccl) = (library(fakes::CUDA_LIBRARY), library(fakes::NCCL_LIBRARY));
    let (nvml, log) = (library(fakes::LIBRARY), library("termination-log"));
    let more = [
        ("NODE_NAME", &*scene.node),
        ("PLATFORM_CONNECTOR_SOCKET", &*socket),
        ("GPUWARDEN_CUDA_LIBRARY", &*cuda),
        ("GPUWARDEN_NCCL_LIBRARY", &*nccl),
        ("GPUWARDEN_NVML_LIBRARY", &*nvml),
        ("TEST_SIZE_MB", "1"),
        ("GPUWARDEN_TERMINATION_LOG", &*log),
    ];
    std::fs::write(&log, "")?;
    let mut links = fakes::Scenario::healthy(2);
    links.nccl.bandwidth_gb_s = 20.0;
    fakes::install(gpus.path(), &links)?;
    let end = play(&plane, &made, LOOPBACK, &more).await?;
    let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
    assert_eq!(end.status.code(), Some(1), "{said}");
    note_end(&client, &made, LOOPBACK, 1, &std::fs::read_to_string(&log)?).await?;
    let shown = plane
        .kubectl(["get", "pod", "slow", "-n", &namespace, "--no-headers"])
        .await?;
    assert!(shown.contains("Init:Error"), "{shown}");
    // The pod's Events name the reason.
    wait_for("an Event on the pod", SOON, || async {
        let described = plane.kubectl(["describe", "pod", "slow", "-n", &namespace]);
        let described = described.await.map_err(|error| error.to_string())?;
        let mut lines = described.lines().map(str::trim_start);
        let found = lines.any(|line| {
            line.starts_with("Warning  PreflightCheckFailed")
                && line.contains(
                    "The preflight check preflight-nccl-loopback failed with exit code 1: ",
                )
                && line.contains("NCCL_BW_DEGRADED")
        });
        if found { Ok(()) } else { Err(described) }
    })
    .await?;
    scene.cordoned().await?;
    let events = scene.product.client(["events", "-o", "json"]).await?;
    assert!(events.expect(0)?.contains("NCCL_BW_DEGRADED"), "{events:?}");

    links.nccl.bandwidth_gb_s = 400.0;
    fakes::write(gpus.path(), &links)?;
    let end = play(&plane, &made, LOOPBACK, &more).await?;
    assert_eq!(
        end.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&end.stderr)
    );
    scene.restored().await?;
    webhook.end().await
}
