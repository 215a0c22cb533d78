//! Reads the policies: NVSentinel's `policies.toml` unchanged, with two keys more. All mistakes are
//! reported at once, each with its line.

use contract::findings::{FileError, Findings, Format};
use contract::{BehaviourOverrides, ProcessingStrategy, RecommendedAction, names, parse_action};
use jiff::{SignedDuration, Timestamp};
use model::event::validate;
use policy::{ObjectExpression, ObjectResult, Root};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::event::About;
use crate::policies::{EventForm, Kind, ObjectPolicies, ObjectPolicy, Watched};

/// Most policies of a file. Each is evaluated for every change of its objects.
const MAX_POLICIES: usize = 200;
/// Longest `for` and `clearFor`.
const LONGEST: SignedDuration = SignedDuration::from_hours(7 * 24);
/// Kinds without a namespace, of those that policies are known to watch.
const CLUSTER_SCOPED: [&str; 8] = [
    "Node",
    "Namespace",
    "PersistentVolume",
    "StorageClass",
    "CustomResourceDefinition",
    "APIService",
    "ClusterPolicy",
    "NicClusterPolicy",
];
/// Fields of a node and of a pod.
const FIELDS: [&str; 5] = ["apiVersion", "kind", "metadata", "spec", "status"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Settings of NVSentinel's process, which have no effect here.
    #[serde(rename = "controller")]
    _controller: Option<IgnoredAny>,
    #[serde(default)]
    policies: Vec<PolicyEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PolicyEntry {
    #[serde(default)]
    name: String,
    #[serde(default)]
    enabled: bool,
    #[serde(default)]
    resource: ResourceEntry,
    #[serde(default)]
    predicate: ExpressionEntry,
    #[serde(default)]
    node_association: Option<ExpressionEntry>,
    #[serde(rename = "for")]
    open_after: Option<String>,
    clear_for: Option<String>,
    #[serde(default)]
    health_event: EventEntry,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResourceEntry {
    #[serde(default)]
    group: String,
    #[serde(default)]
    version: String,
    #[serde(default)]
    kind: String,
    namespace: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpressionEntry {
    #[serde(default)]
    expression: String,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct EventEntry {
    #[serde(default)]
    component_class: String,
    #[serde(default)]
    is_fatal: bool,
    #[serde(default)]
    message: String,
    #[serde(default)]
    recommended_action: String,
    #[serde(default)]
    custom_recommended_action: String,
    #[serde(default)]
    error_code: Vec<String>,
    quarantine_overrides: Option<OverridesEntry>,
    drain_overrides: Option<OverridesEntry>,
    #[serde(default)]
    processing_strategy: String,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct OverridesEntry {
    #[serde(default)]
    force: bool,
    #[serde(default)]
    skip: bool,
}

/// Reader of one policy.
struct Reader<'a, 'f> {
    findings: &'a mut Findings<'f>,
    notes: &'a mut Vec<String>,
    /// Path of the policy in the file.
    path: String,
}

/// Parses the policies of a file, which `source` names in findings. Policies that are not enabled
/// are left out, and only their keys are checked.
pub fn parse(text: &str, source: &str) -> Result<ObjectPolicies, FileError> {
    let (file, mut findings) = Findings::read::<File>(text, source, Format::Toml)?;
    let (mut policies, mut notes) = (Vec::new(), Vec::new());
    if file.policies.is_empty() || file.policies.len() > MAX_POLICIES {
        let found = file.policies.len();
        findings.at_key(
            "policies",
            format!("there are {found} policies; write 1 to {MAX_POLICIES}"),
        );
    }
    let mut names: Vec<String> = Vec::new();
    for (index, entry) in file.policies.into_iter().enumerate() {
        if !entry.enabled {
            continue;
        }
        let mut reader = Reader {
            findings: &mut findings,
            notes: &mut notes,
            path: format!("policies[{index}]"),
        };
        if names.contains(&entry.name) {
            reader.wrong("name", "another policy has this name");
        }
        names.push(entry.name.clone());
        policies.extend(reader.policy(entry));
    }
    findings.result(ObjectPolicies { policies, notes })
}

// === impl Reader ===

impl Reader<'_, '_> {
    fn wrong(&mut self, key: &str, what: impl std::fmt::Display) {
        let at = format!("{}.{key}", self.path);
        self.findings.at_key(&at, what);
    }

    fn note(&mut self, key: &str, what: &str) {
        let at = format!("{}.{key}", self.path);
        let place = self.findings.place_of(&at);
        self.notes.push(format!("{place}: {at}: {what}"));
    }

    /// Reads a policy; `None` if it has findings.
    fn policy(&mut self, entry: PolicyEntry) -> Option<ObjectPolicy> {
        let before = self.findings.count();
        if entry.name.trim().is_empty() || entry.name.contains('/') {
            self.wrong("name", "a policy needs a name without '/'");
        }
        let watched = self.watched(entry.resource);
        let predicate = self.expression("predicate", ObjectResult::Bool, &entry.predicate);
        let association = (entry.node_association.as_ref())
            .filter(|association| !association.expression.trim().is_empty())
            .map(|text| self.expression("nodeAssociation", ObjectResult::Text, text));
        let open_after = self.duration("for", entry.open_after.as_deref());
        let clear_after = self.duration("clearFor", entry.clear_for.as_deref());
        let event = self.event(entry.health_event);
        if association.is_none() && !watched.kind.is_node() {
            let what = "without it the node has the name of the object";
            self.note("nodeAssociation", what);
        }
        if self.findings.count() > before {
            return None;
        }
        let sample = About {
            check: &entry.name,
            kind: &watched.kind.to_string(),
            key: "name",
            node: "node",
            now: Timestamp::UNIX_EPOCH,
        };
        if let Err(problem) = validate(&event.fault(&sample)) {
            self.wrong(&format!("healthEvent.{}", problem.field), problem.what);
        }
        let predicate = predicate?;
        self.look_at_reads(&watched.kind, &predicate);
        Some(ObjectPolicy {
            name: entry.name,
            watched,
            predicate,
            association: association.flatten(),
            open_after,
            clear_after,
            event,
        })
    }

    fn watched(&mut self, entry: ResourceEntry) -> Watched {
        for (key, text) in [("version", &entry.version), ("kind", &entry.kind)] {
            if text.is_empty() || !text.bytes().all(|one| one.is_ascii_alphanumeric()) {
                let what = format!("'{text}' is no {key}; write one such as v1 or Pod");
                self.wrong(&format!("resource.{key}"), what);
            }
        }
        if !entry.group.is_empty()
            && let Err(error) = names::object_name(&entry.group)
        {
            self.wrong("resource.group", error);
        }
        let namespace = entry.namespace.filter(|namespace| !namespace.is_empty());
        if let Some(namespace) = &namespace {
            if let Err(error) = names::dns_label(namespace) {
                self.wrong("resource.namespace", error);
            }
            if CLUSTER_SCOPED.contains(&entry.kind.as_str()) {
                let what = format!("objects of the kind {} have no namespace", entry.kind);
                self.wrong("resource.namespace", what);
            }
        }
        Watched {
            kind: Kind {
                group: entry.group,
                version: entry.version,
                kind: entry.kind,
            },
            namespace,
        }
    }

    fn expression(
        &mut self,
        key: &str,
        gives: ObjectResult,
        entry: &ExpressionEntry,
    ) -> Option<ObjectExpression> {
        if entry.expression.trim().is_empty() {
            self.wrong(key, "it has no expression");
            return None;
        }
        let at = format!("{}.{key}.expression", self.path);
        let compiled = ObjectExpression::compile(gives, &entry.expression);
        self.findings.check(&at, compiled)
    }

    /// Refuses misspelt fields of nodes and pods, and notes what costs memory or is often meant
    /// otherwise.
    fn look_at_reads(&mut self, kind: &Kind, predicate: &ObjectExpression) {
        let key = "predicate.expression";
        if let Some(fields) = predicate.reads().get(&Root::Resource) {
            if kind.group.is_empty() && ["Node", "Pod"].contains(&kind.kind.as_str()) {
                for name in fields.names().filter(|name| !FIELDS.contains(name)) {
                    let what = format!("a {} has no field '{name}'", kind.kind);
                    self.wrong(key, what);
                }
            }
            if fields.is_whole() {
                let what = "it reads the object as a whole, so whole objects are kept in memory";
                self.note(key, what);
            }
        }
        let text: String = predicate.expression.split_whitespace().collect();
        let is_negative = ["status!='True'", "status!=\"True\""]
            .iter()
            .any(|part| text.contains(part));
        if is_negative && !predicate.names_unknown() {
            let what = "a status of Unknown opens nothing here; name 'Unknown' if it is to count";
            self.note(key, what);
        }
    }

    fn duration(&mut self, key: &str, text: Option<&str>) -> SignedDuration {
        let at = format!("{}.{key}", self.path);
        let read = text.and_then(|text| self.findings.duration(&at, text, LONGEST));
        read.unwrap_or(SignedDuration::ZERO)
    }

    fn event(&mut self, entry: EventEntry) -> EventForm {
        let action = parse_action(&entry.recommended_action);
        let action = action.and_then(|number| RecommendedAction::try_from(number).ok());
        if action.is_none() {
            let what = format!(
                "there is no action '{}', so it counts as CONTACT_SUPPORT",
                entry.recommended_action
            );
            self.note("healthEvent.recommendedAction", &what);
        }
        let strategies = [
            ProcessingStrategy::ExecuteRemediation,
            ProcessingStrategy::StoreOnly,
            ProcessingStrategy::StoreAndAnalyse,
        ];
        let names = strategies.map(|one| (one.as_str_name(), one));
        let strategy = if entry.processing_strategy.is_empty() {
            None
        } else {
            let at = format!("{}.healthEvent.processingStrategy", self.path);
            (self.findings).one_of(&at, &entry.processing_strategy, &names)
        };
        EventForm {
            component_class: entry.component_class,
            is_fatal: entry.is_fatal,
            message: entry.message,
            action: action.unwrap_or(RecommendedAction::ContactSupport),
            custom_action: entry.custom_recommended_action,
            codes: entry.error_code,
            quarantine: self.overrides("quarantineOverrides", entry.quarantine_overrides),
            drain: self.overrides("drainOverrides", entry.drain_overrides),
            strategy: strategy.unwrap_or(ProcessingStrategy::ExecuteRemediation),
        }
    }

    fn overrides(
        &mut self,
        key: &str,
        entry: Option<OverridesEntry>,
    ) -> Option<BehaviourOverrides> {
        let OverridesEntry { force, skip } = entry?;
        if force && skip {
            let what = "force and skip exclude each other: remove one";
            self.wrong(&format!("healthEvent.{key}"), what);
        }
        Some(BehaviourOverrides { force, skip })
    }
}

#[cfg(test)]
mod tests;
