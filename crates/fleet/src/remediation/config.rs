//! The configuration of remediation: NVSentinel's file for its fault remediation, with
//! additional keys.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::findings::{FileError, Findings, Format};
use contract::{Entity, HealthEvent, RecommendedAction, names};
use jiff::SignedDuration;
use model::attempt::{DIAGNOSTICS_GROUP, REMEMBERED_HOURS, ResourceKind, VALIDATION_GROUP};
use policy::template::{Template, Variables};
use serde::Deserialize;
use serde_json::Value;

use super::validation::{self, ValidationConfig};

/// Text of the default configuration.
const BUILTIN: &str = include_str!("../../data/remediation.toml");
/// Types of entities that can be remediated individually.
const SCOPES: [&str; 1] = ["GPU_UUID"];
/// Groups of actions, gentlest first: if one does not help, the next is tried.
const ESCALATION: [&str; 2] = ["reset", "restart"];
/// Most attempts on one node within [`WINDOW`].
const MAX_ATTEMPTS: usize = 5;
const WINDOW: SignedDuration = SignedDuration::from_hours(7 * 24);
/// Time for the faults to recover after a successful attempt.
const RECOVERY: SignedDuration = SignedDuration::from_mins(15);
/// Default timeout of a custom resource. NVSentinel's janitor gives up after 30 min.
const TIMEOUT: SignedDuration = SignedDuration::from_mins(60);
/// Most attempts that can be configured: all attempts of a session are recorded on its node.
const MOST_ATTEMPTS: i64 = 20;
/// Largest number in the file, of any unit of time.
const MAX_NUMBER: i64 = 100_000;

/// Settings of the remediation of all nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemediationConfig {
    /// Actions by the name that events recommend.
    pub actions: BTreeMap<String, Action>,
    /// Groups, gentlest first: if one does not help, the next is tried.
    pub escalation: Vec<String>,
    /// Most attempts on one node within [`Self::window`].
    pub max_attempts: usize,
    /// Time window of [`Self::max_attempts`].
    pub window: SignedDuration,
    /// Time for the faults to recover after a successful attempt.
    pub recovery: SignedDuration,
    /// Action that collects diagnostics beside the drain, before any remediation; `None` for
    /// none.
    pub diagnostics: Option<String>,
    /// Validation of nodes before they come back or enter service; `None` for none.
    pub validation: Option<ValidationConfig>,
}

/// An action: a custom resource that another program carries out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Action {
    /// Kind of the custom resource.
    pub resource: ResourceKind,
    /// Group of the action; actions of one group have the same effect.
    pub group: String,
    /// Groups whose actions include the effect of this one.
    pub superseding: Vec<String>,
    /// Type of the entities that are remediated individually; `None` for the whole node.
    pub entity_scope: Option<String>,
    /// Timeout of the custom resource.
    pub timeout: SignedDuration,
    /// True if the action waits for a person's approval.
    pub approve: bool,
    /// Template of the custom resource.
    template: Arc<Template>,
}

/// Keys of the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    #[serde(default)]
    template: TemplatePlace,
    #[serde(default)]
    remediation_actions: BTreeMap<String, ActionFile>,
    #[serde(default)]
    templates: BTreeMap<String, String>,
    /// NVSentinel reads this key, and ignores it.
    #[serde(rename = "updateRetry")]
    _update_retry: Option<UpdateRetry>,
    /// Additional keys from here on.
    escalation: Option<Vec<String>>,
    max_attempts: Option<i64>,
    attempts_window_hours: Option<i64>,
    recovery_timeout_minutes: Option<i64>,
    diagnostics_action: Option<String>,
    validation: Option<validation::File>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TemplatePlace {
    #[serde(default)]
    mount_path: String,
    #[serde(rename = "fileName")]
    _file_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct UpdateRetry {
    #[serde(rename = "maxRetries")]
    _max_retries: Option<i64>,
    #[serde(rename = "retryDelaySeconds")]
    _retry_delay_seconds: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ActionFile {
    #[serde(default)]
    namespace: String,
    version: String,
    api_group: String,
    kind: String,
    complete_condition_type: String,
    #[serde(default)]
    scope: String,
    #[serde(default)]
    template_file_name: String,
    #[serde(default)]
    equivalence_group: String,
    #[serde(default)]
    impacted_entity_scope: String,
    #[serde(default)]
    superseding_equivalence_groups: Vec<String>,
    /// Additional keys, not NVSentinel's.
    timeout_minutes: Option<i64>,
    #[serde(default)]
    approve: bool,
}

// === impl RemediationConfig ===

impl RemediationConfig {
    /// Returns the default configuration.
    pub fn builtin() -> Self {
        let none = |path: &str| Err(format!("there is no file {path}"));
        // A test parses it.
        Self::parse(BUILTIN, "built-in", none).unwrap_or_else(|_| Self {
            actions: BTreeMap::new(),
            escalation: Vec::new(),
            max_attempts: 0,
            window: WINDOW,
            recovery: RECOVERY,
            diagnostics: None,
            validation: None,
        })
    }

    /// Parses a configuration. `source` names the file in errors, which list everything that is
    /// wrong; `read` reads template files beside it.
    pub fn parse(
        text: &str,
        source: &str,
        read: impl Fn(&str) -> Result<String, String>,
    ) -> Result<Self, FileError> {
        let (file, mut findings) = Findings::read::<File>(text, source, Format::Toml)?;
        let templates = Templates {
            mount_path: file.template.mount_path.trim_end_matches('/'),
            inline: &file.templates,
            read: &read,
        };
        let mut actions = BTreeMap::new();
        for (name, entry) in file.remediation_actions {
            if let Some(action) = action(&name, entry, &templates, &mut findings) {
                actions.insert(name, action);
            }
        }
        check_groups(&actions, &mut findings);
        let max = findings.whole_number("maxAttempts", file.max_attempts, 1..=MOST_ATTEMPTS, "");
        let hours = file.attempts_window_hours;
        let hours = findings.whole_number(
            "attemptsWindowHours",
            hours,
            1..=REMEMBERED_HOURS,
            " of hours",
        );
        let recovery = file.recovery_timeout_minutes;
        let recovery = findings.minutes("recoveryTimeoutMinutes", recovery, 1..=MAX_NUMBER);
        for (at, group) in file.escalation.iter().flatten().enumerate() {
            if !actions.values().any(|action| action.group == *group) {
                let what = format!("no action has the equivalenceGroup {group:?}");
                findings.at_key(&format!("escalation[{at}]"), what);
            }
        }
        let group_of = |name: &str| actions.get(name).map(|action| action.group.as_str());
        if let Some(name) = &file.diagnostics_action {
            let own = validation::check_own(name, DIAGNOSTICS_GROUP, group_of);
            findings.check("diagnosticsAction", own);
        }
        let validation =
            (file.validation).map(|file| ValidationConfig::read(file, group_of, &mut findings));
        let attempts = max.and_then(|max| usize::try_from(max).ok());
        let escalation = file.escalation;
        findings.result(Self {
            actions,
            escalation: escalation.unwrap_or_else(|| ESCALATION.map(str::to_owned).to_vec()),
            max_attempts: attempts.unwrap_or(MAX_ATTEMPTS),
            window: hours.map_or(WINDOW, SignedDuration::from_hours),
            recovery: recovery.unwrap_or(RECOVERY),
            diagnostics: file.diagnostics_action,
            validation,
        })
    }

    /// Returns an action of a group and its name: the preferred one, or else the first.
    pub fn of_group(&self, group: &str, preferred: &str) -> Option<(&str, &Action)> {
        let of_group = |name: &str| {
            let (name, action) = self.actions.get_key_value(name)?;
            (action.group == group).then_some((name.as_str(), action))
        };
        of_group(preferred).or_else(|| self.actions.keys().find_map(|name| of_group(name)))
    }

    /// Returns the kinds of custom resources that the actions create.
    pub fn kinds(&self) -> Vec<&ResourceKind> {
        let mut kinds: Vec<&ResourceKind> = self
            .actions
            .values()
            .map(|action| &action.resource)
            .collect();
        kinds.sort();
        kinds.dedup();
        kinds
    }
}

// === impl Action ===

impl Action {
    /// Returns the custom resource for an event; `id` makes its name unique, and `entity` is the
    /// only thing that is remediated, if not empty.
    pub fn render(&self, event: &HealthEvent, id: &str, entity: &str) -> Result<Value, String> {
        let kind = &self.resource;
        let text = self.template.render(&Variables {
            event,
            id,
            entity,
            group: &kind.group,
            version: &kind.version,
            kind: &kind.kind,
            namespace: kind.namespace.as_deref().unwrap_or_default(),
        });
        let text = text.map_err(|error| error.to_string())?;
        let object: Value = serde_saphyr::from_str(&text)
            .map_err(|error| format!("the rendered text is not YAML: {error}"))?;
        kind.check(&object)?;
        Ok(object)
    }
}

/// Places to read templates from.
struct Templates<'a> {
    mount_path: &'a str,
    inline: &'a BTreeMap<String, String>,
    read: &'a dyn Fn(&str) -> Result<String, String>,
}

/// Parses and checks an action.
fn action(
    name: &str,
    file: ActionFile,
    templates: &Templates<'_>,
    findings: &mut Findings<'_>,
) -> Option<Action> {
    let path = |key: &str| format!("remediationActions.{name}.{key}");
    let before = findings.count();
    for (key, value) in [
        ("version", &file.version),
        ("apiGroup", &file.api_group),
        ("kind", &file.kind),
        ("completeConditionType", &file.complete_condition_type),
        ("equivalenceGroup", &file.equivalence_group),
        ("templateFileName", &file.template_file_name),
    ] {
        if value.is_empty() {
            findings.at_key(&path(key), "it is empty");
        }
    }
    match (file.scope.as_str(), file.namespace.as_str()) {
        ("Namespaced", "") => {
            findings.at_key(
                &path("scope"),
                "it is Namespaced, and there is no namespace",
            );
        }
        ("" | "Cluster" | "Namespaced", _) => {}
        _ => findings.refuse(
            &path("scope"),
            "write Cluster or Namespaced, or leave it out",
        ),
    }
    if !file.namespace.is_empty() {
        findings.check(&path("namespace"), names::dns_label(&file.namespace));
    }
    if !file.api_group.is_empty() {
        findings.check(&path("apiGroup"), names::object_name(&file.api_group));
    }
    let builtin = RecommendedAction::from_str_name(name).is_some();
    let scope = file.impacted_entity_scope.as_str();
    if !scope.is_empty() {
        let key = path("impactedEntityScope");
        if builtin && name != RecommendedAction::ComponentReset.as_str_name() {
            let what = "it applies only to COMPONENT_RESET and to actions of your own";
            findings.at_key(&key, what);
        }
        if !SCOPES.contains(&scope) {
            let wanted = format!("only {} can be repaired by itself", SCOPES.join(", "));
            findings.refuse(&key, wanted);
        }
    }
    let timeout = findings.minutes(
        &path("timeoutMinutes"),
        file.timeout_minutes,
        1..=MAX_NUMBER,
    );
    if file
        .superseding_equivalence_groups
        .contains(&file.equivalence_group)
    {
        findings.at_key(
            &path("supersedingEquivalenceGroups"),
            "it names its own group",
        );
    }
    let own = [VALIDATION_GROUP, DIAGNOSTICS_GROUP].contains(&file.equivalence_group.as_str());
    if file.approve && own {
        let what = "it applies only to repairs, and this action is none; leave it out";
        findings.at_key(&path("approve"), what);
    }
    if findings.count() > before {
        return None;
    }
    let key = path("templateFileName");
    let has_namespace = file.scope != "Cluster" && !file.namespace.is_empty();
    let action = Action {
        resource: ResourceKind {
            group: file.api_group,
            version: file.version,
            kind: file.kind,
            namespace: has_namespace.then_some(file.namespace),
            condition: file.complete_condition_type,
        },
        group: file.equivalence_group,
        superseding: file.superseding_equivalence_groups,
        entity_scope: Some(file.impacted_entity_scope).filter(|scope| !scope.is_empty()),
        timeout: timeout.unwrap_or(TIMEOUT),
        approve: file.approve,
        template: Arc::new(findings.check(&key, templates.read(&file.template_file_name))?),
    };
    let tried = try_out(&action);
    findings.check(&key, tried.map_err(|what| format!("the template: {what}")))?;
    Some(action)
}

/// Renders an action with typical values, to find errors early.
fn try_out(action: &Action) -> Result<(), String> {
    let entity = |kind: &str, value: &str| Entity {
        entity_type: kind.to_owned(),
        entity_value: value.to_owned(),
    };
    let gpu = "GPU-00000000-0000-0000-0000-000000000000";
    let event = HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".to_owned(),
        component_class: "GPU".to_owned(),
        check_name: "Check".to_owned(),
        is_fatal: true,
        message: "a message".to_owned(),
        recommended_action: RecommendedAction::RestartBm as i32,
        error_code: vec!["79".to_owned()],
        entities_impacted: vec![entity("GPU", "0"), entity("GPU_UUID", gpu)],
        node_name: "node-1".to_owned(),
        id: "0123456789abcdef01234567".to_owned(),
        generated_timestamp: Some(prost_types::Timestamp::default()),
        ..HealthEvent::default()
    };
    let entity = action.entity_scope.as_ref().map_or("", |_| gpu);
    let name = |id: &str| -> Result<Value, String> {
        let object = action.render(&event, id, entity)?;
        Ok(object
            .pointer("/metadata/name")
            .cloned()
            .unwrap_or_default())
    };
    if name("1")? == name("2")? {
        return Err(
            "metadata.name is the same for all faults: it is to contain \
                    {{ .HealthEventID }}"
                .to_owned(),
        );
    }
    Ok(())
}

/// Checks that superseding groups exist.
fn check_groups(actions: &BTreeMap<String, Action>, findings: &mut Findings<'_>) {
    for (name, action) in actions {
        for group in &action.superseding {
            let mut of_group = actions
                .values()
                .filter(|one| one.group == *group)
                .peekable();
            let what = if of_group.peek().is_none() {
                format!("no action has the group {group:?}")
            } else if of_group.any(|one| one.entity_scope.is_some()) {
                format!("the group {group:?} has an impactedEntityScope")
            } else {
                continue;
            };
            let path = format!("remediationActions.{name}.supersedingEquivalenceGroups");
            findings.at_key(&path, what);
        }
    }
}

// === impl Templates ===

impl Templates<'_> {
    /// Reads a template by its file name.
    fn read(&self, name: &str) -> Result<Template, String> {
        let (place, text) = if let Some(text) = self.inline.get(name) {
            (format!("templates.{name:?}"), text.clone())
        } else if self.mount_path.is_empty() {
            return Err(format!(
                "the template {name:?} is not below [templates], and template.mountPath does not say \
                 where it is"
            ));
        } else {
            let path = format!("{}/{name}", self.mount_path);
            let text = (self.read)(&path);
            let text =
                text.map_err(|error| format!("the template {path} cannot be read: {error}"))?;
            (path, text)
        };
        Template::parse(&text).map_err(|error| format!("{place}:{error}"))
    }
}

#[cfg(test)]
mod tests;
