//! The data of templates: NVSentinel's variables, and an event as its generated Go structure has it.

use contract::{HealthEvent, action_name, strategy_name};
use gotmpl::Value;
use gotmpl::parse::SmolStr;

use super::Fields;

/// A type of what a template sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Root,
    /// The data of a template of a drain.
    Drain,
    /// Names of pods by their namespace.
    Pods,
    /// The data of a template of a test of nodes.
    Validation,
    TestedNodes,
    TestedNode,
    Tolerations,
    Toleration,
    Variables,
    Variable,
    Event,
    Entities,
    Entity,
    Overrides,
    Time,
    /// Names of any kind, each with a text.
    Texts,
    Scalars,
    Scalar,
    /// An enumeration, which has a `.String`.
    Enum,
    /// Anything: it shows when the template is run.
    Unknown,
}

const ROOT: [(&str, Type); 12] = [
    ("NodeName", Type::Scalar),
    ("ImpactedEntityScopeValue", Type::Scalar),
    ("HealthEventID", Type::Scalar),
    ("RecommendedAction", Type::Enum),
    ("RecommendedActionName", Type::Scalar),
    ("TraceID", Type::Scalar),
    ("SpanID", Type::Scalar),
    ("HealthEvent", Type::Event),
    ("ApiGroup", Type::Scalar),
    ("Version", Type::Scalar),
    ("Kind", Type::Scalar),
    ("Namespace", Type::Scalar),
];
const DRAIN: [(&str, Type); 7] = [
    ("HealthEvent", Type::Event),
    ("EventID", Type::Scalar),
    ("PodsToDrain", Type::Pods),
    ("ApiGroup", Type::Scalar),
    ("Version", Type::Scalar),
    ("Kind", Type::Scalar),
    ("Namespace", Type::Scalar),
];
const VALIDATION: [(&str, Type); 10] = [
    ("ValidationRequestName", Type::Scalar),
    ("TestGroupName", Type::Scalar),
    ("Namespace", Type::Scalar),
    ("TimeoutSeconds", Type::Scalar),
    ("Nodes", Type::TestedNodes),
    ("Tests", Type::Scalars),
    ("Image", Type::Scalar),
    ("Command", Type::Scalars),
    ("Env", Type::Variables),
    ("Tolerations", Type::Tolerations),
];
const TESTED_NODE: [(&str, Type); 1] = [("NodeName", Type::Scalar)];
const TOLERATION: [(&str, Type); 4] = [
    ("Key", Type::Scalar),
    ("Value", Type::Scalar),
    ("Operator", Type::Scalar),
    ("Effect", Type::Scalar),
];
const VARIABLE: [(&str, Type); 2] = [("Name", Type::Scalar), ("Value", Type::Scalar)];
const EVENT: [(&str, Type); 18] = [
    ("Version", Type::Scalar),
    ("Agent", Type::Scalar),
    ("ComponentClass", Type::Scalar),
    ("CheckName", Type::Scalar),
    ("IsFatal", Type::Scalar),
    ("IsHealthy", Type::Scalar),
    ("Message", Type::Scalar),
    ("RecommendedAction", Type::Enum),
    ("ErrorCode", Type::Scalars),
    ("EntitiesImpacted", Type::Entities),
    ("Metadata", Type::Texts),
    ("GeneratedTimestamp", Type::Time),
    ("NodeName", Type::Scalar),
    ("QuarantineOverrides", Type::Overrides),
    ("DrainOverrides", Type::Overrides),
    ("ProcessingStrategy", Type::Enum),
    ("Id", Type::Scalar),
    ("CustomRecommendedAction", Type::Scalar),
];
const ENTITY: [(&str, Type); 2] = [("EntityType", Type::Scalar), ("EntityValue", Type::Scalar)];
const OVERRIDES: [(&str, Type); 2] = [("Force", Type::Scalar), ("Skip", Type::Scalar)];
const TIME: [(&str, Type); 2] = [("Seconds", Type::Scalar), ("Nanos", Type::Scalar)];

// === impl Type ===

impl Type {
    /// Returns the type of a field, or else the names of those that there are.
    pub(super) fn field(self, name: &str) -> Result<Self, Vec<&'static str>> {
        let fields: &[(&str, Self)] = match self {
            Self::Root => &ROOT,
            Self::Drain => &DRAIN,
            Self::Pods => return Ok(Self::Scalars),
            Self::Validation => &VALIDATION,
            Self::TestedNode => &TESTED_NODE,
            Self::Toleration => &TOLERATION,
            Self::Variable => &VARIABLE,
            Self::Event => &EVENT,
            Self::Entity => &ENTITY,
            Self::Overrides => &OVERRIDES,
            Self::Time => &TIME,
            Self::Texts => return Ok(Self::Scalar),
            Self::Unknown => return Ok(Self::Unknown),
            Self::Enum if name == "String" => return Ok(Self::Scalar),
            Self::Enum
            | Self::Scalar
            | Self::Scalars
            | Self::Entities
            | Self::TestedNodes
            | Self::Tolerations
            | Self::Variables => return Err(Vec::new()),
        };
        let getter = matches!(
            self,
            Self::Event | Self::Entity | Self::Overrides | Self::Time
        )
        .then(|| name.strip_prefix("Get"));
        let names = [Some(name), getter.flatten()];
        let found = (fields.iter()).find(|(field, _)| names.contains(&Some(*field)));
        let known = || fields.iter().map(|(field, _)| *field).collect();
        found.map(|(_, kind)| *kind).ok_or_else(known)
    }

    /// Returns the type of what a loop goes through.
    pub(super) fn item(self) -> Self {
        match self {
            Self::Entities => Self::Entity,
            Self::Scalars | Self::Texts => Self::Scalar,
            Self::Pods => Self::Scalars,
            Self::TestedNodes => Self::TestedNode,
            Self::Tolerations => Self::Toleration,
            Self::Variables => Self::Variable,
            _ => Self::Unknown,
        }
    }
}

/// Puts fields in the place of Go's getters, and takes out what gives an enumeration as text.
pub(super) fn plain(names: &mut Vec<SmolStr>) {
    let enumeration =
        |name: &str| name.ends_with("RecommendedAction") || name.ends_with("Strategy");
    let text = names.len().checked_sub(2).and_then(|at| names.get(at..));
    if matches!(text, Some([name, string]) if enumeration(name) && string == "String") {
        names.pop();
    }
    for name in names {
        let getter = name.strip_prefix("Get");
        let field = getter.filter(|field| EVENT.iter().chain(&ENTITY).any(|(one, _)| one == field));
        if let Some(field) = field.map(SmolStr::from) {
            *name = field;
        }
    }
}

/// Returns values by their names.
pub(super) fn map<const N: usize>(entries: [(&str, Value); N]) -> Value {
    let fields: Fields = entries
        .into_iter()
        .map(|(key, value)| (key.into(), value))
        .collect();
    Value::Map(fields.into())
}

/// Returns the action of an event, as its name.
pub(super) fn action(event: &HealthEvent) -> Value {
    Value::String(action_name(event.recommended_action).as_ref().into())
}

/// Returns an event.
pub(super) fn event(event: &HealthEvent) -> Value {
    let text = |text: &str| Value::String(text.into());
    let overrides = |overrides: Option<contract::BehaviourOverrides>| {
        overrides.map_or(Value::Nil, |one| {
            map([
                ("Force", Value::Bool(one.force)),
                ("Skip", Value::Bool(one.skip)),
            ])
        })
    };
    let entity = |one: &contract::Entity| {
        map([
            ("EntityType", text(&one.entity_type)),
            ("EntityValue", text(&one.entity_value)),
        ])
    };
    let metadata: Fields = (event.metadata.iter())
        .map(|(key, value)| (key.as_str().into(), text(value)))
        .collect();
    map([
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
                map([
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
