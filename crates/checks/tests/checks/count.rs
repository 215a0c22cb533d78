//! Tests of counting: each check is counted by its node's connector, once, and waits for no
//! connector that does not count.

use contract::preflight::{CheckResult, ReportCheckRequest};
use contract::proto::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use contract::{HealthEvent, HealthEvents};
use fakes::Scenario;
use gpuwarden_checks::CheckName;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use super::support::Container;

/// Returns a container whose GPUs have this bandwidth, with a small message size.
fn container(gb_s: f64) -> Container {
    let mut scenario = Scenario::healthy(2);
    scenario.nccl.bandwidth_gb_s = gb_s;
    let mut container = Container::new(&scenario);
    container.set("TEST_SIZE_MB", "1");
    container
}

/// Returns the only counted check: its name, node, result and error, and whether it took time.
async fn counted(
    container: &Container,
    check: CheckName,
) -> (String, String, CheckResult, String, bool) {
    let ended = container.run(check).await;
    let counted = container.witness.checks();
    let [one] = &counted[..] else {
        panic!("{counted:#?} {ended:#?}");
    };
    let ReportCheckRequest {
        check, node, error, ..
    } = one.clone();
    assert!(one.gang_wait.is_none() && one.seconds.is_none_or(|seconds| seconds > 0.0));
    (check, node, one.result(), error, one.seconds.is_some())
}

#[tokio::test]
async fn each_end_of_a_check_is_counted_once_with_its_cause() {
    let (loopback, allreduce) = (CheckName::NcclLoopback, CheckName::NcclAllreduce);
    let none = ("BW_THRESHOLD_GBPS", "150");
    for (check, gb_s, (name, value), node, result, error) in [
        (loopback, 400.0, none, "gpu-7", CheckResult::Passed, ""),
        (
            loopback,
            1.0,
            none,
            "gpu-7",
            CheckResult::Failed,
            "NCCL_BW_DEGRADED",
        ),
        (allreduce, 1.0, none, "gpu-7", CheckResult::NotTested, ""),
        (
            loopback,
            1.0,
            ("PROCESSING_STRATEGY", "STORE_ONLY"),
            "gpu-7",
            CheckResult::Failed,
            "NCCL_BW_DEGRADED",
        ),
        (
            loopback,
            1.0,
            ("TEST_SIZE_MB", "0"),
            "gpu-7",
            CheckResult::ConfigError,
            "TEST_SIZE_MB",
        ),
        (
            loopback,
            1.0,
            ("PROCESSING_STRATEGY", "ACT"),
            "gpu-7",
            CheckResult::ConfigError,
            "PROCESSING_STRATEGY",
        ),
        (
            loopback,
            1.0,
            ("NODE_NAME", ""),
            "",
            CheckResult::ConfigError,
            "NODE_NAME",
        ),
        (
            loopback,
            1.0,
            ("GPUWARDEN_NCCL_LIBRARY", "/nowhere/libnccl.so.2"),
            "gpu-7",
            CheckResult::ConfigError,
            "CONFIGURATION",
        ),
    ] {
        let mut container = container(gb_s);
        container.set(name, value);
        let was_checked = matches!(result, CheckResult::Passed | CheckResult::Failed);
        let expected = (
            check.name().to_owned(),
            node.to_owned(),
            result,
            error.to_owned(),
            was_checked,
        );
        assert_eq!(counted(&container, check).await, expected, "{name}={value}");
    }
}

/// Connector of NVSentinel, which accepts events and counts no checks.
struct Other(mpsc::UnboundedSender<HealthEvent>);

#[tonic::async_trait]
impl PlatformConnector for Other {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        for event in request.into_inner().events {
            self.0.send(event).unwrap();
        }
        Ok(Response::new(()))
    }
}

#[tokio::test]
async fn nothing_is_said_of_a_connector_that_counts_no_checks() {
    let mut container = container(400.0);
    let socket = container.file("other.sock");
    let listener = runtime::unix_grpc::bind(&socket, 0o666).unwrap();
    let (sender, mut events) = mpsc::unbounded_channel();
    let served = tonic::transport::Server::builder()
        .add_service(PlatformConnectorServer::new(Other(sender)))
        .serve_with_incoming(runtime::unix_grpc::incoming(listener));
    let serving = tokio::spawn(served);
    container.set("PLATFORM_CONNECTOR_SOCKET", socket.to_str().unwrap());
    // Nor does this connector remember passes.
    container.set("GPUWARDEN_RESULT_CACHE_SECONDS", "1m");
    let output = container
        .command(CheckName::NcclLoopback)
        .output()
        .await
        .unwrap();
    serving.abort();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(events.recv().await.unwrap().is_healthy);
    assert!(
        stderr.contains("nccl-loopback: passed") && !stderr.contains("count"),
        "{stderr}"
    );
}

#[tokio::test]
async fn a_connector_that_hangs_is_said_and_changes_no_exit_code() {
    let mut container = container(400.0);
    let socket = container.file("hangs.sock");
    // Connections to this socket are never accepted.
    let _listener = runtime::unix_grpc::bind(&socket, 0o666).unwrap();
    container.set("PLATFORM_CONNECTOR_SOCKET", socket.to_str().unwrap());
    // Without a gang there are no events.
    let output = container
        .command(CheckName::NcclAllreduce)
        .output()
        .await
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(
        stderr.contains("the connector does not count this check: no answer within 2s"),
        "{stderr}"
    );
}

#[tokio::test]
async fn a_check_that_has_passed_lately_for_the_same_gpus_is_left_out() {
    let mut container = container(400.0);
    container.set("GPUWARDEN_RESULT_CACHE_SECONDS", "1m");
    let loopback = CheckName::NcclLoopback;
    let ended = container.run(loopback).await;
    assert_eq!((ended.code, ended.events.len()), (0, 1), "{ended:#?}");
    let uuid = |index| format!("GPU-fa4e0000-0000-4000-8000-{index:012x}");
    assert_eq!(container.witness.checks()[0].gpu_uuids, [uuid(0), uuid(1)]);

    // The witness answers that the pass was 7 s ago.
    let ended = container.run(loopback).await;
    assert_eq!((ended.code, ended.events.len()), (0, 0), "{ended:#?}");
    assert!(
        ended.out.starts_with(
            "nccl-loopback: not tested: the check has passed 7 s ago on this node with the same GPUs"
        ),
        "{}",
        ended.out
    );
    let last = container.witness.checks().pop().unwrap();
    assert_eq!(last.result(), CheckResult::NotTested);
    assert_eq!(last.gpu_uuids, [""; 0]);

    let tests = async |container: &Container| container.run(loopback).await.events.len() == 1;
    container.set("GPUWARDEN_RESULT_CACHE_SECONDS", "6");
    assert!(tests(&container).await, "a pass that is too old");
    container.set("GPUWARDEN_RESULT_CACHE_SECONDS", "");
    assert!(tests(&container).await, "switched off");
    let last = container.witness.checks().pop().unwrap();
    assert_eq!(last.gpu_uuids, [""; 0], "a pass that nobody asks for");
    container.set("GPUWARDEN_RESULT_CACHE_SECONDS", "1m");
    fakes::write(container.directory.path(), &Scenario::healthy(3)).unwrap();
    assert!(tests(&container).await, "other GPUs");
    let mut blind = Scenario::healthy(2);
    let fails = fakes::Behaviour::Code(999);
    blind.calls.insert("nvmlInit_v2".to_owned(), fails);
    fakes::write(container.directory.path(), &blind).unwrap();
    assert!(tests(&container).await, "GPUs that nobody can name");
}

/// Gangs have to test together, and a connector may be unreachable.
#[tokio::test]
async fn in_doubt_a_check_runs() {
    let mut container = container(400.0);
    container.set("GPUWARDEN_RESULT_CACHE_SECONDS", "1m");
    for _ in 0..2 {
        let ended = container.run(CheckName::NcclAllreduce).await;
        assert!(
            ended.out.contains("this pod is in no gang"),
            "{}",
            ended.out
        );
    }
    container.set("GPUWARDEN_RESULT_CACHE_SECONDS", "soon");
    let ended = container.run(CheckName::NcclLoopback).await;
    assert_eq!(ended.code, 2, "{ended:#?}");
    assert!(
        ended
            .out
            .contains("GPUWARDEN_RESULT_CACHE_SECONDS is \"soon\"; it must be a time"),
        "{}",
        ended.out
    );
    container.set("GPUWARDEN_RESULT_CACHE_SECONDS", "1m");
    container.set("PLATFORM_CONNECTOR_SOCKET", "/nowhere/connector.sock");
    let ended = container.run(CheckName::NcclLoopback).await;
    assert!(ended.out.contains("passed: 2 GPUs"), "{}", ended.out);
}
