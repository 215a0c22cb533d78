//! A gang whose pods run on separate hosts, from the label of its namespace to the quarantined
//! node: it forms through the real control plane, measures a real network, and finds the slow
//! link.

use std::process::Output;

use serde_json::{Value, json};
use testkit::{Balancer, ControlPlane, Network, NodeBuilder, Options, Product, Version};

use crate::gangs::give_address;
use crate::player::{note_end, play_on};
use crate::support::Scene;
use crate::webhook::{
    ALLREDUCE, DIAG, NAMESPACE, Webhook, create, names, opted_in, pod, registered,
};

const CONFIG: &str = "image: registry.example/gpuwarden:1\ngangDiscovery: {method: kueue}\n";
const MEMBERS: usize = 4;
/// Member with the slow link; not rank 0.
const SLOW: usize = 2;

/// Creates a member of the gang, with the labels and annotations of Kueue.
async fn member(
    plane: &ControlPlane,
    namespace: &str,
    number: usize,
    node: Option<&str>,
) -> anyhow::Result<Value> {
    let limits = json!({"nvidia.com/gpu": "1", "nvidia.com/mlnxnics": "1"});
    let mut member = pod(&format!("m-{number}"), limits);
    member["metadata"]["labels"] = json!({"kueue.x-k8s.io/pod-group-name": "g"});
    let count = MEMBERS.to_string();
    member["metadata"]["annotations"] = json!({"kueue.x-k8s.io/pod-group-total-count": count});
    if let Some(node) = node {
        member["spec"]["nodeName"] = node.into();
    }
    let made = create(&plane.client().await?, namespace, &member).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG, ALLREDUCE]);
    Ok(made)
}

/// Runs the injected all-reduce of all members, each on its host, to the end. The slow member's
/// agent is the product. The others have no agent, as during its outage.
async fn play_all(
    plane: &ControlPlane,
    network: &Network,
    members: &[Value],
    product: &Product,
) -> anyhow::Result<Vec<(Option<i32>, String)>> {
    let socket = format!("unix://{}", product.socket().display());
    let more = [
        ("GPUWARDEN_COLLECTIVE", "tcp"),
        ("MESSAGE_SIZES", "256K"),
        ("BENCHMARK_ITERS", "2"),
        ("WARMUP_ITERS", "1"),
        // Far below the bandwidth between namespaces, also on a busy machine, and above the
        // throttled one.
        ("BW_THRESHOLD_GBPS", "0.001"),
        ("CHECK_TIMEOUT_SECONDS", "120"),
        ("PLATFORM_CONNECTOR_SOCKET", "unix:///nowhere/socket"),
    ];
    let ends = members.iter().enumerate().map(|(number, member)| {
        let mut more = more.to_vec();
        if number == SLOW {
            more.push(("PLATFORM_CONNECTOR_SOCKET", &*socket));
        }
        let host = network.host(number);
        async move { play_on(&host, plane, member, ALLREDUCE, &more).await }
    });
    let mut ended = Vec::new();
    for end in futures::future::join_all(ends).await {
        let Output {
            status,
            stdout,
            stderr,
        } = end?;
        let said = String::from_utf8_lossy(&stdout) + String::from_utf8_lossy(&stderr);
        ended.push((status.code(), said.into_owned()));
    }
    Ok(ended)
}

#[tokio::test]
async fn a_gang_on_hosts_of_its_own_names_the_one_with_the_slow_link() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::LATEST, Options::default()).await? else {
        return Ok(());
    };
    let network = match Network::with_this_machine(MEMBERS) {
        Ok(network) => network,
        Err(error) => {
            testkit::skip(format_args!(
                "network namespaces and tc, as root with iproute2: {error}"
            ));
            return Ok(());
        }
    };
    plane.namespace(NAMESPACE).await?;
    let balancer = Balancer::start_on(network.machine().into()).await?;
    let url = format!("https://{}", balancer.address());
    let at = format!("{}:0", network.machine());
    let flags = ["--rendezvous-listen", &at];
    let webhook = Webhook::start_with(&plane, &url, CONFIG, &flags).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    // kwok would complete the containers by itself.
    let scene = Scene::new(&plane, NodeBuilder::without_kubelet, |launch| launch).await?;
    let (client, namespace) = (plane.client().await?, opted_in(&plane).await?);
    let mut members = Vec::new();
    for number in 0..MEMBERS {
        let node = (number == SLOW).then_some(&*scene.node);
        members.push(member(&plane, &namespace, number, node).await?);
    }
    network.throttle(SLOW, 5).map_err(anyhow::Error::msg)?;
    for (number, member) in members.iter_mut().enumerate() {
        let (name, ip) = (format!("m-{number}"), network.address(number).to_string());
        give_address(&client, &namespace, &name, &ip).await?;
        member["status"]["podIP"] = ip.into();
    }

    let blamed = format!("to blame: m-{SLOW} on {}", scene.node);
    for (code, said) in play_all(&plane, &network, &members, &scene.product).await? {
        assert_eq!(code, Some(1), "{said}\n{}", webhook.log());
        assert!(said.contains(&blamed), "{said}");
    }
    note_end(
        &client,
        &members[SLOW],
        ALLREDUCE,
        1,
        "NCCL_ALLREDUCE_BW_DEGRADED",
    )
    .await?;
    let pods = ["get", "pod", "m-2", "-n", &namespace, "--no-headers"];
    let shown = plane.kubectl(pods).await?;
    assert!(shown.contains("Init:Error"), "{shown}");
    let cordoned = scene.cordoned().await?;
    let events = &cordoned["metadata"]["annotations"]["quarantineHealthEvent"];
    let events = events.as_str().unwrap_or_default();
    assert!(events.contains("NCCL_ALLREDUCE_BW_DEGRADED"), "{events}");

    // The link is fixed and the containers start again: the node returns.
    network.unthrottle(SLOW).map_err(anyhow::Error::msg)?;
    for (code, said) in play_all(&plane, &network, &members, &scene.product).await? {
        assert_eq!(code, Some(0), "{said}\n{}", webhook.log());
        assert!(said.contains("passed: 4 devices reduce"), "{said}");
    }
    scene.restored().await?;
    webhook.end().await
}
