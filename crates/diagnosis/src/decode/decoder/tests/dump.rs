//! Tests of dumps of requests to a GPU's system processor.

use super::*;
use contract::MAX_METADATA_BYTES;

fn timeout(bus: &str, gpu: u32) -> String {
    format!(
        "NVRM: Xid (PCI:0000:{bus}:00): 119, pid=32273, name=nvitop, Timeout waiting for RPC from \
         GPU{gpu} GSP! Expected function 76 (GSP_RM_CONTROL) (0x2080a097 0x490)."
    )
}

/// A dump of R535; later drivers have one more column.
fn dump(gpu: u32) -> Vec<String> {
    [
        &format!(
            "GPU{gpu} GSP RPC buffer contains function 76 (GSP_RM_CONTROL) and data \
             0x000000002080a097 0x000000000000049{gpu}."
        ),
        &format!("GPU{gpu} RPC history (CPU -> GSP):"),
        "    entry function                   data0              data1              ts_start           ts_end             duration actively_polling",
        &format!("     0    76   GSP_RM_CONTROL        0x000000002080a097 0x000000000000049{gpu} 0x000609ffebd7f5bd 0x0000000000000000          y"),
        &format!("    -1    103  GSP_RM_ALLOC          0x000000002080a61d 0x000000000000000{gpu} 0x000609ffebc8aa58 0x000609ffebc8ac44    492us  "),
        &format!("GPU{gpu} RPC event history (CPU <- GSP):"),
        "    entry function                   data0              data1              ts_start           ts_end             duration during_incomplete_rpc",
        &format!("     0    4108 UCODE_LIBOS_PRINT     0x0000000000000000 0x000000000000000{gpu} 0x000609ffc2a20d47 0x000609ffc2a20d47"),
    ]
    .map(|line| format!("NVRM: {line}"))
    .into()
}

fn metadata(finding: &Finding) -> Option<String> {
    let mut metadata = finding.metadata().into_iter();
    let dump = metadata.find(|(key, _)| *key == "gpuwarden.dev/rpc-history");
    dump.map(|(_, value)| value)
}

fn text(dump: &[String]) -> String {
    let lines: Vec<&str> = dump.iter().map(|line| line[6..].trim_end()).collect();
    lines.join("\n")
}

#[test]
fn a_dump_goes_with_the_next_xid_of_its_trouble_and_is_no_event() {
    for (next, has_dump) in [
        (timeout("03", 0), true),
        ("NVRM: Xid (PCI:0000:03:00): 120, GSP task exception".to_owned(), true),
        (
            "NVRM: Xid (PCI:0000:03:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
                .to_owned(),
            true,
        ),
        ("NVRM: Xid (PCI:0000:03:00): 45, pid=1, name=a, Ch 1".to_owned(), false),
        (timeout("04", 1), false),
    ] {
        let mut decoder = KernelLogDecoder::default();
        let first = one(&mut decoder, &timeout("03", 0));
        assert_eq!(metadata(&first), None, "it is reported at once");
        for line in dump(0) {
            assert_eq!(decoder.record(line.as_bytes(), T0), [], "{line}");
            assert_eq!(decoder.record(b"usb 1-1: new device", T0), []);
            assert_eq!(decoder.record(b"NVRM: some other line", T0), []);
        }
        let second = one(&mut decoder, &next);
        let expected = has_dump.then(|| text(&dump(0)));
        assert_eq!(metadata(&second), expected, "{next}");
        // A dump is attached once; the next one has only newer lines.
        if has_dump {
            assert_eq!(metadata(&one(&mut decoder, &timeout("03", 0))), None);
        }
    }
}

#[test]
fn each_gpu_has_its_own_dump_however_they_are_mixed() {
    let mut decoder = KernelLogDecoder::default();
    one(&mut decoder, &timeout("03", 0));
    one(&mut decoder, &timeout("04", 1));
    let (a, b) = (dump(0), dump(1));
    for lines in [&a[..1], &b[..5], &a[1..], &b[5..]] {
        for line in lines {
            assert_eq!(decoder.record(line.as_bytes(), T0), []);
        }
    }
    // A part of a dump of a GPU without such an XID is dropped.
    let (known, unknown) = ([timeout("03", 0), timeout("04", 1)], dump(7));
    for line in &unknown {
        assert_eq!(decoder.record(line.as_bytes(), T0), []);
    }
    for (gpu, xid) in (0..).zip(known) {
        let expected = text(&dump(gpu));
        assert_eq!(metadata(&one(&mut decoder, &xid)), Some(expected), "{xid}");
    }
    // If the XID lacks the driver's number of the GPU, the newest such GPU gets the dump.
    let nameless = "NVRM: Xid (PCI:0000:05:00): 120, GSP task exception";
    one(&mut decoder, nameless);
    for line in &unknown {
        decoder.record(line.as_bytes(), T0);
    }
    let expected = Some(text(&unknown));
    assert_eq!(metadata(&one(&mut decoder, nameless)), expected);
}

#[test]
fn a_dump_is_bounded_and_goes_with_no_later_trouble() {
    let mut decoder = KernelLogDecoder::default();
    // A dump before any XID is dropped.
    for line in dump(0) {
        assert_eq!(decoder.record(line.as_bytes(), T0), []);
    }
    assert_eq!(metadata(&one(&mut decoder, &timeout("03", 0))), None);
    for _ in 0..1_000 {
        for line in dump(0) {
            decoder.record(line.as_bytes(), T0);
        }
    }
    let long = metadata(&one(&mut decoder, &timeout("03", 0))).unwrap();
    assert!(long.starts_with(&text(&dump(0))) && long.ends_with("0x000609ffc2a20d47"));
    assert!(
        (3_000..=MAX_METADATA_BYTES).contains(&long.len()),
        "{}",
        long.len()
    );

    for (minutes, has_dump) in [(5, true), (6, false)] {
        let mut decoder = KernelLogDecoder::default();
        one(&mut decoder, &timeout("03", 0));
        for line in dump(0) {
            decoder.record(line.as_bytes(), T0);
        }
        let at = T0 + SignedDuration::from_mins(minutes);
        let later = decoder.record(timeout("03", 0).as_bytes(), at).remove(0);
        assert_eq!(later.dump.is_some(), has_dump);
    }
    let mut decoder = KernelLogDecoder::default();
    for domain in 0..3 * REMEMBERED {
        let line = format!("NVRM: Xid (PCI:{domain:04x}:b3:00): 119, Timeout");
        one(&mut decoder, &line);
    }
    assert!(decoder.dumps.remembered() <= REMEMBERED);
}
