//! Built-in rules that compare.

use contract::keys;
use model::event::EventRecord;

use super::super::analyzer::{analyzer, feed, record, xid};
use super::super::built_in::concludes;

/// Returns an XID of a GPU in an NVLink domain of 18 nodes with four GPUs each.
fn in_domain(second: i64, gpu: i64, code: &str) -> EventRecord {
    let mut event = xid(second, code, &format!("GPU-{gpu}")).event;
    event.node_name = format!("n{}", gpu / 4);
    let domain = ("nvidia.com/gpu.clique".to_owned(), "c1.0".to_owned());
    event.metadata.extend([domain]);
    record(second, event)
}

/// Returns the rules that conclude something about a GPU, with the GPU.
fn about_gpus(events: &[EventRecord]) -> Vec<(String, String)> {
    let mut analyzer = analyzer();
    feed(&mut analyzer, events);
    let last = events.iter().map(|it| it.created_at).max().unwrap();
    analyzer.time(last + jiff::SignedDuration::from_mins(10));
    let sayings = analyzer.to_say(last, 999).into_iter();
    let about = sayings.map(|one| {
        let gpu = one.event.entities_impacted.first();
        let gpu = gpu.map(|gpu| gpu.entity_value.clone());
        (one.event.check_name, gpu.unwrap_or_default())
    });
    about.filter(|(rule, _)| rule.ends_with("GPU")).collect()
}

#[test]
fn the_silent_gpu_among_71_noisy_ones() {
    let named = |gpu: i64| {
        let mut event = in_domain(0, gpu, "").event;
        event.check_name = keys::CHECK_GPU_INVENTORY.to_owned();
        (event.is_healthy, event.error_code) = (true, Vec::new());
        model::reporter::Reporter::Monitor.note_in(&mut event);
        record(0, event)
    };
    let crash = |silent: i64| {
        let others = (0..72).filter(move |gpu| *gpu != silent);
        others.map(|gpu| in_domain(100 + gpu, gpu, "45"))
    };
    let of = |silent| (0..72).map(named).chain(crash(silent)).collect::<Vec<_>>();
    let silent = |gpu: &str| vec![("SilentGPU".to_owned(), gpu.to_owned())];
    assert_eq!(about_gpus(&of(41)), silent("GPU-41"));
    assert_eq!(about_gpus(&of(72)), [], "all report");
    // A job of the domain's other nodes only says nothing about the GPUs of this one.
    let mut half = of(41);
    half.retain(|one| one.event.is_healthy || one.event.node_name != "n10");
    assert_eq!(about_gpus(&half), []);
    let few: Vec<EventRecord> = (0..16).map(named).chain(crash(15).take(15)).collect();
    assert_eq!(about_gpus(&few), []);
}

#[test]
fn the_gpu_with_far_more_xids_than_its_nvlink_domain() {
    let siblings = |code: &'static str| (0..9).map(move |gpu| in_domain(gpu, gpu, code));
    let noisy =
        |times: i64, code: &'static str| (0..times).map(move |n| in_domain(60 * n, 9, code));
    let found =
        |times, code| about_gpus(&siblings(code).chain(noisy(times, code)).collect::<Vec<_>>());
    let expected = ("NoisyGPU".to_owned(), "GPU-9".to_owned());
    assert!(found(20, "145").contains(&expected));
    assert!(!found(19, "145").contains(&expected));
    assert!(
        !found(20, "45").contains(&expected),
        "applications cause it"
    );
    let alone: Vec<EventRecord> = noisy(20, "145").collect();
    assert!(
        !about_gpus(&alone).contains(&expected),
        "there is nothing to compare with"
    );
}

#[test]
fn three_jobs_that_fail_on_one_gpu_only() {
    let of = |hour: i64, gpu: &str, job: &str| {
        let mut event = xid(hour * 3600, "43", gpu).event;
        let job = (keys::META_JOB.to_owned(), job.to_owned());
        event.metadata.extend([job]);
        record(hour * 3600, event)
    };
    let rule = "RepeatedApplicationXID";
    let jobs = [
        of(0, "GPU-1", "a"),
        of(5, "GPU-1", "b"),
        of(9, "GPU-1", "c"),
    ];
    concludes(&jobs, &[rule]);
    concludes(&jobs[1..], &[]);
    concludes(&[&jobs[..2], &[of(9, "GPU-1", "b")]].concat(), &[]);
    concludes(&[&jobs[..2], &[of(25, "GPU-1", "c")]].concat(), &[]);
    concludes(&[&jobs[..], &[of(6, "GPU-2", "b")]].concat(), &[]);
    let mut other_code = of(9, "GPU-1", "c").event;
    other_code.error_code = vec!["48".to_owned()];
    concludes(&[&jobs[..2], &[record(9 * 3600, other_code)]].concat(), &[]);
}
