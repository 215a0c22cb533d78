//! A drain by another program, requested by a custom resource: NVSentinel's `customDrain`. A
//! scheduler with jobs of its own, such as Slurm, drains its nodes itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::findings::Findings;
use contract::{Entity, HealthEvent, names};
use jiff::SignedDuration;
use model::attempt::ResourceKind;
use model::selector::LabelSelector;
use serde::Deserialize;
use serde_json::{Value, json};

use policy::template::{DrainVariables, Template};

/// Default time after which a person is asked about a resource that has not ended.
const TIMEOUT: SignedDuration = SignedDuration::from_hours(1);
/// Longest time that can be configured.
const LONGEST_TIMEOUT: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Label that NVSentinel gives the custom resource.
const NODE_LABEL: &str = "nvsentinel.nvidia.com/node-name";

/// Names of pods by their namespace.
pub type PodsToDrain = BTreeMap<String, Vec<String>>;

/// A drain by a custom resource.
#[derive(Clone, Debug)]
pub struct CustomDrain {
    /// Kind of the custom resource; its condition says that the drain is done.
    pub resource: ResourceKind,
    /// Time after which a person is asked about a resource that has not ended.
    pub timeout: SignedDuration,
    /// Status of the condition once the drain is done.
    status: String,
    /// Nodes that are drained this way; `None` for all.
    nodes: Option<LabelSelector>,
    template: Arc<Template>,
}

/// Keys of the table.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[derive(Default)]
pub(super) struct CustomDrainFile {
    pub(super) enabled: bool,
    template_mount_path: String,
    template_file_name: String,
    namespace: String,
    api_group: String,
    version: String,
    kind: String,
    status_condition_type: String,
    status_condition_status: String,
    timeout: Option<Number>,
    pub(super) node_selector: Option<NodeSelector>,
    /// Keys of NVSentinel's chart: the origin of the template file, and the plural of the kind,
    /// which is read from the API server.
    #[serde(rename = "templateConfigMapName")]
    _template_config_map_name: Option<String>,
    #[serde(rename = "resource")]
    _resource: Option<String>,
}

/// A number of seconds, which NVSentinel writes as text.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number of seconds, such as \"60\"")]
pub(super) enum Number {
    Number(i64),
    Text(String),
}

/// Labels of nodes, in either form of Kubernetes.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected labels, such as { pool = \"gpu\" } or \"pool=gpu\""
)]
pub(super) enum NodeSelector {
    Labels(BTreeMap<String, String>),
    Text(String),
}

/// Parses the table, which is switched on.
pub(super) fn read(
    file: CustomDrainFile,
    findings: &mut Findings<'_>,
    read: impl Fn(&str) -> Result<String, String>,
) -> Option<CustomDrain> {
    let mut sound = true;
    for (key, value) in [
        ("templateMountPath", &file.template_mount_path),
        ("templateFileName", &file.template_file_name),
        ("namespace", &file.namespace),
        ("apiGroup", &file.api_group),
        ("version", &file.version),
        ("kind", &file.kind),
        ("statusConditionType", &file.status_condition_type),
        ("statusConditionStatus", &file.status_condition_status),
    ] {
        if value.is_empty() {
            sound = false;
            findings.at_key(&format!("customDrain.{key}"), "it is empty");
        }
    }
    if sound {
        findings.check("customDrain.namespace", names::dns_label(&file.namespace));
        findings.check("customDrain.apiGroup", names::object_name(&file.api_group));
    }
    let timeout = match &file.timeout {
        Some(value) => timeout(value),
        None => Some(TIMEOUT),
    };
    if timeout.is_none() {
        let days = LONGEST_TIMEOUT.as_hours() / 24;
        let wanted = format!("write seconds, or a duration such as \"30m\", {days} days at most");
        findings.refuse("customDrain.timeout", wanted);
    }
    let nodes = file.node_selector.as_ref().map(|value| {
        let selector = match value {
            NodeSelector::Text(text) => text.parse(),
            NodeSelector::Labels(labels) => LabelSelector::of_labels(labels),
        };
        findings
            .check("customDrain.nodeSelector", selector)
            .ok_or(())
    });
    let nodes = nodes.transpose().ok();
    if !sound {
        return None;
    }
    let path = format!(
        "{}/{}",
        file.template_mount_path.trim_end_matches('/'),
        file.template_file_name
    );
    let template = match read(&path) {
        Ok(text) => Template::parse_drain(&text).map_err(|error| format!("{path}:{error}")),
        Err(error) => Err(format!("the template {path} cannot be read: {error}")),
    };
    let template = findings.check("customDrain.templateFileName", template);
    let custom = CustomDrain {
        resource: ResourceKind {
            group: file.api_group,
            version: file.version,
            kind: file.kind,
            namespace: Some(file.namespace),
            condition: file.status_condition_type,
        },
        timeout: timeout?,
        status: file.status_condition_status,
        nodes: nodes?,
        template: Arc::new(template?),
    };
    let tried = custom
        .try_out()
        .map_err(|what| format!("the template {path}: {what}"));
    findings.check("customDrain.templateFileName", tried)?;
    Some(custom)
}

/// Parses a time: seconds, as NVSentinel has it, or a duration, as its chart writes it. 0 stands
/// for the default, as in NVSentinel.
fn timeout(value: &Number) -> Option<SignedDuration> {
    let timeout = match (value.seconds(), value) {
        (Some(seconds), _) => SignedDuration::from_secs(seconds),
        (None, Number::Text(text)) => text.trim().parse().ok()?,
        (None, Number::Number(_)) => return None,
    };
    if timeout.is_zero() {
        return Some(TIMEOUT);
    }
    (timeout.is_positive() && timeout <= LONGEST_TIMEOUT).then_some(timeout)
}

// === impl Number ===

impl Number {
    /// Returns the number; `None` for any other text.
    pub(super) fn seconds(&self) -> Option<i64> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Text(text) => text.trim().parse().ok(),
        }
    }
}

// === impl CustomDrain ===

impl CustomDrain {
    /// Returns whether a node with these labels is drained this way.
    pub fn applies_to(&self, labels: &BTreeMap<String, String>) -> bool {
        let nodes = self.nodes.as_ref();
        nodes.is_none_or(|nodes| nodes.matches(labels))
    }

    /// Returns the name of the custom resource for a node and the event of its session.
    pub fn name(node: &str, event: &str) -> String {
        format!("drain-{node}-{event}")
    }

    /// Returns the custom resource that requests the drain of a node, for the event of this id.
    pub fn render(
        &self,
        node: &str,
        event: &HealthEvent,
        id: &str,
        pods: &PodsToDrain,
    ) -> Result<Value, String> {
        let kind = &self.resource;
        let text = self.template.render_drain(&DrainVariables {
            event,
            id,
            pods,
            group: &kind.group,
            version: &kind.version,
            kind: &kind.kind,
            namespace: kind.namespace.as_deref().unwrap_or_default(),
        });
        let text = text.map_err(|error| error.to_string())?;
        let mut object: Value = serde_saphyr::from_str(&text)
            .map_err(|error| format!("the rendered text is not YAML: {error}"))?;
        let root = object.as_object_mut().ok_or("it is not an object")?;
        let metadata = root.entry("metadata").or_insert_with(|| json!({}));
        let metadata = metadata
            .as_object_mut()
            .ok_or("its metadata is not an object")?;
        metadata.insert("name".to_owned(), json!(Self::name(node, id)));
        let labels = metadata.entry("labels").or_insert_with(|| json!({}));
        let labels = labels
            .as_object_mut()
            .ok_or("its labels are not an object")?;
        labels.insert(NODE_LABEL.to_owned(), json!(node));
        kind.check(&object)?;
        Ok(object)
    }

    /// Returns whether the status of a custom resource says that the node is drained.
    pub fn is_done(&self, object: &Value) -> bool {
        let conditions = object.pointer("/status/conditions");
        let mut conditions = conditions.and_then(Value::as_array).into_iter().flatten();
        conditions.any(|one| {
            let text = |key: &str| one.get(key).and_then(Value::as_str).unwrap_or_default();
            text("type") == self.resource.condition
                && text("status").eq_ignore_ascii_case(&self.status)
        })
    }

    /// Renders the template with typical values, to find errors early.
    fn try_out(&self) -> Result<(), String> {
        let event = HealthEvent {
            node_name: "node-1".to_owned(),
            error_code: vec!["79".to_owned()],
            entities_impacted: vec![Entity {
                entity_type: "GPU".to_owned(),
                entity_value: "0".to_owned(),
            }],
            generated_timestamp: Some(prost_types::Timestamp::default()),
            ..HealthEvent::default()
        };
        let pods = PodsToDrain::from([("a".to_owned(), vec!["p".to_owned()])]);
        for pods in [&pods, &PodsToDrain::new()] {
            self.render("node-1", &event, "0123456789abcdef01234567", pods)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
