//! The test kit on real parts.

use std::{fs, time::Duration};

use gpuwarden_testkit::{
    Component, ControlPlane, KernelLog, Options, Program, Version, node, pod, require,
    supervisor::{self, Programs, Shared},
    unique, wait_for,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt as _};

const WAIT: Duration = Duration::from_secs(60);

/// Returns true if a process exists and is not a zombie.
fn alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .starts_with(" Z")
    })
}

async fn all_gone(pids: Vec<i32>) -> anyhow::Result<()> {
    wait_for(
        "the end of all processes",
        Duration::from_secs(15),
        || async {
            let left: Vec<&i32> = pids.iter().filter(|pid| alive(**pid)).collect();
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{left:?} still run"))
            }
        },
    )
    .await
}

#[tokio::test]
async fn a_node_is_created_as_described_and_in_service() {
    let Some(plane) = ControlPlane::shared(Version::LATEST).await.unwrap() else {
        return;
    };
    let client = plane.client().await.unwrap();
    let name = unique("described");
    let created = node(&name)
        .label("zone", "a")
        .annotation("note", "kept")
        .taint("own", "yes", "NoSchedule")
        .unschedulable()
        .create(&client)
        .await
        .unwrap();
    assert_eq!(created.labels().get("zone").map(String::as_str), Some("a"));
    assert_eq!(
        created.annotations().get("note").map(String::as_str),
        Some("kept")
    );
    let spec = created.spec.unwrap();
    assert_eq!(spec.unschedulable, Some(true));
    let taints: Vec<String> = spec
        .taints
        .unwrap()
        .into_iter()
        .map(|taint| taint.key)
        .collect();
    assert!(taints.contains(&"own".to_owned()), "{taints:?}");
    assert!(
        !taints.iter().any(|key| key.ends_with("not-ready")),
        "{taints:?}"
    );

    let seen = plane
        .kubectl(["get", "node", &name, "-o", "name"])
        .await
        .unwrap();
    assert_eq!(seen.trim(), format!("node/{name}"));
    let error = plane
        .kubectl(["get", "node", "no-such-node"])
        .await
        .unwrap_err();
    assert!(error.to_string().contains("not found"), "{error}");
}

#[tokio::test]
async fn a_pod_with_gpus_is_scheduled_runs_and_goes() {
    if require(Component::Kwok).is_none() {
        return;
    }
    let Some(plane) = ControlPlane::shared(Version::LATEST).await.unwrap() else {
        return;
    };
    let client = plane.client().await.unwrap();
    let name = unique("gpus");
    plane.namespace(&name).await.unwrap();
    let own = node(&name).label("own", &name);
    own.create(&client).await.unwrap();
    pod(&name, "placed")
        .on(&name)
        .gpus(4)
        .create(&client)
        .await
        .unwrap();
    pod(&name, "scheduled")
        .on_labelled("own", &name)
        .gpus(2)
        .create(&client)
        .await
        .unwrap();

    let pods: Api<Pod> = Api::namespaced(client, &name);
    let placed: &[&str] = if plane.has(Program::Scheduler) {
        &["placed", "scheduled"]
    } else {
        &["placed"]
    };
    for pod in placed {
        wait_for("a running pod", WAIT, || async {
            let seen = pods.get(pod).await.map_err(|error| error.to_string())?;
            let phase = seen.status.as_ref().and_then(|one| one.phase.as_deref());
            if phase == Some("Running") {
                Ok(())
            } else {
                let node = seen.spec.and_then(|spec| spec.node_name);
                Err(format!("{pod} on {node:?} is {:?}", seen.status))
            }
        })
        .await
        .unwrap();
        pods.delete(pod, &kube::api::DeleteParams::default())
            .await
            .unwrap();
        wait_for("a pod that is gone", WAIT, || async {
            match pods.get_opt(pod).await {
                Ok(None) => Ok(()),
                Ok(Some(_)) => Err(format!("{pod} is still there")),
                Err(error) => Err(error.to_string()),
            }
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn sharing_twice_is_the_same_server() {
    let Some(first) = ControlPlane::shared(Version::LATEST).await.unwrap() else {
        return;
    };
    let second = ControlPlane::shared(Version::LATEST)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(first.server(), second.server());
    assert_eq!(first.state().supervisor, second.state().supervisor);
}

#[tokio::test]
async fn a_shared_control_plane_ends_with_its_last_user_and_comes_again() {
    if require(Component::ControlPlane(Version::LATEST)).is_none()
        || require(Component::Supervise).is_none()
    {
        return;
    }
    let programs = Programs::locate(Version::LATEST).unwrap().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let join = || {
        let (programs, dir) = (programs.clone(), dir.path().to_owned());
        tokio::task::spawn_blocking(move || {
            Shared::join_lingering(&programs, &dir, Duration::ZERO).unwrap()
        })
    };
    // Two concurrent calls: one starts the control plane, and both get it.
    let (first, second) = tokio::join!(join(), join());
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first.state().supervisor, second.state().supervisor);
    let mut pids: Vec<i32> = first.state().pids.values().copied().collect();
    pids.push(first.state().supervisor);
    assert!(pids.iter().all(|pid| alive(*pid)));

    drop(first);
    assert!(
        supervisor::running(dir.path()).unwrap().is_some(),
        "the second still uses it"
    );
    drop(second);
    all_gone(pids).await.unwrap();
    assert!(supervisor::running(dir.path()).unwrap().is_none());

    let again = join().await.unwrap();
    let mut pids: Vec<i32> = again.state().pids.values().copied().collect();
    // The programs of a killed supervisor are killed as well.
    let supervisor = rustix::process::Pid::from_raw(again.state().supervisor).unwrap();
    rustix::process::kill_process(supervisor, rustix::process::Signal::KILL).unwrap();
    pids.push(again.state().supervisor);
    all_gone(pids).await.unwrap();
}

#[tokio::test]
async fn programs_are_killed_stopped_and_restarted_one_by_one() {
    let options = Options::default().arg(Program::ApiServer, "--min-request-timeout=5");
    let Some(plane) = ControlPlane::private(Version::LATEST, options)
        .await
        .unwrap()
    else {
        return;
    };
    let client = plane.client().await.unwrap();
    let nodes: Api<Node> = Api::all(client.clone());
    node("before").create(&client).await.unwrap();

    let pid = plane.pid(Program::ApiServer).unwrap();
    plane.kill(Program::ApiServer).unwrap();
    assert!(!alive(pid));
    assert_eq!(plane.pid(Program::ApiServer), None);
    nodes.get("before").await.unwrap_err();
    plane.restart(Program::ApiServer).unwrap();
    plane.wait_ready().await.unwrap();
    assert_ne!(plane.pid(Program::ApiServer), Some(pid));
    nodes.get("before").await.unwrap();

    // Without etcd the API server cannot write; it recovers with etcd.
    plane.stop(Program::Etcd).unwrap();
    let write = node("frozen").without_kubelet().create(&client);
    tokio::time::timeout(Duration::from_secs(2), write)
        .await
        .unwrap_err();
    plane.cont(Program::Etcd).unwrap();
    wait_for("a write that succeeds", WAIT, || {
        node(unique("thawed")).without_kubelet().create(&client)
    })
    .await
    .unwrap();

    // Written objects survive a kill of etcd.
    plane.kill(Program::Etcd).unwrap();
    plane.restart(Program::Etcd).unwrap();
    wait_for("the node from before", WAIT, || nodes.get("before"))
        .await
        .unwrap();

    let mut pids: Vec<i32> = [Program::Etcd, Program::ApiServer, Program::Kwok]
        .into_iter()
        .filter_map(|program| plane.pid(program))
        .collect();
    pids.push(plane.state().supervisor);
    let dir = plane.dir().to_owned();
    drop(plane);
    all_gone(pids).await.unwrap();
    assert!(!dir.exists(), "{} is left", dir.display());
}

#[tokio::test]
async fn a_flag_that_is_wrong_fails_the_start_and_is_quoted() {
    let options = Options::default().arg(Program::ApiServer, "--no-such-flag");
    let error = match ControlPlane::private(Version::LATEST, options).await {
        Ok(None) => return,
        Ok(Some(_)) => panic!("started with an unknown flag"),
        Err(error) => error.to_string(),
    };
    assert!(error.contains("kube-apiserver ended by itself"), "{error}");
    assert!(error.contains("unknown flag: --no-such-flag"), "{error}");
}

#[tokio::test]
async fn the_older_version_comes_up_too() {
    let Some(plane) = ControlPlane::shared(Version::V1_36).await.unwrap() else {
        return;
    };
    let version = plane
        .client()
        .await
        .unwrap()
        .apiserver_version()
        .await
        .unwrap();
    if std::env::var_os("KUBEBUILDER_ASSETS").is_none() {
        assert!(
            version.git_version.starts_with("v1.36."),
            "{}",
            version.git_version
        );
    }
}

#[tokio::test]
async fn the_kernel_log_takes_a_flood() {
    let Some(log) = KernelLog::lock().await.unwrap() else {
        return;
    };
    // The kernel's rate limit, if it were on, would pass ten of them.
    for number in 0..40 {
        log.write(&format!("{} {number}", log.token())).unwrap();
    }
    assert_eq!(read_kernel_log().unwrap().matches(log.token()).count(), 40);
}

fn read_kernel_log() -> anyhow::Result<String> {
    use std::{io::Read as _, os::unix::fs::OpenOptionsExt as _};
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits())?;
    let mut device = fs::OpenOptions::new()
        .read(true)
        .custom_flags(nonblocking)
        .open("/dev/kmsg")?;
    let (mut text, mut record) = (String::new(), vec![0; 8192]);
    loop {
        match device.read(&mut record) {
            Ok(length) => text += &String::from_utf8_lossy(&record[..length]),
            // A reader that was overrun continues with the remaining records.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(text),
            Err(error) => return Err(error.into()),
        }
    }
}
