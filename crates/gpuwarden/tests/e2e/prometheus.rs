//! Alert rules and dashboards with the real Prometheus and Alertmanager of Debian, which scrape
//! the product through faults, a storm, a pause, blindness and its end.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use contract::HealthEvent;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams};
use serde_json::Value;
use testkit::{
    Authority, Component, ControlPlane, Launch, Options, Private, Product, Purpose, Version, binary,
};

use crate::brake;
use crate::monitoring::{Monitoring, dashboards, repository};
use crate::runbook::{Reader, filled};
use crate::support::{SOON, event, own_port, recovery, send_to, xid};
use crate::webhook::{self, Webhook};

const NAMESPACE: &str = "gpuwarden";
/// Namespace of the pods that a drain waits for.
const JOBS: &str = "ml";
/// GPU nodes of the cluster.
const NODES: usize = 5;
/// Circuit breaker that trips on the third of five nodes, in a policy without budgets.
const BREAKER: &str = "[circuitBreaker]\npercentage = 40\nduration = \"10m\"\n";
/// Drain that waits for pods in [`JOBS`] until they have ended.
const DRAIN: &str = "[[userNamespaces]]\nname = \"ml\"\nmode = \"AllowCompletion\"\n";
/// Healthy driver of the observing product.
const HEALTHY: &str = "gpus = 2\n";
/// Driver that does not answer.
const HANGS: &str = "gpus = 2\n[calls]\nnvmlDeviceGetPowerUsage = \"hang\"\n";

/// Panels without data in the story below, as a start of their title: each needs a part that
/// does not run, or something that does not happen.
const EMPTY: [(&str, &str); 21] = [
    ("gpuwarden-itself", "Open conclusions"),
    ("gpuwarden-fleet", "Remediations that ended"),
    ("gpuwarden-fleet", "Blind sources"),
    ("gpuwarden-fleet", "Taints of devices"),
    ("gpuwarden-fleet", "XID lines"),
    ("gpuwarden-node", "XID lines"),
    ("gpuwarden-node", "Evictions of pods"),
    ("gpuwarden-node", "Maintenance of the janitor"),
    ("gpuwarden-node", "Events that wait for the controller"),
    ("gpuwarden-gpu", "Links that are down"),
    ("gpuwarden-gpu", "Recovery actions"),
    ("gpuwarden-preflight", "Pods by result"),
    ("gpuwarden-preflight", "Time of an admission"),
    ("gpuwarden-preflight", "Checks that ended"),
    ("gpuwarden-preflight", "Failed checks"),
    ("gpuwarden-preflight", "Duration of checks"),
    ("gpuwarden-preflight", "Wait for a gang"),
    ("gpuwarden-preflight", "Gangs"),
    ("gpuwarden-preflight", "Checks with an invalid"),
    ("gpuwarden-itself", "Leader"),
    ("gpuwarden-itself", "Time until certificates end"),
];

#[tokio::test]
async fn promtool_accepts_the_rules_and_each_alert_fires_and_stays_silent() -> anyhow::Result<()> {
    let Some(programs) = testkit::require(Component::Prometheus) else {
        return Ok(());
    };
    for (check, file) in [("check", "rules.yaml"), ("test", "test.yaml")] {
        let output = tokio::process::Command::new(programs.join("bin/promtool"))
            .args([check, "rules"])
            .arg(repository("deploy/helm/gpuwarden/files/alerts").join(format!("gpuwarden.{file}")))
            .output()
            .await?;
        let said = [output.stdout, output.stderr].concat();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&said)
        );
    }
    Ok(())
}

/// Commands of gpuwarden that the runbooks and the descriptions of alerts name.
#[tokio::test]
async fn the_commands_that_people_are_told_exist() -> anyhow::Result<()> {
    let runbooks = std::fs::read_to_string(repository("docs/runbooks.md"))?;
    let rules = std::fs::read_to_string(repository(
        "deploy/helm/gpuwarden/files/alerts/gpuwarden.rules.yaml",
    ))?;
    let quoted = rules.split('\'').chain(runbooks.split('`'));
    let quoted = quoted.filter(|it| it.starts_with("gpuwarden ") && !it.contains('\n'));
    let shown = runbooks.lines().filter_map(|line| line.strip_prefix("$ "));
    let shown = shown.filter(|it| it.starts_with("gpuwarden "));
    let commands: BTreeSet<&str> = quoted.chain(shown).collect();
    assert!(commands.len() > 10, "{commands:?}");
    for command in commands {
        let words = command.replace("{{ $labels.node }}", "NODE");
        let mut run = tokio::process::Command::new(binary()?);
        run.args(words.split_whitespace().skip(1)).arg("--help");
        let output = run.output().await?;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {said}");
    }
    Ok(())
}

/// Type with the texts of the enumerations of another type in their place, as in JSON.
const PLAIN: &str = "type Plain<T> = T extends string ? `${T}` : \
                     T extends object ? { [K in keyof T]: Plain<T[K]> } : T;\n";

#[tokio::test]
async fn the_dashboards_have_the_types_of_grafana() -> anyhow::Result<()> {
    let Some(modules) = testkit::require(Component::GrafanaSchema) else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let modules = modules.join("node_modules");
    std::os::unix::fs::symlink(&modules, dir.path().join("node_modules"))?;
    let mut check = tokio::process::Command::new("node");
    check
        .arg(modules.join("typescript/bin/tsc"))
        .args(["--noEmit", "--strict", "--skipLibCheck"])
        .args(["--module", "nodenext", "--moduleResolution", "nodenext"])
        .current_dir(dir.path());
    for file in std::fs::read_dir(repository("deploy/helm/gpuwarden/files/dashboards"))? {
        let path = file?.path();
        let name = path.with_extension("ts");
        let name = name.file_name().unwrap_or_default();
        let dashboard = std::fs::read_to_string(&path)?;
        let text = format!(
            "import type {{ Dashboard }} from '@grafana/schema';\n\
             {PLAIN}\
             export const dashboard: Plain<Dashboard> = {dashboard};\n"
        );
        std::fs::write(dir.path().join(name), text)?;
        check.arg(name);
    }
    let output = check.output().await?;
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    Ok(())
}

/// Returns the rules, without the group of preflight checks unless a webhook runs.
fn rules(webhook: bool) -> anyhow::Result<String> {
    let rules = std::fs::read_to_string(repository(
        "deploy/helm/gpuwarden/files/alerts/gpuwarden.rules.yaml",
    ))?;
    let preflight = rules.find("  # Needed only with preflight").unwrap();
    let end = if webhook { rules.len() } else { preflight };
    Ok(rules[..end].to_owned())
}

/// A cluster, a product that acts in it, and one that observes the fake GPUs of a machine.
struct Story {
    plane: Private,
    acting: Product,
    observing: Product,
    driver: tempfile::NamedTempFile,
    monitoring: Monitoring,
    /// Configuration files of the acting product.
    files: tempfile::TempDir,
}

impl Story {
    async fn begin() -> anyhow::Result<Option<Self>> {
        let Some(programs) = testkit::require(Component::Prometheus) else {
            return Ok(None);
        };
        let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
            return Ok(None);
        };
        for namespace in [NAMESPACE, JOBS] {
            plane.namespace(namespace).await?;
        }
        let client = plane.client().await?;
        for node in 0..NODES {
            let node = testkit::node(format!("n{node}"));
            let node = node.label("nvidia.com/gpu.present", "true");
            node.create(&client).await?;
        }
        let job = testkit::pod(JOBS, "train-0").on("n1").gpus(8);
        job.create(&client).await?;
        let files = tempfile::tempdir()?;
        let (policy, drain) = (files.path().join("policy"), files.path().join("drain"));
        std::fs::write(&policy, format!("{BREAKER}{}", brake::RULES))?;
        std::fs::write(&drain, DRAIN)?;
        let rules_of_analysis = files.path().join("rules");
        std::fs::write(&rules_of_analysis, "# built-in\n")?;
        let acting = Launch::new()?
            .node_name("n0")
            .kubeconfig(plane.kubeconfig())
            .option("--namespace", NAMESPACE)
            .option("--accept-nodes", "any")
            .option("--policy", &policy)
            .option("--rules", &rules_of_analysis)
            .arg("--drain")
            .option("--drain-config", &drain)
            .quarantine_with_brake()
            .start()
            .await?;
        let driver = tempfile::NamedTempFile::new()?;
        std::fs::write(driver.path(), HEALTHY)?;
        let observing = Launch::new()?
            .node_name("gpu-machine")
            .option("--fake-gpus", driver.path())
            .option("--nvml-health-interval", "1")
            .option("--nvml-deadline", "2")
            .start()
            .await?;
        for product in [&acting, &observing] {
            ready(product).await?;
        }
        let addresses = [acting.address(), observing.address()];
        let monitoring = Monitoring::start(&programs, &addresses, &rules(false)?).await?;
        Ok(Some(Self {
            plane,
            acting,
            observing,
            driver,
            monitoring,
            files,
        }))
    }

    async fn send(&self, events: impl IntoIterator<Item = HealthEvent>) -> anyhow::Result<()> {
        send_to(&self.acting, events.into_iter().collect()).await
    }

    /// Waits until exactly these alerts fire, as `NAME` or `NAME LABEL`.
    async fn fire(&self, expected: &[&str]) -> anyhow::Result<()> {
        self.monitoring.fire(expected).await
    }

    /// Runs a client command in the namespace of the acting product.
    async fn client(&self, args: &[&str]) -> anyhow::Result<testkit::Output> {
        let output = tokio::process::Command::new(binary()?)
            .args(args)
            .arg("--kubeconfig")
            .arg(self.plane.kubeconfig())
            .args(["--namespace", NAMESPACE])
            .output()
            .await?;
        Ok(testkit::Output {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout)?,
            stderr: String::from_utf8(output.stderr)?,
        })
    }

    /// Follows the runbook of a firing alert beside the acting product. It has the command of the
    /// alert's description.
    async fn runbook(&self, alert: &str, names: &[(&str, &str)]) -> anyhow::Result<()> {
        let mut reader = Reader::beside(&self.acting, Some(&self.plane))?;
        let drain = self.files.path().join("drain").display().to_string();
        reader.shell.env.push(("GPUWARDEN_DRAIN_CONFIG", drain));
        let commands = reader.runbook(alert, names).await?;
        let description = self.monitoring.description(alert)?;
        let told = description
            .split('\'')
            .find(|it| it.starts_with("gpuwarden "));
        let told = told.map(|it| filled(it, names));
        assert!(
            told.is_none_or(|it| commands.contains(&it)),
            "{description}: {commands:?}"
        );
        Ok(())
    }
}

async fn ready(product: &Product) -> anyhow::Result<()> {
    product
        .wait_for("readiness", SOON, || async {
            match product.get("/readyz").await {
                Ok(ready) if ready == "ready\n" => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
}

fn faults<const N: usize>(nodes: [&str; N]) -> [HealthEvent; N] {
    nodes.map(|node| event(node, "0"))
}

fn recoveries<const N: usize>(nodes: [&str; N]) -> [HealthEvent; N] {
    nodes.map(|node| recovery(node, "0"))
}

#[tokio::test]
async fn the_right_alerts_fire_and_every_panel_has_its_data() -> anyhow::Result<()> {
    let Some(mut story) = Story::begin().await? else {
        return Ok(());
    };
    story.fire(&[]).await?;
    every_series_is_described(&[story.acting.address(), story.observing.address()]).await?;

    // A node whose pod does not leave.
    story.send(faults(["n1"])).await?;
    story
        .fire(&["GpuwardenNodeOutTooLong n1", "GpuwardenDrainStuck n1"])
        .await?;
    let names = [("NODE", "n1")];
    story.runbook("GpuwardenDrainStuck", &names).await?;
    story.runbook("GpuwardenNodeOutTooLong", &names).await?;
    let pods: Api<Pod> = Api::namespaced(story.plane.client().await?, JOBS);
    let now = DeleteParams::default().grace_period(0);
    pods.delete("train-0", &now).await?;
    story.send(recoveries(["n1"])).await?;
    story.fire(&[]).await?;

    // A storm: the third node within the window trips the breaker.
    story.send(faults(["n2"])).await?;
    story.fire(&["GpuwardenNodeOutTooLong n2"]).await?;
    story.send(faults(["n3", "n4"])).await?;
    let storm = [
        "GpuwardenNodeOutTooLong n2",
        "GpuwardenBreakerTripped TRIPPED",
        "GpuwardenQuarantineHeld",
    ];
    story.fire(&storm).await?;
    every_panel_answers(&story.monitoring).await?;
    every_series_is_described(&[story.acting.address(), story.observing.address()]).await?;
    story.send(recoveries(["n2", "n3", "n4"])).await?;
    story.runbook("GpuwardenBreakerTripped", &[]).await?;
    story.fire(&[]).await?;

    // A pause.
    let pause = ["pause", "--for", "1h", "--reason", "roll-out"];
    story.client(&pause).await?.expect(0)?;
    story.fire(&["GpuwardenPausedTooLong"]).await?;
    story.runbook("GpuwardenPausedTooLong", &[]).await?;
    story.fire(&[]).await?;

    // Blindness.
    std::fs::write(story.driver.path(), HANGS)?;
    story.fire(&["GpuwardenSourceBlind gpu-health"]).await?;
    let mut reader = Reader::beside(&story.observing, None)?;
    let driver = story.driver.path().display().to_string();
    reader.shell.env.push(("GPUWARDEN_FAKE_GPUS", driver));
    reader.runbook("GpuwardenSourceBlind", &[]).await?;
    std::fs::write(story.driver.path(), HEALTHY)?;
    story.fire(&[]).await?;

    // A policy with an error, and an event without a node.
    let policy = story.files.path().join("policy");
    std::fs::write(&policy, "[[rule-set]]\n")?;
    story.fire(&["GpuwardenPolicyRejected rejected"]).await?;
    let path = policy.display().to_string();
    let names = [("FILE", path.as_str())];
    story.runbook("GpuwardenPolicyRejected", &names).await?;
    let instance = story.acting.address().trim_start_matches("http://");
    let names = [("INSTANCE", instance), ("METRIC", "gpuwarden_nodes")];
    let mut reader = Reader::beside(&story.acting, None)?;
    reader.runbook("GpuwardenMetricMissing", &names).await?;
    std::fs::write(&policy, format!("{BREAKER}{}", brake::RULES))?;
    story.fire(&[]).await?;
    let rules = story.files.path().join("rules");
    std::fs::write(&rules, "[[rule]]\n")?;
    story.fire(&["GpuwardenRulesRejected rejected"]).await?;
    let path = rules.display().to_string();
    let names = [("FILE", path.as_str())];
    story.runbook("GpuwardenRulesRejected", &names).await?;
    std::fs::write(&rules, "# built-in\n")?;
    story.fire(&[]).await?;
    assert!(story.send([event("", "0")]).await.is_err());
    story.fire(&["GpuwardenEventsRefused invalid"]).await?;
    story.fire(&[]).await?;

    // The end.
    story.observing.kill9()?;
    story.fire(&["GpuwardenDown"]).await?;
    story.acting.kill9()?;
    let end = [
        "GpuwardenDown",
        "GpuwardenDown",
        "GpuwardenControllerAbsent",
        "GpuwardenAgentAbsent",
    ];
    story.fire(&end).await?;
    story.runbook("GpuwardenDown", &[]).await?;
    story.runbook("GpuwardenControllerAbsent", &[]).await?;
    story.runbook("GpuwardenAgentAbsent", &[]).await?;
    let all: BTreeSet<&str> = [
        "GpuwardenNodeOutTooLong",
        "GpuwardenDrainStuck",
        "GpuwardenBreakerTripped",
        "GpuwardenQuarantineHeld",
        "GpuwardenPausedTooLong",
        "GpuwardenSourceBlind",
        "GpuwardenPolicyRejected",
        "GpuwardenRulesRejected",
        "GpuwardenEventsRefused",
        "GpuwardenDown",
        "GpuwardenControllerAbsent",
        "GpuwardenAgentAbsent",
    ]
    .into();
    let ever = story.monitoring.ever();
    assert!(
        ever.iter().all(|name| all.contains(name.as_str())),
        "{ever:?}"
    );
    Ok(())
}

/// A small file system in memory, unmounted on drop.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(mount_point: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(mount_point)?;
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs"]);
        assert!(mount.arg(mount_point).status()?.success(), "mount");
        Ok(Self(mount_point.to_owned()))
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    /// Leaves no room.
    fn fill(&self) -> anyhow::Result<()> {
        let mut file = std::fs::File::create(self.filler())?;
        while file.write_all(&[0; 4096]).is_ok() {}
        Ok(())
    }

    fn empty(&self) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(self.filler())?)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let mut umount = std::process::Command::new("umount");
        drop(umount.arg("-l").arg(&self.0).status());
    }
}

#[tokio::test]
async fn a_store_without_room_is_reported_while_it_lasts() -> anyhow::Result<()> {
    let Some(programs) = testkit::require(Component::Prometheus) else {
        return Ok(());
    };
    // The rights to mount.
    if testkit::require(Component::FileSystem).is_none() {
        return Ok(());
    }
    let launch = Launch::new()?.node_name("n1");
    let disk = SmallDisk::new(&launch.data_dir())?;
    let product = launch.start().await?;
    ready(&product).await?;
    let monitoring = Monitoring::start(&programs, &[product.address()], &rules(false)?).await?;
    monitoring.fire(&[]).await?;
    disk.fill()?;
    product.append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    let full = ["GpuwardenStoreFailing", "GpuwardenEventsNotStored"];
    monitoring.fire(&full).await?;
    let data = product.data_dir().display().to_string();
    let names = [("/var/lib/gpuwarden", data.as_str())];
    let mut reader = Reader::beside(&product, None)?;
    reader.runbook("GpuwardenStoreFailing", &names).await?;
    disk.empty()?;
    monitoring.fire(&[]).await?;
    let ever = monitoring.ever();
    assert!(
        ever.iter().all(|name| full.contains(&name.as_str())),
        "{ever:?}"
    );
    Ok(())
}

#[tokio::test]
async fn agent_controller_and_webhook_lack_no_metric_and_are_missed() -> anyhow::Result<()> {
    let Some(programs) = testkit::require(Component::Prometheus) else {
        return Ok(());
    };
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    for namespace in ["gpuwarden", webhook::NAMESPACE] {
        plane.namespace(namespace).await?;
    }
    testkit::node("n1").create(&plane.client().await?).await?;
    let port = own_port()?;
    let at = port.local_addr()?.to_string();
    let mut controller = Launch::controller()?
        .kubeconfig(plane.kubeconfig())
        .quarantine()
        .arg("--grpc-insecure")
        .option("--grpc-listen", &at)
        .start()
        .await?;
    let agent = Launch::agent()?
        .node_name("n1")
        .option("--controller", format!("http://{at}"))
        .start()
        .await?;
    for product in [&controller, &agent] {
        ready(product).await?;
    }
    let files = tempfile::tempdir()?;
    let authority = Authority::new("somebody else")?;
    let certify = |end: Option<SystemTime>| {
        let names = &["127.0.0.1"];
        let times = end.map(|end| (SystemTime::UNIX_EPOCH, end));
        let signed = authority.sign_valid(Purpose::Server, "webhook", names, times)?;
        signed.write(files.path(), "webhook")
    };
    certify(Some(
        SystemTime::now() + Duration::from_secs(3 * 24 * 60 * 60),
    ))?;
    let [certificate, key] = ["crt", "key"].map(|end| {
        files
            .path()
            .join(format!("webhook.{end}"))
            .display()
            .to_string()
    });
    let flags = [
        "--namespace",
        webhook::NAMESPACE,
        "--tls-cert",
        &certificate,
        "--tls-key",
        &key,
    ];
    let webhook = Webhook::start_reached(plane.kubeconfig(), webhook::CONFIG, &flags).await?;
    let answering = webhook.metrics_address()?;
    let addresses = [controller.address(), agent.address(), &answering];
    let monitoring = Monitoring::start(&programs, &addresses, &rules(true)?).await?;
    monitoring.fire(&["GpuwardenCertificateExpiring"]).await?;
    let mut central = Reader::beside(&controller, Some(&plane))?;
    central.runbook("GpuwardenNoLeader", &[]).await?;
    // A controller with the same certificate.
    let mut served = Reader::beside(&controller, Some(&plane))?;
    let files = [
        ("GPUWARDEN_GRPC_TLS_CERT", certificate.clone()),
        ("GPUWARDEN_GRPC_TLS_KEY", key.clone()),
    ];
    served.shell.env.extend(files);
    let names = [("FILE", certificate.as_str())];
    served
        .runbook("GpuwardenCertificateExpiring", &names)
        .await?;
    certify(None)?;
    monitoring.fire(&[]).await?;
    every_series_is_described(&addresses).await?;

    controller.kill9()?;
    agent.append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    let away = [
        "GpuwardenDown",
        "GpuwardenControllerAbsent",
        "GpuwardenDeliveryBehind",
    ];
    monitoring.fire(&away).await?;
    let mut local = Reader::beside(&agent, None)?;
    let address = format!("http://{at}");
    local.shell.env.push(("GPUWARDEN_CONTROLLER", address));
    local.runbook("GpuwardenDeliveryBehind", &[]).await?;
    webhook.end().await?;
    let both = [
        &away[..],
        &["GpuwardenDown", "GpuwardenWebhookAbsent webhook"],
    ]
    .concat();
    monitoring.fire(&both).await?;
    central.runbook("GpuwardenWebhookAbsent", &[]).await?;
    let ever = monitoring.ever();
    let all = [&both[..], &["GpuwardenCertificateExpiring"]].concat();
    let expected = |name: &String| all.iter().any(|one| one.split(' ').next() == Some(name));
    assert!(ever.iter().all(expected), "{ever:?}");
    Ok(())
}

/// Checks that the queries of all panels succeed, and that each panel has data unless expected
/// otherwise.
async fn every_panel_answers(monitoring: &Monitoring) -> anyhow::Result<()> {
    let mut found: BTreeMap<(String, String), usize> = BTreeMap::new();
    for (dashboard, panel, query) in
        dashboards(&repository("deploy/helm/gpuwarden/files/dashboards"))?
    {
        *found.entry((dashboard, panel)).or_default() += monitoring.query(&query).await?;
    }
    let without = found.iter().filter(|(_, series)| **series == 0);
    let unexpected = without.filter(|((dashboard, panel), _)| {
        let is_known = |(name, start): &(&str, &str)| dashboard == name && panel.starts_with(start);
        !EMPTY.iter().any(is_known)
    });
    let unexpected: Vec<_> = unexpected.map(|(panel, _)| panel).collect();
    assert!(unexpected.is_empty(), "without data: {unexpected:?}");
    Ok(())
}

/// Checks that each series of the products is in the registry, with exactly its labels.
async fn every_series_is_described(addresses: &[&str]) -> anyhow::Result<()> {
    let mut reference = tokio::process::Command::new(binary()?);
    let output = reference.args(["reference", "--metrics"]).output().await?;
    let groups: Value = serde_json::from_slice(&output.stdout)?;
    let mut described: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let metrics = groups.as_array().into_iter().flatten();
    for metric in metrics.flat_map(|group| group["metrics"].as_array().into_iter().flatten()) {
        let name = metric["name"].as_str().unwrap_or_default();
        let labels = metric["labels"].as_array().into_iter().flatten();
        let labels = labels.filter_map(|label| Some(label.as_str()?.to_owned()));
        let suffix = if metric["kind"] == "counter" {
            "_total"
        } else {
            ""
        };
        described.insert(format!("{name}{suffix}"), labels.collect());
    }
    for address in addresses {
        for line in testkit::get(address, "/metrics").await?.lines() {
            if line.starts_with('#') || line.is_empty() {
                continue;
            }
            let (name, labels) = series(line);
            let stem = ["_bucket", "_count", "_sum"];
            let mut stems = stem.iter().filter_map(|end| name.strip_suffix(end));
            let known = (described.get(name)).or_else(|| stems.find_map(|it| described.get(it)));
            assert_eq!(known, Some(&labels), "{line}");
        }
    }
    Ok(())
}

/// Returns the name and the labels of a line, without the bound of a bucket.
fn series(line: &str) -> (&str, BTreeSet<String>) {
    let end = line.find(['{', ' ']).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    let inside = rest.strip_prefix('{').and_then(|it| it.rsplit_once('}'));
    let inside = inside.map_or("", |(inside, _)| inside);
    let parts = inside
        .split("\",")
        .filter_map(|part| part.split_once("=\""));
    let labels = parts.map(|(label, _)| label.to_owned());
    (name, labels.filter(|label| label != "le").collect())
}
