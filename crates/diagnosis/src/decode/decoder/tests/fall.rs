//! Tests of messages that a GPU has fallen off the bus.

use super::*;

#[test]
fn one_fall_is_one_fault() {
    let mut decoder = KernelLogDecoder::default();
    let at = |seconds| T0 + SignedDuration::from_secs(seconds);
    let fallen = b"NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.";
    let xid = b"NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, GPU has fallen off the bus.";
    assert!(decoder.record(xid, at(0))[0].fatal);
    // The addresses differ in ".0", which NVSentinel's comparison misses.
    assert_eq!(decoder.record(fallen, at(1)), []);
    assert_eq!(decoder.record(fallen, at(300)), []);
    let other = decoder.record(
        b"NVRM: GPU 0000:b4:00.0: GPU has fallen off the bus.",
        at(1),
    );
    assert_eq!(other[0].pci.as_deref(), Some("0000:b4:00"));
    let later = decoder.record(fallen, at(301)).remove(0);
    assert_eq!(
        (later.action, later.code().as_deref()),
        (RecommendedAction::RestartBm, Some("GPU_FALLEN_OFF_BUS"))
    );
}

#[test]
fn only_an_xid_that_says_as_much_stands_for_a_fall() {
    let at = |seconds| T0 + SignedDuration::from_secs(seconds);
    let fall = "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.";
    let record = "NVRM: The NVIDIA GPU 0000:b3:00.0\n\
                  NVRM: (PCI ID: 10de:2330) installed in this system has\n\
                  NVRM: fallen off the bus and is not responding to commands.";
    let reboot = "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)";
    let reset = "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)";
    for (xid, tells) in [
        ("13, pid=1, name=a, Graphics Exception", false),
        ("31, pid=1, name=a, MMU Fault", false),
        ("43, pid=1, name=a, Ch 00000008", false),
        ("45, pid=1, name=a, Ch 00000008", false),
        // Fatal, but remediated without a reboot.
        ("95, pid=1, name=a, Uncontained", false),
        ("162, power smoothing", false),
        ("999, nobody knows", false),
        (reset, false),
        (reboot, true),
        ("79, pid=1, name=a, GPU has fallen off the bus.", true),
    ] {
        let xid = format!("NVRM: Xid (PCI:0000:b3:00): {xid}");
        for fall in [fall, record] {
            let of_fall = |found: &[Finding]| {
                let is_fall = |it: &&Finding| it.code().as_deref() == Some("GPU_FALLEN_OFF_BUS");
                found.iter().filter(is_fall).count()
            };
            let mut decoder = KernelLogDecoder::default();
            assert_eq!(decoder.record(xid.as_bytes(), at(0)).len(), 1);
            let found = decoder.record(fall.as_bytes(), at(299));
            assert_eq!(of_fall(&found), usize::from(!tells), "{xid} before {fall}");
            // An earlier fault stays, unless XID 79 reports the same, which replaces the fault
            // however late; the XID is never dropped.
            let mut decoder = KernelLogDecoder::default();
            assert_eq!(of_fall(&decoder.record(fall.as_bytes(), at(0))), 1);
            let cancels = |found: Vec<Finding>| -> Vec<String> {
                assert_eq!(found.len(), 1);
                let cancels = found[0].cancels.iter();
                let of_falls = cancels.filter(|it| it.check == "SysLogsGPUFallenOff");
                of_falls.map(|it| it.code.clone()).collect()
            };
            let other = b"NVRM: Xid (PCI:0000:b4:00): 79, pid=1, name=a, x";
            assert!(cancels(decoder.record(other, at(1))).is_empty(), "{xid}");
            let ended = if xid.contains("): 79,") {
                &["GPU_FALLEN_OFF_BUS"][..]
            } else {
                &[]
            };
            assert_eq!(
                cancels(decoder.record(xid.as_bytes(), at(2_000))),
                ended,
                "{xid}"
            );
            // The second XID cancels nothing.
            assert!(cancels(decoder.record(xid.as_bytes(), at(2_001))).is_empty());
            // Both lines in one record.
            for record in [format!("{xid}\n{fall}"), format!("{fall}\n{xid}")] {
                let mut decoder = KernelLogDecoder::default();
                let found = decoder.record(record.as_bytes(), at(0));
                assert_eq!(of_fall(&found), usize::from(!tells), "{record}");
                assert_eq!(found.len(), 2 - usize::from(tells), "{record}");
                let of_falls = (found.iter().flat_map(|it| &it.cancels))
                    .filter(|it| it.check == "SysLogsGPUFallenOff");
                assert_eq!(of_falls.count(), 0, "{record}");
                // A later XID 79 cancels the fault only if it was reported.
                let fell = b"NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, x";
                let ended = cancels(decoder.record(fell, at(1))).len();
                let reported = of_fall(&found) == 1;
                assert_eq!(ended, usize::from(reported), "{record}");
            }
        }
    }
}

#[test]
fn an_xid_that_was_taken_back_stands_for_no_fall() {
    let fall = "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.";
    let fell = "NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, GPU has fallen off the bus.";
    let advice = "NVRM: Xid (PCI:0000:b3:00): 154, GPU recovery action changed from";
    let reboot = format!("{advice} 0x0 (None) to 0x2 (Node Reboot Required)");
    let none = format!("{advice} 0x2 (Node Reboot Required) to 0x0 (None)");
    let reset = "GPU reset executed: GPU-aa, success: true";
    let no_reset = "GPU reset executed: GPU-aa, success: false";
    for (before, tells) in [
        (&[fell, reset][..], false),
        (&[fell, no_reset], true),
        (&[&reboot, &none], false),
        // The driver's advice is not the fall.
        (&[fell, &reboot, &none], true),
    ] {
        let mut decoder = on_a_known_machine();
        for line in before {
            one(&mut decoder, line);
        }
        let found = decoder.record(fall.as_bytes(), T0);
        assert_eq!(found.is_empty(), tells, "{before:?}");
    }
}

/// NVSentinel's event has neither.
#[test]
fn a_fall_that_no_xid_told_names_gpu_and_machine() {
    let mut decoder = on_a_known_machine();
    let fallen = "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.";
    let finding = one(&mut decoder, fallen);
    assert_eq!(entities(&finding), "PCI=0000:b3:00 GPU_UUID=GPU-aa");
    let metadata = finding.metadata();
    assert!(
        metadata.contains(&("chassis_serial", "42".to_owned())),
        "{metadata:?}"
    );
}

#[test]
fn a_fall_told_in_three_lines_is_one_fault_with_all_of_them() {
    let lines = [
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ];
    let mut decoder = on_a_known_machine();
    let whole = one(&mut decoder, &lines.join("\n"));
    assert_eq!(
        entities(&whole),
        "PCI=0000:b3:00 GPU_UUID=GPU-aa PCI_ID=10de:2330"
    );
    assert_eq!(whole.lines.as_deref(), Some(&*lines.join("\n")));
    // Three records, with others between them.
    assert_eq!(decoder.record(lines[0].as_bytes(), T0), []);
    assert_eq!(decoder.record(b"usb 1-1: new device", T0), []);
    assert_eq!(decoder.record(lines[1].as_bytes(), T0), []);
    let parts = one(&mut decoder, lines[2]);
    assert_eq!(parts.lines, whole.lines);
    assert_eq!(entities(&parts), entities(&whole));
    // The end alone names no GPU.
    assert_eq!(decoder.record(lines[2].as_bytes(), T0), []);
    // An XID in the same record reports the fall.
    let xid = "NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name=a, GPU has fallen off the bus.";
    let both = one(&mut decoder, &format!("{}\n{xid}", lines.join("\n")));
    assert_eq!(both.code().as_deref(), Some("79"));
}

/// Drivers, and programs that copy a log, break the sentence anywhere.
#[test]
fn a_fall_is_one_fault_wherever_its_sentence_breaks() {
    let sentence = "The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:2330) installed in this system has \
                    fallen off the bus and is not responding to commands.";
    let words: Vec<&str> = sentence.split(' ').collect();
    let lines = |breaks: &[usize]| {
        let mut from = 0;
        let ends = breaks.iter().copied().chain([words.len()]);
        let lines = ends.map(|end| {
            let line = format!("NVRM: {}", words[from..end].join(" "));
            from = end;
            line
        });
        lines.collect::<Vec<String>>()
    };
    let between = "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06";
    // The first line names the GPU.
    for first in 4..words.len() {
        for second in first..words.len() {
            let mut breaks = vec![first, second];
            breaks.dedup();
            let mut decoder = on_a_known_machine();
            let mut found = Vec::new();
            for line in lines(&breaks) {
                found.extend(decoder.record(line.as_bytes(), T0));
                found.extend(decoder.record(between.as_bytes(), T0));
            }
            assert_eq!(found.len(), 1, "{breaks:?}: {found:?}");
            assert_eq!(
                entities(&found[0]),
                "PCI=0000:b3:00 GPU_UUID=GPU-aa PCI_ID=10de:2330",
                "{breaks:?}"
            );
            let one = decoder.record(lines(&breaks).join("\n").as_bytes(), T0);
            assert_eq!(one.len(), 1, "{breaks:?}");
        }
    }
}

/// Returns the three lines about a GPU on this bus.
fn three(bus: &str) -> [String; 3] {
    [
        format!("NVRM: The NVIDIA GPU 0000:{bus}:00.0"),
        format!("NVRM: (PCI ID: 10de:{bus}{bus}) installed in this system has"),
        "NVRM: fallen off the bus and is not responding to commands.".to_owned(),
    ]
}

#[test]
fn nothing_that_comes_between_the_lines_of_a_fall_loses_it() {
    let ([a1, a2, a3], [b1, b2, b3]) = (three("b3"), three("b4"));
    let of = |bus: &str| format!("NVRM: Xid (PCI:0000:{bus}:00): 45, pid=1, name=a, Ch 1");
    let (own, other) = (of("b3"), of("b5"));
    // The message of a driver that does not support a GPU starts in the same way.
    let unsupported = "NVRM: The NVIDIA GPU 0000:b6:00.0 (PCI ID: 10de:0fc6)";
    for (lines, expected) in [
        (vec![&a1, &other, &a2, &other, &a3], vec!["b3"]),
        (vec![&a1, &own, &a2, &own, &a3], vec!["b3"]),
        (vec![&a1, &b1, &a2, &b2, &a3, &b3], vec!["b3", "b4"]),
        (vec![&a1, &a2, &b1, &a3, &b2, &b3], vec!["b3", "b4"]),
        (vec![&a1, &a2, &b1, &b2, &b3, &a3], vec!["b3", "b4"]),
        (vec![&a1, &other, &b1, &b2, &b3], vec!["b4"]),
        (vec![&a1, &a3], vec!["b3"]),
        (vec![&a1, &a1, &a2, &a3], vec!["b3"]),
    ] {
        for before in [None, Some(unsupported)] {
            let mut decoder = KernelLogDecoder::default();
            let lines = before.into_iter().chain(lines.iter().map(|line| &***line));
            let mut fell: Vec<_> = lines
                .flat_map(|line| decoder.record(line.as_bytes(), T0))
                .filter(|it| matches!(it.kind, FindingKind::FallenOffBus { .. }))
                .collect();
            fell.sort_by(|a, b| a.pci.cmp(&b.pci));
            let fell: Vec<_> = fell.iter().filter_map(|it| it.pci.as_deref()).collect();
            let expected: Vec<_> = expected
                .iter()
                .map(|bus| format!("0000:{bus}:00"))
                .collect();
            assert_eq!(fell, expected, "{before:?}");
        }
    }
}

#[test]
fn of_messages_that_never_end_few_are_kept_and_none_for_long() {
    let mut decoder = KernelLogDecoder::default();
    for domain in 0..3 * REMEMBERED {
        let line = format!("NVRM: The NVIDIA GPU {domain:04x}:b3:00.0");
        decoder.record(line.as_bytes(), T0);
    }
    let [_, second, end] = three("b3");
    let late = T0 + SAME_FALL * 2;
    let mut fell = 0;
    for _ in 0..2 * REMEMBERED {
        decoder.record(second.as_bytes(), T0);
        fell += decoder.record(end.as_bytes(), T0).len();
    }
    assert_eq!(fell, REMEMBERED);
    // The end of a new message does not complete an old one.
    let [old, ..] = three("b4");
    let [begin, ..] = three("b5");
    decoder.record(old.as_bytes(), T0);
    decoder.record(begin.as_bytes(), late);
    assert!(decoder.reported_falls.len() <= REMEMBERED);
    let found = decoder.record(end.as_bytes(), late);
    assert_eq!(found[0].pci.as_deref(), Some("0000:b5:00"));
    assert_eq!(decoder.record(end.as_bytes(), late), []);
}

/// The start of the new message may not have been read.
#[test]
fn the_end_of_a_message_is_not_that_of_one_of_long_ago() {
    let [begin, second, end] = three("b3");
    let late = T0 + SAME_FALL * 2;
    for rest in [&second, &end] {
        let mut decoder = KernelLogDecoder::default();
        decoder.record(begin.as_bytes(), T0);
        assert_eq!(decoder.record(rest.as_bytes(), late), []);
        assert_eq!(decoder.record(end.as_bytes(), late), []);
        // In time, the end completes the message.
        decoder.record(begin.as_bytes(), T0);
        let found = decoder.record(end.as_bytes(), T0 + SAME_FALL);
        assert_eq!(found[0].pci.as_deref(), Some("0000:b3:00"));
    }
}
