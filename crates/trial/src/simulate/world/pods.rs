//! Pods in the simulated cluster: their creation, watch, eviction and end.

use fleet::drain::{Checkpoint, PodView};
use fleet::{DeviceInput, FleetInput, PodUpdate};
use jiff::SignedDuration;
use model::ownership::Ownership;

use super::super::happening::{Known, NAMESPACES, Traits};
use super::super::node::{SimPod, name};
use super::super::rules::{device, uuid};
use super::World;

// === impl World ===

impl World {
    /// Starts or stops the watch of a node's pods.
    pub(super) fn follow(&mut self, name: &str, follow: bool) {
        let Some(index) = self.index(name) else {
            return;
        };
        if let Some(node) = self.nodes.get_mut(index) {
            node.followed = follow;
        }
        self.list_pods(index);
    }

    /// Lists the pods of a watched node again, or lets the list fail.
    fn list_pods(&mut self, index: usize) {
        let Some(node) = self.nodes.get(index) else {
            return;
        };
        if node.hidden {
            let why = "the API server is away".to_owned();
            if node.followed {
                let node = name(index);
                let update = PodUpdate::Failing(why);
                self.send(FleetInput::Pods { node, update });
            }
            return;
        }
        let pods: Vec<PodView> = node.pods.values().map(|pod| pod.view.clone()).collect();
        self.send_pod(index, PodUpdate::ListBegun);
        for pod in pods {
            self.send_pod(index, PodUpdate::Observed(Box::new(pod)));
        }
        self.send_pod(index, PodUpdate::Listed);
    }

    pub(super) fn send_pod(&mut self, index: usize, update: PodUpdate) {
        let node = self.nodes.get(index);
        if node.is_some_and(|node| node.followed && !node.hidden) {
            let node = name(index);
            self.send(FleetInput::Pods { node, update });
        }
    }

    pub(in crate::simulate) fn hide_pods(&mut self, index: usize, hidden: bool) {
        if let Some(node) = self.nodes.get_mut(index) {
            node.hidden = hidden;
        }
        self.list_pods(index);
    }

    /// Binds a pod to a schedulable node.
    pub(in crate::simulate) fn bind(&mut self, index: usize, namespace: usize, traits: Traits) {
        let (taints, gangs) = (self.setup.device_taints, self.setup.gangs);
        let Some(node) = self.nodes.get_mut(index) else {
            return;
        };
        if node.view.unschedulable || node.pods.len() >= 6 {
            return;
        }
        self.pods_made += 1;
        let gpu = traits.gpu.map(|(gpu, _)| uuid(index, gpu));
        let claim = match traits.gpu {
            Some((gpu, Known::Claimed)) if taints => Some(device(index, gpu)),
            _ => None,
        };
        let named = !matches!(traits.gpu, Some((_, Known::Unknown))) && claim.is_none();
        let gang = traits.gang.filter(|_| gangs);
        let checkpoint = traits.checkpoint.filter(|_| gangs);
        let namespace = NAMESPACES.get(namespace).copied().unwrap_or_default();
        let pod = SimPod {
            view: PodView {
                namespace: namespace.to_owned(),
                name: format!("p{}", self.pods_made),
                uid: format!("uid-{}", self.pods_made),
                has_gpus: gpu.is_some(),
                gpus: gpu.iter().filter(|_| named).cloned().collect(),
                gang: gang.map(|gang| format!("gang {gang}")),
                checkpoint: checkpoint.map(|minutes| Checkpoint {
                    takes: Some(SignedDuration::from_mins(minutes)).filter(|_| minutes > 0),
                    ..Checkpoint::default()
                }),
                ..PodView::default()
            },
            gpu,
            claim,
        };
        let view = pod.view.clone();
        let claim = pod.claim();
        node.pods.insert(view.title(), pod);
        if claim.is_some() {
            self.send_device(DeviceInput::Claim(view.title(), claim));
        }
        self.send_pod(index, PodUpdate::Observed(Box::new(view)));
    }

    /// Lets the agent of a node write the GPU of one of the pods on it, where nobody has said which
    /// it is. Returns false if there were none.
    pub(in crate::simulate) fn name_gpu(&mut self, which: usize) -> bool {
        let nodes = self.nodes.iter_mut().enumerate();
        let pods =
            nodes.flat_map(|(index, node)| node.pods.values_mut().map(move |pod| (index, pod)));
        let mut unknown: Vec<_> = pods.filter(|(_, pod)| !pod.is_known()).collect();
        let count = unknown.len().max(1);
        let Some((index, pod)) = unknown.get_mut(which % count) else {
            return false;
        };
        pod.view.gpus.extend(pod.gpu.clone());
        let (index, view) = (*index, pod.view.clone());
        self.send_pod(index, PodUpdate::Observed(Box::new(view)));
        true
    }

    /// Lets one of the pods that were asked for it write its checkpoint.
    pub(in crate::simulate) fn write_checkpoint(&mut self, which: usize) {
        let nodes = self.nodes.iter_mut().enumerate();
        let pods = nodes
            .flat_map(|(index, node)| node.pods.values_mut().map(move |pod| (index, pod)))
            .filter_map(|(index, pod)| {
                let asked = pod.view.checkpoint.filter(|one| one.requested > one.done)?;
                Some((index, asked.requested, &mut pod.view))
            });
        let mut pods: Vec<_> = pods.collect();
        let count = pods.len().max(1);
        let Some((index, requested, view)) = pods.get_mut(which % count) else {
            return;
        };
        if let Some(checkpoint) = &mut view.checkpoint {
            checkpoint.done = *requested;
        }
        let (index, view) = (*index, view.clone());
        self.send_pod(index, PodUpdate::Observed(Box::new(view)));
    }

    /// Ends one of the pods.
    pub(in crate::simulate) fn end_pod(&mut self, which: usize) {
        let pods = self.nodes.iter().enumerate();
        let pods = pods
            .flat_map(|(index, node)| node.pods.keys().map(move |title| (index, title.clone())));
        let pods: Vec<(usize, String)> = pods.collect();
        if let Some((index, title)) = pods.get(which % pods.len().max(1)) {
            self.pod_gone(*index, title);
        }
    }

    /// Ends all pods of a node that a drain concerns.
    pub(super) fn empty(&mut self, index: usize) {
        let pods = self.nodes.get(index).map(|node| &node.pods);
        let pods = pods.into_iter().flatten();
        let ends = pods.filter(|(_, pod)| pod.view.namespace != "kube-system");
        for title in ends.map(|(title, _)| title.clone()).collect::<Vec<_>>() {
            self.pod_gone(index, &title);
        }
    }

    pub(super) fn pod_gone(&mut self, index: usize, title: &str) {
        let pods = self.nodes.get_mut(index).map(|node| &mut node.pods);
        let pod = pods.and_then(|pods| pods.remove(title));
        if pod.is_some_and(|pod| pod.claim.is_some()) {
            self.send_device(DeviceInput::Claim(title.to_owned(), None));
        }
        self.send_pod(index, PodUpdate::Gone(title.to_owned()));
    }

    /// Ends pods that were evicted or that a drain waits for, once all GPUs are known. Returns false
    /// if there were none.
    pub(in crate::simulate) fn end_pods(&mut self) -> bool {
        let mut acted = false;
        while self.name_gpu(0) {
            acted = true;
        }
        let mut ended = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let own = Ownership::read(&node.view);
            let drain = own.and_then(|own| own.mark.drain);
            let drains = drain.is_some_and(|mark| mark.done.is_none());
            let ends = |pod: &&PodView| pod.ends_by.is_some() || drains && pod.namespace == "jobs";
            let pods = node.pods.values().map(|pod| &pod.view);
            let titles = pods.filter(ends).map(PodView::title);
            ended.extend(titles.map(|title| (index, title)));
        }
        for (index, title) in &ended {
            self.pod_gone(*index, title);
        }
        acted || !ended.is_empty()
    }
}
