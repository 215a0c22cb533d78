//! Reads the files of NVSentinel's platform connector: `config.json`, and one file per
//! transformer. Findings name file and line. Keys without a use here are reported with the
//! reason.

mod sink;

use std::fmt;

use contract::RecommendedAction;
use contract::findings::{FileError, Findings, Format};
use contract::names;
use jiff::SignedDuration;
use model::condition::MessageLimits;
use model::event::{MAX_METADATA, MAX_NAME_BYTES, MAX_VALUE_BYTES};
use policy::{CelRule, CompileError, MAX_POLICY_COST, RuleKind};
use serde::{Deserialize, Deserializer, de};
use toml::Spanned;

use super::augment::Labels;
use super::dedup;
use super::overrides::{Override, Overrides};

pub use sink::{Forward, ForwardTls, is_this_machine};

/// Largest number of override rules: each may be evaluated for each event.
pub const MAX_RULES: usize = 256;
/// Longest window and longest cleanup interval of the deduplicator: a lasting fault must be
/// evaluated at least once a day.
pub const MAX_WINDOW: SignedDuration = SignedDuration::from_hours(24);

/// Default window and cleanup interval of the deduplicator.
const WINDOW: SignedDuration = SignedDuration::from_mins(3);
const CLEANUP: SignedDuration = SignedDuration::from_secs(60);

/// Contents of `config.json` that the product uses.
#[derive(Debug, PartialEq, Eq)]
pub struct ConnectorFile {
    /// Enabled transformers, in their order.
    pub pipeline: Vec<TransformerEntry>,
    /// Length limits of node condition messages.
    pub limits: MessageLimits,
    /// Service that receives the events in addition to the store.
    pub forward: Option<Forward>,
    /// Notes for the operator: unused keys, and the reasons.
    pub notes: Vec<String>,
}

/// A transformer of the pipeline.
#[derive(Debug, PartialEq, Eq)]
pub struct TransformerEntry {
    /// Kind of the transformer.
    pub kind: Kind,
    /// Path of its file, as configured; may be empty.
    pub config: String,
}

/// Kinds of transformers, as in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `MetadataAugmentor`, which adds data of the node.
    MetadataAugmentor,
    /// `OverrideTransformer`, which applies rules.
    OverrideTransformer,
    /// `Deduplicator`, which hides repeats.
    Deduplicator,
}

/// Names of the transformers.
const KINDS: [(&str, Kind); 3] = [
    ("MetadataAugmentor", Kind::MetadataAugmentor),
    ("OverrideTransformer", Kind::OverrideTransformer),
    ("Deduplicator", Kind::Deduplicator),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConnectorKeys {
    #[serde(rename = "enableK8sPlatformConnector", default)]
    kubernetes: Option<Switch>,
    #[serde(rename = "K8sConnectorQps", default)]
    qps: Option<Positive>,
    #[serde(rename = "K8sConnectorBurst", default)]
    burst: Option<Positive>,
    #[serde(rename = "MaxNodeConditionMessageLength", default)]
    condition_length: Option<Positive>,
    #[serde(rename = "CompactedHealthEventMsgLen", default)]
    compacted_length: Option<Positive>,
    #[serde(rename = "StoreConnectorMaxRetries", default)]
    store_retries: Option<Number>,
    #[serde(rename = "enableMongoDBStorePlatformConnector", default)]
    mongodb: Option<Switch>,
    #[serde(rename = "enablePostgresDBStorePlatformConnector", default)]
    postgresql: Option<Switch>,
    #[serde(rename = "enableGRPCSinkConnector", default)]
    grpc_sink: Option<Switch>,
    #[serde(rename = "GRPCSinkTarget", default)]
    grpc_target: String,
    #[serde(rename = "GRPCSinkConnectorMaxRetries", default)]
    grpc_retries: Option<Number>,
    #[serde(rename = "GRPCSinkTokenPath", default)]
    grpc_token: String,
    #[serde(rename = "GRPCSinkCAPath", default)]
    grpc_authority: String,
    #[serde(rename = "GRPCSinkCertPath", default)]
    grpc_certificate: String,
    #[serde(rename = "GRPCSinkKeyPath", default)]
    grpc_key: String,
    #[serde(default)]
    pipeline: Vec<PipelineEntry>,
}

/// `"true"` or `"false"`, as NVSentinel's chart writes it, or a JSON boolean.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Switch(bool);

/// A number that is not negative; NVSentinel writes `5.00` in one place and `10` in another.
struct Number;

/// A number above zero, rounded to a whole one.
struct Positive(usize);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PipelineEntry {
    name: String,
    enabled: Option<Switch>,
    #[serde(default)]
    config: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MetadataKeys {
    #[serde(rename = "cacheSize")]
    cache_size: Option<i64>,
    #[serde(rename = "cacheTTL")]
    cache_ttl: Option<String>,
    #[serde(rename = "allowedLabels")]
    allowed_labels: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OverrideKeys {
    enabled: Option<bool>,
    #[serde(default)]
    rules: Vec<Spanned<RuleKeys>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleKeys {
    #[serde(default)]
    name: String,
    #[serde(default)]
    when: Option<Spanned<String>>,
    #[serde(rename = "override", default)]
    change: Option<Spanned<ChangeKeys>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct ChangeKeys {
    #[serde(rename = "isFatal")]
    is_fatal: Option<bool>,
    #[serde(rename = "isHealthy")]
    is_healthy: Option<bool>,
    #[serde(rename = "recommendedAction")]
    action: Option<Spanned<String>>,
    #[serde(rename = "customRecommendedAction")]
    custom: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DedupKeys {
    #[serde(rename = "suppressionWindow")]
    window: Option<String>,
    #[serde(rename = "cleanupInterval")]
    cleanup: Option<String>,
    #[serde(rename = "includeChecks", default)]
    checks: Vec<String>,
}

/// Reads `config.json`. `source` names the file in errors.
pub fn connector(text: &str, source: &str) -> Result<ConnectorFile, FileError> {
    let (keys, mut findings) = Findings::read::<ConnectorKeys>(text, source, Format::Json)?;
    let limits = limits(&keys, &mut findings);
    let forwards = keys.grpc_sink == Some(Switch(true));
    let forward = forwards.then(|| sink::forward(&keys, &mut findings));
    // A disabled entry may have any contents.
    let entries = keys.pipeline.iter().enumerate();
    let enabled = entries.filter(|(_, entry)| entry.enabled == Some(Switch(true)));
    let pipeline = enabled.filter_map(|(at, entry)| {
        let kind = findings.one_of(&format!("pipeline[{at}].name"), &entry.name, &KINDS)?;
        let config = entry.config.clone();
        Some(TransformerEntry { kind, config })
    });
    let pipeline = pipeline.collect();
    let unused = unused(&keys).into_iter().filter(|(read, ..)| *read);
    let notes = unused.map(|(_, keys, why)| format!("{source}: {keys}: not used: {why}"));
    let open = forward.as_ref().and_then(|forward| forward.warning(source));
    findings.result(ConnectorFile {
        notes: notes.chain(open).collect(),
        pipeline,
        limits: limits.unwrap_or_default(),
        forward,
    })
}

/// Returns the keys without a use, each with whether it is present, and the reason.
fn unused(keys: &ConnectorKeys) -> [(bool, &'static str, &'static str); 7] {
    let on = |switch: Option<Switch>| switch == Some(Switch(true));
    let forwards = on(keys.grpc_sink);
    [
        (
            keys.kubernetes == Some(Switch(false)),
            "enableK8sPlatformConnector",
            "whether the cluster is written to goes by the mode that gpuwarden runs in",
        ),
        (
            keys.qps.is_some() || keys.burst.is_some(),
            "K8sConnectorQps, K8sConnectorBurst",
            "requests to the API server are limited by how many are under way, not by rate",
        ),
        (
            on(keys.mongodb) || on(keys.postgresql),
            "enableMongoDBStorePlatformConnector, enablePostgresDBStorePlatformConnector",
            "events are always stored, where gpuwarden is told to by its own settings",
        ),
        (
            keys.store_retries.is_some(),
            "StoreConnectorMaxRetries",
            "a sender is told OK once its events are stored, and otherwise tries again itself",
        ),
        (
            !forwards && (keys.grpc_retries.is_some() || !keys.grpc_token.is_empty()),
            "GRPCSinkConnectorMaxRetries, GRPCSinkTokenPath",
            "the gRPC sink is switched off",
        ),
        (
            !forwards && sink::names_certificates(keys),
            "GRPCSinkCAPath, GRPCSinkCertPath, GRPCSinkKeyPath",
            "the gRPC sink is switched off",
        ),
        (
            forwards && keys.grpc_retries.is_some(),
            "GRPCSinkConnectorMaxRetries",
            "what the target does not take waits on disk and is tried again for ever",
        ),
    ]
}

fn limits(keys: &ConnectorKeys, findings: &mut Findings<'_>) -> Option<MessageLimits> {
    let default = MessageLimits::default();
    let value = |key: &Option<Positive>, default| key.as_ref().map_or(default, |key| key.0);
    let message = value(&keys.condition_length, default.message_bytes());
    let compacted = value(&keys.compacted_length, default.compacted_bytes());
    let limits = MessageLimits::new(message, compacted);
    findings.check("MaxNodeConditionMessageLength", limits)
}

/// Reads `metadata.toml`. Returns the labels, and notes on unused keys.
pub fn metadata(text: &str, source: &str) -> Result<(Labels, Vec<String>), FileError> {
    let (keys, mut findings) = Findings::read::<MetadataKeys>(text, source, Format::Toml)?;
    let labels = keys.allowed_labels.map_or_else(Labels::default, Labels);
    let found = labels.0.len();
    if found > MAX_METADATA {
        let what = format!("{found} entries; an event carries {MAX_METADATA} at most");
        findings.at_key("allowedLabels", what);
    }
    for (at, label) in labels.0.iter().enumerate() {
        findings.check(&format!("allowedLabels[{at}]"), names::label_key(label));
    }
    if let Some(ttl) = &keys.cache_ttl {
        findings.duration("cacheTTL", ttl, SignedDuration::MAX);
    }
    let mut notes = Vec::new();
    if keys.cache_size.is_some() || keys.cache_ttl.is_some() {
        notes.push(format!(
            "{source}: cacheSize, cacheTTL: not used: labels come from the watch of the nodes, \
             which is always current"
        ));
    }
    findings.result((labels, notes))
}

/// Reads `overrides.toml`. Returns the rules, and notes on them.
pub fn overrides(text: &str, source: &str) -> Result<(Overrides, Vec<String>), FileError> {
    let (keys, mut findings) = Findings::read::<OverrideKeys>(text, source, Format::Toml)?;
    if keys.enabled != Some(true) {
        let note = format!(
            "{source}: the {} rules are off, for enabled is not true",
            keys.rules.len()
        );
        return Ok((Overrides::default(), vec![note]));
    }
    if keys.rules.is_empty() {
        findings.at(0, "enabled is true and there are no rules");
    }
    if let Some(first) = keys.rules.get(MAX_RULES) {
        let found = keys.rules.len();
        findings.at(
            first.span().start,
            &format!("{found} rules, at most {MAX_RULES} are taken"),
        );
    }
    let rules: Vec<Override> = keys
        .rules
        .into_iter()
        .take(MAX_RULES)
        .filter_map(|rule| rule_of(rule, &mut findings))
        .collect();
    let costs = rules.iter().map(|rule| rule.when.cost);
    let cost = costs.fold(0, u64::saturating_add);
    if cost > MAX_POLICY_COST {
        let what = format!(
            "the rules together can take {cost} steps for an event, at most {MAX_POLICY_COST} are \
             taken; loop over less"
        );
        findings.at(0, &what);
    }
    findings.result((Overrides { rules }, Vec::new()))
}

/// Reads `dedup.toml`. `source` names the file in errors.
pub fn dedup(text: &str, source: &str) -> Result<dedup::Settings, FileError> {
    let (keys, mut findings) = Findings::read::<DedupKeys>(text, source, Format::Toml)?;
    let mut duration = |path, text: Option<String>, default| match text {
        Some(text) => findings.duration(path, &text, MAX_WINDOW),
        None => Some(default),
    };
    let window = duration("suppressionWindow", keys.window, WINDOW);
    let cleanup = duration("cleanupInterval", keys.cleanup, CLEANUP);
    findings.result(dedup::Settings {
        window: window.unwrap_or_default(),
        cleanup: cleanup.unwrap_or_default(),
        checks: keys.checks,
    })
}

fn rule_of(entry: Spanned<RuleKeys>, findings: &mut Findings<'_>) -> Option<Override> {
    let start = entry.span().start;
    let RuleKeys { name, when, change } =
        findings.begin_entry(entry, |rule| format!("rule '{}'", rule.name));
    if name.trim().is_empty() || name.len() > MAX_NAME_BYTES {
        let what = format!("a rule needs a name of at most {MAX_NAME_BYTES} bytes");
        findings.at(start, &what);
    }
    if when.is_none() {
        findings.wrong("when is missing");
    }
    let when = when.and_then(|when| {
        let refused = |error| match error {
            CompileError::Wrong(what) => {
                findings.wrong_at(when.span().start, format_args!("when {what}"));
            }
            CompileError::NoThread(_) => findings.at(when.span().start, &error.to_string()),
        };
        CelRule::compile(RuleKind::Override, when.get_ref())
            .map_err(refused)
            .ok()
    });
    let change = change.map(Spanned::into_inner).unwrap_or_default();
    if change.is_fatal.is_none() && change.is_healthy.is_none() && change.action.is_none() {
        findings.wrong("override is to have one of isFatal, isHealthy, recommendedAction");
    }
    let action = action_of(&change, findings);
    Some(Override {
        name,
        when: when?,
        is_fatal: change.is_fatal,
        is_healthy: change.is_healthy,
        action,
    })
}

/// Returns the new action, and the name of a custom one.
fn action_of(change: &ChangeKeys, findings: &mut Findings<'_>) -> Option<(i32, String)> {
    let custom_name = change.custom.as_ref().map(|custom| custom.get_ref().trim());
    let custom_name = custom_name.unwrap_or_default();
    let mut action = None;
    if let Some(text) = &change.action {
        let (place, name) = (text.span().start, text.get_ref());
        match RecommendedAction::from_str_name(name) {
            None => {
                let what = format_args!("recommendedAction '{name}' is unknown");
                findings.wrong_at(place, what);
            }
            // The connector would refuse the resulting event, and no reaction could use it.
            Some(RecommendedAction::Custom) if custom_name.is_empty() => findings.wrong_at(
                place,
                "recommendedAction CUSTOM needs a customRecommendedAction",
            ),
            Some(found) => action = Some((found as i32, custom_name.to_owned())),
        }
    }
    if let Some(custom) = &change.custom {
        let is_custom = |(number, _): &(i32, String)| *number == RecommendedAction::Custom as i32;
        if change.action.is_none() || !action.as_ref().is_none_or(is_custom) {
            findings.wrong_at(
                custom.span().start,
                "customRecommendedAction stands beside recommendedAction = 'CUSTOM' only",
            );
        }
        if custom.get_ref().len() > MAX_VALUE_BYTES {
            let what = format_args!("customRecommendedAction has over {MAX_VALUE_BYTES} bytes");
            findings.wrong_at(custom.span().start, what);
        }
    }
    action
}

// === impl Deserialize ===

impl<'de> Deserialize<'de> for Switch {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Switch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"true\" or \"false\"")
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Switch, E> {
                Ok(Switch(value))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Switch, E> {
                match value {
                    "true" => Ok(Switch(true)),
                    "false" => Ok(Switch(false)),
                    _ => Err(E::invalid_value(de::Unexpected::Str(value), &self)),
                }
            }
        }
        from.deserialize_any(Visitor)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = f64::deserialize(from)?;
        if value >= 0.0 {
            return Ok(Self);
        }
        Err(de::Error::custom(format!("{value} is below zero")))
    }
}

impl<'de> Deserialize<'de> for Positive {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = f64::deserialize(from)?;
        if value > 0.0 {
            // Beyond the largest `usize`, the number is over every limit anyway.
            return Ok(Self(format!("{value:.0}").parse().unwrap_or(usize::MAX)));
        }
        Err(de::Error::custom(format!("{value} is not above zero")))
    }
}

#[cfg(test)]
mod tests;
