//! Names that Kubernetes refuses, in each key that holds a name.

use super::*;

#[test]
fn a_name_that_kubernetes_refuses_is_an_error_wherever_it_stands() {
    let groups = |keys: &str| {
        format!(
            "gangDiscovery:\n  name: x\n  podGroupGVR: {{group: g, version: v, resource: r}}\n  {keys}"
        )
    };
    let labels = |keys: &str| format!("gangDiscovery:\n  method: labels\n  labels: {{{keys}}}");
    let places = [
        (
            "gpuResourceNames: ['@']".to_owned(),
            "nvidia.com/gpu",
            "nvidia.com/mig-*",
            "2: gpuResourceNames[0]: ",
        ),
        (
            "networkResourceNames: ['@']".into(),
            "rdma/hca_a",
            "rdma/hca a",
            "2: networkResourceNames[0]: ",
        ),
        (
            "gpuDetection: {deviceClasses: ['@']}".into(),
            "gpu.nvidia.com",
            "GPU",
            "2: gpuDetection.deviceClasses[0]: ",
        ),
        (
            "networkDetection: {deviceClasses: ['@']}".into(),
            "nic",
            "n_c",
            "2: networkDetection.deviceClasses[0]: ",
        ),
        (
            "namespaces: ['@']".into(),
            "training",
            "Training",
            "2: namespaces[0]: ",
        ),
        (
            "excludeNamespaces: ['@']".into(),
            "kube-system",
            "kube-*",
            "2: excludeNamespaces[0]: ",
        ),
        (
            "imagePullSecrets: ['@']".into(),
            "registry.example",
            "my registry",
            "2: imagePullSecrets[0]: ",
        ),
        (
            "ncclTopology: {instanceTypeLabel: '@'}".into(),
            "a/b",
            "a b",
            "2: ncclTopology.instanceTypeLabel: ",
        ),
        (
            groups("annotationKeys: ['@']"),
            "a.example/group",
            "a.example/my group",
            "5: gangDiscovery.annotationKeys[0]: ",
        ),
        (
            groups("labelKeys: ['@']"),
            "osmo.group_uuid",
            "osmo/",
            "5: gangDiscovery.labelKeys[0]: ",
        ),
        (
            labels("gangIdLabel: '@', gangSizeLabel: s"),
            "gang",
            "gang!",
            "4: gangDiscovery.labels.gangIdLabel: ",
        ),
        (
            labels("gangIdLabel: i, gangSizeLabel: '@'"),
            "size",
            "a/b/c",
            "4: gangDiscovery.labels.gangSizeLabel: ",
        ),
        (
            "namespaceSelector: {matchLabels: {'@': b}}".into(),
            "a",
            "a!",
            "2: namespaceSelector: ",
        ),
        (
            "objectSelector: {matchLabels: {a: '@'}}".into(),
            "b",
            "b c",
            "2: objectSelector: ",
        ),
        (
            "objectSelector: {matchExpressions: [{key: a, operator: '@', values: [b]}]}".into(),
            "NotIn",
            "Inside",
            "2: objectSelector: the operator is ",
        ),
    ];
    for (text, right, wrong, place) in places {
        let read = |name: &str| {
            let text = format!("image: i\n{}\n", text.replace('@', name));
            Config::parse(&text, "config.yaml")
        };
        assert_eq!(read(right).map(|_| ()), Ok(()), "{text}");
        let error = read(wrong).expect_err(&text).to_string();
        let expected = format!("config.yaml:{place}{wrong:?}");
        assert!(error.starts_with(&expected), "{text}: {error}");
    }
    let discovery = serde_json::json!({"method": "labels", "labels": {"gangIdLabel": "a b", "gangSizeLabel": "s"}});
    let error = Discovery::from_json(&discovery).expect_err("no label");
    assert!(
        error.starts_with("gangDiscovery.labels.gangIdLabel: \"a b\""),
        "{error}"
    );
    for selector in [
        "{matchLabel: {a: b}}",
        "{matchExpressions: [{key: a, operator: In}]}",
        "{matchExpressions: [{key: a, operator: Exists, values: [b]}]}",
    ] {
        let text = format!("image: i\nnamespaceSelector: {selector}");
        let error = Config::parse(&text, "test")
            .expect_err(selector)
            .to_string();
        assert!(error.starts_with("test:2: namespaceSelector: "), "{error}");
    }
}
