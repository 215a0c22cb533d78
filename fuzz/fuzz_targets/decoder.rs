//! A kernel log: any bytes, decoded line by line.

#![no_main]

use domain::{
    decode::{KernelLogDecoder, Kind, Line, decode},
    fault::normalise_pci,
};
use jiff::{SignedDuration, Timestamp};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|log: &[u8]| {
    let mut decoder = KernelLogDecoder::default();
    let mut at = Timestamp::UNIX_EPOCH;
    for line in log.split(|byte| *byte == b'\n') {
        let said = decode(line);
        if let Some(said) = &said {
            check(said);
        }
        let finding = decoder.line(line, at);
        match (&said, &finding) {
            (Some(Line::Xid(xid)), Some(finding)) => {
                assert_eq!(finding.kind, Kind::Xid(xid.code));
            }
            (Some(Line::FallenOffBus { .. }), Some(finding)) => {
                assert!(finding.fatal);
                assert!(matches!(finding.kind, Kind::FallenOffBus { .. }));
            }
            // Right after an XID of the same GPU, the fall adds nothing.
            (Some(Line::FallenOffBus { .. } | Line::GpuName { .. }) | None, None) => {}
            (said, finding) => panic!("{said:?} gave {finding:?}"),
        }
        if let Some(finding) = finding {
            assert_eq!(finding.pci, normalise_pci(&finding.pci));
            assert!(!finding.meaning.is_empty());
            assert!(!finding.code().is_empty());
            assert!(!finding.action_name().is_empty());
            let first = finding.entities().into_iter().next();
            assert_eq!(first.map(|entity| entity.entity_value), Some(finding.pci));
        }
        at += SignedDuration::from_mins(1);
    }
});

fn check(said: &Line<'_>) {
    let pci = match said {
        Line::Xid(xid) => {
            assert!(xid.process.is_none_or(|name| xid.detail.contains(name)));
            xid.pci
        }
        Line::FallenOffBus { pci, pci_id } => {
            assert!(pci_id.is_none_or(|id| id.contains(':')));
            pci
        }
        Line::GpuName { pci, uuid } => {
            assert!(uuid.starts_with("GPU-"));
            pci
        }
    };
    let expected = |byte: u8| byte.is_ascii_hexdigit() || byte == b':' || byte == b'.';
    assert!(!pci.is_empty() && pci.bytes().all(expected), "{pci:?}");
}
