//! Availability of the webhook in the example manifest: several replicas, at most one of them
//! disrupted.

use serde_json::Value;

const MANIFEST: &str = include_str!("../../../examples/kubernetes/preflight.yaml");

fn objects(kind: &str) -> Vec<Value> {
    let parts = MANIFEST
        .split("\n---\n")
        .filter(|part| part.contains("kind: "));
    let objects = parts.map(|part| {
        serde_saphyr::from_str::<Value>(part).unwrap_or_else(|error| panic!("{part}: {error}"))
    });
    objects.filter(|object| object["kind"] == kind).collect()
}

#[test]
fn a_disruption_leaves_a_replica_of_the_webhook() {
    let [deployment] = &objects("Deployment")[..] else {
        panic!("one Deployment");
    };
    let [budget] = &objects("PodDisruptionBudget")[..] else {
        panic!("one PodDisruptionBudget");
    };
    let replicas = deployment["spec"]["replicas"].as_u64();
    let available = budget["spec"]["minAvailable"].as_u64();
    assert!(
        available >= Some(1) && replicas > available,
        "{replicas:?} {available:?}"
    );
    assert_eq!(
        budget["spec"]["selector"]["matchLabels"],
        deployment["spec"]["template"]["metadata"]["labels"]
    );
    assert_eq!(
        budget["metadata"]["namespace"],
        deployment["metadata"]["namespace"]
    );
}
