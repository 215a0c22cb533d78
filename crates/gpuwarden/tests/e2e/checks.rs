//! Preflight checks and the product on one machine: the product's metrics about checks that have
//! ended.

use std::path::Path;

use testkit::{Launch, Product, binary};

const NODE: &str = "gpu-7";

/// Runs the loopback check with a product's connector. Returns its exit code.
async fn check(product: &Product, gpus: &Path, set: (&str, &str)) -> anyhow::Result<Option<i32>> {
    let output = tokio::process::Command::new(binary()?)
        .args(["check", "nccl-loopback"])
        .env("NODE_NAME", NODE)
        .env("PLATFORM_CONNECTOR_SOCKET", product.socket())
        .env("GPUWARDEN_CUDA_LIBRARY", gpus.join(fakes::CUDA_LIBRARY))
        .env("GPUWARDEN_NCCL_LIBRARY", gpus.join(fakes::NCCL_LIBRARY))
        .env("GPUWARDEN_NVML_LIBRARY", gpus.join(fakes::LIBRARY))
        .env("GPUWARDEN_TERMINATION_LOG", gpus.join("termination-log"))
        .env("TEST_SIZE_MB", "1")
        .env(set.0, set.1)
        .kill_on_drop(true)
        .output();
    Ok(output.await?.status.code())
}

#[tokio::test]
async fn metrics_tell_of_checks_that_are_gone() -> anyhow::Result<()> {
    let product = Launch::new()?.node_name(NODE).start().await?;
    let gpus = tempfile::tempdir()?;
    let mut links = fakes::Scenario::healthy(2);
    links.nccl.bandwidth_gb_s = 400.0;
    fakes::install(gpus.path(), &links)?;
    for (threshold, code) in [("150", 0), ("1000", 1), ("1000", 1), ("fast", 2)] {
        let set = ("BW_THRESHOLD_GBPS", threshold);
        assert_eq!(
            check(&product, gpus.path(), set).await?,
            Some(code),
            "{set:?}"
        );
    }
    let text = product.get("/metrics").await?;
    for line in [
        "preflight_check_total{check=\"nccl-loopback\",result=\"passed\"} 1",
        "preflight_check_total{check=\"nccl-loopback\",result=\"failed\"} 2",
        "preflight_check_total{check=\"nccl-loopback\",result=\"config_error\"} 1",
        "preflight_check_duration_seconds_count{check=\"nccl-loopback\"} 3",
        &format!(
            "preflight_check_failures_total{{check=\"nccl-loopback\",node=\"{NODE}\",\
             error_code=\"NCCL_BW_DEGRADED\"}} 2"
        ),
        "preflight_config_errors_total{error=\"BW_THRESHOLD_GBPS\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
    Ok(())
}

/// Runs a check that is skipped if it passed within the last hour. Returns whether the check
/// ran.
async fn tests(product: &Product, gpus: &Path) -> anyhow::Result<bool> {
    let log = gpus.join("termination-log");
    std::fs::write(&log, "")?;
    let set = ("GPUWARDEN_RESULT_CACHE_SECONDS", "3600");
    assert_eq!(check(product, gpus, set).await?, Some(0));
    let told = std::fs::read_to_string(&log)?;
    assert!(told.starts_with("PASSED"), "{told}");
    Ok(!told.starts_with("PASSED_BEFORE: "))
}

#[tokio::test]
async fn a_pass_counts_until_a_fault_is_reported() -> anyhow::Result<()> {
    let mut product = Launch::new()?.node_name(NODE).start().await?;
    let gpus = tempfile::tempdir()?;
    fakes::install(gpus.path(), &fakes::Scenario::healthy(2))?;
    let gpus = gpus.path();
    assert!(tests(&product, gpus).await?, "nothing is known yet");
    assert!(!tests(&product, gpus).await?, "it has passed");
    product.client(["inject", "xid", "48"]).await?.expect(0)?;
    assert!(tests(&product, gpus).await?, "a fault has come in");
    assert!(!tests(&product, gpus).await?, "it has passed again");
    product.restart().await?;
    assert!(tests(&product, gpus).await?, "a new start forgets");
    Ok(())
}
