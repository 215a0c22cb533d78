//! `doctor` of a release: from outside with an operator's permissions, and in its pods.

use serde_json::Value;
use testkit::{Output, wait_for};

use super::NAMESPACE;
use super::release::Release;
use crate::doctor::one;
use crate::support::SOON;

/// Returns the findings of `gpuwarden doctor cluster`.
async fn of_cluster(kubeconfig: &std::path::Path) -> anyhow::Result<Output> {
    let mut command = tokio::process::Command::new(testkit::binary()?);
    command.args(["doctor", "cluster", "-o", "json", "--kubeconfig"]);
    Output::of(command.arg(kubeconfig)).await
}

fn of_check<'a>(findings: &'a Value, check: &str) -> Vec<&'a Value> {
    let findings = findings.as_array().into_iter().flatten();
    findings.filter(|one| one["check"] == check).collect()
}

#[tokio::test]
async fn doctor_names_what_a_release_lacks() -> anyhow::Result<()> {
    let Some((plane, helm)) = Release::cluster().await? else {
        return Ok(());
    };
    let doctor = async || of_cluster(plane.kubeconfig()).await;
    let until = async |what: &str, code: i32, is: &dyn Fn(&Value) -> bool| {
        wait_for(what, SOON, || async {
            let found = doctor().await.map_err(|error| error.to_string())?;
            let found = found.json(code).map_err(|error| error.to_string())?;
            if is(&found) {
                Ok(found)
            } else {
                Err(found.to_string())
            }
        })
        .await
    };

    let nothing = doctor().await?.json(1)?;
    for check in ["controllers", "agents"] {
        assert_eq!(one(&nothing, check)["result"], "problem", "{nothing:#}");
    }

    helm.deploy(&[], &[]).await?;
    let well = until("a release without a problem", 0, &|_| true).await?;
    assert_eq!(one(&well, "controllers")["result"], "ok", "{well:#}");
    let agents = of_check(&well, "agents");
    assert_eq!(agents.len(), 2, "{well:#}");
    assert_eq!(agents[0]["what"], "2 agents, all ready");
    assert_eq!(agents[1]["what"], "2 nodes with GPUs, each with an agent");
    assert_eq!(one(&well, "runtime-class")["result"], "warning", "{well:#}");
    assert_eq!(one(&well, "others")["result"], "ok", "{well:#}");

    // Another program that acts on nodes shows itself by a label.
    let label = "nvidia.com/gpu-driver-upgrade-state=upgrade-done";
    plane.kubectl(["label", "node", "gpu-1", label]).await?;
    let found = doctor().await?.json(0)?;
    let other = one(&found, "others")["what"].to_string();
    assert!(other.contains("upgrade controller"), "{found:#}");

    plane
        .kubectl(["label", "node", "gpu-1", "site=here"])
        .await?;
    helm.deploy(&[], &["--set", "agent.nodeSelector.site=here"])
        .await?;
    let without = "no agent on gpu-2";
    until("a GPU node without an agent", 1, &|found| {
        of_check(found, "agents")
            .iter()
            .any(|one| one["what"] == without)
    })
    .await?;

    // Kubernetes refuses pods of a class that is missing, and the words of the refusal are shown.
    let chart = super::chart();
    let upgrade = ["upgrade", "gpuwarden", &chart, "-n", NAMESPACE];
    let class = ["--set", "gpuAccess=runtimeClass,runtimeClassName=other"];
    helm.run(&[&upgrade[..], &class].concat()).await?;
    let delete = [
        "-n",
        NAMESPACE,
        "delete",
        "pods",
        "-l",
        "app=gpuwarden-agent",
    ];
    plane.kubectl(delete).await?;
    let found = until("the refusal", 1, &|found| {
        let agents = of_check(found, "agents").into_iter();
        agents
            .map(|one| one["what"].to_string())
            .any(|what| what.contains("RuntimeClass"))
    })
    .await?;
    let class = one(&found, "runtime-class");
    assert_eq!(class["what"], "the cluster has no RuntimeClass other");
    assert_eq!(class["result"], "problem");
    Ok(())
}

#[tokio::test]
async fn doctor_in_a_pod_has_its_settings_and_its_account() -> anyhow::Result<()> {
    let Some(release) = Release::start("127.77.3.1", &["quarantine"], &[]).await? else {
        return Ok(());
    };
    // Neither is ready at once.
    let found = wait_for("a controller without a problem", SOON, || async {
        release
            .in_controller(&["doctor", "controller"])
            .await?
            .json(0)
    })
    .await?;
    for check in ["settings", "server", "ready", "permissions", "tls"] {
        assert_eq!(one(&found, check)["result"], "ok", "{found:#}");
    }
    let may = one(&found, "permissions")["what"].to_string();
    let account = format!("system:serviceaccount:{NAMESPACE}:gpuwarden-controller");
    assert!(may.contains(&account), "{found:#}");
    let found = wait_for("an agent without a problem", SOON, || async {
        release.in_agent(&["doctor", "agent"]).await?.json(0)
    })
    .await?;
    for check in ["settings", "server", "ready", "controller", "tls", "token"] {
        assert_eq!(one(&found, check)["result"], "ok", "{found:#}");
    }
    Ok(())
}
