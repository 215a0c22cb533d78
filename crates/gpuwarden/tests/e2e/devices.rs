//! The Device API of the product as a process: a stock Python client as consumer and provider,
//! and the commands that use the API.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{Component, Launch, Product};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::support::{SOON, event, own_port, recovery, send_to};

/// A Python program with stock grpcio.
struct Python {
    _stubs: TempDir,
    _child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Python {
    /// Starts the program. Returns `None`, after reporting the skip, if this machine cannot run
    /// it.
    async fn start(product: &Product) -> anyhow::Result<Option<Self>> {
        let Some(interpreter) = testkit::require(Component::PythonGrpc) else {
            return Ok(None);
        };
        let stubs = tempfile::tempdir()?;
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let protos = root.join("../../proto");
        let mut generate = Command::new(&interpreter);
        generate
            .args(["-m", "grpc_tools.protoc", "--proto_path"])
            .arg(&protos);
        generate.arg("--python_out").arg(stubs.path());
        generate.arg("--grpc_python_out").arg(stubs.path());
        let generated = generate.arg(protos.join("device.proto")).output().await?;
        assert!(generated.status.success(), "{generated:?}");
        let mut child = Command::new(&interpreter)
            .arg(root.join("tests/e2e/devices.py"))
            .arg(stubs.path())
            .arg(format!("unix://{}", socket(product).display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Ok(Some(Self {
            _stubs: stubs,
            _child: child,
            input,
            lines: BufReader::new(output).lines(),
        }))
    }

    async fn say(&mut self, command: &str) -> anyhow::Result<()> {
        let line = format!("{command}\n");
        Ok(self.input.write_all(line.as_bytes()).await?)
    }

    /// Returns the next line of its output.
    async fn sees(&mut self) -> anyhow::Result<Value> {
        let line = tokio::time::timeout(SOON, self.lines.next_line()).await??;
        Ok(serde_json::from_str(&line.unwrap_or_default())?)
    }

    /// Waits for a line of its output that meets `is_meant`.
    async fn sees_that(&mut self, is_meant: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
        while !is_meant(&self.sees().await?) {}
        Ok(())
    }
}

fn socket(product: &Product) -> PathBuf {
    product.data_dir().join("device-api.sock")
}

#[tokio::test]
async fn a_stock_python_client_lists_watches_and_writes_over_a_kill() -> anyhow::Result<()> {
    let mut product = Launch::new()?.start().await?;
    let Some(mut python) = Python::start(&product).await? else {
        return Ok(());
    };
    python.say("list").await?;
    assert_eq!(python.sees().await?, json!({"list": {}}));
    python.say("watch").await?;
    // Responses and events come from two threads.
    python.say("register GPU-a").await?;
    python.sees_that(|seen| seen["event"] == "ADDED").await?;
    python.say("bad GPU-a").await?;
    let is_bad = |seen: &Value| {
        let said = &seen["conditions"];
        seen["event"] == "MODIFIED" && said["Looks"] == "FALSE" && said["Ready"] == "FALSE"
    };
    let (mut is_told, mut is_answered) = (false, false);
    while !(is_told && is_answered) {
        let seen = python.sees().await?;
        is_told |= is_bad(&seen);
        is_answered |= seen["updated"] == "GPU-a";
    }

    product.restart().await?;
    python.sees_that(|seen| seen["event"] == "ended").await?;
    python.say("again").await?;
    // The client's version is from the previous process, so it is told to list again.
    assert_eq!(python.sees().await?["event"], "RESYNC");
    assert_eq!(python.sees().await?["event"], "BOOKMARK");
    python.say("register GPU-a").await?;
    python.sees_that(|seen| seen["created"] == true).await?;
    Ok(())
}

#[tokio::test]
async fn the_commands_say_how_the_gpus_do() -> anyhow::Result<()> {
    let gate = tempfile::tempdir()?;
    let gate = gate.path().join("gate.sock");
    let launch = Launch::new()?.node_name("n1");
    let mut product = launch.option("--job-gate", &gate).start().await?;
    let data_dir = product.data_dir();
    let run = async |product: &Product, args: &[&str]| {
        let mut all: Vec<&str> = args.to_vec();
        let data_dir = data_dir.display().to_string();
        all.extend(["--data-dir", &data_dir]);
        product.command(all).await
    };
    let text = run(&product, &["devices"]).await?;
    assert_eq!(text.expect(0)?, "No GPUs are known on this machine.\n");
    let fit = run(&product, &["check", "node"]).await?;
    assert_eq!(fit.expect(0)?, "fit: 0 GPUs, 0 bad, 0 unknown\n");
    assert!(
        fit.stderr.contains("warning: gpuwarden knows no GPUs"),
        "{}",
        fit.stderr
    );
    run(&product, &["check", "node", "--strict"])
        .await?
        .expect(1)?;

    let Some(mut python) = Python::start(&product).await? else {
        return Ok(());
    };
    for (command, code) in [("register GPU-a", 0), ("well GPU-a", 0), ("bad GPU-a", 1)] {
        python.say(command).await?;
        python.sees().await?;
        let devices = run(&product, &["devices", "-o", "json"])
            .await?
            .json(code)?;
        assert_eq!(devices[0]["name"], "GPU-a");
        run(&product, &["check", "node"]).await?.expect(code)?;
    }
    let wide = run(&product, &["devices", "-o", "wide"]).await?;
    assert!(wide.expect(1)?.contains("NotReady"), "{}", wide.stdout);
    assert!(wide.stdout.contains("Looks Seen"), "{}", wide.stdout);
    let unfit = run(&product, &["check", "node", "-o", "json"])
        .await?
        .json(1)?;
    assert_eq!(unfit["bad"], json!(["GPU-a: false: Looks"]));
    assert_eq!(unfit["fit"], json!(false));

    // A fault from the provider is a fault of the node, and a fault of the node becomes a
    // condition.
    let status = || async {
        let status = product.client(["status", "-o", "json"]).await;
        let status = status.map_err(|error| error.to_string())?.stdout;
        let found = status.contains("\"check\": \"Looks\"");
        found.then_some(()).ok_or(status)
    };
    product.wait_for("the fault", SOON, status).await?;
    for (reported, expected) in [
        (event("n1", "GPU-a"), "False"),
        (recovery("n1", "GPU-a"), "True"),
    ] {
        send_to(&product, vec![reported]).await?;
        let says = || async {
            let devices = run(&product, &["devices", "-o", "json"]).await;
            let devices = devices.and_then(|output| output.json(1));
            let devices = devices.map_err(|error| error.to_string())?;
            let conditions = devices[0]["conditions"].as_array();
            let is_it =
                |one: &Value| one["type"] == "NVSentinelHealth" && one["status"] == expected;
            let found = conditions.is_some_and(|all| all.iter().any(is_it));
            found.then_some(()).ok_or(devices.to_string())
        };
        product.wait_for(expected, SOON, says).await?;
    }

    product.kill9()?;
    let away = run(&product, &["check", "node"]).await?;
    away.expect(0)?;
    assert!(
        away.stderr.contains("warning: no Device API is served"),
        "{}",
        away.stderr
    );
    run(&product, &["check", "node", "--strict"])
        .await?
        .expect(1)?;
    run(&product, &["check", "gpu"]).await?.expect(2)?;
    Ok(())
}

/// Returns the conditions of a GPU: type and state.
fn conditions(devices: &Value, gpu: usize) -> Vec<(String, String)> {
    let all = devices[gpu]["conditions"].as_array();
    let word = |one: &Value, key: &str| one[key].as_str().unwrap_or_default().to_owned();
    let pair = |one| {
        (
            word(one, "type"),
            format!("{} {}", word(one, "status"), word(one, "reason")),
        )
    };
    all.into_iter().flatten().map(pair).collect()
}

/// Waits until GPU 1 has these states and reasons of `NVMLReady` and `NVSentinelHealth`.
pub(crate) async fn says(product: &Product, expected: [&str; 2]) -> anyhow::Result<()> {
    let data_dir = product.data_dir().display().to_string();
    let look = || async {
        let asked = ["devices", "-o", "json", "--data-dir", &data_dir];
        let output = product.command(asked).await;
        let output = output.map_err(|error| error.to_string())?;
        let devices = serde_json::from_str(&output.stdout).map_err(|_| output.stderr)?;
        let found = conditions(&devices, 1);
        let kinds = ["NVMLReady", "NVSentinelHealth"];
        let is = |(kind, expected): (&str, &str)| {
            let mut found = found.iter();
            found.any(|(one, said)| one == kind && said == expected)
        };
        let all = kinds.into_iter().zip(expected).all(is);
        all.then_some(()).ok_or(format!("{found:?}"))
    };
    product.wait_for(&format!("{expected:?}"), SOON, look).await
}

#[tokio::test]
async fn an_agent_knows_the_faults_of_its_node_from_the_controller() -> anyhow::Result<()> {
    let place = own_port()?;
    let port = place.local_addr()?.to_string();
    let controller = Launch::controller()?
        .option("--grpc-insecure", "true")
        .option("--grpc-listen", &port)
        .start()
        .await?;
    let agent = Launch::agent()?
        .node_name("n1")
        .option("--controller", format!("http://{port}"))
        .option("--fake-gpus", "2")
        .option("--nvml-health-interval", "1")
        .start()
        .await?;
    says(&agent, ["True Initialized", "True NoFault"]).await?;
    let xid = ["inject", "xid", "79", "--gpu", "1", "--via", "nvml"];
    agent.client(xid).await?.expect(0)?;
    says(&agent, ["False XidError", "False SysLogsXIDError"]).await?;
    // The operator reports the recovery at the controller.
    let recovery = ["inject", "recovery", "--node-name", "n1"];
    controller.client(recovery).await?.expect(0)?;
    says(&agent, ["True Recovered", "True NoFault"]).await
}
