use contract::findings::MAX_FILE_BYTES;

use super::*;
use crate::rendezvous::Topology;

mod chart;
mod names;

/// Configuration of NVSentinel's chart with its three checks.
pub(crate) const REFERENCE: &str = r#"
initContainers:
  - name: preflight-dcgm-diag
    image: ghcr.io/nvidia/nvsentinel/preflight-dcgm-diag:v1.14.0
    env:
      - name: DCGM_HOSTENGINE_ADDR
        value: "nvidia-dcgm.gpu-operator.svc:5555"
      - name: DCGM_DIAG_LEVEL
        value: "2"
    volumeMounts:
      - name: nvsentinel-socket
        mountPath: /var/run
  - name: preflight-nccl-loopback
    image: ghcr.io/nvidia/nvsentinel/preflight-nccl-loopback:v1.14.0
    env:
      - name: BW_THRESHOLD_GBPS
        value: "150"
    volumeMounts:
      - name: nvsentinel-socket
        mountPath: /var/run
  - name: preflight-nccl-allreduce
    image: ghcr.io/nvidia/nvsentinel/preflight-nccl-allreduce:v1.14.0
    defaultEnabled: false
    inheritUserEnv: true
    inheritUserVolumeMounts: true
    securityContext:
      capabilities:
        add: ["IPC_LOCK"]
    env:
      - name: MESSAGE_SIZES
        value: "4G"
    volumeMounts:
      - name: nvsentinel-socket
        mountPath: /var/run
gpuResourceNames: ["nvidia.com/gpu"]
networkResourceNames: ["nvidia.com/mlnxnics", "vpc.amazonaws.com/efa"]
connectorSocket: "unix:///var/run/nvsentinel.sock"
processingStrategy: EXECUTE_REMEDIATION
initContainerPlacement: append
imagePullSecrets:
  - name: registry
ncclEnvPatterns: ["NCCL_*", "FI_*", "LD_LIBRARY_PATH"]
volumeMountPatterns: ["nccl-*", "dev-shm"]
gangDiscovery:
  name: volcano
  annotationKeys: ["scheduling.k8s.io/group-name"]
  podGroupGVR: {group: scheduling.volcano.sh, version: v1beta1, resource: podgroups}
  minCountExpr: podGroup.spec.minMember
gangCoordination:
  enabled: true
  timeout: 10m
  masterPort: 29500
  configMapMountPath: /etc/preflight
  ncclTopoConfigMap: ""
  ncclTopoData: ""
  extraHostPathMounts:
    - {name: host-opt-amazon, hostPath: /opt/amazon, mountPath: /opt/amazon, readOnly: true}
  extraVolumeMounts: []
  mirrorResourceClaims: true
"#;

fn parsed(text: &str) -> Config {
    Config::parse(text, "config.yaml").unwrap_or_else(|error| panic!("{error}"))
}

fn env(check: &CheckContainer, name: &str) -> Option<String> {
    let env = Value::Object(check.container.clone());
    let env = crate::field::list(&env, "/env");
    let found = env.iter().find(|one| crate::field::name(one) == name)?;
    Some(found.get("value")?.as_str()?.to_owned())
}

#[test]
fn the_configuration_of_the_chart_loads_unchanged() {
    let config = parsed(REFERENCE);
    let names: Vec<&str> = config.checks.iter().map(|check| &*check.name).collect();
    assert_eq!(
        names,
        [
            "preflight-dcgm-diag",
            "preflight-nccl-loopback",
            "preflight-nccl-allreduce"
        ]
    );
    let enabled: Vec<bool> = config
        .checks
        .iter()
        .map(|check| check.default_enabled)
        .collect();
    assert_eq!(enabled, [true, true, false]);
    assert_eq!(
        env(&config.checks[0], "DCGM_DIAG_LEVEL").as_deref(),
        Some("2")
    );
    assert!(config.checks[2].container.contains_key("securityContext"));
    assert!(!config.checks[2].container.contains_key("inheritUserEnv"));
    assert_eq!(config.image_pull_secrets, ["registry"]);
    assert_eq!(config.coordination.timeout, Duration::from_secs(600));
    assert_eq!(config.coordination.host_paths[0].host_path, "/opt/amazon");
    assert!(matches!(config.discovery, Discovery::PodGroups(_)));
    assert!(!config.prepend);
}

#[test]
fn defaults_are_those_of_the_documents() {
    let config = parsed("image: registry.example/gpuwarden:1\n");
    let images: Vec<_> = config
        .checks
        .iter()
        .map(|check| &check.container["image"])
        .collect();
    assert_eq!(images, ["registry.example/gpuwarden:1"; 3]);
    assert_eq!(
        config.checks[1].container["command"],
        serde_json::json!(["gpuwarden", "check", "nccl-loopback"])
    );
    assert_eq!(config.checks[1].min_gpus, 2);
    assert!(config.checks[2].gang_only);
    assert_eq!(config.gpus.resources, ["nvidia.com/gpu"]);
    assert_eq!(config.networks.resources.len(), 18);
    let first = "networking.gke.io.networks/gpu-nic0.IP";
    assert!(config.networks.resources.iter().any(|one| one == first));
    assert_eq!(config.connector_socket, "unix:///var/run/nvsentinel.sock");
    assert_eq!(config.processing_strategy, "EXECUTE_REMEDIATION");
    assert_eq!(config.discovery, Discovery::Native);
    assert_eq!(config.coordination.master_port, 29500);
    assert_eq!(config.coordination.mount_path, "/etc/preflight");
    assert!(config.gate_checks && !config.largest_container);
    assert_eq!(config.failure_policy, FailurePolicy::Fail);
    assert_eq!(config.excluded_namespaces.len(), 4);
    assert!(
        config
            .env_patterns
            .iter()
            .any(|one| one.matches("TORCH_NCCL_BLOCKING_WAIT"))
    );
    let of_mpi = |one: &Glob| one.matches("OMPI_MCA_btl");
    assert!(!config.env_patterns.iter().any(of_mpi));
    assert!(
        config
            .mount_patterns
            .iter()
            .any(|one| one.matches("nvtcpxo-libraries"))
    );
}

#[test]
fn the_keys_of_the_adr_are_aliases() {
    let config = parsed(
        r#"
preflight-injector:
  enabled: true
  checks:
    - name: dcgm-diag
      image: registry.example/dcgm:v1
    - name: nccl-loopback
      image: {repository: registry.example/loopback, tag: v2}
    - name: nccl-allreduce
      image: registry.example/allreduce:v3
    - name: bandwidth-check
      image: registry.example/third:v1
  dcgm: {hostengineAddr: "dcgm.example:5555", diagLevel: 1}
  nccl: {loopbackThresholdGBps: 10.0, allreduceThresholdGBps: 5.5}
  checkTimeout: "300s"
  gangTimeout: "90s"
  gangDiscovery:
    method: labels
    labels: {gangIdLabel: app.example/gang, gangSizeLabel: app.example/size}
  gpuDetection: {resourceNames: [nvidia.com/gpu, nvidia.com/mig-3g], deviceClasses: [gpu.nvidia.com]}
  networkDetection: {resourceNames: [nvidia.com/mlnxnics], deviceClasses: [rdma.nvidia.com]}
  ncclEnvPatterns: ["OMPI_*"]
  ncclTopology:
    instanceTypeMapping: {p5.48xlarge: aws-p5.48xlarge.xml}
    enableFallback: false
  namespaces: [training]
  excludeNamespaces: [kube-system]
  webhook: {failurePolicy: Ignore, certProvider: cert-manager}
"#,
    );
    let names: Vec<&str> = config.checks.iter().map(|check| &*check.name).collect();
    assert_eq!(
        names,
        [
            "preflight-dcgm-diag",
            "preflight-nccl-loopback",
            "preflight-nccl-allreduce",
            "preflight-bandwidth-check"
        ]
    );
    assert_eq!(
        config.checks[1].container["image"],
        "registry.example/loopback:v2"
    );
    for (check, name, value) in [
        (0, "DCGM_HOSTENGINE_ADDR", "dcgm.example:5555"),
        (0, "DCGM_DIAG_LEVEL", "1"),
        (1, "BW_THRESHOLD_GBPS", "10"),
        (2, "BW_THRESHOLD_GBPS", "5.5"),
    ] {
        assert_eq!(
            env(&config.checks[check], name).as_deref(),
            Some(value),
            "{name}"
        );
    }
    assert_eq!(config.check_timeout, Some(Duration::from_secs(300)));
    assert_eq!(config.coordination.timeout, Duration::from_secs(90));
    assert_eq!(
        config.gpus.resources,
        ["nvidia.com/gpu", "nvidia.com/mig-3g"]
    );
    assert_eq!(config.networks.classes, ["rdma.nvidia.com"]);
    let topology = |name| config.topologies.of(Ok(name));
    let of_p5 = Topology::File {
        name: "aws-p5.48xlarge.xml".to_owned(),
        required: true,
    };
    assert_eq!(topology("p5.48xlarge"), Some(of_p5));
    assert!(matches!(topology("other"), Some(Topology::Missing(_))));
    let inherits = |name: &str| config.env_patterns.iter().any(|one| one.matches(name));
    assert!(inherits("OMPI_MCA_btl") && !inherits("NCCL_ALGO"));
    assert_eq!(config.failure_policy, FailurePolicy::Ignore);
    assert_eq!(config.namespaces, ["training"]);
    assert_eq!(config.excluded_namespaces, ["kube-system"]);
    let Discovery::Labels { id, size } = config.discovery else {
        panic!("{:?}", config.discovery);
    };
    assert_eq!((&*id, &*size), ("app.example/gang", "app.example/size"));
}

#[test]
fn the_keys_of_the_document_go_before_those_of_the_adr() {
    let config = parsed(
        "image: i\ngpuResourceNames: [a]\ngpuDetection: {resourceNames: [b]}\n\
         gangCoordination: {timeout: 5m}\ngangTimeout: 60s\n\
         dcgm: {diagLevel: 1}\n\
         initContainers: [{name: preflight-dcgm-diag, env: [{name: DCGM_DIAG_LEVEL, value: '3'}]}]\n",
    );
    assert_eq!(config.gpus.resources, ["a"]);
    assert_eq!(config.coordination.timeout, Duration::from_secs(300));
    assert_eq!(
        env(&config.checks[0], "DCGM_DIAG_LEVEL").as_deref(),
        Some("3")
    );
}

#[test]
fn the_schedulers_of_the_documents_are_known() {
    for (discovery, name) in [
        ("{method: volcano}", "volcano"),
        (
            "{name: osmo-with-kai, labelKeys: [osmo.group_uuid], podGroupGVR: {group: \
             scheduling.run.ai, version: v2alpha2, resource: podgroups}}",
            "osmo-with-kai",
        ),
    ] {
        let config = parsed(&format!("image: i\ngangDiscovery: {discovery}\n"));
        let Discovery::PodGroups(groups) = config.discovery else {
            panic!("{:?}", config.discovery);
        };
        assert_eq!(groups.name, name);
        assert_eq!(groups.min_count, gang_default());
    }
    assert_eq!(
        parsed("image: i\ngangDiscovery: {}\n").discovery,
        Discovery::Native
    );
    let config = parsed("image: i\ngangDiscovery: {method: workloadRef}\n");
    assert_eq!(config.discovery, Discovery::Native);
    let config = parsed("image: i\ngangDiscovery: {method: kueue}\n");
    assert_eq!(config.discovery, Discovery::Kueue);
}

fn gang_default() -> MinCount {
    MinCount::parse(MinCount::DEFAULT).expect("an expression")
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    let long = format!("image: {}", "x".repeat(MAX_FILE_BYTES));
    let many: Vec<String> = (0..40)
        .map(|number| format!("  - {{name: check-{number}, image: i}}\n"))
        .collect();
    let many = many.concat();
    for (text, part) in [
        ("", "1: image: it is missing"),
        ("image: [", "1: "),
        (
            "image: [1]",
            "1: image is a list; write its name, or `repository` and `tag`",
        ),
        ("image: ''", "1: image: it is not the name of an image"),
        (
            "image: i\ncheckTimeout: 0",
            "2: checkTimeout is 0; write a time from 1s to 168h such as 10m",
        ),
        (
            "image: i\ncheckTimeout: -3",
            "2: checkTimeout is -3; write a time such as 10m or 300s, or a number of seconds",
        ),
        (
            "image: i\nimagePullSecrets: [[a]]",
            "2: imagePullSecrets[0] is a list; write the name of a Secret",
        ),
        ("- a\n- b\n", "1: "),
        (
            "image: i\ninitContainer: []\n",
            "2: unknown key 'initContainer'; did you mean 'initContainers'?",
        ),
        (
            "image: i\ninitContainers: []\n",
            "2: initContainers: it has 0 checks",
        ),
        (
            &format!("initContainers:\n{many}"),
            "1: initContainers: it has 40 checks; write 1 to 32",
        ),
        (
            "initContainers: [{name: a, image: i}, {name: a, image: i}]",
            "1: initContainers[1].name: two checks have the name a",
        ),
        (
            "initContainers: [{name: Big_Name, image: i}]",
            "1: initContainers[0].name: \"Big_Name\" is no name: it has 'B'",
        ),
        (
            "image: i\nncclAllreduceExtraEnv: [{value: x}]",
            "2: ncclAllreduceExtraEnv[0]: the variable {\"value\":\"x\"} has no name",
        ),
        (
            "image: i\ninitContainers: [{name: third}]",
            "2: initContainers[0].image: it is missing",
        ),
        (
            "initContainers: [{name: a, image: i, env: {A: b}}]",
            "1: initContainers[0].env: it does not have the form",
        ),
        (
            "image: i\nprocessingStrategy: NEVER",
            "2: processingStrategy is NEVER; write EXECUTE_REMEDIATION or STORE_ONLY",
        ),
        (
            "image: i\ninitContainerPlacement: middle",
            "2: initContainerPlacement is middle; write append or prepend",
        ),
        (
            "image: i\ngangCoordination: {ncclTopoData: <system>}",
            "2: gangCoordination.ncclTopoData: it is not supported",
        ),
        (
            "image: i\ncheckTimeout: 500ms",
            "2: checkTimeout is 500ms; write a time from 1s to 168h",
        ),
        (
            "image: i\nresultCache: 169h",
            "2: resultCache is 169h; write a time from 1s to 168h",
        ),
        (
            "image: i\ngangCoordination: {ncclTopoShape: ndv6}",
            "gangCoordination.ncclTopoShape: \"ndv6\" is not a shape; write ndv4 or ndv5",
        ),
        (
            "image: i\nncclTopology: {instanceTypeMapping: {x1: ../x.xml}}",
            "2: ncclTopology.instanceTypeMapping.x1 is ../x.xml; write the name of a file",
        ),
        (
            "image: i\nncclTopology: {fallback: true}",
            "2: unknown key 'ncclTopology.fallback'; there is instanceTypeLabel,",
        ),
        (
            "image: i\ngangCoordination: {timeout: soon}",
            "2: gangCoordination.timeout is soon; write a time such as 10m",
        ),
        (
            "image: i\ngangCoordination: {timeout: -5m}",
            "2: gangCoordination.timeout is -5m; write a time such as 10m",
        ),
        (
            "image: i\ngangCoordination: {masterPort: 70000}",
            "2: gangCoordination.masterPort is 70000; write a whole number from 0 to 65535",
        ),
        (
            "image: i\ngangCoordination: {masterPort: 0}",
            "2: gangCoordination.masterPort is 0; write a port",
        ),
        (
            "image: i\ngangCoordination: {configMapMountPath: etc}",
            "2: gangCoordination.configMapMountPath is etc; write a path that begins with a slash",
        ),
        ("image: i\ngangDiscovery: {method: labels}", "gangIdLabel"),
        (
            "image: i\ngangDiscovery: {name: x}",
            "2: gangDiscovery: `podGroupGVR` is missing",
        ),
        (
            "image: i\ngangDiscovery: {annotationKeys: [a]}",
            "`podGroupGVR` are missing",
        ),
        (
            "image: i\ngangDiscovery: {name: x, labelKeys: [a], podGroupGVR: {group: g, version: v, \
             resource: r}, minCountExpr: 'podGroup.spec.'}",
            "2: gangDiscovery.minCountExpr: does not parse",
        ),
        (
            "image: i\ngangDiscovery: {method: kueue, name: x}",
            "two ways",
        ),
        (&long, "1: it has 1048583 bytes, at most 1048576 are taken"),
    ] {
        let error = Config::parse(text, "config.yaml").expect_err(&text[..text.len().min(80)]);
        let error = error.to_string();
        assert!(
            error.starts_with("config.yaml:") && error.contains(part),
            "{error}"
        );
    }
}

#[test]
fn variables_for_a_check_that_nobody_configured_are_not_looked_at() {
    let text = "ncclAllreduceExtraEnv: [{value: x}]\ninitContainers: [{name: a, image: i}]";
    assert!(Config::parse(text, "config.yaml").is_ok());
}

/// Such a configuration would stop the creation of every pod in a labelled namespace.
#[test]
fn what_an_api_server_would_refuse_of_every_pod_is_refused_at_the_start() {
    let container = |more: &str| format!("initContainers: [{{name: a, image: i, {more}}}]");
    let gang = |more: &str| format!("image: i\ngangCoordination: {{{more}}}");
    let path = |more: &str| gang(&format!("extraHostPathMounts: [{{mountPath: /x, {more}}}]"));
    for (text, part) in [
        (container("env: [{value: x}]"), "is not a variable"),
        (
            container("env: [{name: a=b, value: x}]"),
            "is not a variable",
        ),
        (container("env: [{name: a, value: 7}]"), "in quotes"),
        (
            container("volumeMounts: [{mountPath: /x}]"),
            "names no volume",
        ),
        (
            container("volumeMounts: [{name: x}]"),
            "\"\" is not a path to mount at",
        ),
        (
            container("command: gpuwarden"),
            "initContainers[0].command: it is not a list",
        ),
        (
            container("args: [7]"),
            "initContainers[0].args: it is not a list",
        ),
        (
            container("imagePullPolicy: Sometimes"),
            "there are Always, IfNotPresent, Never",
        ),
        (
            container("restartPolicy: Always"),
            "a check runs once, to its end",
        ),
        (
            container("resources: {limits: {cpu: lots}}"),
            "cpu: \"lots\" is not a quantity",
        ),
        (
            container("resources: {limits: {cpu: 1}, requests: {cpu: 1500m}}"),
            "the request of cpu is above its limit",
        ),
        (path("name: A b, hostPath: /x"), "\"A b\" is no name"),
        (
            path("name: a, hostPath: x"),
            "extraHostPathMounts[0].hostPath is x; write an absolute path",
        ),
        (
            path("name: a, hostPath: /x/../y"),
            "extraHostPathMounts[0].hostPath is /x/../y; write an absolute path",
        ),
        (
            path("name: a, hostPath: /x, hostPathType: Dir"),
            "extraHostPathMounts[0].hostPathType is Dir; write DirectoryOrCreate, ",
        ),
        (
            gang("configMapMountPath: '/a:b'"),
            "gangCoordination.configMapMountPath is '/a:b'; write a path without",
        ),
        (
            gang("ncclTopoConfigMap: A b"),
            "config.yaml:2: gangCoordination.ncclTopoConfigMap: \"A b\" is no name",
        ),
        (
            "image: i\nimagePullSecrets: ['']".to_owned(),
            "imagePullSecrets[0]: \"\" is no name",
        ),
        (
            "image: i\nconnectorSocket: 'http://x'".to_owned(),
            "config.yaml:2: connectorSocket is 'http://x'; write the path of a socket",
        ),
    ] {
        let error = Config::parse(&text, "config.yaml").expect_err(&text);
        assert!(error.to_string().contains(part), "{text}: {error}");
    }
}

#[test]
fn what_the_document_names_is_the_default_and_can_be_changed() {
    let config = parsed("image: i");
    let env = [
        "NCCL_*",
        "FI_*",
        "LD_LIBRARY_PATH",
        "UCX_*",
        "TORCH_NCCL_*",
        "CUDA_DEVICE_ORDER",
    ];
    assert_eq!(config.env_patterns, env.map(Glob::from));
    let mounts = [
        "host-opt-amazon*",
        "host-libefa*",
        "host-libibverbs*",
        "amazon-efa*",
        "nvtcpxo-*",
        "nccl-*",
        "dev-shm",
    ];
    assert_eq!(config.mount_patterns, mounts.map(Glob::from));
    assert_eq!(config.gpus.resources, ["nvidia.com/gpu"]);
    // The key of the configuration document wins over the ADR's.
    let config =
        parsed("image: i\ngpuResourceNames: [a.b/gpu]\ngpuDetection: {resourceNames: [c.d/gpu]}");
    assert_eq!(config.gpus.resources, ["a.b/gpu"]);
    let config =
        parsed("image: i\nprocessingStrategy: STORE_ONLY\nnetworkResourceNames: [c.d/nic]");
    assert_eq!(config.processing_strategy, "STORE_ONLY");
    assert_eq!(config.networks.resources, ["c.d/nic"]);
    let config = parsed(
        "image: i\nobjectSelector: {matchExpressions: [{key: a, operator: NotIn, values: [b]}]}",
    );
    let selector = serde_json::json!({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]});
    assert_eq!(config.object_selector, Some(selector));
}
