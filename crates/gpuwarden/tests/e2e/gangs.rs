//! Gangs of pods: each kind of gang with the Kubernetes version that supports it, and their
//! rendezvous.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{Balancer, ControlPlane, Options, Program, Version, wait_for};

use crate::player::{note_end, play};
use crate::support::SOON;
use crate::webhook::{
    ALLREDUCE, DIAG, LOOPBACK, NAMESPACE, Webhook, create, names, opted_in, pod, registered,
};

/// Returns the options of a control plane that serves a version of the gang API, if one is
/// given.
pub(crate) fn serving(version: &str) -> Options {
    if version.is_empty() {
        return Options::default();
    }
    let serve = format!("--runtime-config=scheduling.k8s.io/{version}=true");
    let gate = "--feature-gates=GenericWorkload=true";
    Options::default()
        .arg(Program::ApiServer, serve)
        .arg(Program::ApiServer, gate)
}

async fn plane(version: Version, serve: &str) -> anyhow::Result<Option<testkit::Private>> {
    let Some(plane) = ControlPlane::private(version, serving(serve)).await? else {
        return Ok(None);
    };
    plane.namespace(NAMESPACE).await?;
    Ok(Some(plane))
}

/// Sets a pod's address, as its kubelet does.
pub(crate) async fn give_address(
    client: &Client,
    namespace: &str,
    pod: &str,
    ip: &str,
) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let status = json!({"status": {"podIP": ip, "podIPs": [{"ip": ip}]}});
    pods.patch_status(pod, &PatchParams::default(), &Patch::Merge(status))
        .await?;
    Ok(())
}

async fn roster(
    client: &Client,
    namespace: &str,
    name: &str,
) -> Result<BTreeMap<String, String>, String> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps.get(name).await.map_err(|error| error.to_string())?;
    Ok(map.data.unwrap_or_default())
}

/// Waits until the gang has these peers, as `pod;address;rank`.
pub(crate) async fn peers(
    client: &Client,
    namespace: &str,
    map: &str,
    expected: &[&str],
) -> anyhow::Result<()> {
    wait_for("the peers", SOON, || async {
        let data = roster(client, namespace, map).await?;
        let found = data.get("peers").cloned().unwrap_or_default();
        let cut = |line: &str| line.rsplit_once(';').map(|(rest, _)| rest.to_owned());
        let found: Vec<_> = found.lines().filter_map(cut).collect();
        if found == expected {
            Ok(())
        } else {
            Err(format!("{data:?}"))
        }
    })
    .await
}

/// A form of gangs: the served API version, the object with the size, and the field of pods.
struct GangForm {
    version: Version,
    serve: &'static str,
    plural: &'static str,
    object: fn(u32) -> Value,
    pod: Value,
    id: &'static str,
}

async fn a_gang_forms(form: GangForm) -> anyhow::Result<()> {
    let Some(plane) = plane(form.version, form.serve).await? else {
        return Ok(());
    };
    let balancer = Balancer::start().await?;
    let webhook = Webhook::start(&plane, &format!("https://{}", balancer.address()), &[]).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    let (client, namespace) = (plane.client().await?, opted_in(&plane).await?);
    let kind = (form.object)(2)["kind"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let kind = GroupVersionKind::gvk("scheduling.k8s.io", form.serve, &kind);
    let kind = ApiResource::from_gvk_with_plural(&kind, form.plural);
    let groups: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &kind);
    let group: DynamicObject = serde_json::from_value((form.object)(2))?;
    let group = groups.create(&PostParams::default(), &group).await?;

    let limits = json!({"nvidia.com/gpu": "8", "nvidia.com/mlnxnics": "8"});
    let member = |name: &str| {
        let mut pod = pod(name, limits.clone());
        for (key, value) in form.pod.as_object().into_iter().flatten() {
            pod["spec"][key] = value.clone();
        }
        pod
    };
    for name in ["w-b", "w-a"] {
        let made = create(&client, &namespace, &member(name)).await?;
        assert_eq!(names(&made, "initContainers"), [DIAG, LOOPBACK, ALLREDUCE]);
    }
    let id = form.id.replace("NAMESPACE", &namespace);
    let map = format!("preflight-{id}");
    // The `ConfigMap` exists before any pod has an address.
    peers(&client, &namespace, &map, &[]).await?;
    give_address(&client, &namespace, "w-b", "10.0.0.2").await?;
    peers(&client, &namespace, &map, &["w-b;10.0.0.2;0"]).await?;
    give_address(&client, &namespace, "w-a", "10.0.0.1").await?;
    peers(
        &client,
        &namespace,
        &map,
        &["w-a;10.0.0.1;0", "w-b;10.0.0.2;1"],
    )
    .await?;
    let data = roster(&client, &namespace, &map)
        .await
        .map_err(anyhow::Error::msg)?;
    assert_eq!(data["expected_count"], "2");
    assert_eq!(data["master_addr"], "10.0.0.1");
    assert_eq!(data["master_port"], "29500");
    assert_eq!(data["gang_id"], id);
    assert!(
        data["peers"].ends_with(&format!(";1;{ALLREDUCE}")),
        "{data:?}"
    );
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &namespace);
    let owners = maps
        .get(&map)
        .await?
        .metadata
        .owner_references
        .unwrap_or_default();
    assert_eq!(
        owners.first().map(|owner| &owner.uid),
        group.metadata.uid.as_ref()
    );

    // A surplus pod gets no rank of another pod, only one that becomes free.
    create(&client, &namespace, &member("w-0")).await?;
    give_address(&client, &namespace, "w-0", "10.0.0.3").await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let now = DeleteParams::default().grace_period(0);
    pods.delete("w-b", &now).await?;
    peers(
        &client,
        &namespace,
        &map,
        &["w-0;10.0.0.3;0", "w-a;10.0.0.1;1"],
    )
    .await?;

    // Kubernetes 1.37 permits a gang to grow.
    if form.version == Version::V1_37 {
        create(&client, &namespace, &member("w-c")).await?;
        give_address(&client, &namespace, "w-c", "10.0.0.4").await?;
        let grown = json!({"spec": (form.object)(3)["spec"]});
        let name = group.metadata.name.unwrap_or_default();
        groups
            .patch(&name, &PatchParams::default(), &Patch::Merge(grown))
            .await?;
        let three = ["w-0;10.0.0.3;0", "w-a;10.0.0.1;1", "w-c;10.0.0.4;2"];
        peers(&client, &namespace, &map, &three).await?;
    }
    webhook.end().await
}

#[tokio::test]
async fn a_gang_of_1_37_forms() -> anyhow::Result<()> {
    a_gang_forms(GangForm {
        version: Version::V1_37,
        serve: "v1beta1",
        plural: "podgroups",
        object: |count| {
            json!({
                "apiVersion": "scheduling.k8s.io/v1beta1",
                "kind": "PodGroup",
                "metadata": {"name": "workers"},
                "spec": {"schedulingPolicy": {"gang": {"minCount": count}}},
            })
        },
        pod: json!({"schedulingGroup": {"podGroupName": "workers"}}),
        id: "kubernetes-NAMESPACE-workers",
    })
    .await
}

#[tokio::test]
async fn a_gang_of_1_36_forms() -> anyhow::Result<()> {
    a_gang_forms(GangForm {
        version: Version::V1_36,
        serve: "v1alpha2",
        plural: "podgroups",
        object: |count| {
            json!({
                "apiVersion": "scheduling.k8s.io/v1alpha2",
                "kind": "PodGroup",
                "metadata": {"name": "workers"},
                "spec": {"schedulingPolicy": {"gang": {"minCount": count}}},
            })
        },
        pod: json!({"schedulingGroup": {"podGroupName": "workers"}}),
        id: "kubernetes-NAMESPACE-workers",
    })
    .await
}

#[tokio::test]
async fn a_gang_of_1_35_forms() -> anyhow::Result<()> {
    a_gang_forms(GangForm {
        version: Version::V1_35,
        serve: "v1alpha1",
        plural: "workloads",
        object: |count| {
            json!({
                "apiVersion": "scheduling.k8s.io/v1alpha1",
                "kind": "Workload",
                "metadata": {"name": "job"},
                "spec": {"podGroups": [{"name": "workers", "policy": {"gang": {"minCount": count}}}]},
            })
        },
        pod: json!({"workloadRef": {"name": "job", "podGroup": "workers"}}),
        id: "kubernetes-NAMESPACE-job-workers",
    })
    .await
}

pub(crate) const CRD: &str =
    include_str!("../../../../deploy/helm/gpuwarden/crds/preflightconfigs.yaml");

/// The kind of another scheduler, with the relevant part of its own definition.
pub(crate) const POD_GROUPS: &str = r"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: podgroups.scheduling.volcano.sh}
spec:
  group: scheduling.volcano.sh
  scope: Namespaced
  names: {kind: PodGroup, listKind: PodGroupList, plural: podgroups, singular: podgroup}
  versions:
    - name: v1beta1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
";

/// Applies manifests as a person would.
pub(crate) async fn apply(plane: &ControlPlane, manifests: &str) -> anyhow::Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), manifests)?;
    let path = file.path().display().to_string();
    // A kind is served with a delay after its definition.
    wait_for("the manifests", SOON, || {
        plane.kubectl(["apply", "-f", &path])
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn a_namespace_says_itself_how_its_gangs_are_known() -> anyhow::Result<()> {
    let Some(plane) = plane(Version::LATEST, "").await? else {
        return Ok(());
    };
    apply(&plane, CRD).await?;
    let balancer = Balancer::start().await?;
    let url = format!("https://{}", balancer.address());
    let webhook = Webhook::start(&plane, &url, &[]).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    by_volcano(&plane).await?;
    by_osmo_with_kai(&plane).await?;
    webhook.end().await
}

/// Checks a gang of Volcano: the size is that of its `PodGroup`, as the namespace says.
pub(crate) async fn by_volcano(plane: &ControlPlane) -> anyhow::Result<()> {
    apply(plane, POD_GROUPS).await?;
    let (client, namespace) = (plane.client().await?, opted_in(plane).await?);
    let metadata = format!("metadata: {{name: own, namespace: {namespace}}}");
    let config = format!(
        "apiVersion: preflight.nvsentinel.nvidia.com/v1alpha1\nkind: PreflightConfig\n{metadata}\nspec:\n  \
         gangDiscovery:\n    name: volcano\n    annotationKeys: [scheduling.k8s.io/group-name]\n    \
         podGroupGVR: {{group: scheduling.volcano.sh, version: v1beta1, resource: podgroups}}\n"
    );
    let group = format!(
        "apiVersion: scheduling.volcano.sh/v1beta1\nkind: PodGroup\n{metadata}\nspec: {{minMember: 3}}\n"
    );
    apply(plane, &format!("{config}---\n{group}")).await?;
    is_used(plane, &namespace).await?;
    let mut member = pod(
        "m-0",
        json!({"nvidia.com/gpu": "1", "nvidia.com/mlnxnics": "1"}),
    );
    member["metadata"]["annotations"] = json!({"scheduling.k8s.io/group-name": "own"});
    let made = create(&client, &namespace, &member).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG, ALLREDUCE]);
    let map = format!("preflight-volcano-{namespace}-own");
    give_address(&client, &namespace, "m-0", "10.0.0.1").await?;
    peers(&client, &namespace, &map, &["m-0;10.0.0.1;0"]).await?;
    has_size(&client, &namespace, &map, "3").await?;

    // An impossible size: existing members are told, and new ones start without the gang's
    // check.
    resize(plane, &namespace, 0).await?;
    untestable(&client, &namespace, &map, true).await?;
    member["metadata"]["name"] = "m-1".into();
    let made = create(&client, &namespace, &member).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG]);
    resize(plane, &namespace, 3).await?;
    untestable(&client, &namespace, &map, false).await
}

/// Waits until the status of a namespace's `PreflightConfig` is in use.
pub(crate) async fn is_used(plane: &ControlPlane, namespace: &str) -> anyhow::Result<()> {
    let reason = "jsonpath={.status.conditions[0].reason}";
    wait_for("the word that it is used", SOON, || async {
        match plane
            .kubectl(["get", "pfc", "own", "-n", namespace, "-o", reason])
            .await
        {
            Ok(said) if said == "DiscovererActive" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

/// Checks OSMO's label, which names the `PodGroup` of KAI.
pub(crate) async fn by_osmo_with_kai(plane: &ControlPlane) -> anyhow::Result<()> {
    let group_of = |text: &str| {
        let text = text.replace("scheduling.volcano.sh", "scheduling.run.ai");
        text.replace("v1beta1", "v2alpha2")
    };
    apply(plane, &group_of(POD_GROUPS)).await?;
    let (client, namespace) = (plane.client().await?, opted_in(plane).await?);
    let metadata = format!("metadata: {{name: own, namespace: {namespace}}}");
    let config = format!(
        "apiVersion: preflight.nvsentinel.nvidia.com/v1alpha1\nkind: PreflightConfig\n{metadata}\nspec:\n  \
         gangDiscovery:\n    name: osmo-with-kai\n    labelKeys: [osmo.group_uuid]\n    \
         podGroupGVR: {{group: scheduling.run.ai, version: v2alpha2, resource: podgroups}}\n"
    );
    let group = format!(
        "apiVersion: scheduling.run.ai/v2alpha2\nkind: PodGroup\n{metadata}\nspec: {{minMember: 2}}\n"
    );
    apply(plane, &format!("{config}---\n{group}")).await?;
    is_used(plane, &namespace).await?;
    let limits = json!({"nvidia.com/gpu": "1", "nvidia.com/mlnxnics": "1"});
    let mut member = pod("k-0", limits);
    member["metadata"]["labels"] = json!({"osmo.group_uuid": "own"});
    let made = create(&client, &namespace, &member).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG, ALLREDUCE]);
    let map = format!("preflight-osmo-with-kai-{namespace}-own");
    has_size(&client, &namespace, &map, "2").await
}

/// Waits until a gang has this size.
async fn has_size(
    client: &Client,
    namespace: &str,
    map: &str,
    expected: &str,
) -> anyhow::Result<()> {
    wait_for("the size of the gang", SOON, || async {
        let data = roster(client, namespace, map).await?;
        let size = data.get("expected_count").map(String::as_str);
        (size == Some(expected))
            .then_some(())
            .ok_or(format!("{data:?}"))
    })
    .await
}

/// Changes the size of the `PodGroup`.
async fn resize(plane: &ControlPlane, namespace: &str, size: u8) -> anyhow::Result<()> {
    let patch = json!({"spec": {"minMember": size}}).to_string();
    let group = "podgroups.scheduling.volcano.sh/own";
    let args = ["patch", group, "-n", namespace, "--type", "merge", "-p"];
    plane.kubectl(args.into_iter().chain([&*patch])).await?;
    Ok(())
}

/// Waits until a gang is reported as untestable, or as testable again.
async fn untestable(
    client: &Client,
    namespace: &str,
    map: &str,
    is_so: bool,
) -> anyhow::Result<()> {
    wait_for("the word about the size", SOON, || async {
        let data = roster(client, namespace, map).await?;
        let said = data.get("untestable");
        let is_said = said.is_some_and(|why| why.contains("number of members from 1 to 8192"));
        if is_said == is_so && said.is_some() == is_so {
            Ok(())
        } else {
            Err(format!("{data:?}"))
        }
    })
    .await
}

/// Checks that a pod that replaces a member of a passed gang starts, and logs why it is not
/// tested.
async fn replaced(
    plane: &ControlPlane,
    members: &[Value],
    more: &[(&str, &str)],
) -> anyhow::Result<()> {
    let client = plane.client().await?;
    let namespace = members[0]["metadata"]["namespace"].as_str();
    let namespace = namespace.unwrap_or_default().to_owned();
    for member in members {
        note_end(&client, member, ALLREDUCE, 0, "").await?;
    }
    let pods: Api<DynamicObject> = Api::namespaced_with(
        client.clone(),
        &namespace,
        &ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", "Pod"), "pods"),
    );
    let now = DeleteParams::default().grace_period(0);
    pods.delete("m-3", &now).await?;
    member_of_g(&client, &namespace, "m-4", 4).await?;
    let member = serde_json::to_value(pods.get("m-4").await?)?;
    let end = play(plane, &member, ALLREDUCE, more).await?;
    let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
    assert_eq!(end.status.code(), Some(0), "{said}");
    assert!(
        said.contains("not tested: the gang has started: m-1 has been through this check"),
        "{said}"
    );

    // All pods are new, so the gang is tested again.
    for name in ["m-1", "m-2", "m-4"] {
        pods.delete(name, &now).await?;
    }
    let mut anew = Vec::new();
    for number in 1..=3 {
        let name = format!("m-{number}");
        member_of_g(&client, &namespace, &name, number).await?;
        anew.push(serde_json::to_value(pods.get(&name).await?)?);
    }
    let ends = anew.iter().map(|pod| play(plane, pod, ALLREDUCE, more));
    for end in futures::future::join_all(ends).await {
        let end = end?;
        let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
        assert!(said.contains("passed: 3 devices reduce"), "{said}");
    }
    Ok(())
}

/// Creates a member of the gang `g` of three.
async fn member_of_g(
    client: &Client,
    namespace: &str,
    name: &str,
    number: u8,
) -> anyhow::Result<()> {
    member(client, namespace, name, number, 3).await
}

/// Creates a member of the gang `g` of this size.
async fn member(
    client: &Client,
    namespace: &str,
    name: &str,
    number: u8,
    size: u8,
) -> anyhow::Result<()> {
    let mut member = pod(
        name,
        json!({"nvidia.com/gpu": "1", "nvidia.com/mlnxnics": "1"}),
    );
    member["metadata"]["labels"] = json!({"gang": "g", "size": size.to_string()});
    create(client, namespace, &member).await?;
    give_address(client, namespace, name, &format!("127.77.0.{number}")).await
}

/// Checks a gang with members that lack the gang's check, for want of GPUs or a network device,
/// or by their own choice: the gang forms without them.
async fn members_without_the_gangs_check(plane: &ControlPlane) -> anyhow::Result<()> {
    let (client, namespace) = (plane.client().await?, opted_in(plane).await?);
    let launcher = pod("launcher", json!({"cpu": "1"}));
    let head = pod("head", json!({"nvidia.com/gpu": "1"}));
    let mut unchecked = pod(
        "unchecked",
        json!({"nvidia.com/gpu": "1", "nvidia.com/mlnxnics": "1"}),
    );
    unchecked["metadata"]["annotations"] = json!({"nvsentinel.nvidia.com/preflight-checks": ""});
    let others = [(launcher, &[][..]), (head, &[DIAG]), (unchecked, &[])];
    for (mut member, checks) in others {
        member["metadata"]["labels"] = json!({"gang": "g", "size": "5"});
        let made = create(&client, &namespace, &member).await?;
        assert_eq!(made["metadata"]["labels"], member["metadata"]["labels"]);
        assert_eq!(names(&made, "initContainers"), checks);
    }
    for (name, number) in [("w-0", 1), ("w-1", 2)] {
        member(&client, &namespace, name, number, 5).await?;
    }
    let map = format!("preflight-labels-{namespace}-g");
    let both = ["w-0;127.77.0.1;0", "w-1;127.77.0.2;1"];
    peers(&client, &namespace, &map, &both).await?;
    has_size(&client, &namespace, &map, "2").await
}

/// Checks that a process that knows the gang's `ConfigMap` but not its secret is refused.
/// (Without a secret, the gang's id would be used instead.)
async fn without_the_secret(
    plane: &ControlPlane,
    members: &[Value],
    more: &[(&str, &str)],
) -> anyhow::Result<()> {
    let namespace = members[0]["metadata"]["namespace"].as_str();
    let id = format!("labels-{}-g", namespace.unwrap_or_default());
    let soon = [more, &[("GANG_TIMEOUT_SECONDS", "20")]].concat();
    let guessed = [&*soon, &[("GANG_SECRET", &*id)]].concat();
    let ends = members.iter().enumerate().map(|(place, pod)| {
        let more = if place == 2 { &guessed } else { &soon };
        play(plane, pod, ALLREDUCE, more)
    });
    let mut told = Vec::new();
    for end in futures::future::join_all(ends).await {
        let end = end?;
        let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
        assert_eq!(end.status.code(), Some(1), "{said}");
        told.push(said.into_owned());
    }
    let refused =
        "a caller is not admitted to the gang: the other side does not have the gang's secret";
    assert!(told[0].contains(refused), "{told:?}");
    assert!(told[1].contains("missing: m-3"), "{told:?}");
    Ok(())
}

/// Three pods of a gang find each other through the rendezvous, before the kubelet has written
/// the files of their container, and reduce over TCP with the gang's secret.
#[tokio::test]
async fn the_pods_of_a_gang_meet_at_the_rendezvous() -> anyhow::Result<()> {
    let Some(plane) = plane(Version::LATEST, "").await? else {
        return Ok(());
    };
    let balancer = Balancer::start().await?;
    let url = format!("https://{}", balancer.address());
    let config = "image: registry.example/gpuwarden:1\ngangDiscovery: {method: labels, labels: \
                  {gangIdLabel: gang, gangSizeLabel: size}}\ngangCoordination: {masterPort: 29511}\n";
    let webhook = Webhook::start_with(&plane, &url, config, &[]).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    let (client, namespace) = (plane.client().await?, opted_in(&plane).await?);
    let pods: Api<DynamicObject> = Api::namespaced_with(
        client.clone(),
        &namespace,
        &ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", "Pod"), "pods"),
    );
    let more = [
        ("GPUWARDEN_COLLECTIVE", "tcp"),
        ("MESSAGE_SIZES", "1M"),
        ("BENCHMARK_ITERS", "2"),
        ("WARMUP_ITERS", "1"),
        ("SKIP_BANDWIDTH_CHECK", "true"),
        ("GANG_TIMEOUT_SECONDS", "60"),
        ("PROCESSING_STRATEGY", "EXECUTE_REMEDIATION"),
    ];
    let mut members = Vec::new();
    for number in 1..=3 {
        let name = format!("m-{number}");
        member_of_g(&client, &namespace, &name, number).await?;
        members.push(serde_json::to_value(pods.get(&name).await?)?);
    }
    without_the_secret(&plane, &members, &more).await?;
    let ends = futures::future::join_all(
        members
            .iter()
            .map(|pod| play(&plane, pod, ALLREDUCE, &more)),
    );
    for end in ends.await {
        let end = end?;
        let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
        assert_eq!(end.status.code(), Some(0), "{said}\n{}", webhook.log());
        assert!(said.contains("passed: 3 devices reduce"), "{said}");
    }

    replaced(&plane, &members, &more).await?;

    // A pod outside of a gang gets no gang's data, whatever its token.
    let mut stranger = members[0].clone();
    let lone = create(&client, &namespace, &pod("stranger", json!({"cpu": "1"}))).await?;
    stranger["metadata"]["name"] = lone["metadata"]["name"].clone();
    let more: Vec<_> = more
        .into_iter()
        .filter(|(name, _)| *name != "GANG_TIMEOUT_SECONDS")
        .collect();
    let more = [more, vec![("GANG_TIMEOUT_SECONDS", "3")]].concat();
    let end = play(&plane, &stranger, ALLREDUCE, &more).await?;
    let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
    assert!(!said.contains("127.77.0.2"), "{said}");
    assert_eq!(end.status.code(), Some(1), "{said}");
    members_without_the_gangs_check(&plane).await?;
    webhook.end().await
}

/// A pod may not read its node, so the webhook returns the topology file of its machine.
#[tokio::test]
async fn a_pod_hears_which_topology_file_its_machine_has() -> anyhow::Result<()> {
    let Some(plane) = plane(Version::LATEST, "").await? else {
        return Ok(());
    };
    let balancer = Balancer::start().await?;
    let url = format!("https://{}", balancer.address());
    let config = "image: registry.example/gpuwarden:1\ngangDiscovery: {method: labels, labels: \
                  {gangIdLabel: gang, gangSizeLabel: size}}\ngangCoordination: {masterPort: 29512}\n\
                  ncclTopology: {instanceTypeMapping: {known: azure-ndv5.xml}, enableFallback: false}\n";
    let webhook = Webhook::start_with(&plane, &url, config, &[]).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    let (client, namespace) = (plane.client().await?, opted_in(&plane).await?);
    let gpus = tempfile::tempdir()?;
    fakes::install(gpus.path(), &fakes::Scenario::healthy(2))?;
    let library = |name: &str| gpus.path().join(name).display().to_string();
    let (cuda, nccl) = (library(fakes::CUDA_LIBRARY), library(fakes::NCCL_LIBRARY));
    let more = [
        ("GPUWARDEN_CUDA_LIBRARY", &*cuda),
        ("GPUWARDEN_NCCL_LIBRARY", &*nccl),
        ("GPUWARDEN_NVML_LIBRARY", &*library(fakes::LIBRARY)),
        ("MESSAGE_SIZES", "1M"),
    ];
    for (instance_type, expected) in [
        ("known", "name=\"azure-ndv5.xml\""),
        ("other", "no topology file for the instance type \"other\""),
    ] {
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": instance_type,
                "labels": {"node.kubernetes.io/instance-type": instance_type}},
        });
        let nodes: Api<Node> = Api::all(client.clone());
        nodes
            .create(&PostParams::default(), &serde_json::from_value(node)?)
            .await?;
        let limits = json!({"nvidia.com/gpu": "2", "nvidia.com/mlnxnics": "1"});
        let mut member = pod(&format!("on-{instance_type}"), limits);
        member["metadata"]["labels"] = json!({"gang": instance_type, "size": "1"});
        member["spec"]["nodeName"] = instance_type.into();
        let mut member = create(&client, &namespace, &member).await?;
        let name = member["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        give_address(&client, &namespace, &name, "127.77.1.1").await?;
        member["status"] = json!({"podIP": "127.77.1.1"});
        let end = play(&plane, &member, ALLREDUCE, &more).await?;
        let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
        assert_eq!(end.status.code(), Some(0), "{said}\n{}", webhook.log());
        assert!(said.contains(expected), "{said}\n{}", webhook.log());
    }
    webhook.end().await
}
