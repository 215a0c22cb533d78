//! Tests of a reboot that closes faults once, whatever happens to the state files.

use contract::keys;

use super::{Bench, at, boot, xid};

#[tokio::test]
async fn a_reboot_closes_once_and_before_anything_of_the_new_boot() {
    let mut bench = Bench::new();
    bench.append(&at(1, 10, &xid(79, 1)));
    bench.run_until(1).await;
    // The log from before the reboot also has a repeat, and a fault on another GPU.
    bench.append(&at(1, 20, &xid(79, 1)));
    bench.append(&at(1, 30, &xid(79, 2)));
    bench.append(&at(2, 5, &xid(79, 3)));
    bench.boot = boot(2);
    let events = bench.run_until(8).await;
    let told: Vec<(bool, &str, String)> = events[1..]
        .iter()
        .map(|event| {
            let entity = event.entities_impacted.first();
            let pci = entity.map(|entity| entity.entity_value.clone());
            (
                event.is_healthy,
                event.check_name.as_str(),
                pci.unwrap_or_default(),
            )
        })
        .collect();
    let fault = |gpu: u32| (false, keys::CHECK_XID, format!("0000:{gpu:02x}:00"));
    let healthy = |check| (true, check, String::new());
    assert_eq!(
        told,
        [
            fault(2),
            fault(1),
            healthy(keys::CHECK_XID),
            healthy(keys::CHECK_SXID),
            healthy(keys::CHECK_GPU_FALLEN_OFF),
            healthy(keys::CHECK_GPU_INIT),
            healthy(keys::CHECK_NIC_DRIVER),
            fault(3),
        ]
    );
    let nic = &events[7];
    assert_eq!(
        (nic.agent.as_str(), nic.component_class.as_str()),
        (keys::SYSLOG_AGENT, keys::COMPONENT_NIC)
    );
    assert_eq!(nic.metadata[keys::META_BOOT_ID], bench.boot.id.to_string());
    // A restart in the same boot is no reboot.
    assert_eq!(bench.run_until(9).await.len(), 9);
}

/// The machine hangs at an XID 79, and is power-cycled: a file that was renamed and not
/// synchronised is empty.
#[tokio::test]
async fn a_power_cycle_that_empties_the_state_file_is_a_reboot_all_the_same() {
    let mut bench = Bench::new();
    bench.append(&at(1, 10, &xid(79, 1)));
    bench.run_until(1).await;
    std::fs::write(bench.state(), "").unwrap();
    bench.append(&at(2, 10, "usb 1-1: new device"));
    bench.boot = boot(2);
    let events = bench.run_until(6).await;
    let healthy = events.iter().filter(|event| event.is_healthy);
    assert_eq!(healthy.count(), 5, "{events:#?}");
}

#[tokio::test]
async fn lost_state_files_are_not_a_reboot() {
    for damage in ["", "{}", "{\"version\":9}"] {
        let mut bench = Bench::new();
        bench.append(&at(1, 10, &xid(79, 1)));
        bench.run_until(1).await;
        std::fs::remove_file(bench.dir.path().join("data/kernel-log-boot")).unwrap();
        if damage.is_empty() {
            std::fs::remove_file(bench.state()).unwrap();
        } else {
            std::fs::write(bench.state(), damage).unwrap();
        }
        bench.append(&at(1, 20, &xid(48, 1)));
        // Even if the boot is another one now: no earlier one is known.
        bench.boot = boot(2);
        let events = bench.run_until(2).await;
        assert!(events.iter().all(|event| !event.is_healthy), "{events:#?}");
    }
}

#[tokio::test]
async fn a_kill_in_the_middle_of_a_reboot_neither_loses_nor_doubles_its_healthy_events() {
    let mut bench = Bench::new();
    bench.append(&at(1, 10, &xid(79, 1)));
    bench.run_until(1).await;
    let before = std::fs::read(bench.state()).unwrap();
    bench.boot = boot(2);
    assert_eq!(bench.run_until(6).await.len(), 6);
    // Power was lost before the state reached the disk.
    std::fs::write(bench.state(), before).unwrap();
    bench.append(&at(2, 10, &xid(79, 2)));
    assert_eq!(bench.run_until(7).await.len(), 7);
}
