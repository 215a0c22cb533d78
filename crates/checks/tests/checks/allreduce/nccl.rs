//! Tests of gangs that reduce by NCCL, each pod with its own fake libraries and GPUs.

use std::fs;

use contract::HealthEvent;
use fakes::{Behaviour, Scenario};

use super::{Ended, Pods, only};

/// Returns a gang that reduces by NCCL, each pod with two GPUs with the given bandwidth.
fn by_nccl(gb_s: [f64; 3]) -> Pods {
    let mut pods = Pods::here(3);
    pods.set("GPUWARDEN_COLLECTIVE", "nccl")
        .set("BW_THRESHOLD_GBPS", "100");
    for (pod, gb_s) in pods.containers.iter().zip(gb_s) {
        let mut scenario = Scenario::healthy(2);
        scenario.nccl.bandwidth_gb_s = gb_s;
        fakes::write(pod.directory.path(), &scenario).unwrap();
    }
    pods
}

/// Asserts that the second of three pods, and no other, is blamed.
fn assert_blames_the_second(ends: &[Ended], code: &str) {
    for (rank, ended) in ends.iter().enumerate() {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        assert!(
            ended.stderr.contains("; to blame: pod-1 on node-1"),
            "{ended:#?}"
        );
        assert_eq!(ended.events.len(), usize::from(rank == 1), "{ended:#?}");
    }
    let event = only(&ends[1]);
    assert_eq!(event.error_code, [code], "{event:#?}");
    assert!(event.is_fatal && event.node_name == "node-1", "{event:#?}");
}

#[tokio::test]
async fn pods_reduce_together_by_nccl_and_the_one_with_slow_gpus_is_named() {
    for ended in by_nccl([200.0; 3]).run().await {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        assert!(only(&ended).is_healthy, "{ended:#?}");
        let expected = "passed: 6 devices reduce with a bus bandwidth of ";
        assert!(ended.stderr.contains(expected), "{ended:#?}");
    }
    let ends = by_nccl([200.0, 50.0, 200.0]).run().await;
    assert_blames_the_second(&ends, "NCCL_ALLREDUCE_BW_DEGRADED");
}

#[tokio::test]
async fn the_pod_whose_gpu_reduces_wrongly_is_named() {
    let pods = by_nccl([200.0; 3]);
    let mut scenario = Scenario::healthy(2);
    scenario.gpu_mut(0).corrupts = true;
    fakes::write(pods.containers[1].directory.path(), &scenario).unwrap();
    let ends = pods.run().await;
    assert_blames_the_second(&ends, "NCCL_ALLREDUCE_ERROR");
    assert_eq!(only(&ends[1]).metadata["nccl_error"], "WRONG_RESULT");
}

/// A gang of one pod with several GPUs.
#[tokio::test]
async fn one_pod_reduces_by_nccl() {
    let pods = Pods::here(1);
    let mut scenario = Scenario::healthy(4);
    fakes::write(pods.containers[0].directory.path(), &scenario).unwrap();
    let mut pods = pods;
    pods.set("GPUWARDEN_COLLECTIVE", "nccl")
        .set("BW_THRESHOLD_GBPS", "");
    let ended = pods.run().await;
    assert_eq!(ended[0].code, Some(0), "{ended:#?}");
    assert!(
        ended[0].stderr.contains("passed: 4 devices reduce"),
        "{ended:#?}"
    );

    for (call, code) in [
        ("ncclCommInitRank", "NCCL_ALLREDUCE_INIT_FAILED"),
        ("ncclAllReduce", "NCCL_ALLREDUCE_ERROR"),
    ] {
        scenario.calls.clear();
        scenario.calls.insert(call.to_owned(), Behaviour::Code(2));
        fakes::write(pods.containers[0].directory.path(), &scenario).unwrap();
        let ended = pods.run().await;
        assert_eq!(ended[0].code, Some(1), "{ended:#?}");
        let event = ended[0].events.last().unwrap();
        assert_eq!(event.error_code, [code], "{ended:#?}");
        // There is no other member to compare with.
        assert!(!event.is_fatal, "{event:#?}");
    }
}

/// A gang of one GPU: its memory can be tested, and NCCL, which has nothing to do, refuses
/// nothing.
#[tokio::test]
async fn a_gang_of_one_gpu_is_tested_as_far_as_one_gpu_can_be() {
    let mut pods = Pods::here(1);
    pods.set("GPUWARDEN_COLLECTIVE", "nccl")
        .set("BW_THRESHOLD_GBPS", "100");
    let mut scenario = Scenario::healthy(1);
    for call in ["ncclGetUniqueId", "ncclCommInitRank"] {
        let refuses = Behaviour::Code(5);
        scenario.calls.insert(call.to_owned(), refuses);
    }
    fakes::write(pods.containers[0].directory.path(), &scenario).unwrap();
    let ended = pods.run().await;
    assert_eq!(ended[0].code, Some(0), "{ended:#?}");
    let expected = "passed: 1 device has no peer to reduce with; it keeps what is written to it, and its memory copies";
    assert!(ended[0].stderr.contains(expected), "{ended:#?}");
    // A pass of one GPU does not close findings about another.
    assert_eq!(gpus_of(only(&ended[0])).len(), 1, "{ended:#?}");

    scenario.gpu_mut(0).corrupts = true;
    scenario.gpu_mut(0).uuid = Some("GPU-odd".to_owned());
    fakes::write(pods.containers[0].directory.path(), &scenario).unwrap();
    let ended = pods.run().await;
    assert_eq!(ended[0].code, Some(1), "{ended:#?}");
    let expected = "the test of 1 device fails: the GPU at ";
    assert!(ended[0].stderr.contains(expected), "{ended:#?}");
    let event = ended[0].events.last().unwrap();
    assert!(event.is_fatal, "{event:#?}");
    assert_eq!(event.metadata["nccl_error"], "WRONG_RESULT");
    assert_eq!(gpus_of(event), ["GPU-odd"]);
}

/// Returns the GPUs that an event is about.
fn gpus_of(event: &HealthEvent) -> Vec<&str> {
    let entities = event.entities_impacted.iter();
    let gpus = entities.filter(|entity| entity.entity_type == "GPU_UUID");
    gpus.map(|entity| entity.entity_value.as_str()).collect()
}

/// Judged like a loopback: an error of a GPU is its fault, and a lack in the container stops no
/// pod.
#[tokio::test]
async fn an_error_of_cuda_is_judged_without_another_pod_to_compare_with() {
    let mut pods = Pods::here(1);
    pods.set("GPUWARDEN_COLLECTIVE", "nccl");
    for (call, code, ends, error, gpus) in [
        ("cudaMalloc", 214, 1, "CUDA_ERROR", &["GPU-one"][..]),
        (
            "cudaMalloc",
            2,
            0,
            "CONTAINER_LACKS_RESOURCES",
            &["GPU-one"],
        ),
        ("cudaGetDeviceCount", 100, 0, "NO_GPU", &[]),
    ] {
        let mut scenario = Scenario::healthy(1);
        scenario.gpu_mut(0).uuid = Some("GPU-one".to_owned());
        scenario
            .calls
            .insert(call.to_owned(), Behaviour::Code(code));
        fakes::write(pods.containers[0].directory.path(), &scenario).unwrap();
        let ended = pods.run().await;
        assert_eq!(ended[0].code, Some(ends), "{ended:#?}");
        let expected = if ends == 0 {
            ": not tested: "
        } else {
            ": failed: "
        };
        assert!(ended[0].stderr.contains(expected), "{ended:#?}");
        let event = ended[0].events.last().unwrap();
        assert_eq!(event.error_code, ["NCCL_ALLREDUCE_ERROR"], "{event:#?}");
        assert_eq!(event.metadata["nccl_error"], error, "{event:#?}");
        assert_eq!(event.is_fatal, ends == 1, "{event:#?}");
        assert_eq!(gpus_of(event), gpus, "{event:#?}");
    }
}

#[tokio::test]
async fn the_variable_that_may_have_nccl_refuse_is_named() {
    let mut pods = Pods::here(2);
    pods.set("GPUWARDEN_COLLECTIVE", "nccl")
        .set("BW_THRESHOLD_GBPS", "")
        .set("NCCL_SOCKET_IFNAME", "nowhere0");
    for pod in &pods.containers {
        let mut scenario = Scenario::healthy(1);
        let refuses = Behaviour::Code(5);
        scenario
            .calls
            .insert("ncclCommInitRank".to_owned(), refuses);
        fakes::write(pod.directory.path(), &scenario).unwrap();
    }
    for ended in pods.run().await {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        assert!(!only(&ended).is_fatal, "{ended:#?}");
        let named = "; NCCL_SOCKET_IFNAME=nowhere0 of pod-";
        assert!(ended.stderr.contains(named), "{ended:#?}");
        assert!(!ended.stderr.contains("fail only together"), "{ended:#?}");
    }
}

#[tokio::test]
async fn a_slow_result_with_a_topology_file_of_ours_is_measured_again_without_it() {
    let mut pods = Pods::here(1);
    let mut scenario = Scenario::healthy(4);
    let users = pods.files.path().join("users.xml");
    fs::write(&users, "<system version=\"1\"></system>").unwrap();
    pods.set("GPUWARDEN_COLLECTIVE", "nccl")
        .set("BW_THRESHOLD_GBPS", "100")
        .set("GPUWARDEN_NCCL_TOPOLOGY", "azure-ndv5.xml");
    let again = "; this without the topology file azure-ndv5.xml, with which 4 devices reduce";
    for (without, with, file, code, is_again) in [
        (480.0, 40.0, "", 0, true),
        (40.0, 480.0, "", 0, false),
        (40.0, 40.0, "", 1, true),
        // The user's file is used unchanged.
        (480.0, 40.0, users.to_str().unwrap(), 1, false),
    ] {
        scenario.nccl.bandwidth_gb_s = without;
        scenario.nccl.bandwidth_with_topology_gb_s = Some(with);
        fakes::write(pods.containers[0].directory.path(), &scenario).unwrap();
        let ended = pods.set("NCCL_TOPO_FILE", file).run().await;
        assert_eq!(ended[0].code, Some(code), "{ended:#?}");
        assert_eq!(ended[0].stderr.contains(again), is_again, "{ended:#?}");
    }
}
