//! Values of a chart, keys of newer versions, and misspelt keys.

use super::*;

/// Chart values: keys of the chart's own objects among those of the configuration.
const VALUES: &str = r#"
replicaCount: 2
logLevel: debug
image:
  repository: registry.example/chart/preflight
  pullPolicy: Always
  tag: ""
imagePullSecrets:
  - name: of-the-deployment
injectedImagePullSecrets:
  - name: of-pods
resources: {requests: {cpu: 100m}}
nodeSelector: {pool: system}
tolerations: []
service: {type: ClusterIP, port: 443}
networkPolicy: {enabled: true}
webhook: {port: 9443, failurePolicy: Ignore, certProvider: cert-manager}
ignoreUnknownChecks: false
initContainers:
  - name: disk-test
    image: {repository: registry.example/disk-test, tag: "7"}
  - name: preflight-dcgm-diag
    image: {repository: registry.example/dcgm-diag, tag: ""}
gangCoordination: {enabled: true, configTransport: configMap}
"#;

#[test]
fn values_of_a_chart_are_read_for_what_they_say_of_pods() {
    let below = format!(
        "global: {{x: 1}}\npreflight:{}",
        VALUES.replace('\n', "\n  ")
    );
    for text in [VALUES, &below] {
        let config = parsed(text);
        assert_eq!(config.image_pull_secrets, ["of-pods"]);
        assert_eq!(config.failure_policy, FailurePolicy::Ignore);
        let image = |at: usize| config.checks[at].container["image"].clone();
        assert_eq!(image(0), "registry.example/disk-test:7");
        // The `image` of chart values is the webhook's, so it is no default for checks.
        assert_eq!(image(1), "registry.example/dcgm-diag");
        assert_eq!(config.warnings.len(), 1, "{:?}", config.warnings);
        let warning = &config.warnings[0];
        assert!(
            warning.contains("preflight-dcgm-diag") && warning.contains("has no tag"),
            "{warning}"
        );
    }
    // Without chart keys the file is a plain configuration, and the secrets are the pods'.
    let file = "image: i:1\nimagePullSecrets: [{name: a}]\n";
    assert_eq!(parsed(file).image_pull_secrets, ["a"]);
    let config = parsed(&format!("{file}injectedImagePullSecrets: [b]\n"));
    assert_eq!(config.image_pull_secrets, ["b"]);
    assert_eq!(config.warnings, Vec::<String>::new());
    let text = "replicaCount: 1\nimage: {tag: x}\n";
    let error = Config::parse(text, "values.yaml")
        .expect_err("no checks")
        .to_string();
    assert!(
        error.contains("values.yaml:1: initContainers: it is missing"),
        "{error}"
    );
}

#[test]
fn newer_keys_and_those_without_effect_are_told() {
    let own = "initContainers: [{name: a, image: 'i:1'}]\n";
    for (more, says) in [
        (
            "ignoreUnknownChecks: true",
            "ignoreUnknownChecks: true has no effect",
        ),
        (
            "gangCoordination: {configTransport: api}",
            "gangCoordination.configTransport: \"api\" has no effect",
        ),
        (
            "replicaCount: 1\nimagePullSecrets: [a]",
            "write injectedImagePullSecrets",
        ),
        (
            "gpuResourceNames: [nvidia.com/gpu, nvidia.com/mig-1g.10gb]",
            "nvidia.com/mig-1g.10gb is a part of a GPU",
        ),
        (
            "gpuResourceNames: [nvidia.com/gpu.shared]",
            "nvidia.com/gpu.shared is a part of a GPU",
        ),
    ] {
        let config = parsed(&format!("{own}{more}\n"));
        let [warning] = config.warnings.as_slice() else {
            panic!("{more}: {:?}", config.warnings);
        };
        assert!(warning.contains(says), "{more}: {warning}");
    }
}

#[test]
fn a_key_that_is_misspelt_is_an_error_also_in_values() {
    for (key, meant) in [
        ("initContainer", "initContainers"),
        ("gateCheck", "gateChecks"),
        ("injectedImagePullSecret", "injectedImagePullSecrets"),
        ("gpuResourcesNames", "gpuResourceNames"),
        ("webhooks", "webhook"),
        ("gangDiscover", "gangDiscovery"),
        ("resultCaches", "resultCache"),
    ] {
        for before in ["image: i\n", VALUES] {
            let error = Config::parse(&format!("{before}{key}: 1\n"), "c")
                .expect_err(key)
                .to_string();
            let line = before.lines().count() + 1;
            let expected = format!("c:{line}: unknown key '{key}'; did you mean '{meant}'?");
            assert_eq!(error, expected);
        }
    }
    let error = Config::parse("image: i\nsomething: 1\n", "c")
        .expect_err("unknown")
        .to_string();
    assert!(
        error.starts_with("c:2: unknown key 'something'; there is checkTimeout, "),
        "{error}"
    );
}
