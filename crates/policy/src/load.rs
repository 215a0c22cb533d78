//! Loading of a policy file. All findings are reported at once, each with its line and a hint.

use contract::findings::{FileError, Findings, Format};
use contract::names;
use model::node::Taint;
use serde::Deserialize;
use toml::Spanned;

use super::route::Written;
use super::{
    CelRule, CompileError, MAX_COST, NamedPolicy, Policy, ProtectFrom, Route, RouteDrain, RuleKind,
    RuleSet, Uncordon,
};

mod brake;
mod devices;
mod keys;

/// Finding about an empty file.
const EMPTY: &str = "it is empty; a comment in it (# no rules) says that no rules are meant";

/// Finding about a file that is not TOML and most likely holds the values of a chart.
const YAML: &str = "it is YAML, such as values of a chart, and a policy is TOML: the text `config.toml` that \
                    `helm template` shows in the ConfigMap of fault-quarantine; docs/policy.md has the keys";

/// Most rule sets of a file, including those of named policies, and most routes. Each is
/// evaluated for each fault. The largest known files have some dozens.
pub const MAX_RULE_SETS: usize = 512;
/// Most rules of a file.
pub const MAX_RULES: usize = 2048;
/// Upper bound of the steps of all rules of a file together, as they are evaluated for one
/// event.
pub const MAX_POLICY_COST: u64 = 4 * MAX_COST;

/// Top-level keys of a policy file.
#[derive(Deserialize)]
struct PolicyFile {
    #[serde(rename = "label-prefix")]
    label_prefix: Option<String>,
    #[serde(rename = "circuitBreaker")]
    circuit_breaker: Option<brake::CircuitBreakerEntry>,
    brake: Option<brake::BrakeEntry>,
    #[serde(rename = "device-taints")]
    device_taints: Option<devices::DeviceTaintsEntry>,
    #[serde(rename = "match-any-all", default)]
    match_any_all: AnyAll,
    #[serde(rename = "unhealthy-taint", default)]
    unhealthy_taint: bool,
    #[serde(rename = "uncordon-labels")]
    uncordon_labels: Option<bool>,
    #[serde(default)]
    uncordon: Uncordon,
    #[serde(rename = "protect-from", default)]
    protect_from: Vec<ProtectFrom>,
    #[serde(rename = "rule-sets", default)]
    rule_sets: Vec<Spanned<RuleSetEntry>>,
    #[serde(default)]
    routes: Vec<Spanned<RouteEntry>>,
    #[serde(default)]
    policies: Vec<Spanned<PolicyEntry>>,
}

/// Meaning of `any` and `all` together in one rule set.
#[derive(Deserialize, Clone, Copy, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum AnyAll {
    /// Both must hold, as the names say.
    #[default]
    Both,
    /// Either of the two suffices, as in NVSentinel.
    Either,
}

#[derive(Deserialize)]
struct PolicyEntry {
    name: String,
    #[serde(rename = "rule-sets", default)]
    rule_sets: Vec<Spanned<RuleSetEntry>>,
}

#[derive(Deserialize)]
struct RuleSetEntry {
    /// True if the rule set is enabled, which is the default, as NVSentinel's chart renders it.
    #[serde(default = "on")]
    enabled: bool,
    #[serde(rename = "version", default)]
    _version: String,
    name: String,
    #[serde(default)]
    priority: i64,
    #[serde(rename = "match", default)]
    matches: MatchEntry,
    taint: Option<Spanned<TaintEntry>>,
    cordon: Option<CordonEntry>,
    #[serde(rename = "taint-devices")]
    taint_devices: Option<Spanned<u32>>,
}

#[derive(Deserialize)]
struct RouteEntry {
    name: String,
    #[serde(rename = "match", default)]
    matches: MatchEntry,
    drain: Option<Spanned<Written>>,
    remediate: Option<Spanned<bool>>,
    approve: Option<Spanned<bool>>,
}

#[derive(Deserialize, Default)]
struct MatchEntry {
    #[serde(default)]
    any: Vec<RuleEntry>,
    #[serde(default)]
    all: Vec<RuleEntry>,
}

#[derive(Deserialize)]
struct RuleEntry {
    kind: Spanned<String>,
    expression: Spanned<String>,
}

#[derive(Deserialize)]
struct TaintEntry {
    key: Option<Spanned<String>>,
    value: Option<Spanned<String>>,
    effect: Option<Spanned<String>>,
}

#[derive(Deserialize)]
struct CordonEntry {
    #[serde(rename = "shouldCordon", default)]
    should_cordon: bool,
}

/// Parses a policy and checks all of it.
pub(super) fn parse(text: &str, source: &str) -> Result<Policy, FileError> {
    let mut findings = Findings::new(text, source, Format::Toml)?;
    if text.trim().is_empty() {
        // An empty file is most likely an accident of an editor or a disk, and must not drop
        // all rules.
        return Err(findings.stop(0, EMPTY));
    }
    let file: PolicyFile = match findings.parse_with(keys::example) {
        Ok(file) => file,
        Err(_) if looks_like_yaml(text) => return Err(findings.stop(0, YAML)),
        Err(error) => return Err(error),
    };
    if let Some((offset, what)) = beyond_the_limits(&file) {
        return Err(findings.stop(offset, &what));
    }
    let mut warnings = Vec::new();
    for key in keys::unknown(findings.keys()) {
        if key.is_error {
            findings.at(key.offset, &key.what);
        } else {
            warnings.push(findings.text_at(key.offset, &key.what));
        }
    }
    let mut reader = Reader {
        findings,
        warnings,
        any_or_all: file.match_any_all == AnyAll::Either,
        device_taints: file.device_taints.is_some(),
        cost: 0,
        unchecked: None,
    };
    if let Some(prefix) = &file.label_prefix {
        reader
            .findings
            .check("label-prefix", names::label_prefix(prefix));
    }
    let rule_sets = reader.rule_sets(file.rule_sets);
    let mut policies: Vec<NamedPolicy> = Vec::new();
    for entry in file.policies {
        let (start, entry) = (entry.span().start, entry.into_inner());
        let name = entry.name;
        if name.trim().is_empty() {
            reader.findings.at(start, "a policy needs a name");
        } else if policies.iter().any(|known| known.name == name) {
            let what = format!("policy '{name}' is there twice: give one of them another name");
            reader.findings.at(start, &what);
        }
        let rule_sets = reader.rule_sets(entry.rule_sets);
        policies.push(NamedPolicy { name, rule_sets });
    }
    let routes = reader.routes(file.routes);
    // Users of NVSentinel's file format have scripts that look for its labels.
    let of_reference = file.circuit_breaker.is_some();
    let brake = brake::brake(file.brake, file.circuit_breaker, &mut reader.findings);
    let device_taints = file
        .device_taints
        .map(|entry| devices::device_taints(entry, &mut reader.findings));
    if let Some(why) = reader.unchecked {
        reader.findings.at(0, &why);
    }
    reader.findings.result(Policy {
        source: source.to_owned(),
        label_prefix: file.label_prefix.unwrap_or_default(),
        rule_sets,
        routes,
        policies,
        unhealthy_taint: file.unhealthy_taint,
        uncordon_labels: file.uncordon_labels.unwrap_or(of_reference),
        uncordon: file.uncordon,
        protect_from: file.protect_from,
        brake,
        device_taints,
        warnings: reader.warnings,
    })
}

/// Returns whether the first line with content looks like a key in YAML.
fn looks_like_yaml(text: &str) -> bool {
    let lines = text.lines().map(str::trim);
    let mut saying = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let first = saying.next().unwrap_or_default();
    let key = first
        .split_once(':')
        .map(|(key, rest)| (key.trim_matches('"'), rest));
    first == "---"
        || key.is_some_and(|(key, rest)| {
            let is_name = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
            key.chars().all(is_name) && (rest.is_empty() || rest.starts_with(' '))
        })
}

/// Returns the finding about a file with too many rule sets or rules.
fn beyond_the_limits(file: &PolicyFile) -> Option<(usize, String)> {
    let sets = file.policies.iter().map(|entry| &entry.get_ref().rule_sets);
    let sets: Vec<_> = file.rule_sets.iter().chain(sets.flatten()).collect();
    let rules = sets.iter().map(|entry| &entry.get_ref().matches);
    let rules = rules.chain(file.routes.iter().map(|entry| &entry.get_ref().matches));
    let rules: usize = rules.map(|entry| entry.any.len() + entry.all.len()).sum();
    if let Some(beyond) = sets.get(MAX_RULE_SETS) {
        let (start, found) = (beyond.span().start, sets.len());
        let what = format!("{found} rule sets, at most {MAX_RULE_SETS} are taken");
        return Some((start, what));
    }
    if let Some(beyond) = file.routes.get(MAX_RULE_SETS) {
        let (start, found) = (beyond.span().start, file.routes.len());
        let what = format!("{found} routes, at most {MAX_RULE_SETS} are taken");
        return Some((start, what));
    }
    (rules > MAX_RULES).then(|| (0, format!("{rules} rules, at most {MAX_RULES} are taken")))
}

/// State of loading a file.
struct Reader<'a> {
    findings: Findings<'a>,
    warnings: Vec<String>,
    any_or_all: bool,
    /// True if the file has the table that device taints need.
    device_taints: bool,
    /// Steps of all rules so far.
    cost: u64,
    /// Reason why some rules could not be checked.
    unchecked: Option<String>,
}

// === impl Reader ===

impl Reader<'_> {
    /// Returns the enabled rule sets. Disabled ones are checked as well.
    fn rule_sets(&mut self, entries: Vec<Spanned<RuleSetEntry>>) -> Vec<RuleSet> {
        let rule_set = |entry| self.rule_set(entry);
        entries.into_iter().filter_map(rule_set).collect()
    }

    fn rule_set(&mut self, entry: Spanned<RuleSetEntry>) -> Option<RuleSet> {
        let start = entry.span().start;
        let title = |entry: &RuleSetEntry| format!("rule set '{}'", entry.name);
        let entry = self.findings.begin_entry(entry, title);
        if entry.name.trim().is_empty() {
            self.findings.at(start, "a rule set needs a name");
        }
        let any = self.rules(entry.matches.any);
        let all = self.rules(entry.matches.all);
        let taint = entry.taint.and_then(|taint| self.taint(&entry.name, taint));
        let rule_set = RuleSet {
            name: entry.name,
            priority: entry.priority,
            any,
            all,
            any_or_all: self.any_or_all,
            taint,
            cordon: entry.cordon.is_some_and(|cordon| cordon.should_cordon),
            taint_devices: entry.taint_devices.map(|max| self.taint_devices(&max)),
        };
        entry.enabled.then_some(rule_set)
    }

    /// Returns the routes. Their names must be unique, since messages name the route that
    /// skipped a stage.
    fn routes(&mut self, entries: Vec<Spanned<RouteEntry>>) -> Vec<Route> {
        let mut routes: Vec<Route> = Vec::new();
        for entry in entries {
            let start = entry.span().start;
            let title = |entry: &RouteEntry| format!("route '{}'", entry.name);
            let entry = self.findings.begin_entry(entry, title);
            if entry.name.trim().is_empty() {
                self.findings.at(start, "a route needs a name");
            } else if routes.iter().any(|known| known.rules.name == entry.name) {
                let what = "it is there twice: give one of them another name";
                self.findings.wrong_at(start, format_args!("{what}"));
            }
            if entry.matches.any.is_empty() && entry.matches.all.is_empty() {
                let what = "it has no rules below match; kind = \"HealthEvent\" with \
                            expression = \"true\" fits every event";
                self.findings.wrong_at(start, format_args!("{what}"));
            }
            let drain = entry.drain.map_or(RouteDrain::Graceful, |written| {
                RouteDrain::parse(written.get_ref()).unwrap_or_else(|| {
                    let what = "drain is false, \"graceful\" or \"forceful\"";
                    self.findings
                        .wrong_at(written.span().start, format_args!("{what}"));
                    RouteDrain::No
                })
            });
            let leave = drain != RouteDrain::No;
            if let Some(remediate) = entry
                .remediate
                .as_ref()
                .filter(|one| *one.get_ref() && !leave)
            {
                let what = "remediate = true with drain = false would repair the node under its \
                            pods; write remediate = false, or drain = \"forceful\"";
                let start = remediate.span().start;
                self.findings.wrong_at(start, format_args!("{what}"));
            }
            if let Some(approve) = entry
                .approve
                .as_ref()
                .filter(|one| *one.get_ref() && !leave)
            {
                let what = "approve = true with drain = false leaves nothing to approve; leave it \
                            out, or write drain = \"graceful\"";
                let start = approve.span().start;
                self.findings.wrong_at(start, format_args!("{what}"));
            }
            routes.push(Route {
                rules: RuleSet {
                    name: entry.name,
                    priority: 0,
                    any: self.rules(entry.matches.any),
                    all: self.rules(entry.matches.all),
                    any_or_all: self.any_or_all,
                    taint: None,
                    cordon: false,
                    taint_devices: None,
                },
                drain,
                remediate: entry.remediate.map_or(leave, Spanned::into_inner),
                approve: entry.approve.is_some_and(Spanned::into_inner),
            });
        }
        routes
    }

    /// Returns the largest number of faulty GPUs that do not take their node out.
    fn taint_devices(&mut self, max: &Spanned<u32>) -> u32 {
        let start = max.span().start;
        if !self.device_taints {
            let what = "taint-devices needs the table [device-taints], which says how devices are \
                        tainted; it may be empty";
            self.findings.wrong_at(start, format_args!("{what}"));
        }
        if *max.get_ref() == 0 {
            let what = "taint-devices = 0 taints none; leave it out, or write 1";
            self.findings.wrong_at(start, format_args!("{what}"));
        }
        *max.get_ref()
    }

    fn rules(&mut self, entries: Vec<RuleEntry>) -> Vec<CelRule> {
        let rule = |entry| self.rule(&entry);
        entries.into_iter().filter_map(rule).collect()
    }

    fn rule(&mut self, entry: &RuleEntry) -> Option<CelRule> {
        let (expression, place) = (entry.expression.get_ref(), entry.expression.span().start);
        let Some(kind) = RuleKind::parse(entry.kind.get_ref()) else {
            let what = format_args!(
                "kind '{}' is unknown; it is HealthEvent or Node",
                entry.kind.get_ref()
            );
            self.findings.wrong_at(entry.kind.span().start, what);
            // An error in both kinds is an error whichever kind is meant.
            let node = CelRule::compile(RuleKind::Node, expression).err();
            let event = CelRule::compile(RuleKind::HealthEvent, expression).err();
            if let (Some(why), Some(_)) = (event, node) {
                self.refused(place, &why);
            }
            return None;
        };
        let rule = CelRule::compile(kind, expression)
            .map_err(|why| self.refused(place, &why))
            .ok()?;
        let before = self.cost;
        self.cost = before.saturating_add(rule.cost);
        if before <= MAX_POLICY_COST && self.cost > MAX_POLICY_COST {
            let what = format_args!(
                "the rules up to here can take {} steps, at most {MAX_POLICY_COST} are taken in \
                 one file; loop over less",
                self.cost
            );
            self.findings.wrong_at(place, what);
        }
        Some(rule)
    }

    fn refused(&mut self, place: usize, why: &CompileError) {
        match why {
            CompileError::Wrong(what) => {
                let what = format_args!("expression {what}");
                self.findings.wrong_at(place, what);
            }
            // Applies to all rules rather than to this one.
            CompileError::NoThread(_) => self.unchecked = Some(why.to_string()),
        }
    }

    /// Returns the taint. An incomplete one has no effect, as in NVSentinel, and causes a
    /// warning.
    fn taint(&mut self, rule_set: &str, entry: Spanned<TaintEntry>) -> Option<Taint> {
        let start = entry.span().start;
        let TaintEntry { key, value, effect } = entry.into_inner();
        let filled = |part: Option<Spanned<String>>| part.filter(|text| !text.get_ref().is_empty());
        let (Some(key), Some(value), Some(effect)) = (filled(key), filled(value), filled(effect))
        else {
            let what = format!(
                "rule set '{rule_set}': the taint has no effect: it needs key, value and effect"
            );
            self.warnings.push(self.findings.text_at(start, &what));
            return None;
        };
        let (key, value) = (
            self.name("taint.key", key, names::label_key),
            self.name("taint.value", value, names::label_value),
        );
        let effect = self.name("taint.effect", effect, names::taint_effect)?;
        let (key, value) = (key?, value?);
        Some(Taint { key, value, effect })
    }

    /// Returns the text if Kubernetes accepts it as a name of this sort.
    fn name(
        &mut self,
        key: &str,
        text: Spanned<String>,
        check: fn(&str) -> Result<(), names::WrongName>,
    ) -> Option<String> {
        let start = text.span().start;
        if let Err(error) = check(text.get_ref()) {
            let what = format_args!("{key}: {error}");
            self.findings.wrong_at(start, what);
            return None;
        }
        Some(text.into_inner())
    }
}

fn on() -> bool {
    true
}
