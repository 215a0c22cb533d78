//! The GPUs of a node, with a fake of the driver's library that the product loads in a child
//! process, as it loads the real one.

use contract::pod_resources::{ClaimResource, ContainerResources, DynamicResource};
use serde_json::Value;
use testkit::{ControlPlane, Launch, Product, Version};

use crate::devices::says;
use crate::pods::Pods;
use crate::support::{SOON, Scene, own_port};

/// Returns a scenario with two GPUs, the second with the properties `second`.
fn scenario(second: &str) -> String {
    format!("gpus = 2\n[[gpu]]\nindex = 1\n{second}\n")
}

/// Waits until the state of the node meets `is`.
async fn wait(product: &Product, what: &str, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
    let look = || async {
        let status = product.get("/api/v1/status").await;
        let status = status.map_err(|error| format!("{error:#}"))?;
        let status: Value = serde_json::from_str(&status).map_err(|error| error.to_string())?;
        if is(&status) {
            Ok(status)
        } else {
            Err(status.to_string())
        }
    };
    product.wait_for(what, SOON, look).await
}

fn source(status: &Value) -> &Value {
    named(status, "gpu-health")
}

fn named<'a>(status: &'a Value, source: &str) -> &'a Value {
    let sources = status["sources"].as_array().unwrap();
    let named = sources.iter().find(|one| one["name"] == source);
    named.unwrap_or(&Value::Null)
}

fn faults(status: &Value) -> Vec<&Value> {
    let nodes = status["fleet"]["nodes"].as_array();
    let faults = nodes.into_iter().flatten().map(|node| &node["faults"]);
    faults.filter_map(Value::as_array).flatten().collect()
}

#[tokio::test]
async fn a_fault_that_the_driver_tells_comes_and_goes_with_it() -> anyhow::Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), scenario(""))?;
    let product = Launch::new()?
        .node_name("n1")
        .option("--fake-gpus", file.path())
        .option("--nvml-health-interval", "1")
        .start()
        .await?;
    wait(&product, "two GPUs", |status| {
        let detail = source(status)["detail"].as_str().unwrap_or_default();
        source(status)["state"] == "following" && detail.starts_with("fake: 2 GPUs")
    })
    .await?;
    let measured = || async {
        let metrics = product.get("/metrics").await;
        let metrics = metrics.map_err(|error| error.to_string())?;
        let found = metrics.contains("gpuwarden_gpu_temperature_celsius{gpu=\"1\"");
        found.then_some(()).ok_or(metrics)
    };
    product.wait_for("a temperature", SOON, measured).await?;

    std::fs::write(file.path(), scenario("recovery_action = 2"))?;
    let status = wait(&product, "what the driver asks for", |status| {
        !faults(status).is_empty()
    });
    let status = status.await?;
    let fault = faults(&status)[0].clone();
    assert_eq!(fault["check"], "GpuDriverWatch", "{fault}");
    assert_eq!(fault["recommendedAction"], "RESTART_BM", "{fault}");
    let story = product.client(["explain"]).await?;
    assert!(story.stdout.contains("fake: "), "{}", story.stdout);

    // An XID makes the GPU unready, in `status` and `explain`.
    product
        .client(["inject", "xid", "79", "--gpu", "1", "--via", "nvml"])
        .await?
        .expect(0)?;
    let lost = |status: &Value| status["gpus"][1]["phase"] == "NotReady";
    let status = wait(&product, "the GPU that is not ready", lost).await?;
    assert_eq!(status["gpus"][0]["phase"], "Ready", "{status}");
    let text = product.client(["status"]).await?.stdout;
    assert!(text.contains("GPUs        1 of 2 ready"), "{text}");
    let story = product.client(["explain"]).await?.stdout;
    assert!(story.contains("GPU 1     NotReady"), "{story}");

    std::fs::write(file.path(), scenario(""))?;
    product
        .client(["inject", "recovery", "--gpu", "1"])
        .await?
        .expect(0)?;
    wait(&product, "nothing is asked for", |status| {
        faults(status).is_empty()
    })
    .await?;
    // The operator's recovery closes the fault of the driver's XID.
    let ready = |status: &Value| status["gpus"][1]["phase"] == "Ready";
    wait(&product, "the GPU that is ready again", ready).await?;
    Ok(())
}

#[tokio::test]
async fn a_driver_that_hangs_costs_its_own_process_and_is_named() -> anyhow::Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), "gpus = 2\n")?;
    let product = Launch::new()?
        .node_name("n1")
        .option("--fake-gpus", file.path())
        .option("--nvml-health-interval", "1")
        .option("--nvml-deadline", "2")
        .start()
        .await?;
    wait(&product, "the GPUs", |status| {
        source(status)["state"] == "following"
    })
    .await?;
    for (what, named) in [
        ("hang", "no answer for 2 s from nvmlDeviceGetPowerUsage"),
        ("segfault", "SIGSEGV"),
    ] {
        let calls = format!("gpus = 2\n[calls]\nnvmlDeviceGetPowerUsage = \"{what}\"\n");
        std::fs::write(file.path(), calls)?;
        let status = wait(&product, what, |status| {
            let detail = source(status)["detail"].as_str().unwrap_or_default();
            source(status)["state"] == "failing" && detail.contains(named)
        });
        // Missing data is not a fault.
        assert!(faults(&status.await?).is_empty(), "{what}");
        assert!(product.get("/healthz").await.is_ok(), "{what}");
        std::fs::write(file.path(), "gpus = 2\n")?;
        wait(&product, "the driver answers again", |status| {
            source(status)["state"] == "following"
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_driver_that_hangs_at_its_first_call_is_not_taken_for_none() -> anyhow::Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), "gpus = 2\n[calls]\nnvmlInit_v2 = \"hang\"\n")?;
    let product = Launch::new()?
        .node_name("n1")
        .option("--fake-gpus", file.path())
        .option("--nvml-health-interval", "1")
        .option("--nvml-deadline", "2")
        .start()
        .await?;
    let status = wait(&product, "the call that hangs", |status| {
        let detail = source(status)["detail"].as_str().unwrap_or_default();
        source(status)["state"] == "failing"
            && detail.contains("no answer for 2 s from nvmlInit_v2")
    });
    assert!(faults(&status.await?).is_empty());
    std::fs::write(file.path(), "gpus = 2\n")?;
    wait(&product, "the driver that answers", |status| {
        source(status)["state"] == "following"
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn dcgm_is_a_second_source_whose_end_is_no_fault_and_mends_none() -> anyhow::Result<()> {
    let incident = "gpus = 2\n[[dcgm.incident]]\ngpu = 1\nwatch = 0x40\ncode = 9\n\
                    message = \"the InfoROM of GPU 1 is corrupt\"\n";
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), incident)?;
    let product = Launch::new()?
        .node_name("n1")
        .option("--fake-gpus", file.path())
        .option("--dcgm-addr", "localhost")
        .option("--nvml-health-interval", "1")
        .option("--nvml-deadline", "2")
        .start()
        .await?;
    let sees = |status: &Value| {
        let (dcgm, nvml) = (named(status, "gpu-dcgm"), source(status));
        dcgm["detail"] == "fake: 2 GPUs, DCGM 4.6.0, incidents: 1"
            && dcgm["state"] == "following"
            && nvml["state"] == "following"
            && faults(status).len() == 1
    };
    let status = wait(&product, "what DCGM finds", sees).await?;
    let fault = faults(&status)[0].clone();
    assert_eq!(fault["check"], "GpuInforomWatch", "{fault}");
    assert_eq!(fault["code"], "DCGM_FR_CORRUPT_INFOROM", "{fault}");
    assert_eq!(fault["recommendedAction"], "COMPONENT_RESET", "{fault}");
    for (what, reason) in [
        ("-21", "no host engine answers at localhost"),
        ("hang", "no answer for 2 s from dcgmConnect_v2"),
        ("segfault", "SIGSEGV"),
    ] {
        let calls =
            format!("gpus = 2\n[calls]\ndcgmConnect_v2 = \"{what}\"\ndcgmHealthCheck = \"-21\"\n");
        std::fs::write(file.path(), calls)?;
        let status = wait(&product, what, |status| {
            let dcgm = named(status, "gpu-dcgm");
            let detail = dcgm["detail"].as_str().unwrap_or_default();
            // A child of a busy machine may miss the deadline once.
            let nvml_follows = source(status)["state"] == "following";
            dcgm["state"] == "failing" && detail.contains(reason) && nvml_follows
        });
        let status = status.await?;
        // The missing response is a fault of its own, which is not fatal.
        let of_gpus = faults(&status);
        let of_gpus = of_gpus
            .iter()
            .filter(|one| one["check"] != "GpuDcgmConnectivityFailure");
        assert_eq!(of_gpus.count(), 1, "{what}");
        std::fs::write(file.path(), incident)?;
        wait(&product, "DCGM answers again", sees).await?;
    }
    Ok(())
}

/// The kubelet is polled every 30 s.
#[tokio::test]
async fn imex_is_judged_while_a_pod_of_the_node_holds_a_channel() -> anyhow::Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let incident = "gpus = 2\n[[dcgm.incident]]\nmachine = true\nwatch = 0x2000\ncode = 122\n\
                    message = \"IMEX daemon status is -3 (not READY)\"\n";
    std::fs::write(file.path(), incident)?;
    let directory = tempfile::tempdir()?;
    let (pods, socket) = (Pods::default(), directory.path().join("kubelet.sock"));
    pods.serve(&socket)?;
    let product = Launch::new()?
        .node_name("n1")
        .option("--fake-gpus", file.path())
        .option("--dcgm-addr", "localhost")
        .option("--nvml-health-interval", "1")
        .option("--pod-resources", &socket)
        .start()
        .await?;
    let sees = |status: &Value| {
        let dcgm = named(status, "gpu-dcgm");
        let detail = dcgm["detail"].as_str().unwrap_or_default();
        let looks = dcgm["records"].as_u64().unwrap_or_default();
        detail.ends_with("incidents: 1") && looks >= 3 && pods.asked() > 0
    };
    let status = wait(&product, "what DCGM finds", sees).await?;
    assert_eq!(faults(&status), [&Value::Null; 0]);

    let channel = ClaimResource {
        driver_name: "compute-domain.nvidia.com".to_owned(),
        pool_name: "n1".to_owned(),
        device_name: "channel-0".to_owned(),
    };
    let claim = DynamicResource {
        claim_resources: vec![channel],
        ..DynamicResource::default()
    };
    let container = ContainerResources {
        dynamic_resources: vec![claim],
        ..ContainerResources::default()
    };
    pods.are([("job".to_owned(), container)]);
    let judged = |status: &Value| faults(status).len() == 1;
    let status = wait(&product, "the fault of IMEX", judged).await?;
    let fault = faults(&status)[0];
    assert_eq!(fault["check"], "GpuImexWatch", "{fault}");
    assert_eq!(fault["code"], "DCGM_FR_IMEX_UNHEALTHY", "{fault}");

    pods.are([]);
    wait(&product, "its end", |status| faults(status).is_empty()).await?;
    let events: Value = serde_json::from_str(&product.get("/api/v1/events").await?)?;
    let of_imex = events.as_array().into_iter().flatten();
    let of_imex = of_imex.filter(|one| one["event"]["checkName"] == "GpuImexWatch");
    let healthy: Vec<_> = of_imex.map(|one| &one["event"]["isHealthy"]).collect();
    assert_eq!(healthy, [true, false], "newest first: {events}");
    Ok(())
}

#[tokio::test]
async fn an_agent_tells_its_controller_of_its_gpus_by_grpc() -> anyhow::Result<()> {
    let port = own_port()?;
    let address = port.local_addr()?.to_string();
    let controller = Launch::controller()?
        .option("--leader-elect", "false")
        .option("--grpc-insecure", "true")
        .option("--grpc-listen", &address)
        .start()
        .await?;
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), scenario("recovery_action = 2"))?;
    let _agent = Launch::agent()?
        .node_name("n1")
        .option("--controller", format!("http://{address}"))
        .option("--fake-gpus", file.path())
        .start()
        .await?;
    let status = wait(&controller, "what the driver asks for", |status| {
        !faults(status).is_empty()
    });
    let status = status.await?;
    let fault = faults(&status)[0];
    assert_eq!(fault["agent"], "gpu-health-monitor", "{fault}");
    assert_eq!(fault["check"], "GpuDriverWatch", "{fault}");
    Ok(())
}

#[tokio::test]
async fn an_xid_of_the_driver_cordons_and_its_recovery_gives_back() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let fakes = |launch: Launch| {
        launch
            .option("--fake-gpus", "2")
            .option("--nvml-health-interval", "1")
    };
    let scene = Scene::new(&plane, |node| node, fakes).await?;
    wait(&scene.product, "the GPUs", |status| {
        source(status)["state"] == "following"
    })
    .await?;
    let inject = ["inject", "xid", "79", "--gpu", "1", "--via", "nvml"];
    scene.product.client(inject).await?.expect(0)?;
    scene.cordoned().await?;
    scene.faulty().await?;
    let recovery = ["inject", "recovery", "--gpu", "1"];
    scene.product.client(recovery).await?.expect(0)?;
    scene.restored().await?;
    Ok(())
}

/// The fault stays open, because no recovery is reported, but it no longer counts against the
/// GPU.
#[tokio::test]
async fn a_release_of_the_node_gives_a_gpu_with_an_xid_its_readiness_back() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let fakes = |launch: Launch| {
        launch
            .option("--fake-gpus", "2")
            .option("--nvml-health-interval", "1")
    };
    let scene = Scene::new(&plane, |node| node, fakes).await?;
    says(&scene.product, ["True Initialized", "True NoFault"]).await?;
    let inject = ["inject", "xid", "79", "--gpu", "1", "--via", "nvml"];
    scene.product.client(inject).await?.expect(0)?;
    says(&scene.product, ["False XidError", "False SysLogsXIDError"]).await?;
    scene.cordoned().await?;
    let kubeconfig = plane.kubeconfig().display().to_string();
    let release = ["release", &scene.node, "--reason", "GPU 1 was swapped"];
    let args = release.into_iter().chain(["--kubeconfig", &kubeconfig]);
    scene.product.command(args).await?.expect(0)?;
    says(&scene.product, ["True Recovered", "True NoFault"]).await
}
