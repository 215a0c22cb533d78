//! Tests from a line, with the files of the machine and a fake kubelet, to the job.

use std::fs;
use std::os::unix::fs::symlink;

use contract::pod_resources::PodResources;
use diagnosis::decode::KernelLogDecoder;
use diagnosis::gpu::{Gpu, MigDevice};
use jiff::Timestamp;

use super::*;
use crate::pods::fake::{Kubelet, pod};

const GPU: &str = "GPU-b850f46d-d5ea-c752-ddf3-c0fad5a2ec6b";
const UID: &str = "4f2f9d1c-7b1e-4c55-9a3e-0d6a2b1c9f10";
const POD: &str =
    "0::/kubepods.slice/kubepods-pod4f2f9d1c_7b1e_4c55_9a3e_0d6a2b1c9f10.slice/crio-9b1c.scope\n";
const SLURM: &str = "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n";

/// A machine with processes, and with a kubelet once [`Machine::serve`] was called.
struct Machine {
    dir: tempfile::TempDir,
    kubelet: Kubelet,
}

impl Machine {
    fn new() -> Self {
        let machine = Self {
            dir: tempfile::tempdir().unwrap(),
            kubelet: Kubelet::default(),
        };
        machine.namespace("pid:[4026531836]");
        machine.process(7, POD);
        machine.process(8, SLURM);
        machine.process(9, "0::/user.slice/user-1000.slice/session-3.scope\n");
        let logs = machine.dir.path().join("pods");
        fs::create_dir_all(logs.join(format!("train_llama-7x2kp_{UID}"))).unwrap();
        machine
    }

    fn namespace(&self, namespace: &str) {
        let directory = self.dir.path().join("proc/self/ns");
        fs::create_dir_all(&directory).unwrap();
        drop(fs::remove_file(directory.join("pid")));
        symlink(namespace, directory.join("pid")).unwrap();
    }

    fn process(&self, pid: u32, cgroup: &str) {
        let directory = self.dir.path().join("proc").join(pid.to_string());
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("cgroup"), cgroup).unwrap();
    }

    fn serve(&self, pods: Vec<PodResources>) {
        self.set_pods(pods);
        self.kubelet.serve(&self.dir.path().join("kubelet.sock"));
    }

    fn set_pods(&self, pods: Vec<PodResources>) {
        *self.kubelet.0.lock().unwrap() = pods;
    }

    fn jobs(&self) -> Jobs {
        let partition = |uuid: &str| MigDevice {
            uuid: uuid.to_owned(),
            ..MigDevice::default()
        };
        let inventory = Inventory {
            gpus: vec![Gpu {
                uuid: GPU.to_owned(),
                mig_devices: vec![partition("MIG-1"), partition("MIG-2")],
                ..Gpu::default()
            }],
            ..Inventory::default()
        };
        Jobs::new(JobSources {
            proc: self.dir.path().join("proc"),
            pod_logs: self.dir.path().join("pods"),
            kubelet: self.dir.path().join("kubelet.sock"),
            inventory: watch::channel(inventory).1,
        })
    }
}

/// Returns the finding in a line about [`GPU`].
fn finding(text: &str) -> Finding {
    let mut decoder = KernelLogDecoder::default();
    let name = format!("NVRM: GPU at PCI:0000:b3:00: {GPU}");
    decoder.record(name.as_bytes(), Timestamp::UNIX_EPOCH);
    let line = format!("NVRM: Xid (PCI:0000:b3:00): {text}");
    let mut found = decoder.record(line.as_bytes(), Timestamp::UNIX_EPOCH);
    found.remove(0)
}

fn of_process(pid: u32) -> Finding {
    finding(&format!(
        "31, pid={pid}, name=python, Ch 00000008, intr 10000000. MMU Fault"
    ))
}

/// Returns a pod of the namespace `train` with these devices of a plugin.
fn holder(name: &str, devices: &[&str]) -> PodResources {
    pod(name, &[("nvidia.com/gpu", devices)], &[])
}

/// Begins the next moment, in which nothing is known.
fn forget(jobs: &mut Jobs) {
    (jobs.until, jobs.kubelet_from) = (Instant::now(), Instant::now());
}

#[tokio::test]
async fn the_process_in_the_line_or_else_the_pod_that_has_the_gpu_gives_the_job() {
    let machine = Machine::new();
    let pods = vec![holder("served-0", &[GPU]), holder("other", &["GPU-2"])];
    machine.serve(pods);
    let text = finding;
    for (finding, expected) in [
        (of_process(7), Some("train/llama")),
        (of_process(8), Some("slurm 42")),
        // A process of the machine, beside the pod.
        (of_process(9), None),
        // The process has ended.
        (of_process(10), Some("train/served")),
        (
            text("45, pid='<unknown>', name=<unknown>, Ch 00000008"),
            Some("train/served"),
        ),
        (
            text("79, pid=0, name=, GPU has fallen off the bus."),
            Some("train/served"),
        ),
        (
            text("43, Ch 00000008, pid=8, name=python"),
            Some("slurm 42"),
        ),
        // The driver withdraws an XID.
        (
            text(
                "154, pid=7, name=python, GPU recovery action changed from 0x1 (GPU Reset \
                 Required) to 0x0 (None)",
            ),
            None,
        ),
    ] {
        let job = machine.jobs().of(&finding).await;
        assert_eq!(job.as_deref(), expected, "{finding:?}");
    }
    // A pod without logs.
    machine.process(7, &POD.replace("9f10", "9f11"));
    assert_eq!(machine.jobs().of(&of_process(7)).await, None);
}

#[tokio::test]
async fn in_a_container_the_number_of_a_process_says_nothing() {
    let machine = Machine::new();
    machine.namespace("pid:[4026532301]");
    assert_eq!(machine.jobs().of(&of_process(8)).await, None);
    // A controller gives the pod that replaces another one a new name; it is the same job.
    machine.serve(vec![]);
    for name in ["llama-7x2kp", "llama-zzzzz"] {
        machine.set_pods(vec![holder(name, &[GPU])]);
        let job = machine.jobs().of(&of_process(8)).await;
        assert_eq!(job.as_deref(), Some("train/llama"));
    }
}

#[tokio::test]
async fn a_gpu_that_is_not_one_pods_alone_has_no_job() {
    let machine = Machine::new();
    machine.serve(vec![]);
    let (shared, other) = (format!("{GPU}::0"), format!("{GPU}::1"));
    let claimed = || pod("claimed", &[], &[("gpu.nvidia.com", "gpu-0")]);
    for (pods, expected) in [
        (vec![holder("a", &["MIG-1", "MIG-2"])], Some("train/a")),
        (vec![holder("a", &[&shared, &other])], Some("train/a")),
        (vec![holder("a", &[GPU]), claimed()], Some("train/a")),
        (vec![holder("a", &["MIG-1"]), holder("b", &["MIG-2"])], None),
        (vec![holder("a", &[&shared]), holder("b", &[&other])], None),
        // The kubelet does not name the GPU of a claim.
        (vec![claimed()], None),
        (vec![holder("a", &["GPU-2"])], None),
        (vec![], None),
        // Names that Kubernetes would not take.
        (vec![holder("A b", &[GPU])], None),
        (vec![holder("../x", &[GPU])], None),
        (vec![holder(&"x".repeat(254), &[GPU])], None),
    ] {
        machine.set_pods(pods.clone());
        let job = machine.jobs().of(&of_process(10)).await;
        assert_eq!(job.as_deref(), expected, "{pods:?}");
    }
}

#[tokio::test]
async fn an_answer_counts_for_a_moment_and_a_kubelet_that_fails_is_left_alone_for_a_while() {
    let machine = Machine::new();
    let mut jobs = machine.jobs();
    // Without a kubelet.
    assert_eq!(jobs.of(&of_process(10)).await, None);
    machine.serve(vec![holder("a", &[GPU])]);
    jobs.until = Instant::now();
    assert_eq!(jobs.of(&of_process(10)).await, None, "too early");
    forget(&mut jobs);
    for pid in [10, 11] {
        assert_eq!(jobs.of(&of_process(pid)).await.as_deref(), Some("train/a"));
        machine.set_pods(vec![holder("b", &[GPU])]);
        // However slow the test is.
        jobs.until += 600 * MOMENT;
    }
    forget(&mut jobs);
    assert_eq!(jobs.of(&of_process(10)).await.as_deref(), Some("train/b"));
    // A storm that names one process after the other.
    jobs.until += 600 * MOMENT;
    for pid in 1_000..1_000 + 2 * MAX_ANSWERS {
        jobs.of(&of_process(u32::try_from(pid).unwrap())).await;
    }
    assert_eq!(jobs.answers.len(), MAX_ANSWERS);
    assert_eq!(jobs.of(&of_process(8)).await, None);
    forget(&mut jobs);
    assert_eq!(jobs.of(&of_process(8)).await.as_deref(), Some("slurm 42"));
    assert_eq!(jobs.answers.len(), 1);
}

#[test]
fn the_pods_of_a_job_have_the_name_of_the_job() {
    for (name, expected) in [
        ("train", "ml/train"),
        // A stateful set, a training operator, an indexed job, a job set, a replica set.
        ("train-0", "ml/train"),
        ("train-worker-13", "ml/train-worker"),
        ("train-7x2kp", "ml/train"),
        ("train-0-7x2kp", "ml/train"),
        ("train-nodes-0-15-7x2kp", "ml/train-nodes"),
        ("served-5d4f8c7b9d-7x2kp", "ml/served-5d4f8c7b9d"),
        ("a.b-7x2kp", "ml/a.b"),
        // Letters and digits, or a length, that such ends never have.
        ("train-batch", "ml/train-batch"),
        ("nightly-29384720-7x2kp", "ml/nightly-29384720"),
        ("train-10213", "ml/train-10213"),
        ("train-7x2k", "ml/train-7x2k"),
        ("train-7x2kpp", "ml/train-7x2kpp"),
        ("7x2kp", "ml/7x2kp"),
        ("70", "ml/70"),
        ("70-7", "ml/70"),
    ] {
        assert_eq!(of_pod("ml", name).as_deref(), Some(expected));
    }
    for (namespace, name) in [
        ("", "a"),
        ("ml", ""),
        ("a.b", "c"),
        ("ml", "-7x2kp"),
        ("ml", "a/b"),
    ] {
        assert_eq!(of_pod(namespace, name), None, "{namespace} {name}");
    }
}
