//! A substitute for the kubelet that runs the containers of checks.

use std::collections::BTreeMap;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, binary};

/// Runs the injected container of a pod, as a kubelet would: its command with its environment,
/// plus `more` as set by a node.
pub(crate) async fn play(
    plane: &ControlPlane,
    pod: &Value,
    check: &str,
    more: &[(&str, &str)],
) -> anyhow::Result<std::process::Output> {
    let program = tokio::process::Command::new(binary()?);
    play_by(program, plane, pod, check, more).await
}

/// Runs the container in this network namespace, as on another host.
pub(crate) async fn play_on(
    host: &str,
    plane: &ControlPlane,
    pod: &Value,
    check: &str,
    more: &[(&str, &str)],
) -> anyhow::Result<std::process::Output> {
    let mut program = tokio::process::Command::new("ip");
    program.args(["netns", "exec", host]).arg(binary()?);
    play_by(program, plane, pod, check, more).await
}

async fn play_by(
    mut program: tokio::process::Command,
    plane: &ControlPlane,
    pod: &Value,
    check: &str,
    more: &[(&str, &str)],
) -> anyhow::Result<std::process::Output> {
    let home = tempfile::tempdir()?;
    let (namespace, name) = (
        text(&pod["metadata"]["namespace"]),
        text(&pod["metadata"]["name"]),
    );
    let containers = pod["spec"]["initContainers"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let container = containers.iter().find(|one| one["name"] == check);
    let container = container.with_context(|| format!("{name} has no {check}"))?;
    let of_field = |path: &str| match path {
        "metadata.name" => name.to_owned(),
        "spec.nodeName" => match text(&pod["spec"]["nodeName"]) {
            "" => format!("node-of-{name}"),
            node => node.to_owned(),
        },
        "status.podIP" => text(&pod["status"]["podIP"]).to_owned(),
        other => panic!("the field {other}"),
    };
    let mut environment = BTreeMap::new();
    for variable in container["env"].as_array().into_iter().flatten() {
        let value = match variable["value"].as_str() {
            Some(value) => value.to_owned(),
            None => of_field(text(&variable["valueFrom"]["fieldRef"]["fieldPath"])),
        };
        environment.insert(text(&variable["name"]).to_owned(), value);
    }
    // The volume with the token, as written by the kubelet.
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    let projected = volumes
        .filter_map(|volume| volume["projected"]["sources"].as_array())
        .flatten();
    let mut tokens = projected.map(|source| &source["serviceAccountToken"]);
    if let Some(token) = tokens.find(|token| token["audience"] == "gpuwarden-preflight") {
        let audience = text(&token["audience"]);
        let made = plane.kubectl([
            "create",
            "token",
            "default",
            "--namespace",
            namespace,
            "--audience",
            audience,
            "--bound-object-kind",
            "Pod",
            "--bound-object-name",
            name,
            "--duration",
            "3600s",
        ]);
        let file = home.path().join("token");
        std::fs::write(&file, made.await?)?;
        environment.insert(
            "GANG_RENDEZVOUS_TOKEN_FILE".into(),
            file.display().to_string(),
        );
    }
    // A directory that the kubelet has not filled yet.
    environment.insert("GANG_CONFIG_DIR".into(), home.path().display().to_string());
    let log = home.path().join("termination-log").display().to_string();
    environment.insert("GPUWARDEN_TERMINATION_LOG".into(), log);
    environment.extend(
        more.iter()
            .map(|(name, value)| ((*name).into(), (*value).into())),
    );
    let command = container["command"]
        .as_array()
        .into_iter()
        .flatten()
        .map(text);
    let output = program
        .args(command.skip(1))
        .env_clear()
        .envs(environment)
        .kill_on_drop(true)
        .output();
    Ok(output.await?)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Records the exit code of a check and its termination message on a pod, as its kubelet does.
pub(crate) async fn note_end(
    client: &Client,
    pod: &Value,
    check: &str,
    code: i32,
    message: &str,
) -> anyhow::Result<()> {
    let (namespace, name) = (
        text(&pod["metadata"]["namespace"]),
        text(&pod["metadata"]["name"]),
    );
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let reason = if code == 0 { "Completed" } else { "Error" };
    let ended = json!({"exitCode": code, "reason": reason, "message": message});
    let container = json!({
        "name": check, "image": "i", "imageID": "", "ready": code == 0, "restartCount": 0,
        "state": {"terminated": ended},
    });
    let status = json!({"status": {"phase": "Pending", "initContainerStatuses": [container]}});
    let patch = Patch::Merge(status);
    pods.patch_status(name, &PatchParams::default(), &patch)
        .await?;
    Ok(())
}
