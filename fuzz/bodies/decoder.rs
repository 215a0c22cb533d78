//! Untrusted inputs of the decoder: a kernel log, a description of the machine, and an
//! operator's changes to the catalogue. The first line of an input selects one: a description of
//! the machine (`{`), changes (`[` or `#`), or neither. A NUL byte ends it, and the log follows.

use std::sync::Arc;

use diagnosis::{
    catalog::{Catalog, Overrides},
    decode::{Finding, FindingKind, KernelLogDecoder, LogLine, MachineGpus, decode},
    subject::normalise_pci,
};
use jiff::{SignedDuration, Timestamp};

/// Panics if the decoder breaks an invariant on this input.
pub fn run(input: &[u8]) {
    let (file, log) = match input.iter().position(|byte| *byte == 0) {
        Some(end) => (&input[..end], &input[end + 1..]),
        None => (&[][..], input),
    };
    let file = std::str::from_utf8(file).unwrap_or_default();
    let mut catalog = Catalog::builtin().clone();
    if let Ok(overrides) = Overrides::parse(file, "fuzz.toml") {
        let changed = catalog.with(&overrides);
        // The changes of a file can be listed, and applying them twice has no further effect.
        assert_eq!(changed.changes_to(&changed.with(&overrides)), []);
        catalog = changed;
    }
    let mut decoder = KernelLogDecoder::new(Arc::new(catalog));
    decoder.set_machine(MachineGpus::parse(file).ok());

    let mut at = Timestamp::UNIX_EPOCH;
    for line in log.split(|byte| *byte == b'\n') {
        let said = decode(line);
        if let Some(said) = &said {
            check(said);
        }
        let mut found = decoder.record(line, at);
        let finding = found.pop();
        assert!(found.is_empty(), "one line has one finding");
        match (&said, finding.as_ref().map(|finding| &finding.kind)) {
            (Some(LogLine::Xid(xid)), Some(FindingKind::Xid { code, .. })) => {
                assert_eq!(xid.code, *code);
            }
            (Some(LogLine::Sxid(sxid)), Some(FindingKind::Sxid { code, .. })) => {
                assert_eq!(sxid.code, *code);
            }
            (Some(LogLine::Reset(_)), Some(FindingKind::Reset)) => {}
            (Some(LogLine::Fallen(part)), Some(FindingKind::FallenOffBus { .. })) => {
                // The words may be spread over several lines.
                assert!(part.fell || part.pci.is_none());
            }
            (Some(LogLine::Nic(_)), Some(FindingKind::Nic { .. }))
            | (Some(LogLine::InitFailed { .. }), None | Some(FindingKind::InitFailed)) => {}
            // The rest of a message, or a line right after an XID of the same GPU; an ordinary
            // line of a NIC; the name of a GPU.
            (Some(LogLine::Fallen(_) | LogLine::Nic(_) | LogLine::GpuName { .. }) | None, None) => {
            }
            (Some(LogLine::Rpc(_)), None) => {}
            (Some(LogLine::Garbled), None) => assert!(decoder.take_garbled().is_some()),
            (said, kind) => panic!("{said:?} gave {kind:?}"),
        }
        if let Some(finding) = &finding {
            can_be_sent(finding);
        }
        at += SignedDuration::from_mins(1);
    }
    // The whole log as one record of several lines.
    for finding in KernelLogDecoder::default().record(log, at) {
        can_be_sent(&finding);
    }
}

/// Panics if the connector would refuse the finding's event: the fault would be lost.
fn can_be_sent(finding: &Finding) {
    assert!(!finding.meaning.is_empty() && !finding.action_name().is_empty());
    assert!(
        finding
            .code()
            .is_none_or(|code| !code.is_empty() && code.len() <= 253)
    );
    assert!(finding.healthy || finding.code().is_some());
    assert!(!(finding.healthy && finding.fatal));
    for entity in finding.entities() {
        assert!(
            !entity.entity_value.is_empty() && entity.entity_value.len() <= 1024,
            "{entity:?}"
        );
    }
    for (key, value) in finding.metadata() {
        assert!(value.len() <= 4096, "{key}");
    }
    if let (Some(pci), false) = (
        &finding.pci,
        matches!(finding.kind, FindingKind::Nic { .. }),
    ) {
        let normal = normalise_pci(pci);
        if let FindingKind::Sxid { .. } = finding.kind {
            // The function is present if the line has one.
            let function = pci.strip_prefix(&normal);
            assert!(function.is_some_and(|rest| rest.is_empty() || rest.starts_with('.')));
        } else {
            assert_eq!(*pci, normal);
        }
    }
}

fn check(said: &LogLine<'_>) {
    let pci = match said {
        LogLine::Xid(xid) => {
            assert!(xid.process.is_none_or(|name| xid.detail.contains(name)));
            assert!(xid.detail.ends_with(xid.message));
            Some(xid.pci)
        }
        LogLine::Sxid(sxid) => Some(sxid.pci),
        LogLine::Fallen(part) => {
            assert!(part.pci_id.is_none_or(|id| id.contains(':')));
            part.pci
        }
        LogLine::InitFailed { pci } => Some(*pci),
        LogLine::GpuName { pci, uuid } => {
            assert!(uuid.starts_with("GPU-") && uuid.len() > 4);
            Some(*pci)
        }
        LogLine::Nic(nic) => nic.pci,
        LogLine::Reset(reset) => {
            assert!(reset.uuid.starts_with("GPU-") && reset.uuid.len() > 4);
            None
        }
        LogLine::Rpc(_) | LogLine::Garbled => None,
    };
    let expected = |byte: u8| byte.is_ascii_hexdigit() || byte == b':' || byte == b'.';
    if let Some(pci) = pci {
        assert!(pci.bytes().any(|byte| byte.is_ascii_hexdigit()), "{pci:?}");
        assert!(pci.bytes().all(expected), "{pci:?}");
    }
}
