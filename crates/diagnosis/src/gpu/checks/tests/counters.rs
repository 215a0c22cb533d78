//! Tests of rules about the growth of counters.

use super::*;

/// Check, code, value of the counter after that many polls, and true if that is too much.
type Case = (&'static str, fn(&mut Readings, u64), bool);

/// Each case starts with the counter at 7, and polls every 15 seconds.
const CASES: [Case; 15] = [
    // 1.92 per lane and minute: 31 for 16 lanes of the fifth generation.
    (
        "DCGM_FR_PCI_REPLAY_RATE",
        |readings, poll| readings.pcie_replays = Some(7 + 8 * poll),
        true,
    ),
    (
        "DCGM_FR_PCI_REPLAY_RATE",
        |readings, poll| readings.pcie_replays = Some(7 + 7 * poll),
        false,
    ),
    // The link is slowed down to save power, and allowed as much as at its maximum.
    (
        "DCGM_FR_PCI_REPLAY_RATE",
        |readings, poll| {
            readings.pcie_replays = Some(7 + 7 * poll);
            (readings.pcie_generation, readings.utilization_percent) = (Some(1), Some(0));
        },
        false,
    ),
    (
        "DCGM_FR_CLOCKS_EVENT_THERMAL",
        |readings, poll| readings.thermal_violation_ns = Some(7 + poll),
        true,
    ),
    // A GPU at its power limit is just busy.
    (
        "DCGM_FR_CLOCKS_EVENT_POWER",
        |readings, poll| {
            readings.power_violation_ns = Some(7 + poll);
            readings.clock_reasons = Some(0x4);
        },
        false,
    ),
    (
        "DCGM_FR_CLOCKS_EVENT_POWER",
        |readings, _| readings.clock_reasons = Some(0x80 | 0x8 | 0x4),
        true,
    ),
    (
        "DCGM_FR_NVLINK_ERROR_CRITICAL 1",
        |readings, poll| readings.nvlinks[1].replays = Some(7 + poll),
        true,
    ),
    (
        "DCGM_FR_NVLINK_ERROR_CRITICAL 1",
        |readings, poll| readings.nvlinks[1].recoveries = Some(7 + poll),
        true,
    ),
    (
        "DCGM_FR_NVLINK_ERROR_CRITICAL 1",
        |readings, poll| readings.nvlinks[1].effective_errors = Some(7 + poll),
        true,
    ),
    (
        "DCGM_FR_NVLINK_CRC_ERROR_THRESHOLD 1",
        |readings, poll| readings.nvlinks[1].crc_errors = Some(7 + 1_500 * poll),
        true,
    ),
    (
        "DCGM_FR_NVLINK_ERROR_THRESHOLD 1",
        |readings, poll| readings.nvlinks[1].crc_errors = Some(7 + 1_499 * poll),
        true,
    ),
    (
        "DCGM_FR_NVLINK_CRC_ERROR_THRESHOLD 1",
        |readings, poll| readings.nvlinks[1].crc_errors = Some(7 + 1_499 * poll),
        false,
    ),
    // The GPU was reset, so its counters start over.
    (
        "DCGM_FR_PCI_REPLAY_RATE",
        |readings, poll| readings.pcie_replays = Some(7 - poll.min(7)),
        false,
    ),
    // The value is missing.
    (
        "DCGM_FR_NVLINK_ERROR_CRITICAL 1",
        |readings, _| readings.nvlinks[1].replays = None,
        false,
    ),
    (
        "DCGM_FR_CLOCKS_EVENT_THERMAL",
        |readings, _| readings.thermal_violation_ns = None,
        false,
    ),
];

#[test]
fn a_counter_is_judged_by_its_growth_in_a_minute() {
    for (code, set, is_broken) in CASES {
        let mut bench = Bench::new(2);
        bench.poll();
        let mut changes = Vec::new();
        for poll in 1..10 {
            set(&mut bench.readings[1], poll);
            changes.extend(bench.poll());
        }
        let came = changes.contains(&format!("+1 {code}"));
        assert_eq!(came, is_broken, "{code}: {changes:?}");
        assert!(changes.len() <= 1, "{changes:?}");
    }
}

#[test]
fn growth_is_over_when_it_has_been_calm() {
    for restarts in [false, true] {
        let mut bench = Bench::new(2);
        bench.poll();
        bench.readings[1].thermal_violation_ns = Some(8);
        assert_eq!(bench.poll(), ["+1 DCGM_FR_CLOCKS_EVENT_THERMAL"]);
        // The counter grows now and then.
        for value in 9..12 {
            assert_eq!(bench.poll_for(240), [""; 0]);
            bench.readings[1].thermal_violation_ns = Some(value);
            assert_eq!(bench.poll(), [""; 0]);
        }
        if restarts {
            bench.restart();
        }
        // A minute without growth, and the calm period after it.
        assert_eq!(bench.poll_for(345), [""; 0]);
        assert_eq!(bench.poll_for(60), ["-1 DCGM_FR_CLOCKS_EVENT_THERMAL"]);
    }
}

/// A lifetime total is not recent growth.
#[test]
fn what_came_before_the_first_look_or_while_nobody_looked_is_not_growth() {
    let mut bench = Bench::new(2);
    bench.readings[1].pcie_replays = Some(1_000_000);
    bench.readings[1].nvlinks[1].crc_errors = Some(1_000_000);
    assert_eq!(bench.poll_for(300), [""; 0]);
    bench.now += Duration::from_secs(3_600);
    bench.readings[1].pcie_replays = Some(2_000_000);
    assert_eq!(bench.poll_for(300), [""; 0]);
    // A new driver restarts its counters at any value.
    bench.inventory.driver_version = Some("590.1".to_owned());
    bench.readings[1].pcie_replays = Some(3_000_000);
    assert_eq!(bench.poll_for(300), [""; 0]);
}

#[test]
fn the_replays_that_pcie_may_have_are_those_of_its_generation() {
    for (generation, width, allowed) in [
        (1, 16, "3"),
        (2, 16, "5"),
        (3, 16, "8"),
        (4, 8, "8"),
        (6, 16, "62"),
        (7, 16, "62"),
    ] {
        let mut bench = Bench::new(2);
        let gpu = &mut bench.inventory.gpus[1];
        (gpu.pcie_max_generation, gpu.pcie_max_width) = (Some(generation), Some(width));
        let readings = &mut bench.readings[1];
        (readings.pcie_generation, readings.pcie_width) = (Some(1), Some(1));
        bench.poll();
        bench.readings[1].pcie_replays = Some(1_000);
        let changes = (bench.health).take(&bench.inventory, &bench.readings, bench.now);
        let message = changes[0].message.clone().unwrap();
        let expected = format!("where {allowed} a minute are allowed");
        assert!(message.contains(&expected), "{generation}: {message}");
    }
}

/// Between its two thresholds a problem keeps its state.
#[test]
fn a_rate_that_has_begun_is_over_below_its_own_threshold() {
    let mut bench = Bench::new(2);
    bench.health.limits.nvlink_crc_over_per_second = 50;
    bench.poll();
    let mut counted = 7;
    let mut counts = |bench: &mut Bench, per_look: u64, looks: u32| {
        let mut changes = Vec::new();
        for _ in 0..looks {
            counted += per_look;
            bench.readings[1].nvlinks[1].crc_errors = Some(counted);
            changes.extend(bench.poll());
        }
        changes.retain(|change| change.contains("CRC"));
        changes
    };
    // Polls every 15 seconds with 70, 100, 70 and 40 errors per second.
    assert_eq!(counts(&mut bench, 1_050, 60), [""; 0]);
    let begun = ["+1 DCGM_FR_NVLINK_CRC_ERROR_THRESHOLD 1"];
    assert_eq!(counts(&mut bench, 1_500, 20), begun);
    assert_eq!(counts(&mut bench, 1_050, 60), [""; 0]);
    let over = ["-1 DCGM_FR_NVLINK_CRC_ERROR_THRESHOLD 1"];
    assert_eq!(counts(&mut bench, 600, 60), over);
}

#[test]
fn a_changed_limit_changes_what_is_told() {
    type Sets = fn(&mut CheckLimits);
    type Edit = fn(&mut Readings);
    let cases: [(&str, Edit, Sets); 4] = [
        (
            "+1 DCGM_FR_RETIRED_PAGES_LIMIT",
            |readings| readings.retired_pages_sbe = Some(8),
            |limits| limits.retired_pages = 8,
        ),
        (
            "+1 DCGM_FR_UNCORRECTABLE_ROW_REMAP_LIMIT",
            |readings| readings.remapped_rows_uncorrectable = Some(8),
            |limits| limits.remapped_rows = 8,
        ),
        (
            "+1 DCGM_FR_PCI_REPLAY_RATE",
            |readings| readings.pcie_replays = Some(7 + 17),
            |limits| limits.pcie_replay_percent = 50,
        ),
        (
            "+1 DCGM_FR_NVLINK_CRC_ERROR_THRESHOLD 1",
            |readings| readings.nvlinks[1].crc_errors = Some(7 + 15 * 9),
            |limits| limits.nvlink_crc_per_second = 9,
        ),
    ];
    for (expected, edit, sets) in cases {
        for is_set in [false, true] {
            let mut bench = Bench::new(2);
            if is_set {
                sets(&mut bench.health.limits);
            }
            bench.poll();
            edit(&mut bench.readings[1]);
            let changes = bench.poll();
            assert_eq!(
                changes.iter().any(|it| it == expected),
                is_set,
                "{changes:?}"
            );
        }
    }
}
