//! The pods of the cluster: bound, told of, asked to end, and gone.

use contract::keys;
use fleet::drain::PodView;
use fleet::{FleetInput, PodNews};

use super::super::happening::NAMESPACES;
use super::super::node::name;
use super::World;

// === impl World ===

impl World {
    /// Begins to tell of the pods of a node, or ends it.
    pub(super) fn follow(&mut self, name: &str, follow: bool) {
        let Some(index) = self.index(name) else {
            return;
        };
        if let Some(node) = self.nodes.get_mut(index) {
            node.followed = follow;
        }
        self.list_pods(index);
    }

    /// Has the pods of a node told of anew, or that they cannot be.
    fn list_pods(&mut self, index: usize) {
        let Some(node) = self.nodes.get(index) else {
            return;
        };
        if node.unseen {
            let why = "the API server is away".to_owned();
            if node.followed {
                let node = name(index);
                let news = PodNews::Failing(why);
                self.take(FleetInput::Pods { node, news });
            }
            return;
        }
        let pods: Vec<PodView> = node.pods.values().cloned().collect();
        self.tell_of_pod(index, PodNews::ListBegun);
        for pod in pods {
            self.tell_of_pod(index, PodNews::Seen(Box::new(pod)));
        }
        self.tell_of_pod(index, PodNews::Listed);
    }

    pub(super) fn tell_of_pod(&mut self, index: usize, news: PodNews) {
        let node = self.nodes.get(index);
        if node.is_some_and(|node| node.followed && !node.unseen) {
            let node = name(index);
            self.take(FleetInput::Pods { node, news });
        }
    }

    pub(in crate::simulate) fn see_pods(&mut self, index: usize, unseen: bool) {
        if let Some(node) = self.nodes.get_mut(index) {
            node.unseen = unseen;
        }
        self.list_pods(index);
    }

    /// Binds a pod to a node that takes pods.
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
        self.tell_of_pod(index, PodNews::Seen(Box::new(pod)));
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
        self.tell_of_pod(index, PodNews::Gone(title.to_owned()));
    }

    /// Ends pods that were asked to, and those that are waited for. Returns whether there was one.
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
