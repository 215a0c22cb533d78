//! A Prometheus with the rules of this repository, made quick, and an Alertmanager that notifies
//! the test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use testkit::{get, wait_for};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::process::{Child, Command};

use crate::support::{SOON, own_port};

/// Label that tells alerts of one name apart in the expectations of the story.
const TELLING: [&str; 7] = [
    "node", "state", "source", "role", "metric", "result", "reason",
];

/// Running Prometheus and Alertmanager, which are killed on drop.
pub(crate) struct Monitoring {
    address: String,
    alerts: Arc<Mutex<BTreeMap<String, Alert>>>,
    _children: [Child; 2],
    /// Reserve the ports.
    _ports: [TcpSocket; 2],
    dir: tempfile::TempDir,
}

/// Alert in a notification of the Alertmanager.
struct Alert {
    firing: bool,
    /// Name and telling label.
    shown: String,
    description: String,
}

// === impl Monitoring ===

impl Monitoring {
    /// Starts both for products at these addresses, and waits until all alerts on what is there
    /// now would fire.
    pub(crate) async fn start(
        programs: &Path,
        products: &[&str],
        rules: &str,
    ) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let alerts = Arc::default();
        let receiver = receive(Arc::clone(&alerts)).await?;
        let ports = [own_port()?, own_port()?];
        let [prometheus, alertmanager] = [&ports[0], &ports[1]].map(TcpSocket::local_addr);
        let (prometheus, alertmanager) = (prometheus?.to_string(), alertmanager?.to_string());
        let write = |name: &str, content: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).map(|()| path)
        };
        write("rules.yaml", &quick(rules))?;
        let targets: Vec<&str> = products
            .iter()
            .map(|address| address.trim_start_matches("http://"))
            .collect();
        // JSON is YAML.
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
            "scrape_configs": [{
                "job_name": "gpuwarden",
                "static_configs": [{"targets": targets}],
            }],
        });
        let config = write("prometheus.yaml", &config.to_string())?;
        let routes = json!({
            "route": {
                "receiver": "test",
                "group_by": ["..."],
                "group_wait": "0s",
                "group_interval": "1s",
                "repeat_interval": "1h",
            },
            "receivers": [{"name": "test", "webhook_configs": [{"url": receiver}]}],
        });
        let routes = write("alertmanager.yaml", &routes.to_string())?;
        // Debian's Alertmanager reads its templates from /usr/share, where this process and its
        // children have those of the unpacked package.
        let mut alerting = Command::new("unshare");
        alerting
            .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
            .arg("mount --bind \"$0\" /usr/share && exec \"$@\"")
            .arg(programs.join("share"))
            .arg(programs.join("bin/prometheus-alertmanager"))
            .arg(format!("--config.file={}", routes.display()))
            .arg(format!(
                "--storage.path={}",
                dir.path().join("alerts").display()
            ))
            .arg(format!("--web.listen-address={alertmanager}"))
            .arg("--cluster.listen-address=");
        let mut scraping = Command::new(programs.join("bin/prometheus"));
        scraping
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.path().join("data").display()
            ))
            .arg(format!("--web.listen-address={prometheus}"));
        let start = |command: &mut Command, name: &str| {
            let log = std::fs::File::create(dir.path().join(name))?;
            let command = command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log);
            anyhow::Ok(command.kill_on_drop(true).spawn()?)
        };
        let children = [
            start(&mut alerting, "alertmanager.log")?,
            start(&mut scraping, "prometheus.log")?,
        ];
        let own = Self {
            address: prometheus,
            alerts,
            _children: children,
            _ports: ports,
            dir,
        };
        let scraped = format!("count(count_over_time(up[1m]) > 8) == {}", targets.len());
        wait_for("scrapes of all products", SOON, || async {
            match own.query(&scraped).await {
                Ok(1) => Ok(()),
                other => Err(format!("{other:?}; {}", own.log())),
            }
        })
        .await?;
        Ok(own)
    }

    /// Returns the number of series that a query finds.
    pub(crate) async fn query(&self, query: &str) -> anyhow::Result<usize> {
        let path = format!("/api/v1/query?query={}", percent_encoded(query));
        let answer = get(&self.address, &path).await?;
        let answer: Value = serde_json::from_str(&answer).with_context(|| answer.clone())?;
        if answer["status"] != "success" {
            bail!("{query}: {answer}");
        }
        let found = answer["data"]["result"].as_array();
        Ok(found.map_or(0, Vec::len))
    }

    /// Waits until the Alertmanager has notified of exactly these alerts.
    pub(crate) async fn fire(&self, expected: &[&str]) -> anyhow::Result<()> {
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        wait_for("the alerts", SOON, || async {
            let alerts = self.alerts.lock().unwrap();
            let firing = alerts.values().filter(|alert| alert.firing);
            let mut firing: Vec<&str> = firing.map(|alert| alert.shown.as_str()).collect();
            firing.sort_unstable();
            if firing == expected {
                Ok(())
            } else {
                Err(format!("{firing:?}, not {expected:?}; {}", self.log()))
            }
        })
        .await
    }

    /// Returns the names of all alerts that have fired.
    pub(crate) fn ever(&self) -> BTreeSet<String> {
        let alerts = self.alerts.lock().unwrap();
        let names = alerts
            .values()
            .filter_map(|alert| alert.shown.split(' ').next());
        names.map(str::to_owned).collect()
    }

    /// Returns the last lines of both logs.
    fn log(&self) -> String {
        let logs = ["prometheus.log", "alertmanager.log"].map(|name| {
            let text = std::fs::read_to_string(self.dir.path().join(name)).unwrap_or_default();
            let last = text.lines().rev().take(3).collect::<Vec<_>>();
            format!("{name}: {}", last.join("\n"))
        });
        logs.join("\n")
    }

    /// Returns the description of a firing alert of this name.
    pub(crate) fn description(&self, name: &str) -> anyhow::Result<String> {
        let alerts = self.alerts.lock().unwrap();
        let mut firing = alerts.values().filter(|alert| alert.firing);
        let found = firing.find(|alert| alert.shown.split(' ').next() == Some(name));
        let found = found.with_context(|| format!("{name} does not fire"))?;
        Ok(found.description.clone())
    }
}

/// Returns a file or directory of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join(path)
}

/// Shortens the times of the rules.
fn quick(rules: &str) -> String {
    let lines = rules.lines().map(|line| {
        let indent = line.len() - line.trim_start().len();
        if line.trim_start().starts_with("for: ") {
            return format!("{}for: 3s", " ".repeat(indent));
        }
        [
            ("> 2 * 3600", "> 2"),
            ("> 3 * 3600", "> 2"),
            ("> 900", "> 2"),
            ("[15m]", "[20s]"),
            ("[1h]", "[20s]"),
            ("[30m]", "[20s]"),
            ("offset 30m", "offset 20s"),
        ]
        .iter()
        .fold(line.to_owned(), |line, (long, short)| {
            line.replace(long, short)
        })
    });
    lines.map(|line| line + "\n").collect()
}

/// Returns the queries of all dashboards: the name of the file, the title of the panel, and the
/// query with Grafana's variables replaced.
pub(crate) fn dashboards(dir: &Path) -> anyhow::Result<Vec<(String, String, String)>> {
    let mut queries = Vec::new();
    for file in std::fs::read_dir(dir)? {
        let path = file?.path();
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let dashboard: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        for panel in dashboard["panels"].as_array().context("no panels")? {
            let title = panel["title"].as_str().context("no title")?;
            for target in panel["targets"].as_array().context("no targets")? {
                let query = target["expr"].as_str().context("no query")?;
                let query = ["$node", "$instance", "$gpu"]
                    .iter()
                    .fold(query.to_owned(), |query, name| query.replace(name, ".*"));
                let query = query
                    .replace("$__rate_interval", "1m")
                    .replace("[1h]", "[1m]");
                queries.push((name.clone(), title.to_owned(), query));
            }
        }
    }
    Ok(queries)
}

fn percent_encoded(text: &str) -> String {
    let encoded = text.bytes().map(|byte| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    });
    encoded.collect()
}

/// Starts a receiver of notifications. Returns its URL.
async fn receive(alerts: Arc<Mutex<BTreeMap<String, Alert>>>) -> anyhow::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let alerts = Arc::clone(&alerts);
            // A connection that fails is opened again by the Alertmanager.
            tokio::spawn(async move { drop(notifications(stream, &alerts).await) });
        }
    });
    Ok(url)
}

async fn notifications(
    mut stream: TcpStream,
    alerts: &Mutex<BTreeMap<String, Alert>>,
) -> anyhow::Result<()> {
    let mut read = Vec::new();
    loop {
        let Some((head, body)) = split(&read) else {
            if stream.read_buf(&mut read).await? == 0 {
                return Ok(());
            }
            continue;
        };
        let notification: Value = serde_json::from_slice(&read[head..body])?;
        read.drain(..body);
        for alert in notification["alerts"].as_array().into_iter().flatten() {
            let labels = &alert["labels"];
            let name = labels["alertname"].as_str().unwrap_or_default();
            let telling = TELLING.iter().find_map(|label| labels[label].as_str());
            let shown = telling.map_or(name.to_owned(), |label| format!("{name} {label}"));
            let alert = Alert {
                firing: alert["status"] == "firing",
                shown,
                description: alert["annotations"]["description"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned(),
            };
            alerts.lock().unwrap().insert(labels.to_string(), alert);
        }
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            .await?;
    }
}

/// Returns where the body of the first whole request begins and ends.
fn split(read: &[u8]) -> Option<(usize, usize)> {
    let text = String::from_utf8_lossy(read);
    let head = text.find("\r\n\r\n")? + 4;
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        is_length.then(|| value.trim().parse::<usize>().ok())?
    })?;
    (read.len() >= head + length).then_some((head, head + length))
}
