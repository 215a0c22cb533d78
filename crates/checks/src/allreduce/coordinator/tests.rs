use std::net::SocketAddr;

use tokio::task::JoinSet;

use super::super::collective::Collective;
use super::super::member;
use super::super::messages::PROTOCOL;
use super::*;
use crate::worker::{Operation, SeenGpu};

const FILE: &str = "azure-ndv5.xml";
/// Gigabytes a second that are wanted, and the bytes of a message: two members reduce so many bytes a second.
const WANTED: f64 = 10.0;
const BYTES: u64 = 1_000_000_000;

/// What comes of a test: the seconds that it takes, or the text of its failure.
type Comes = Result<f64, &'static str>;

/// Reduces nothing, in a given time: another one as long as it has a topology file.
struct Timed {
    with: Option<Comes>,
    without: Comes,
}

impl Collective for Timed {
    async fn devices(&mut self, _: Instant) -> Result<(u32, Vec<SeenGpu>), Failure> {
        Ok((1, Vec::new()))
    }

    fn endpoint(&self) -> Option<SocketAddr> {
        None
    }

    async fn lead(&mut self, _: Instant) -> Result<String, Failure> {
        Ok("group".to_owned())
    }

    async fn test(&mut self, _: &Test, _: Instant) -> Result<Vec<Measured>, Failure> {
        let comes = self.with.unwrap_or(self.without);
        let comes = comes.map(|seconds| {
            vec![Measured {
                bytes: BYTES,
                seconds,
            }]
        });
        comes.map_err(|text| Failure::Nccl {
            code: 3,
            text: text.to_owned(),
        })
    }

    fn without_topology(&mut self) {
        self.with = None;
    }

    fn over(&mut self) {}
}

/// Returns the verdicts of a gang of two with this topology.
async fn verdicts(topology: Option<Topology>, with: Comes, without: Comes) -> Vec<Verdict> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let master = listener.local_addr().unwrap();
    let members = ["a", "b"].map(|pod| Member {
        pod: pod.to_owned(),
        address: master.ip(),
        checks: None,
    });
    let key = GangKey::new(b"secret");
    let formed = Instant::now() + Duration::from_secs(60);
    let plan = Plan {
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
    let running = tokio::spawn(run(listener, members.to_vec(), key.clone(), plan));
    let mut parts = JoinSet::new();
    for (rank, member) in members.into_iter().enumerate() {
        let hello = Hello {
            protocol: PROTOCOL,
            rank,
            node: format!("node-{}", member.pod),
            pod: member.pod,
            devices: 1,
            endpoint: None,
            topology: topology.clone(),
        };
        let mut timed = Timed {
            with: topology.as_ref().map(|_| with),
            without,
        };
        let key = key.clone();
        parts.spawn(async move {
            let until = || Instant::now() + Duration::from_secs(60);
            member::take_part(&mut timed, hello, ("a", master), &key, formed, until).await
        });
    }
    let verdicts = parts.join_all().await.into_iter().map(Result::unwrap);
    let verdicts = verdicts.collect();
    running.await.unwrap();
    verdicts
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
            assert_eq!(verdict.kind, Kind::Passed, "{verdict:?}");
            assert_eq!(verdict.gb_s, Some(20.0));
            let text = format!("; this without the topology file {FILE}, with which {before}");
            assert!(verdict.text.contains(&text), "{verdict:?}");
        }
    }
    // What is well with a file stands.
    for verdict in verdicts(named(), FAST, SLOW).await {
        assert_eq!(verdict.kind, Kind::Passed, "{verdict:?}");
        assert!(!verdict.text.contains(FILE), "{verdict:?}");
    }
    // What is bad without it too is bad, and says so.
    for verdict in verdicts(named(), Err("bad"), SLOW).await {
        assert_ne!(verdict.kind, Kind::Passed, "{verdict:?}");
        assert_eq!((verdict.gb_s, &verdict.failure), (Some(1.0), &None));
        assert!(verdict.text.contains(FILE), "{verdict:?}");
    }
    for verdict in verdicts(None, SLOW, SLOW).await {
        assert_ne!(verdict.kind, Kind::Passed, "{verdict:?}");
        assert!(!verdict.text.contains("topology"), "{verdict:?}");
    }
}

#[tokio::test]
async fn without_a_topology_file_that_is_asked_for_nothing_is_measured() {
    let missing = Topology::Missing("there is none for the instance type \"x1\"".to_owned());
    for verdict in verdicts(Some(missing), FAST, FAST).await {
        assert_eq!(verdict.kind, Kind::Untested, "{verdict:?}");
        let text = "node-a: there is none for the instance type \"x1\"";
        assert!(verdict.text.ends_with(text), "{verdict:?}");
        let outcome = super::super::judge(&verdict);
        assert_eq!(outcome.result, crate::outcome::Result::NotTested);
        assert!(outcome.findings.is_empty(), "{outcome:?}");
    }
}
