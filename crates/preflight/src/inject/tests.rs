use super::*;
use crate::resources::ClusterClaims;

const OURS: &str = "image: registry.example/gpuwarden:1\n";

fn config(text: &str) -> Config {
    Config::parse(text, "test").expect("a configuration")
}

fn pod(gpus: u32) -> Value {
    let limits = json!({"nvidia.com/gpu": gpus.to_string(), "nvidia.com/mlnxnics": "4"});
    json!({
        "metadata": {"generateName": "worker-"},
        "spec": {"containers": [{
            "name": "main", "image": "training", "resources": {"limits": limits},
        }]},
    })
}

fn in_gang(mut pod: Value) -> Value {
    pod["spec"]["schedulingGroup"] = json!({"podGroupName": "group"});
    pod
}

fn tried(pod: &Value, config: &Config) -> Result<Injection, Refusal> {
    let cluster = ClusterClaims::default();
    let devices = DevicesOfPod::of(pod, config, &cluster).expect("GPUs");
    let gang = Gang::of(pod, "training", &config.discovery).expect("a gang or none");
    let candidate = Candidate {
        pod,
        devices: &devices,
        gang: gang.as_ref(),
        forbidden_by: None,
        rendezvous: None,
    };
    inject(candidate, config)
}

/// Returns the pod with the patch applied.
fn injected(pod: &Value, config: &Config) -> Value {
    patched(pod, tried(pod, config).expect("no refusal"))
}

fn patched(pod: &Value, injection: Injection) -> Value {
    let patch = serde_json::from_value::<json_patch::Patch>(injection.patch.into());
    let mut pod = pod.clone();
    json_patch::patch(&mut pod, &patch.expect("a patch")).expect("a patch that fits");
    pod
}

fn names(pod: &Value, list: &str) -> Vec<String> {
    let list = field::list(pod, &format!("/spec/{list}")).iter();
    list.map(|one| field::name(one).to_owned()).collect()
}

fn variables(container: &Value) -> Vec<(String, Option<String>)> {
    let env = field::list(container, "/env").iter();
    env.map(|one| {
        let value = one.get("value").and_then(Value::as_str);
        (field::name(one).to_owned(), value.map(str::to_owned))
    })
    .collect()
}

fn value<'a>(container: &'a Value, name: &str) -> Option<&'a str> {
    let mut env = field::list(container, "/env").iter();
    env.find(|one| field::name(one) == name)?
        .get("value")?
        .as_str()
}

#[test]
fn checks_run_only_where_they_can_say_something() {
    let config = config(OURS);
    let (diag, loopback, allreduce) = (
        "preflight-dcgm-diag",
        "preflight-nccl-loopback",
        "preflight-nccl-allreduce",
    );
    let mut without_network = in_gang(pod(8));
    let limits = json!({"nvidia.com/gpu": "8"});
    without_network["spec"]["containers"][0]["resources"]["limits"] = limits;
    let mut host_network = without_network.clone();
    host_network["spec"]["hostNetwork"] = true.into();
    for (pod, expected) in [
        (pod(1), vec![diag]),
        (pod(8), vec![diag, loopback]),
        (in_gang(pod(8)), vec![diag, loopback, allreduce]),
        (in_gang(pod(1)), vec![diag, allreduce]),
        (without_network, vec![diag, loopback]),
        (host_network, vec![diag, loopback, allreduce]),
    ] {
        assert_eq!(
            names(&injected(&pod, &config), "initContainers"),
            expected,
            "{pod}"
        );
    }
    // NVSentinel's documents let every check run in every pod.
    let all = self::config(&format!("{OURS}gateChecks: false\n"));
    assert_eq!(
        names(&injected(&pod(1), &all), "initContainers"),
        [diag, loopback, allreduce]
    );
}

#[test]
fn the_annotation_chooses_and_orders() {
    let config = config(OURS);
    let with = |value: &str| {
        let mut pod = pod(1);
        pod["metadata"]["annotations"] = json!({CHECKS_ANNOTATION: value});
        pod
    };
    let chosen = with("preflight-nccl-loopback, preflight-dcgm-diag");
    // An explicit choice runs the check even with one GPU.
    assert_eq!(
        names(&injected(&chosen, &config), "initContainers"),
        ["preflight-nccl-loopback", "preflight-dcgm-diag"]
    );
    for empty in ["", "  "] {
        assert_eq!(
            tried(&with(empty), &config).expect("none").patch,
            [] as [Value; 0]
        );
    }
    for (annotation, part) in [
        (
            "preflight-dcgm-diag,preflight-dcgm-diag",
            "preflight-dcgm-diag twice",
        ),
        (
            "preflight-dcgm",
            "\"preflight-dcgm\", which is not known; there are: preflight-dcgm-diag, ",
        ),
        ("preflight-dcgm-diag,", "\"\", which is not known"),
        // A very long name is quoted only in part, and the known checks are listed.
        (
            &"x".repeat(300_000),
            "xxx...\", which is not known; there are: preflight-dcgm-diag, ",
        ),
    ] {
        let refusal = tried(&with(annotation), &config).expect_err(part);
        assert!(refusal.to_string().contains(part), "{refusal}");
        assert!(refusal.to_string().len() < 400, "{refusal}");
    }
    // A check that could never end is left out, with a warning.
    let alone = tried(&with("preflight-nccl-allreduce"), &config).expect("no refusal");
    assert_eq!(alone.patch, [] as [Value; 0]);
    assert!(
        alone.warnings[0].contains("in no gang"),
        "{:?}",
        alone.warnings
    );
}

#[test]
fn a_check_that_is_off_is_there_for_who_names_it() {
    let config = config(
        "image: i\ninitContainers: [{name: preflight-dcgm-diag}, {name: third, image: t, \
         defaultEnabled: false}]\n",
    );
    assert_eq!(
        names(&injected(&pod(1), &config), "initContainers"),
        ["preflight-dcgm-diag"]
    );
    let mut named = pod(1);
    named["metadata"]["annotations"] = json!({CHECKS_ANNOTATION: "third"});
    assert_eq!(
        names(&injected(&named, &config), "initContainers"),
        ["third"]
    );
}

#[test]
fn checks_go_after_a_pods_own_init_containers_or_before_them() {
    let mut pod = pod(1);
    pod["spec"]["initContainers"] = json!([{"name": "set-up"}, {"name": "more"}]);
    for (placement, expected) in [
        ("append", ["set-up", "more", "one", "two"]),
        ("prepend", ["one", "two", "set-up", "more"]),
    ] {
        let config = config(&format!(
            "initContainers: [{{name: one, image: i}}, {{name: two, image: i}}]\n\
             initContainerPlacement: {placement}\n"
        ));
        assert_eq!(names(&injected(&pod, &config), "initContainers"), expected);
    }
}

#[test]
fn a_check_knows_its_node_and_where_to_report() {
    let config = config(OURS);
    let pod = injected(&pod(1), &config);
    let check = &pod["spec"]["initContainers"][0];
    assert_eq!(check["image"], "registry.example/gpuwarden:1");
    assert_eq!(check["command"], json!(["gpuwarden", "check", "dcgm-diag"]));
    assert_eq!(
        check["env"][0]["valueFrom"]["fieldRef"]["fieldPath"],
        "spec.nodeName"
    );
    assert_eq!(
        value(check, "PLATFORM_CONNECTOR_SOCKET"),
        Some("unix:///var/run/nvsentinel.sock")
    );
    assert_eq!(
        value(check, "PROCESSING_STRATEGY"),
        Some("EXECUTE_REMEDIATION")
    );
    assert_eq!(value(check, "GANG_ID"), None);
    assert_eq!(
        check["volumeMounts"],
        json!([{"name": "nvsentinel-socket", "mountPath": "/var/run"}])
    );
    let path = json!({"path": "/var/run/nvsentinel", "type": "DirectoryOrCreate"});
    assert_eq!(
        pod["spec"]["volumes"],
        json!([{"name": "nvsentinel-socket", "hostPath": path}])
    );
    assert_eq!(check["resources"]["limits"]["nvidia.com/gpu"], "1");
    assert!(
        check.get("securityContext").is_none(),
        "it has no privileges"
    );
}

#[test]
fn a_check_of_a_gang_knows_where_its_peers_stand() {
    let config = config(&format!(
        "{OURS}gangCoordination: {{ncclTopoConfigMap: topology, ncclTopoShape: ndv5}}\n"
    ));
    let pod = injected(&in_gang(pod(8)), &config);
    let check = &pod["spec"]["initContainers"][2];
    for (name, expected) in [
        ("GANG_ID", "kubernetes-training-group"),
        ("GANG_CONFIG_DIR", "/etc/preflight"),
        ("GANG_TIMEOUT_SECONDS", "600"),
        ("MASTER_PORT", "29500"),
        ("NCCL_TOPO_FILE", "/etc/nccl/topo.xml"),
        ("GPUWARDEN_NCCL_TOPOLOGY", "azure-ndv5.xml"),
    ] {
        assert_eq!(value(check, name), Some(expected), "{name}");
    }
    let set: Vec<String> = variables(check).into_iter().map(|(name, _)| name).collect();
    assert!(set.contains(&"POD_NAME".to_owned()) && set.contains(&"POD_IP".to_owned()));
    let volumes = &pod["spec"]["volumes"];
    let map = json!({"name": "preflight-kubernetes-training-group", "optional": true});
    assert!(
        volumes
            .as_array()
            .expect("a list")
            .contains(&json!({"name": "nvsentinel-preflight-gang-config", "configMap": map}))
    );
    assert_eq!(
        names(&pod, "volumes"),
        [
            "nvsentinel-socket",
            "nvsentinel-preflight-gang-config",
            "nccl-topo",
            "dshm"
        ]
    );
    let mounts = field::list(check, "/volumeMounts").iter();
    let paths: Vec<_> = mounts
        .filter_map(|mount| field::text(mount, "/mountPath"))
        .collect();
    assert_eq!(
        paths,
        ["/var/run", "/etc/preflight", "/etc/nccl", "/dev/shm"]
    );
}

/// RDMA pins the memory that it sends.
#[test]
fn the_all_reduce_may_lock_memory_and_no_other_check() {
    let made = injected(&in_gang(pod(8)), &config(OURS));
    for check in field::list(&made, "/spec/initContainers") {
        let is_allreduce = field::name(check) == "preflight-nccl-allreduce";
        let locks = json!({"capabilities": {"add": ["IPC_LOCK"]}});
        let expected = is_allreduce.then_some(&locks);
        assert_eq!(check.get("securityContext"), expected, "{check}");
    }
}

#[test]
fn a_check_of_a_gang_gets_what_the_configuration_adds() {
    let text = |mirrored: bool| {
        format!(
            "{OURS}ncclAllreduceExtraEnv: [{{name: NCCL_NET, value: plugin}}]\n\
             gangCoordination:\n  masterPort: 29511\n  timeout: 90s\n  configMapMountPath: /gang\n  \
             mirrorResourceClaims: {mirrored}\n  \
             extraHostPathMounts: [{{name: opt, hostPath: /opt/amazon, mountPath: /opt/amazon}}]\n  \
             extraVolumeMounts: [{{name: plugin, mountPath: /plugin, readOnly: false}}]\n"
        )
    };
    let mut pod = in_gang(pod(8));
    pod["spec"]["volumes"] = json!([{"name": "plugin", "emptyDir": {}}]);
    pod["spec"]["resourceClaims"] = json!([{"name": "channel", "resourceClaimName": "imex"}]);
    pod["spec"]["containers"][0]["resources"]["claims"] = json!([{"name": "channel"}]);
    let after = injected(&pod, &config(&text(true)));
    let check = &after["spec"]["initContainers"][2];
    for (name, expected) in [
        ("NCCL_NET", "plugin"),
        ("MASTER_PORT", "29511"),
        ("GANG_TIMEOUT_SECONDS", "90"),
        ("GANG_CONFIG_DIR", "/gang"),
    ] {
        assert_eq!(value(check, name), Some(expected), "{name}");
    }
    let mounts = check["volumeMounts"].as_array().expect("a list");
    for mount in [
        json!({"name": "opt", "mountPath": "/opt/amazon", "readOnly": true}),
        json!({"name": "plugin", "mountPath": "/plugin", "readOnly": false}),
        json!({"name": "nvsentinel-preflight-gang-config", "mountPath": "/gang", "readOnly": true}),
    ] {
        assert!(mounts.contains(&mount), "{mount}: {mounts:?}");
    }
    assert!(names(&after, "volumes").contains(&"opt".to_owned()));
    assert_eq!(check["resources"]["claims"], json!([{"name": "channel"}]));
    let loopback = &after["spec"]["initContainers"][1];
    assert_eq!(value(loopback, "NCCL_NET"), None, "it is the all-reduce's");

    let after = injected(&pod, &config(&text(false)));
    let resources = &after["spec"]["initContainers"][2]["resources"];
    assert!(resources.get("claims").is_none(), "{resources}");
}

#[test]
fn the_sockets_volume_has_the_adrs_name_too() {
    let config = config(
        "initContainers: [{name: third, image: i, volumeMounts: [{name: platform-connector-socket, \
         mountPath: /var/run}]}]\n",
    );
    let after = injected(&pod(1), &config);
    let mount = &after["spec"]["initContainers"][0]["volumeMounts"];
    assert_eq!(
        *mount,
        json!([{"name": "nvsentinel-socket", "mountPath": "/var/run"}])
    );
    assert_eq!(names(&after, "volumes"), ["nvsentinel-socket"]);
}

#[test]
fn the_users_fabric_settings_are_taken_over() {
    let mut pod = pod(8);
    pod["spec"]["containers"][0]["env"] = json!([
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "NCCL_TOPO_FILE", "value": "/config/topo/nd.xml"},
        {"name": "BW_THRESHOLD_GBPS", "value": "1"},
        {"name": "SECRET", "value": "x"},
        {"name": "LD_LIBRARY_PATH", "value": "/plugin"},
    ]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([
        {"name": "nccl-plugin", "mountPath": "/plugin", "mountPropagation": "Bidirectional"},
        {"name": "dev-shm", "mountPath": "/dev/shm"},
        {"name": "config", "mountPath": "/config"},
        {"name": "data", "mountPath": "/data"},
    ]);
    let second = json!({"name": "second", "env": [
        {"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "UCX_TLS", "value": "rc"},
    ]});
    pod["spec"]["containers"]
        .as_array_mut()
        .expect("a list")
        .push(second);
    pod["spec"]["volumes"] = json!([
        {"name": "nccl-plugin"}, {"name": "dev-shm"}, {"name": "config"}, {"name": "data"},
    ]);
    let config = config(&format!("{OURS}nccl: {{loopbackThresholdGBps: 15}}\n"));
    let pod = injected(&pod, &config);
    let check = &pod["spec"]["initContainers"][1];
    // The first container wins, and the configuration wins over both.
    assert_eq!(value(check, "NCCL_DEBUG"), Some("INFO"));
    assert_eq!(value(check, "UCX_TLS"), Some("rc"));
    assert_eq!(value(check, "BW_THRESHOLD_GBPS"), Some("15"));
    assert_eq!(value(check, "SECRET"), None);
    // All inherited variables are optional for the check, except the library path.
    assert_eq!(
        value(check, "GPUWARDEN_INHERITED_ENV"),
        Some("NCCL_DEBUG,NCCL_TOPO_FILE,UCX_TLS")
    );
    let plugin = json!({"name": "nccl-plugin", "mountPath": "/plugin"});
    assert_eq!(
        check["volumeMounts"],
        json!([
            {"name": "nvsentinel-socket", "mountPath": "/var/run"},
            plugin,
            {"name": "dev-shm", "mountPath": "/dev/shm"},
            {"name": "config", "mountPath": "/config"},
        ])
    );
    assert!(
        !names(&pod, "volumes").contains(&"dshm".to_owned()),
        "one shared memory is enough"
    );
}

#[test]
fn checks_of_one_pod_learn_how_long_a_pass_counts() {
    let off = injected(&in_gang(pod(8)), &config(OURS));
    let on = config(&format!("{OURS}resultCache: 30m\n"));
    let on = injected(&in_gang(pod(8)), &on);
    for (check, seconds) in [Some("1800"), Some("1800"), None].into_iter().enumerate() {
        let variable = "GPUWARDEN_RESULT_CACHE_SECONDS";
        assert_eq!(
            value(&on["spec"]["initContainers"][check], variable),
            seconds
        );
        assert_eq!(value(&off["spec"]["initContainers"][check], variable), None);
    }
}

#[test]
fn names_that_a_pod_uses_are_left_to_it() {
    let config = config(OURS);
    let mut taken = pod(1);
    taken["spec"]["volumes"] = json!([
        {"name": "nvsentinel-socket", "emptyDir": {}}, {"name": "nvsentinel-socket-2", "emptyDir": {}},
    ]);
    let after = injected(&taken, &config);
    assert_eq!(names(&after, "volumes")[2], "nvsentinel-socket-3");
    assert_eq!(
        after["spec"]["initContainers"][0]["volumeMounts"][0]["name"],
        "nvsentinel-socket-3"
    );
    // An identical volume is shared.
    let mut same = pod(1);
    let path = json!({"path": "/var/run/nvsentinel", "type": "DirectoryOrCreate"});
    same["spec"]["volumes"] = json!([{"name": "nvsentinel-socket", "hostPath": path}]);
    assert_eq!(
        names(&injected(&same, &config), "volumes"),
        ["nvsentinel-socket"]
    );

    // A check whose image another webhook changed is already present; a user's container keeps
    // its name.
    let mut other = pod(1);
    other["spec"]["initContainers"] =
        json!([{"name": "preflight-dcgm-diag", "image": "mirror/i@sha256:1"}]);
    assert_eq!(
        tried(&other, &config).expect("no refusal").patch,
        [] as [Value; 0]
    );
    let mut taken = pod(1);
    taken["spec"]["containers"][0]["name"] = "preflight-dcgm-diag".into();
    let injection = tried(&taken, &config).expect("no refusal");
    assert!(injection.patch.is_empty() && injection.warnings[0].contains("has its name"));
}

#[test]
fn a_pod_of_windows_is_left_alone() {
    let mut pod = pod(8);
    pod["spec"]["os"] = json!({"name": "windows"});
    assert_eq!(tried(&pod, &config(OURS)), Ok(Injection::default()));
}

#[test]
fn where_a_pod_must_not_be_root_a_check_is_not() {
    let mut pod = pod(1);
    pod["spec"]["securityContext"] = json!({"runAsNonRoot": true});
    let check = &injected(&pod, &config(OURS))["spec"]["initContainers"][0];
    assert_eq!(check["securityContext"]["runAsUser"], 65532);
    pod["spec"]["securityContext"]["runAsUser"] = 1000.into();
    let check = &injected(&pod, &config(OURS))["spec"]["initContainers"][0];
    assert!(
        check.get("securityContext").is_none(),
        "the pod names a user"
    );
}

#[test]
fn a_variable_that_needs_another_is_not_taken_over_alone() {
    let mut pod = pod(1);
    pod["spec"]["containers"][0]["env"] = json!([
        {"name": "IFACE", "value": "eth0"},
        {"name": "NCCL_SOCKET_IFNAME", "value": "$(IFACE)"},
        {"name": "NCCL_IB_HCA", "value": "mlx5"},
        {"name": "NCCL_NET", "value": "$(NCCL_IB_HCA)"},
    ]);
    let check = &injected(&pod, &config(OURS))["spec"]["initContainers"][0];
    assert_eq!(value(check, "NCCL_SOCKET_IFNAME"), None);
    assert_eq!(value(check, "NCCL_NET"), Some("$(NCCL_IB_HCA)"));
}

#[test]
fn a_pod_that_has_its_checks_stays_as_it_is() {
    let config = config(OURS);
    let once = injected(&in_gang(pod(8)), &config);
    assert_eq!(
        tried(&once, &config).expect("no refusal").patch,
        [] as [Value; 0]
    );
    assert_eq!(checks_of(&once, &config), ["preflight-nccl-allreduce"]);
}

#[test]
fn a_gang_of_others_checks_alone_meets() {
    let others = |more: &str| {
        config(&format!(
            "initContainers:\n  - {{name: fabric-test, image: i}}\n  - {{name: disk-test, image: i{more}}}\n"
        ))
    };
    // If no check is marked as a gang check, all are, and their mounts are created.
    let config = others("");
    let pod_of_gang = injected(&in_gang(pod(8)), &config);
    assert_eq!(
        pod_of_gang["metadata"]["labels"][roster::GANG_ID_LABEL],
        "kubernetes-training-group"
    );
    assert_eq!(
        checks_of(&pod_of_gang, &config),
        ["fabric-test", "disk-test"]
    );
    let ended = |codes: [i64; 2]| {
        let mut pod = pod_of_gang.clone();
        let of = |name: &str, code: i64| json!({"name": name, "state": {"terminated": {"exitCode": code, "finishedAt": "t"}}});
        pod["status"]["initContainerStatuses"] =
            json!([of("fabric-test", codes[0]), of("disk-test", codes[1])]);
        pod
    };
    assert!(is_through(&ended([0, 0]), &config) && !is_through(&ended([0, 1]), &config));
    // If one check is marked, only that one is.
    let config = others(", gangOnly: true");
    let pod_of_gang = injected(&in_gang(pod(8)), &config);
    assert_eq!(checks_of(&pod_of_gang, &config), ["disk-test"]);
    // A pod outside of gangs gets no gang label.
    let config = others("");
    let alone = injected(&pod(8), &config);
    assert_eq!(alone["metadata"].get("labels"), None);
}

#[test]
fn where_pod_security_forbids_what_checks_need_a_pod_starts_without_or_is_denied() {
    let pod = pod(1);
    for (word, is_denied) in [("", false), ("podSecurity: deny\n", true)] {
        let config = config(&format!("{OURS}{word}"));
        let devices = DevicesOfPod::of(&pod, &config, &ClusterClaims::default()).expect("GPUs");
        let candidate = Candidate {
            pod: &pod,
            devices: &devices,
            gang: None,
            forbidden_by: Some("baseline"),
            rendezvous: None,
        };
        match inject(candidate, &config) {
            Ok(injection) => {
                assert!(!is_denied && injection.patch.is_empty());
                assert!(
                    injection.warnings[0].contains("`baseline`"),
                    "{injection:?}"
                );
            }
            Err(refusal) => assert!(is_denied && refusal.to_string().contains("annotation")),
        }
    }
}

#[test]
fn where_host_paths_are_forbidden_checks_report_to_the_webhook() {
    let mut pod = pod(8);
    pod["spec"]["securityContext"] = json!({"runAsUser": 0, "fsGroup": 7});
    let place = RendezvousPlace {
        url: "https://w:8444/".to_owned(),
        authorities: "PEM".to_owned(),
        takes_reports: true,
    };
    let lock = "initContainers:\n  - name: preflight-nccl-loopback\n    image: i\n    command: [gpuwarden]\n    \
                securityContext: {privileged: true, capabilities: {add: [IPC_LOCK]}}\n    volumeMounts: \
                [{name: nvsentinel-socket, mountPath: /var/run}]\n  - {name: other, image: o}\n";
    for (word, takes_reports, is_checked) in [
        ("", true, true),
        ("podSecurity: https\n", true, true),
        ("", false, false),
        ("podSecurity: skip\n", true, false),
    ] {
        let config = config(&format!("{lock}{word}"));
        let devices = DevicesOfPod::of(&pod, &config, &ClusterClaims::default()).expect("GPUs");
        let place = RendezvousPlace {
            takes_reports,
            ..place.clone()
        };
        let candidate = Candidate {
            pod: &pod,
            devices: &devices,
            gang: None,
            forbidden_by: Some("restricted"),
            rendezvous: Some(&place),
        };
        let injection = inject(candidate, &config).expect("no refusal");
        assert_eq!(
            !injection.patch.is_empty(),
            is_checked,
            "{word} {takes_reports}"
        );
        if !is_checked {
            continue;
        }
        // A third-party image can only report over the socket, so its check is left out.
        assert_eq!(injection.checks, ["preflight-nccl-loopback"]);
        assert!(injection.warnings.iter().any(|it| it.contains("other")));
        let after = patched(&pod, injection);
        let check = &after["spec"]["initContainers"][0];
        assert_eq!(value(check, "GPUWARDEN_REPORT_URL"), Some("https://w:8444"));
        assert_eq!(value(check, "GANG_RENDEZVOUS_CA"), Some("PEM"));
        assert_eq!(value(check, "PLATFORM_CONNECTOR_SOCKET"), None);
        let context = json!({
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": true,
            "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"},
        });
        assert_eq!(check["securityContext"], context);
        let volumes = after["spec"]["volumes"].as_array().expect("volumes");
        assert!(
            volumes
                .iter()
                .all(|volume| volume.get("hostPath").is_none()),
            "{volumes:?}"
        );
        assert!(
            volumes
                .iter()
                .any(|volume| volume.get("projected").is_some())
        );
    }
}

#[test]
fn a_volume_that_nobody_has_is_left_out_and_said() {
    let config = config(
        "initContainers: [{name: one, image: i, volumeMounts: [{name: nvtcpxo-libraries, mountPath: \
         /usr/local/nvidia}]}]\ngangCoordination: {extraVolumeMounts: [{name: gone, mountPath: /gone}]}\n",
    );
    let injection = tried(&in_gang(pod(8)), &config).expect("no refusal");
    assert!(
        injection.warnings[0].contains("nvtcpxo-libraries"),
        "{:?}",
        injection.warnings
    );
    let after = injected(&in_gang(pod(8)), &config);
    let mounted = after["spec"]["initContainers"][0]["volumeMounts"].to_string();
    assert!(
        !mounted.contains("nvtcpxo") && !mounted.contains("/gone"),
        "{mounted}"
    );
}

mod large;
mod odd;
mod reference;
