use super::*;

fn config(more: &str) -> Config {
    Config::parse(&format!("image: i\n{more}"), "test").expect("a configuration")
}

fn container(resources: &Value) -> Value {
    json!({"name": "main", "resources": resources})
}

fn gpus(count: u32) -> Value {
    container(&json!({"limits": {"nvidia.com/gpu": count.to_string()}}))
}

fn devices(pod: &Value, more: &str) -> Option<DevicesOfPod> {
    DevicesOfPod::of(pod, &config(more), &ClusterClaims::default())
}

#[test]
fn the_gpus_of_all_containers_are_tested_and_those_of_earlier_ones_are_not_shared() {
    let sidecar = json!({
        "name": "side", "restartPolicy": "Always",
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    });
    let several = json!({"spec": {"containers": [gpus(4), gpus(2), container(&json!({}))]}});
    let beside = json!({"spec": {"containers": [gpus(4)], "initContainers": [sidecar]}});
    for (pod, more, expected) in [
        (&several, "", 6),
        (&several, "resourceMode: max\n", 4),
        // With `append`, the sidecar already holds its device when the check starts.
        (&beside, "", 4),
        (&beside, "initContainerPlacement: prepend\n", 5),
    ] {
        let found = devices(pod, more).expect("GPUs");
        assert_eq!(found.extended["nvidia.com/gpu"], expected, "{more}");
        assert_eq!(found.gpus, Some(expected));
    }
}

#[test]
fn pods_without_gpus_are_left_alone() {
    for pod in [
        json!({}),
        json!({"spec": {"containers": null}}),
        json!({"spec": {"containers": [container(&json!({"limits": {"cpu": "1"}}))]}}),
        json!({"spec": {"containers": [gpus(0)]}}),
        json!({"spec": {"containers": [container(&json!({"limits": {"nvidia.com/gpu": "many"}}))]}}),
        // A network device alone does not make a GPU pod.
        json!({"spec": {"containers": [container(&json!({"limits": {"nvidia.com/mlnxnics": 1}}))]}}),
    ] {
        assert_eq!(devices(&pod, ""), None, "{pod}");
    }
}

#[test]
fn network_devices_are_given_as_well() {
    let limits = json!({"nvidia.com/gpu": 8, "nvidia.com/mlnxnics": 4, "example.com/fpga": 1});
    let pod = json!({"spec": {"containers": [container(&json!({"limits": limits}))]}});
    let found = devices(&pod, "").expect("GPUs");
    let expected = [("nvidia.com/gpu", 8), ("nvidia.com/mlnxnics", 4)];
    let expected = expected.map(|(name, count)| (name.to_owned(), count));
    assert_eq!(found.extended, expected.into());
    assert!(found.has_network);
    assert!(
        !devices(&json!({"spec": {"containers": [gpus(1)]}}), "")
            .expect("GPUs")
            .has_network
    );
}

/// ADR-026 asks for the largest, but the containers of a pod use their devices at the same
/// time.
#[test]
fn the_network_devices_of_several_containers_are_added_or_the_largest_counts() {
    let nics = |count: u32| {
        container(&json!({"limits": {"nvidia.com/gpu": 1, "nvidia.com/mlnxnics": count}}))
    };
    let pod = json!({"spec": {"containers": [nics(2), nics(4), nics(1)]}});
    for (more, gpus, expected) in [("", 3, 7), ("resourceMode: max\n", 1, 4)] {
        let found = devices(&pod, more).expect("GPUs");
        assert_eq!(found.extended["nvidia.com/mlnxnics"], expected, "{more}");
        assert_eq!(found.extended["nvidia.com/gpu"], gpus, "{more}");
    }
}

fn with_claim(spec: &Value) -> (Value, ClusterClaims) {
    let pod = json!({"spec": {
        "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "template"}],
        "containers": [container(&json!({"claims": [{"name": "gpus"}]}))],
    }});
    let templates = [("template".to_owned(), spec.clone())].into();
    let cluster = ClusterClaims {
        templates,
        ..ClusterClaims::default()
    };
    (pod, cluster)
}

#[test]
fn claims_of_gpus_are_shared() {
    let class = |class: &str| json!({"deviceClassName": class});
    let exactly =
        |request: Value| json!({"devices": {"requests": [{"name": "r", "exactly": request}]}});
    let first =
        |list: Value| json!({"devices": {"requests": [{"name": "r", "firstAvailable": list}]}});
    for (spec, expected) in [
        (exactly(class("gpu.nvidia.com")), Some(Some(1))),
        (
            exactly(json!({"deviceClassName": "gpu.nvidia.com", "count": 4})),
            Some(Some(4)),
        ),
        (
            exactly(json!({"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"})),
            Some(None),
        ),
        // v1beta1 has the fields in the request itself.
        (
            json!({"devices": {"requests": [{"name": "r", "deviceClassName": "gpu.nvidia.com"}]}}),
            Some(Some(1)),
        ),
        (exactly(class("other.example.com")), None),
        // `adminAccess` monitors GPUs and allocates none.
        (
            exactly(json!({"deviceClassName": "gpu.nvidia.com", "adminAccess": true})),
            None,
        ),
        (
            first(
                json!([class("gpu.nvidia.com"), {"deviceClassName": "gpu.nvidia.com", "count": 2}]),
            ),
            Some(None),
        ),
        // The request may be satisfied without a GPU.
        (
            first(json!([class("gpu.nvidia.com"), class("cpu.example.com")])),
            None,
        ),
        // Both kinds are known, but a network card must not count as a GPU, nor a GPU as a
        // card.
        (
            json!({"devices": {"requests": [{"name": "r", "firstAvailable": [
                class("gpu.nvidia.com"), class("nic.example.com")]}]}}),
            None,
        ),
        (
            json!({"devices": {"requests": [{"name": "r", "firstAvailable": [
                class("nic.example.com"), class("gpu.nvidia.com")]}]}}),
            None,
        ),
        (json!({"devices": {}}), None),
    ] {
        let (pod, cluster) = with_claim(&spec);
        let config = config("networkDetection: {deviceClasses: [nic.example.com]}\n");
        let found = DevicesOfPod::of(&pod, &config, &cluster);
        assert_eq!(found.as_ref().map(|found| found.gpus), expected, "{spec}");
        if let Some(found) = found {
            assert_eq!(found.claims, [json!({"name": "gpus"})]);
        }
    }
}

#[test]
fn a_claim_that_is_not_known_gives_no_checks() {
    let (pod, _) = with_claim(&json!({}));
    let found = DevicesOfPod::of(&pod, &config(""), &ClusterClaims::default());
    assert_eq!(found, None);
    let (claims, templates) = claims_named(&pod);
    assert!(claims.is_empty());
    assert_eq!(templates, ["template".to_owned()].into());
}

#[test]
fn single_requests_of_a_claim_are_shared_as_they_are_used() {
    let spec = json!({"devices": {"requests": [
        {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}},
        {"name": "nic", "exactly": {"deviceClassName": "rdma.nvidia.com"}},
    ]}});
    let (mut pod, cluster) = with_claim(&spec);
    pod["spec"]["containers"] = json!([
        container(&json!({"claims": [{"name": "gpus", "request": "gpu"}]})),
        container(&json!({"claims": [{"name": "gpus", "request": "nic"}]})),
        container(&json!({"claims": [{"name": "gpus", "request": "gpu"}]})),
    ]);
    let config = config("networkDetection: {deviceClasses: [rdma.nvidia.com]}\n");
    let found = DevicesOfPod::of(&pod, &config, &cluster).expect("GPUs");
    let expected = ["gpu", "nic"].map(|request| json!({"name": "gpus", "request": request}));
    assert_eq!(found.claims, expected);
    assert!(found.has_network);
}

#[test]
fn a_device_class_that_stands_for_a_resource_is_known() {
    let implicit = "deviceclass.resource.kubernetes.io/gpu.nvidia.com";
    for resource in [implicit, "vendor.example/gpu"] {
        let limits = json!({"limits": {resource: "2"}});
        let pod = json!({"spec": {"containers": [container(&limits)]}});
        let class = ("vendor.example/gpu".to_owned(), "gpu.nvidia.com".to_owned());
        let cluster = ClusterClaims {
            classes: [class].into(),
            ..ClusterClaims::default()
        };
        let found = DevicesOfPod::of(&pod, &config(""), &cluster).expect(resource);
        assert_eq!(found.extended[resource], 2);
    }
}

/// Returns the `resources` of a check in a pod.
fn of_check(own: &Value, pod: &Value, more: &str) -> Value {
    let devices = devices(pod, more).expect("GPUs");
    devices.resources(Some(own), &[], pod, &config(more))
}

#[test]
fn a_check_changes_neither_quality_of_service_nor_what_a_pod_asks_for() {
    let main = |requests: Value, mut limits: Value| {
        limits["nvidia.com/gpu"] = json!("1");
        json!({"spec": {"containers": [container(&json!({"requests": requests, "limits": limits}))]}})
    };
    let none = json!({});
    let guaranteed = main(
        json!({"cpu": "8", "memory": "1Gi"}),
        json!({"cpu": "8", "memory": "1Gi"}),
    );
    let burstable = main(json!({"cpu": "50m"}), json!({}));
    let best_effort = main(json!({}), json!({}));
    let own = json!({"requests": {"cpu": "100m", "memory": "500Mi"}});
    let limited = json!({"limits": {"cpu": "1", "memory": "1Gi"}});
    let gpu = json!("1");
    for (pod, own, more, expected) in [
        (
            &guaranteed,
            &none,
            "",
            json!({
                "requests": {"cpu": "8", "memory": "1Gi", "nvidia.com/gpu": gpu},
                "limits": {"cpu": "8", "memory": "1Gi", "nvidia.com/gpu": gpu},
            }),
        ),
        // A lower request would cost the pod its class `Guaranteed`.
        (
            &guaranteed,
            &own,
            "",
            json!({
                "requests": {"cpu": "8", "memory": "1Gi", "nvidia.com/gpu": gpu},
                "limits": {"cpu": "8", "memory": "1Gi", "nvidia.com/gpu": gpu},
            }),
        ),
        (
            &burstable,
            &none,
            "",
            json!({"requests": {"cpu": "50m", "nvidia.com/gpu": gpu}, "limits": {"nvidia.com/gpu": gpu}}),
        ),
        // The pod's own requests bound those of a check.
        (
            &burstable,
            &own,
            "",
            json!({"requests": {"cpu": "50m", "nvidia.com/gpu": gpu}, "limits": {"nvidia.com/gpu": gpu}}),
        ),
        (
            &best_effort,
            &none,
            "",
            json!({"requests": {"nvidia.com/gpu": gpu}, "limits": {"nvidia.com/gpu": gpu}}),
        ),
        // Any request would make the pod burstable.
        (
            &best_effort,
            &limited,
            "",
            json!({"requests": {"nvidia.com/gpu": gpu}, "limits": {"nvidia.com/gpu": gpu}}),
        ),
        (
            &burstable,
            &limited,
            "",
            json!({
                "requests": {"cpu": "50m", "memory": "0", "nvidia.com/gpu": gpu},
                "limits": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": gpu},
            }),
        ),
    ] {
        assert_eq!(of_check(own, pod, more), expected, "{pod} {own}");
    }
}

#[test]
fn as_in_the_reference_a_check_asks_for_a_little_where_the_pod_has_it() {
    let limits = json!({"nvidia.com/gpu": "8"});
    let requests = json!({"cpu": "4", "memory": "64Gi"});
    let main = container(&json!({"requests": requests, "limits": limits}));
    let pod = json!({"spec": {"containers": [main]}});
    let resources = of_check(&json!({}), &pod, "resourceMode: max\n");
    let expected = json!({
        "requests": {"cpu": "100m", "memory": "500Mi", "nvidia.com/gpu": "8"},
        "limits": {"nvidia.com/gpu": "8"},
    });
    assert_eq!(resources, expected);
}

#[test]
fn the_bound_of_the_whole_pod_is_kept() {
    let limits = json!({"nvidia.com/gpu": "1"});
    let main = container(&json!({"requests": {"cpu": "2"}, "limits": limits}));
    let pod = json!({"spec": {"containers": [main], "resources": {"requests": {"cpu": "1"}}}});
    let own = json!({"requests": {"cpu": "1500m"}});
    assert_eq!(of_check(&own, &pod, "")["requests"]["cpu"], "1");

    // A pod with pod-level limits always has pod-level requests: the API server defaults them.
    let whole =
        json!({"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}});
    let main = container(&json!({"limits": {"nvidia.com/gpu": "1"}}));
    let pod = json!({"spec": {"containers": [main], "resources": whole}});
    let own = json!({"limits": {"cpu": "3", "memory": "512Mi"}});
    let resources = of_check(&own, &pod, "");
    assert_eq!(resources["limits"]["cpu"], "2");
    assert_eq!(resources["limits"]["memory"], "512Mi");
}
