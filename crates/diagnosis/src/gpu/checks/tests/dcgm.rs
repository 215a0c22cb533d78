//! Tests of DCGM beside the driver, and alone.

use super::*;
use crate::gpu::dcgm::{DcgmEntity, DcgmGpu, DcgmIncident, DcgmLook, ImexUse};

const MEMORY: u32 = 0x10;
const NVLINK: u32 = 0x2;
const REMAP_FAILED: u32 = 80;
const REMAP_PENDING: u32 = 85;
const LINK_DOWN: u32 = 14;

fn incident(gpu: u32, system: u32, code: u32) -> DcgmIncident {
    DcgmIncident {
        system,
        health: 20,
        code,
        message: format!("text of {code}"),
        entity: DcgmEntity {
            group: DcgmEntity::GPU,
            id: gpu,
        },
    }
}

impl Bench {
    fn look_of(&self, incidents: &[DcgmIncident]) -> DcgmLook {
        let gpus = self.inventory.gpus.iter().map(|gpu| DcgmGpu {
            id: gpu.index,
            index: Some(gpu.index),
            uuid: Some(gpu.uuid.clone()),
            pci: Some(gpu.pci.clone()),
        });
        DcgmLook {
            version: None,
            gpus: gpus.collect(),
            switches: vec![0, 1],
            incidents: incidents.to_vec(),
            is_whole: true,
        }
    }

    fn takes(&mut self, look: &DcgmLook) -> Vec<ProblemChange> {
        self.now += EVERY;
        self.health.take_dcgm(look, self.now)
    }

    /// Has DCGM report these incidents once, and returns the changes in short.
    fn dcgm(&mut self, incidents: &[DcgmIncident]) -> Vec<String> {
        let look = self.look_of(incidents);
        self.takes(&look).iter().map(short).collect()
    }

    /// Has DCGM report these incidents for two minutes, and returns all changes.
    fn dcgm_for_long(&mut self, incidents: &[DcgmIncident]) -> Vec<String> {
        (0..8).flat_map(|_| self.dcgm(incidents)).collect()
    }
}

#[test]
fn each_code_of_each_gpu_comes_at_once_and_goes_by_itself_when_it_is_calm() {
    let mut bench = Bench::new(2);
    assert_eq!(bench.dcgm(&[]), [""; 0]);
    let failed = incident(1, MEMORY, REMAP_FAILED);
    let both = [failed.clone(), incident(1, MEMORY, REMAP_PENDING)];
    assert_eq!(
        bench.dcgm(&both),
        [
            "+1 DCGM_FR_PENDING_ROW_REMAP",
            "+1 DCGM_FR_ROW_REMAP_FAILURE"
        ]
    );
    assert_eq!(bench.dcgm_for_long(&both), [""; 0]);
    let one = [failed];
    // Four samples of 15 seconds.
    for _ in 0..4 {
        assert_eq!(bench.dcgm(&one), [""; 0]);
    }
    let look = bench.look_of(&one);
    let over = bench.takes(&look);
    assert_eq!(short(&over[0]), "-1 DCGM_FR_PENDING_ROW_REMAP");
    assert!(!over[0].is_all_well);
    let over = bench.dcgm_for_long(&[]);
    assert_eq!(over, ["-1 DCGM_FR_ROW_REMAP_FAILURE"]);
}

#[test]
fn what_both_see_is_one_problem_until_neither_sees_it() {
    for nvml_first in [true, false] {
        let mut bench = Bench::new(2);
        bench.poll();
        let incidents = [incident(1, MEMORY, REMAP_FAILED)];
        let came = "+1 DCGM_FR_ROW_REMAP_FAILURE";
        let fails = |bench: &mut Bench, fails| bench.readings[1].remap_failed = Some(fails);
        if nvml_first {
            fails(&mut bench, true);
            assert_eq!(bench.poll(), [came]);
            let look = bench.look_of(&incidents);
            let joined = bench.takes(&look);
            assert_eq!(short(&joined[0]), came);
            let both = Witnesses {
                nvml: true,
                dcgm: true,
            };
            assert_eq!(joined[0].seen_by, both);
            assert_eq!(bench.dcgm_for_long(&[]), [""; 0]);
            fails(&mut bench, false);
            assert_eq!(bench.poll(), ["-1 DCGM_FR_ROW_REMAP_FAILURE"]);
        } else {
            assert_eq!(bench.dcgm(&incidents), [came]);
            fails(&mut bench, true);
            assert_eq!(bench.poll(), [came]);
            fails(&mut bench, false);
            assert_eq!(bench.poll(), [""; 0]);
            bench.restart();
            assert_eq!(bench.dcgm(&incidents), [""; 0]);
            let over = bench.dcgm_for_long(&[]);
            assert_eq!(over, ["-1 DCGM_FR_ROW_REMAP_FAILURE"]);
        }
    }
}

#[test]
fn the_links_that_the_driver_names_stand_for_what_dcgm_says_of_their_gpu() {
    let mut bench = Bench::new(2);
    bench.poll();
    let down = [incident(1, NVLINK, LINK_DOWN)];
    bench.readings[1].nvlinks[0].up = Some(false);
    let mut came = bench.poll_for(75);
    // The driver's link is reported once more, with a second source.
    came.extend(bench.dcgm_for_long(&down));
    assert_eq!(
        came,
        ["+1 DCGM_FR_NVLINK_DOWN 0", "+1 DCGM_FR_NVLINK_DOWN 0"]
    );
    bench.readings[1].nvlinks[0].up = Some(true);
    assert_eq!(bench.poll(), ["-1 DCGM_FR_NVLINK_DOWN 0"]);
    // DCGM alone still reports the problem, and then the link is down again.
    assert_eq!(bench.dcgm(&down), ["+1 DCGM_FR_NVLINK_DOWN"]);
    bench.readings[1].nvlinks[0].up = Some(false);
    assert_eq!(bench.poll_for(75), ["+1 DCGM_FR_NVLINK_DOWN 0"]);
    // The end of DCGM's problem would close the link's too.
    assert_eq!(bench.dcgm_for_long(&[]), [""; 0]);
    bench.readings[1].nvlinks[0].up = Some(true);
    assert_eq!(bench.poll(), ["-1 DCGM_FR_NVLINK_DOWN 0"]);
    assert_eq!(bench.dcgm(&[]), ["-1 DCGM_FR_NVLINK_DOWN"]);
}

#[test]
fn links_that_were_never_up_are_not_down_because_dcgm_says_so() {
    let down = [incident(1, NVLINK, LINK_DOWN)];
    let mut bench = Bench::new(2);
    for readings in &mut bench.readings {
        for link in &mut readings.nvlinks {
            link.up = Some(false);
        }
    }
    bench.poll();
    assert_eq!(bench.dcgm_for_long(&down), [""; 0]);
    // Without the driver, DCGM's report counts.
    let mut alone = Bench::new(2);
    assert_eq!(alone.dcgm(&down), ["+1 DCGM_FR_NVLINK_DOWN"]);
}

#[test]
fn what_is_not_looked_at_is_not_over() {
    let mut bench = Bench::new(2);
    assert_eq!(bench.dcgm(&[incident(1, MEMORY, REMAP_FAILED)]).len(), 1);
    let mut without = bench.look_of(&[]);
    without.gpus.pop();
    let mut full = bench.look_of(&[]);
    full.is_whole = false;
    for look in [without, full] {
        for _ in 0..8 {
            assert_eq!(bench.takes(&look), []);
        }
    }
    // A connection that is lost and restored before the calm period ends proves nothing.
    for _ in 0..8 {
        assert_eq!(bench.dcgm(&[]), [""; 0]);
        bench.health.dcgm_is_away();
    }
    assert_eq!(bench.dcgm_for_long(&[]), ["-1 DCGM_FR_ROW_REMAP_FAILURE"]);
}

#[test]
fn switches_other_parts_and_codes_without_a_name_are_kept_apart() {
    let mut bench = Bench::new(1);
    let part = |group, id, code| DcgmIncident {
        entity: DcgmEntity { group, id },
        ..incident(0, 0x800, code)
    };
    let look = bench.look_of(&[
        part(DcgmEntity::SWITCH, 0, 15),
        part(DcgmEntity::SWITCH, 1, 15),
        part(DcgmEntity::GPU, 9, 15),
        part(6, 3, 999),
    ]);
    let changes = bench.takes(&look);
    let shown: Vec<_> = changes.iter().map(|it| (it.switch, short(it))).collect();
    assert_eq!(
        shown,
        [
            (None, "+node DCGM_FR_NVSWITCH_FATAL_ERROR".to_owned()),
            (Some(0), "+node DCGM_FR_NVSWITCH_FATAL_ERROR".to_owned()),
            (Some(1), "+node DCGM_FR_NVSWITCH_FATAL_ERROR".to_owned()),
            (None, "+node DCGM_FR_UNKNOWN".to_owned()),
        ]
    );
    let message = |at: usize| changes[at].message.clone().unwrap();
    assert_eq!(message(0), "entity 9 of kind 1 of DCGM: text of 15");
    assert_eq!(
        message(3),
        "entity 3 of kind 6 of DCGM: code 999 of DCGM: text of 999"
    );
    let look = bench.look_of(&[]);
    let over: Vec<ProblemChange> = (0..8).flat_map(|_| bench.takes(&look)).collect();
    assert_eq!(over.len(), 4);
}

/// A healthy event without a GPU and code would close all faults of the check.
#[test]
fn the_end_of_what_is_about_no_gpu_is_not_that_of_a_gpus_problem() {
    let mut bench = Bench::new(2);
    let of_none = DcgmIncident {
        entity: DcgmEntity { group: 6, id: 3 },
        ..incident(0, MEMORY, REMAP_PENDING)
    };
    let failed = incident(1, MEMORY, REMAP_FAILED);
    assert_eq!(bench.dcgm(&[failed.clone(), of_none]).len(), 2);
    let look = bench.look_of(&[failed]);
    let over: Vec<ProblemChange> = (0..8).flat_map(|_| bench.takes(&look)).collect();
    assert_eq!(over.len(), 1);
    assert!(over[0].gpu.is_none() && !over[0].is_all_well, "{over:?}");
    let over = bench.dcgm_for_long(&[]);
    assert_eq!(over, ["-1 DCGM_FR_ROW_REMAP_FAILURE"]);
}

/// The reports of DCGM 4.6 and of DCGM 4.7.
#[test]
fn imex_is_judged_while_pods_rely_on_it_and_at_its_end_nobody_says_that_it_is_well() {
    const CAME: &str = "+node DCGM_FR_IMEX_UNHEALTHY";
    for watch in [NVLINK, 0x2000] {
        let mut bench = Bench::new(2);
        let broken = [DcgmIncident {
            entity: DcgmEntity::default(),
            ..incident(0, watch, 122)
        }];
        let imex_is = |bench: &mut Bench, imex| bench.health.imex_is(imex);
        assert_eq!(bench.dcgm_for_long(&broken), [""; 0]);
        assert_eq!(imex_is(&mut bench, ImexUse::Unused), []);
        assert_eq!(bench.dcgm_for_long(&broken), [""; 0]);
        assert_eq!(imex_is(&mut bench, ImexUse::Used), []);
        let look = bench.look_of(&broken);
        let came = bench.takes(&look);
        assert_eq!(came.iter().map(short).collect::<Vec<_>>(), [CAME]);
        assert_eq!(came[0].check, "GpuImexWatch");
        assert_eq!(came[0].message.as_deref(), Some("text of 122"));
        // DCGM reports that IMEX is healthy.
        assert_eq!(bench.dcgm_for_long(&[]), ["-node DCGM_FR_IMEX_UNHEALTHY"]);
        assert_eq!(bench.dcgm(&broken), [CAME]);
        // After a restart nothing closes before it is known that no pod relies on IMEX.
        bench.restart();
        assert_eq!(bench.dcgm_for_long(&broken), [""; 0]);
        assert_eq!(bench.dcgm_for_long(&[]), [""; 0]);
        let over = imex_is(&mut bench, ImexUse::Unused);
        assert_eq!(
            over.iter().map(short).collect::<Vec<_>>(),
            ["-node DCGM_FR_IMEX_UNHEALTHY"]
        );
        assert!(over[0].is_unjudged && !over[0].is_all_well);
        assert_eq!(bench.dcgm_for_long(&broken), [""; 0]);
        // The problem opens again when the next pod relies on IMEX.
        imex_is(&mut bench, ImexUse::Used);
        assert_eq!(bench.dcgm(&broken), [CAME]);
    }
}

#[test]
fn a_gpu_that_was_replaced_takes_along_what_dcgm_said_of_it() {
    let mut bench = Bench::new(2);
    bench.poll();
    assert_eq!(bench.dcgm(&[incident(1, MEMORY, REMAP_FAILED)]).len(), 1);
    bench.inventory.gpus[1].uuid = "GPU-new".to_owned();
    bench.readings[1].uuid = "GPU-new".to_owned();
    assert_eq!(bench.poll(), ["-1 DCGM_FR_ROW_REMAP_FAILURE"]);
}

#[test]
fn without_the_driver_the_names_are_those_of_dcgm() {
    let mut bench = Bench::new(2);
    let look = bench.look_of(&[incident(1, MEMORY, REMAP_FAILED)]);
    let changes = bench.takes(&look);
    let names = changes[0].gpu.clone().unwrap();
    assert_eq!(names.uuid.as_deref(), Some("GPU-1"));
    assert_eq!(names.pci.as_deref(), Some("0000:01:00.0"));
    let only = Witnesses {
        nvml: false,
        dcgm: true,
    };
    assert_eq!(changes[0].seen_by, only);
    let codes = bench.health.forget_dcgm();
    assert_eq!(codes, ["DCGM_FR_ROW_REMAP_FAILURE"]);
    assert_eq!(bench.dcgm_for_long(&[]), [""; 0]);
}
