//! Tests from a fake kubelet to the report.

use std::sync::Mutex;

use diagnosis::gpu::{Gpu, MigDevice};
use tokio::sync::mpsc;

use super::fake::{Kubelet, pod};
use super::*;

/// Formats a reported pod: its resources and its claimed devices.
fn shown(pod: &PodGpus) -> (String, Vec<String>) {
    let resources = pod.resources.iter();
    let resources = resources.map(|one| format!("{}={}", one.resource, one.gpus.join(",")));
    let devices = pod.devices.iter().map(|one| one.device.clone());
    (pod.name.clone(), resources.chain(devices).collect())
}

fn inventory() -> Inventory {
    let partition = MigDevice {
        uuid: "MIG-7".to_owned(),
        ..MigDevice::default()
    };
    Inventory {
        gpus: vec![Gpu {
            uuid: "GPU-1".to_owned(),
            mig_devices: vec![partition],
            ..Gpu::default()
        }],
        ..Inventory::default()
    }
}

#[test]
fn gpus_are_told_by_their_uuid_whatever_gave_them() {
    let table: [(PodResources, &[&str]); 8] = [
        (
            pod(
                "whole",
                &[
                    ("nvidia.com/gpu", &["GPU-2", "GPU-1"]),
                    ("a/nic", &["mlx5_0"]),
                ],
                &[],
            ),
            &["nvidia.com/gpu=GPU-1,GPU-2"],
        ),
        // Shared, renamed, and one GPU twice.
        (
            pod("shared", &[("x.org/a100", &["GPU-1::0", "GPU-1::1"])], &[]),
            &["nvidia.com/gpu=GPU-1"],
        ),
        (
            pod(
                "mig",
                &[("nvidia.com/mig-1g.10gb", &["MIG-7", "MIG-8"])],
                &[],
            ),
            &["nvidia.com/gpu=GPU-1,MIG-8"],
        ),
        (
            pod("old-mig", &[("nvidia.com/gpu", &["MIG-GPU-3/1/0"])], &[]),
            &["nvidia.com/gpu=GPU-3"],
        ),
        (
            pod(
                "machine",
                &[("nvidia.com/pgpu", &["17"]), ("nvidia.com/gpu", &["GPU-1"])],
                &[],
            ),
            &["nvidia.com/gpu=GPU-1", "nvidia.com/pgpu=17"],
        ),
        (
            pod(
                "claim",
                &[],
                &[("gpu.nvidia.com", "gpu-0"), ("nic.example", "nic-0")],
            ),
            &["gpu-0"],
        ),
        (
            pod(
                "none",
                &[("a/nic", &["mlx5_0"])],
                &[("nic.example", "nic-0")],
            ),
            &[],
        ),
        (pod("empty", &[], &[]), &[]),
    ];
    for (pod, expected) in table {
        let gpus = gpus_of(&pod, &inventory());
        let told = gpus.as_ref().map(|gpus| shown(gpus).1);
        assert_eq!(told.unwrap_or_default(), expected, "{}", pod.name);
        assert_eq!(gpus.is_some(), !expected.is_empty(), "{}", pod.name);
    }
}

#[tokio::test]
async fn what_the_kubelet_says_is_told_when_it_changes() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kubelet.sock");
    let kubelet = Kubelet::default();
    *kubelet.0.lock().unwrap() = vec![
        pod("b", &[("nvidia.com/gpu", &["GPU-2"])], &[]),
        pod("a", &[], &[("gpu.nvidia.com", "gpu-0")]),
        pod("none", &[], &[]),
    ];
    let (told, mut reports) = mpsc::unbounded_channel();
    let answers = Arc::new(Mutex::new(vec![
        Ok(false),
        Ok(true),
        Err("not now".to_owned()),
        Ok(false),
    ]));
    let reporter = PodGpuReporter {
        node_name: "n1".to_owned(),
        socket: socket.clone(),
        inventory: watch::channel(inventory()).1,
        imex: watch::Sender::default(),
        tell: Some(Arc::new(move |report| {
            told.send(report).unwrap();
            let answer = answers.lock().unwrap().remove(0);
            Box::pin(async move { answer })
        })),
    };
    let mut state = LastReport::default();
    // The kubelet does not respond.
    let error = reporter.poll(&mut state).await.unwrap_err();
    assert!(error.contains("kubelet.sock"), "{error}");

    kubelet.serve(&socket);
    reporter.poll(&mut state).await.unwrap();
    let report = reports.recv().await.unwrap();
    assert_eq!(report.node_name, "n1");
    let pods: Vec<_> = report.pods.iter().map(shown).collect();
    let expected = [("a", "gpu-0"), ("b", "nvidia.com/gpu=GPU-2")];
    let expected = expected.map(|(name, what)| (name.to_owned(), vec![what.to_owned()]));
    assert_eq!(pods, expected);

    // No change.
    reporter.poll(&mut state).await.unwrap();
    assert!(reports.try_recv().is_err());
    // A pod is gone; the controller requests the report again, and then does not accept it.
    kubelet.0.lock().unwrap().remove(0);
    reporter.poll(&mut state).await.unwrap();
    reporter.poll(&mut state).await.unwrap_err();
    reporter.poll(&mut state).await.unwrap();
    reporter.poll(&mut state).await.unwrap();
    for _ in 0..3 {
        assert_eq!(reports.try_recv().unwrap().pods.len(), 1);
    }
    assert!(reports.try_recv().is_err());
    // After a while an unchanged report is sent.
    state.again_at = Some(Instant::now());
    drop(list_pods(&socket, DEADLINE).await.unwrap());
    assert_eq!(state.report.unwrap().pods.len(), 1);
}

#[test]
fn imex_is_used_by_a_pod_with_a_channel_unless_another_pod_runs_it() {
    let claim = |device| pod("p", &[], &[("compute-domain.nvidia.com", device)]);
    let (channel, daemon) = (claim("channel-0"), claim("daemon"));
    let gpu = pod("g", &[], &[("gpu.nvidia.com", "channel-0")]);
    for (pods, used) in [
        (vec![], false),
        (vec![gpu.clone()], false),
        (vec![gpu, channel.clone()], true),
        (vec![daemon.clone()], false),
        (vec![claim("daemon-0"), channel.clone()], false),
        (vec![channel, daemon], false),
    ] {
        assert_eq!(imex_use(&pods) == ImexUse::Used, used, "{pods:?}");
        assert_ne!(imex_use(&pods), ImexUse::Unknown);
    }
}

/// No component writes on pods here.
#[tokio::test]
async fn whether_imex_is_used_is_told_once_it_is_known_and_when_it_changes() {
    let directory = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::default();
    let channel = pod("c", &[], &[("compute-domain.nvidia.com", "channel-0")]);
    let (imex, mut told) = watch::channel(ImexUse::Unknown);
    let reporter = PodGpuReporter {
        node_name: "n1".to_owned(),
        socket: directory.path().join("kubelet.sock"),
        inventory: watch::channel(inventory()).1,
        imex,
        tell: None,
    };
    let mut state = LastReport::default();
    reporter.poll(&mut state).await.unwrap_err();
    assert!(!told.has_changed().unwrap());
    kubelet.serve(&reporter.socket);
    for (pods, expected) in [
        (vec![], Some(ImexUse::Unused)),
        (vec![channel.clone()], Some(ImexUse::Used)),
        (vec![channel], None),
        (vec![], Some(ImexUse::Unused)),
    ] {
        *kubelet.0.lock().unwrap() = pods;
        reporter.poll(&mut state).await.unwrap();
        let news = told
            .has_changed()
            .unwrap()
            .then(|| *told.borrow_and_update());
        assert_eq!(news, expected);
    }
    // A kubelet that is away does not change the state.
    std::fs::remove_file(&reporter.socket).unwrap();
    reporter.poll(&mut state).await.unwrap_err();
    assert!(!told.has_changed().unwrap());
    assert_eq!(state.report, None);
}
