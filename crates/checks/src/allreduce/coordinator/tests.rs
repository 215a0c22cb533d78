use std::net::SocketAddr;

use tokio::task::JoinSet;

use super::super::collective::Collective;
use super::super::member;
use super::super::messages::PROTOCOL;
use super::*;
use crate::worker::{Operation, SeenGpu};

const FILE: &str = "azure-ndv5.xml";
/// Required bandwidth (GB/s), and size of a message: two members reduce as many bytes per
/// second as the size says.
const WANTED: f64 = 10.0;
const BYTES: u64 = 1_000_000_000;

/// Failure that no variable causes.
const CORRUPT: &str = "an illegal memory access";

/// Failure that is not attributed to a path between two members.
const REFUSED: &str = "Duplicate GPU detected";

/// Result of a test: its duration in seconds, or the text of its failure.
type Comes = Result<f64, &'static str>;

/// Collective that only takes time; the time may differ while it has a topology file.
struct Timed {
    with: Option<Comes>,
    without: Comes,
}

impl Collective for Timed {
    async fn devices(&mut self, _: Instant) -> Result<(u32, Vec<SeenGpu>), WorkerFailure> {
        Ok((1, Vec::new()))
    }

    fn endpoint(&self) -> Option<SocketAddr> {
        None
    }

    async fn lead(&mut self, _: Instant) -> Result<String, WorkerFailure> {
        Ok("group".to_owned())
    }

    async fn test(&mut self, _: &Test, _: Instant) -> Result<Vec<Measured>, WorkerFailure> {
        let comes = self.with.unwrap_or(self.without);
        let comes = comes.map(|seconds| {
            vec![Measured {
                bytes: BYTES,
                seconds,
            }]
        });
        comes.map_err(|text| match text {
            CORRUPT => WorkerFailure::Cuda {
                code: 700,
                text: text.to_owned(),
            },
            REFUSED => WorkerFailure::Nccl {
                code: 5,
                text: text.to_owned(),
            },
            _ => WorkerFailure::Nccl {
                code: 3,
                text: text.to_owned(),
            },
        })
    }

    fn without_topology(&mut self) {
        self.with = None;
    }

    fn over(&mut self) {}
}

/// Simulated member of a gang.
#[derive(Clone)]
struct Played {
    pod: &'static str,
    topology: Option<Topology>,
    with: Comes,
    without: Comes,
    inherited: &'static [(&'static str, &'static str)],
}

/// Returns the verdicts of a gang of two with this topology.
async fn verdicts(topology: Option<Topology>, with: Comes, without: Comes) -> Vec<MemberVerdict> {
    let played = ["a", "b"].map(|pod| Played {
        pod,
        topology: topology.clone(),
        with,
        without,
        inherited: &[],
    });
    verdicts_of(&played).await
}

async fn verdicts_of(played: &[Played]) -> Vec<MemberVerdict> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let master = listener.local_addr().unwrap();
    let members = played.iter().map(|played| Member {
        pod: played.pod.to_owned(),
        address: master.ip(),
        checks: None,
    });
    let members: Vec<Member> = members.collect();
    let key = GangKey::new(b"secret");
    let formed = Instant::now() + Duration::from_secs(60);
    let plan = ExaminationPlan {
        formed,
        timeout: Duration::from_secs(60),
        benchmark: Benchmark {
            sizes: vec![BYTES],
            iterations: 1,
            warmups: 0,
            operation: Operation::Sum,
        },
        threshold: Threshold {
            gb_s: Some(WANTED),
            basis: "set".to_owned(),
        },
    };
    let running = tokio::spawn(run(listener, members.clone(), key.clone(), plan));
    let mut parts = JoinSet::new();
    for ((rank, member), played) in members.into_iter().enumerate().zip(played.to_vec()) {
        let hello = Hello {
            protocol: PROTOCOL,
            rank,
            node: format!("node-{}", member.pod),
            pod: member.pod,
            devices: 1,
            endpoint: None,
            topology: played.topology.clone(),
            inherited: owned(played.inherited),
        };
        let mut timed = Timed {
            with: played.topology.as_ref().map(|_| played.with),
            without: played.without,
        };
        let key = key.clone();
        parts.spawn(async move {
            let until = || Instant::now() + Duration::from_secs(60);
            let verdict = member::take_part(&mut timed, hello, ("a", master), &key, formed, until);
            (rank, verdict.await.unwrap())
        });
    }
    let mut verdicts = parts.join_all().await;
    verdicts.sort_by_key(|(rank, _)| *rank);
    running.await.unwrap();
    verdicts.into_iter().map(|(_, verdict)| verdict).collect()
}

fn owned(variables: &[(&str, &str)]) -> BTreeMap<String, String> {
    let variables = variables.iter();
    variables
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

const FAST: Comes = Ok(0.05);
const SLOW: Comes = Ok(1.0);

#[tokio::test]
async fn a_bad_result_with_a_topology_file_is_repeated_without_it_and_only_that_counts() {
    let named = || {
        Some(Topology::File {
            name: FILE.to_owned(),
            required: false,
        })
    };
    for (with, before) in [
        (SLOW, "2 devices reduce with a bus bandwidth of 1.000 GB/s"),
        (Err("bad"), "the all-reduce over 2 devices fails: bad"),
    ] {
        for verdict in verdicts(named(), with, FAST).await {
            assert_eq!(verdict.kind, VerdictKind::Passed, "{verdict:?}");
            assert_eq!(verdict.gb_s, Some(20.0));
            let text = format!("; this without the topology file {FILE}, with which {before}");
            assert!(verdict.text.contains(&text), "{verdict:?}");
        }
    }
    // A pass with a file is final.
    for verdict in verdicts(named(), FAST, SLOW).await {
        assert_eq!(verdict.kind, VerdictKind::Passed, "{verdict:?}");
        assert!(!verdict.text.contains(FILE), "{verdict:?}");
    }
    // A failure without a file is a failure, and the text says so.
    for verdict in verdicts(named(), Err("bad"), SLOW).await {
        assert_ne!(verdict.kind, VerdictKind::Passed, "{verdict:?}");
        assert_eq!((verdict.gb_s, &verdict.failure), (Some(1.0), &None));
        assert!(verdict.text.contains(FILE), "{verdict:?}");
    }
    for verdict in verdicts(None, SLOW, SLOW).await {
        assert_ne!(verdict.kind, VerdictKind::Passed, "{verdict:?}");
        assert!(!verdict.text.contains("topology"), "{verdict:?}");
    }
}

#[tokio::test]
async fn without_a_topology_file_that_is_asked_for_nothing_is_measured() {
    let missing = Topology::Missing("there is none for the instance type \"x1\"".to_owned());
    for verdict in verdicts(Some(missing), FAST, FAST).await {
        assert_eq!(verdict.kind, VerdictKind::Untested, "{verdict:?}");
        let text = "node-a: there is none for the instance type \"x1\"";
        assert!(verdict.text.ends_with(text), "{verdict:?}");
        let outcome = super::super::judge(&verdict, None);
        assert_eq!(outcome.result, crate::outcome::Result::NotTested);
        assert!(outcome.findings.is_empty(), "{outcome:?}");
    }
}

/// Returns the verdicts of a gang with one deviating member, each with its own variables.
async fn of_three(
    comes: Comes,
    variables: [&'static [(&'static str, &'static str)]; 3],
) -> Vec<MemberVerdict> {
    let played = [("a", FAST), ("b", comes), ("c", FAST)];
    let played = played.into_iter().zip(variables);
    let played = played.map(|((pod, without), inherited)| Played {
        pod,
        topology: None,
        with: FAST,
        without,
        inherited,
    });
    verdicts_of(&played.collect::<Vec<_>>()).await
}

#[tokio::test]
async fn whose_variables_only_it_has_is_named_and_not_blamed() {
    let common: &[_] = &[("NCCL_DEBUG", "WARN"), ("NCCL_IB_HCA", "mlx5")];
    let odd: &[_] = &[("NCCL_DEBUG", "WARN"), ("NCCL_IB_DISABLE", "1")];
    for (comes, variables, kind) in [
        (SLOW, [common; 3], VerdictKind::Culprit),
        (SLOW, [odd; 3], VerdictKind::Culprit),
        // One of the passing members has the variable, too.
        (SLOW, [odd, odd, common], VerdictKind::Culprit),
        (SLOW, [common, odd, common], VerdictKind::Unclear),
        (SLOW, [common, &[], common], VerdictKind::Unclear),
        (Err("bad"), [common, odd, common], VerdictKind::Unclear),
        (Err(CORRUPT), [common, odd, common], VerdictKind::Culprit),
    ] {
        let verdicts = of_three(comes, variables).await;
        let kinds: Vec<VerdictKind> = verdicts.iter().map(|verdict| verdict.kind).collect();
        assert_eq!(
            kinds,
            [VerdictKind::Innocent, kind, VerdictKind::Innocent],
            "{variables:?}"
        );
        let outcome = super::super::judge(&verdicts[1], None);
        let is_fatal = outcome.findings.iter().any(|finding| finding.fatal);
        assert_eq!(is_fatal, kind == VerdictKind::Culprit, "{outcome:?}");
        if kind == VerdictKind::Unclear && variables[1] == odd {
            for verdict in &verdicts {
                let named = verdict
                    .text
                    .contains("NCCL_IB_DISABLE, NCCL_IB_HCA are not");
                assert!(named && !verdict.text.contains("NCCL_DEBUG"), "{verdict:?}");
                assert!(!verdict.text.contains("to blame"), "{verdict:?}");
            }
        }
    }
}

#[tokio::test]
async fn where_nccl_refuses_no_way_between_two_is_suspected() {
    for verdict in verdicts(None, Err(REFUSED), Err(REFUSED)).await {
        assert_eq!(verdict.kind, VerdictKind::Pair, "{verdict:?}");
        let text = "; the path between a on node-a and b on node-b is not at fault";
        assert!(verdict.text.ends_with(text), "{verdict:?}");
        let outcome = super::super::judge(&verdict, None);
        assert_eq!(outcome.result, crate::outcome::Result::Failed);
        assert!(!outcome.findings[0].fatal, "{outcome:?}");
    }
    for comes in [Err("bad"), SLOW] {
        for verdict in verdicts(None, comes, comes).await {
            let text = "; a on node-a and b on node-b fail only together";
            assert!(verdict.text.ends_with(text), "{verdict:?}");
        }
    }
}

#[tokio::test]
async fn one_device_alone_is_not_held_to_a_bandwidth() {
    for (comes, kind, text) in [
        (
            SLOW,
            VerdictKind::Passed,
            "1 device has no peer to reduce with; it keeps what is written to it, and its memory copies with \
             2.00 GB/s",
        ),
        (
            Err("bad"),
            VerdictKind::Unclear,
            "the test of 1 device fails: bad; there is no other member to compare it with",
        ),
        (
            Err(CORRUPT),
            VerdictKind::Culprit,
            "the test of 1 device fails: an illegal memory access",
        ),
    ] {
        let played = Played {
            pod: "a",
            topology: None,
            with: comes,
            without: comes,
            inherited: &[],
        };
        let verdicts = verdicts_of(&[played]).await;
        assert_eq!((verdicts[0].kind, verdicts[0].text.as_str()), (kind, text));
    }
}
