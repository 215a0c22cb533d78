//! Decides about an object other than a node: an object of gpuwarden is deleted, its marks on
//! objects of others are removed, and other traces are listed.

use cluster::{Removal, ServedKind};
use contract::keys;
use maintenance::Maintenance;
use maintenance::janitor::generic::OPERATION;
use maintenance::validation_request;
use model::ownership::Maker;
use notices::request;
use preflight::roster;
use serde_json::{Value, json};

use super::Choice;
use super::owner::{Owner, is_shared, is_written, owner_of_key};
use crate::args::NodesFate;

/// Name of the Lease of the webhook.
const WEBHOOK_LEASE: &str = "gpuwarden-webhook";
/// Prefix of the names of gangs' `ConfigMap`s.
const GANG_PREFIX: &str = "preflight-";
/// Resource of preflight's discovery in a namespace, which users create.
const PREFLIGHT_CONFIGS: &str = "preflightconfigs.preflight.nvsentinel.nvidia.com";
/// Annotations that gpuwarden writes on pods.
const OF_PODS: [&str; 2] = [keys::POD_DEVICES, keys::CHECKPOINT_REQUESTED];

/// Decision about an object.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    /// Deletion, after the removal of our finalizer.
    Delete(Removal),
    /// Removal of marks. With a reason, the object is listed as a remainder.
    Unmark(Removal, Option<String>),
    /// No change, for this reason.
    Left(String),
}

/// Decides about an object, by its metadata. `None` if gpuwarden has nothing to do with it.
pub(super) fn judge(kind: &ServedKind, object: &Value, choice: Choice) -> Option<Verdict> {
    let (group, plural) = (kind.kind.group.as_str(), kind.kind.resource.as_str());
    let metadata = &object["metadata"];
    let name = metadata["name"].as_str().unwrap_or_default();
    let uid = metadata["uid"].as_str().unwrap_or_default();
    match (group, plural) {
        ("", "pods") => return of_pod(object, uid),
        ("apiextensions.k8s.io", "customresourcedefinitions") => return of_kind(name, uid, choice),
        _ => {}
    }
    let untie = finalizer(group, plural).map_or_else(
        || Removal::from(uid),
        |finalizer| without_finalizer(metadata, uid, finalizer),
    );
    let is_going = metadata["deletionTimestamp"].is_string();
    if is_going && untie.is_empty() {
        return None;
    }
    if is_made_by_us(object, plural, name) {
        return Some(match (plural, choice.nodes) {
            ("devicetaintrules", _) if of_machine(metadata) && !choice.machines => {
                let why = "the gpuwarden on the machine itself made it; stop it there, and name \
                           --machines";
                Verdict::Left(why.to_owned())
            }
            ("devicetaintrules", Some(NodesFate::Leave)) => {
                let why = format!("taints its device; kubectl delete devicetaintrule {name}");
                Verdict::Unmark(without_marks(metadata, uid), Some(why))
            }
            _ => Verdict::Delete(untie),
        });
    }
    if !is_written(object) {
        return None;
    }
    if untie.is_empty() {
        let why = match (group, plural) {
            ("", "configmaps") => "others have written it too",
            _ => "somebody else made it; gpuwarden wrote its status or a field",
        };
        return Some(Verdict::Left(why.to_owned()));
    }
    let why = "somebody else made it; only gpuwarden's finalizer is removed";
    Some(Verdict::Unmark(untie, Some(why.to_owned())))
}

/// Returns whether gpuwarden created the object.
fn is_made_by_us(object: &Value, plural: &str, name: &str) -> bool {
    let metadata = &object["metadata"];
    let annotations = &metadata["annotations"];
    let label = |key: &str, value: &str| metadata["labels"][key] == value;
    // Anybody may set these, but the record shows who did.
    if !is_written(object) {
        return false;
    }
    let of_session = annotations[keys::ATTEMPT].is_string();
    let of_signal = annotations[OPERATION].is_string();
    let owners = metadata["ownerReferences"].as_array();
    let mut owners = owners.into_iter().flatten();
    let is_test = owners.any(|owner| owner["kind"] == validation_request::KIND);
    match plural {
        _ if of_session || of_signal || is_test => true,
        _ if label(keys::MANAGED_BY_LABEL, keys::MANAGED_BY) => true,
        "leases" => [keys::LEASE, WEBHOOK_LEASE].contains(&name),
        "configmaps" => {
            let named = [keys::CONFIG_MAP, keys::BREAKER_CONFIG_MAP].contains(&name);
            let of_gang = name.starts_with(GANG_PREFIX)
                && label(roster::MANAGED_BY_LABEL, roster::MANAGED_BY);
            (named || of_gang) && !is_shared(object)
        }
        _ => false,
    }
}

/// Returns whether a gpuwarden on the machine itself made a `DeviceTaintRule`.
fn of_machine(metadata: &Value) -> bool {
    metadata["annotations"][keys::RULE_BY] == String::from(Maker::Node)
}

/// Returns the finalizer that gpuwarden sets on objects of a kind.
fn finalizer(group: &str, plural: &str) -> Option<&'static str> {
    if (group, plural) == (validation_request::GROUP, validation_request::PLURAL) {
        return Some(validation_request::FINALIZER);
    }
    if (group, plural) == (request::GROUP, request::PLURAL) {
        return Some(request::FINALIZER);
    }
    Maintenance::of_resource(group, plural)?.finalizer()
}

fn without_finalizer(metadata: &Value, uid: &str, finalizer: &str) -> Removal {
    let list = metadata["finalizers"].as_array();
    let place = list.and_then(|list| list.iter().position(|one| one == finalizer));
    let removal = Removal::from(uid);
    match place {
        Some(place) => removal.with(
            &["metadata", "finalizers", &place.to_string()],
            json!(finalizer),
        ),
        None => removal,
    }
}

/// Removes the label and the annotations of gpuwarden.
fn without_marks(metadata: &Value, uid: &str) -> Removal {
    let label = keys::MANAGED_BY_LABEL;
    let mut removal =
        Removal::from(uid).with(&["metadata", "labels", label], json!(keys::MANAGED_BY));
    for (key, value) in metadata["annotations"].as_object().into_iter().flatten() {
        if key.starts_with(keys::OWN_PREFIX) {
            removal = removal.with(&["metadata", "annotations", key], value.clone());
        }
    }
    removal
}

fn of_pod(pod: &Value, uid: &str) -> Option<Verdict> {
    let mut removal = Removal::from(uid);
    for key in OF_PODS {
        let value = &pod["metadata"]["annotations"][key];
        if value.is_string() && owner_of_key(pod, "f:annotations", key) != Owner::Other {
            removal = removal.with(&["metadata", "annotations", key], value.clone());
        }
    }
    (!removal.is_empty()).then_some(Verdict::Unmark(removal, None))
}

/// Decides about a `CustomResourceDefinition` by its name; definitions carry no mark of ours.
fn of_kind(name: &str, uid: &str, choice: Choice) -> Option<Verdict> {
    let mut ours = Maintenance::ALL.map(Maintenance::resource).to_vec();
    ours.push((
        validation_request::GROUP,
        validation_request::VERSION,
        validation_request::PLURAL,
    ));
    ours.push((request::GROUP, request::VERSION, request::PLURAL));
    let is_ours = |(group, _, plural): &(&str, &str, &str)| format!("{plural}.{group}") == name;
    if name != PREFLIGHT_CONFIGS && !ours.iter().any(is_ours) {
        return None;
    }
    if choice.crds {
        return Some(Verdict::Delete(Removal::from(uid)));
    }
    let why = "NVSentinel uses the same kind; --crds deletes it once it has no objects";
    Some(Verdict::Left(why.to_owned()))
}

#[cfg(test)]
mod tests {
    use cluster::ObjectKind;

    use super::*;

    /// Returns the verdict on an object of gpuwarden's writing, and of others' as well.
    fn of(group: &str, plural: &str, metadata: &Value, choice: Choice) -> Option<Verdict> {
        let kind = ServedKind {
            kind: ObjectKind::new(group, "v1", plural),
            name: "Kind".to_owned(),
        };
        judge(&kind, &json!({ "metadata": metadata }), choice)
    }

    /// Returns metadata that these programs have written.
    fn by(managers: &[&str], mut metadata: Value) -> Value {
        let entry = |manager: &&str| json!({"manager": manager, "fieldsV1": {}});
        metadata["managedFields"] = managers.iter().map(entry).collect();
        metadata["uid"] = json!("u");
        metadata
    }

    #[test]
    fn our_own_objects_are_deleted_and_those_of_others_stay() {
        let ours = json!({"name": "x", "labels": {keys::MANAGED_BY_LABEL: keys::MANAGED_BY}});
        let gang = json!({"name": "preflight-a", "labels": {
            roster::MANAGED_BY_LABEL: roster::MANAGED_BY,
        }});
        let test = json!({"name": "t", "ownerReferences": [{"kind": "ValidationRequest"}]});
        let named = |name: &str| json!({ "name": name });
        for (plural, metadata, managers, is_deleted) in [
            ("secrets", ours.clone(), vec!["gpuwarden"], true),
            // A label alone proves nothing.
            ("secrets", ours, vec!["argocd"], false),
            ("configmaps", gang.clone(), vec!["gpuwarden"], true),
            ("configmaps", gang, vec!["preflight"], false),
            (
                "configmaps",
                named("gpuwarden"),
                vec!["gpuwarden", "kubectl-edit"],
                true,
            ),
            (
                "configmaps",
                named("circuit-breaker"),
                vec!["gpuwarden", "helm"],
                false,
            ),
            ("configmaps", named("other"), vec!["gpuwarden"], false),
            ("leases", named(keys::LEASE), vec!["gpuwarden"], true),
            ("leases", named(keys::LEASE), vec!["operator"], false),
            (
                "jobs",
                test,
                vec!["gpuwarden", "kube-controller-manager"],
                true,
            ),
        ] {
            let metadata = by(&managers, metadata);
            let verdict = of("", plural, &metadata, Choice::default());
            let deletes = verdict == Some(Verdict::Delete(Removal::from("u")));
            assert_eq!(deletes, is_deleted, "{metadata}: {verdict:?}");
            // What others have made and gpuwarden has written is named.
            let is_named = matches!(verdict, Some(Verdict::Left(_)));
            let expected = !is_deleted && managers.contains(&"gpuwarden");
            assert_eq!(is_named, expected, "{metadata}: {verdict:?}");
        }
    }

    #[test]
    fn requests_of_a_session_are_deleted_and_those_of_people_lose_our_finalizer() {
        let finalizer = "janitor.dgxc.nvidia.com/finalizer";
        let reset = |annotations: Value, finalizers: &[&str]| {
            let metadata = json!({"annotations": annotations, "finalizers": finalizers});
            by(&["gpuwarden"], metadata)
        };
        let judge = |metadata| {
            let group = "janitor.dgxc.nvidia.com";
            of(group, "gpuresets", &metadata, Choice::default()).unwrap()
        };
        let untied = Removal::from("u").with(&["metadata", "finalizers", "1"], json!(finalizer));
        let finalizers = ["other", finalizer];
        let session = reset(json!({keys::ATTEMPT: "e/1"}), &finalizers);
        assert_eq!(judge(session), Verdict::Delete(untied.clone()));
        let person = judge(reset(json!({}), &finalizers));
        assert!(matches!(person, Verdict::Unmark(removal, Some(_)) if removal == untied));
        assert!(matches!(judge(reset(json!({}), &[])), Verdict::Left(_)));
        let held = json!({"finalizers": ["other", request::FINALIZER]});
        let held = by(&["gpuwarden", "kubectl"], held);
        let verdict = of(request::GROUP, request::PLURAL, &held, Choice::default());
        assert!(matches!(verdict, Some(Verdict::Unmark(..))), "{verdict:?}");
        // What is being deleted waits for our finalizer only.
        let mut going = reset(json!({keys::ATTEMPT: "e/1"}), &[]);
        going["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
        let group = "janitor.dgxc.nvidia.com";
        assert_eq!(of(group, "gpuresets", &going, Choice::default()), None);
    }

    #[test]
    fn a_device_stays_tainted_if_its_node_stays_out() {
        let rule = |maker: &str| {
            let metadata = json!({
                "name": "r", "labels": {keys::MANAGED_BY_LABEL: keys::MANAGED_BY},
                "annotations": {keys::RULE_BY: maker, "other": "stays"},
            });
            by(&["gpuwarden"], metadata)
        };
        let judge = |maker: &str, nodes, machines| {
            let choice = Choice {
                nodes: Some(nodes),
                machines,
                crds: false,
            };
            of("resource.k8s.io", "devicetaintrules", &rule(maker), choice).unwrap()
        };
        let delete = Verdict::Delete(Removal::from("u"));
        assert_eq!(judge("controller", NodesFate::Return, false), delete);
        assert_eq!(judge("node", NodesFate::Return, true), delete);
        let foreign = judge("node", NodesFate::Return, false);
        assert!(matches!(foreign, Verdict::Left(why) if why.contains("--machines")));
        let marks = Removal::from("u")
            .with(
                &["metadata", "labels", keys::MANAGED_BY_LABEL],
                json!("gpuwarden"),
            )
            .with(
                &["metadata", "annotations", keys::RULE_BY],
                json!("controller"),
            );
        let left = judge("controller", NodesFate::Leave, false);
        assert!(matches!(left, Verdict::Unmark(removal, Some(_)) if removal == marks));
    }

    #[test]
    fn pods_lose_our_annotations_and_kinds_stay_unless_asked() {
        let annotations = json!({
            keys::POD_DEVICES: "{}", keys::CHECKPOINT_REQUESTED: "t", keys::CHECKPOINT: "9m",
        });
        let key = format!("f:{}", keys::POD_DEVICES);
        let others = json!({"f:metadata": {"f:annotations": {key: {}}}});
        let mut pod = json!({"uid": "u", "annotations": annotations});
        let removal = Removal::from("u");
        let requested = ["metadata", "annotations", keys::CHECKPOINT_REQUESTED];
        let devices = ["metadata", "annotations", keys::POD_DEVICES];
        let both = removal
            .clone()
            .with(&devices, json!("{}"))
            .with(&requested, json!("t"));
        let judge = |pod: &Value| of("", "pods", pod, Choice::default());
        assert_eq!(judge(&pod), Some(Verdict::Unmark(both, None)));
        pod["managedFields"] = json!([{"manager": "metadata-collector", "fieldsV1": others}]);
        let one = removal.clone().with(&requested, json!("t"));
        assert_eq!(judge(&pod), Some(Verdict::Unmark(one, None)));
        let crd = |name: &str, crds| {
            let choice = Choice {
                crds,
                ..Choice::default()
            };
            let metadata = json!({"name": name, "uid": "u"});
            of(
                "apiextensions.k8s.io",
                "customresourcedefinitions",
                &metadata,
                choice,
            )
        };
        let name = "rebootnodes.janitor.dgxc.nvidia.com";
        assert!(matches!(crd(name, false), Some(Verdict::Left(_))));
        assert_eq!(crd(name, true), Some(Verdict::Delete(removal)));
        assert_eq!(crd("others.example.com", true), None);
    }
}
