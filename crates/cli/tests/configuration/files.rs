//! Configuration files of NVSentinel, with every key that it documents, load as they are, and
//! say what they say there.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use connector::transform::load;
use contract::ProcessingStrategy;
use diagnosis::catalog::{Catalog, Overrides};
use fleet::brake::switch::{BreakerState, Switch};
use jiff::SignedDuration;
use policy::Policy;

/// Reads a file; returns what it says in short, and what was said of keys that have no meaning
/// here.
type Read = fn(&str) -> (String, Vec<String>);

const FILES: [(&str, &str, Read, &str, &[&str]); 8] = [
    (
        "fault-quarantine: config.toml",
        include_str!("files/quarantine.toml"),
        quarantine,
        "k8saas.nvidia.com/ [taint what is fatal: AggregatedNodeHealth=True:NoSchedule, cordon] \
         50% in 300 s",
        &[],
    ),
    (
        "platform-connectors: config.json",
        include_str!("files/config.json"),
        connector,
        "MetadataAugmentor /etc/config/metadata.toml, Deduplicator /etc/config/dedup.toml, \
         1024 and 72 bytes",
        &[
            "K8sConnectorQps, K8sConnectorBurst",
            "enableMongoDBStorePlatformConnector, enablePostgresDBStorePlatformConnector",
            "StoreConnectorMaxRetries",
            "GRPCSinkConnectorMaxRetries, GRPCSinkTokenPath",
        ],
    ),
    (
        "platform-connectors: metadata.toml",
        include_str!("files/metadata.toml"),
        metadata,
        "25 labels, topology.kubernetes.io/zone to network.topology.nvidia.com/core",
        &["cacheSize, cacheTTL"],
    ),
    (
        "platform-connectors: overrides.toml",
        include_str!("files/overrides.toml"),
        overrides,
        "one zone is being rebuilt: Some(false) Some(false) NONE; two codes: None None \
         CONTACT_SUPPORT",
        &[],
    ),
    (
        "platform-connectors: dedup.toml",
        include_str!("files/dedup.toml"),
        dedup,
        "180 s, 60 s, SysLogsXIDError SysLogsSXIDError",
        &[],
    ),
    (
        "syslog-health-monitor: nic-driver.toml",
        include_str!("files/nic-driver.toml"),
        nic_driver,
        "cmd_exec_timeout",
        &[],
    ),
    (
        "syslog-health-monitor: cancellations.toml",
        include_str!("files/cancellations.toml"),
        cancellations,
        "162 ends 163",
        &[],
    ),
    (
        "ConfigMap circuit-breaker",
        include_str!("files/circuit-breaker.json"),
        circuit_breaker,
        "tripped, and what has accumulated is to be dropped",
        &[],
    ),
];

#[test]
fn the_files_of_the_reference_load_unchanged() {
    for (what, text, read, expected, notes) in FILES {
        let (found, told) = read(text);
        assert_eq!(found, expected, "{what}");
        assert_eq!(told.len(), notes.len(), "{what}: {told:?}");
        for (told, note) in told.iter().zip(notes) {
            assert!(told.contains(note), "{what}: {told}");
        }
    }
}

fn quarantine(text: &str) -> (String, Vec<String>) {
    let policy = Policy::parse(text, "config.toml").unwrap();
    let sets = policy.rule_sets.iter().map(|set| {
        let taint = set.taint.as_ref().map(ToString::to_string);
        let cordon = if set.cordon { ", cordon" } else { "" };
        format!("[{}: {}{cordon}]", set.name, taint.unwrap_or_default())
    });
    let sets: Vec<String> = sets.collect();
    let window = policy.brake.window.unwrap();
    let found = format!(
        "{} {} {}% in {} s",
        policy.label_prefix,
        sets.join(" "),
        window.percentage,
        window.duration.as_secs()
    );
    (found, policy.warnings)
}

fn connector(text: &str) -> (String, Vec<String>) {
    let file = load::connector(text, "config.json").unwrap();
    let entries = file.pipeline.iter();
    let entries = entries.map(|entry| format!("{:?} {}", entry.kind, entry.config));
    let entries: Vec<String> = entries.collect();
    let (message, compacted) = (file.limits.message_bytes(), file.limits.compacted_bytes());
    let found = format!("{}, {message} and {compacted} bytes", entries.join(", "));
    (found, file.notes)
}

fn metadata(text: &str) -> (String, Vec<String>) {
    let (labels, notes) = load::metadata(text, "metadata.toml").unwrap();
    let labels = labels.0;
    let (first, last) = (labels.first().unwrap(), labels.last().unwrap());
    (format!("{} labels, {first} to {last}", labels.len()), notes)
}

fn overrides(text: &str) -> (String, Vec<String>) {
    let (overrides, notes) = load::overrides(text, "overrides.toml").unwrap();
    let rules = overrides.rules.iter().map(|rule| {
        let (action, _) = rule.action.clone().unwrap();
        let action = contract::action_name(action);
        let (fatal, healthy) = (rule.is_fatal, rule.is_healthy);
        format!("{}: {fatal:?} {healthy:?} {action}", rule.name)
    });
    (rules.collect::<Vec<_>>().join("; "), notes)
}

fn dedup(text: &str) -> (String, Vec<String>) {
    let settings = load::dedup(text, "dedup.toml").unwrap();
    let seconds = |duration: SignedDuration| duration.as_secs();
    let found = format!(
        "{} s, {} s, {}",
        seconds(settings.window),
        seconds(settings.cleanup),
        settings.checks.join(" ")
    );
    (found, Vec::new())
}

fn catalog(text: &str) -> Catalog {
    Catalog::builtin().with(&Overrides::parse(text, "file.toml").unwrap())
}

fn nic_driver(text: &str) -> (String, Vec<String>) {
    let catalog = catalog(text);
    let acting = catalog
        .nics()
        .iter()
        .filter(|row| row.enabled && row.strategy == ProcessingStrategy::ExecuteRemediation);
    let names: Vec<&str> = acting.map(|row| &*row.name).collect();
    (names.join(" "), Vec::new())
}

fn cancellations(text: &str) -> (String, Vec<String>) {
    let ended = catalog(text).cancelled_by("162").join(" ");
    (format!("162 ends {ended}"), Vec::new())
}

fn circuit_breaker(text: &str) -> (String, Vec<String>) {
    let object: serde_json::Value = serde_json::from_str(text).unwrap();
    let data: BTreeMap<String, String> = serde_json::from_value(object["data"].clone()).unwrap();
    let switch = Switch::read(&data, &BTreeMap::new());
    let state = match switch.state {
        BreakerState::Closed => "closed".to_owned(),
        BreakerState::Tripped => "tripped".to_owned(),
        BreakerState::Other(word) => word,
    };
    let dropped = if switch.drop_asked {
        ", and what has accumulated is to be dropped"
    } else {
        ""
    };
    (state + dropped, Vec::new())
}
