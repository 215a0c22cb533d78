//! Tables for each rule of the brake.

mod simulator;

use contract::keys;

use super::*;

const GPU: &str = "nvidia.com/gpu.present";

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn gpu_label() -> NodeLabel {
    NodeLabel::parse(keys::GPU_NODE_LABEL).unwrap()
}

/// A cluster for tables: nodes `n0`, `n1`, ... with labels, some of them out.
struct Cluster {
    nodes: Vec<(String, BTreeMap<String, String>, Option<OutOfService>)>,
    /// Nodes that a person has cordoned.
    cordoned: BTreeSet<usize>,
    recent: BTreeMap<String, Timestamp>,
    reset_at: Option<Timestamp>,
    stop: Option<Hold>,
}

impl Cluster {
    fn gpus(count: usize) -> Self {
        Self {
            nodes: (0..count)
                .map(|n| {
                    let labels = [(GPU.to_owned(), "true".to_owned())].into();
                    (format!("n{n}"), labels, None)
                })
                .collect(),
            cordoned: BTreeSet::new(),
            recent: BTreeMap::new(),
            reset_at: None,
            stop: None,
        }
    }

    fn label(mut self, nodes: impl IntoIterator<Item = usize>, key: &str, value: &str) -> Self {
        for n in nodes {
            self.nodes[n].1.insert(key.to_owned(), value.to_owned());
        }
        self
    }

    fn cpu(mut self, nodes: impl IntoIterator<Item = usize>) -> Self {
        for n in nodes {
            self.nodes[n].1.remove(GPU);
        }
        self
    }

    fn out(mut self, nodes: impl IntoIterator<Item = usize>, since: i64) -> Self {
        for n in nodes {
            self.nodes[n].2 = Some(OutOfService {
                since: Some(at(since)),
                forced: false,
            });
        }
        self
    }

    fn forced_out(mut self, node: usize) -> Self {
        self.nodes[node].2 = Some(OutOfService {
            since: Some(at(NOW)),
            forced: true,
        });
        self
    }

    fn plan(&self, brake: Option<&Brake>, candidates: Vec<Candidate>) -> BrakePlan {
        plan(PlanInput {
            brake,
            gpu_label: &gpu_label(),
            members: self
                .nodes
                .iter()
                .enumerate()
                .map(|(n, (name, labels, out))| Member {
                    name,
                    labels,
                    out: *out,
                    cordoned: self.cordoned.contains(&n),
                })
                .collect(),
            recent: &self.recent,
            reset_at: self.reset_at,
            stop: self.stop.clone(),
            candidates,
            now: at(NOW),
        })
    }
}

const NOW: i64 = 10_000;

fn waits(node: usize) -> Candidate {
    Candidate {
        node: format!("n{node}"),
        fatal: true,
        since: at(NOW - 100 + i64::try_from(node).unwrap()),
        forced: false,
        failing: false,
    }
}

fn all(nodes: impl IntoIterator<Item = usize>) -> Vec<Candidate> {
    nodes.into_iter().map(waits).collect()
}

fn budget(max: Amount, per: Option<&str>) -> Brake {
    limited(Limit::Max(max), per)
}

fn keep(keep: Amount, per: Option<&str>) -> Brake {
    limited(Limit::Keep(keep), per)
}

fn limited(limit: Limit, per: Option<&str>) -> Brake {
    Brake {
        budgets: vec![Budget {
            limit,
            per: per.map(str::to_owned),
        }],
        window: None,
    }
}

fn window(percentage: u8) -> Brake {
    Brake {
        budgets: vec![],
        window: Some(Window {
            percentage,
            duration: SignedDuration::from_mins(5),
        }),
    }
}

#[test]
fn percentages_are_rounded_up_to_a_whole_node() {
    for (percent, all, allowed) in [
        (20, 1, 1),
        (20, 5, 1),
        (20, 6, 2),
        (20, 1000, 200),
        (100, 7, 7),
        (1, 0, 0),
    ] {
        assert_eq!(
            Amount::Percent(percent).of(all),
            allowed,
            "{percent}% of {all}"
        );
    }
}

#[test]
fn the_gravest_go_first_then_the_oldest_and_the_rest_is_held() {
    let cluster = Cluster::gpus(10);
    let minor = Candidate {
        fatal: false,
        since: at(1),
        ..waits(0)
    };
    let failing = Candidate {
        failing: true,
        since: at(0),
        ..waits(1)
    };
    let candidates = vec![minor, failing, waits(7), waits(3)];
    let plan = cluster.plan(Some(&budget(Amount::Nodes(3), None)), candidates);
    assert_eq!(plan.start, ["n3", "n7", "n0"]);
    let held: Vec<_> = plan.held.keys().collect();
    assert_eq!(held, ["n1"]);
    assert_eq!(
        plan.held["n1"].to_string(),
        "3 of 10 nodes are out of service (n3, n7, n0), and 3 may be at the same time"
    );
}

#[test]
fn a_budget_counts_what_is_out_and_lets_the_next_go_when_one_is_back() {
    let brake = Brake::default();
    let cluster = Cluster::gpus(10).out([0, 1], 5);
    let plan = cluster.plan(Some(&brake), all([2, 3]));
    assert_eq!(
        (plan.start.len(), plan.held.len(), plan.trip),
        (0, 2, false)
    );
    let text = plan.held["n2"].to_string();
    assert_eq!(
        text,
        "2 of 10 nodes are out of service (n0, n1), and 2 (20%) may be at the same time"
    );
    let plan = Cluster::gpus(10)
        .out([0], 5)
        .plan(Some(&brake), all([2, 3]));
    assert_eq!(plan.start, ["n2"]);
    assert!((plan.limits[0].utilization() - 1.0).abs() < f64::EPSILON);
}

#[test]
fn who_uses_the_room_is_named_and_a_few_are_enough() {
    let brake = Brake {
        window: window(60).window,
        ..budget(Amount::Nodes(8), None)
    };
    let cluster = Cluster::gpus(20).out(2..10, NOW);
    let plan = cluster.plan(Some(&brake), all([0]));
    let hold = &plan.held["n0"];
    let text = hold.to_string();
    assert!(text.contains("(n2, n3, n4, n5, n6 and 3 more)"), "{text}");
    let awaits = hold.awaits();
    for part in ["`gpuwarden explain n2`", "[[brake.budgets]]"] {
        assert!(awaits.contains(part), "{awaits}");
    }
    for limit in &plan.limits {
        assert_eq!(limit.by, ["n2", "n3", "n4", "n5", "n6"], "{limit:?}");
    }
    // A limit of zero has no users.
    let plan = Cluster::gpus(2).plan(Some(&budget(Amount::Nodes(0), None)), all([0]));
    let text = plan.held["n0"].to_string();
    assert!(text.contains("out of service, and 0"), "{text}");
    assert!(!plan.held["n0"].awaits().contains("explain"));
}

#[test]
fn each_domain_has_its_own_budget_and_a_full_one_blocks_no_other() {
    let cluster = Cluster::gpus(9)
        .label(0..4, "rack", "a")
        .label(4..8, "rack", "b")
        .out([0], 5);
    let plan = cluster.plan(
        Some(&budget(Amount::Percent(25), Some("rack"))),
        all([1, 2, 4, 5, 8]),
    );
    assert_eq!(plan.start, ["n4", "n8"]);
    assert_eq!(
        plan.held["n1"].to_string(),
        "1 of 4 nodes with rack=a are out of service (n0), and 1 (25%) may be at the same time"
    );
    // All budgets hold: the cluster's and the rack's.
    let mut both = budget(Amount::Percent(50), Some("rack"));
    both.budgets.push(Budget {
        limit: Limit::Max(Amount::Nodes(3)),
        per: None,
    });
    let plan = cluster.plan(Some(&both), all([1, 2, 4, 5, 6]));
    assert_eq!(plan.start, ["n1", "n4"]);
    assert!(matches!(&plan.held["n5"], Hold::Budget { budget, .. } if budget.per.is_none()));
    assert!(matches!(&plan.held["n2"], Hold::Budget { budget, .. } if budget.per.is_some()));
}

#[test]
fn of_each_rack_as_many_nodes_stay_as_the_budget_keeps() {
    let cluster = Cluster::gpus(36)
        .label(0..18, "rack", "a")
        .label(18..36, "rack", "b")
        .out([17], 5);
    let brake = keep(Amount::Nodes(16), Some("rack"));
    let plan = cluster.plan(Some(&brake), all([0, 1, 18, 19, 20]));
    assert_eq!(plan.start, ["n0", "n18", "n19"]);
    let hold = &plan.held["n1"];
    assert_eq!(
        hold.to_string(),
        "16 of 18 nodes with rack=a must stay in service (out: n17, n0)"
    );
    let awaits = hold.awaits();
    for part in ["`gpuwarden explain n17`", "a lower `keep`"] {
        assert!(awaits.contains(part), "{awaits}");
    }
    assert_eq!(plan.limits[0].limit, "keep 16 per rack");
    assert!((plan.limits[0].utilization() - 1.0).abs() < f64::EPSILON);
    // A share is rounded up: 17 of 18 nodes.
    let plan = cluster.plan(
        Some(&keep(Amount::Percent(90), Some("rack"))),
        all([0, 18, 19]),
    );
    assert_eq!(plan.start, ["n18"]);
    assert_eq!(
        plan.held["n19"].to_string(),
        "17 (90%) of 18 nodes with rack=b must stay in service (out: n18)"
    );
    // Without a label it is of the whole cluster.
    let plan = cluster.plan(Some(&keep(Amount::Nodes(34), None)), all([0, 18]));
    assert_eq!(plan.start, ["n0"]);
}

#[test]
fn a_rack_with_fewer_nodes_than_are_kept_lets_none_go() {
    let cluster = Cluster::gpus(6).label(0..3, "rack", "a");
    let brake = keep(Amount::Nodes(4), Some("rack"));
    let plan = cluster.plan(Some(&brake), all([0]));
    let hold = &plan.held["n0"];
    assert_eq!(
        hold.to_string(),
        "4 nodes with rack=a must stay in service, and there are only 3"
    );
    assert!(!hold.awaits().contains("explain"), "{}", hold.awaits());
    // With exactly as many none can go either.
    let plan = cluster.plan(Some(&keep(Amount::Nodes(3), Some("rack"))), all([0, 1]));
    assert_eq!((plan.start.len(), plan.held.len()), (0, 2));
    let text = plan.held["n0"].to_string();
    assert_eq!(text, "3 of 3 nodes with rack=a must stay in service");
}

#[test]
fn nodes_of_no_rack_and_nodes_without_gpus_are_not_kept() {
    let cluster = Cluster::gpus(8)
        .label(0..6, "rack", "a")
        .label(6..7, "rack", "")
        .cpu([4, 5]);
    let brake = keep(Amount::Nodes(4), Some("rack"));
    let plan = cluster.plan(Some(&brake), all([0, 4, 5, 6, 7]));
    assert_eq!(plan.start, ["n4", "n5", "n6", "n7"]);
    assert_eq!((plan.held.len(), plan.limits.len()), (1, 0));
}

#[test]
fn a_node_that_a_person_cordoned_is_none_of_those_in_service() {
    let mut cluster = Cluster::gpus(4).label(0..4, "rack", "a");
    cluster.cordoned.insert(3);
    let brake = keep(Amount::Nodes(3), Some("rack"));
    // The cordoned node may go: as many as before stay.
    let plan = cluster.plan(Some(&brake), all([0, 3]));
    assert_eq!(plan.start, ["n3"]);
    assert_eq!(
        plan.held["n0"].to_string(),
        "3 of 4 nodes with rack=a must stay in service (out: n3)"
    );
    // Other budgets count only what was taken out.
    let plan = cluster.plan(Some(&budget(Amount::Nodes(1), None)), all([0]));
    assert_eq!(plan.start, ["n0"]);
}

#[test]
fn other_nodes_use_up_no_room_of_the_gpu_nodes() {
    // Ten GPU nodes and ten others, three of them out.
    let cluster = Cluster::gpus(20).cpu(10..20).out([10, 11, 12], NOW);
    let brake = budget(Amount::Percent(20), None);
    let plan = cluster.plan(Some(&brake), all([0, 1, 2, 13]));
    assert_eq!(plan.start, ["n0", "n1"]);
    assert!(plan.held.contains_key("n13"), "the others have a limit too");
    // Other nodes do not trip the circuit breaker: known fault 6 of NVSentinel's quarantine.
    let plan = cluster.plan(Some(&window(30)), all([0, 1]));
    assert_eq!((plan.start.len(), plan.trip), (2, false));
    assert_eq!((plan.limits[0].used, plan.limits[0].of), (2, 10));
}

#[test]
fn without_the_label_all_nodes_count_and_that_is_said() {
    let cluster = Cluster::gpus(10).cpu(0..10).out([0, 1], 5);
    let plan = cluster.plan(Some(&Brake::default()), all([2]));
    assert!(plan.unlabelled && plan.held.contains_key("n2"));
    assert!(!Cluster::gpus(1).plan(None, vec![]).unlabelled);
}

#[test]
fn the_window_trips_at_its_threshold_exactly() {
    // 40 % of ten: four may go, the fifth trips.
    let cluster = Cluster::gpus(10).out(0..3, NOW - 10);
    let plan = cluster.plan(Some(&window(40)), all([3]));
    assert_eq!((plan.start.len(), plan.trip), (1, false));
    let plan = cluster.plan(Some(&window(40)), all([3, 4]));
    assert_eq!(
        (plan.start.as_slice(), plan.trip),
        (&["n3".to_owned()][..], true)
    );
    assert_eq!(plan.held["n4"], Hold::Tripped);
    // Without a waiting node the breaker does not trip.
    let full = Cluster::gpus(10).out(0..4, NOW - 10);
    assert!(!full.plan(Some(&window(40)), vec![]).trip);
}

#[test]
fn the_window_slides_counts_nodes_once_and_starts_anew_after_a_reset() {
    let mut cluster = Cluster::gpus(10).out(0..4, NOW - 299);
    assert!(cluster.plan(Some(&window(40)), all([5])).trip);
    // Times too long ago, or of a clock that runs ahead.
    let slid = Cluster::gpus(10).out(0..4, NOW - 300);
    assert_eq!(slid.plan(Some(&window(40)), all([5])).start, ["n5"]);
    let ahead = Cluster::gpus(10).out(0..4, NOW + 60);
    assert!(ahead.plan(Some(&window(40)), all([5])).trip);
    // A returned node counts as well, and one that is out again counts once.
    let mut back = Cluster::gpus(10).out(0..3, NOW - 10);
    back.recent = [("n0".to_owned(), at(NOW - 50))].into();
    assert!(!back.plan(Some(&window(40)), all([5])).trip);
    back.recent.insert("n9".to_owned(), at(NOW - 50));
    assert!(back.plan(Some(&window(40)), all([5])).trip);
    // Nodes taken out before a person closed it do not count.
    cluster.reset_at = Some(at(NOW - 299));
    assert_eq!(cluster.plan(Some(&window(40)), all([5])).start, ["n5"]);
}

#[test]
fn force_is_never_held_and_does_not_count_in_the_window() {
    let forced = Candidate {
        forced: true,
        fatal: false,
        ..waits(5)
    };
    let mut cluster = Cluster::gpus(10).out([0, 1], 5);
    for stop in [
        None,
        Some(Hold::Tripped),
        Some(Hold::Unread("no answer".into())),
    ] {
        cluster.stop = stop;
        let plan = cluster.plan(
            Some(&budget(Amount::Nodes(0), None)),
            vec![waits(4), forced.clone()],
        );
        assert_eq!(plan.start, ["n5"]);
    }
    let plan = Cluster::gpus(10)
        .out([0, 1], NOW)
        .forced_out(2)
        .plan(Some(&window(30)), vec![forced, waits(6)]);
    assert_eq!((plan.start.len(), plan.trip), (2, false));
    // The node is out, and uses up room of the budgets.
    let full = Cluster::gpus(10).forced_out(0);
    let plan = full.plan(Some(&budget(Amount::Nodes(1), None)), all([1]));
    assert!(plan.held.contains_key("n1"));
}

#[test]
fn a_stop_holds_all_and_a_brake_that_is_off_holds_none() {
    let mut cluster = Cluster::gpus(10).out(0..5, NOW);
    cluster.stop = Some(Hold::Tripped);
    let plan = cluster.plan(Some(&Brake::default()), all([6, 7]));
    assert_eq!((plan.start.len(), plan.held.len()), (0, 2));
    // A pause also holds with the brake switched off.
    assert_eq!(cluster.plan(None, all([6])).held["n6"], Hold::Tripped);
    cluster.stop = None;
    assert_eq!(cluster.plan(None, all([6, 7])).start.len(), 2);
}

#[test]
fn a_node_that_is_gone_is_neither_started_nor_held() {
    let plan = Cluster::gpus(2).plan(Some(&Brake::default()), all([7]));
    assert!(plan.start.is_empty() && plan.held.is_empty());
}

#[test]
fn labels_are_key_and_value() {
    assert_eq!(
        NodeLabel::parse("a/b=c").unwrap().to_string(),
        "a/b=c".to_owned()
    );
    for text in ["", "a", "a=", "=c"] {
        assert!(NodeLabel::parse(text).is_err(), "{text}");
    }
}
