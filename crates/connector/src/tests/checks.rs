//! Tests of preflight checks that are counted over the socket.

use contract::preflight::preflight_service_client::PreflightServiceClient;
use contract::preflight::{CheckResult, FindPassRequest, GangWait, ReportCheckRequest};

use super::*;

async fn client(served: &Served) -> PreflightServiceClient<Channel> {
    let address = format!("unix://{}", served.socket().display());
    let endpoint = Endpoint::try_from(address).unwrap();
    PreflightServiceClient::new(endpoint.connect().await.unwrap())
}

fn failed() -> ReportCheckRequest {
    ReportCheckRequest {
        node: "n1".into(),
        check: "dcgm-diag".into(),
        result: CheckResult::Failed as i32,
        error: "DCGM_FR_MEMORY".into(),
        seconds: Some(20.0),
        gang_wait: None,
        gpu_uuids: Vec::new(),
    }
}

#[tokio::test]
async fn a_check_is_counted_for_the_connectors_own_node_and_for_others_only_where_allowed() {
    let unnamed = || ReportCheckRequest {
        node: String::new(),
        ..failed()
    };
    let other = || ReportCheckRequest {
        node: "n2".into(),
        ..failed()
    };
    let series = |node: &str, count| {
        format!(
            "preflight_check_failures_total{{check=\"dcgm-diag\",node=\"{node}\",\
             error_code=\"DCGM_FR_MEMORY\"}} {count}\n"
        )
    };
    let served = Served::new();
    let mut own = client(&served).await;
    own.report_check(failed()).await.unwrap();
    own.report_check(unnamed()).await.unwrap();
    let refused = own.report_check(other()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    let text = served.metrics.encode();
    assert!(
        text.contains(&series("n1", 2)) && !text.contains("n2"),
        "{text}"
    );

    let served = Served::taking(AcceptNodes::Any);
    let mut any = client(&served).await;
    any.report_check(other()).await.unwrap();
    let text = served.metrics.encode();
    assert!(text.contains(&series("n2", 1)), "{text}");
}

#[tokio::test]
async fn what_cannot_be_counted_is_refused_by_name() {
    let served = Served::new();
    let mut client = client(&served).await;
    let wait = |seconds| ReportCheckRequest {
        gang_wait: Some(GangWait {
            gang_id: "g".into(),
            seconds,
        }),
        ..failed()
    };
    let took = |seconds| ReportCheckRequest {
        seconds: Some(seconds),
        ..failed()
    };
    let nameless = ReportCheckRequest {
        check: String::new(),
        ..failed()
    };
    let endless = ReportCheckRequest {
        result: 0,
        ..failed()
    };
    for (request, text) in [
        (nameless, "check is empty"),
        (endless, "result is not set"),
        (took(-1.0), "seconds must"),
        (took(f64::NAN), "seconds must"),
        (wait(f64::INFINITY), "gang_wait.seconds must"),
    ] {
        let refused = client.report_check(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().starts_with(text), "{refused}");
    }
    let large = ReportCheckRequest {
        error: "x".repeat(20_000),
        ..failed()
    };
    let refused = client.report_check(large).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    let text = served.metrics.encode();
    assert!(!text.contains("preflight_check_total{"), "{text}");
}

#[tokio::test]
async fn a_pass_is_known_until_a_fault_comes_in() {
    let served = Served::new();
    let mut client = client(&served).await;
    let gpus = vec!["GPU-a".to_owned()];
    let asked = FindPassRequest {
        node: String::new(),
        check: "dcgm-diag".into(),
        gpu_uuids: gpus.clone(),
    };
    let report = |result: CheckResult, node: &str| ReportCheckRequest {
        node: node.into(),
        result: result as i32,
        gpu_uuids: gpus.clone(),
        ..failed()
    };
    let mut age = async |asked: &FindPassRequest| {
        let found = client.find_pass(asked.clone()).await;
        found.map(|found| found.into_inner().age_seconds)
    };
    assert_eq!(age(&asked).await.unwrap(), None);
    let mut reporter = self::client(&served).await;
    reporter
        .report_check(report(CheckResult::Failed, "n1"))
        .await
        .unwrap();
    reporter
        .report_check(report(CheckResult::Passed, "n2"))
        .await
        .unwrap_err();
    assert_eq!(age(&asked).await.unwrap(), None);
    reporter
        .report_check(report(CheckResult::Passed, "n1"))
        .await
        .unwrap();
    let known = age(&asked).await.unwrap();
    assert!(
        known.is_some_and(|age| (0.0..60.0).contains(&age)),
        "{known:?}"
    );
    let foreign = FindPassRequest {
        node: "n2".into(),
        ..asked.clone()
    };
    assert_eq!(
        age(&foreign).await.unwrap_err().code(),
        Code::PermissionDenied
    );

    let mut monitor = served.client().await;
    let well = HealthEvent {
        is_healthy: true,
        ..event("0")
    };
    let well = monitor.health_event_occurred_v1(batch(vec![well]));
    well.await.unwrap();
    assert!(age(&asked).await.unwrap().is_some());
    let fault = monitor.health_event_occurred_v1(batch(vec![event("0")]));
    fault.await.unwrap();
    assert_eq!(age(&asked).await.unwrap(), None);
}
