//! Tests of lines about GPU resets.

use super::*;

#[test]
fn the_end_of_all_faults_of_a_gpu_names_no_code() {
    let line = "GPU reset executed: GPU-99, success: true";
    let event = event_of_line(line, "n1", Timestamp::UNIX_EPOCH).unwrap();
    assert!(event.is_healthy && !event.is_fatal && event.error_code.is_empty());
    assert_eq!(event.check_name, "SysLogsXIDError");
    assert_eq!(event.message, line);
    let line = "mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged";
    let event = event_of_line(line, "n1", Timestamp::UNIX_EPOCH).unwrap();
    assert_eq!(event.component_class, "NIC");
    assert_eq!(event.processing_strategy, 2, "STORE_ONLY");
}

#[test]
fn a_reset_that_failed_says_what_follows() {
    let line = "GPU reset executed: GPU-99, success: false";
    let event = event_of_line(line, "n1", Timestamp::UNIX_EPOCH).unwrap();
    assert_eq!(
        event.message,
        "GPU reset failed, proceeding with a node reboot"
    );
    assert_eq!(event.metadata["gpuwarden.dev/log-line"], line);
    // However much text surrounds it.
    let line = format!("{}{line}", " ".repeat(20_000));
    let event = event_of_line(&line, "n1", Timestamp::UNIX_EPOCH).unwrap();
    assert_eq!(event.metadata["gpuwarden.dev/log-line"].len(), 4_096);
}

#[test]
fn without_the_uuid_a_gpu_cannot_be_reset_and_the_machine_is_restarted() {
    let at = Timestamp::UNIX_EPOCH;
    let event = event_of_line(XID_48, "n1", at).unwrap();
    assert_eq!(
        event.recommended_action,
        RecommendedAction::RestartVm as i32
    );
    assert_eq!(
        event.metadata["gpuwarden.dev/catalogue-action"],
        "COMPONENT_RESET"
    );
    assert_eq!(event_of_line("all is well", "n1", at), None);
}

/// NVSentinel accepts only the metadata file's UUID, since the reset could not be acknowledged
/// without it.
#[tokio::test]
async fn a_uuid_from_the_log_is_enough_for_a_reset() {
    let mut bench = Bench::new();
    bench.append(&at(1, 1, "NVRM: GPU at PCI:0000:b3:00: GPU-bb"));
    bench.append(&at(1, 2, XID_48));
    let events = bench.run_until(1).await;
    let reset = RecommendedAction::ComponentReset as i32;
    assert_eq!(events[0].recommended_action, reset);
}
