//! Findings of `doctor`: on a bare machine, with an invalid configuration, beside a running
//! gpuwarden, and in a cluster, with and without permissions.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Version, binary, unique};

use crate::support::{SOON, gpuwarden};

/// Returns the results in the form `check result what`.
fn lines(findings: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let line = |it: &Value| {
        format!(
            "{} {} {}",
            text(&it["check"]),
            text(&it["result"]),
            text(&it["what"])
        )
    };
    findings.as_array().unwrap().iter().map(line).collect()
}

/// Returns the only finding of a check.
pub(crate) fn one<'a>(findings: &'a Value, check: &str) -> &'a Value {
    let list = findings.as_array().unwrap();
    let mut found = list.iter().filter(|it| it["check"] == check);
    let first = found
        .next()
        .unwrap_or_else(|| panic!("no {check} in {findings:#}"));
    assert!(found.next().is_none(), "{check} twice in {findings:#}");
    first
}

#[test]
fn a_machine_with_nothing_is_told_what_to_do_and_left_as_it_was() {
    let home = tempfile::tempdir().unwrap();
    let log = home.path().join("kernel.log");
    std::fs::write(&log, "").unwrap();
    let data = home.path().join("data");
    let args = [
        "doctor",
        "--data-dir",
        data.to_str().unwrap(),
        "--kernel-log",
        log.to_str().unwrap(),
        "--listen",
        "127.0.0.1:0",
    ];
    let (code, out, err) = gpuwarden(&[&args[..], &["-o", "json"]].concat(), "");
    assert_eq!((code, err.as_str()), (Some(1), ""));
    let found: Value = serde_json::from_str(&out).unwrap();
    for (check, result) in [
        ("settings", "ok"),
        ("server", "problem"),
        ("kernel-log", "ok"),
        ("data-dir", "ok"),
        ("listen", "ok"),
        ("policy", "ok"),
        ("cluster", "ok"),
    ] {
        assert_eq!(one(&found, check)["result"], result, "{found:#}");
    }
    let start = one(&found, "server")["fix"].as_str().unwrap();
    assert!(start.starts_with("gpuwarden run"), "{start}");
    assert!(!data.exists());

    let (code, out, _) = gpuwarden(&args, "");
    assert_eq!(code, Some(1));
    assert!(
        out.contains("problem  server") && out.contains("fix: gpuwarden run"),
        "{out}"
    );
    assert!(out.contains("\n1 problem, "), "{out}");
}

#[test]
fn whether_dcgm_can_be_asked_is_told_with_why_not() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).to_string_lossy().into_owned();
    let root = path("driver");
    std::fs::write(path("kernel.log"), "").unwrap();
    let (log, data) = (path("kernel.log"), path("data"));
    let args = [
        "doctor",
        "-o",
        "json",
        "--kernel-log",
        &log,
        "--data-dir",
        &data,
        "--listen",
        "127.0.0.1:0",
        "--nvml-driver-root",
        &root,
    ];
    let doctor = |more: &[&str]| -> Value {
        let (_, out, err) = gpuwarden(&[&args[..], more].concat(), "");
        assert_eq!(err, "", "{out}");
        serde_json::from_str(&out).unwrap()
    };
    let asks = ["--dcgm-addr", "localhost"];
    let found = doctor(&asks);
    let dcgm = one(&found, "dcgm");
    let what = dcgm["what"].as_str().unwrap();
    assert_eq!(dcgm["result"], "problem", "{dcgm}");
    assert!(
        what.starts_with("libdcgm.so.4 or libdcgm.so.3 cannot be loaded"),
        "{what}"
    );
    let library = home.path().join("driver/usr/lib64");
    fakes::install(&library, &fakes::Scenario::healthy(1)).unwrap();
    let found = doctor(&asks);
    let expected = "dcgm ok the host engine at localhost answers";
    assert!(
        lines(&found).iter().any(|line| line == expected),
        "{found:#}"
    );
    // A check that is switched off has no finding.
    let found = doctor(&[]);
    assert!(!lines(&found).iter().any(|line| line.starts_with("dcgm ")));
}

#[test]
fn the_driver_of_the_gpus_is_told_with_where_it_was_found() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).to_string_lossy().into_owned();
    std::fs::write(path("kernel.log"), "").unwrap();
    let (log, data, root) = (path("kernel.log"), path("data"), path("driver"));
    let doctor = |more: &[&str]| -> Value {
        let args = ["doctor", "-o", "json", "--listen", "127.0.0.1:0"];
        let places = [
            "--kernel-log",
            &log,
            "--data-dir",
            &data,
            "--nvml-driver-root",
            &root,
        ];
        let (_, out, err) = gpuwarden(&[&args[..], &places, more].concat(), "");
        assert_eq!(err, "", "{out}");
        serde_json::from_str(&out).unwrap()
    };
    let library = home.path().join("driver/usr/lib64");
    fakes::install(&library, &fakes::Scenario::healthy(2)).unwrap();
    let found = doctor(&[]);
    let gpus = one(&found, "gpus");
    let what = gpus["what"].as_str().unwrap();
    assert_eq!(gpus["result"], "ok", "{gpus}");
    let library = library.join("libnvidia-ml.so.1");
    let by = format!(", {} by the driver's directory", library.display());
    assert!(
        what.starts_with("2 GPUs, driver ") && what.ends_with(&by),
        "{what}"
    );
    // A library that does not respond is a problem.
    std::fs::write(&library, "no library").unwrap();
    let found = doctor(&[]);
    assert_ne!(one(&found, "gpus")["result"], "ok", "{found:#}");
    let found = doctor(&["--fake-gpus", "2"]);
    assert!(
        one(&found, "gpus")["what"]
            .as_str()
            .unwrap()
            .contains("made up"),
        "{found:#}"
    );
    // A check that is switched off has no finding.
    let found = doctor(&["--enable-nvml-provider", "false"]);
    assert!(
        !lines(&found).iter().any(|line| line.starts_with("gpus ")),
        "{found:#}"
    );
}

/// Returns a printed command as a person would paste it into a shell.
fn pasted(command: &str) -> anyhow::Result<tokio::process::Command> {
    let program = binary()?;
    let usual = std::env::var("PATH").unwrap_or_default();
    let directory = program.parent().unwrap_or(Path::new("")).display();
    let mut shell = tokio::process::Command::new("sh");
    shell
        .args(["-c", &format!("exec {command}")])
        .env("PATH", format!("{directory}:{usual}"))
        .env_remove("GPUWARDEN_KUBECONFIG")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    Ok(shell)
}

#[tokio::test]
async fn what_is_printed_as_a_fix_works_when_it_is_pasted() -> anyhow::Result<()> {
    let home = tempfile::tempdir()?;
    let data = home.path().join("da ta's");
    let log = home.path().join("kernel.log");
    std::fs::write(&log, "")?;
    let (data, log) = (data.to_string_lossy(), log.to_string_lossy());
    let place = ["--data-dir", &*data];
    let doctor = || -> anyhow::Result<Value> {
        let flags = [
            "--kernel-log",
            &*log,
            "--listen",
            "127.0.0.1:0",
            "--node-name",
            "n1",
        ];
        let args = [&["doctor", "-o", "json"], &place[..], &flags].concat();
        Ok(serde_json::from_str(&gpuwarden(&args, "").1)?)
    };
    // The product is started as `doctor` suggests.
    let found = doctor()?;
    let fix = one(&found, "server")["fix"].as_str().unwrap_or_default();
    let (start, _) = fix.split_once(", or ").unwrap_or_default();
    let output = std::fs::File::create(home.path().join("output"))?;
    let _running = pasted(start)?
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()?;
    let found = testkit::wait_for("the started product", SOON, || async {
        let found = doctor().map_err(|error| error.to_string())?;
        match one(&found, "server")["result"].as_str() {
            Some("ok") => Ok(found),
            _ => Err(format!("{start}: {found:#}")),
        }
    });
    found.await?;
    // The suggested follow-up command finds the node.
    let args = [&["why-not", "n1", "-o", "json"], &place[..]].concat();
    let (code, out, err) = gpuwarden(&args, "");
    assert_eq!(code, Some(0), "{err}");
    let why: Value = serde_json::from_str(&out)?;
    let checks = why["checks"].as_array().cloned().unwrap_or_default();
    let fixes = checks.iter().filter_map(|check| check["fix"].as_str());
    let mut explain = fixes.filter_map(|fix| fix.split_once(" shows what"));
    let (explain, _) = explain.next().unwrap_or_else(|| panic!("{why:#}"));
    assert!(explain.starts_with("gpuwarden explain "), "{explain}");
    let answer = pasted(explain)?.output().await?;
    assert_eq!(answer.status.code(), Some(0), "{explain}: {answer:?}");
    Ok(())
}

#[test]
fn what_is_wrong_in_a_configuration_is_told_as_the_role_tells_it() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("c.toml");
    let policy = home.path().join("p.toml");
    let data = home.path().join("data");
    let good = format!(
        "data-dir = {data:?}\nlisten = \"127.0.0.1:0\"\nkernel-log = \"/none/at/all\"\npolicy = \
         {policy:?}\n"
    );
    std::fs::write(&policy, "[[rule-sets]]\n").unwrap();
    let place = ["--config", file.to_str().unwrap()];
    let doctor = |text: String| {
        std::fs::write(&file, text).unwrap();
        let (code, out, _) = gpuwarden(&[&["doctor", "-o", "json"], &place[..]].concat(), "");
        assert_eq!(code, Some(1));
        lines(&serde_json::from_str(&out).unwrap())
    };
    for (wrong, expected) in [
        (
            "lisen = 1\n",
            "c.toml:5: unknown key 'lisen'; did you mean 'listen'?",
        ),
        (
            "retention = 5\n",
            "c.toml:5: retention is 5; write a duration",
        ),
        ("history = \"soon\"\n", "--history \"soon\""),
    ] {
        let found = doctor(format!("{good}{wrong}"));
        let [told] = found.as_slice() else {
            panic!("{found:?}");
        };
        assert!(
            told.starts_with("settings problem ") && told.contains(expected),
            "{told}"
        );
        let (code, _, err) = gpuwarden(&[&["run"], &place[..]].concat(), "");
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(expected), "{err}");
    }
    // Files named by the settings are all checked.
    let found = doctor(good.clone());
    for expected in [
        "kernel-log problem /none/at/all",
        "p.toml:1: rule-sets[0]: the key 'name' is missing",
    ] {
        let told = found.iter().filter(|line| line.contains(expected));
        assert_eq!(told.count(), 1, "{expected} in {found:#?}");
    }
}

#[tokio::test]
async fn a_running_one_is_well_until_it_is_not() -> anyhow::Result<()> {
    let product = Launch::new()?.node_name("n1").start().await?;
    let data = product.data_dir();
    product
        .wait_for("readiness", SOON, || async {
            let answer = product.get("/readyz").await;
            let answer = answer.map_err(|error| error.to_string())?;
            (answer == "ready\n").then_some(()).ok_or(answer)
        })
        .await?;
    let doctor = async || {
        let args = ["doctor", "--node-name", "n1", "--data-dir"].map(str::to_owned);
        let data = data.to_string_lossy().into_owned();
        let rest = [data, "-o".to_owned(), "json".to_owned()];
        product.command(args.into_iter().chain(rest)).await
    };
    let found = doctor().await?.json(0)?;
    for (check, result) in [("server", "ok"), ("ready", "ok"), ("socket", "ok")] {
        assert_eq!(one(&found, check)["result"], result, "{found:#}");
    }
    // Files that the running process holds open are not opened again.
    assert!(
        !lines(&found)
            .iter()
            .any(|line| line.starts_with("data-dir "))
    );
    // Running `doctor` has stored no event.
    let status: Value = serde_json::from_str(&product.get("/api/v1/status").await?)?;
    assert_eq!(status["store"]["events"], 0, "{status}");

    // A socket that is only missing is soon bound again; what is no socket is left alone.
    let replacement = tempfile::NamedTempFile::new_in(&data)?;
    replacement.persist(product.socket())?;
    let found = doctor().await?.json(1)?;
    assert_eq!(one(&found, "socket")["result"], "problem", "{found:#}");
    Ok(())
}

/// Writes a kubeconfig with the token of a `ServiceAccount`.
pub(crate) async fn kubeconfig_of(
    plane: &ControlPlane,
    account: &str,
    into: &Path,
) -> anyhow::Result<PathBuf> {
    plane.kubectl(["create", "serviceaccount", account]).await?;
    let token = plane.kubectl(["create", "token", account]).await?;
    let config = plane
        .kubectl(["config", "view", "--raw", "-o", "json"])
        .await?;
    let mut config: Value = serde_json::from_str(&config)?;
    config["users"][0]["user"] = json!({"token": token.trim()});
    let path = into.join("kubeconfig");
    std::fs::write(&path, config.to_string())?;
    Ok(path)
}

/// Runs the commands of a fix as administrator.
pub(crate) async fn apply_fix(plane: &ControlPlane, fix: &Value) -> anyhow::Result<()> {
    for command in fix.as_str().unwrap_or_default().split(" && ") {
        let words = command.split(' ').map(|word| word.trim_matches('\''));
        plane.kubectl(words.skip(1)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn in_a_cluster_rights_and_nodes_are_looked_at_and_the_fixes_mend() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let home = tempfile::tempdir()?;
    let account = unique("doctor");
    let kubeconfig = kubeconfig_of(&plane, &account, home.path()).await?;
    let log = home.path().join("kernel.log");
    std::fs::write(&log, "")?;
    let doctor = |more: &[&str]| -> Value {
        let (data, log, kubeconfig) = (home.path().join("data"), &log, &kubeconfig);
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        let (data, log, kubeconfig) = (path(&data), path(log), path(kubeconfig));
        let args = [
            "doctor",
            "-o",
            "json",
            "--data-dir",
            &data,
            "--kernel-log",
            &log,
            "--listen",
            "127.0.0.1:0",
            "--kubeconfig",
            &kubeconfig,
            "--node-name",
            "gpu-1",
            "--namespace",
            "gw",
            "--quarantine",
            // The socket of a kubelet, which exists.
            "--pod-resources",
            &log,
        ];
        let (code, out, err) = gpuwarden(&[&args[..], more].concat(), "");
        assert_eq!((code, err.as_str()), (Some(1), ""), "{out}");
        serde_json::from_str(&out).unwrap()
    };

    // The account has no permissions yet.
    let found = doctor(&["--policy", "configmap:gw/rules"]);
    assert_eq!(one(&found, "cluster")["result"], "ok", "{found:#}");
    assert_eq!(one(&found, "clock")["result"], "ok", "{found:#}");
    let missing: Vec<&Value> = found
        .as_array()
        .unwrap()
        .iter()
        .filter(|it| it["check"] == "permissions")
        .collect();
    let who = format!("system:serviceaccount:default:{account}");
    let told: Vec<String> = missing
        .iter()
        .map(|it| it["what"].as_str().unwrap().replace(&who, "it"))
        .collect();
    assert_eq!(
        told,
        [
            "it may not list, watch, patch nodes",
            "it may not patch nodes/status",
            "it may not create, patch events in default",
            "it may not list, watch, create, patch configmaps in gw",
            "it may not list, watch configmaps in gw",
            "it may not list, watch configmaps in gw",
            "it may not list, patch pods",
            "it may not list resourceslices",
        ]
    );
    let may_lack = missing.iter().filter(|it| it["result"] == "warning");
    assert_eq!(may_lack.count(), 2, "{missing:#?}");
    // The printed commands fix the problem.
    plane.kubectl(["create", "namespace", "gw"]).await?;
    for problem in &missing {
        apply_fix(&plane, &problem["fix"]).await?;
    }
    let found = testkit::wait_for("the roles to hold", SOON, || async {
        let found = doctor(&["--policy", "configmap:gw/rules"]);
        let list = found.as_array().unwrap();
        let mut rights = list.iter().filter(|it| it["check"] == "permissions");
        match rights.find(|it| it["result"] != "ok") {
            Some(missing) => Err(missing.to_string()),
            None => Ok(found),
        }
    })
    .await?;
    for (check, result) in [
        ("node", "problem"),
        ("gpu-nodes", "warning"),
        ("topology", "warning"),
        ("policy", "problem"),
    ] {
        assert_eq!(one(&found, check)["result"], result, "{found:#}");
    }

    // The missing objects are created.
    let client = plane.client().await?;
    testkit::node("gpu-1").create(&client).await?;
    let rules = "[[rule-sets]]\nname = \"r\"\ncordon = { shouldCordon = true }\n[[rule-sets.match.all]]\n\
                 kind = \"HealthEvent\"\nexpression = \"event.isFatl\"\n";
    let literal = format!("--from-literal=config.toml={rules}");
    let create = ["-n", "gw", "create", "configmap", "rules", &literal];
    plane.kubectl(create).await?;
    // A policy is no file of rules of the analysis.
    let both = [
        "--policy",
        "configmap:gw/rules",
        "--rules",
        "configmap:gw/rules",
    ];
    let found = doctor(&both);
    let told = lines(&found);
    for expected in [
        "node ok the cluster has gpu-1",
        "node warning gpu-1 has no label nvidia.com/gpu.present=true",
        "policy problem configmap:gw/rules/config.toml:6: rule set 'r': expression unknown field \
         'isFatl' of 'event'; did you mean 'isFatal'?",
        "rules problem configmap:gw/rules/config.toml:1: unknown key 'rule-sets'; there is built_in, topology, rules",
    ] {
        assert!(
            told.iter().any(|line| line == expected),
            "{expected} in {told:#?}"
        );
    }
    let list = found.as_array().unwrap();
    let label = list
        .iter()
        .find(|it| it["what"].as_str().unwrap().contains("has no label"));
    apply_fix(&plane, &label.unwrap()["fix"]).await?;
    let rack = ["label", "node", "gpu-1", "topology.kubernetes.io/rack=r1"];
    plane.kubectl(rack).await?;
    let found = doctor(&[]);
    for check in ["node", "gpu-nodes", "topology", "policy"] {
        assert_eq!(one(&found, check)["result"], "ok", "{found:#}");
    }
    Ok(())
}

/// As in a pod: without a kubeconfig, from the environment and files that Kubernetes provides.
#[tokio::test]
async fn in_a_pod_the_service_accounts_token_is_used() -> anyhow::Result<()> {
    let may = Command::new("unshare").args(["--mount", "true"]).status();
    if !may.is_ok_and(|status| status.success()) {
        testkit::skip("root and unshare: it makes a mount namespace");
        return Ok(());
    }
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let account = unique("pod");
    let home = tempfile::tempdir()?;
    let secrets = home.path().join("secrets");
    std::fs::create_dir(&secrets)?;
    let make = ["create", "serviceaccount", &account];
    plane.kubectl(make).await?;
    let token = plane.kubectl(["create", "token", &account]).await?;
    std::fs::write(secrets.join("token"), token.trim())?;
    std::fs::write(secrets.join("namespace"), "default")?;
    // Kubernetes mounts the authority published here into every pod.
    let authority = testkit::wait_for("the cluster's authority", SOON, || async {
        let path = "jsonpath={.data.ca\\.crt}";
        let find = ["get", "configmap", "kube-root-ca.crt", "-o", path];
        let found = plane.kubectl(find).await;
        found.map_err(|error| error.to_string())
    });
    std::fs::write(secrets.join("ca.crt"), authority.await?)?;

    let server = plane.server().trim_start_matches("https://");
    let (host, port) = server.rsplit_once(':').unwrap();
    let log = home.path().join("kernel.log");
    std::fs::write(&log, "")?;
    let script = "mount -t tmpfs tmpfs /var/run && d=/var/run/secrets/kubernetes.io \
                  && mkdir -p $d && cp -r \"$1\" $d/serviceaccount && shift && exec \"$@\"";
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(&secrets)
        .arg(binary()?)
        .args(["doctor", "-o", "json", "--listen", "127.0.0.1:0"])
        .args(["--node-name", "gpu-1", "--quarantine", "--kernel-log"])
        .arg(&log)
        .arg("--data-dir")
        .arg(home.path().join("data"))
        .env("KUBERNETES_SERVICE_HOST", host)
        .env("KUBERNETES_SERVICE_PORT", port)
        .env_remove("GPUWARDEN_KUBECONFIG")
        .env_remove("KUBECONFIG")
        .output()?;
    let told = String::from_utf8_lossy(&output.stderr);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{told}"));
    assert_eq!(one(&found, "cluster")["result"], "ok", "{found:#}");
    // The API server authenticates the account, which has no permissions.
    let who = format!("system:serviceaccount:default:{account} may not list, watch, patch nodes");
    assert!(found.to_string().contains(&who), "{found:#}");
    Ok(())
}
