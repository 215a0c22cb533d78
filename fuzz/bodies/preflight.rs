//! What preflight takes from outside, in parts with a line `---` between: the webhook's configuration (YAML), a
//! pod as an API server sends it (JSON), and the object that says the size of its gang, or the data of a gang's
//! `ConfigMap` (JSON).

use preflight::config::Config;
use preflight::gang::Gang;
use preflight::inject::{Candidate, checks_of, inject};
use preflight::resources::{ClusterClaims, DevicesOfPod, claims_named};
use preflight::roster::{Member, Roster, config_map_name, gang_label};
use serde_json::{Value, json};

const PLACE: &str = "config.yaml";
/// Longest value of a label, and name of a `ConfigMap` (bytes).
const MAX_NAME_BYTES: usize = 63;

/// Fails where an input does what it must not.
pub fn run(text: &str) {
    let mut parts = text.split("\n---\n");
    let config = Config::parse(parts.next().unwrap_or_default(), PLACE);
    let config = match config {
        Ok(config) => config,
        Err(error) => {
            assert!(error.to_string().starts_with("config.yaml: "), "{error}");
            assert!(!error.what.is_empty());
            Config::parse("image: i", PLACE).expect("the shortest configuration")
        }
    };
    let mut next = || serde_json::from_str(parts.next()?).ok();
    let pod: Value = next().unwrap_or_default();
    let object: Value = next().unwrap_or_default();
    let gang = Gang::of(&pod, "training", &config.discovery).unwrap_or_default();
    if let Some(gang) = &gang {
        // What it says is a size, or a reason.
        let _ = gang.size_in(&object, &config.discovery);
        for name in [config_map_name(&gang.id()), gang_label(&gang.id())] {
            assert!(name.len() <= MAX_NAME_BYTES, "{name}");
        }
        assert!(config_map_name(&gang.id()).starts_with("preflight-"));
    }
    // An API server sends no pod without metadata.
    if pod["metadata"].is_object() {
        pod_is_changed(&pod, &object, gang.as_ref(), &config);
    }
    roster(&object);
}

/// Puts checks into the pod, whose claims are all of the object.
fn pod_is_changed(pod: &Value, object: &Value, gang: Option<&Gang>, config: &Config) {
    let (claims, templates) = claims_named(pod);
    let of = |name| (name, object.clone());
    let cluster = ClusterClaims {
        claims: claims.into_iter().map(of).collect(),
        templates: templates.into_iter().map(of).collect(),
        ..ClusterClaims::default()
    };
    let Some(devices) = DevicesOfPod::of(pod, config, &cluster) else {
        return;
    };
    let candidate = Candidate {
        pod,
        devices: &devices,
        gang,
        forbidden_by: None,
        rendezvous: None,
    };
    let injection = match inject(candidate, config) {
        Ok(injection) => injection,
        Err(refusal) => return assert!(!refusal.to_string().is_empty()),
    };
    assert_eq!(injection.patch.is_empty(), injection.checks.is_empty());
    let patch: json_patch::Patch =
        serde_json::from_value(json!(injection.patch)).expect("a JSON patch");
    let mut changed = pod.clone();
    json_patch::patch(&mut changed, &patch).expect("the patch fits its pod");
    let all = changed["spec"]["initContainers"].as_array();
    let all = all
        .into_iter()
        .flatten()
        .map(|container| &container["name"]);
    let all: Vec<_> = all.collect();
    let mut injected = injection.checks.iter();
    assert!(
        injected.all(|check| all.iter().any(|name| **name == **check)),
        "{all:?}"
    );
    let counted = checks_of(&changed, config);
    assert!(counted.iter().all(|check| config.check(check).is_some()));
    // Asked again about what it has become, it stays so: nothing but the gang's label is set once more.
    let again = DevicesOfPod::of(&changed, config, &cluster).expect("it still has its GPUs");
    let candidate = Candidate {
        pod: &changed,
        devices: &again,
        ..candidate
    };
    let again = inject(candidate, config).expect("what was taken is taken again");
    assert!(again.checks.is_empty(), "{:?}", again.checks);
}

/// Reads the object as the data of a `ConfigMap`, and lets the pods of it change.
fn roster(data: &Value) {
    let read = Roster::parse(|key| data.get(key)?.as_str().map(str::to_owned));
    let Ok(roster) = read else {
        return;
    };
    let written = roster.data();
    let again = Roster::parse(|key| written.get(key).cloned()).expect("what is written is read");
    assert_eq!(again.data(), written);
    let members = roster.members.clone();
    let expected = roster.expected;
    let half: Vec<Member> = members.iter().skip(members.len() / 2).cloned().collect();
    let (roster, surplus) = roster.with(half.clone(), expected);
    assert_eq!(roster.members.len() + surplus.len(), half.len());
    let (roster, surplus) = roster.with(members.clone(), expected);
    assert_eq!(roster.members.len() + surplus.len(), members.len());
    assert!(expected == 0 || roster.members.len() <= expected as usize);
}
