//! Job of a process, by its control group: the pod or the job of Slurm that the process belongs
//! to.
//!
//! ```text
//! /proc/1234/cgroup    0::/kubepods.slice/kubepods-pod4f2f9d1c_...slice/cri-containerd-9b1c.scope
//!                      0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0
//! /var/log/pods/ml_train_4f2f9d1c-.../    name of the pod with this UID
//! ```

use std::fs;
use std::io::Read as _;
use std::path::Path;

/// Directory where the kernel shows processes.
pub const PROC: &str = "/proc";
/// Directory where kubelets keep the logs of their pods, with a directory for each pod.
pub const POD_LOGS: &str = "/var/log/pods";
/// PID namespace of the kernel itself: `PROC_PID_INIT_INO` in Linux' `proc_ns.h`.
const INITIAL_NAMESPACE: &str = "pid:[4026531836]";
/// Longest description of a process's control groups that is read, in bytes. There is a path of
/// each hierarchy, at most 14.
const MAX_CGROUP_BYTES: u64 = 64 * 1024;
/// Most pods whose logs are searched. A kubelet runs 110 by default, and seldom 500.
const MAX_PODS: usize = 4096;

/// Job that a process belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessJob {
    /// Pod with this UID, as in Kubernetes' API, or as in the kubelet for a static pod.
    Pod(String),
    /// Job of Slurm with this number.
    Slurm(u32),
    /// Neither, or the control groups contradict each other.
    Unknown,
}

/// Name of a pod, as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name within the namespace.
    pub name: String,
}

/// Returns true if this process knows others by the numbers that the kernel logs, which are
/// those of the initial PID namespace. In a container, `proc` has other processes with the same
/// numbers.
pub fn has_pids_of_kernel(proc: &Path) -> bool {
    fs::read_link(proc.join("self/ns/pid"))
        .is_ok_and(|namespace| namespace == Path::new(INITIAL_NAMESPACE))
}

/// Returns the job of the process with this number in `proc`; `None` if the process has ended,
/// or cannot be seen.
pub fn of_process(proc: &Path, pid: u32) -> Option<ProcessJob> {
    let file = fs::File::open(proc.join(pid.to_string()).join("cgroup")).ok()?;
    let mut text = String::new();
    let length = file.take(MAX_CGROUP_BYTES).read_to_string(&mut text).ok()?;
    // The last path may be cut.
    ((length as u64) < MAX_CGROUP_BYTES).then(|| of_cgroups(&text))?
}

/// Returns the pod with this UID, by the directory of its logs; `None` if there is none.
pub fn pod_name(pod_logs: &Path, uid: &str) -> Option<PodName> {
    let mut entries = fs::read_dir(pod_logs).ok()?.take(MAX_PODS);
    entries.find_map(|entry| {
        let entry = entry.ok()?.file_name();
        let (rest, found) = entry.to_str()?.rsplit_once('_')?;
        let (namespace, name) = rest.split_once('_')?;
        (found == uid).then(|| PodName {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        })
    })
}

/// Returns the job that the text of `/proc/PID/cgroup` names; `None` if all paths are the root,
/// as for a process that has ended.
fn of_cgroups(text: &str) -> Option<ProcessJob> {
    // A line is `4:memory:/path`; a path may have colons too.
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let mut paths = paths.filter(|path| *path != "/").peekable();
    paths.peek()?;
    // With version 1 of control groups, Slurm uses some hierarchies only.
    let mut jobs = paths.filter_map(of_path);
    let job = jobs.next();
    let is_one = jobs.all(|other| Some(&other) == job.as_ref());
    Some(job.filter(|_| is_one).unwrap_or(ProcessJob::Unknown))
}

/// Returns the job that a path names. The outermost name counts: below it, the job itself may
/// have made groups, with any name. So may users below their slice.
fn of_path(path: &str) -> Option<ProcessJob> {
    let (mut above, mut parent) = ("", "");
    for name in path.split('/') {
        if name == "user.slice" {
            return None;
        }
        let job = pod(parent, name).or_else(|| slurm(above, parent, name));
        if job.is_some() {
            return job;
        }
        (above, parent) = (parent, name);
    }
    None
}

/// Returns the pod of a kubelet's group: `pod4f2f9d1c-...` below `kubepods`, or below one of its
/// classes of service; with systemd `kubepods-burstable-pod4f2f9d1c_....slice`.
fn pod(parent: &str, name: &str) -> Option<ProcessJob> {
    let is_ours = |class: &str| {
        class.ends_with("kubepods")
            || class.ends_with("kubepods-burstable")
            || class.ends_with("kubepods-besteffort")
    };
    let uid = match name.strip_prefix("pod") {
        Some(uid) if matches!(parent, "kubepods" | "burstable" | "besteffort") => uid.to_owned(),
        _ => {
            // containerd may add to the name of the slice: `....slice:cri-containerd:9b1c`.
            let (slice, _) = name.split_once(".slice")?;
            let (class, uid) = slice.rsplit_once("-pod")?;
            is_ours(class).then(|| uid.replace('_', "-"))?
        }
    };
    is_uid(&uid).then_some(ProcessJob::Pod(uid))
}

/// Returns the job of a group of Slurm: `slurmstepd.scope/job_42`, or `slurm/uid_1000/job_42`
/// with version 1 of control groups. Before the first or after the second of these words may
/// be the name of the node: `n1_slurmstepd.scope`, `slurm_n1`.
fn slurm(above: &str, parent: &str, name: &str) -> Option<ProcessJob> {
    let id = name.strip_prefix("job_")?;
    let is_step = parent == "slurmstepd.scope" || parent.ends_with("_slurmstepd.scope");
    let is_user = parent.starts_with("uid_") && (above == "slurm" || above.starts_with("slurm_"));
    let is_number = id.bytes().all(|byte| byte.is_ascii_digit());
    let id = id.parse().ok().filter(|_| is_number)?;
    (is_step || is_user).then_some(ProcessJob::Slurm(id))
}

/// Returns true for the UID of a pod: a UUID, or the hash of a static pod's manifest.
fn is_uid(text: &str) -> bool {
    let is_hash = text.len() == 32 && !text.contains('-');
    let mut dashes = text.match_indices('-').map(|(at, _)| at);
    let is_uuid = text.len() == 36 && dashes.by_ref().eq([8, 13, 18, 23]);
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-');
    (is_hash || is_uuid) && text.bytes().all(is_hex)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const UID: &str = "4f2f9d1c-7b1e-4c55-9a3e-0d6a2b1c9f10";
    const SLICE_UID: &str = "4f2f9d1c_7b1e_4c55_9a3e_0d6a2b1c9f10";
    const STATIC: &str = "0a1b2c3d4e5f60718293a4b5c6d7e8f9";

    fn pod_of(uid: &str) -> ProcessJob {
        ProcessJob::Pod(uid.to_owned())
    }

    #[test]
    fn the_groups_of_a_process_name_its_pod_or_its_job_of_slurm() {
        let (id, slice) = ("9b1c".repeat(16), SLICE_UID);
        for (text, expected) in [
            // Kubernetes with containerd, CRI-O and Docker; systemd as driver, version 2.
            (
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/\
                     cri-containerd-{id}.scope\n"
                ),
                pod_of(UID),
            ),
            (
                format!("0::/kubepods.slice/kubepods-pod{slice}.slice/crio-{id}.scope/container\n"),
                pod_of(UID),
            ),
            (
                format!(
                    "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{slice}.slice/\
                     docker-{id}.scope\n"
                ),
                pod_of(UID),
            ),
            // cgroupfs as driver, both versions.
            (format!("0::/kubepods/pod{UID}/{id}\n"), pod_of(UID)),
            (
                format!(
                    "12:cpuset:/kubepods/burstable/pod{UID}/{id}\n\
                     4:memory:/kubepods/burstable/pod{UID}/{id}\n\
                     1:name=systemd:/kubepods/burstable/pod{UID}/{id}\n0::/\n"
                ),
                pod_of(UID),
            ),
            // The two drivers mixed, as containerd does if its setting is wrong.
            (
                format!(
                    "11:devices:/system.slice/containerd.service/kubepods-burstable-pod{slice}.slice:\
                     cri-containerd:{id}\n"
                ),
                pod_of(UID),
            ),
            // kind, a static pod, and a path relative to another container's namespace.
            (
                format!(
                    "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/\
                     kubelet-kubepods-besteffort-pod{slice}.slice/cri-containerd-{id}.scope\n"
                ),
                pod_of(UID),
            ),
            (
                format!("0::/kubelet/kubepods/besteffort/pod{STATIC}/{id}\n"),
                pod_of(STATIC),
            ),
            (
                format!("0::/../../kubepods-pod{slice}.slice/cri-containerd-{id}.scope\n"),
                pod_of(UID),
            ),
            // A zombie whose group is gone.
            (
                format!("0::/kubepods.slice/kubepods-pod{slice}.slice/crio-{id}.scope (deleted)\n"),
                pod_of(UID),
            ),
            // Slurm, both versions, also with several daemons on a machine.
            (
                "0::/system.slice/slurmstepd.scope/job_1392969/step_0/user/task_0\n".to_owned(),
                ProcessJob::Slurm(1_392_969),
            ),
            (
                "0::/system.slice/n1_slurmstepd.scope/job_42/step_batch/user/task_special\n"
                    .to_owned(),
                ProcessJob::Slurm(42),
            ),
            (
                "10:devices:/slurm/uid_2101171/job_280678/step_interactive/task_0\n\
                 4:memory:/slurm/uid_2101171/job_280678/step_interactive\n\
                 1:name=systemd:/system.slice/slurmd.service\n"
                    .to_owned(),
                ProcessJob::Slurm(280_678),
            ),
            (
                "10:freezer:/slurm_n1/uid_1000/job_42/step_0\n".to_owned(),
                ProcessJob::Slurm(42),
            ),
            // Slurm in a pod: the pod, which the kubelet knows too.
            (
                format!(
                    "0::/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{id}.scope/\
                     system.slice/slurmstepd.scope/job_42/step_0\n"
                ),
                pod_of(UID),
            ),
        ] {
            assert_eq!(of_cgroups(&text), Some(expected), "{text}");
        }
    }

    #[test]
    fn other_groups_and_what_users_may_write_name_no_job() {
        let slice = SLICE_UID;
        for text in [
            "0::/init.scope\n".to_owned(),
            "0::/system.slice/docker-9b1c.scope\n".to_owned(),
            "0::/user.slice/user-1000.slice/session-3.scope\n".to_owned(),
            format!("0::/user.slice/user-1000.slice/user@1000.service/kubepods-pod{slice}.slice\n"),
            "0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_42\n".to_owned(),
            // Groups that contradict each other.
            format!("4:memory:/kubepods/pod{UID}/9b1c\n3:cpu:/kubepods/pod{STATIC}/9b1c\n"),
            format!("4:memory:/kubepods/pod{UID}/9b1c\n3:cpu:/slurm/uid_1/job_42\n"),
            // Almost.
            format!("0::/pod{UID}/9b1c\n"),
            format!("0::/machine.slice/machine-pod{slice}.slice\n"),
            format!("0::/kubepods/pod{}\n", UID.to_uppercase()),
            format!("0::/kubepods/pod{UID}0\n"),
            format!("0::/kubepods/pod{}\n", UID.replace('-', "/")),
            "0::/kubepods/pod4f2f9d1c-7b1e-4c55-9a3e0-d6a2b1c9f10\n".to_owned(),
            "0::/kubepods/pod../../etc\n".to_owned(),
            "0::/job_42/step_0\n".to_owned(),
            "0::/system.slice/slurmstepd.scope/job_+42\n".to_owned(),
            "0::/system.slice/slurmstepd.scope/job_99999999999\n".to_owned(),
            "0::/system.slice/slurmstepd.scope/job_\n".to_owned(),
            "0::/slurm/job_42\n".to_owned(),
            "0::relative\n".to_owned(),
        ] {
            assert_eq!(of_cgroups(&text), Some(ProcessJob::Unknown), "{text}");
        }
        // As of a process that has ended, or without a path.
        for text in ["12:cpuset:/\n4:memory:/\n", "0::/\n", "", "nonsense\n\n::"] {
            assert_ne!(of_cgroups(text), Some(pod_of(UID)), "{text}");
        }
        assert_eq!(of_cgroups("12:cpuset:/\n0::/\n"), None);
    }

    #[test]
    fn processes_are_read_by_number_and_those_that_ended_are_not_there() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: u32, text: &[u8]| {
            let directory = proc.path().join(pid.to_string());
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("cgroup"), text).unwrap();
        };
        process(7, format!("0::/kubepods/pod{UID}/9b1c\n").as_bytes());
        process(8, b"0::/kubepods/pod\xff\n");
        let long = format!("0::/kubepods/pod{UID}/{}\n", "x".repeat(64 * 1024));
        process(9, long.as_bytes());
        let jobs = [7, 8, 9, 10].map(|pid| of_process(proc.path(), pid));
        assert_eq!(jobs, [Some(pod_of(UID)), None, None, None]);
    }

    #[test]
    fn only_the_initial_namespace_has_the_numbers_of_the_kernel() {
        for (namespace, expected) in [
            (Some("pid:[4026531836]"), true),
            (Some("pid:[4026532301]"), false),
            (None, false),
        ] {
            let proc = tempfile::tempdir().unwrap();
            if let Some(namespace) = namespace {
                let directory = proc.path().join("self/ns");
                fs::create_dir_all(&directory).unwrap();
                symlink(namespace, directory.join("pid")).unwrap();
            }
            assert_eq!(has_pids_of_kernel(proc.path()), expected, "{namespace:?}");
        }
    }

    #[test]
    fn the_logs_of_a_pod_have_its_name() {
        let logs = tempfile::tempdir().unwrap();
        assert_eq!(pod_name(&logs.path().join("absent"), UID), None);
        for name in [
            format!("ml_train-0_{UID}"),
            format!("kube-system_etcd-n1_{STATIC}"),
            "notes".to_owned(),
            "a_b".to_owned(),
        ] {
            fs::create_dir(logs.path().join(name)).unwrap();
        }
        let named = |uid| pod_name(logs.path(), uid).map(|pod| (pod.namespace, pod.name));
        let pair = |namespace: &str, name: &str| Some((namespace.to_owned(), name.to_owned()));
        assert_eq!(named(UID), pair("ml", "train-0"));
        assert_eq!(named(STATIC), pair("kube-system", "etcd-n1"));
        for uid in ["b", "", "notes"] {
            assert_eq!(named(uid), None, "{uid}");
        }
    }
}
