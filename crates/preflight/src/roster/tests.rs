use proptest::prelude::*;

use super::*;

fn member(pod: &str, address: &str) -> Member {
    Member {
        pod: pod.to_owned(),
        address: address.parse().expect("an address"),
        checks: Some("preflight-dcgm-diag,preflight-nccl-allreduce".to_owned()),
    }
}

fn of_peers(peers: &str) -> Result<Roster, RosterError> {
    Roster::parse(|key| (key == PEERS).then(|| peers.to_owned()))
}

fn pods(roster: &Roster) -> Vec<&str> {
    roster.members.iter().map(|member| &*member.pod).collect()
}

#[test]
fn names_are_those_of_the_reference() {
    for (id, name) in [
        ("kubernetes-ns-group", "preflight-kubernetes-ns-group"),
        ("Volcano_NS//Group.", "preflight-volcano-ns-group"),
        ("a--b", "preflight-a-b"),
    ] {
        assert_eq!(config_map_name(id), name);
    }
    // Other programs find these objects by NVSentinel's label, so its text is part of the
    // contract.
    assert_eq!(
        (MANAGED_BY_LABEL, MANAGED_BY),
        ("nvsentinel.nvidia.com/managed-by", "preflight")
    );
    let long = format!("kubernetes-training-{}", "g".repeat(100));
    let name = config_map_name(&long);
    assert_eq!(name.len(), 63);
    assert!(name.starts_with("preflight-kubernetes-training-ggg"));
    let other = config_map_name(&format!("{long}h"));
    assert_ne!(name, other, "what is cut is told apart");
    assert!(gang_label(&long).len() <= 63);
}

#[test]
fn what_is_written_is_read() {
    let roster = Roster {
        gang_id: "kubernetes-training-g".to_owned(),
        expected: 2,
        master_port: 29500,
        members: vec![member("pod-0", "10.0.1.5"), member("pod-1", "fd00::7")],
        started: Some("pod-1".to_owned()),
        untestable: Some("minMember is 0".to_owned()),
    };
    let data = roster.data();
    assert_eq!(
        data["peers"],
        "pod-0;10.0.1.5;0;preflight-dcgm-diag,preflight-nccl-allreduce\n\
         pod-1;fd00::7;1;preflight-dcgm-diag,preflight-nccl-allreduce"
    );
    assert_eq!(data["master_addr"], "10.0.1.5");
    assert_eq!(data["expected_count"], "2");
    assert_eq!(
        (&*data["world_size"], &*data["rank"]),
        ("2", "pod-0;0\npod-1;1")
    );
    let read = Roster::parse(|key| data.get(key).cloned());
    assert_eq!(read, Ok(roster));
}

#[test]
fn the_older_forms_of_peers_are_read() {
    for (peers, checks) in [
        ("pod-0;10.0.1.5;0;a,b\npod-1;10.0.1.6;1;a,b", Some("a,b")),
        ("pod-0;10.0.1.5;0\npod-1;10.0.1.6;1\n", None),
        ("pod-1;10.0.1.6;1\npod-0;10.0.1.5;0", None),
        ("pod-0:10.0.1.5\n\n pod-1:10.0.1.6 \n", None),
        ("pod-0:fd00::5\npod-1:fd00::6", None),
    ] {
        let roster = of_peers(peers).unwrap_or_else(|error| panic!("{peers}: {error}"));
        assert_eq!(pods(&roster), ["pod-0", "pod-1"], "{peers}");
        let read: Vec<_> = roster
            .members
            .iter()
            .map(|one| one.checks.as_deref())
            .collect();
        assert_eq!(read, [checks; 2]);
    }
}

#[test]
fn what_is_wrong_is_refused_with_its_key() {
    for (peers, part) in [
        ("pod-0", "pod;address;rank;checks"),
        (";10.0.0.1;0", "pod;address;rank;checks"),
        ("pod-0;somewhere;0", "the address is not an IP address"),
        ("pod-0;10.0.0.1;x", "the rank is not a number"),
        ("pod-0;10.0.0.1;1", "the ranks are not 0, 1, 2"),
        ("pod-0;10.0.0.1;0\npod-1;10.0.0.2;0", "the ranks are not"),
        ("pod-0;10.0.0.1;0\npod-0;10.0.0.2;1", "listed twice"),
    ] {
        let error = of_peers(peers).expect_err(peers).to_string();
        assert!(error.contains("`peers`") && error.contains(part), "{error}");
    }
    for (key, value) in [("expected_count", "many"), ("master_port", "70000")] {
        let error = Roster::parse(|asked| (asked == key).then(|| value.to_owned()));
        assert!(error.expect_err(value).to_string().contains(key));
    }
}

#[test]
fn ranks_stay_when_a_pod_restarts_and_surplus_pods_have_none() {
    let three = || {
        vec![
            member("c", "10.0.0.3"),
            member("a", "10.0.0.1"),
            member("b", "10.0.0.2"),
        ]
    };
    let (roster, surplus) = Roster::default().with(three(), 3);
    assert_eq!(pods(&roster), ["a", "b", "c"]);
    assert!(roster.is_complete() && surplus.is_empty());

    // A pod with a name that sorts first takes nobody's rank.
    let mut four = three();
    four.push(member("aa", "10.0.0.9"));
    let (roster, surplus) = roster.with(four, 3);
    assert_eq!(pods(&roster), ["a", "b", "c"]);
    assert_eq!(surplus, [member("aa", "10.0.0.9")]);

    // A pod that comes back with another address keeps its rank.
    let back = vec![
        member("a", "10.0.0.1"),
        member("b", "10.0.0.77"),
        member("c", "10.0.0.3"),
    ];
    let (roster, _) = roster.with(back.clone(), 3);
    assert_eq!(roster.rank("b"), Some(1));
    assert_eq!(roster.members[1].address.to_string(), "10.0.0.77");

    // The gang grows.
    let mut four = back;
    four.push(member("d", "10.0.0.4"));
    let (roster, surplus) = roster.with(four, 4);
    assert_eq!(pods(&roster), ["a", "b", "c", "d"]);
    assert!(surplus.is_empty());
}

#[test]
fn members_with_other_checks_are_found() {
    let mut other = member("b", "10.0.0.2");
    other.checks = Some("preflight-dcgm-diag".to_owned());
    let (roster, _) = Roster::default().with(vec![member("a", "10.0.0.1"), other], 2);
    let (one, another) = roster.disagreement().expect("two lists");
    assert_eq!((&*one.pod, &*another.pod), ("a", "b"));
    let (same, _) =
        Roster::default().with(vec![member("a", "10.0.0.1"), member("b", "10.0.0.2")], 2);
    assert_eq!(same.disagreement(), None);
}

proptest! {
    #[test]
    fn any_peers_are_read_or_refused(peers in "[a-z0-9:;.,\n -]{0,200}") {
        if let Ok(roster) = of_peers(&peers) {
            let data = roster.data();
            let again = Roster::parse(|key| data.get(key).cloned()).expect("our own form");
            prop_assert_eq!(pods(&again), pods(&roster));
        }
    }

    #[test]
    fn however_pods_come_and_go_no_rank_is_given_twice_and_no_pod_is_lost(
        steps in prop::collection::vec((prop::collection::btree_set(0_u8..9, 0..9), 1_u32..6), 1..12),
    ) {
        let mut roster = Roster::default();
        for (there, expected) in steps {
            let pods = there.iter().map(|number| member(&format!("pod-{number}"), "10.0.0.1")).collect();
            let before = roster.clone();
            let (next, surplus) = roster.with(pods, expected);
            prop_assert!(next.members.len() <= expected as usize);
            prop_assert_eq!(next.members.len() + surplus.len(), there.len());
            let all_there = before.members.iter().all(|one| next.rank(&one.pod).is_some());
            if before.is_complete() && before.expected == expected && all_there {
                prop_assert_eq!(&next.members, &before.members);
            }
            roster = next;
        }
    }
}

/// Holds the figures of docs/preflight.md, "Limits".
#[test]
fn so_many_members_fit_into_a_config_map() {
    let bytes = |members: usize, name: usize| {
        let member = |rank: usize| Member {
            pod: format!("{rank:0name$}"),
            address: "192.168.100.100".parse().unwrap(),
            checks: Some("preflight-nccl-allreduce".to_owned()),
        };
        let roster = Roster {
            gang_id: "g".repeat(253),
            expected: 8192,
            master_port: 29500,
            members: (0..members).map(member).collect(),
            started: Some("p".repeat(name)),
            untestable: None,
        };
        roster.data().values().map(String::len).sum::<usize>()
    };
    let most = 1024 * 1024;
    assert!(bytes(MAX_MEMBERS as usize, 37) <= most);
    assert!(bytes(5_800, 63) <= most);
    assert!(bytes(MAX_MEMBERS as usize, 63) > most);
}
