//! Untrusted inputs of preflight, in parts separated by a line `---`: the webhook's
//! configuration (YAML), a pod as sent by an API server (JSON), and the object with the size of
//! its gang, or the data of a gang's `ConfigMap` (JSON).

use preflight::config::Config;
use preflight::gang::Gang;
use preflight::inject::{Candidate, checks_of, inject};
use preflight::resources::{ClusterClaims, DevicesOfPod, claims_named};
use preflight::roster::{Member, Roster, config_map_name, gang_label};
use serde_json::{Value, json};

const PLACE: &str = "config.yaml";
/// Longest value of a label, and longest name of a `ConfigMap` (bytes).
const MAX_NAME_BYTES: usize = 63;

/// Panics if preflight breaks an invariant on this input.
pub fn run(text: &str) {
    let mut parts = text.split("\n---\n");
    let config = Config::parse(parts.next().unwrap_or_default(), PLACE);
    let config = match config {
        Ok(config) => config,
        Err(error) => {
            assert!(error.to_string().starts_with("config.yaml:"), "{error}");
            Config::parse("image: i", PLACE).expect("the shortest configuration")
        }
    };
    let mut next = || serde_json::from_str(parts.next()?).ok();
    let pod: Value = next().unwrap_or_default();
    let object: Value = next().unwrap_or_default();
    let gang = Gang::of(&pod, "training", &config.discovery).unwrap_or_default();
    if let Some(gang) = &gang {
        // The result is a size or a reason.
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

/// Adds checks to the pod, with `object` as each of its claims.
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
    // Admitting the changed pod again changes nothing but sets the gang's label once more.
    let again = DevicesOfPod::of(&changed, config, &cluster).expect("it still has its GPUs");
    let candidate = Candidate {
        pod: &changed,
        devices: &again,
        ..candidate
    };
    let again = inject(candidate, config).expect("what was taken is taken again");
    assert!(again.checks.is_empty(), "{:?}", again.checks);
}

/// Reads the object as the data of a `ConfigMap`, and changes its pods.
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
