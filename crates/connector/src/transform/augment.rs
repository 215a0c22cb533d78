//! `MetadataAugmentor`: writes labels and the provider id of the node to the event's metadata.

use contract::{HealthEvent, keys};
use model::node::NodeView;

use super::annotate;

/// Names of the node labels to copy into events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels(pub Vec<String>);

// === impl Labels ===

impl Default for Labels {
    /// Returns the labels that say where a node is, which the analysis groups nodes by.
    fn default() -> Self {
        let racks = keys::RACK_LABELS.into_iter();
        let labels = racks
            .chain(keys::NVLINK_DOMAIN_LABELS)
            .chain([keys::SPINE_LABEL, keys::ZONE_LABEL]);
        Self(labels.map(str::to_owned).collect())
    }
}

impl Labels {
    /// Writes the node's `spec.providerID` and its configured labels, replacing the sender's
    /// values. Returns the number of entries that exceed the event's limits.
    pub fn write(&self, event: &mut HealthEvent, node: &NodeView) -> usize {
        let provider = Some(&*node.provider_id).filter(|id| !id.is_empty());
        let labels = self.0.iter().filter_map(|key| {
            let value = node.labels.get(key)?;
            Some((key.as_str(), value.as_str()))
        });
        (provider.map(|id| (keys::META_PROVIDER_ID, id)).into_iter())
            .chain(labels)
            .filter(|(key, value)| !annotate(event, key, value))
            .count()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use model::event::MAX_METADATA;

    fn node(provider: &str) -> NodeView {
        NodeView::from_object(json!({
            "metadata": {"name": "n1", "labels": {
                "topology.kubernetes.io/zone": "z1",
                "network.topology.nvidia.com/leaf": "",
                "private": "p",
            }},
            "spec": {"providerID": provider},
        }))
        .unwrap()
    }

    fn labels(names: &[&str]) -> Labels {
        Labels(names.iter().map(|&name| name.to_owned()).collect())
    }

    fn pairs(event: &HealthEvent) -> Vec<(&str, &str)> {
        let pairs = event.metadata.iter();
        pairs.map(|(k, v)| (k.as_str(), v.as_str())).collect()
    }

    #[test]
    fn allowed_labels_and_the_providers_id_are_written() {
        let mut event = HealthEvent::default();
        event.metadata.insert("gpu_uuid".into(), "GPU-1".into());
        // The cluster's value replaces the sender's.
        let zone = "topology.kubernetes.io/zone";
        event.metadata.insert(zone.into(), "claimed".into());
        let labels = labels(&[zone, "network.topology.nvidia.com/leaf", "absent"]);
        assert_eq!(labels.write(&mut event, &node("aws:///z1/i-0")), 0);
        let expected = [
            ("gpu_uuid", "GPU-1"),
            ("network.topology.nvidia.com/leaf", ""),
            ("providerID", "aws:///z1/i-0"),
            (zone, "z1"),
        ];
        assert_eq!(pairs(&event), expected);
    }

    #[test]
    fn the_labels_of_the_topology_are_written_by_default() {
        let mut event = HealthEvent::default();
        Labels::default().write(&mut event, &node(""));
        let expected = [
            ("network.topology.nvidia.com/leaf", ""),
            ("topology.kubernetes.io/zone", "z1"),
        ];
        assert_eq!(pairs(&event), expected);
    }

    #[test]
    fn without_labels_only_the_providers_id_and_without_both_nothing() {
        let mut event = HealthEvent::default();
        labels(&[]).write(&mut event, &node(""));
        assert_eq!(pairs(&event), []);
        labels(&[]).write(&mut event, &node("gce://p/z/i"));
        assert_eq!(pairs(&event), [("providerID", "gce://p/z/i")]);
    }

    #[test]
    fn a_full_event_keeps_what_its_sender_said() {
        let mut event = HealthEvent::default();
        for index in 0..MAX_METADATA {
            event.metadata.insert(index.to_string(), String::new());
        }
        let full = event.clone();
        assert_eq!(labels(&["private"]).write(&mut event, &node("id")), 2);
        assert_eq!(event, full);
    }
}
