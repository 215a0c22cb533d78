//! The configuration file: NVSentinel's loads unchanged, and errors are reported.

use contract::findings::MAX_FILE_BYTES;

use super::*;

/// As NVSentinel's chart renders it.
const CHART: &str = r#"
global:
  timeout: 25m
  manualMode: false
  nodes:
    exclusions:
      - matchLabels:
          team: "infra"
      - matchExpressions:
          - key: node-role.kubernetes.io/control-plane
            operator: Exists
          - key: zone
            operator: NotIn
            values:
              - "a"
              - "b"
  cspProviderHost: janitor-provider.nvsentinel.svc.cluster.local:50051
  cspProviderCAPath: /etc/nvsentinel/janitor/csp-ca/ca.crt
  cspProviderTokenPath: /var/run/secrets/nvsentinel/csp-provider/token

rebootNodeController:
  enabled: true
  timeout: 20m
  manualMode: false

terminateNodeController:
  enabled: true
  manualMode: true
  cspProviderHost: other:50052

gpuResetController:
  enabled: true
  timeout: 25m
  manualMode: false
  resetJob:
    writeSysLogEvent: "true"
    runtimeClassName: "nvidia"
    imageConfig:
      image: "ghcr.io/nvidia/nvsentinel/gpu-reset:v1"
    resources: {limits: {cpu: 100m}}
  serviceManager:
    name: gpu-operator
    spec: {}
"#;

#[test]
fn nvsentinels_file_is_read_unchanged() {
    let config = JanitorConfig::parse(CHART, "j").unwrap();
    let tls = |host: &str| ProviderPlace::Tls {
        host: host.to_owned(),
        authority: "/etc/nvsentinel/janitor/csp-ca/ca.crt".to_owned(),
        token: "/var/run/secrets/nvsentinel/csp-provider/token".to_owned(),
    };
    let reboot = Rules {
        timeout: SignedDuration::from_mins(20),
        manual: false,
        provider: tls("janitor-provider.nvsentinel.svc.cluster.local:50051"),
    };
    assert_eq!(config.rules(Action::Reboot), Some(&reboot));
    let terminate = Rules {
        timeout: SignedDuration::from_mins(25),
        manual: true,
        provider: tls("other:50052"),
    };
    assert_eq!(config.rules(Action::Terminate), Some(&terminate));
    let excluded = |labels: &[(&str, &str)]| {
        let labels = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        config.excludes(&labels.collect())
    };
    assert!(excluded(&[("team", "infra"), ("zone", "a")]));
    assert!(excluded(&[
        ("node-role.kubernetes.io/control-plane", ""),
        ("zone", "c")
    ]));
    // All requirements of a selector have to match.
    assert!(!excluded(&[
        ("node-role.kubernetes.io/control-plane", ""),
        ("zone", "a")
    ]));
    assert!(!excluded(&[("team", "ml")]));
}

#[test]
fn resets_are_signalled_only_where_their_own_host_is_named() {
    let read = |text: &str| JanitorConfig::parse(text, "j").unwrap();
    let global = "global: {cspProviderHost: \"all:1\", cspProviderInsecure: true}\n";
    let image = "resetJob: {imageConfig: {image: i}}";
    let config = read(&format!("{global}gpuResetController: {{{image}}}"));
    assert!(config.resets.is_some() && config.reset_provider.is_none());
    let own = "cspProviderHost: \"own:1\"";
    let config = read(&format!("{global}gpuResetController: {{{own}}}"));
    let host = "own:1".to_owned();
    assert_eq!(config.reset_provider, Some(ProviderPlace::Open { host }));
    // An image is not needed, since no Job is created.
    assert!(config.resets.is_some());
    let off = format!("{global}gpuResetController: {{{own}, enabled: false}}");
    let config = read(&off);
    assert!(config.resets.is_none() && config.reset_provider.is_none());
    let wrong = JanitorConfig::parse("gpuResetController: {cspProviderHost: own}", "j");
    let expected = "j:1: gpuResetController.cspProviderHost is own; write HOST:PORT";
    assert_eq!(wrong.unwrap_err().to_string(), expected);
}

#[test]
fn without_a_host_the_generic_provider_reboots_after_half_an_hour_at_most() {
    let config = JanitorConfig::parse("generic: {namespace: ops, useSysrq: true}", "j").unwrap();
    let rules = config.rules(Action::Reboot).unwrap();
    assert_eq!(
        (&rules.provider, rules.timeout.as_mins()),
        (&ProviderPlace::Generic, 30)
    );
    assert!(config.generic.use_sysrq && config.generic.namespace == "ops");
}

#[test]
fn an_owner_is_asked_by_a_label_unless_the_action_has_a_provider_of_its_own() {
    let provider = |more: &str, action| {
        let label = "label: {reboot: example.com/reboot}\n";
        let config = JanitorConfig::parse(&format!("{label}{more}"), "j").unwrap();
        config.rules(action).unwrap().provider.clone()
    };
    assert_eq!(provider("", Action::Reboot), ProviderPlace::Label);
    assert_eq!(provider("", Action::Terminate), ProviderPlace::Generic);
    let open = |host: &str| ProviderPlace::Open {
        host: host.to_owned(),
    };
    let global = "global: {cspProviderHost: \"all:1\", cspProviderInsecure: true}\n";
    assert_eq!(provider(global, Action::Reboot), ProviderPlace::Label);
    assert_eq!(provider(global, Action::Terminate), open("all:1"));
    let own = format!("{global}rebootNodeController: {{cspProviderHost: \"own:1\"}}\n");
    assert_eq!(provider(&own, Action::Reboot), open("own:1"));
    let bmc = "redfish: {address: \"http://{node}-bmc\"}\n";
    assert_eq!(provider(bmc, Action::Reboot), ProviderPlace::Label);
}

#[test]
fn what_is_wrong_is_said() {
    let table = [
        (
            "\nglobal:\n  timeOut: 1m",
            "j:3: unknown key 'global.timeOut'; did you mean 'timeout'?",
        ),
        (
            "rebootNodeController: {nodes: {}}",
            "j:1: unknown key 'rebootNodeController.nodes'; there is enabled, timeout, manualMode,",
        ),
        (
            "\ngeneric:\n  useSysrq: maybe",
            "j:3: generic.useSysrq is maybe; write true or false",
        ),
        (
            "\nglobal: {timeout: soon}",
            "j:2: global.timeout is soon; write a duration above zero such as 90s, 3m or 1h, at most 24h",
        ),
        ("global: {timeout: 25h}", "j:1: global.timeout is 25h; "),
        (
            "rebootNodeController: {timeout: -1m}",
            "j:1: rebootNodeController.timeout is -1m; ",
        ),
        (
            "global: {cspProviderHost: \"a:1\"}",
            "j:1: global.cspProviderCAPath: global.cspProviderHost is named, and this is not",
        ),
        (
            "global: {cspProviderHost: a, cspProviderInsecure: true}",
            "j:1: global.cspProviderHost is a; write HOST:PORT",
        ),
        (
            "global: {cspProviderHost: \"http://a:1\", cspProviderInsecure: true}",
            "j:1: global.cspProviderHost is \"http://a:1\"; write HOST:PORT",
        ),
        (
            "global: {nodes: {exclusions: [{}]}}",
            "j:1: global.nodes.exclusions[0]: it is empty",
        ),
        (
            "global: {nodes: {exclusions: [{matchExpressions: [{key: a, operator: Like}]}]}}",
            "j:1: global.nodes.exclusions[0]: the operator is \"Like\"",
        ),
        ("generic: {image: \" \"}", "j:1: generic.image: it is empty"),
        (
            "\ngeneric: {jobTtlSeconds: 60}",
            "j:2: generic.jobTtlSeconds: it is 60, and has to be 1800 at least",
        ),
        (
            "gpuResetController: {enabled: true, serviceManager: {name: gpu-operater}}",
            "j:1: gpuResetController.resetJob.imageConfig.image: it is missing: the image of the Job\n\
             j:1: gpuResetController.serviceManager.name is gpu-operater; did you mean 'gpu-operator'?",
        ),
        (
            "\nlabel:\n  reboot: a b\n  terminate: c/d/e",
            "j:3: label.reboot: \"a b\" is no key that Kubernetes takes: ",
        ),
        (
            "\nlabel:\n  reboot: a/b\n  terminate: a/b",
            "j:4: label.terminate is a/b; name another key than label.reboot",
        ),
        (
            "\nlabel: {replace: a/b}",
            "j:2: unknown key 'label.replace'; there is reboot, terminate",
        ),
        (&"#".repeat(MAX_FILE_BYTES + 1), "j:1: it has 1048577 bytes"),
    ];
    for (text, expected) in table {
        let error = JanitorConfig::parse(text, "j").unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}: {error}");
    }
}
