//! Admission of maintenance requests: refuses, with an immediate error for the creator, what
//! could never be carried out. The janitor itself handles invalid requests that reach it in
//! other ways.

use contract::keys;
use serde_json::Value;

use crate::gpu_reset::ResetGpus;
use crate::{Maintenance, MaintenanceResource};

/// A request under admission.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest<'a> {
    /// Kind of the request.
    pub kind: Maintenance,
    /// Object of the request.
    pub object: &'a Value,
    /// Previous state of the object, for updates.
    pub before: Option<&'a Value>,
}

/// Node of a request under admission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestedNode<'a> {
    /// A new request for this node, which has to exist.
    Node(&'a str),
    /// An update, which is checked only for immutable fields.
    Changed,
}

// === impl AdmissionRequest ===

impl<'a> AdmissionRequest<'a> {
    /// Returns the node of the request. The error is the reason for its refusal.
    pub fn node(&self) -> Result<RequestedNode<'a>, String> {
        let field = self.kind.node_field();
        let name = field.trim_start_matches('/').replace('/', ".");
        let text = |object: &'a Value| object.pointer(field).and_then(Value::as_str);
        let Some(before) = self.before else {
            let node = text(self.object).filter(|node| !node.is_empty());
            let node = node.ok_or_else(|| format!("{name} is required: the name of a node"))?;
            return Ok(RequestedNode::Node(node));
        };
        if text(before) != text(self.object) {
            return Err(format!("{name} cannot be changed; make another request"));
        }
        if self.kind == Maintenance::Reset
            && ResetGpus::in_spec(spec(before)) != ResetGpus::in_spec(spec(self.object))
        {
            return Err("spec.selector cannot be changed; make another request".to_owned());
        }
        Ok(RequestedNode::Changed)
    }

    /// Returns the reason for a refusal. `None` if the request is admitted. `others` are the
    /// existing requests of its kind.
    pub fn refusal(&self, node: &str, node_exists: bool, others: &[Value]) -> Option<String> {
        if !node_exists {
            return Some(format!("there is no node {node}"));
        }
        // Requests created for our own sessions are resolved by the janitor: a refused one
        // would be created again and again.
        let annotations = self.object.pointer("/metadata/annotations");
        if annotations.is_some_and(|all| all.get(keys::ATTEMPT).is_some()) {
            return None;
        }
        let gpus = ResetGpus::in_spec(spec(self.object));
        let others = others
            .iter()
            .filter_map(|other| MaintenanceResource::read(self.kind, other).ok());
        let mut open = others.filter(|other| other.node == node && !other.is_over());
        let is_same = |other: &MaintenanceResource| {
            self.kind != Maintenance::Reset || gpus.overlap(&ResetGpus::of(other))
        };
        let other = open.find(is_same)?;
        let (kind, name) = (self.kind.name(), &other.name);
        let what = match self.kind {
            Maintenance::Reset => "GPUs of the node",
            Maintenance::Reboot | Maintenance::Terminate | Maintenance::HandOver => "the node",
        };
        Some(format!(
            "the {kind} {name} asks for {what} {node} already, and has not ended; wait for its end, or delete it"
        ))
    }
}

fn spec(object: &Value) -> &Value {
    object.get("spec").unwrap_or(&Value::Null)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request(name: &str, node: &str) -> Value {
        json!({"metadata": {"name": name, "uid": name}, "spec": {"nodeName": node}})
    }

    fn refused(kind: Maintenance, object: &Value, others: &[Value]) -> Option<String> {
        let request = AdmissionRequest {
            kind,
            object,
            before: None,
        };
        request.refusal("n", true, others)
    }

    #[test]
    fn a_request_names_a_node_and_keeps_to_it() {
        for (kind, field) in [
            (Maintenance::Reboot, "spec.nodeName"),
            (Maintenance::HandOver, "spec.healthEvent.nodeName"),
        ] {
            for object in [
                json!({}),
                json!({"spec": {"nodeName": "", "healthEvent": {}}}),
            ] {
                let request = AdmissionRequest {
                    kind,
                    object: &object,
                    before: None,
                };
                let why = request.node().expect_err("it names none");
                assert_eq!(why, format!("{field} is required: the name of a node"));
            }
        }
        let (one, other) = (request("a", "n"), request("a", "m"));
        let of = |kind, object, before| AdmissionRequest {
            kind,
            object,
            before,
        };
        let new = of(Maintenance::Reboot, &one, None);
        assert_eq!(new.node(), Ok(RequestedNode::Node("n")));
        let kept = of(Maintenance::Terminate, &one, Some(&one));
        assert_eq!(kept.node(), Ok(RequestedNode::Changed));
        let moved = of(Maintenance::Terminate, &other, Some(&one));
        let why = moved.node().expect_err("it is another node");
        assert!(why.starts_with("spec.nodeName cannot be changed"), "{why}");
        let mut narrower = one.clone();
        narrower["spec"]["selector"] = json!({"uuids": ["GPU-1"]});
        let why = of(Maintenance::Reset, &narrower, Some(&one)).node();
        assert!(why.is_err(), "{why:?}");
    }

    #[test]
    fn of_two_requests_for_a_node_the_second_is_refused_until_the_first_has_ended() {
        let kind = Maintenance::Reboot;
        let second = request("b", "n");
        let why = refused(kind, &second, &[request("a", "n")]).expect("one is there");
        assert!(
            why.starts_with("the RebootNode a asks for the node n already"),
            "{why}"
        );
        assert_eq!(refused(kind, &second, &[request("a", "other")]), None);
        let mut ended = request("a", "n");
        ended["status"] = json!({"completionTime": "2026-01-01T00:00:00Z"});
        assert_eq!(refused(kind, &second, &[ended]), None);
        let mut going = request("a", "n");
        going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        assert_eq!(refused(kind, &second, &[going]), None);
        // The janitor resolves conflicts of requests from our sessions.
        let mut ours = second.clone();
        ours["metadata"]["annotations"] = json!({keys::ATTEMPT: "x"});
        assert_eq!(refused(kind, &ours, &[request("a", "n")]), None);
        let request = AdmissionRequest {
            kind,
            object: &second,
            before: None,
        };
        let why = request.refusal("n", false, &[]);
        assert_eq!(why.as_deref(), Some("there is no node n"));
    }

    #[test]
    fn resets_of_other_gpus_of_a_node_are_not_the_same() {
        let of = |name: &str, uuids: &[&str], pci: &[&str]| {
            let mut reset = request(name, "n");
            reset["spec"]["selector"] = json!({"uuids": uuids, "pciBusIDs": pci});
            reset
        };
        let kind = Maintenance::Reset;
        let all = request("all", "n");
        for (one, other, is_refused) in [
            (of("b", &["GPU-1"], &[]), of("a", &["GPU-2"], &[]), false),
            (
                of("b", &["GPU-1"], &[]),
                of("a", &["GPU-2", "GPU-1"], &[]),
                true,
            ),
            (
                of("b", &[], &["0000:1:0.0"]),
                of("a", &[], &["0000:1:0.0"]),
                true,
            ),
            (all.clone(), of("a", &["GPU-2"], &[]), true),
            (of("b", &["GPU-1"], &[]), all, true),
        ] {
            let why = refused(kind, &one, std::slice::from_ref(&other));
            assert_eq!(why.is_some(), is_refused, "{one} {other}: {why:?}");
        }
    }
}
