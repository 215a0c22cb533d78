//! Identity of an instance, and of the instance that a node is.
//!
//! Kubernetes has the provider id of a node: `aws:///eu-west-1a/i-0abc`, `gce://project/zone/name`, or
//! the OCID of OCI. GKE has the number of the instance in an annotation too. Clouds name an instance
//! by one of these, or by several.

use model::node::NodeView;

/// GKE: annotation with the number of the instance.
const GKE_NUMBER: &str = "container.googleapis.com/instance_id";
/// Label with the zone of a node.
const ZONE: &str = "topology.kubernetes.io/zone";

/// An instance, by all names that a cloud gave. Names of clouds never equal those of another cloud.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instance {
    /// Names, the best one first.
    names: Vec<String>,
}

// === impl Instance ===

impl Instance {
    /// Returns the instance of AWS with this id, such as `i-0abc`.
    pub fn aws(id: &str) -> Self {
        Self {
            names: vec![aws(id)],
        }
    }

    /// Returns the instance of GCP with these names: `project`, `zone` and `name`, and the `number`
    /// that the API calls `id`. Parts that are not known are empty. A number is never used again, unlike a
    /// name, so it is looked up first.
    pub fn gcp(project: &str, zone: &str, name: &str, number: &str) -> Self {
        let mut names = Vec::new();
        if !zone.is_empty() && !number.is_empty() {
            names.push(gcp_number(zone, number));
        }
        if !project.is_empty() && !zone.is_empty() && !name.is_empty() {
            names.push(gcp_name(project, zone, name));
        }
        Self { names }
    }

    /// Returns the instance of OCI with this OCID.
    pub fn oci(ocid: &str) -> Self {
        Self {
            names: vec![oci(ocid)],
        }
    }

    /// Returns the names, in the order in which a node is to be looked up.
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

/// Returns the names of the instance that a node is; none if its provider id is of another cloud.
pub fn names_of(node: &NodeView) -> Vec<String> {
    let id = &*node.provider_id;
    if let Some(path) = id.strip_prefix("aws://") {
        // The last part; EKS writes `aws:///ZONE/ID`, others `aws://REGION/ID`.
        let id = path.rsplit('/').next().unwrap_or_default();
        return Some(id)
            .filter(|id| !id.is_empty())
            .map(aws)
            .into_iter()
            .collect();
    }
    if let Some(path) = id.strip_prefix("gce://") {
        let parts: Vec<&str> = path.split('/').collect();
        let [project, zone, name] = parts[..] else {
            return Vec::new();
        };
        let number = node.annotations.get(GKE_NUMBER).filter(|id| !id.is_empty());
        let labelled = node.labels.get(ZONE).map_or(zone, String::as_str);
        let number = number.map(|number| gcp_number(labelled, number));
        return number
            .into_iter()
            .chain([gcp_name(project, zone, name)])
            .collect();
    }
    // OKE writes the OCID alone; other installations may write `oci://OCID`.
    let ocid = id.strip_prefix("oci://").unwrap_or(id);
    let is_ocid = ocid.starts_with("ocid1.instance.");
    is_ocid.then(|| oci(ocid)).into_iter().collect()
}

fn aws(id: &str) -> String {
    format!("aws/{id}")
}

fn gcp_number(zone: &str, number: &str) -> String {
    format!("gcp/{zone}/{number}")
}

fn gcp_name(project: &str, zone: &str, name: &str) -> String {
    format!("gcp/{project}/{zone}/{name}")
}

fn oci(ocid: &str) -> String {
    format!("oci/{ocid}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(provider_id: &str) -> NodeView {
        let mut node = NodeView::unknown("n");
        node.provider_id = provider_id.into();
        node
    }

    #[test]
    fn a_node_has_the_names_that_its_cloud_uses() {
        let names = |provider_id: &str| names_of(&node(provider_id));
        assert_eq!(
            names("aws:///eu-west-1a/i-0abc"),
            Instance::aws("i-0abc").names()
        );
        assert_eq!(
            names("aws://eu-west-1/i-0abc"),
            Instance::aws("i-0abc").names()
        );
        assert_eq!(
            names("gce://p/z/n"),
            Instance::gcp("p", "z", "n", "").names()
        );
        for ocid in ["ocid1.instance.oc1.x.y", "oci://ocid1.instance.oc1.x.y"] {
            assert_eq!(names(ocid), Instance::oci("ocid1.instance.oc1.x.y").names());
        }
        for other in [
            "",
            "aws://",
            "gce://p/z",
            "kind://docker/a/b",
            "azure:///x",
            "ocid1.volume.x",
        ] {
            assert!(names(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn an_instance_of_gcp_is_found_by_number_before_name() {
        let mut gke = node("gce://p/z/n");
        gke.annotations
            .insert(GKE_NUMBER.to_owned(), "17".to_owned());
        let whole = Instance::gcp("p", "z", "n", "17");
        assert_eq!(names_of(&gke), whole.names());
        assert_eq!(whole.names(), ["gcp/z/17", "gcp/p/z/n"]);
        assert_eq!(Instance::gcp("", "z", "", "17").names(), ["gcp/z/17"]);
        gke.labels.insert(ZONE.to_owned(), "z2".to_owned());
        assert_eq!(names_of(&gke)[0], "gcp/z2/17");
    }
}
