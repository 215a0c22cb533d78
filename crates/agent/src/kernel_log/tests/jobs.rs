//! Tests of the job on an event.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;

fn jobs(events: &[HealthEvent]) -> Vec<Option<&str>> {
    let jobs = events.iter().map(|event| {
        let job = event.metadata.get(keys::META_JOB);
        job.map(String::as_str)
    });
    jobs.collect()
}

/// Sees a process of Slurm's job 42 with the number 1, as the lines of the tests name it.
fn run_job(bench: &Bench) {
    let proc = bench.dir.path().join("proc");
    fs::create_dir_all(proc.join("self/ns")).unwrap();
    symlink("pid:[4026531836]", proc.join("self/ns/pid")).unwrap();
    fs::create_dir_all(proc.join("1")).unwrap();
    let cgroup = "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n";
    fs::write(proc.join("1/cgroup"), cgroup).unwrap();
}

#[tokio::test]
async fn a_new_line_has_its_job_and_read_again_without_it_is_the_same_event() {
    let mut bench = Bench::new();
    run_job(&bench);
    // Written before the start: the process may be another one by now.
    bench.append(&xid(31, 1));
    let running = bench.start();
    running.following().await;
    bench.stored_at_least(1).await;
    let early = fs::read(bench.state()).unwrap();
    bench.append(&xid(31, 2));
    bench.append("mlx5_core 0000:9a:00.0: Port module event: module 0, Cable unplugged");
    bench.stored_at_least(3).await;
    running.end().await;
    let expected = [None, Some("slurm 42"), None];
    let events = bench.stored().await;
    assert_eq!(jobs(&events), expected);
    // The lines are read again, and no longer new.
    fs::write(bench.state(), early).unwrap();
    bench.append(&xid(31, 3));
    let events = bench.run_until(4).await;
    assert_eq!(jobs(&events), [&expected[..], &[None]].concat());
}

#[tokio::test]
async fn what_a_line_ends_has_no_job() {
    let mut bench = Bench::new();
    run_job(&bench);
    bench.append("[1.0] usb 1-1: new device");
    let running = bench.start();
    running.following().await;
    bench.append("NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.");
    bench.append(XID_79);
    bench.stored_at_least(3).await;
    running.end().await;
    let events = bench.stored().await;
    let healthy: Vec<bool> = events.iter().map(|event| event.is_healthy).collect();
    assert_eq!(healthy, [false, false, true]);
    assert_eq!(jobs(&events), [None, Some("slurm 42"), None]);
}
