//! Generic provider with a real API server. There is no kubelet; the test updates nodes and
//! pods itself.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use cluster::{Cluster, ConnectOptions, ObjectKind};
use gpuwarden_janitor::client::Remote;
use gpuwarden_janitor::conformance::{self, Weather, World};
use gpuwarden_janitor::generic::Generic;
use gpuwarden_janitor::server::{self, AUDIENCE, Callers};
use gpuwarden_janitor::{Provider, Signal};
use maintenance::gpu_reset::ResetSettings;
use maintenance::janitor::generic::{GenericConfig, JOB_LABEL, NODE_LABEL};
use maintenance::janitor::{Action, Class, ProviderPlace};
use runtime::tls::{CertificateFiles, ClientCertificates, ServerTls};
use serde_json::{Value, json};
use testkit::{Authority, ControlPlane, Purpose, Version, unique};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Longest wait for the cluster's controllers.
const SOON: std::time::Duration = std::time::Duration::from_secs(60);

struct Jobs {
    plane: ControlPlane,
    cluster: Arc<Cluster>,
    generic: Arc<Generic>,
    namespace: String,
}

impl Jobs {
    async fn new() -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
            return Ok(None);
        };
        let namespace = unique("generic");
        plane.namespace(&namespace).await?;
        let options = ConnectOptions {
            kubeconfig: Some(plane.kubeconfig().to_owned()),
            ..ConnectOptions::default()
        };
        let cluster = Arc::new(Cluster::connect(options).await?);
        let config = GenericConfig::default();
        let generic = Generic::new(Arc::clone(&cluster), config, &namespace);
        let generic = Arc::new(generic.with_resets(Some(ResetSettings::of_job("reset:1"))));
        Ok(Some(Self {
            plane,
            cluster,
            generic,
            namespace,
        }))
    }

    async fn jobs(&self, machine: &str) -> Vec<Value> {
        let jobs = ObjectKind::new("batch", "v1", "jobs");
        let selector = format!("{JOB_LABEL}=true,{NODE_LABEL}={machine}");
        let found = self.cluster.some_objects(&jobs, &self.namespace, &selector);
        found.await.unwrap()
    }

    /// Returns the Jobs that reset a machine's GPUs.
    async fn resets(&self, machine: &str) -> Vec<Value> {
        let jobs = ObjectKind::new("batch", "v1", "jobs");
        let found = self
            .cluster
            .some_objects(&jobs, &self.namespace, "app=gpu-reset");
        let mut found = found.await.unwrap();
        found.retain(|job| job["spec"]["template"]["spec"]["nodeName"] == machine);
        found
    }

    /// Waits for the pod of a Job.
    async fn pod(&self, job: &Value) -> Value {
        let pods = ObjectKind::new("", "v1", "pods");
        let name = job["metadata"]["name"].as_str().unwrap();
        let selector = format!("batch.kubernetes.io/job-name={name}");
        let found = || async {
            let found = self.cluster.some_objects(&pods, &self.namespace, &selector);
            let found = found.await.map_err(|error| error.to_string())?;
            found.into_iter().next().ok_or_else(|| "no pod".to_owned())
        };
        testkit::wait_for("the pod of the Job", SOON, found)
            .await
            .unwrap()
    }

    /// Sets the status of a pod, in the role of the kubelet.
    async fn set_pod(&self, pod: &Value, status: &Value) {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let status = json!({"status": status}).to_string();
        let namespace = self.namespace.as_str();
        let patch = [
            "-n",
            namespace,
            "patch",
            "pod",
            name,
            "--subresource=status",
            "-p",
            &status,
        ];
        self.plane.kubectl(patch).await.unwrap();
    }
}

/// Sets boot id and readiness of a node, in the role of the kubelet.
pub(crate) async fn set_boot(cluster: &Cluster, machine: &str, id: &str) {
    let ready = json!({"type": "Ready", "status": "True", "reason": "Played", "message": "",
        "lastHeartbeatTime": jiff::Timestamp::now(), "lastTransitionTime": jiff::Timestamp::now()});
    let info = json!({"status": {"conditions": [ready], "nodeInfo": {
        "bootID": id, "machineID": "m", "systemUUID": "s", "kernelVersion": "k", "osImage": "o",
        "containerRuntimeVersion": "c", "kubeletVersion": "v1.37.1", "kubeProxyVersion": "",
        "operatingSystem": "linux", "architecture": "amd64",
    }}});
    let nodes = ObjectKind::new("", "v1", "nodes");
    cluster.merge_status(&nodes, machine, &info).await.unwrap();
}

#[async_trait]
impl World for Jobs {
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.generic) as Arc<dyn Provider>
    }

    async fn machine(&self) -> String {
        let name = unique("machine");
        let client = self.plane.client().await.unwrap();
        // The test is the only writer of the node's status.
        let node = testkit::node(&name).without_kubelet();
        node.create(&client).await.unwrap();
        set_boot(&self.cluster, &name, "boot-1").await;
        name
    }

    async fn set(&self, weather: Weather) -> bool {
        // A real API server cannot be made to throttle or to lose responses.
        weather == Weather::Fine
    }

    async fn boots(&self, machine: &str) {
        set_boot(&self.cluster, machine, "boot-2").await;
    }

    async fn fails(&self, machine: &str) -> bool {
        let job = self.jobs(machine).await.remove(0);
        let pod = self.pod(&job).await;
        // The pod bypasses scheduler and taints.
        assert_eq!(pod["spec"]["nodeName"], machine);
        let status = json!({"containerStatuses": [{
            "name": "reboot", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": "ImagePullBackOff"}},
        }]});
        self.set_pod(&pod, &status).await;
        true
    }

    async fn resets(&self, machine: &str, well: bool) -> bool {
        if !well {
            return false; // Three pods fail, half a minute apart.
        }
        let job = Self::resets(self, machine).await.remove(0);
        let pod = self.pod(&job).await;
        self.set_pod(&pod, &json!({"phase": "Succeeded"})).await;
        let ended = || async {
            let job = Self::resets(self, machine).await.remove(0);
            let end = job["status"]["completionTime"].as_str().map(str::to_owned);
            end.ok_or_else(|| job["status"].to_string())
        };
        testkit::wait_for("the end of the Job", SOON, ended)
            .await
            .unwrap();
        true
    }

    async fn signals(&self, machine: &str) -> usize {
        self.jobs(machine).await.len() + self.resets(machine).await.len()
    }
}

#[tokio::test]
async fn the_generic_provider_passes_what_every_provider_has_to() -> anyhow::Result<()> {
    let Some(world) = Jobs::new().await? else {
        return Ok(());
    };
    conformance::all(&world).await;
    Ok(())
}

#[tokio::test]
async fn the_api_server_takes_the_job_as_it_is_meant() -> anyhow::Result<()> {
    let Some(world) = Jobs::new().await? else {
        return Ok(());
    };
    for (at, (use_sysrq, write_syslog)) in
        [(false, false), (false, true), (true, false), (true, true)]
            .into_iter()
            .enumerate()
    {
        let config = GenericConfig {
            use_sysrq,
            write_syslog,
            image_pull_secrets: vec!["secret".to_owned()],
            ..GenericConfig::default()
        };
        let generic = Generic::new(Arc::clone(&world.cluster), config, &world.namespace);
        let machine = world.machine().await;
        let signal = Signal::new(Action::Reboot, &machine, &format!("op-{at}-{machine}"));
        assert_eq!(generic.send(&signal).await.unwrap(), "boot-1");
        let job = world.jobs(&machine).await.remove(0);
        let spec = &job["spec"];
        assert_eq!(
            (&spec["backoffLimit"], &spec["ttlSecondsAfterFinished"]),
            (&json!(0), &json!(3600))
        );
        let pod = &spec["template"]["spec"];
        let container = &pod["containers"][0];
        assert_eq!(container["securityContext"]["privileged"], true);
        assert_eq!(pod["tolerations"], json!([{"operator": "Exists"}]));
        assert_eq!(pod["imagePullSecrets"], json!([{"name": "secret"}]));
        let script = container["command"][2].as_str().unwrap();
        assert_eq!(script.contains("sysrq-trigger"), use_sysrq, "{script}");
        assert_eq!(script.contains("logger"), write_syslog, "{script}");
        let mounts = container["volumeMounts"].as_array().unwrap();
        let mounts: BTreeSet<&str> = mounts
            .iter()
            .map(|one| one["name"].as_str().unwrap())
            .collect();
        assert_eq!(mounts.contains("host-proc"), use_sysrq);
        assert_eq!(mounts.contains("host-root"), !use_sysrq || write_syslog);
    }
    // Without namespace or boot id, nothing is created and the reason is reported.
    let machine = world.machine().await;
    let generic = Generic::new(
        Arc::clone(&world.cluster),
        GenericConfig::default(),
        "nowhere",
    );
    let signal = Signal::new(Action::Reboot, &machine, "op");
    let failure = generic.send(&signal).await.unwrap_err();
    assert_eq!(failure.class, Class::Permanent, "{failure:?}");
    Ok(())
}

#[tokio::test]
async fn only_listed_accounts_with_a_token_for_the_provider_may_call() -> anyhow::Result<()> {
    let Some(world) = Jobs::new().await? else {
        return Ok(());
    };
    let (plane, namespace) = (&world.plane, world.namespace.as_str());
    let token = |name: &'static str, audience: &'static str| async move {
        let audience = format!("--audience={audience}");
        plane
            .kubectl(["-n", namespace, "create", "token", name, &audience])
            .await
    };
    for name in ["janitor", "other"] {
        plane
            .kubectl(["-n", namespace, "create", "serviceaccount", name])
            .await?;
    }
    let directory = tempfile::tempdir()?;
    let authority = Authority::new("provider")?;
    let certificate = authority.sign(Purpose::Server, "localhost", &["localhost"])?;
    certificate.write(directory.path(), "tls")?;
    let ca = directory.path().join("ca.crt");
    std::fs::write(&ca, authority.pem())?;
    let files = CertificateFiles {
        certificate: directory.path().join("tls.crt"),
        key: directory.path().join("tls.key"),
    };
    let tls = Arc::new(ServerTls::load(files, ClientCertificates::None)?);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let allowed = BTreeSet::from([format!("system:serviceaccount:{namespace}:janitor")]);
    let callers = Callers::by_token(Arc::clone(&world.cluster), AUDIENCE.to_owned(), allowed);
    let end = CancellationToken::new();
    let _guard = end.clone().drop_guard();
    tokio::spawn(server::serve(
        listener,
        Some(tls),
        world.provider(),
        callers,
        end,
    ));
    let file = directory.path().join("token");
    let place = ProviderPlace::Tls {
        host: format!("localhost:{port}"),
        authority: ca.display().to_string(),
        token: file.display().to_string(),
    };
    let remote = Remote::open(&place)?;
    let machine = world.machine().await;
    let signal = Signal::new(Action::Reboot, &machine, &format!("op-of-{machine}"));
    // A missing token file, a token for another audience, or one of another account: nothing is
    // done.
    let missing = remote.send(&signal).await.unwrap_err();
    assert_eq!(missing.class, Class::Transient, "{missing:?}");
    for (name, audience, class, why) in [
        ("janitor", "somebody-else", Class::Transient, "audience"),
        ("other", AUDIENCE, Class::Permanent, "--callers"),
    ] {
        std::fs::write(&file, token(name, audience).await?)?;
        let failure = remote.send(&signal).await.unwrap_err();
        assert_eq!(failure.class, class, "{failure:?}");
        assert!(failure.message.contains(why), "{failure:?}");
    }
    assert_eq!(world.signals(&machine).await, 0);
    // The token file is read for each call.
    std::fs::write(&file, token("janitor", AUDIENCE).await?)?;
    assert_eq!(remote.send(&signal).await.unwrap(), "boot-1");
    assert_eq!(world.signals(&machine).await, 1);
    Ok(())
}
