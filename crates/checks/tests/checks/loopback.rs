//! Tests of `nccl-loopback`, and of everything that all checks share.

use std::process::Output;
use std::time::Duration;

use contract::{ProcessingStrategy, RecommendedAction};
use fakes::{Behaviour, Scenario};
use gpuwarden_checks::CheckName;
use rustix::process::{Pid, Signal, kill_process};

use super::support::{Container, wait_for};

const LOOPBACK: CheckName = CheckName::NcclLoopback;

/// Returns a container with a small message size, so that a test is fast.
fn container(scenario: &Scenario) -> Container {
    let mut container = Container::new(scenario);
    container.set("TEST_SIZE_MB", "1");
    container
}

fn with_bandwidth(gpus: u32, gb_s: f64) -> Scenario {
    let mut scenario = Scenario::healthy(gpus);
    scenario.nccl.bandwidth_gb_s = gb_s;
    scenario
}

#[tokio::test]
async fn gpus_that_are_fast_enough_pass_and_say_so() {
    let ended = container(&with_bandwidth(8, 400.0)).run(LOOPBACK).await;
    assert_eq!(ended.code, 0, "{ended:#?}");
    let event = ended.event();
    assert!(
        event.is_healthy && !event.is_fatal && event.error_code.is_empty(),
        "{event:#?}"
    );
    assert_eq!(
        (
            event.agent.as_str(),
            event.component_class.as_str(),
            event.check_name.as_str()
        ),
        ("preflight-nccl-loopback", "Node", "NCCLLoopbackTest")
    );
    assert_eq!((event.version, event.node_name.as_str()), (1, "gpu-7"));
    assert_eq!(
        event.processing_strategy,
        ProcessingStrategy::ExecuteRemediation as i32
    );
    assert!(event.generated_timestamp.is_some());
    // A pass concerns these GPUs, and closes no finding about others.
    assert_eq!(event.entities_impacted.len(), 8);
    let is_gpu = |one: &contract::Entity| one.entity_type == "GPU_UUID";
    assert!(event.entities_impacted.iter().all(is_gpu), "{event:#?}");
    model::event::validate(event).unwrap();
    assert!(
        ended.out.starts_with(
            "nccl-loopback: passed: 8 GPUs (NVIDIA H100 80GB HBM3) reduce 1048576 bytes"
        ),
        "{}",
        ended.out
    );
    assert_eq!(ended.out.lines().count(), 1, "{}", ended.out);
    let gb_s: f64 = event.metadata["bandwidth_gb_s"].parse().unwrap();
    assert!((399.0..=401.0).contains(&gb_s), "{gb_s}");
    // Columns of nccl-tests: algbw from 1 MiB and the time in microseconds, and 14/8 of it as
    // busbw.
    let number = |name: &str| event.metadata[name].parse::<f64>().unwrap();
    assert_eq!(
        (number("message_bytes"), number("count")),
        (1_048_576.0, 262_144.0)
    );
    assert_eq!(
        (&*event.metadata["type"], &*event.metadata["redop"]),
        ("float", "sum")
    );
    let algbw = 1_048.576 / number("time_us");
    assert!((number("algbw_gb_s") - algbw).abs() < 1.0, "{event:#?}");
    assert!(
        (number("algbw_gb_s") * 14.0 / 8.0 - gb_s).abs() < 1.0,
        "{event:#?}"
    );
    assert!(
        ended.termination.starts_with("PASSED: 8 GPUs"),
        "{}",
        ended.termination
    );
}

#[tokio::test]
async fn a_bus_bandwidth_below_the_threshold_fails_the_node() {
    let mut container = container(&with_bandwidth(8, 100.0));
    let ended = container.run(LOOPBACK).await;
    assert_eq!(ended.code, 1, "{ended:#?}");
    let event = ended.event();
    assert!(event.is_fatal && !event.is_healthy);
    assert_eq!(event.error_code, ["NCCL_BW_DEGRADED"]);
    assert_eq!(
        event.recommended_action,
        RecommendedAction::ContactSupport as i32
    );
    assert!(
        ended.termination.starts_with("NCCL_BW_DEGRADED: 8 GPUs"),
        "{}",
        ended.termination
    );
    assert!(
        ended
            .out
            .contains("below the 150 GB/s that are required (the default)"),
        "{}",
        ended.out
    );
    // Other ways to set the threshold.
    let ended = container.set("BW_THRESHOLD_GBPS", "50").run(LOOPBACK).await;
    assert_eq!(ended.code, 0, "{ended:#?}");
    let ended = container
        .set("GPUWARDEN_BW_PERCENT", "80")
        .run(LOOPBACK)
        .await;
    assert_eq!(ended.code, 1, "{ended:#?}");
    assert!(
        ended
            .out
            .contains("80 % of the 460 GB/s that H100 does over nvlink"),
        "{}",
        ended.out
    );
    let ended = container
        .set("SKIP_BANDWIDTH_CHECK", "true")
        .run(LOOPBACK)
        .await;
    assert_eq!(ended.code, 0, "{ended:#?}");
}

#[tokio::test]
async fn of_several_sizes_the_largest_is_judged() {
    let mut container = container(&with_bandwidth(2, 400.0));
    let ended = container
        .set("MESSAGE_SIZES", "8,16,4K,1M,2M")
        .run(LOOPBACK)
        .await;
    assert_eq!(ended.code, 0, "{ended:#?}");
    assert!(ended.out.contains("reduce 2097152 bytes"), "{}", ended.out);
}

/// The reference implementation fails every pod with one GPU, since it has no bus bandwidth.
#[tokio::test]
async fn one_gpu_passes_by_its_memory_whatever_the_threshold() {
    let mut container = container(&with_bandwidth(1, 1.0));
    let ended = container
        .set("BW_THRESHOLD_GBPS", "100000")
        .run(LOOPBACK)
        .await;
    assert_eq!(ended.code, 0, "{ended:#?}");
    assert!(ended.event().is_healthy);
    assert!(
        ended
            .out
            .contains("keeps what is written to it; its memory copies 1048576 bytes with 2"),
        "{}",
        ended.out
    );
}

#[tokio::test]
async fn a_wrong_bit_fails_the_gpu_that_has_it() {
    for gpus in [1, 4] {
        let mut scenario = with_bandwidth(gpus, 400.0);
        scenario.gpu_mut(gpus - 1).corrupts = true;
        let ended = container(&scenario).run(LOOPBACK).await;
        assert_eq!(ended.code, 1, "{ended:#?}");
        let event = ended.event();
        assert!(event.is_fatal, "{event:#?}");
        assert_eq!(event.error_code, ["NCCL_TEST_ERROR"]);
        assert_eq!(
            event.recommended_action,
            RecommendedAction::ContactSupport as i32
        );
        assert_eq!(event.metadata["nccl_error"], "WRONG_RESULT");
        assert_eq!(event.entities_impacted.len(), 1, "{event:#?}");
        assert_eq!(event.entities_impacted[0].entity_type, "GPU_UUID");
        assert!(
            event
                .message
                .contains("has worked out wrong numbers: the first of 1 of 262144 at 0"),
            "{event:#?}"
        );
    }
}

#[tokio::test]
async fn an_error_of_nccl_is_judged_by_the_adrs_table() {
    for (call, code, error, action, fatal) in [
        (
            "ncclAllReduce",
            3,
            "NCCL_INTERNAL_ERROR",
            RecommendedAction::RunDcgmeud,
            true,
        ),
        (
            "ncclCommInitRank",
            2,
            "NCCL_SYSTEM_ERROR",
            RecommendedAction::ContactSupport,
            true,
        ),
        (
            "ncclCommInitRank",
            5,
            "NCCL_INVALID_USAGE",
            RecommendedAction::None,
            false,
        ),
        (
            "cudaMalloc",
            2,
            "CONTAINER_LACKS_RESOURCES",
            RecommendedAction::None,
            false,
        ),
        (
            "cudaMalloc",
            214,
            "CUDA_ERROR",
            RecommendedAction::ContactSupport,
            true,
        ),
        (
            "cudaGetDeviceCount",
            100,
            "NO_GPU",
            RecommendedAction::None,
            false,
        ),
    ] {
        let mut scenario = with_bandwidth(2, 400.0);
        scenario
            .calls
            .insert(call.to_owned(), Behaviour::Code(code));
        let ended = container(&scenario).run(LOOPBACK).await;
        let event = ended.event();
        // A lack in the container stops no pod.
        let stops = !["CONTAINER_LACKS_RESOURCES", "NO_GPU"].contains(&error);
        assert_eq!(ended.code, u8::from(stops), "{ended:#?}");
        assert_eq!(event.error_code, ["NCCL_TEST_ERROR"]);
        assert_eq!(event.metadata["nccl_error"], error, "{event:#?}");
        assert_eq!(
            (event.recommended_action, event.is_fatal),
            (action as i32, fatal),
            "{call}"
        );
        assert!(event.message.contains(call), "{event:#?}");
    }
}

#[tokio::test]
async fn the_variable_that_may_have_nccl_refuse_is_named_while_it_counts() {
    let mut scenario = with_bandwidth(2, 400.0);
    let refuses = Behaviour::Code(5);
    scenario
        .calls
        .insert("ncclCommInitRank".to_owned(), refuses);
    // The second test leaves out the user's variables.
    for inherited in ["", "NCCL_ALGO"] {
        let mut container = container(&scenario);
        container.set("NCCL_ALGO", "Star");
        container.set("GPUWARDEN_INHERITED_ENV", inherited);
        let ended = container.run(LOOPBACK).await;
        assert_eq!(ended.code, 1, "{ended:#?}");
        let message = &ended.event().message;
        let named = "NCCL_ALGO=Star of this pod may be why";
        assert_eq!(message.matches(named).count(), 1, "{message}");
    }
}

#[tokio::test]
async fn an_error_in_the_background_ends_the_check_at_once() {
    let mut scenario = with_bandwidth(2, 0.0);
    scenario.nccl.async_error = 6;
    let ended = container(&scenario).run(LOOPBACK).await;
    assert_eq!(
        ended.event().metadata["nccl_error"],
        "NCCL_REMOTE_ERROR",
        "{ended:#?}"
    );
}

#[tokio::test]
async fn a_call_that_hangs_ends_the_check_at_its_deadline_without_blame() {
    let mut hanging = with_bandwidth(2, 400.0);
    hanging
        .calls
        .insert("ncclCommInitRank".to_owned(), Behaviour::Hang);
    let stuck = with_bandwidth(2, 0.0);
    for (scenario, doing) in [(hanging, "in ncclCommInitRank of device 0"), (stuck, "in ")] {
        let mut container = container(&scenario);
        let ended = container
            .set("CHECK_TIMEOUT_SECONDS", "4")
            .run(LOOPBACK)
            .await;
        let event = ended.event();
        assert_eq!(ended.code, 1, "{ended:#?}");
        assert!(!event.is_fatal && !event.is_healthy, "{event:#?}");
        assert_eq!(event.recommended_action, RecommendedAction::None as i32);
        assert_eq!(event.metadata["nccl_error"], "NCCL_TIMEOUT");
        assert!(
            event.message.contains("no result after ") && event.message.contains(doing),
            "{event:#?}"
        );
    }
}

#[tokio::test]
async fn a_crash_in_a_library_costs_the_check_its_result_and_nobody_is_blamed() {
    let mut scenario = with_bandwidth(2, 400.0);
    scenario
        .calls
        .insert("ncclCommInitRank".to_owned(), Behaviour::Segfault);
    let ended = container(&scenario).run(LOOPBACK).await;
    assert_eq!(ended.code, 1);
    assert!(!ended.event().is_fatal);
    let text = &ended.event().message;
    assert!(
        text.contains("SIGSEGV") && text.contains("in ncclCommInitRank"),
        "{text}"
    );
}

#[tokio::test]
async fn a_bad_setting_is_a_configuration_error_that_names_it() {
    for (name, value, text) in [
        (
            "BW_THRESHOLD_GBPS",
            "fast",
            "BW_THRESHOLD_GBPS is \"fast\"; it must be a number",
        ),
        (
            "TEST_SIZE_MB",
            "0",
            "TEST_SIZE_MB is \"0\"; it must be a whole number from 1 to",
        ),
        (
            "SKIP_BANDWIDTH_CHECK",
            "maybe",
            "SKIP_BANDWIDTH_CHECK is \"maybe\"; it must be true or false",
        ),
        (
            "PROCESSING_STRATEGY",
            "ACT",
            "PROCESSING_STRATEGY is \"ACT\"; it must be EXECUTE_REMEDIATION or STORE_ONLY",
        ),
        ("NODE_NAME", "", "NODE_NAME is not set; it must be"),
        (
            "PLATFORM_CONNECTOR_SOCKET",
            "tcp",
            "PLATFORM_CONNECTOR_SOCKET is \"tcp\"; it must be the path",
        ),
        (
            "CHECK_TIMEOUT_SECONDS",
            "-1",
            "CHECK_TIMEOUT_SECONDS is \"-1\"; it must be a time",
        ),
        (
            "GPUWARDEN_NCCL_LIBRARY",
            "/nowhere/libnccl.so.2",
            "/nowhere/libnccl.so.2: not there",
        ),
    ] {
        let mut container = container(&with_bandwidth(2, 400.0));
        let ended = container.set(name, value).run(LOOPBACK).await;
        assert_eq!(ended.code, 2, "{ended:#?}");
        assert!(
            ended.out.starts_with("nccl-loopback: misconfigured: ") && ended.out.contains(text),
            "{}",
            ended.out
        );
        assert!(
            ended.termination.starts_with("CONFIGURATION: "),
            "{}",
            ended.termination
        );
        // A check without its node's name or a destination reports nothing.
        let unknown = [
            "PROCESSING_STRATEGY",
            "NODE_NAME",
            "PLATFORM_CONNECTOR_SOCKET",
        ];
        if unknown.contains(&name) {
            assert_eq!(ended.events, []);
            continue;
        }
        let event = ended.event();
        assert_eq!(event.check_name, "NCCLLoopbackTest");
        assert_eq!(event.error_code, ["CONFIGURATION"]);
        assert!(!event.is_fatal && !event.is_healthy, "{event:#?}");
        assert_eq!(event.recommended_action, RecommendedAction::None as i32);
    }
}

#[tokio::test]
async fn store_only_is_reported_and_never_stops_a_pod() {
    let mut container = container(&with_bandwidth(8, 1.0));
    let ended = container
        .set("PROCESSING_STRATEGY", "STORE_ONLY")
        .run(LOOPBACK)
        .await;
    assert_eq!(ended.code, 0, "{ended:#?}");
    let event = ended.event();
    assert_eq!(
        event.processing_strategy,
        ProcessingStrategy::StoreOnly as i32
    );
    assert!(
        event.is_fatal && ended.out.starts_with("nccl-loopback: failed: "),
        "{ended:#?}"
    );
    let ended = container
        .set("BW_THRESHOLD_GBPS", "fast")
        .run(LOOPBACK)
        .await;
    assert_eq!(ended.code, 0, "{ended:#?}");
}

/// Names of the shared settings in the ADR.
#[tokio::test]
async fn the_adrs_names_of_settings_are_taken() {
    let mut container = container(&with_bandwidth(2, 0.0));
    let ended = container.set("CHECK_TIMEOUT", "2s").run(LOOPBACK).await;
    assert!(
        ended.event().message.contains("no result after"),
        "{ended:#?}"
    );
}

#[tokio::test]
async fn a_connector_that_is_away_never_turns_a_pass_into_a_failure() {
    let mut container = container(&with_bandwidth(2, 400.0));
    container.set("PLATFORM_CONNECTOR_SOCKET", "/nowhere/connector.sock");
    let output = container.command(LOOPBACK).output().await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("nccl-loopback: passed: 2 GPUs"), "{stderr}");
    assert!(
        stderr.contains("no connector listens on /nowhere/connector.sock"),
        "{stderr}"
    );
}

#[tokio::test]
async fn a_signal_ends_it_in_order_with_its_own_exit_code() {
    let mut container = container(&with_bandwidth(2, 0.0));
    container.set("CHECK_TIMEOUT_SECONDS", "120");
    let child = container
        .command(LOOPBACK)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
    let log = container.file("termination-log");
    // The signal arrives before and during a call to a library that hangs.
    wait_for(|| workers_of(pid) > 0).await;
    kill_process(pid, Signal::TERM).unwrap();
    let output = tokio::time::timeout(Duration::from_secs(60), child.wait_with_output());
    let output = output.await.unwrap().unwrap();
    assert_eq!(
        output.status.code(),
        Some(143),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = std::fs::read_to_string(log).unwrap();
    assert!(
        text.starts_with("SIGNAL: SIGTERM ended the check"),
        "{text}"
    );
    assert_eq!(container.witness.events(), []);
    wait_for(|| workers_of(pid) == 0).await;
}

/// Returns the number of processes that a check has started.
fn workers_of(check: Pid) -> usize {
    let parent = check.as_raw_nonzero().to_string();
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let stats = all.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    // After the name, which may contain anything: state and parent.
    stats
        .filter(|stat| {
            let behind = stat
                .rsplit_once(')')
                .map(|(_, behind)| behind)
                .unwrap_or_default();
            behind.split_whitespace().nth(1) == Some(parent.as_str())
        })
        .count()
}

/// Runs a check as a process with the variables of a pod, marking some as the user's.
async fn with_users(container: &mut Container, variables: &[(&str, &str)], users: &str) -> Output {
    for (name, value) in variables {
        container.set(name, value);
    }
    container.set("GPUWARDEN_INHERITED_ENV", users);
    container.command(LOOPBACK).output().await.unwrap()
}

#[tokio::test]
async fn a_pod_that_slows_nccl_down_itself_blames_no_node_and_starts() {
    let mut scenario = with_bandwidth(8, 400.0);
    let slowed = [("NCCL_P2P_DISABLE".to_owned(), 20.0)];
    scenario.nccl.slowed_by.extend(slowed);
    let mut slow = container(&scenario);
    let users = [("NCCL_P2P_DISABLE", "1"), ("NCCL_DEBUG", "WARN")];
    let ended = with_users(&mut slow, &users, "NCCL_DEBUG,NCCL_P2P_DISABLE").await;
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let event = slow.witness.events().pop().unwrap();
    assert!(event.is_healthy && !event.is_fatal, "{event:#?}");
    for text in [
        "at least 150 GB/s is required (the default); measured without the pod's NCCL_DEBUG, \
         NCCL_P2P_DISABLE, with which 8 GPUs",
        "below the 150 GB/s",
    ] {
        assert!(event.message.contains(text), "{text}: {event:#?}");
    }

    // Variables set by the check's configuration do not count as the user's.
    let ended = with_users(&mut slow, &users, "NCCL_DEBUG").await;
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let event = slow.witness.events().pop().unwrap();
    assert!(event.is_fatal, "{event:#?}");
    assert!(
        event
            .message
            .ends_with("; measured without the pod's NCCL_DEBUG, too"),
        "{event:#?}"
    );
}

#[tokio::test]
async fn a_wrong_sum_is_a_fault_with_any_variables() {
    let mut scenario = with_bandwidth(2, 400.0);
    scenario.gpu_mut(1).corrupts = true;
    let mut wrong = container(&scenario);
    let ended = with_users(&mut wrong, &[("NCCL_ALGO", "Tree")], "NCCL_ALGO").await;
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let event = wrong.witness.events().pop().unwrap();
    assert!(
        event.is_fatal && !event.message.contains("NCCL_ALGO"),
        "{event:#?}"
    );
}
