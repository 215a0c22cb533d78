use super::*;
use crate::args::{ActArgs, ControllerArgs, IngestArgs, NodeArgs, RunArgs};
use crate::settings::resolve;

mod security;

fn act(edit: impl FnOnce(&mut ActArgs)) -> ActArgs {
    let mut act = ActArgs {
        kubeconfig: Some("/k".into()),
        namespace: Some("gw".into()),
        ..ActArgs::default()
    };
    edit(&mut act);
    act
}

fn run(edit: impl FnOnce(&mut ActArgs)) -> Installation {
    with_kubelet("/none/kubelet.sock", edit)
}

fn with_kubelet(socket: &str, edit: impl FnOnce(&mut ActArgs)) -> Installation {
    let args = RunArgs {
        act: act(edit),
        node: NodeArgs {
            pod_resources: Some(socket.into()),
            ..NodeArgs::default()
        },
        ..RunArgs::default()
    };
    resolve(args).unwrap().into()
}

fn controller(act: ActArgs) -> Installation {
    let args = ControllerArgs {
        act,
        ingest: IngestArgs {
            grpc_tls_cert: Some("/c".into()),
            grpc_tls_key: Some("/k".into()),
            ..IngestArgs::default()
        },
        ..ControllerArgs::default()
    };
    resolve(args).unwrap().into()
}

/// Returns a controller that issues its certificate itself.
fn issuing(act: ActArgs) -> Installation {
    let args = ControllerArgs {
        act,
        ..ControllerArgs::default()
    };
    resolve(args).unwrap().into()
}

fn described(needs: &[Need]) -> Vec<String> {
    let each = needs.iter().map(|need| need.described(&need.verbs));
    each.collect()
}

fn names(installation: &Installation) -> Vec<String> {
    described(&of(installation, false))
}

/// Returns the rows of some settings for an installation.
fn some_rows(settings: &[&str], installation: &Installation) -> Vec<Need> {
    rows(settings, installation.act.as_ref().unwrap())
}

/// Returns an installation with a janitor of this configuration.
fn janitor(config: &str) -> Installation {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), config).unwrap();
    run(|act| {
        act.janitor = Some(true);
        act.janitor_config = Some(file.path().to_owned());
    })
}

#[test]
fn device_taints_need_what_they_read_and_write() {
    let reads = ["list, watch resourceslices", "list, watch resourceclaims"];
    for (dry_run, rules) in [
        (true, "list, watch devicetaintrules"),
        (false, "list, watch, create, patch, delete devicetaintrules"),
    ] {
        let mode = run(|act| (act.quarantine, act.dry_run) = (Some(true), Some(dry_run)));
        let needs = some_rows(&["device-taints"], &mode);
        assert_eq!(described(&needs), [reads[0], rules, reads[1]]);
        let grant = needs[0].grant("ops");
        assert!(grant.contains("--resource=resourceslices.resource.k8s.io"));
    }
    let acts = run(|act| act.quarantine = Some(true));
    assert_eq!(of(&acts, true).len(), of(&acts, false).len() + 3);
}

#[test]
fn a_drain_sees_and_removes_pods_and_in_a_dry_run_sees_them_only() {
    let of_drain = |dry_run| {
        let mut needs = of(
            &run(|act| {
                (act.quarantine, act.dry_run) = (Some(true), Some(dry_run));
                act.drain = Some(true);
            }),
            false,
        );
        needs.retain(|need| need.resource.starts_with("pods"));
        needs
    };
    assert_eq!(described(&of_drain(true)), ["list, watch pods"]);
    let acts = of_drain(false);
    assert_eq!(
        described(&acts),
        [
            "list, watch, delete pods",
            "create pods/eviction",
            "patch pods"
        ]
    );
    // A drain does without the permission that only checkpoints need.
    let lacks = acts.into_iter().filter(|need| need.may_lack);
    assert_eq!(
        lacks.map(|need| need.name).collect::<Vec<_>>(),
        ["checkpoints"]
    );
}

#[test]
fn a_janitor_needs_its_resources_and_what_its_provider_does() {
    // A janitor's needs without those of hand-overs.
    let described = |text: &str| -> Vec<String> {
        let mut needs = of(&janitor(text), false);
        needs.retain(|need| need.name.starts_with("janitor-"));
        described(&needs)
    };
    let reboots = [
        "list, watch, patch, delete rebootnodes",
        "patch rebootnodes/status",
    ];
    let by_grpc = "global: {cspProviderHost: \"a:1\", cspProviderInsecure: true}\n";
    let off = "terminateNodeController: {enabled: false}\n";
    assert_eq!(described(&format!("{by_grpc}{off}")), reboots);
    let all = described(by_grpc);
    assert_eq!(
        all.last().map(String::as_str),
        Some("delete nodes"),
        "{all:?}"
    );
    // The built-in provider, by Jobs.
    let jobs = ["get, create jobs", "list pods", "get nodes"];
    let own = described(off);
    let (resources, rest) = own.split_at(2);
    assert_eq!(resources, reboots);
    for (found, expected) in rest.iter().zip(jobs) {
        assert!(found.starts_with(expected), "{found}");
    }
    assert_eq!(rest.len(), jobs.len());
    // The BMC of the machine.
    let bmc = "redfish: {address: \"http://{node}-bmc\"}\n";
    let power_cycles = described(&format!("{bmc}{off}"));
    assert_eq!(power_cycles[..2], reboots);
    assert_eq!(power_cycles[2..], ["get nodes"]);
    // The owner of the machine.
    let label = "label: {reboot: example.com/reboot}\n";
    let labelled = described(&format!("{label}{by_grpc}{off}"));
    assert_eq!(labelled, power_cycles);
    let elsewhere = format!("{label}rebootNodeController: {{enabled: false}}\n{off}");
    assert_eq!(described(&elsewhere), [""; 0]);
}

#[test]
fn hand_overs_are_told_and_do_without() {
    let needs = of(&janitor(""), false);
    let events = needs.iter().find(|need| need.resource == "events");
    let events = events.unwrap();
    assert_eq!(events.described(&events.verbs), "create events in default");
    assert!(events.may_lack);
}

#[test]
fn a_repair_makes_custom_resources_and_in_a_dry_run_none() {
    let config = fleet::remediation::RemediationConfig::builtin();
    let kinds = config.kinds();
    let [reboot, terminate] = kinds.as_slice() else {
        panic!("{kinds:?}");
    };
    assert_eq!(
        (reboot.kind.as_str(), terminate.kind.as_str()),
        ("RebootNode", "TerminateNode")
    );
    let need = |mode| of_remediation(mode, reboot, "rebootnodes".to_owned());
    assert_eq!(need(Mode::DryRun), None);
    let need = need(Mode::Act).unwrap();
    assert_eq!(
        need.described(&need.verbs),
        "get, list, watch, create, delete rebootnodes"
    );
    assert!(
        need.grant("ops")
            .contains("--resource=rebootnodes.janitor.dgxc.nvidia.com")
    );
}

#[test]
#[allow(clippy::large_stack_arrays)] // Of seven installations.
fn each_mode_needs_what_it_does_and_no_more() {
    let nodes = "list, watch nodes";
    let act_on_nodes = "list, watch, patch nodes";
    let switches = "list, watch, create, patch configmaps in gw";
    let pauses = "list, watch configmaps in gw";
    let table: [(Installation, &[&str]); 7] = [
        (run(|_| ()), &[nodes]),
        (
            run(|act| (act.quarantine, act.dry_run) = (Some(true), Some(true))),
            &[nodes, pauses, pauses],
        ),
        (
            run(|act| act.quarantine = Some(true)),
            &[
                act_on_nodes,
                "patch nodes/status",
                "create, patch events in default",
                switches,
                pauses,
            ],
        ),
        (
            run(|act| {
                act.quarantine = Some(true);
                (act.node_conditions, act.node_events) = (Some(false), Some(false));
                act.policy = Some("configmap:p/q".into());
            }),
            &[
                act_on_nodes,
                switches,
                pauses,
                "list, watch configmaps in p",
            ],
        ),
        (controller(act(|_| ())), &[nodes, "create tokenreviews"]),
        (
            issuing(act(|_| ())),
            &[
                nodes,
                "create tokenreviews",
                "get, list, watch, create, update secrets in gw",
                "get, create, update configmaps in gw",
            ],
        ),
        (
            controller(act(|act| {
                act.quarantine = Some(true);
                (act.node_conditions, act.node_events) = (Some(false), Some(false));
            })),
            &[
                act_on_nodes,
                switches,
                pauses,
                "list, watch, create, patch configmaps in gw",
                "get, create, patch leases in gw",
                "list, patch pods",
                "list resourceslices",
                "create tokenreviews",
            ],
        ),
    ];
    for (installation, expected) in table {
        assert_eq!(names(&installation), expected);
    }
}

#[test]
fn who_writes_on_pods_may_go_without() {
    let kubelet = tempfile::NamedTempFile::new().unwrap();
    let socket = kubelet.path().to_str().unwrap();
    let lacks = |installation: &Installation| {
        let mut needs = of(installation, false);
        needs.retain(|need| need.may_lack);
        described(&needs)
    };
    let acts = with_kubelet(socket, |act| act.quarantine = Some(true));
    assert_eq!(lacks(&acts), ["list, patch pods", "list resourceslices"]);
    for writes_nothing in [
        run(|act| act.quarantine = Some(true)),
        with_kubelet(socket, |_| ()),
        with_kubelet(socket, |act| {
            (act.quarantine, act.dry_run) = (Some(true), Some(true));
        }),
    ] {
        assert_eq!(lacks(&writes_nothing), [""; 0]);
    }
}

#[test]
fn policies_over_objects_need_to_list_and_watch_what_they_read() {
    let preset = objects::presets::find("operators").unwrap();
    let policies = objects::parse(preset.text, preset.name).unwrap().policies;
    let monitor = objects::ObjectMonitor::new(policies);
    let needs = monitor.watched();
    let needs: Vec<Need> = needs
        .map(|(watched, _)| of_objects(watched, "pods".to_owned()))
        .collect();
    assert_eq!(
        described(&needs),
        [
            "list, watch pods in gpu-operator",
            "list, watch pods in network-operator",
            "list, watch pods in nvidia-network-operator",
        ]
    );
    assert!(needs.iter().all(|need| !need.may_lack));
    let events = Watched {
        kind: objects::Kind::new("events.k8s.io/v1", "Event"),
        namespace: None,
    };
    let grant = of_objects(&events, "events".to_owned()).grant("ops");
    assert!(
        grant.starts_with(
            "kubectl create clusterrole gpuwarden-objects-events --verb=list,watch \
             --resource=events.events.k8s.io && "
        ),
        "{grant}"
    );
    assert_eq!(of_objects_map(&TextPlace::File("/p".into())), None);
}

#[test]
fn each_row_of_the_table_is_complete_and_of_a_setting() {
    let all = run(|_| ());
    let mut names = std::collections::BTreeSet::new();
    for line in TABLE.lines().skip(1) {
        let with = line.split('\t').next().unwrap();
        names.insert(with);
        assert!(!some_rows(&[with], &all).is_empty(), "{line}");
        assert_eq!(line.split('\t').count(), 9, "{line}");
    }
    let source = include_str!("../needs.rs");
    for name in names {
        assert!(source.contains(&format!("\"{name}\"")), "{name}");
    }
}

#[test]
fn a_right_is_asked_for_by_the_names_that_are_used() {
    let needs = of(&run(|act| act.quarantine = Some(true)), false);
    let switches = needs.iter().find(|need| need.name == "switches").unwrap();
    let asked: Vec<_> = switches
        .accesses()
        .map(|access| (access.verb, access.name.unwrap_or("any")))
        .collect();
    assert_eq!(
        asked,
        [
            ("list", "circuit-breaker"),
            ("watch", "circuit-breaker"),
            ("create", "any"),
            ("patch", "circuit-breaker"),
        ]
    );
}

#[test]
fn a_grant_is_a_command_for_a_user_or_a_service_account() {
    let needs = of(&run(|act| act.quarantine = Some(true)), false);
    assert_eq!(
        needs[1].grant("ops team"),
        "kubectl create clusterrole gpuwarden-node-status --verb=patch --resource=nodes/status && \
         kubectl create clusterrolebinding gpuwarden-node-status --clusterrole=gpuwarden-node-status \
         --user='ops team'"
    );
    assert_eq!(
        needs[2].grant("system:serviceaccount:gw:gpuwarden"),
        "kubectl -n default create role gpuwarden-events --verb=create,patch --resource=events && \
         kubectl -n default create rolebinding gpuwarden-events --role=gpuwarden-events \
         --serviceaccount=gw:gpuwarden"
    );
}

#[test]
fn a_grant_names_a_part_of_a_resource_as_kubectl_takes_it() {
    let needs = of(&janitor(""), false);
    let status = needs
        .iter()
        .find(|need| need.resource == "rebootnodes/status");
    let command = status.unwrap().grant("ops");
    let resource = "--resource=rebootnodes.janitor.dgxc.nvidia.com/status ";
    assert!(command.contains(resource), "{command}");
}
