//! Policies over many pods: memory and processor time of the controller, beside a program that
//! watches the same pods and keeps them whole, and beside a controller without policies.
//!
//! The program is this one, started again with `--whole`.

use std::collections::HashMap;
use std::io::Write as _;
use std::pin::pin;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, anyhow, bail, ensure};
use cli::bench::{Figure, TICKS, Usage, cluster_client, progress};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Namespace;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::core::Request;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::{Args, processor_time, product};

/// Most pods that change in one measurement.
const CHANGES: usize = 2_000;
/// Concurrent requests.
const WIDTH: usize = 8;
/// Pods of one page of a list.
const PAGE: u32 = 500;
/// Longest time until all pods, or all changes, are seen.
const LIMIT: Duration = Duration::from_secs(300);
/// Pause between two looks at the metrics.
const POLL: Duration = Duration::from_millis(200);
/// Time without a change before a process is measured.
const SETTLE: Duration = Duration::from_secs(3);
/// Timeout of a watch on the server, in seconds: longer than a measurement.
const WATCH_SECONDS: u32 = 3_600;
/// Attempts to delete all pods.
const DELETE_TRIES: usize = 10;

/// Policy over the pods of a namespace: a pod that fails, or whose container crashes again and again.
const POLICY: &str = r#"
[[policies]]
name = "bench"
enabled = true
resource = { version = "v1", kind = "Pod", namespace = "NAMESPACE" }
predicate.expression = '''
resource.status.phase == "Failed" ||
(has(resource.status.containerStatuses) && resource.status.containerStatuses.exists(s,
  has(s.state) && has(s.state.waiting) && s.state.waiting.reason == "CrashLoopBackOff"))
'''
nodeAssociation.expression = "resource.spec.nodeName"
healthEvent.componentClass = "Software"
healthEvent.isFatal = false
healthEvent.recommendedAction = "NONE"
"#;

/// Pods of a run, in a namespace of their own.
struct Pods {
    client: Client,
    namespace: String,
    count: usize,
}

/// The program that keeps the pods whole.
struct Whole {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pid: u32,
}

pub(crate) async fn run(args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    for count in args.fleet.iter().map(|count| usize::from(*count)) {
        progress(&format!("objects, making {count} pods ..."));
        let pods = Pods::new(args, count).await?;
        let measured = tokio::select! {
            measured = measure(args, &pods) => measured,
            _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
        };
        let deleted = pods.delete().await;
        rows.extend(measured?);
        deleted?;
    }
    Ok(())
}

async fn measure(args: &Args, pods: &Pods) -> anyhow::Result<Vec<Figure>> {
    pods.make().await?;
    let count = pods.count;
    let name = format!("objects-{count}");
    progress(&format!("{name}, without policies ..."));
    let observer = product::start(product::observer(args)?).await?;
    tokio::time::sleep(SETTLE).await;
    let without = Usage::read(observer.pid())?;
    drop(observer);

    progress(&format!("{name}, with a policy ..."));
    let policy = tempfile::NamedTempFile::new()?;
    std::fs::write(policy.path(), POLICY.replace("NAMESPACE", &pods.namespace))?;
    let watching = product::observer(args)?.option("--objects", policy.path());
    let watching = product::start(watching).await?;
    let reached = async |metric: &str, number: f64| -> anyhow::Result<()> {
        let deadline = Instant::now() + LIMIT;
        while product::metric(&watching, metric).await? < number {
            ensure!(
                Instant::now() < deadline,
                "{metric} does not reach {number}"
            );
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    };
    reached("gpuwarden_objects_kept", as_f64(count)).await?;
    let whole = Whole::start(args, &pods.namespace).await?;
    tokio::time::sleep(SETTLE).await;
    let (with, kept) = (Usage::read(watching.pid())?, Usage::read(whole.pid)?);
    let bytes = product::metric(&watching, "gpuwarden_objects_kept_bytes").await?;
    let size = pods.size().await?;

    let changes = count.min(CHANGES);
    progress(&format!("{name}, {changes} changes ..."));
    let records = "gpuwarden_objects_records_total";
    let before = product::metric(&watching, records).await?;
    let used = [watching.pid(), whole.pid].map(processor_time);
    pods.change(changes).await?;
    reached(records, before + as_f64(changes)).await?;
    tokio::time::sleep(SETTLE).await;
    let each = |before: anyhow::Result<Duration>, pid: u32| {
        let used = processor_time(pid)?.saturating_sub(before?);
        anyhow::Ok(used.as_secs_f64() * 1_000.0 / as_f64(changes))
    };
    let [mine, theirs] = used;
    let (mine, theirs) = (each(mine, watching.pid())?, each(theirs, whole.pid)?);
    let seen = whole.end().await?;
    ensure!(
        seen >= changes,
        "the bare watch has seen {seen} of {changes} changes"
    );

    let memory = Figure::new(format!("{name}.memory"), with.own, "MiB");
    let resolution = 1_000.0 / TICKS / as_f64(changes);
    Ok(vec![
        memory.beside("whole pods", kept.own).note(format!(
            "without what is shared with a file; {:.1} MiB without policies; RSS {:.1} MiB, that of the \
             bare watch {:.1}; peak {:.1} and {:.1} MiB",
            without.own, with.rss, kept.rss, with.peak, kept.peak
        )),
        Figure::new(format!("{name}.kept"), bytes / as_f64(count), "bytes/pod")
            .beside("whole pods", as_f64(size)),
        Figure::new(format!("{name}.change"), mine, "ms")
            .beside("whole pods", theirs)
            .note(format!(
                "processor time for each of {changes} changes of a field that the policy reads; \
                 resolution {resolution:.3}"
            )),
    ])
}

#[allow(clippy::cast_precision_loss)] // Far below 2^53.
fn as_f64(number: usize) -> f64 {
    number as f64
}

/// Watches the pods of a namespace and keeps them whole, until the standard input ends. Prints a line
/// once all are listed, and at the end the number of changes since then.
pub(crate) async fn watch_whole(args: &Args, namespace: &str) -> anyhow::Result<()> {
    let client = client(args).await?;
    let path = path(namespace);
    let mut pods: HashMap<String, Value> = HashMap::new();
    let mut params = ListParams::default().limit(PAGE);
    let version = loop {
        let mut list: Value = client.request(Request::new(&path).list(&params)?).await?;
        if let Value::Array(items) = list["items"].take() {
            pods.extend(items.into_iter().map(|pod| (name_of(&pod), pod)));
        }
        let text = |key: &str| {
            list["metadata"][key]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        match text("continue") {
            token if token.is_empty() => break text("resourceVersion"),
            token => params = params.continue_token(&token),
        }
    };
    writeln!(std::io::stdout(), "{}", pods.len())?;
    let watch = WatchParams::default().timeout(WATCH_SECONDS);
    let request = Request::new(&path).watch(&watch, &version)?;
    let mut events = pin!(client.request_events::<Value>(request).await?);
    let mut input = tokio::io::stdin();
    let mut byte = [0];
    let mut changes = 0_usize;
    loop {
        tokio::select! {
            _ = input.read(&mut byte) => break,
            event = events.next() => match event.context("the watch has ended")?? {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                    changes += 1;
                    pods.insert(name_of(&pod), pod);
                }
                WatchEvent::Deleted(pod) => {
                    pods.remove(&name_of(&pod));
                }
                WatchEvent::Bookmark(_) => {}
                WatchEvent::Error(status) => bail!("{}", status.message),
            },
        }
    }
    writeln!(std::io::stdout(), "{changes}")?;
    Ok(())
}

fn name_of(pod: &Value) -> String {
    let name = pod["metadata"]["name"].as_str();
    name.unwrap_or_default().to_owned()
}

fn path(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/pods")
}

async fn client(args: &Args) -> anyhow::Result<Client> {
    let path = args.kubeconfig.as_ref().context("no kubeconfig is named")?;
    cluster_client(path, args.context.as_deref()).await
}

// === impl Whole ===

impl Whole {
    /// Starts the program, and waits until it has listed all pods.
    async fn start(args: &Args, namespace: &str) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--whole", namespace]);
        let kubeconfig = args.kubeconfig.as_ref().context("no kubeconfig is named")?;
        command.arg("--kubeconfig").arg(kubeconfig);
        if let Some(context) = &args.context {
            command.args(["--context", context]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn()?;
        let pid = child.id().context("the bare watch has ended")?;
        let input = child.stdin.take().context("no standard input")?;
        let output = child.stdout.take().context("no standard output")?;
        let mut output = BufReader::new(output);
        number(&mut output).await?;
        Ok(Self {
            child,
            input,
            output,
            pid,
        })
    }

    /// Ends the program. Returns the number of changes that it has seen.
    async fn end(self) -> anyhow::Result<usize> {
        let Self {
            mut child,
            input,
            mut output,
            ..
        } = self;
        drop(input);
        let seen = number(&mut output).await?;
        child.wait().await?;
        Ok(seen)
    }
}

/// Reads the next number that the program prints.
async fn number(output: &mut BufReader<ChildStdout>) -> anyhow::Result<usize> {
    let mut line = String::new();
    output.read_line(&mut line).await?;
    line.trim().parse().context("the bare watch has failed")
}

// === impl Pods ===

impl Pods {
    async fn new(args: &Args, count: usize) -> anyhow::Result<Self> {
        let client = client(args).await?;
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let namespace = format!("gpuwarden-bench-{:x}", since.as_micros());
        let object = serde_json::from_value(json!({"metadata": {"name": namespace}}))?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.create(&PostParams::default(), &object).await?;
        Ok(Self {
            client,
            namespace,
            count,
        })
    }

    async fn make(&self) -> anyhow::Result<()> {
        let made = (0..self.count).map(|index| {
            let client = self.client.clone();
            let request = Request::new(path(&self.namespace));
            let pod = pod(index);
            async move {
                let body = serde_json::to_vec(&pod)?;
                let request = request.create(&PostParams::default(), body)?;
                client.request::<Value>(request).await?;
                anyhow::Ok(())
            }
        });
        stream::iter(made)
            .buffer_unordered(WIDTH)
            .try_collect::<Vec<()>>()
            .await
            .context("make a pod")?;
        Ok(())
    }

    /// Changes the phase of the first `count` pods.
    async fn change(&self, count: usize) -> anyhow::Result<()> {
        let body = serde_json::to_vec(&json!({"status": {"phase": "Running"}}))?;
        let changed = (0..count).map(|index| {
            let client = self.client.clone();
            let path = format!("{}/{}/status", path(&self.namespace), pod_name(index));
            let request = http::Request::patch(path)
                .header(http::header::CONTENT_TYPE, "application/merge-patch+json")
                .body(body.clone());
            async move {
                client.request::<Value>(request?).await?;
                anyhow::Ok(())
            }
        });
        stream::iter(changed)
            .buffer_unordered(WIDTH)
            .try_collect::<Vec<()>>()
            .await
            .context("change a pod")?;
        Ok(())
    }

    /// Returns the size of the first pod, as the API server sends it (bytes).
    async fn size(&self) -> anyhow::Result<usize> {
        let path = format!("{}/{}", path(&self.namespace), pod_name(0));
        let request = http::Request::get(path).body(Vec::new())?;
        Ok(self.client.request_text(request).await?.len())
    }

    async fn delete(self) -> anyhow::Result<()> {
        let now = DeleteParams::default().grace_period(0);
        let all = ListParams::default();
        let mut answer = Ok(());
        for _ in 0..DELETE_TRIES {
            let request = Request::new(path(&self.namespace)).delete_collection(&now, &all)?;
            answer = self.client.request::<Value>(request).await.map(drop);
            if answer.is_ok() {
                break;
            }
        }
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces
            .delete(&self.namespace, &DeleteParams::default())
            .await?;
        answer.with_context(|| format!("delete the pods of the namespace {}", self.namespace))
    }
}

fn pod_name(index: usize) -> String {
    format!("train-{index:05}")
}

/// Returns a pod of about the size of one of a training job, which no scheduler binds.
fn pod(index: usize) -> Value {
    let env: Vec<Value> = (0..30)
        .map(|number| json!({"name": format!("SETTING_{number}"), "value": "x".repeat(40)}))
        .collect();
    let mounts = json!([
        {"name": "dev-shm", "mountPath": "/dev/shm"},
        {"name": "data", "mountPath": "/data"},
    ]);
    let container = |name: &str| {
        json!({
            "name": name,
            "image": "registry.example/training:1",
            "env": env,
            "volumeMounts": mounts,
            "resources": {"limits": {"cpu": "64", "memory": "512Gi"}},
        })
    };
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(index),
            "labels": {"app": "train", "job": format!("job-{}", index / 64)},
            "annotations": {"note": "x".repeat(400)},
        },
        "spec": {
            "schedulerName": "none",
            "containers": [container("main"), container("sidecar")],
            "volumes": [
                {"name": "dev-shm", "emptyDir": {"medium": "Memory"}},
                {"name": "data", "emptyDir": {}},
            ],
        },
    })
}
