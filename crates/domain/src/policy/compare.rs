//! How two policies differ on the events of known monitors.

use serde::{Deserialize, Serialize};

use super::Policy;
use super::standard::{self, Standard};
use crate::assess::Desired;
use crate::catalog::Catalog;
use crate::event::Record;
use crate::node::Taint;
use crate::replay::Replay;

/// An event that two policies answer differently. Serialised names are part of the output
/// of `policy diff`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// What happens, for people.
    pub event: String,
    /// Gravity and recommended action, for people.
    pub judged: String,
    /// What the first policy asks for.
    pub a: Asked,
    /// What the second policy asks for.
    pub b: Asked,
}

/// What a policy asks for on an event, on a node of which nothing else is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Asked {
    /// A cordon.
    pub cordon: bool,
    /// Taints.
    pub taints: Vec<Taint>,
    /// The rule sets that ask.
    pub rule_sets: Vec<String>,
}

/// The events of known monitors that `a` and `b` answer differently.
pub fn differences(a: &Policy, b: &Policy, catalog: &Catalog) -> Vec<Difference> {
    standard::events(catalog)
        .into_iter()
        .filter_map(|standard| {
            let (a, b) = (asked(a, &standard), asked(b, &standard));
            let differ = a.cordon != b.cordon || a.taints != b.taints;
            differ.then(|| Difference {
                judged: standard.judged(),
                event: standard.name,
                a,
                b,
            })
        })
        .collect()
}

/// What `policy` asks for on one event.
pub fn asked(policy: &Policy, standard: &Standard) -> Asked {
    let mut replay = Replay::new(policy.clone(), None);
    replay.take(&Record {
        seq: 0,
        id: standard.event.id.clone(),
        created_at: jiff::Timestamp::UNIX_EPOCH,
        event: standard.event.clone(),
    });
    let Desired {
        cordon,
        taints,
        rule_sets,
        ..
    } = replay.desired(standard::NODE);
    Asked {
        cordon,
        taints,
        rule_sets,
    }
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts: Vec<String> = Vec::new();
        if self.cordon {
            parts.push("cordon".to_owned());
        }
        parts.extend(self.taints.iter().map(|taint| format!("taint {taint}")));
        if parts.is_empty() {
            return f.write_str("nothing");
        }
        write!(
            f,
            "{} by '{}'",
            parts.join(", "),
            self.rule_sets.join("', '")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::presets;

    fn preset(name: &str) -> Policy {
        Policy::parse(presets::find(name).unwrap().text, name).unwrap()
    }

    #[test]
    fn what_published_policies_disagree_on_is_found() {
        let (ours, gke) = (Policy::builtin(), preset("gke"));
        let all = differences(&ours, &gke, Catalog::builtin());
        let find = |event: &str| all.iter().find(|one| one.event == event);
        let xid_95 = find("XID 95").unwrap();
        assert_eq!(xid_95.a.to_string(), "cordon by 'default'");
        assert_eq!(xid_95.b.to_string(), "nothing");
        // Both take a node out for these, and leave it for those.
        for same in [
            "XID 48",
            "XID 79",
            "XID 13",
            "gpu-health-monitor GpuMemWatch, not fatal",
        ] {
            assert_eq!(find(same), None);
        }
        assert!(find("gpu-health-monitor GpuMemWatch, fatal").is_some());
        assert!(differences(&gke, &gke, Catalog::builtin()).is_empty());
    }

    #[test]
    fn the_standard_events_are_valid_and_named_once() {
        let events = standard::events(Catalog::builtin());
        let names: std::collections::BTreeSet<&str> =
            events.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names.len(), events.len());
        assert!(events.len() > 150, "{}", events.len());
        for standard in &events {
            crate::event::validate(&standard.event).unwrap();
        }
    }
}
