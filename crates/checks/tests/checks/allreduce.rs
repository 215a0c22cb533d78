//! Tests of `nccl-allreduce`: gangs of processes, each with its own address, that reduce over
//! TCP.

use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use contract::{HealthEvent, RecommendedAction};
use fakes::Scenario;
use gpuwarden_checks::CheckName;
use rustix::process::{Pid, Signal, kill_process};
use testkit::Network;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::support::{self, Container, wait_for};

#[path = "allreduce/nccl.rs"]
mod nccl;

const ALLREDUCE: CheckName = CheckName::NcclAllreduce;

static GANGS: AtomicU8 = AtomicU8::new(1);
/// Megabits per second of a host with a bad link: 0.0006 GB/s, which is below the threshold of
/// members.
const SLOW: u32 = 5;
/// Held by tests that measure, which need the machine for themselves.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Pods of a gang, on separate machines.
struct Pods {
    containers: Vec<Container>,
    /// Network namespace of each pod, if it has one.
    hosts: Vec<Option<String>>,
    addresses: Vec<Ipv4Addr>,
    /// Files of the gang.
    files: tempfile::TempDir,
}

/// Outcome of a pod.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    stderr: String,
    events: Vec<HealthEvent>,
}

impl Pods {
    /// Returns a gang with these addresses.
    fn new(addresses: &[Ipv4Addr], port: u16) -> Self {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("secret"), "a secret of the gang\n").unwrap();
        let mut peers = String::new();
        for (rank, address) in addresses.iter().enumerate() {
            writeln!(peers, "pod-{rank};{address};{rank};nccl-allreduce").unwrap();
        }
        let pods = Self {
            containers: (0..addresses.len())
                .map(|rank| member(rank, &files))
                .collect(),
            hosts: vec![None; addresses.len()],
            addresses: addresses.to_vec(),
            files,
        };
        pods.file("peers", &peers);
        pods.file("expected_count", &addresses.len().to_string());
        pods.file("master_addr", &addresses[0].to_string());
        pods.file("master_port", &port.to_string());
        pods.file("gang_id", "kubernetes-training-gang");
        pods
    }

    /// Returns a gang on the loopback device, with its own addresses there.
    fn here(members: u8) -> Self {
        let number = GANGS.fetch_add(1, Ordering::Relaxed);
        let process = u8::try_from(std::process::id() % 250).unwrap();
        let address = |member| Ipv4Addr::new(127, process + 1, number, member + 1);
        let addresses: Vec<_> = (0..members).map(address).collect();
        // A port that was free a moment ago.
        let free = TcpListener::bind((addresses[0], 0)).unwrap();
        Self::new(&addresses, free.local_addr().unwrap().port())
    }

    /// Returns a gang on the hosts of a network.
    fn on(network: &Network, members: usize) -> Self {
        let addresses: Vec<_> = (0..members).map(|host| network.address(host)).collect();
        let mut pods = Self::new(&addresses, 29500);
        pods.hosts = (0..members).map(|host| Some(network.host(host))).collect();
        pods
    }

    fn file(&self, name: &str, text: &str) {
        fs::write(self.files.path().join(name), text).unwrap();
    }

    fn set(&mut self, name: &str, value: &str) -> &mut Self {
        for container in &mut self.containers {
            container.set(name, value);
        }
        self
    }

    fn start(&self, rank: usize) -> Child {
        let (variable, program, arguments) = support::as_check(ALLREDUCE);
        let mut command = match &self.hosts[rank] {
            Some(host) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", host, "env"]);
                command
            }
            None => Command::new("env"),
        };
        command
            .arg(variable)
            .arg(program)
            .args(arguments)
            .envs(&self.containers[rank].variables)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command.spawn().unwrap()
    }

    /// Waits for these pods, and returns their outcomes.
    async fn end(&self, started: Vec<(usize, Child)>) -> Vec<Ended> {
        let mut ended = Vec::new();
        for (rank, child) in started {
            let output = tokio::time::timeout(Duration::from_secs(180), child.wait_with_output());
            let output: Output = output.await.unwrap().unwrap();
            ended.push(Ended {
                code: output.status.code(),
                stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
                events: self.containers[rank].witness.events(),
            });
        }
        ended
    }

    /// Runs all pods to their end.
    async fn run(&self) -> Vec<Ended> {
        let started = (0..self.containers.len()).map(|rank| (rank, self.start(rank)));
        self.end(started.collect()).await
    }
}

fn member(rank: usize, files: &tempfile::TempDir) -> Container {
    let mut container = Container::new(&Scenario::healthy(1));
    let directory = files.path().to_str().unwrap();
    for (name, value) in [
        ("POD_NAME", format!("pod-{rank}")),
        ("NODE_NAME", format!("node-{rank}")),
        ("GANG_ID", "kubernetes-training-gang".to_owned()),
        ("GANG_CONFIG_DIR", directory.to_owned()),
        ("GANG_SECRET_FILE", format!("{directory}/secret")),
        ("GANG_TIMEOUT_SECONDS", "60".to_owned()),
        ("CHECK_TIMEOUT_SECONDS", "120".to_owned()),
        ("GPUWARDEN_COLLECTIVE", "tcp".to_owned()),
        ("MESSAGE_SIZES", "256K,512K".to_owned()),
        ("BENCHMARK_ITERS", "2".to_owned()),
        ("WARMUP_ITERS", "1".to_owned()),
        // Far below the bandwidth of the loopback device, and far above a throttled one.
        ("BW_THRESHOLD_GBPS", "0.001".to_owned()),
    ] {
        container.set(name, &value);
    }
    container
}

/// Returns a network; `None`, reported as a skip, if this machine does not permit one.
#[track_caller]
fn network(hosts: usize) -> Option<Network> {
    let made = Network::new(hosts);
    if let Err(error) = &made {
        testkit::skip(format_args!(
            "network namespaces and tc, as root with iproute2: {error}"
        ));
    }
    made.ok()
}

fn only(ended: &Ended) -> &HealthEvent {
    assert_eq!(ended.events.len(), 1, "{ended:#?}");
    &ended.events[0]
}

#[tokio::test]
async fn a_gang_forms_and_passes_and_each_member_reports_its_own_node() {
    let _alone = ALONE.lock().await;
    for operation in ["sum", "prod", "min", "max", "avg"] {
        let members = if operation == "sum" { 4 } else { 2 };
        let mut pods = Pods::here(members);
        // Speed does not matter here, and the machine may be busy.
        pods.set("BW_THRESHOLD_GBPS", "0.00001");
        let ended = pods.set("NCCL_REDUCE_OP", operation).run().await;
        for (rank, ended) in ended.iter().enumerate() {
            assert_eq!(ended.code, Some(0), "{operation}: {ended:#?}");
            let event = only(ended);
            assert!(event.is_healthy, "{event:#?}");
            assert_eq!(
                (
                    event.agent.as_str(),
                    event.check_name.as_str(),
                    event.component_class.as_str()
                ),
                ("preflight-nccl-allreduce", "NCCLAllReduceTest", "Node")
            );
            assert_eq!(event.node_name, format!("node-{rank}"));
            assert!(
                ended.stderr.contains(&format!(
                    "nccl-allreduce: passed: {members} devices reduce with a bus bandwidth of "
                )),
                "{ended:#?}"
            );
            let counted = pods.containers[rank].witness.checks();
            assert_eq!(counted.len(), 1, "{counted:#?}");
            let wait = counted[0].gang_wait.as_ref().unwrap();
            assert_eq!(wait.gang_id, "kubernetes-training-gang");
            assert!(wait.seconds <= counted[0].seconds.unwrap(), "{counted:#?}");
        }
    }
}

/// A gang may use its full time to form; the time of the check starts after that.
#[tokio::test]
async fn the_time_of_the_check_begins_when_the_gang_has_formed() {
    let _alone = ALONE.lock().await;
    let mut pods = Pods::here(2);
    pods.set("BW_THRESHOLD_GBPS", "0.00001");
    let limit = Duration::from_secs(10);
    pods.set("CHECK_TIMEOUT_SECONDS", &limit.as_secs().to_string());
    let early = pods.start(0);
    tokio::time::sleep(limit + Duration::from_secs(1)).await;
    let late = pods.start(1);
    for ended in pods.end(vec![(0, early), (1, late)]).await {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        assert!(only(&ended).is_healthy, "{ended:#?}");
    }
}

/// Pods on the network of their nodes share the nodes' ports.
#[tokio::test]
async fn a_gang_forms_where_somebody_else_has_its_port() {
    let mut pods = Pods::here(2);
    let port = fs::read_to_string(pods.files.path().join("master_port")).unwrap();
    let port: u16 = port.parse().unwrap();
    // Accepts connections, and never sends anything.
    let _other = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
    for ended in pods.set("BW_THRESHOLD_GBPS", "0.00001").run().await {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        assert!(only(&ended).is_healthy, "{ended:#?}");
    }
}

#[tokio::test]
async fn a_rank_0_that_finds_no_port_is_not_stopped() {
    let mut pods = Pods::here(1);
    // Four consecutive free ports.
    let mut first = 20_000_u16;
    let _taken = loop {
        let ports = first..first + 4;
        let taken: Result<Vec<_>, _> = ports
            .map(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
            .collect();
        match taken {
            Ok(taken) => break taken,
            Err(_) => first += 4,
        }
    };
    pods.file("master_port", &first.to_string());
    let ended = pods.set("GANG_TIMEOUT_SECONDS", "3").run().await;
    assert_eq!(ended[0].code, Some(0), "{ended:#?}");
    let event = only(&ended[0]);
    assert_eq!(event.error_code, ["NCCL_GANG_CONFIG_ERROR"]);
    assert!(!event.is_fatal && !event.is_healthy, "{event:#?}");
    assert_eq!(event.recommended_action, RecommendedAction::None as i32);
    let expected = format!("cannot listen on master_port {first}, nor behind it: ");
    assert!(event.message.starts_with(&expected), "{event:#?}");
}

#[tokio::test]
async fn a_member_that_does_not_come_is_named_and_nobody_blamed() {
    let mut pods = Pods::here(3);
    pods.set("GANG_TIMEOUT_SECONDS", "4");
    let ended = pods.end(vec![(0, pods.start(0)), (1, pods.start(1))]).await;
    for ended in &ended {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        let event = only(ended);
        assert_eq!(event.error_code, ["NCCL_GANG_TIMEOUT"], "{ended:#?}");
        assert!(!event.is_fatal && event.recommended_action == RecommendedAction::None as i32);
        assert!(
            event.message.contains(&format!(
                "2 of 3 members of the gang are there, missing: pod-2 ({})",
                pods.addresses[2]
            )),
            "{event:#?}"
        );
    }
    // Without rank 0, no member could name the others.
    let ended = pods.end(vec![(1, pods.start(1))]).await;
    let event = ended[0].events.last().unwrap();
    assert_eq!(event.error_code, ["NCCL_GANG_TIMEOUT"], "{ended:#?}");
    assert!(
        event
            .message
            .contains(&format!("rank 0 (pod-0 at {}:", pods.addresses[0])),
        "{event:#?}"
    );
}

#[tokio::test]
async fn a_gang_that_is_not_complete_in_the_files_ends_at_its_deadline() {
    let mut pods = Pods::here(2);
    pods.file("expected_count", "3");
    let ended = pods
        .set("GANG_TIMEOUT", "2s")
        .set("GANG_TIMEOUT_SECONDS", "")
        .run()
        .await;
    for ended in &ended {
        let event = only(ended);
        assert_eq!(
            (ended.code, &event.error_code[..]),
            (Some(1), &["NCCL_GANG_TIMEOUT".to_owned()][..])
        );
        assert!(
            event
                .message
                .contains("1 of 3 members of the gang are missing; there are pod-0, pod-1"),
            "{event:#?}"
        );
    }
}

#[tokio::test]
async fn members_with_different_checks_end_at_once_and_name_both_lists() {
    let pods = Pods::here(2);
    pods.file(
        "peers",
        "pod-0;127.0.77.1;0;dcgm,nccl\npod-1;127.0.77.2;1;nccl\n",
    );
    for ended in pods.run().await {
        let event = only(&ended);
        assert_eq!(
            (ended.code, &event.error_code[..]),
            (Some(2), &["NCCL_GANG_CONFIG_ERROR".to_owned()][..])
        );
        assert!(!event.is_fatal && event.recommended_action == RecommendedAction::None as i32);
        assert!(
            event
                .message
                .contains("pod-0 has \"dcgm,nccl\", and pod-1 has \"nccl\""),
            "{event:#?}"
        );
    }
}

/// The reference implementation stops each pod that is in no gang, without a message.
#[tokio::test]
async fn a_pod_in_no_gang_starts() {
    let container = Container::new(&Scenario::healthy(1));
    let ended = container.run(ALLREDUCE).await;
    assert_eq!((ended.code, ended.events.len()), (0, 0), "{ended:#?}");
    assert!(
        ended
            .out
            .starts_with("nccl-allreduce: not tested: this pod is in no gang"),
        "{}",
        ended.out
    );
}

#[tokio::test]
async fn a_bad_setting_is_a_configuration_error_that_names_it() {
    for (name, value, text) in [
        (
            "NCCL_REDUCE_OP",
            "xor",
            "NCCL_REDUCE_OP is \"xor\"; it must be one of sum, prod, min, max, avg",
        ),
        (
            "MESSAGE_SIZES",
            "big",
            "MESSAGE_SIZES is \"big\"; it must be sizes",
        ),
        ("BENCHMARK_ITERS", "0", "BENCHMARK_ITERS is \"0\""),
        ("WARMUP_ITERS", "-1", "WARMUP_ITERS is \"-1\""),
        (
            "GANG_TIMEOUT_SECONDS",
            "soon",
            "GANG_TIMEOUT_SECONDS is \"soon\"",
        ),
        (
            "NCCL_ALLREDUCE_THRESHOLD_GBPS",
            "x",
            "NCCL_ALLREDUCE_THRESHOLD_GBPS is \"x\"",
        ),
        ("POD_NAME", "", "POD_NAME is not set"),
        ("GANG_CONFIG_DIR", "", "GANG_CONFIG_DIR is not set"),
        (
            "GANG_SECRET_FILE",
            "/nowhere",
            "GANG_SECRET_FILE is \"/nowhere\"; it must be a file that can be read",
        ),
        (
            "GPUWARDEN_NCCL_TOPOLOGY",
            "../topo.xml",
            "GPUWARDEN_NCCL_TOPOLOGY is \"../topo.xml\"; it must be the name of a file",
        ),
    ] {
        let mut pods = Pods::here(1);
        let container = &mut pods.containers[0];
        container.set("BW_THRESHOLD_GBPS", "");
        let ended = container.set(name, value).run(ALLREDUCE).await;
        assert_eq!(ended.code, 2, "{ended:#?}");
        assert!(ended.out.contains(text), "{}", ended.out);
        let event = ended.event();
        assert_eq!(event.error_code, ["CONFIGURATION"], "{event:#?}");
        assert!(!event.is_fatal && !event.is_healthy, "{event:#?}");
    }
}

#[tokio::test]
async fn a_stranger_without_the_secret_is_not_let_in() {
    let mut pods = Pods::here(2);
    pods.set("GANG_TIMEOUT_SECONDS", "4");
    let other = pods.files.path().join("other");
    fs::write(&other, "another secret").unwrap();
    pods.containers[1].set("GANG_SECRET_FILE", other.to_str().unwrap());
    let ended = pods.run().await;
    assert!(
        only(&ended[0]).message.contains("missing: pod-1"),
        "{ended:#?}"
    );
    assert_eq!(
        only(&ended[1]).error_code,
        ["NCCL_GANG_TIMEOUT"],
        "{ended:#?}"
    );
}

#[tokio::test]
async fn a_member_that_goes_away_is_named_and_nobody_blamed() {
    let mut pods = Pods::here(3);
    // Enough iterations to last until the signal.
    pods.set("BENCHMARK_ITERS", "100000");
    let mut started: Vec<(usize, Child)> = (0..3).map(|rank| (rank, pods.start(rank))).collect();
    let pid = |child: &Child| Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
    let victim = pid(&started[2].1);
    wait_for(|| connections_to(pods.addresses[2]) > 0).await;
    kill_process(victim, Signal::KILL).unwrap();
    started.truncate(2);
    for ended in pods.end(started).await {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        let event = only(&ended);
        assert!(
            !event.is_fatal && event.message.contains("missing: pod-2 on node-2"),
            "{event:#?}"
        );
    }
}

/// Returns the number of TCP connections of this machine to an address.
fn connections_to(address: Ipv4Addr) -> usize {
    let wanted = format!("{:08X}:", u32::from_ne_bytes(address.octets()));
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let remote = table
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2));
    remote.filter(|remote| remote.starts_with(&wanted)).count()
}

#[tokio::test]
async fn of_five_hosts_the_throttled_one_is_named_and_only_it_is_blamed() {
    let _alone = ALONE.lock().await;
    let Some(network) = network(5) else {
        return;
    };
    network.throttle(3, SLOW).unwrap();
    let pods = Pods::on(&network, 5);
    let ended = pods.run().await;
    for (rank, ended) in ended.iter().enumerate() {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        assert!(
            ended.stderr.contains("; to blame: pod-3 on node-3"),
            "{ended:#?}"
        );
        if rank != 3 {
            assert_eq!(ended.events, [], "{ended:#?}");
            continue;
        }
        let event = only(ended);
        assert_eq!(event.error_code, ["NCCL_ALLREDUCE_BW_DEGRADED"]);
        assert!(event.is_fatal, "{event:#?}");
        assert_eq!(
            event.recommended_action,
            RecommendedAction::ContactSupport as i32
        );
        assert_eq!(event.node_name, "node-3");
    }
}

#[tokio::test]
async fn rank_0_is_named_too_where_it_is_the_slow_one() {
    let _alone = ALONE.lock().await;
    let Some(network) = network(4) else {
        return;
    };
    network.throttle(0, SLOW).unwrap();
    let pods = Pods::on(&network, 4);
    for (rank, ended) in pods.run().await.iter().enumerate() {
        assert!(
            ended.stderr.contains("; to blame: pod-0 on node-0"),
            "{ended:#?}"
        );
        assert_eq!(ended.events.len(), usize::from(rank == 0), "{ended:#?}");
    }
}

/// Members compare which ones they reach; a refused connection counts as reached.
#[tokio::test]
async fn a_member_that_is_cut_off_is_said_not_to_be_reached() {
    let _alone = ALONE.lock().await;
    let Some(network) = network(3) else {
        return;
    };
    for is_cut in [false, true] {
        if is_cut {
            network.cut(0, 2).unwrap();
            network.cut(1, 2).unwrap();
        }
        let mut pods = Pods::on(&network, 3);
        pods.set("GANG_TIMEOUT_SECONDS", "4");
        for ended in pods.end(vec![(0, pods.start(0)), (1, pods.start(1))]).await {
            let message = &only(&ended).message;
            assert!(message.contains("missing: pod-2"), "{ended:#?}");
            let named = preflight::rendezvous::named_not_reached(message);
            assert_eq!(named == ["pod-2"], is_cut, "{ended:#?}");
            assert_eq!(ended.code, Some(1), "{ended:#?}");
        }
    }
}

#[tokio::test]
async fn a_broken_way_between_two_is_named_and_neither_blamed_alone() {
    let _alone = ALONE.lock().await;
    let Some(network) = network(4) else {
        return;
    };
    network.cut(1, 2).unwrap();
    let mut pods = Pods::on(&network, 4);
    pods.set("CHECK_TIMEOUT_SECONDS", "90");
    let mut named = false;
    // On a busy machine a search may not end in time; even then no single member is blamed.
    for _ in 0..3 {
        let ends = pods.run().await;
        for event in ends.iter().flat_map(|ended| &ended.events) {
            assert!(
                !event.is_fatal && event.recommended_action == RecommendedAction::None as i32,
                "{event:#?}"
            );
        }
        let pair = "pod-1 on node-1 and pod-2 on node-2 fail only together";
        for ended in &ends {
            assert_eq!(ended.code, Some(1), "{ended:#?}");
            assert!(!ended.stderr.contains("to blame: pod"), "{ended:#?}");
        }
        named = ends.iter().enumerate().all(|(rank, ended)| {
            let reports = usize::from(rank == 1 || rank == 2);
            ended.stderr.contains(pair) && ended.events.len() == reports
        });
        if named {
            break;
        }
    }
    assert!(named, "the pair is not named");
}
