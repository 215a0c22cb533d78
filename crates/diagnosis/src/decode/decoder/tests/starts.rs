//! Tests of failed starts of a GPU without an XID.

use super::*;

/// Returns the two lines of a failed start of the GPU on this bus.
fn failed(bus: &str) -> [String; 2] {
    [
        format!("NVRM: GPU 0000:{bus}:00.0: RmInitAdapter failed! (0x62:0x65:1858)"),
        format!("NVRM: GPU 0000:{bus}:00.0: rm_init_adapter failed, device minor number 3"),
    ]
}

fn tries(decoder: &mut KernelLogDecoder, bus: &str, minutes: i64) -> Vec<Finding> {
    let at = T0 + SignedDuration::from_mins(minutes);
    let lines = failed(bus);
    let found = lines
        .iter()
        .flat_map(|line| decoder.record(line.as_bytes(), at));
    found.collect()
}

#[test]
fn a_gpu_that_cannot_be_started_twice_in_ten_minutes_is_a_fault() {
    let mut decoder = on_a_known_machine();
    assert_eq!(tries(&mut decoder, "b3", 0), []);
    assert_eq!(tries(&mut decoder, "b4", 5), [], "another GPU");
    assert_eq!(tries(&mut decoder, "b3", 11), [], "too late");
    let found = tries(&mut decoder, "b3", 21);
    let [finding] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!(
        (finding.check(), finding.code().as_deref()),
        ("SysLogsGPUInitFailed", Some("GPU_INIT_FAILED"))
    );
    assert_eq!(
        (finding.fatal, finding.action, finding.healthy),
        (true, RecommendedAction::ComponentReset, false)
    );
    assert_eq!(entities(finding), "PCI=0000:b3:00 GPU_UUID=GPU-aa");
    assert_eq!(tries(&mut decoder, "b3", 22).len(), 1, "and again");
}

#[test]
fn other_lines_about_a_start_are_no_fault() {
    let mut decoder = on_a_known_machine();
    for line in [
        "NVRM: RmInitAdapter: Cannot initialize GSP firmware RM",
        "NVRM: RmInitAdapter failed! (0x26:0xffff:1290)",
        "NVRM: GPU zz: RmInitAdapter failed! (0x26:0xffff:1290)",
        "NVRM: GPU 0000:b3:00.0: RmInitAdapter succeeded",
        "NVRM: GPU 0000:b3:00.0: rm_init_adapter failed, device minor number 0",
        "RmInitAdapter failed!",
    ] {
        for _ in 0..3 {
            assert_eq!(decoder.record(line.as_bytes(), T0), [], "{line}");
        }
    }
}

#[test]
fn of_starts_that_failed_few_are_remembered() {
    let mut decoder = KernelLogDecoder::default();
    for domain in 0..3 * REMEMBERED {
        let line = format!("NVRM: GPU {domain:04x}:b3:00.0: RmInitAdapter failed! (0x1:0x2:3)");
        decoder.record(line.as_bytes(), T0);
    }
    assert_eq!(decoder.failed_starts.len(), REMEMBERED);
}
