//! Tests of descriptions of the machine's devices, on the events of the log.

use super::{Bench, MachineGpus, xid};

#[tokio::test]
async fn what_is_known_of_the_gpus_is_read_again_when_it_changes() {
    let mut bench = Bench::new();
    bench.append(&xid(79, 1));
    let running = bench.start();
    bench.stored_at_least(1).await;
    let path = bench.dir.path().join("gpu_metadata.json");
    std::fs::write(&path, "{").unwrap();
    running
        .status(|status| status.detail.contains("gpu_metadata.json is not used"))
        .await;
    std::fs::write(&path, r#"{"chassis_serial": "42"}"#).unwrap();
    running
        .status(|status| !status.detail.contains("not used"))
        .await;
    bench.append(&xid(79, 2));
    bench.stored_at_least(2).await;
    assert_eq!(bench.stored().await[1].metadata["chassis_serial"], "42");
    running.end().await;
}

#[tokio::test]
async fn an_event_of_a_nic_names_its_device() {
    let mut bench = Bench::new();
    let nic = bench.dir.path().join("sys/class/infiniband/mlx5_3");
    std::fs::create_dir_all(&nic).unwrap();
    std::os::unix::fs::symlink("../../../0000:9a:00.0", nic.join("device")).unwrap();
    bench.append("mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged");
    bench.append("mlx5_core 0000:9b:00.0: Port module event: module 0, Cable unplugged");
    let events = bench.run_until(2).await;
    let entities: Vec<&str> = events
        .iter()
        .filter_map(|event| Some(event.entities_impacted.first()?.entity_value.as_str()))
        .collect();
    assert_eq!(entities, ["mlx5_3", "0000:9b:00.0"]);
}

#[tokio::test]
async fn what_is_known_of_the_gpus_stands_on_events_and_a_broken_file_costs_no_event() {
    let mut bench = Bench::new();
    let path = bench.dir.path().join("gpu_metadata.json");
    std::fs::write(&path, "{").unwrap();
    bench.append(&xid(79, 1));
    let running = bench.start();
    bench.stored_at_least(1).await;
    running
        .status(|status| status.detail.contains("gpu_metadata.json is not used"))
        .await;
    running.end().await;
    let gpus = r#"{"driver_version": "570.86.15", "chassis_serial": "42", "gpus": [
        {"gpu_id": 3, "uuid": "GPU-1", "pci_address": "0000:02:00.0", "serial_number": "17"}]}"#;
    std::fs::write(&path, gpus).unwrap();
    bench.append(&xid(79, 2));
    let events = bench.run_until(2).await;
    assert!(!events[0].metadata.contains_key("gpu_uuid"));
    for (key, value) in [
        ("gpu_uuid", "GPU-1"),
        ("gpu_serial", "17"),
        ("gpu_index", "3"),
        ("driver_version", "570.86.15"),
        ("chassis_serial", "42"),
    ] {
        assert_eq!(events[1].metadata.get(key).map(String::as_str), Some(value));
    }
}

#[tokio::test]
async fn what_the_driver_says_of_the_gpus_goes_before_the_file() {
    let mut bench = Bench::new();
    let path = bench.dir.path().join("gpu_metadata.json");
    let gpu = |uuid: &str| {
        format!(r#"{{"gpus": [{{"gpu_id": 3, "uuid": "{uuid}", "pci_address": "0000:02:00.0"}}]}}"#)
    };
    std::fs::write(&path, gpu("GPU-file")).unwrap();
    bench.append(&xid(79, 2));
    let running = bench.start();
    bench.stored_at_least(1).await;
    let machine = MachineGpus::parse(&gpu("GPU-driver")).unwrap();
    bench.machine.send_replace(Some(machine));
    // A broken file does not matter now.
    std::fs::write(&path, "{").unwrap();
    tokio::time::sleep(super::HEARTBEAT * 2).await;
    bench.append(&xid(48, 2));
    bench.stored_at_least(2).await;
    running
        .status(|status| !status.detail.contains("not used"))
        .await;
    running.end().await;
    let events = bench.stored().await;
    assert_eq!(events[0].metadata["gpu_uuid"], "GPU-file");
    assert_eq!(events[1].metadata["gpu_uuid"], "GPU-driver");
    // The next process has the description before it starts.
    bench.append(&xid(95, 2));
    let events = bench.run_until(3).await;
    assert_eq!(events[2].metadata["gpu_uuid"], "GPU-driver");
}
