//! Snapshots of the text of read-only commands, in a fixed world: a server with fixed answers, a
//! fixed kernel log and a fixed policy.
//!
//! A test fails on any difference. `INSTA_UPDATE=always cargo test -p gpuwarden-cli snapshots`
//! writes the snapshots anew; without this variable nothing is written.

use std::fs;
use std::path::Path;

use agent::kernel_log::event_of_line;
use clap::Parser as _;
use console::api::EventView;
use console::explain::{Material, explain};
use contract::HealthEvent;
use fleet::drain::plan::{PodFacts, plan};
use fleet::drain::{Drain, DrainConfig, PodView};
use fleet::view::NodeStatus;
use jiff::Timestamp;
use model::event::EventRecord;
use model::journal::JournalEntry;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use trial::simulate::{SimulationReport, Violation};

use super::*;
use crate::args::Cli;
use crate::output::{error_text, take_written};

const POLICY: &str = r#"
[[rule-sets]]
name = "fatal"
priority = 100
cordon = { shouldCordon = true }
taint = { key = "gpu-fault", value = "fatal", effect = "NoSchedule" }
[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal && event.checkName == 'SysLogXIDError'"
"#;

const RULES: &str = r#"
[[rules]]
name = "RackFault"
enabled = false

[[rules]]
name = "RepeatedXID31OnSameGPU"
strategy = "STORE_ONLY"

[[rules]]
name = "Repeated79"
checks = ["SysLogXIDError"]
codes = ["79"]
group_by = ["gpu"]
kind = "count"
window = "24h"
threshold = 2
action = "CONTACT_SUPPORT"
message = "It fell off the bus again."
"#;

const KERNEL_LOG: &str = "\
[    1.000000] pci 0000:b3:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint
[   61.500000] NVRM: Xid (PCI:0000:b3:00): 31, pid=48213, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f2c_41bd4000
[   62.000000] NVRM: Xid (PCI:0000:b3:00): 79, pid=48213, name=python3, GPU has fallen off the bus.
[   63.000000] nvidia-nvswitch3: SXid (PCI:0000:e1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
[   64.000000] NVRM: Xid (PCI:0000:b3:00): 7x, garbled
[   65.000000] NVRM: GPU at PCI:0000:b3:00: GPU-d2e7c0ff-0000-4000-8000-000000000001
";

const CATALOG: &str = r#"
[[xid]]
code = 31
fatal = true
action = "COMPONENT_RESET"
reason = "our jobs never cause it"
"#;

/// Answers of the server, by the beginning of the path.
type Answers = Vec<(&'static str, Value)>;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

fn xid(line: &str, id: &str, second: i64) -> HealthEvent {
    let mut event = event_of_line(line, "gpu-1", at(second)).unwrap();
    event.id = id.to_owned();
    event
}

/// Returns the events of the world, in the order of the feed.
fn records() -> Vec<EventRecord> {
    let minor = "NVRM: Xid (PCI:0000:b3:00): 31, pid=48213, name=python3, Ch 00000008, intr 00000000. \
                 MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f2c_41bd4000";
    let fatal =
        "NVRM: Xid (PCI:0000:b3:00): 79, pid=48213, name=python3, GPU has fallen off the bus.";
    let events = [(1, 0, xid(minor, "e1", 0)), (2, 60, xid(fatal, "e2", 60))];
    let record = |(seq, second, event): (u64, i64, HealthEvent)| EventRecord {
        seq: serde_json::from_value(json!(seq)).unwrap(),
        id: event.id.clone(),
        created_at: at(second),
        event,
    };
    events.map(record).into()
}

fn journal() -> Vec<JournalEntry> {
    let entry = |second, kind: &str, text: &str| {
        let entry = json!({"at": at(second), "node": "gpu-1", "session": "s1", "kind": kind,
            "text": text, "detail": {"events": ["e2"]}});
        serde_json::from_value(entry).unwrap()
    };
    vec![
        entry(61, "rules", "rule set 'fatal' matches"),
        entry(
            61,
            "decision",
            "quarantine by 'fatal': cordon, taint gpu-fault=fatal:NoSchedule",
        ),
        entry(61, "call", "patch node gpu-1"),
        entry(62, "answer", "gpu-1 is cordoned"),
    ]
}

fn gpu_1() -> Value {
    let fault = json!({
        "agent": "syslog-health-monitor", "componentClass": "GPU", "check": "SysLogsXIDError",
        "code": "79", "subject": "PCI 0000:b3:00", "fatal": true, "recommendedAction": "RESTART_BM",
        "entities": [{"entityType": "PCI", "entityValue": "0000:b3:00"}],
        "message": "GPU has fallen off the bus", "firstSeen": at(60), "lastSeen": at(60),
        "count": 1, "eventId": "e2",
    });
    json!({
        "name": "gpu-1", "state": "quarantined", "inCluster": true, "unschedulable": true,
        "session": {"id": "s1", "phase": "quarantined", "since": at(62), "failures": 0,
            "awaits": "the recovery of its faults, or a release by hand", "cordoned": true,
            "uncordonReleases": true},
        "faults": [fault], "notes": [],
    })
}

fn status() -> Value {
    let source = |name: &str, state: &str, detail: &str, advice: Option<&str>| {
        json!({"name": name, "state": state, "detail": detail, "advice": advice, "aliveAt": at(600),
            "records": 1234, "faults": 2, "lost": 0, "malformed": 1})
    };
    let notice = json!({
        "agent": "gpu-health-monitor", "componentClass": "GPU", "check": "GpuMemWatch", "code": "",
        "subject": "GPU 3", "fatal": false, "recommendedAction": "NONE", "entities": [],
        "message": "row remapped", "firstSeen": at(0), "lastSeen": at(300), "count": 4,
        "eventId": "e9", "reportedBy": "process 7 of user 1000",
    });
    json!({
        "version": "0.0.0", "nodeName": "gpu-1", "mode": "quarantine", "startedAt": at(-86_400 * 3),
        "now": at(600), "dataDir": "/var/lib/gpuwarden", "socket": "/var/run/nvsentinel.sock",
        "policy": {"source": "policy.toml", "ruleSets": ["fatal"], "warnings": [],
            "loadedAt": at(-60), "error": "policy.toml:9: unknown key 'prority'", "errorSince": at(0)},
        "fleet": {"applied": 2, "ready": true, "nodes": [gpu_1(), {
                "name": "gpu-2", "state": "healthy", "inCluster": true, "faults": [],
                "notices": [notice], "notes": []}],
            "cluster": {"server": "https://10.0.0.1:6443", "connected": true, "nodes": 40},
            "brake": {"enabled": true, "state": "CLOSED", "held": 1, "paused": null,
                "limits": [{"limit": "20%", "ofWhich": "GPU nodes", "used": 8, "allowed": 8, "of": 40,
                    "by": ["gpu-1", "gpu-3"]}],
                "notes": []}},
        "sources": [source("kernel-log", "following", "kmsg", None),
            source("gpu", "failing", "libnvidia-ml.so.1 cannot be loaded", Some("install the driver"))],
        "gpus": [],
        "store": {"events": 2, "bytes": 4096, "latest": 2, "unreadable": 1},
        "ready": false, "notReady": ["source gpu fails: libnvidia-ml.so.1 cannot be loaded"],
    })
}

fn why_not() -> Value {
    let check = |name: &str, result: &str, text: &str, fix: Option<&str>| json!({"name": name, "result": result, "text": text, "details": [], "fix": fix});
    json!({
        "node": "gpu-2", "known": true, "inCluster": true,
        "answer": "gpu-2 is not quarantined: 20% of the GPU nodes are out of service (and one more reason)",
        "checks": [
            check("process", "passes", "gpuwarden acts in the cluster", None),
            check("source", "unknown", "the source gpu fails", Some("gpuwarden status shows why")),
            check("brake", "stops", "8 of 8 nodes are out", Some("gpuwarden release NODE --reason TEXT")),
        ],
    })
}

fn answers() -> Answers {
    let (records, journal) = (records(), journal());
    let node: NodeStatus = serde_json::from_value(gpu_1()).unwrap();
    let story = explain(&Material {
        node: "gpu-1",
        data_dir: None,
        records: &records,
        complete: true,
        journal: &journal,
        status: Some(&node),
    });
    let view = |record: &EventRecord| EventView {
        seq: record.seq,
        created_at: record.created_at,
        event: contract::json::to_value(&record.event),
        analysis: Vec::new(),
        status: console::api::EventStatus::default(),
    };
    let events: Vec<EventView> = records.iter().rev().map(view).collect();
    vec![
        ("/api/v1/status", status()),
        ("/api/v1/nodes/gpu-1/explain", json!(story)),
        ("/api/v1/nodes/gpu-2/why-not", why_not()),
        ("/api/v1/events?limit=", json!(events)),
    ]
}

async fn answer(mut connection: TcpStream, answers: Answers) {
    let mut request = Vec::new();
    while connection.read_buf(&mut request).await.unwrap_or(0) > 0 {
        if !request.ends_with(b"\r\n\r\n") {
            continue;
        }
        let text = String::from_utf8_lossy(&request).into_owned();
        let path = text.split(' ').nth(1).unwrap();
        let found = answers.iter().find(|(start, _)| path.starts_with(start));
        let body = found
            .unwrap_or_else(|| panic!("no answer for {path}"))
            .1
            .to_string();
        let length = body.len();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
        connection
            .write_all((head + &body).as_bytes())
            .await
            .unwrap();
        request.clear();
    }
}

/// Starts the server of the world. Returns its URL.
async fn server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answers = answers();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            tokio::spawn(answer(connection, answers.clone()));
        }
    });
    url
}

/// Runs commands, one per line, in a directory with the files of the world. Returns a transcript.
async fn transcript(commands: &[&str]) -> String {
    let server = server().await;
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).display().to_string();
    for (name, text) in [
        ("policy.toml", POLICY),
        ("kern.log", KERNEL_LOG),
        ("site.toml", CATALOG),
        ("rules.toml", RULES),
    ] {
        fs::write(Path::new(&path(name)), text).unwrap();
    }
    let mut transcript = String::new();
    for command in commands {
        let words = command.split(' ').map(|word| match word {
            "policy.toml" | "kern.log" | "site.toml" | "rules.toml" => path(word),
            "gpu-1=kern.log" => format!("gpu-1={}", path("kern.log")),
            "SERVER" => server.clone(),
            word => word.to_owned(),
        });
        let cli = Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{command}: {error}"));
        let code = execute(cli.command, &Given::default()).await;
        let text = take_written().replace(&format!("{}/", home.path().display()), "");
        let end = match code {
            Ok(code) => format!("exit code {code}"),
            Err(error) => error_text(&error),
        };
        let command = command.replace(" --server SERVER", "");
        transcript.push_str(&format!("$ {command}\n{text}({end})\n\n"));
    }
    transcript
}

/// Compares a text with the snapshot of this name.
fn hold(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_omit_expression(true);
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

macro_rules! snapshot {
    ($($name:ident: $commands:expr;)*) => {
        $(#[tokio::test]
        async fn $name() {
            let transcript = transcript(&$commands).await;
            hold(stringify!($name), &transcript);
        })*
    };
}

snapshot! {
    status_of_a_fleet: ["gpuwarden status --server SERVER", "gpuwarden status -o wide --server SERVER"];
    explain_a_node: ["gpuwarden explain gpu-1 --server SERVER", "gpuwarden explain -o wide --server SERVER"];
    why_not_quarantined: ["gpuwarden why-not gpu-2 --server SERVER"];
    events: ["gpuwarden events --server SERVER", "gpuwarden events -o wide --server SERVER",
        "gpuwarden events -o yaml --limit 1 --server SERVER"];
    policy: ["gpuwarden policy lint policy.toml", "gpuwarden policy show policy.toml",
        "gpuwarden policy presets"];
    rules: ["gpuwarden rules show --rules rules.toml", "gpuwarden rules show RepairNotWorking",
        "gpuwarden rules show Repeated97 --rules rules.toml",
        "gpuwarden rules lint rules.toml", "gpuwarden rules lint configmap:a --retention 1d",
        "gpuwarden rules explain RepeatedXID31OnSameGPU --events gpu-1=kern.log",
        "gpuwarden rules explain XIDErrorSoloNoBurst --events gpu-1=kern.log",
        "gpuwarden rules explain RackFault gpu-1 --events gpu-1=kern.log",
        "gpuwarden rules diff built-in rules.toml gpu-1=kern.log"];
    catalog: ["gpuwarden catalog xid 79", "gpuwarden catalog sxid 20034", "gpuwarden catalog nic",
        "gpuwarden catalog dcgm DCGM_FR_PENDING_ROW_REMAP", "gpuwarden catalog nic no-such-pattern",
        "gpuwarden catalog diff site.toml"];
    catalog_in_json: [
        "gpuwarden catalog xid 79 -o json",
        "gpuwarden catalog sxid 20034 -o yaml",
        "gpuwarden catalog nvlink5 144 -o yaml",
        "gpuwarden catalog dcgm 85 -o json",
        "gpuwarden catalog nic cmd_exec_timeout -o json",
        "gpuwarden catalog nic cmd_exec_timeout",
        "gpuwarden catalog xid 9999",
        "gpuwarden policy show policy.toml -o yaml",
    ];
    decode: ["gpuwarden decode kern.log", "gpuwarden decode kern.log -o wide",
        "gpuwarden decode kern.log -o json --catalog site.toml"];
    replay: ["gpuwarden replay gpu-1=kern.log", "gpuwarden replay gpu-1=kern.log --policy policy.toml --policy preset:default"];
}

#[test]
fn drain_plan() {
    let pod = |name: &str, namespace: &str, gpus| PodFacts {
        pod: PodView {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            has_gpus: gpus > 0,
            ..PodView::default()
        },
        gpus,
        started_at: Some(at(-7_200)),
        owner: None,
        gang: None,
        held_by: None,
    };
    let facts = vec![pod("train-0", "ml", 8), pod("agent-x", "kube-system", 0)];
    let drain = Drain {
        since: at(0),
        force: false,
    };
    let plan = plan(
        "gpu-1",
        facts,
        None,
        Ok(drain),
        &DrainConfig::default(),
        at(0),
    );
    drain::text(&plan, "by drain.toml").unwrap();
    hold("drain_plan", &take_written());
}

#[test]
fn simulate_with_a_violation() {
    let mut report = SimulationReport {
        seed: 7,
        steps: 250,
        sessions: 3,
        crashes: 1,
        effects: [("patch of a node", 12), ("entry of the journal", 40)].into(),
        violation: None,
    };
    simulate::text(&report).unwrap();
    report.violation = Some(Violation {
        seed: 7,
        steps: 12,
        what: "a node is drained twice".to_owned(),
        story: vec![
            "a fault on n1".to_owned(),
            "the controller crashes".to_owned(),
        ],
    });
    simulate::text(&report).unwrap();
    hold("simulate_with_a_violation", &take_written());
}
