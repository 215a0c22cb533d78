//! Pods of DCGM and of drivers: the parts that labels depend on, and the version of DCGM that a
//! pod tells.

use serde::Deserialize;

/// Purpose of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodRole {
    /// Runs DCGM.
    Dcgm,
    /// Installs the driver, for the GPU Operator.
    Driver,
    /// Installs the driver, on GKE.
    Installer,
}

/// Major version of DCGM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DcgmVersion {
    /// The label's value is `3.x`. NVSentinel no longer runs a monitor for it.
    V3,
    /// The label's value is `4.x`.
    V4,
}

/// The parts of a pod that labels depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Node that the pod is bound to.
    pub node: String,
    /// True if the pod is ready.
    pub ready: bool,
    /// Version of DCGM that the pod tells.
    pub version: Option<DcgmVersion>,
}

/// A pod as the API server sends it, with the fields that are read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodObject {
    metadata: Metadata,
    spec: Spec,
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Metadata {
    name: String,
    namespace: String,
    labels: Labels,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Labels {
    #[serde(rename = "app.kubernetes.io/version")]
    version: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    node_name: String,
    containers: Vec<Container>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Container {
    image: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    conditions: Vec<Condition>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

// === impl PodRole ===

impl PodRole {
    /// All roles.
    pub const ALL: [Self; 3] = [Self::Dcgm, Self::Driver, Self::Installer];
}

// === impl DcgmVersion ===

impl DcgmVersion {
    /// Returns the value of the label.
    pub fn label(self) -> &'static str {
        match self {
            Self::V3 => "3.x",
            Self::V4 => "4.x",
        }
    }

    /// Returns the version with this value of the label.
    pub fn from_label(value: &str) -> Option<Self> {
        let all = [Self::V3, Self::V4];
        all.into_iter().find(|one| one.label() == value)
    }

    /// Reads a version such as `4.5.2-1-ubuntu22.04` or `v3.3.9`.
    fn read(text: &str) -> Option<Self> {
        match text.trim_start_matches('v').split_once('.')?.0 {
            "3" => Some(Self::V3),
            "4" => Some(Self::V4),
            _ => None,
        }
    }
}

// === impl PodObject ===

impl PodObject {
    /// Returns `NAMESPACE/NAME` of the pod.
    pub fn title(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    /// Returns the parts that labels depend on; `None` for a pod that is not bound to a node.
    pub fn pod(&self) -> Option<Pod> {
        if self.spec.node_name.is_empty() {
            return None;
        }
        let ready = |one: &Condition| one.kind == "Ready" && one.status == "True";
        Some(Pod {
            node: self.spec.node_name.clone(),
            ready: self.status.conditions.iter().any(ready),
            version: self.version(),
        })
    }

    /// Returns the version of DCGM from the tag of the image `dcgm`, else of one with `dcgm` in
    /// its name, else from the label `app.kubernetes.io/version`.
    fn version(&self) -> Option<DcgmVersion> {
        let tagged = |is_dcgm: fn(&str) -> bool| {
            let images = self.spec.containers.iter();
            images
                .filter_map(|one| tag(&one.image))
                .filter(|(name, _)| is_dcgm(name))
                .find_map(|(_, tag)| DcgmVersion::read(tag))
        };
        let label = self.metadata.labels.version.as_deref();
        tagged(|name| name == "dcgm")
            .or_else(|| tagged(|name| name.contains("dcgm")))
            .or_else(|| label.and_then(DcgmVersion::read))
    }
}

/// Returns the last part of an image's name and its tag; `None` without a tag, such as for an
/// image that is named by a digest alone.
fn tag(image: &str) -> Option<(&str, &str)> {
    let named = image.split_once('@').map_or(image, |(named, _)| named);
    let last = named.rsplit_once('/').map_or(named, |(_, last)| last);
    last.split_once(':')
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const VERSION_LABEL: &str = "app.kubernetes.io/version";

    fn version(images: &[&str], label: Option<&str>) -> Option<DcgmVersion> {
        let containers: Vec<Value> = images.iter().map(|image| json!({"image": image})).collect();
        let mut object = json!({
            "metadata": {"namespace": "gpu-operator", "name": "p", "labels": {"app": "a"}},
            "spec": {"nodeName": "n", "containers": containers},
        });
        if let Some(label) = label {
            object["metadata"]["labels"][VERSION_LABEL] = json!(label);
        }
        let object: PodObject = serde_json::from_value(object).unwrap();
        assert_eq!(object.title(), "gpu-operator/p");
        object.pod().unwrap().version
    }

    #[test]
    fn an_image_without_a_version_in_its_tag_falls_back_to_other_names_and_the_label() {
        let digest = "registry:5000/nvidia/dcgm@sha256:1234";
        let (v3, v4) = (Some(DcgmVersion::V3), Some(DcgmVersion::V4));
        for (images, label, expected) in [
            (
                &["nvcr.io/nvidia/cloud-native/dcgm:4.5.2-1-ubuntu22.04"][..],
                None,
                v4,
            ),
            (&["nvcr.io/nvidia/cloud-native/dcgm:3.3.9-1-ubi9"], None, v3),
            (&["mirror:5000/dcgm:4.4.1@sha256:12"], None, v4),
            (&["mirror/our-dcgm-host:v4.1"], None, v4),
            // The image `dcgm` counts before another one, and an image before the label.
            (&["dcgm-exporter:3.1", "dcgm:4.1"], Some("3.0"), v4),
            (&["sidecar:3.1.0", digest], Some("4.5.2"), v4),
            (&["dcgm:latest"], Some("v3.3.9"), v3),
            // Neither the port of a registry nor a version of other software is one of DCGM.
            (&[digest], None, None),
            (&["sidecar:4.1"], Some("v26.7.2"), None),
            (&["dcgm:latest"], Some("45.1"), None),
            (&["dcgm:4"], None, None),
            (&[], None, None),
        ] {
            assert_eq!(version(images, label), expected, "{images:?} {label:?}");
        }
    }

    #[test]
    fn a_pod_without_a_node_is_none_and_one_without_conditions_is_not_ready() {
        let object: PodObject = serde_json::from_value(json!({"metadata": {}})).unwrap();
        assert_eq!(object.pod(), None);
        for (status, ready) in [
            (json!({}), false),
            (
                json!({"conditions": [{"type": "Ready", "status": "False"}]}),
                false,
            ),
            (
                json!({"conditions": [{"type": "Initialized", "status": "True"}]}),
                false,
            ),
            (
                json!({"conditions": [{"type": "Ready", "status": "True"}]}),
                true,
            ),
        ] {
            let object = json!({"spec": {"nodeName": "n"}, "status": status});
            let object: PodObject = serde_json::from_value(object).unwrap();
            assert_eq!(object.pod().unwrap().ready, ready, "{object:?}");
        }
    }
}
