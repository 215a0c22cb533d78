//! Pods in the simulated cluster: their creation, watch, eviction and end.

use contract::keys;
use fleet::drain::PodView;
use fleet::{FleetInput, PodUpdate};

use super::super::happening::NAMESPACES;
use super::super::node::name;
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
                let news = PodUpdate::Failing(why);
                self.send(FleetInput::Pods { node, update: news });
            }
            return;
        }
        let pods: Vec<PodView> = node.pods.values().cloned().collect();
        self.send_pod(index, PodUpdate::ListBegun);
        for pod in pods {
            self.send_pod(index, PodUpdate::Observed(Box::new(pod)));
        }
        self.send_pod(index, PodUpdate::Listed);
    }

    pub(super) fn send_pod(&mut self, index: usize, news: PodUpdate) {
        let node = self.nodes.get(index);
        if node.is_some_and(|node| node.followed && !node.hidden) {
            let node = name(index);
            self.send(FleetInput::Pods { node, update: news });
        }
    }

    pub(in crate::simulate) fn hide_pods(&mut self, index: usize, hidden: bool) {
        if let Some(node) = self.nodes.get_mut(index) {
            node.hidden = hidden;
        }
        self.list_pods(index);
    }

    /// Binds a pod to a schedulable node.
    pub(in crate::simulate) fn bind(&mut self, index: usize, namespace: usize) {
        let Some(node) = self.nodes.get_mut(index) else {
            return;
        };
        if node.view.unschedulable || node.pods.len() >= 6 {
            return;
        }
        self.pods_made += 1;
        let pod = PodView {
            namespace: NAMESPACES
                .get(namespace)
                .copied()
                .unwrap_or_default()
                .to_owned(),
            name: format!("p{}", self.pods_made),
            uid: format!("uid-{}", self.pods_made),
            has_gpus: true,
            ..PodView::default()
        };
        node.pods
            .insert(format!("{}/{}", pod.namespace, pod.name), pod.clone());
        self.send_pod(index, PodUpdate::Observed(Box::new(pod)));
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

    pub(super) fn pod_gone(&mut self, index: usize, title: &str) {
        if let Some(node) = self.nodes.get_mut(index) {
            node.pods.remove(title);
        }
        self.send_pod(index, PodUpdate::Gone(title.to_owned()));
    }

    /// Ends pods that were evicted or that a drain waits for. Returns false if there were none.
    pub(in crate::simulate) fn end_pods(&mut self) -> bool {
        let mut ended = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let state = node.view.labels.get(keys::STATE_LABEL).map(String::as_str);
            let drains = state == Some(keys::STATE_DRAINING);
            let ends = |pod: &&PodView| pod.ends_by.is_some() || drains && pod.namespace == "jobs";
            let titles = node.pods.values().filter(ends).map(PodView::title);
            ended.extend(titles.map(|title| (index, title)));
        }
        for (index, title) in &ended {
            self.pod_gone(*index, title);
        }
        !ended.is_empty()
    }
}
