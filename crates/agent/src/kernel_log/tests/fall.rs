//! Tests that "GPU has fallen off the bus" and XID 79 are one fault, in either order, from the
//! log to the fault book.

use model::fault::{Fault, FaultBook};

use super::*;

const FALL: &str = "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.";
const OTHER_FALL: &str = "NVRM: GPU 0000:b4:00.0: GPU has fallen off the bus.";

/// Returns the titles of the faults that are open after these events.
fn open_after(events: &[HealthEvent]) -> Vec<String> {
    let mut book = FaultBook::default();
    for (seq, event) in (1_u64..).zip(events) {
        book.record(&model::event::EventRecord {
            seq: seq.into(),
            id: event.id.clone(),
            created_at: Timestamp::UNIX_EPOCH,
            event: event.clone(),
        });
    }
    let faults = book.faults("n1").iter();
    faults.map(Fault::title).collect()
}

#[tokio::test]
async fn a_recovery_of_xid_79_leaves_nothing_of_the_fall_open() {
    let of_the_other = "SysLogsGPUFallenOff GPU_FALLEN_OFF_BUS on PCI 0000:b4:00";
    for lines in [
        &[FALL, XID_79][..],
        &[XID_79, FALL],
        // Repeats of either line, some still being counted when the other arrives.
        &[FALL, FALL, FALL, XID_79, FALL, XID_79],
        &[XID_79, XID_79, FALL, XID_79],
    ] {
        let mut bench = Bench::new();
        bench.append(&at(1, 0, OTHER_FALL));
        for (second, line) in (1..).zip(lines) {
            bench.append(&at(1, second, line));
        }
        // In the next window the count is reported.
        bench.append(&at(1, 100, XID_79));
        let mut events = bench.run_until(2).await;
        let open = open_after(&events);
        let of_xid = "SysLogsXIDError 79 on PCI 0000:b3:00";
        assert_eq!(open, [of_the_other, of_xid], "{lines:?}: {events:#?}");
        let xid = events.iter().find(|event| event.error_code == ["79"]);
        events.push(HealthEvent {
            is_healthy: true,
            ..xid.unwrap().clone()
        });
        assert_eq!(open_after(&events), [of_the_other], "{lines:?}");
        // In the other order, there was nothing to end.
        let ended = events.iter().filter(|event| event.is_healthy).count();
        assert_eq!(ended, if lines[0] == FALL { 2 } else { 1 }, "{lines:?}");
    }
}

#[tokio::test]
async fn a_fall_told_in_three_lines_is_one_event_with_all_of_them() {
    let mut bench = Bench::new();
    let lines = [
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ];
    for line in lines {
        bench.append(&at(1, 0, line));
    }
    let events = bench.run_until(1).await;
    assert_eq!(events[0].message, lines.join("\n"));
    assert_eq!(events[0].error_code, ["GPU_FALLEN_OFF_BUS"]);
}
