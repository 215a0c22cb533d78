//! The configuration: the validation part of NVSentinel's file (YAML) for its lifecycle
//! manager, as a `ValidationConfiguration` or only its `spec`.

use std::collections::BTreeMap;

use contract::findings::{FileError, Findings, Format};
use contract::names;
use jiff::SignedDuration;
use model::node::Taint;
use policy::Criterion;
use policy::template::{Template, ValidationVariables};
use serde::Deserialize;
use serde_json::{Value, json};

use super::cluster_view::Readiness;

/// Default limit on groups that run at the same time.
const GROUPS: usize = 3;
/// Default and maximum time limit of an attempt, in seconds.
const TIMEOUT: i64 = 1800;
const LONGEST_TIMEOUT: i64 = 7 * 24 * 3600;
/// Most retries of a group.
const MOST_RETRIES: i64 = 100;
/// Taint of a cordon, which all tests tolerate.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// Configured tests and their providers.
#[derive(Clone, Debug)]
pub struct ValidationConfiguration {
    /// Tests of requests that name none.
    pub(super) default_tests: Vec<String>,
    /// Criteria that a node has to meet to be tested.
    readiness: Vec<(String, Criterion)>,
    /// Most groups that run at the same time.
    pub(super) max_groups: usize,
    /// Providers of tests, by name.
    pub providers: BTreeMap<String, Provider>,
    tests: BTreeMap<String, TestRules>,
    pub(super) gate: Gate,
    /// True if the file has rules for new nodes, which are not supported.
    pub has_new_node_rules: bool,
}

/// Provider of tests: a kind of objects that run tests.
#[derive(Clone, Debug)]
pub struct Provider {
    /// API group of the kind.
    pub group: String,
    /// API version of the kind.
    pub version: String,
    /// Name of the kind.
    pub kind: String,
    /// Plural of the kind, as in API paths.
    pub plural: String,
    pub(super) supports_test_batching: bool,
    pub(super) retries: u32,
    pub(super) timeout: SignedDuration,
    pub(super) succeeded: Condition,
    pub(super) failed: Condition,
    template: Template,
}

/// Settings of a test.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct TestRules {
    pub(super) provider: String,
    image: String,
    command: Vec<String>,
    env: Vec<Variable>,
    pub(super) supports_batching_nodes: bool,
    pub(super) minimum_nodes_per_batch: usize,
    batch_failure_policy: TooFew,
    /// Used by the tests themselves: templates of NVSentinel 1.26 contain the values.
    #[serde(rename = "bandwidthGBps")]
    _bandwidth: Value,
    #[serde(rename = "goodputRatio")]
    _goodput: Value,
}

/// Result of a test with too few nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum TooFew {
    #[default]
    Fail,
    Ignore,
}

/// A variable of the environment.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Variable {
    name: String,
    #[serde(default)]
    value: String,
}

/// A condition in the status of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

/// Measures that keep pods off a node until it is tested, and that are removed then.
#[derive(Clone, Debug, Default)]
pub(super) struct Gate {
    /// True to uncordon the node.
    pub(super) uncordons: bool,
    /// Prefix of the cordon labels.
    pub(super) label_prefix: String,
    /// Taints, and whether each is removed.
    pub(super) taints: Vec<(Taint, bool)>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Wrapper {
    #[serde(rename = "apiVersion")]
    _api_version: Value,
    #[serde(rename = "kind")]
    _kind: Value,
    #[serde(default, rename = "metadata")]
    _metadata: Value,
    spec: File,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    #[serde(default)]
    default_tests: Vec<String>,
    #[serde(default)]
    readiness_criteria: Vec<NamedExpression>,
    max_concurrent_groups: Option<usize>,
    #[serde(default)]
    template_mount_path: String,
    /// Templates by file name, as in NVSentinel's chart. Others are read from files.
    #[serde(default)]
    templates: BTreeMap<String, String>,
    #[serde(default)]
    providers: BTreeMap<String, ProviderKeys>,
    #[serde(default)]
    tests: BTreeMap<String, TestRules>,
    #[serde(default)]
    scheduling_gate: GateKeys,
    #[serde(default)]
    new_node_validation: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedExpression {
    name: String,
    expression: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ProviderKeys {
    api_group: String,
    version: String,
    kind: String,
    resource: String,
    template_file: String,
    #[serde(default)]
    supports_test_batching: bool,
    #[serde(default)]
    retries: u32,
    timeout_seconds: Option<i64>,
    successful_condition: Condition,
    failed_condition: Condition,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct GateKeys {
    cordon: CordonKeys,
    taints: Vec<TaintKeys>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct CordonKeys {
    remove: bool,
    label_prefix: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TaintKeys {
    key: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    effect: String,
    #[serde(default)]
    remove: bool,
}

/// Purpose of an object.
pub(super) struct Run<'a> {
    pub(super) request: &'a str,
    pub(super) group: &'a str,
    pub(super) namespace: &'a str,
    pub(super) nodes: &'a [String],
    pub(super) tests: &'a [String],
}

// === impl ValidationConfiguration ===

impl ValidationConfiguration {
    /// Parses a configuration. `source` names the file in errors, which list everything that is
    /// wrong; `read` reads the file of a template.
    pub fn parse(
        text: &str,
        source: &str,
        read: impl Fn(&str) -> std::io::Result<String>,
    ) -> Result<Self, FileError> {
        let mut findings = Findings::new(text, source, Format::Yaml)?;
        let file = if findings.enter_table("spec") {
            findings.parse::<Wrapper>()?.spec
        } else {
            findings.parse::<File>()?
        };
        let config = file.config(read, &mut findings);
        if findings.count() == 0 {
            config.try_out(&mut findings);
        }
        findings.result(config)
    }

    /// Returns the test of this name and its provider.
    pub(super) fn test(&self, name: &str) -> Option<(&TestRules, &Provider)> {
        let test = self.tests.get(name)?;
        Some((test, self.providers.get(&test.provider)?))
    }

    /// Returns the names of all tests.
    pub(super) fn known_tests(&self) -> String {
        let names: Vec<&str> = self.tests.keys().map(String::as_str).collect();
        names.join(", ")
    }

    /// Returns whether criteria need the `ResourceSlice`s of the node.
    pub fn reads_slices(&self) -> bool {
        self.readiness.iter().any(|(_, one)| one.reads_slices())
    }

    /// Returns whether a node's readiness may change over time without an event.
    pub fn reads_time(&self) -> bool {
        self.readiness.iter().any(|(_, one)| one.reads_time())
    }

    /// Returns the readiness of a node.
    pub fn readiness(&self, node: &Value, slices: &[Value], now: jiff::Timestamp) -> Readiness {
        let mut criteria = self.readiness.iter();
        let fails =
            criteria.find_map(
                |(name, criterion)| match criterion.holds(node, slices, now) {
                    Ok(true) => None,
                    Ok(false) => Some(format!("{name} does not hold")),
                    Err(error) => Some(format!("{name} cannot be evaluated: {error}")),
                },
            );
        fails.map_or(Readiness::Ready, Readiness::Not)
    }

    /// Returns the object of a run, without a name.
    pub(super) fn render(&self, provider: &Provider, run: &Run<'_>) -> Result<Value, String> {
        if let Some(unknown) = run
            .tests
            .iter()
            .find(|test| !self.tests.contains_key(*test))
        {
            return Err(format!("the configuration has no test {unknown}"));
        }
        let first = run.tests.first().and_then(|test| self.tests.get(test));
        let first = first.cloned().unwrap_or_default();
        let taints = self.gate.taints.iter().map(|(taint, _)| taint.clone());
        let cordon = Taint {
            key: UNSCHEDULABLE.to_owned(),
            value: String::new(),
            effect: "NoSchedule".to_owned(),
        };
        let env: Vec<(String, String)> = (first.env.into_iter())
            .map(|one| (one.name, one.value))
            .collect();
        let tolerated: Vec<Taint> = [cordon].into_iter().chain(taints).collect();
        let text = provider.template.render_validation(&ValidationVariables {
            request: run.request,
            group: run.group,
            namespace: run.namespace,
            timeout_seconds: provider.timeout.as_secs(),
            nodes: run.nodes,
            tests: run.tests,
            image: &first.image,
            command: &first.command,
            env: &env,
            tolerated: &tolerated,
        });
        let text = text.map_err(|error| error.to_string())?;
        let object: Value = serde_saphyr::from_str(&text)
            .map_err(|error| format!("the rendered text is not YAML: {error}"))?;
        let version = match provider.group.as_str() {
            "" => provider.version.clone(),
            group => format!("{group}/{}", provider.version),
        };
        if object["apiVersion"] != json!(version) || object["kind"] != json!(provider.kind) {
            let kind = &provider.kind;
            return Err(format!(
                "the rendered object is not a {kind} of {version}, as its provider says"
            ));
        }
        if !object["metadata"].is_object() && !object["metadata"].is_null() {
            return Err("its metadata is not an object".to_owned());
        }
        Ok(object)
    }

    /// Renders each test once with plausible values.
    fn try_out(&self, findings: &mut Findings<'_>) {
        for (name, test) in &self.tests {
            let Some(provider) = self.providers.get(&test.provider) else {
                continue;
            };
            let rendered = self.render(
                provider,
                &Run {
                    request: "request",
                    group: "test-group-1",
                    namespace: "gpuwarden",
                    nodes: &["node-1".to_owned()],
                    tests: std::slice::from_ref(name),
                },
            );
            let rendered =
                rendered.map_err(|error| format!("the template of {}: {error}", test.provider));
            findings.check(&format!("tests.{name}"), rendered);
        }
    }
}

// === impl File ===

impl File {
    fn config(
        self,
        read: impl Fn(&str) -> std::io::Result<String>,
        findings: &mut Findings<'_>,
    ) -> ValidationConfiguration {
        self.scheduling_gate.check(findings);
        let criteria = self.readiness_criteria.into_iter().enumerate();
        let readiness = criteria.filter_map(|(at, NamedExpression { name, expression })| {
            let compiled = Criterion::compile(&expression);
            let compiled = compiled.map_err(|error| format!("{name}: {error}"));
            let path = format!("readinessCriteria[{at}].expression");
            Some((name, findings.check(&path, compiled)?))
        });
        let readiness = readiness.collect();
        let (folder, templates) = (self.template_mount_path, self.templates);
        let text = |file: &str| {
            if let Some(text) = templates.get(file) {
                return Ok(text.clone());
            }
            let path = format!("{}/{file}", folder.trim_end_matches('/'));
            read(&path).map_err(|error| format!("the template {path} cannot be read: {error}"))
        };
        let mut providers = BTreeMap::new();
        for (name, keys) in self.providers {
            let template = text(&keys.template_file).and_then(|text| {
                let template = Template::parse_validation(&text);
                template.map_err(|error| format!("{}:{error}", keys.template_file))
            });
            let template = findings.check(&format!("providers.{name}.templateFile"), template);
            providers.insert(name.clone(), keys.provider(&name, template, findings));
        }
        for (name, test) in &self.tests {
            let path = format!("tests.{name}");
            let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            if name.is_empty() || !name.chars().all(allowed) || name.starts_with('-') {
                let what =
                    "names of objects begin with it: small letters, digits and - belong here";
                findings.at_key(&path, what);
            }
            let provider = &test.provider;
            if !providers.contains_key(provider) {
                findings.at_key(&path, format_args!("there is no provider {provider:?}"));
            }
            if !test.supports_batching_nodes && test.minimum_nodes_per_batch > 1 {
                let wanted = "that is above 1, and supportsBatchingNodes is false: the test would \
                              never run";
                findings.refuse(&format!("{path}.minimumNodesPerBatch"), wanted);
            }
        }
        for (at, name) in self.default_tests.iter().enumerate() {
            if !self.tests.contains_key(name) {
                let what = format!("there is no test {name:?}");
                findings.at_key(&format!("defaultTests[{at}]"), what);
            }
        }
        let max_groups = self.max_concurrent_groups.unwrap_or(GROUPS);
        if max_groups == 0 {
            findings.refuse(
                "maxConcurrentGroups",
                "no test would ever run; write 1 or more",
            );
        }
        let providers = providers.into_iter();
        ValidationConfiguration {
            default_tests: self.default_tests,
            readiness,
            max_groups,
            providers: providers
                .filter_map(|(name, one)| Some((name, one?)))
                .collect(),
            tests: self.tests,
            gate: self.scheduling_gate.gate(),
            has_new_node_rules: self.new_node_validation.is_some_and(|keys| !keys.is_null()),
        }
    }
}

// === impl ProviderKeys ===

impl ProviderKeys {
    fn provider(
        self,
        name: &str,
        template: Option<Template>,
        findings: &mut Findings<'_>,
    ) -> Option<Provider> {
        let path = |key: &str| format!("providers.{name}.{key}");
        let timeout = Some(self.timeout_seconds.unwrap_or(TIMEOUT));
        let timeout = findings.whole_number(
            &path("timeoutSeconds"),
            timeout,
            1..=LONGEST_TIMEOUT,
            " of seconds",
        );
        let retries = Some(i64::from(self.retries));
        findings.whole_number(&path("retries"), retries, 0..=MOST_RETRIES, "")?;
        for (key, one) in [
            ("successfulCondition", &self.successful_condition),
            ("failedCondition", &self.failed_condition),
        ] {
            if one.kind.is_empty() || one.status.is_empty() {
                findings.at_key(&path(key), "it lacks its type or its status");
            }
        }
        Some(Provider {
            group: self.api_group,
            version: self.version,
            kind: self.kind,
            plural: self.resource,
            supports_test_batching: self.supports_test_batching,
            retries: self.retries,
            timeout: SignedDuration::from_secs(timeout?),
            succeeded: self.successful_condition,
            failed: self.failed_condition,
            template: template?,
        })
    }
}

// === impl GateKeys ===

impl GateKeys {
    /// Checks the names that would be written on nodes.
    fn check(&self, findings: &mut Findings<'_>) {
        let prefix = names::label_prefix(&self.cordon.label_prefix);
        findings.check("schedulingGate.cordon.labelPrefix", prefix);
        for (at, taint) in self.taints.iter().enumerate() {
            let path = |key: &str| format!("schedulingGate.taints[{at}].{key}");
            findings.check(&path("key"), names::label_key(&taint.key));
            findings.check(&path("value"), names::label_value(&taint.value));
            // Without an effect, a taint stands for all effects, and cannot be removed.
            if !taint.effect.is_empty() || taint.remove {
                findings.check(&path("effect"), names::taint_effect(&taint.effect));
            }
        }
    }

    fn gate(self) -> Gate {
        let taints = self.taints.into_iter().map(|one| {
            let taint = Taint {
                key: one.key,
                value: one.value,
                effect: one.effect,
            };
            (taint, one.remove)
        });
        Gate {
            uncordons: self.cordon.remove,
            label_prefix: self.cordon.label_prefix,
            taints: taints.collect(),
        }
    }
}

// === impl TestRules ===

impl TestRules {
    /// Returns whether the test is skipped if it has too few nodes.
    pub(super) fn may_be_skipped(&self) -> bool {
        self.batch_failure_policy == TooFew::Ignore
    }
}

// === impl Condition ===

impl Condition {
    /// Returns the object's message for this condition, for people. `None` if the object lacks it.
    pub(super) fn of(&self, object: &Value) -> Option<String> {
        let conditions = object.pointer("/status/conditions")?.as_array()?;
        let text = |one: &Value, key: &str| one[key].as_str().unwrap_or_default().to_owned();
        let found = conditions.iter().find(|one| {
            one["type"] == self.kind.as_str() && one["status"] == self.status.as_str()
        })?;
        let (reason, message) = (text(found, "reason"), text(found, "message"));
        Some(match (reason.as_str(), message.as_str()) {
            ("", "") => format!("its condition {} is {}", self.kind, self.status),
            (one, "") | ("", one) => one.to_owned(),
            _ => format!("{reason}: {message}"),
        })
    }
}
