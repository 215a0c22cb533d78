//! DCGM codes compared with other publications: names and severities of DCGM 4.6, and the
//! actions of NVSentinel's mapping, which policies rely on.

use super::*;

const PUBLISHED: &str = include_str!("published_dcgm.tsv");

/// Codes whose action differs from the mapping, or that the mapping lacks.
const OUR_OWN: [(u32, RecommendedAction); 10] = [
    // No error.
    (0, None),
    // NVSentinel's mapping for DCGM 4.6 omits both by mistake; each needs a reset.
    (6, ComponentReset),
    (84, ComponentReset),
    // The mapping contradicts itself, and its code uses the line of the alias.
    (10, None),
    // As in the mapping for DCGM 4.7: a link that recovers takes no machine out of service.
    (71, None),
    (80, ComponentReset),
    (131, None),
    (132, ContactSupport),
    // As for an XID 154 line with the same advice.
    (127, ComponentReset),
    // The test had no result, and recommends another test.
    (130, ContactSupport),
];

#[test]
fn each_code_has_the_name_and_the_action_that_others_rely_on() {
    let catalog = Catalog::builtin();
    let mut count = 0;
    for line in PUBLISHED.lines().skip(1) {
        let fields: Vec<&str> = line.split('\t').collect();
        let [code, name, severity, action] = fields[..] else {
            panic!("{line}");
        };
        let code: u32 = code.parse().unwrap();
        let row = catalog.dcgm(code).unwrap();
        assert_eq!((&*row.name, &*row.severity), (name, severity));
        let own = OUR_OWN.iter().find(|(own, _)| *own == code);
        let expected = own.map_or_else(|| rows::action_of(action).unwrap(), |(_, own)| *own);
        let verdict = catalog.judge_dcgm(name);
        let is_fatal = expected != None;
        assert_eq!(
            (verdict.fatal, verdict.action),
            (is_fatal, expected),
            "{name}"
        );
        count += 1;
    }
    assert_eq!(count, 133);
}

#[test]
fn a_code_is_found_by_its_older_name_too_and_one_without_a_row_stops_nothing() {
    let catalog = Catalog::builtin();
    for (alias, code) in [
        ("DCGM_FR_CLOCK_THROTTLE_THERMAL", 10),
        ("DCGM_FR_CLOCK_THROTTLE_POWER", 12),
        ("DCGM_FR_THROTTLING_VIOLATION", 43),
    ] {
        assert_eq!(catalog.dcgm_named(alias), catalog.dcgm(code), "{alias}");
    }
    let verdict = catalog.judge_dcgm("DCGM_FR_OF_NEXT_YEAR");
    assert_eq!(
        (verdict.fatal, verdict.action),
        (false, RecommendedAction::Unknown)
    );
    assert_eq!(catalog.dcgm(133), Option::None);
}
