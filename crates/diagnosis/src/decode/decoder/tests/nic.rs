//! Tests of lines of network drivers.

use super::*;

#[test]
fn nic_lines_are_stored_only_until_a_file_turns_them_on() {
    let dead = "mlx5_core 0000:9A:00.1: poll_health:825:(pid 0): device's health compromised - reached miss count";
    let mut decoder = KernelLogDecoder::default();
    let finding = one(&mut decoder, dead);
    assert_eq!(entities(&finding), "NIC=0000:9a:00.1");
    assert_eq!(
        (finding.component(), finding.check()),
        ("NIC", "SysLogsNICDriverError")
    );
    assert_eq!(finding.code().as_deref(), Some("health_poll_failed"));
    assert_eq!(finding.strategy, ProcessingStrategy::StoreOnly);
    assert!(finding.fatal && finding.action == RecommendedAction::ReplaceVm);

    let file = "[nicDriverDetection]\npatterns = [{name = \"health_poll_failed\", enabled = true}]";
    let catalog = Catalog::builtin().with(&Overrides::parse(file, "nic.toml").unwrap());
    let mut decoder = KernelLogDecoder::new(Arc::new(catalog));
    let nics = [("0000:9a:00.1", "mlx5_1"), ("ens1f0", "mlx5_2")];
    decoder.set_nics(
        nics.map(|(at, name)| (at.to_owned(), name.to_owned()))
            .into(),
    );
    let finding = one(&mut decoder, dead);
    assert_eq!(entities(&finding), "NIC=mlx5_1");
    assert_eq!(finding.strategy, ProcessingStrategy::ExecuteRemediation);
    let off = b"mlx5_core 0000:9a:00.0: wait_func:1194:(pid 1): ACCESS_REG(0x805) timeout. Will cause a leak of a command resource";
    assert_eq!(decoder.record(off, T0), []);
}

#[test]
fn every_nic_pattern_covers_its_lines_and_no_ordinary_one() {
    let mut decoder = KernelLogDecoder::default();
    for (pattern, line) in [
        (
            "cmd_exec_timeout",
            "mlx5_core 0000:9a:00.0: wait_func:1194:(pid 1): ACCESS_REG(0x805) timeout. Will cause a leak of a command resource",
        ),
        (
            "health_poll_failed",
            "mlx5_core 0000:9a:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count",
        ),
        (
            "unrecoverable_err",
            "mlx5_core 0000:9a:00.0: print_health_info:432:(pid 0): synd 0x8: unrecoverable hardware error",
        ),
        (
            "netdev_watchdog",
            "NETDEV WATCHDOG: ens1f0 (mlx5_core): transmit queue 5 timed out",
        ),
        (
            "netdev_watchdog",
            "mlx5_core 0000:65:00.0 eth0: NETDEV WATCHDOG: CPU: 5: transmit queue 0 timed out 5032 ms",
        ),
        (
            "mlx5_tx_timeout_detected",
            "mlx5_core 0000:9a:00.0 ens1f0: TX timeout detected",
        ),
        (
            "mlx5_rx_timeout_detected",
            "mlx5_core 0000:9a:00.0 ens1f0: RX timeout on channel: 3, ICOSQ: 0x1, RQ: 0x2, CQ: 0x3",
        ),
        (
            "pci_power_insufficient",
            "mlx5_core 0000:9a:00.0: mlx5_pcie_event:301:(pid 5): Detected insufficient power on the PCIe slot (27W).",
        ),
        (
            "port_module_high_temp",
            "mlx5_core 0000:9a:00.0: Port module event[error]: module 0, Cable error, High Temperature",
        ),
        (
            "module_unplugged",
            "mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged",
        ),
        (
            "pci_slot_unavailable",
            "mlx5_core 0000:9a:00.0: print_health_info:423:(pid 0): PCI slot is unavailable",
        ),
        (
            "efa_admin_cmd_timeout",
            "infiniband rdmap0s6: Wait for completion (polling) timeout",
        ),
        (
            "efa_admin_cmd_timeout",
            "infiniband efa_0: The device didn't send any completion for admin cmd ALLOC_PD(9) status 1",
        ),
        (
            "efa_admin_queue_closed",
            "infiniband rdmap0s6: Admin queue is closed",
        ),
        (
            "efa_admin_cmd_failed",
            "infiniband rdmap0s6: Failed to process command CREATE_QP (opcode 1) comp_status 2 err -5",
        ),
        (
            "efa_device_reset_failed",
            "efa 0000:00:06.0: Reset indication didn't turn on",
        ),
        (
            "efa_device_not_ready",
            "efa 0000:00:06.0: Device isn't ready, abort com init",
        ),
    ] {
        for before in ["", "kernel: Jan 21 11:18:36 kernel: "] {
            let finding = one(&mut decoder, &format!("{before}{line}"));
            assert_eq!(finding.code().as_deref(), Some(pattern), "{line}");
        }
    }
    for line in [
        "mlx5_core 0000:9a:00.0: firmware version: 28.39.1002",
        "mlx5_core 0000:9a:00.0 ens108np0: Link up",
        "mlx5_core 0000:9a:00.0: Port module event: module 0, Cable plugged",
        // Off unless a file enables it: noise if a tool lacks permission to read a register.
        "mlx5_core 0000:9a:00.0: mlx5_cmd_out_err:816:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3)",
        "infiniband rdmap0s6: Admin queue is open",
        "ena 0000:00:05.0: Reset indication didn't turn on",
    ] {
        assert_eq!(decoder.record(line.as_bytes(), T0), [], "{line}");
    }
}

/// A line with the prefix of another network driver may contain a line of the GPU driver.
#[test]
fn a_gpu_line_behind_the_beginning_of_a_nic_line_is_found() {
    let mut decoder = KernelLogDecoder::default();
    let begin = "NETDEV WATCHDOG: ens1f0 (ixgbe): ";
    let xid = format!("{begin}NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, x");
    assert_eq!(one(&mut decoder, &xid).code().as_deref(), Some("79"));
    let garbled = format!("{begin}NVRM: Xid (PCI:0000:bG:00): t");
    assert!(decoder.record(garbled.as_bytes(), T0).is_empty());
    assert!(decoder.take_garbled().is_some());
    assert!(decoder.record(begin.as_bytes(), T0).is_empty());
    assert!(decoder.take_garbled().is_none());
}
