//! Keys of a policy file: findings about unknown keys, and the form of each key's values.
//!
//! NVSentinel ignores unknown keys. Most of them are typos, and a setting that is lost to a
//! typo is missed only when it is needed, so unknown keys are errors. Keys of NVSentinel
//! without a use here are known, so that its files load.

use contract::findings::Key;
use contract::nearest::hint;

/// All keys: table, name, and an example. Rule sets of named policies have
/// the same keys as those of the file.
#[rustfmt::skip]
const KEYS: [(&str, &str, &str); 55] = [
    ("", "label-prefix", "label-prefix = \"example.com/\""),
    ("", "circuitBreaker", "[circuitBreaker] with percentage = 50 and duration = \"5m\""),
    ("", "brake", "[[brake.budgets]] and max = \"10%\""),
    ("", "device-taints", "[device-taints] with xid = \"NoSchedule\""),
    ("", "match-any-all", "match-any-all = \"both\" or match-any-all = \"either\""),
    ("", "unhealthy-taint", TRUE_OR_FALSE),
    ("", "uncordon-labels", TRUE_OR_FALSE),
    ("", "uncordon", "uncordon = \"releases\", \"not-during-repair\" or \"never\""),
    ("", "protect-from", "protect-from = [\"cluster-autoscaler\", \"karpenter\", \"gpu-driver-upgrade\"]"),
    ("", "rule-sets", "each rule set below a line [[rule-sets]]"),
    ("", "routes", "each route below a line [[routes]]"),
    ("", "policies", "each policy below a line [[policies]]"),
    ("brake", "budgets", "each budget below a line [[brake.budgets]]"),
    ("brake.budgets", "max", "max = 5 or max = \"10%\""),
    ("brake.budgets", "keep", "keep = 64 or keep = \"90%\""),
    ("brake.budgets", "per", "per = \"topology.kubernetes.io/zone\""),
    ("circuitBreaker", "percentage", "percentage = 50"),
    ("circuitBreaker", "duration", "duration = \"5m\""),
    ("device-taints", "xid", "xid = \"NoSchedule\""),
    ("device-taints", "gpu-lost", "gpu-lost = \"NoSchedule\""),
    ("device-taints", "unmonitored", "unmonitored = \"None\""),
    ("device-taints", "memory", "memory = \"NoSchedule\""),
    ("device-taints", "nvlink", "nvlink = \"NoSchedule\""),
    ("device-taints", "thermal", "thermal = \"None\""),
    ("policies", "name", NAME),
    ("policies", "rule-sets", "each rule set below a line [[rule-sets]]"),
    ("rule-sets", "enabled", TRUE_OR_FALSE),
    ("rule-sets", "version", "version = \"1\""),
    ("rule-sets", "name", NAME),
    ("rule-sets", "priority", "priority = 100"),
    ("rule-sets", "match", "rules below [[rule-sets.match.any]] or [[rule-sets.match.all]]"),
    ("rule-sets", "taint", "[rule-sets.taint] with key, value and effect"),
    ("rule-sets", "cordon", "[rule-sets.cordon] and shouldCordon = true"),
    ("rule-sets", "taint-devices", "taint-devices = 1"),
    ("rule-sets.match", "any", "each rule below a line [[rule-sets.match.any]]"),
    ("rule-sets.match", "all", "each rule below a line [[rule-sets.match.all]]"),
    ("rule-sets.match.any", "kind", KIND),
    ("rule-sets.match.any", "expression", EXPRESSION),
    ("rule-sets.match.all", "kind", KIND),
    ("rule-sets.match.all", "expression", EXPRESSION),
    ("rule-sets.taint", "key", "key = \"example.com/gpu\""),
    ("rule-sets.taint", "value", "value = \"broken\""),
    ("rule-sets.taint", "effect", "effect = \"NoSchedule\""),
    ("rule-sets.cordon", "shouldCordon", TRUE_OR_FALSE),
    ("routes", "name", NAME),
    ("routes", "match", "rules below [[routes.match.any]] or [[routes.match.all]]"),
    ("routes", "drain", "drain = false, drain = \"graceful\" or drain = \"forceful\""),
    ("routes", "remediate", TRUE_OR_FALSE),
    ("routes", "approve", TRUE_OR_FALSE),
    ("routes.match", "any", "each rule below a line [[routes.match.any]]"),
    ("routes.match", "all", "each rule below a line [[routes.match.all]]"),
    ("routes.match.any", "kind", KIND),
    ("routes.match.any", "expression", EXPRESSION),
    ("routes.match.all", "kind", KIND),
    ("routes.match.all", "expression", EXPRESSION),
];
const TRUE_OR_FALSE: &str = "true or false, without quotes";
const NAME: &str = "name = \"fatal faults\"";
const KIND: &str = "kind = \"HealthEvent\" or kind = \"Node\"";
const EXPRESSION: &str = "expression = \"event.isFatal\"";

/// Keys of NVSentinel that have no use here, and what to do instead.
const UNUSED: [(&str, &str); 2] = [
    (
        "skip-node-labels",
        "NVSentinel's list of nodes that it leaves alone has no effect here; add a rule of kind \
         Node to each rule set, such as !('key' in node.metadata.labels)",
    ),
    (
        "rule-sets.label",
        "NVSentinel's label of a rule set has no effect here; a taint, or the label \
         cordon-reason, tells which rule set matched",
    ),
];

/// A key without a use.
pub(super) struct UnknownKey {
    /// Offset of the key in the file, in bytes.
    pub(super) offset: usize,
    /// Text of the finding.
    pub(super) what: String,
    /// True if the key makes the file unusable.
    pub(super) is_error: bool,
}

/// Returns the keys of a file without a use, in the order of the file.
pub(super) fn unknown(keys: &[Key]) -> Vec<UnknownKey> {
    let mut found: Vec<UnknownKey> = keys.iter().filter_map(unknown_key).collect();
    found.sort_by(|a, b| (a.offset, &a.what).cmp(&(b.offset, &b.what)));
    found
}

fn unknown_key(key: &Key) -> Option<UnknownKey> {
    let (within, path) = (within(key), &key.path);
    let known: Vec<&str> = keys_of(within).collect();
    let offset = key.at.filter(|_| !known.is_empty())?;
    if known.contains(&&*key.name) {
        return None;
    }
    let place = match within {
        "" => key.name.clone(),
        within => format!("{within}.{}", key.name),
    };
    let unused = UNUSED.iter().find(|(unused, _)| *unused == place);
    let what = if let Some((_, why)) = unused {
        format!("'{path}': {why}")
    } else {
        let hint = hint(&key.name, &known).unwrap_or_else(|| otherwise(&key.name, &known));
        format!("unknown key '{path}'; {hint}")
    };
    Some(UnknownKey {
        offset,
        what,
        is_error: unused.is_none(),
    })
}

/// Returns what to do about a key that is like none of the `known` ones.
fn otherwise(key: &str, known: &[&str]) -> String {
    if keys_of("").any(|top| top == key) {
        return "it is of the whole file, so it stands before the first [[rule-sets]]".to_owned();
    }
    format!("there is {}", known.join(", "))
}

/// Returns the form of a key's values.
pub(super) fn example(key: &Key) -> Option<String> {
    let mut known = KEYS.iter();
    let found = known.find(|(table, name, _)| *table == within(key) && *name == key.name);
    found.map(|(.., example)| (*example).to_owned())
}

/// Returns the tables around a key. Rule sets of a named policy have the same keys as others.
fn within(key: &Key) -> &str {
    let within = &*key.within;
    within.strip_prefix("policies.").unwrap_or(within)
}

fn keys_of(table: &str) -> impl Iterator<Item = &'static str> {
    let keys = KEYS.iter().filter(move |(within, ..)| *within == table);
    keys.map(|(_, key, _)| *key)
}
