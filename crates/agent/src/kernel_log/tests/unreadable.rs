use super::*;

#[tokio::test]
async fn garbled_lines_open_no_fault_and_are_counted() {
    let mut bench = Bench::new();
    bench.append("NVRM: Xid (PCI:zz): 79, a");
    bench.append("NVRM: Xid (PCI:0000:b3:00): 99999999999, a");
    bench.append("NVRM: Xid (PCI:0000:b3:00): 7x, a");
    bench.append("nvidia-nvswitch3: SXid (PCI:zz): 24007, Fatal, Link 44 a");
    bench.append("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64");
    bench.append(&xid(79, 1));
    let running = bench.start();
    bench.stored_at_least(1).await;
    running.status(|status| status.malformed == 4).await;
    running.end().await;
    let events = bench.stored().await;
    assert_eq!(events.len(), 1);
    assert!(events[0].message.contains("0000:01:00"));
    for line in [
        "syslog_health_monitor_xid_processing_errors{node=\"n1\",error_type=\"line_garbled\"} 4",
        "gpuwarden_kernel_log_malformed_records_total 4",
    ] {
        assert!(bench.metric(line), "{}", bench.metrics.encode());
    }
}
