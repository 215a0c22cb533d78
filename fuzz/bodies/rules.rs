//! Rules of the analysis: any text as a file; if it is valid, events that follow from its bytes.

use analysis::{Analyzer, BUILT_IN, MAX_GROUPS, parse};
use contract::{Entity, HealthEvent, json, keys};
use jiff::Timestamp;
use model::event::EventRecord;
use model::position::Position;

const SOURCE: &str = "rules.toml";
const CODES: [&str; 5] = ["13", "31", "74", "79", ""];
const KINDS: [&str; 5] = ["GPU_UUID", "PCI", "NVLINK", "NIC", "REG0"];
/// Times that clocks show: after a reset, far ahead, and around the acceptance.
const SECONDS: [i64; 5] = [
    0,
    9_200_000_000,
    1_800_000_000,
    1_800_000_100,
    1_799_990_000,
];

/// Panics if the rules or the analysis break an invariant on this input.
pub fn run(text: &str) {
    match parse(text, SOURCE) {
        Ok(rules) => {
            let mut analyzer = Analyzer::new(rules);
            for (index, byte) in text.bytes().take(400).enumerate() {
                analyzer.record(&event(index, byte));
            }
            let now = Timestamp::from_second(1_800_000_200).unwrap();
            analyzer.time(now);
            assert!(analyzer.groups() <= MAX_GROUPS);
            for saying in analyzer.to_say(now, usize::MAX) {
                model::event::validate(&saying.event).unwrap();
                analyzer.said(&saying);
            }
            assert!(analyzer.to_say(now, usize::MAX).is_empty());
            let open: Vec<_> = analyzer.open().cloned().collect();
            let saved = analyzer.save();
            let mut restored = Analyzer::new(parse(text, SOURCE).unwrap());
            restored.restore(&saved).unwrap();
            restored.time(now);
            assert_eq!(restored.open().cloned().collect::<Vec<_>>(), open);
        }
        Err(error) => {
            assert!(!error.findings.is_empty());
            for finding in &error.findings {
                assert!(finding.starts_with(SOURCE), "{finding}");
            }
        }
    }
    assert!(parse(BUILT_IN, SOURCE).is_ok());
}

/// Returns an event whose parts the byte chooses.
fn event(index: usize, byte: u8) -> EventRecord {
    let of = |shift: u32, count: usize| usize::from(byte.rotate_right(shift)) % count;
    let second = SECONDS[of(0, 5)] + i64::try_from(index).unwrap();
    let mut event = HealthEvent {
        agent: keys::SYSLOG_AGENT.into(),
        component_class: "GPU".into(),
        check_name: keys::CHECK_XID.into(),
        is_healthy: byte.is_multiple_of(11),
        is_fatal: byte.is_multiple_of(3),
        error_code: vec![CODES[of(3, 5)].into()],
        node_name: format!("node-{}", of(5, 3)),
        generated_timestamp: Some(json::proto_timestamp(
            Timestamp::from_second(second).unwrap(),
        )),
        ..HealthEvent::default()
    };
    event.entities_impacted = (0..=of(2, 4))
        .map(|part| Entity {
            entity_type: KINDS[(part + of(1, 5)) % 5].into(),
            entity_value: format!("{byte:032b}"),
        })
        .collect();
    // A count that nothing can have.
    let count = (keys::META_COUNT.to_owned(), u64::MAX.to_string());
    event.metadata.extend([count]);
    EventRecord {
        seq: Position::from(index as u64 + 1),
        id: format!("{:024x}", index % 300),
        created_at: Timestamp::from_second(1_800_000_100).unwrap(),
        event,
    }
}
