//! Label provider with a real API server, and with a fake one that throttles and loses answers.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use cluster::{Cluster, ConnectOptions, ObjectKind};
use gpuwarden_janitor::conformance::{self, Weather, World};
use gpuwarden_janitor::label::Label;
use gpuwarden_janitor::{Provider, Signal};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use maintenance::janitor::label::{LabelConfig, VALUE};
use maintenance::janitor::{Action, Class, FoundOperation};
use serde_json::{Value, json};
use testkit::{ControlPlane, Version, unique};
use tokio::net::TcpListener;

use super::redfish::Nodes;

const REBOOT: &str = "example.com/reboot";
const TERMINATE: &str = "example.com/terminate";

/// Owner of the machines, who watches the labels of nodes.
struct Owner {
    nodes: Nodes,
    provider: Arc<Label>,
}

impl Owner {
    async fn new() -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
            return Ok(None);
        };
        let nodes = Nodes::of(plane).await?;
        let provider = Arc::new(Label::new(Arc::clone(&nodes.cluster), config()));
        Ok(Some(Self { nodes, provider }))
    }

    async fn merge(&self, machine: &str, change: Value) {
        let nodes = ObjectKind::new("", "v1", "nodes");
        let merged = self.nodes.cluster.merge_object(&nodes, machine, &change);
        merged.await.unwrap();
    }

    async fn metadata(&self, machine: &str) -> Value {
        self.nodes.node(machine).await["metadata"].clone()
    }
}

fn config() -> LabelConfig {
    LabelConfig {
        reboot: REBOOT.to_owned(),
        terminate: TERMINATE.to_owned(),
    }
}

#[async_trait]
impl World for Owner {
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.provider) as Arc<dyn Provider>
    }

    async fn machine(&self) -> String {
        let name = unique("label");
        self.nodes.make(&name).await;
        name
    }

    async fn set(&self, weather: Weather) -> bool {
        weather == Weather::Fine
    }

    async fn boots(&self, machine: &str) {
        super::generic::set_boot(&self.nodes.cluster, machine, "boot-2").await;
        let gone = json!({"metadata": {"labels": {REBOOT: null}}});
        self.merge(machine, gone).await;
    }

    async fn fails(&self, _machine: &str) -> bool {
        // An owner that does nothing cannot be told from a slow one.
        false
    }

    async fn signals(&self, machine: &str) -> usize {
        let labels = &self.metadata(machine).await["labels"];
        [REBOOT, TERMINATE]
            .map(|key| labels[key] == VALUE)
            .into_iter()
            .filter(|set| *set)
            .count()
    }
}

#[tokio::test]
async fn the_label_provider_passes_what_every_provider_has_to() -> anyhow::Result<()> {
    let Some(owner) = Owner::new().await? else {
        return Ok(());
    };
    conformance::all(&owner).await;
    Ok(())
}

#[tokio::test]
async fn an_owner_is_asked_once_by_a_label_and_never_beside_another_request() -> anyhow::Result<()>
{
    let Some(owner) = Owner::new().await? else {
        return Ok(());
    };
    let (provider, machine) = (owner.provider(), owner.machine().await);
    let signal = |action, operation: &str| Signal::new(action, &machine, operation);
    let reboot = signal(Action::Reboot, "op-1");
    assert_eq!(provider.send(&reboot).await.unwrap(), "boot-1");
    let metadata = owner.metadata(&machine).await;
    assert_eq!(metadata["labels"][REBOOT], "gpuwarden");
    let request = &metadata["annotations"][contract::keys::LABEL_REQUEST];
    let request: Value = serde_json::from_str(request.as_str().unwrap())?;
    let expected = json!({"operation": "op-1", "bootId": "boot-1", "key": REBOOT});
    assert_eq!(request, expected);
    // Also for the other action: two requests have two records.
    for action in [Action::Reboot, Action::Terminate] {
        let busy = provider.send(&signal(action, "op-2")).await.unwrap_err();
        assert_eq!(busy.class, Class::Transient);
        assert!(busy.message.contains(REBOOT), "{busy:?}");
    }
    // The owner removes the label first, and the machine boots later: it is not asked again.
    let gone = json!({"metadata": {"labels": {REBOOT: null}}});
    owner.merge(&machine, gone).await;
    assert!(!provider.is_ready(&reboot, "boot-1").await.unwrap());
    assert_eq!(provider.send(&reboot).await.unwrap(), "boot-1");
    let sent = FoundOperation::Sent("boot-1".to_owned());
    assert_eq!(provider.find(&reboot).await.unwrap(), sent);
    assert_eq!(owner.signals(&machine).await, 0);
    // A boot while the label is there is not the owner's.
    let other = signal(Action::Reboot, "op-3");
    assert_eq!(provider.send(&other).await.unwrap(), "boot-1");
    super::generic::set_boot(&owner.nodes.cluster, &machine, "boot-2").await;
    assert!(!provider.is_ready(&other, "boot-1").await.unwrap());
    owner.boots(&machine).await;
    assert!(provider.is_ready(&other, "boot-1").await.unwrap());
    // A label that somebody else has set is left alone.
    let machine = owner.machine().await;
    let theirs = json!({"metadata": {"labels": {REBOOT: "mine"}}});
    owner.merge(&machine, theirs).await;
    let refused = Signal::new(Action::Reboot, &machine, "op-4");
    let failure = provider.send(&refused).await.unwrap_err();
    assert_eq!(failure.class, Class::Transient);
    assert_eq!(owner.metadata(&machine).await["labels"][REBOOT], "mine");
    let found = provider.find(&refused).await.unwrap();
    assert_eq!(found, FoundOperation::NotSent);
    // No label is configured for this action.
    let only = LabelConfig {
        reboot: REBOOT.to_owned(),
        ..LabelConfig::default()
    };
    let only = Label::new(Arc::clone(&owner.nodes.cluster), only);
    let refused = only
        .send(&Signal::new(Action::Terminate, &machine, "op-5"))
        .await;
    assert_eq!(refused.unwrap_err().class, Class::Permanent);
    Ok(())
}

/// API server with nodes, and with trouble at each patch.
struct Fake {
    nodes: Mutex<BTreeMap<String, Value>>,
    patches: Mutex<BTreeMap<String, usize>>,
    weather: Mutex<Weather>,
}

/// A fake API server and its provider.
struct Trouble {
    fake: Arc<Fake>,
    provider: Arc<Label>,
    _kubeconfig: tempfile::TempDir,
}

impl Fake {
    /// Answers a request. An error breaks the connection.
    async fn answer(&self, request: Request<Incoming>) -> io::Result<Response<Full<Bytes>>> {
        let name = request
            .uri()
            .path()
            .trim_start_matches("/api/v1/nodes/")
            .to_owned();
        if request.method() == Method::PATCH {
            let weather = *self.weather.lock().unwrap();
            match weather {
                Weather::Throttled(_) => return Ok(status(StatusCode::TOO_MANY_REQUESTS)),
                Weather::Forbidden => return Ok(status(StatusCode::FORBIDDEN)),
                Weather::Away => return Err(io::ErrorKind::BrokenPipe.into()),
                Weather::Slow(time) => tokio::time::sleep(time).await,
                Weather::Fine | Weather::AnswerLost => {}
            }
            let body = request
                .into_body()
                .collect()
                .await
                .map_err(io::Error::other)?;
            let patch: Vec<Value> = serde_json::from_slice(&body.to_bytes())?;
            self.apply(&name, &patch);
            *self
                .patches
                .lock()
                .unwrap()
                .entry(name.clone())
                .or_default() += 1;
            if weather == Weather::AnswerLost {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        let node = self.nodes.lock().unwrap().get(&name).cloned();
        Ok(node.map_or_else(
            || status(StatusCode::NOT_FOUND),
            |node| Response::new(Full::new(node.to_string().into())),
        ))
    }

    /// Applies a patch whose tests hold: only requests of one provider arrive.
    fn apply(&self, name: &str, patch: &[Value]) {
        let mut nodes = self.nodes.lock().unwrap();
        let metadata = &mut nodes.get_mut(name).unwrap()["metadata"];
        for operation in patch.iter().filter(|one| one["op"] == "add") {
            let path = operation["path"].as_str().unwrap();
            let path: Vec<_> = path
                .split('/')
                .skip(2)
                .map(|part| part.replace("~1", "/"))
                .collect();
            match path.as_slice() {
                [map] => metadata[map] = operation["value"].clone(),
                [map, key] => metadata[map][key] = operation["value"].clone(),
                other => panic!("{other:?}"),
            }
        }
    }
}

fn status(code: StatusCode) -> Response<Full<Bytes>> {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
        "code": code.as_u16(), "reason": "", "message": "trouble"});
    let mut answer = Response::new(Full::new(status.to_string().into()));
    *answer.status_mut() = code;
    answer
}

impl Trouble {
    async fn new() -> anyhow::Result<Self> {
        let fake = Arc::new(Fake {
            nodes: Mutex::default(),
            patches: Mutex::default(),
            weather: Mutex::new(Weather::Fine),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let server = format!("http://{}", listener.local_addr()?);
        let serving = Arc::clone(&fake);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let fake = Arc::clone(&serving);
                let service = service_fn(move |request| {
                    let fake = Arc::clone(&fake);
                    async move { fake.answer(request).await }
                });
                let http = hyper::server::conn::http1::Builder::new();
                tokio::spawn(http.serve_connection(TokioIo::new(stream), service));
            }
        });
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": server}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
        });
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("kubeconfig");
        std::fs::write(&path, kubeconfig.to_string())?;
        let options = ConnectOptions {
            kubeconfig: Some(path),
            ..ConnectOptions::default()
        };
        let cluster = Arc::new(Cluster::connect(options).await?);
        Ok(Self {
            fake,
            provider: Arc::new(Label::new(cluster, config())),
            _kubeconfig: directory,
        })
    }
}

#[async_trait]
impl World for Trouble {
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.provider) as Arc<dyn Provider>
    }

    async fn machine(&self) -> String {
        let name = unique("label");
        let node = json!({
            "metadata": {"name": name, "uid": "u", "resourceVersion": "1"},
            "status": {
                "conditions": [{"type": "Ready", "status": "True"}],
                "nodeInfo": {"bootID": "boot-1"},
            },
        });
        self.fake.nodes.lock().unwrap().insert(name.clone(), node);
        name
    }

    async fn set(&self, weather: Weather) -> bool {
        // The client would hold back all requests for that time.
        if matches!(weather, Weather::Throttled(Some(_))) {
            return false;
        }
        *self.fake.weather.lock().unwrap() = weather;
        true
    }

    async fn boots(&self, machine: &str) {
        let mut nodes = self.fake.nodes.lock().unwrap();
        let node = nodes.get_mut(machine).unwrap();
        node["status"]["nodeInfo"]["bootID"] = json!("boot-2");
        node["metadata"]["labels"] = json!({});
    }

    async fn fails(&self, _machine: &str) -> bool {
        false
    }

    async fn signals(&self, machine: &str) -> usize {
        let patches = self.fake.patches.lock().unwrap();
        patches.get(machine).copied().unwrap_or_default()
    }
}

#[tokio::test]
async fn the_class_of_a_failure_tells_whether_the_label_may_be_set() -> anyhow::Result<()> {
    conformance::all(&Trouble::new().await?).await;
    Ok(())
}
