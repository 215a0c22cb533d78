//! Finds the job that runs on a GPU when a line about that GPU arrives: an error of an
//! application comes from the job, and follows it from GPU to GPU.
//!
//! The process that the line names is in the control group of its job, which this process sees
//! outside of containers only. If it does not, or the line names no process, or that process
//! has ended, the kubelet lists which pod has the GPU. Both ways give equal names. A job that is
//! not certain is left out, so an answer of the kubelet that is late or odd costs the job only.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use contract::names;
use contract::node::PodGpus;
use diagnosis::decode::Finding;
use diagnosis::gpu::Inventory;
use host::job::ProcessJob;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::pods::{gpus_of, list_pods};

/// Time for which an answer is used again: a broken GPU prints thousands of lines in a second.
const MOMENT: Duration = Duration::from_secs(1);
/// Most answers in that time. A machine has some 16 GPUs; more processes than this get no job.
const MAX_ANSWERS: usize = 128;
/// Timeout of a request to the kubelet, for which the log is not read.
const DEADLINE: Duration = Duration::from_secs(2);
/// Time without a request after one that failed.
const PAUSE: Duration = Duration::from_secs(30);
/// Characters of the random end of a pod's name (`k8s.io/apimachinery/pkg/util/rand`).
const RANDOM: &str = "bcdfghjklmnpqrstvwxz2456789";
/// Length of the random end, without the dash before it.
const RANDOM_BYTES: usize = 5;
/// Most digits of the number of a pod within its job. Longer numbers are times, as in the names
/// of a `CronJob`, or ids.
const MAX_DIGITS: usize = 4;

/// Places where the jobs of GPUs are found. Each may be missing.
#[derive(Clone, Debug)]
pub struct JobSources {
    /// Directory of processes: [`host::job::PROC`].
    pub proc: PathBuf,
    /// Directory of the logs of pods: [`host::job::POD_LOGS`].
    pub pod_logs: PathBuf,
    /// Socket of the kubelet.
    pub kubelet: PathBuf,
    /// GPUs of this machine, to find the GPU of a partition.
    pub inventory: watch::Receiver<Inventory>,
}

/// Finds jobs, and keeps the answers for a moment.
#[derive(Debug)]
pub(super) struct Jobs {
    sources: JobSources,
    /// True if this process sees the processes that the kernel logs, by the same numbers.
    sees_processes: bool,
    /// Answers of this moment, by process and GPU.
    answers: BTreeMap<(Option<u32>, Option<String>), Option<String>>,
    /// Pods with GPUs, if the kubelet listed them in this moment.
    pods: Option<Vec<PodGpus>>,
    /// End of the moment.
    until: Instant,
    /// Time of the next request to the kubelet.
    kubelet_from: Instant,
}

// === impl Jobs ===

impl Jobs {
    pub(super) fn new(sources: JobSources) -> Self {
        Self {
            sees_processes: host::job::has_pids_of_kernel(&sources.proc),
            sources,
            answers: BTreeMap::new(),
            pods: None,
            until: Instant::now(),
            kubelet_from: Instant::now(),
        }
    }

    /// Returns the job of a finding whose line was written just now, as in
    /// [`keys::META_JOB`](contract::keys::META_JOB). A recovery has none.
    pub(super) async fn of(&mut self, finding: &Finding) -> Option<String> {
        let (pid, gpu) = (finding.pid, &finding.gpu_uuid);
        if finding.healthy || (pid.is_none() && gpu.is_none()) {
            return None;
        }
        if Instant::now() >= self.until {
            self.until = Instant::now() + MOMENT;
            self.answers.clear();
            self.pods = None;
        }
        let asked = (pid, gpu.clone());
        if let Some(answer) = self.answers.get(&asked) {
            return answer.clone();
        }
        if self.answers.len() >= MAX_ANSWERS {
            return None;
        }
        let answer = self.find(pid, gpu.as_deref()).await;
        self.answers.insert(asked, answer.clone());
        answer
    }

    async fn find(&mut self, pid: Option<u32>, gpu: Option<&str>) -> Option<String> {
        let pid = pid.filter(|_| self.sees_processes);
        match pid.and_then(|pid| host::job::of_process(&self.sources.proc, pid)) {
            Some(ProcessJob::Slurm(id)) => Some(format!("slurm {id}")),
            Some(ProcessJob::Pod(uid)) => {
                let pod = host::job::pod_name(&self.sources.pod_logs, &uid)?;
                of_pod(&pod.namespace, &pod.name)
            }
            // A process of the machine itself, beside the pod that has the GPU.
            Some(ProcessJob::Unknown) => None,
            None => self.of_gpu(gpu?).await,
        }
    }

    /// Returns the job of the only pod that has a GPU.
    async fn of_gpu(&mut self, gpu: &str) -> Option<String> {
        if self.pods.is_none() && Instant::now() >= self.kubelet_from {
            self.pods = self.list_pods().await;
            if self.pods.is_none() {
                self.kubelet_from = Instant::now() + PAUSE;
            }
        }
        let has_gpu = |pod: &&PodGpus| {
            let mut resources = pod.resources.iter();
            resources.any(|resource| resource.gpus.iter().any(|one| one == gpu))
        };
        let mut pods = self.pods.iter().flatten().filter(has_gpu);
        let (pod, other) = (pods.next()?, pods.next());
        match other {
            None => of_pod(&pod.namespace, &pod.name),
            Some(_) => None,
        }
    }

    async fn list_pods(&self) -> Option<Vec<PodGpus>> {
        let answer = list_pods(&self.sources.kubelet, DEADLINE).await;
        // The reporter of pods' GPUs logs what is wrong with the kubelet.
        let pods = answer.ok()?.pod_resources;
        let inventory = self.sources.inventory.borrow();
        Some(
            pods.iter()
                .filter_map(|pod| gpus_of(pod, &inventory))
                .collect(),
        )
    }
}

/// Returns the job of a pod; `None` if Kubernetes would not take its names.
///
/// An agent may not ask Kubernetes for the owner of a pod, so the name of the pod has to do: that
/// of the owner, followed by a number, a random end, or both. Such an end is left out, because
/// another pod of the same job may have the GPU after a failure. Two jobs whose names differ by
/// such an end count as one, which can hide a fault of the GPU and never invents one.
fn of_pod(namespace: &str, name: &str) -> Option<String> {
    names::dns_label(namespace).ok()?;
    names::object_name(name).ok()?;
    let is_random =
        |end: &str| end.len() == RANDOM_BYTES && end.chars().all(|one| RANDOM.contains(one));
    let is_number =
        |end: &str| end.len() <= MAX_DIGITS && end.bytes().all(|byte| byte.is_ascii_digit());
    let mut job = without_end(name, is_random).unwrap_or(name);
    while let Some(rest) = without_end(job, is_number) {
        job = rest;
    }
    Some(format!("{namespace}/{job}"))
}

/// Returns a name without its last part and the dash before it, if `is_end` is true for the part.
fn without_end(name: &str, is_end: impl Fn(&str) -> bool) -> Option<&str> {
    let (rest, end) = name.rsplit_once('-')?;
    is_end(end).then_some(rest)
}

#[cfg(test)]
mod tests;
