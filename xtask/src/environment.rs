//! `cargo xtask env`: a test control plane for manual use, with fake nodes.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command as Process, Stdio},
};

use anyhow::{Context as _, bail};
use serde_json::json;
use testkit::{
    Component, Version,
    components::cache_dir,
    supervisor::{self, Programs},
};

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Start a control plane, or add nodes to the running one, and print the path of its
    /// kubeconfig.
    #[command(after_help = "\
Example:
  export KUBECONFIG=$(cargo xtask env up --nodes 10)")]
    Up {
        /// Kubernetes version: 1.35, 1.36 or 1.37.
        #[arg(long, default_value_t = Version::LATEST)]
        version: Version,
        /// Number of fake nodes: node-0, node-1 and so on, with 8 GPUs each.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=10_000))]
        nodes: u32,
    },
    /// Stop the control plane and delete its data.
    Down {
        /// Stop only this version [default: all that run].
        #[arg(long)]
        version: Option<Version>,
    },
    /// Show the running control planes.
    Status,
}

/// Runs one of the commands.
pub(crate) fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Up { version, nodes } => up(*version, *nodes),
        Command::Down { version } => down(*version),
        Command::Status => status(),
    }
}

/// Default namespace of gpuwarden (`--namespace`).
const NAMESPACE: &str = "gpuwarden";

fn directory(version: Version) -> anyhow::Result<PathBuf> {
    Ok(cache_dir()?.join("env").join(version.minor()))
}

fn up(version: Version, nodes: u32) -> anyhow::Result<()> {
    let Some(programs) = Programs::locate(version)? else {
        bail!("no control plane {version} here: run 'cargo xtask setup --kubernetes {version}'");
    };
    if nodes > 0 && Component::Kwok.locate()?.is_none() {
        bail!("nodes need {}: {}", Component::Kwok, Component::Kwok.hint());
    }
    let dir = directory(version)?;
    let state = if let Some(state) = supervisor::running(&dir)? {
        state
    } else {
        eprintln!("starting Kubernetes {version} in {}", dir.display());
        supervisor::start_detached(&programs, &dir)?
    };
    let kubectl = programs.kubectl();
    let present = kubectl_output(&kubectl, &state.kubeconfig, &["get", "nodes", "-o", "name"])?;
    let missing: Vec<u32> = (0..nodes)
        .filter(|number| {
            !present
                .lines()
                .any(|line| line == format!("node/node-{number}"))
        })
        .collect();
    if !missing.is_empty() {
        eprintln!("creating {} nodes", missing.len());
        create_nodes(&kubectl, &state.kubeconfig, &missing)?;
    }
    // The namespace of gpuwarden's ConfigMap and Lease, which an installation creates.
    let namespaces = ["get", "namespaces", "-o", "name"];
    let present = kubectl_output(&kubectl, &state.kubeconfig, &namespaces)?;
    if !present
        .lines()
        .any(|line| line == format!("namespace/{NAMESPACE}"))
    {
        let create = ["create", "namespace", NAMESPACE];
        kubectl_output(&kubectl, &state.kubeconfig, &create)?;
    }
    eprintln!(
        "Kubernetes {version} at {}; logs in {}",
        state.server,
        dir.join("log").display()
    );
    println!("{}", state.kubeconfig.display());
    Ok(())
}

fn kubectl_output(kubectl: &Path, kubeconfig: &Path, args: &[&str]) -> anyhow::Result<String> {
    crate::shell::output(
        Process::new(kubectl)
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(args),
    )
}

/// Creates nodes that kwok keeps ready.
fn create_nodes(kubectl: &Path, kubeconfig: &Path, numbers: &[u32]) -> anyhow::Result<()> {
    let nodes: Vec<_> = numbers
        .iter()
        .map(|number| {
            let name = format!("node-{number}");
            json!({
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                    "labels": {"kubernetes.io/hostname": name, "nvidia.com/gpu.present": "true"},
                },
            })
        })
        .collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": nodes});
    let mut child = Process::new(kubectl)
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .args(["create", "--filename", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .context("run kubectl")?;
    let mut input = child.stdin.take().context("no input to write to")?;
    input.write_all(list.to_string().as_bytes())?;
    drop(input);
    let status = child.wait()?;
    if !status.success() {
        bail!("kubectl create: {status}");
    }
    Ok(())
}

fn down(version: Option<Version>) -> anyhow::Result<()> {
    let mut ended = false;
    for version in Version::ALL
        .into_iter()
        .filter(|one| version.is_none_or(|v| v == *one))
    {
        let dir = directory(version)?;
        if supervisor::stop_detached(&dir)? {
            println!("Kubernetes {version} ended");
            ended = true;
        }
        if dir.exists() {
            std::fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))?;
        }
    }
    if !ended {
        println!("nothing runs");
    }
    Ok(())
}

fn status() -> anyhow::Result<()> {
    let mut any = false;
    for version in Version::ALL {
        let Some(state) = supervisor::running(&directory(version)?)? else {
            continue;
        };
        any = true;
        println!("Kubernetes {version}");
        println!("  server      {}", state.server);
        println!("  kubeconfig  {}", state.kubeconfig.display());
        for (program, pid) in &state.pids {
            println!("  {program:<24} process {pid}");
        }
    }
    if !any {
        println!("nothing runs: start it with 'cargo xtask env up'");
    }
    Ok(())
}
