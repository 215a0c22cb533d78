//! Patches from NVSentinel's documents, under its configuration, the defaults of its chart, and
//! `gateChecks: false` with `resourceMode: max`, which select its behaviour. Each patch is
//! compared as a whole, so that it contains nothing of ours but the label of a gang's pods.

use super::*;

/// Returns the patch of a pod under NVSentinel's configuration with changes.
fn patch(pod: &Value, changes: &[(&str, &str)], claims: &ClusterClaims) -> Vec<Value> {
    let mut text = crate::config::tests::REFERENCE.to_owned();
    for (from, to) in changes {
        assert!(text.contains(from), "{from}");
        text = text.replace(from, to);
    }
    text.push_str("gateChecks: false\nresourceMode: max\n");
    let config = config(&text);
    let devices = DevicesOfPod::of(pod, &config, claims).expect("GPUs");
    let gang = Gang::of(pod, "training", &config.discovery).expect("a gang or none");
    let candidate = Candidate {
        pod,
        devices: &devices,
        gang: gang.as_ref(),
        forbidden_by: None,
        rendezvous: None,
    };
    inject(candidate, &config).expect("no refusal").patch
}

/// Returns a pod as in the documents: one container per entry, with processors, memory and
/// these limits.
fn pod_of(containers: &[Value]) -> Value {
    let container = |(place, limits): (usize, &Value)| {
        let name = format!("c{place}");
        let resources = json!({"requests": {"cpu": "8", "memory": "64Gi"}, "limits": limits});
        json!({"name": name, "image": "training", "resources": resources})
    };
    let containers: Vec<Value> = containers.iter().enumerate().map(container).collect();
    json!({"metadata": {"name": "p"}, "spec": {"containers": containers}})
}

fn of_field(name: &str, path: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
}

fn variable(name: &str, value: &str) -> Value {
    json!({"name": name, "value": value})
}

/// Container of the documents, and what the webhook adds to it.
struct Expected<'a> {
    name: &'a str,
    /// Variables after those of the template and the common ones.
    env: &'a [Value],
    mounts: &'a [Value],
    devices: Value,
    claims: &'a [&'a str],
}

/// Returns a container as in the documents.
fn container(expected: &Expected<'_>) -> Value {
    let own = match expected.name {
        "preflight-dcgm-diag" => vec![
            variable("DCGM_HOSTENGINE_ADDR", "nvidia-dcgm.gpu-operator.svc:5555"),
            variable("DCGM_DIAG_LEVEL", "2"),
        ],
        "preflight-nccl-loopback" => vec![variable("BW_THRESHOLD_GBPS", "150")],
        _ => vec![variable("MESSAGE_SIZES", "4G")],
    };
    let common = vec![
        of_field("NODE_NAME", "spec.nodeName"),
        variable(
            "PLATFORM_CONNECTOR_SOCKET",
            "unix:///var/run/nvsentinel.sock",
        ),
        variable("PROCESSING_STRATEGY", "EXECUTE_REMEDIATION"),
    ];
    let socket = json!({"name": "nvsentinel-socket", "mountPath": "/var/run"});
    let mut requests = expected.devices.clone();
    requests["cpu"] = "100m".into();
    requests["memory"] = "500Mi".into();
    let mut resources = json!({"requests": requests});
    if expected
        .devices
        .as_object()
        .is_some_and(|it| !it.is_empty())
    {
        resources["limits"] = expected.devices.clone();
    }
    if !expected.claims.is_empty() {
        let claims = expected.claims.iter().map(|name| json!({"name": name}));
        resources["claims"] = claims.collect();
    }
    let env = [own, common, expected.env.to_vec()].concat();
    let mounts = [&[socket], expected.mounts].concat();
    let mut container = json!({
        "name": expected.name,
        "image": format!("ghcr.io/nvidia/nvsentinel/{}:v1.14.0", expected.name),
        "env": env,
        "volumeMounts": mounts,
        "resources": resources,
    });
    if expected.name == "preflight-nccl-allreduce" {
        container["securityContext"] = json!({"capabilities": {"add": ["IPC_LOCK"]}});
    }
    container
}

/// Returns the two checks that are on by default.
fn both(env: &[Value], mounts: &[Value], devices: &Value, claims: &[&str]) -> [Value; 2] {
    ["preflight-dcgm-diag", "preflight-nccl-loopback"].map(|name| {
        container(&Expected {
            name,
            env,
            mounts,
            devices: devices.clone(),
            claims,
        })
    })
}

fn add(path: &str, value: &Value) -> Value {
    json!({"op": "add", "path": path, "value": value})
}

fn socket() -> Value {
    let path = json!({"path": "/var/run/nvsentinel", "type": "DirectoryOrCreate"});
    json!({"name": "nvsentinel-socket", "hostPath": path})
}

/// Returns the variables of a gang check.
fn of_gang() -> Vec<Value> {
    vec![
        variable("GANG_ID", "volcano-training-pg"),
        variable("GANG_CONFIG_DIR", "/etc/preflight"),
        variable("GANG_TIMEOUT_SECONDS", "600"),
        variable("MASTER_PORT", "29500"),
        of_field("POD_NAME", "metadata.name"),
        of_field("POD_IP", "status.podIP"),
    ]
}

fn gang_mounts() -> Vec<Value> {
    vec![
        json!({"name": "nvsentinel-preflight-gang-config", "mountPath": "/etc/preflight", "readOnly": true}),
        json!({"name": "host-opt-amazon", "mountPath": "/opt/amazon", "readOnly": true}),
        json!({"name": "dshm", "mountPath": "/dev/shm"}),
    ]
}

fn gang_volumes() -> Vec<Value> {
    let map = json!({"name": "preflight-volcano-training-pg", "optional": true});
    vec![
        socket(),
        json!({"name": "nvsentinel-preflight-gang-config", "configMap": map}),
        json!({"name": "host-opt-amazon", "hostPath": {"path": "/opt/amazon"}}),
        json!({"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}),
    ]
}

fn gang_label() -> Value {
    let label = json!({"nvsentinel.nvidia.com/gang-id": "volcano-training-pg"});
    add("/metadata/labels", &label)
}

fn in_volcano(mut pod: Value) -> Value {
    pod["metadata"]["annotations"] = json!({"scheduling.k8s.io/group-name": "pg"});
    pod
}

#[test]
fn a_pod_of_one_gpu_and_one_of_several_containers() {
    let none = ClusterClaims::default();
    for (containers, devices) in [
        (
            vec![json!({"nvidia.com/gpu": "1"})],
            json!({"nvidia.com/gpu": "1"}),
        ),
        (
            vec![json!({"nvidia.com/gpu": "8"})],
            json!({"nvidia.com/gpu": "8"}),
        ),
        // The largest count of each resource in any one container.
        (
            vec![
                json!({"nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "1"}),
                json!({"nvidia.com/gpu": "2", "vpc.amazonaws.com/efa": "2"}),
                json!({"example.com/other": "3"}),
            ],
            json!({"nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "2"}),
        ),
    ] {
        let expected = [
            add(
                "/spec/initContainers",
                &json!(both(&[], &[], &devices, &[])),
            ),
            add("/spec/volumes", &json!([socket()])),
            add("/spec/imagePullSecrets", &json!([{"name": "registry"}])),
        ];
        assert_eq!(patch(&pod_of(&containers), &[], &none), expected);
    }
}

#[test]
fn what_a_pod_has_already_is_added_to() {
    let devices = json!({"nvidia.com/gpu": "8"});
    let mut pod = pod_of(std::slice::from_ref(&devices));
    pod["spec"]["initContainers"] = json!([{"name": "set-up"}]);
    pod["spec"]["volumes"] = json!([{"name": "data", "emptyDir": {}}]);
    pod["spec"]["imagePullSecrets"] = json!([{"name": "own"}]);
    let [diag, loopback] = both(&[], &[], &devices, &[]);
    for (placement, places) in [("append", ["-", "-"]), ("prepend", ["0", "1"])] {
        let word = format!("initContainerPlacement: {placement}");
        let expected = [
            add(&format!("/spec/initContainers/{}", places[0]), &diag),
            add(&format!("/spec/initContainers/{}", places[1]), &loopback),
            add("/spec/volumes/-", &socket()),
            add("/spec/imagePullSecrets/-", &json!({"name": "registry"})),
        ];
        let changes = [("initContainerPlacement: append", &*word)];
        assert_eq!(patch(&pod, &changes, &ClusterClaims::default()), expected);
    }
    // A secret that the pod already names is not added again.
    pod["spec"]["imagePullSecrets"] = json!([{"name": "registry"}]);
    let made = patch(&pod, &[], &ClusterClaims::default());
    assert!(
        made.iter()
            .all(|one| one["path"] != "/spec/imagePullSecrets/-")
    );
}

#[test]
fn what_a_check_takes_over_from_the_users_containers() {
    let devices = json!({"nvidia.com/gpu": "8"});
    let mut pod = pod_of(&[devices.clone(), json!({})]);
    pod["spec"]["containers"][0]["env"] = json!([
        variable("NCCL_DEBUG", "INFO"),
        variable("TOKEN", "x"),
        variable("LD_LIBRARY_PATH", "/plugin"),
        variable("PROCESSING_STRATEGY", "STORE_ONLY"),
    ]);
    // The first container wins if two have a variable of the same name.
    pod["spec"]["containers"][1]["env"] = json!([
        variable("NCCL_DEBUG", "WARN"),
        variable("FI_PROVIDER", "efa")
    ]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([
        {"name": "nccl-plugin", "mountPath": "/plugin", "readOnly": true},
        {"name": "nccl-run", "mountPath": "/var/run"},
        {"name": "data", "mountPath": "/data"},
    ]);
    pod["spec"]["volumes"] =
        json!([{"name": "nccl-plugin"}, {"name": "nccl-run"}, {"name": "data"}]);
    let env = [
        variable("NCCL_DEBUG", "INFO"),
        variable("LD_LIBRARY_PATH", "/plugin"),
        variable("FI_PROVIDER", "efa"),
    ];
    let mounts = [json!({"name": "nccl-plugin", "mountPath": "/plugin", "readOnly": true})];
    let [diag, loopback] = both(&env, &mounts, &devices, &[]);
    let made = patch(&pod, &[], &ClusterClaims::default());
    assert_eq!(made[0]["value"], json!([diag, loopback]));
    // Inheritance can be switched off per check.
    let off =
        "inheritUserEnv: false\n    inheritUserVolumeMounts: false\n    env:\n      - name: BW";
    let made = patch(
        &pod,
        &[("env:\n      - name: BW", off)],
        &ClusterClaims::default(),
    );
    let [_, bare] = both(&[], &[], &devices, &[]);
    assert_eq!(made[0]["value"], json!([diag, bare]));
}

#[test]
fn a_pod_of_a_gang() {
    let devices = json!({"nvidia.com/gpu": "8", "nvidia.com/mlnxnics": "4"});
    let mut pod = in_volcano(pod_of(std::slice::from_ref(&devices)));
    let checks = both(&of_gang(), &gang_mounts(), &devices, &[]);
    let expected = [
        add("/spec/initContainers", &json!(checks)),
        add("/spec/volumes", &json!(gang_volumes())),
        add("/spec/imagePullSecrets", &json!([{"name": "registry"}])),
        gang_label(),
    ];
    assert_eq!(patch(&pod, &[], &ClusterClaims::default()), expected);

    // The annotation selects and orders the checks, including one that is off by default.
    pod["metadata"]["annotations"][CHECKS_ANNOTATION] =
        "preflight-nccl-allreduce,preflight-dcgm-diag".into();
    let all_reduce = container(&Expected {
        name: "preflight-nccl-allreduce",
        env: &of_gang(),
        mounts: &gang_mounts(),
        devices,
        claims: &[],
    });
    let made = patch(&pod, &[], &ClusterClaims::default());
    assert_eq!(made[0]["value"], json!([all_reduce, checks[0]]));
}

/// Runs the pod of ADR-026: GPUs and network devices by claims, and each check gets all of
/// them.
#[test]
fn a_pod_with_claims() {
    let mut pod = pod_of(&[json!({})]);
    pod["spec"]["resourceClaims"] = json!([
        {"name": "gpu-claim", "resourceClaimTemplateName": "gpus"},
        {"name": "rdma-claim", "resourceClaimName": "rdma"},
        {"name": "other", "resourceClaimName": "other"},
    ]);
    pod["spec"]["containers"][0]["resources"]["claims"] =
        json!([{"name": "gpu-claim"}, {"name": "rdma-claim"}, {"name": "other"}]);
    let of = |class: &str| {
        let request = json!({"name": "r", "exactly": {"deviceClassName": class, "count": 8}});
        json!({"devices": {"requests": [request]}})
    };
    let mut cluster = ClusterClaims::default();
    cluster
        .templates
        .insert("gpus".to_owned(), of("gpu.nvidia.com"));
    cluster.claims.insert("rdma".to_owned(), of("rdma.example"));
    cluster
        .claims
        .insert("other".to_owned(), of("other.example"));
    let changes = [(
        "imagePullSecrets:\n  - name: registry",
        "gpuDetection: {deviceClasses: [gpu.nvidia.com]}\nnetworkDetection: {deviceClasses: [rdma.example]}",
    )];
    let expected = [
        add(
            "/spec/initContainers",
            &json!(both(&[], &[], &json!({}), &["gpu-claim", "rdma-claim"])),
        ),
        add("/spec/volumes", &json!([socket()])),
    ];
    assert_eq!(patch(&pod, &changes, &cluster), expected);

    // In a gang, checks get every claim unless `mirrorResourceClaims` is off.
    let all = ["gpu-claim", "rdma-claim", "other"];
    for (mirror, claims) in [("true", &all[..]), ("false", &all[..2])] {
        let word = format!("mirrorResourceClaims: {mirror}");
        let changes = [changes[0], ("mirrorResourceClaims: true", &*word)];
        let made = patch(&in_volcano(pod.clone()), &changes, &cluster);
        let checks = both(&of_gang(), &gang_mounts(), &json!({}), claims);
        assert_eq!(made[0]["value"], json!(checks), "{mirror}");
    }
}
