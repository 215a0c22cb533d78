//! Data of templates: NVSentinel's variables, and an event in the form of its generated Go structure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use contract::{
    BehaviourOverrides, Entity, HealthEvent, action_name, effective_action_name, strategy_name,
};
use gotmpl::Value;
use model::node::Taint;

/// Data of a remediation's template.
#[derive(Clone, Debug)]
pub struct Variables<'a> {
    /// Event that stands for the fault.
    pub event: &'a HealthEvent,
    /// Id that makes the resource's name unique.
    pub id: &'a str,
    /// Value of the entity that is remediated alone. Empty if the whole node is.
    pub entity: &'a str,
    /// API group of the resource.
    pub group: &'a str,
    /// API version of the resource.
    pub version: &'a str,
    /// Kind of the resource.
    pub kind: &'a str,
    /// Namespace of the resource. Empty if it has none.
    pub namespace: &'a str,
}

/// Data of a custom drain's template.
#[derive(Clone, Debug)]
pub struct DrainVariables<'a> {
    /// Event that stands for the fault.
    pub event: &'a HealthEvent,
    /// Id of the event.
    pub id: &'a str,
    /// Names of the pods to drain, by namespace.
    pub pods: &'a BTreeMap<String, Vec<String>>,
    /// API group of the resource.
    pub group: &'a str,
    /// API version of the resource.
    pub version: &'a str,
    /// Kind of the resource.
    pub kind: &'a str,
    /// Namespace of the resource.
    pub namespace: &'a str,
}

/// Data of the template of a test of nodes.
#[derive(Clone, Debug)]
pub struct ValidationVariables<'a> {
    /// Name of the `ValidationRequest`.
    pub request: &'a str,
    /// Name of the group of tests.
    pub group: &'a str,
    /// Namespace of the created object.
    pub namespace: &'a str,
    /// Time limit of the tests, in seconds.
    pub timeout_seconds: i64,
    /// Names of the tested nodes.
    pub nodes: &'a [String],
    /// Names of the tests.
    pub tests: &'a [String],
    /// Container image of the first test.
    pub image: &'a str,
    /// Command of the first test.
    pub command: &'a [String],
    /// Environment of the first test, as names and values.
    pub env: &'a [(String, String)],
    /// Taints that the pods tolerate. One without a value is tolerated with any value.
    pub tolerated: &'a [Taint],
}

/// Values of a map, by their names.
type Fields = BTreeMap<Arc<str>, Value>;

// === impl Variables ===

impl Variables<'_> {
    pub(super) fn value(&self) -> Value {
        let text = |text: &str| Value::String(text.into());
        let action_name = effective_action_name(self.event);
        map([
            ("NodeName", text(&self.event.node_name)),
            ("ImpactedEntityScopeValue", text(self.entity)),
            ("HealthEventID", text(self.id)),
            ("RecommendedAction", action(self.event)),
            ("RecommendedActionName", text(&action_name)),
            // gpuwarden has no spans, but templates of NVSentinel may name them.
            ("TraceID", text("")),
            ("SpanID", text("")),
            ("HealthEvent", event(self.event)),
            ("ApiGroup", text(self.group)),
            ("Version", text(self.version)),
            ("Kind", text(self.kind)),
            ("Namespace", text(self.namespace)),
        ])
    }
}

// === impl DrainVariables ===

impl DrainVariables<'_> {
    pub(super) fn value(&self) -> Value {
        let text = |text: &str| Value::String(text.into());
        let names = |names: &Vec<String>| Value::List(names.iter().map(|one| text(one)).collect());
        let pods = self.pods.iter();
        let pods: Fields = pods
            .map(|(namespace, pods)| (namespace.as_str().into(), names(pods)))
            .collect();
        map([
            ("HealthEvent", event(self.event)),
            ("EventID", text(self.id)),
            ("PodsToDrain", Value::Map(pods.into())),
            ("ApiGroup", text(self.group)),
            ("Version", text(self.version)),
            ("Kind", text(self.kind)),
            ("Namespace", text(self.namespace)),
        ])
    }
}

// === impl ValidationVariables ===

impl ValidationVariables<'_> {
    pub(super) fn value(&self) -> Value {
        let text = |text: &str| Value::String(text.into());
        let texts = |texts: &[String]| Value::List(texts.iter().map(|one| text(one)).collect());
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|name| map([("NodeName", text(name))]));
        let env = self.env.iter();
        let env = env.map(|(name, value)| map([("Name", text(name)), ("Value", text(value))]));
        let tolerations = self.tolerated.iter().map(|taint| {
            let operator = if taint.value.is_empty() {
                "Exists"
            } else {
                "Equal"
            };
            map([
                ("Key", text(&taint.key)),
                ("Value", text(&taint.value)),
                ("Operator", text(operator)),
                ("Effect", text(&taint.effect)),
            ])
        });
        map([
            ("ValidationRequestName", text(self.request)),
            ("TestGroupName", text(self.group)),
            ("Namespace", text(self.namespace)),
            ("TimeoutSeconds", Value::Int(self.timeout_seconds)),
            ("Nodes", Value::List(nodes.collect())),
            ("Tests", texts(self.tests)),
            ("Image", text(self.image)),
            ("Command", texts(self.command)),
            ("Env", Value::List(env.collect())),
            ("Tolerations", Value::List(tolerations.collect())),
        ])
    }
}

/// Returns a map of these values.
fn map<const N: usize>(entries: [(&str, Value); N]) -> Value {
    let fields: Fields = entries
        .into_iter()
        .map(|(key, value)| (key.into(), value))
        .collect();
    Value::Map(fields.into())
}

/// Returns the values of a protobuf message, whose Go structure has a getter for each field.
fn message<const N: usize>(entries: [(&str, Value); N]) -> Value {
    let getter = |key: &str| format!("Get{key}").into();
    let fields: Fields = entries
        .into_iter()
        .flat_map(|(key, value)| [(getter(key), value.clone()), (key.into(), value)])
        .collect();
    Value::Map(fields.into())
}

/// Returns the name of the event's action.
fn action(event: &HealthEvent) -> Value {
    Value::String(action_name(event.recommended_action).as_ref().into())
}

/// Returns the value of an event.
fn event(event: &HealthEvent) -> Value {
    let text = |text: &str| Value::String(text.into());
    let overrides = |overrides: Option<BehaviourOverrides>| {
        overrides.map_or(Value::Nil, |one| {
            message([
                ("Force", Value::Bool(one.force)),
                ("Skip", Value::Bool(one.skip)),
            ])
        })
    };
    let entity = |one: &Entity| {
        message([
            ("EntityType", text(&one.entity_type)),
            ("EntityValue", text(&one.entity_value)),
        ])
    };
    let metadata: Fields = (event.metadata.iter())
        .map(|(key, value)| (key.as_str().into(), text(value)))
        .collect();
    message([
        ("Version", Value::Uint(event.version.into())),
        ("Agent", text(&event.agent)),
        ("ComponentClass", text(&event.component_class)),
        ("CheckName", text(&event.check_name)),
        ("IsFatal", Value::Bool(event.is_fatal)),
        ("IsHealthy", Value::Bool(event.is_healthy)),
        ("Message", text(&event.message)),
        ("RecommendedAction", action(event)),
        (
            "ErrorCode",
            Value::List(event.error_code.iter().map(|code| text(code)).collect()),
        ),
        (
            "EntitiesImpacted",
            Value::List(event.entities_impacted.iter().map(entity).collect()),
        ),
        ("Metadata", Value::Map(metadata.into())),
        (
            "GeneratedTimestamp",
            event.generated_timestamp.map_or(Value::Nil, |time| {
                message([
                    ("Seconds", Value::Int(time.seconds)),
                    ("Nanos", Value::Int(time.nanos.into())),
                ])
            }),
        ),
        ("NodeName", text(&event.node_name)),
        ("QuarantineOverrides", overrides(event.quarantine_overrides)),
        ("DrainOverrides", overrides(event.drain_overrides)),
        (
            "ProcessingStrategy",
            text(&strategy_name(event.processing_strategy)),
        ),
        ("Id", text(&event.id)),
        (
            "CustomRecommendedAction",
            text(&event.custom_recommended_action),
        ),
    ])
}

/// Returns data for the trial of a remediation's template: every field is set, and all maps with
/// free keys have the `keys`.
pub(super) fn sample(keys: &BTreeSet<String>) -> Value {
    let variables = Variables {
        event: &sample_event(keys),
        id: "id",
        entity: "entity",
        group: "group",
        version: "version",
        kind: "kind",
        namespace: "namespace",
    };
    variables.value()
}

/// Returns data for the trial of a custom drain's template, like [`sample`].
pub(super) fn drain_sample(keys: &BTreeSet<String>) -> Value {
    let pods = |key: &String| (key.clone(), vec!["pod".to_owned()]);
    let variables = DrainVariables {
        event: &sample_event(keys),
        id: "id",
        pods: &with_default(keys).iter().map(pods).collect(),
        group: "group",
        version: "version",
        kind: "kind",
        namespace: "namespace",
    };
    variables.value()
}

/// Returns data for the trial of a test's template, like [`sample`].
pub(super) fn validation_sample(_keys: &BTreeSet<String>) -> Value {
    let text = || "text".to_owned();
    let taint = Taint {
        key: text(),
        value: text(),
        effect: text(),
    };
    let variables = ValidationVariables {
        request: "request",
        group: "group",
        namespace: "namespace",
        timeout_seconds: 1,
        nodes: &[text()],
        tests: &[text()],
        image: "image",
        command: &[text()],
        env: &[(text(), text())],
        tolerated: &[taint],
    };
    variables.value()
}

fn sample_event(keys: &BTreeSet<String>) -> HealthEvent {
    let text = || "text".to_owned();
    let overrides = Some(BehaviourOverrides {
        force: true,
        skip: true,
    });
    HealthEvent {
        version: 1,
        agent: text(),
        component_class: text(),
        check_name: text(),
        is_fatal: true,
        is_healthy: true,
        message: text(),
        recommended_action: 1,
        error_code: vec![text()],
        entities_impacted: vec![Entity {
            entity_type: text(),
            entity_value: text(),
        }],
        metadata: with_default(keys)
            .into_iter()
            .map(|key| (key, text()))
            .collect(),
        generated_timestamp: Some(prost_types::Timestamp {
            seconds: 1,
            nanos: 1,
        }),
        node_name: text(),
        quarantine_overrides: overrides,
        drain_overrides: overrides,
        processing_strategy: 1,
        id: text(),
        custom_recommended_action: text(),
    }
}

/// Returns the keys, or one if there are none: an empty map would skip the loops over it.
fn with_default(keys: &BTreeSet<String>) -> BTreeSet<String> {
    let mut keys = keys.clone();
    keys.insert("key".to_owned());
    keys
}

/// Returns the names of all fields in a value, without getters.
pub(super) fn field_names(value: &Value) -> BTreeSet<Arc<str>> {
    match value {
        Value::Map(fields) => {
            let below = fields.values().flat_map(field_names);
            let own = fields.keys().filter(|name| !name.starts_with("Get"));
            own.cloned().chain(below).collect()
        }
        Value::List(items) => items.iter().flat_map(field_names).collect(),
        _ => BTreeSet::new(),
    }
}
