//! Watches of the cluster that decisions need: nodes, single devices, the pods of drained nodes,
//! and custom resources.

use std::sync::Arc;

use cluster::{
    Cluster, DeviceApi, DeviceEvent, NodeEvent, PodWatches, ResourceEvent, ResourceKinds,
    ResourceWatches,
};
use fleet::{DeviceInput, DeviceWatch, FleetInput, PodUpdate, ResourceUpdate};
use model::attempt::ResourceKind;
use runtime::logging::chain;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// An event of a watch.
#[derive(Debug)]
pub(super) enum WatchEvent {
    Node(NodeEvent),
    Device(DeviceEvent),
    Pods(String, PodUpdate),
    Resource(ResourceEvent),
}

/// All watches; none without a cluster.
pub(super) struct Watches {
    nodes: Option<mpsc::Receiver<NodeEvent>>,
    devices: Option<mpsc::Receiver<DeviceEvent>>,
    /// True once a policy taints devices. Until then only leftover rules are watched.
    taints_devices: bool,
    /// Versions of the device API that the cluster serves, once the watch has found them.
    device_api: Option<Arc<DeviceApi>>,
    pods: Option<(PodWatches, mpsc::Receiver<(String, PodUpdate)>)>,
    resources: Option<(ResourceWatches, mpsc::Receiver<ResourceEvent>)>,
    /// Error of the watch of nodes, while it fails.
    failure: Option<String>,
    cancel: CancellationToken,
}

// === impl Watches ===

impl Watches {
    /// Returns an empty set of watches.
    pub(super) fn none() -> Self {
        Self {
            nodes: None,
            devices: None,
            taints_devices: false,
            device_api: None,
            pods: None,
            resources: None,
            failure: None,
            cancel: CancellationToken::new(),
        }
    }

    /// Starts the watch of nodes. The other watches start on demand.
    pub(super) fn start(
        cluster: &Arc<Cluster>,
        kinds: ResourceKinds,
        cancel: CancellationToken,
    ) -> Self {
        Self {
            nodes: Some(cluster.watch_nodes(cancel.clone())),
            pods: Some(PodWatches::new(cluster)),
            resources: Some(ResourceWatches::new(cluster, kinds)),
            cancel,
            ..Self::none()
        }
    }

    /// Waits for the next event. Returns `None` if a watch has ended, which happens only at the
    /// end of the process. Waits for ever without a cluster.
    pub(super) async fn next(&mut self) -> Option<WatchEvent> {
        let pods = self.pods.as_mut().map(|(_, events)| events);
        let resources = self.resources.as_mut().map(|(_, events)| events);
        tokio::select! {
            event = receive(self.nodes.as_mut()) => event.map(WatchEvent::Node),
            event = receive(self.devices.as_mut()) => event.map(WatchEvent::Device),
            event = receive(pods) => event.map(|(node, update)| WatchEvent::Pods(node, update)),
            event = receive(resources) => event.map(WatchEvent::Resource),
        }
    }

    /// Returns an event that has already arrived.
    pub(super) fn try_next(&mut self) -> Option<WatchEvent> {
        let pods = self.pods.as_mut().map(|(_, events)| events);
        let resources = self.resources.as_mut().map(|(_, events)| events);
        None.or_else(|| ready(self.nodes.as_mut()).map(WatchEvent::Node))
            .or_else(|| ready(self.devices.as_mut()).map(WatchEvent::Device))
            .or_else(|| ready(pods).map(|(node, update)| WatchEvent::Pods(node, update)))
            .or_else(|| ready(resources).map(WatchEvent::Resource))
    }

    /// Returns the input for the fleet that follows from an event, if any.
    pub(super) fn input(&mut self, event: WatchEvent) -> Option<FleetInput> {
        match event {
            WatchEvent::Node(event) => self.node_input(event),
            WatchEvent::Device(DeviceEvent::Served(api)) => {
                self.device_api = Some(Arc::from(api));
                None
            }
            WatchEvent::Device(DeviceEvent::News(input)) => Some(FleetInput::Devices(input)),
            WatchEvent::Pods(node, update) => Some(FleetInput::Pods { node, update }),
            WatchEvent::Resource((node, name, update)) => {
                Some(FleetInput::Resource { node, name, update })
            }
        }
    }

    fn node_input(&mut self, event: NodeEvent) -> Option<FleetInput> {
        match event {
            NodeEvent::Restarted => Some(FleetInput::ListBegun),
            NodeEvent::Applied(view) => Some(FleetInput::NodeObserved(view)),
            NodeEvent::Deleted(name) => Some(FleetInput::NodeGone(name)),
            NodeEvent::Listed => {
                self.failure = None;
                Some(FleetInput::Listed)
            }
            NodeEvent::Failing { error, .. } => {
                // Each failed try sends an event; an error is logged once until it changes.
                if self.failure.as_ref() != Some(&error) {
                    tracing::warn!(
                        err = error,
                        "the cluster's nodes cannot be watched; trying again"
                    );
                    self.failure = Some(error);
                }
                None
            }
            NodeEvent::Recovered => {
                tracing::info!("the cluster's nodes are watched again");
                self.failure = None;
                None
            }
        }
    }

    /// Returns the error of the watch of nodes; `None` if it works.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Returns the versions of the device API that the cluster serves, once known.
    pub(super) fn device_api(&self) -> Option<Arc<DeviceApi>> {
        self.device_api.clone()
    }

    /// Starts the watch of single devices under the first policy that taints any (`taints`).
    /// Under a policy that taints none, starts the watch of leftover rules if `writes`, to
    /// delete them.
    pub(super) fn watch_devices(
        &mut self,
        cluster: &Arc<Cluster>,
        taints: bool,
        writes: bool,
    ) -> Option<FleetInput> {
        if taints && !self.taints_devices {
            self.taints_devices = true;
            self.devices = Some(cluster.watch_devices(self.cancel.clone()));
            return Some(FleetInput::Devices(DeviceInput::Watch(
                DeviceWatch::Pending,
            )));
        }
        if !taints && self.devices.is_none() && writes {
            self.devices = Some(cluster.watch_leftover_rules(self.cancel.clone()));
        }
        None
    }

    /// Starts or stops the watch of a node's pods. Returns an input if the start fails.
    pub(super) fn watch_pods(&mut self, node: String, watch: bool) -> Option<FleetInput> {
        let (watches, _) = self.pods.as_mut()?;
        if !watch {
            watches.leave(&node);
            return None;
        }
        let why = chain(&watches.follow(&node, &self.cancel).err()?);
        tracing::warn!(
            node,
            err = why,
            "the pods of a node that is drained cannot be watched"
        );
        let update = PodUpdate::Failing(why);
        Some(FleetInput::Pods { node, update })
    }

    /// Starts or stops the watch of a custom resource. Returns an input if the start fails.
    pub(super) fn watch_resource(
        &mut self,
        node: String,
        kind: &ResourceKind,
        name: String,
        watch: bool,
    ) -> Option<FleetInput> {
        let (watches, _) = self.resources.as_mut()?;
        if !watch {
            watches.leave(&node, &name);
            return None;
        }
        let failed = watches.follow(&node, kind, &name, &self.cancel).err()?;
        let why = chain(&failed);
        tracing::warn!(node, name, err = why, "a custom resource cannot be watched");
        let update = ResourceUpdate::Failing(why);
        Some(FleetInput::Resource { node, name, update })
    }
}

/// Receives an event; waits for ever without a watch.
pub(super) async fn receive<T>(events: Option<&mut mpsc::Receiver<T>>) -> Option<T> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

fn ready<T>(events: Option<&mut mpsc::Receiver<T>>) -> Option<T> {
    events?.try_recv().ok()
}
