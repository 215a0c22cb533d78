//! Members of the gang, as described by the files of its `ConfigMap` in the container, or by
//! the webhook.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use preflight::rendezvous::{self, Topology};
use preflight::roster::{Member, Roster};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::rendezvous::{GangState, RendezvousAddress};

/// Interval of checks of the files. A rendezvous answers when there is something new, or after
/// a while.
const LOOK: Duration = Duration::from_millis(500);
/// Time that a pod waits for a place in a full gang, since a member may be terminating.
const SURPLUS: Duration = Duration::from_secs(60);
/// Time that a pod arriving after the gang's start waits for a change of that state. If all
/// pods of a gang are recreated, the first ones may still see some that are terminating.
const RESTART: Duration = Duration::from_secs(10);
/// Like [`RESTART`], if the state comes from files, which are as old as the kubelet's last
/// sync.
const STALE: Duration = Duration::from_secs(90);
/// Time without an answer of the rendezvous after which the files are read: by then the kubelet
/// has updated them.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time for a reachable member to answer a call.
const REACH: Duration = Duration::from_secs(3);

/// Gang with all its members.
#[derive(Clone, Debug)]
pub(super) struct Gang {
    pub(super) id: String,
    /// Members of the gang, by rank.
    pub(super) members: Vec<Member>,
    pub(super) rank: usize,
    /// Address where rank 0 listens.
    pub(super) master: SocketAddr,
    /// Secret of the gang, if a rendezvous has provided it.
    pub(super) secret: Option<Vec<u8>>,
    /// Topology file for this machine, if a rendezvous has named one.
    pub(super) topology: Option<Topology>,
}

/// Reason why there is no gang.
#[derive(Debug, thiserror::Error)]
pub(super) enum GangError {
    /// The description of the gang is invalid.
    #[error("{0}")]
    Wrong(String),
    /// The gang is complete without this pod, and stays so.
    #[error("{0}")]
    Full(String),
    /// Other members have passed this check already, and do not come back.
    #[error("{0}")]
    Started(String),
    /// The size of the gang cannot be determined.
    #[error("{0}")]
    Untestable(String),
    /// The gang has not formed in time.
    #[error("{0}")]
    Missing(String),
}

/// Sources of the gang's description.
pub(super) struct GangSources {
    /// Directory with the files of the gang's `ConfigMap`.
    pub(super) directory: PathBuf,
    /// Rendezvous, which is asked first.
    pub(super) rendezvous: Option<RendezvousAddress>,
}

// === impl Gang ===

impl Gang {
    /// Connects to members, and describes those that do not answer from here, so that the
    /// webhook can compare which members reach each other. A refused connection counts as an
    /// answer.
    pub(super) async fn not_reached(&self, suspects: &[usize]) -> Option<String> {
        let others = suspects.iter().filter(|rank| **rank != self.rank);
        let calls: Vec<_> = others
            .filter_map(|rank| self.members.get(*rank))
            .map(|member| {
                let address = SocketAddr::new(member.address, self.master.port());
                (member, tokio::spawn(is_reached(address)))
            })
            .collect();
        let mut silent = Vec::new();
        for (member, call) in calls {
            if !call.await.unwrap_or(true) {
                silent.push(&*member.pod);
            }
        }
        (!silent.is_empty()).then(|| rendezvous::not_reached(&silent))
    }
}

async fn is_reached(address: SocketAddr) -> bool {
    match tokio::time::timeout(REACH, TcpStream::connect(address)).await {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => error.kind() == ErrorKind::ConnectionRefused,
        Err(_) => false,
    }
}

/// Waits until all members are known.
///
/// The files are used if there is no rendezvous, or if it has not answered for a while: members
/// with the secret and members without it would not come together.
pub(super) async fn wait(
    places: &GangSources,
    pod: &str,
    until: Instant,
) -> Result<Gang, GangError> {
    let mut answered_at = Instant::now();
    let mut without_place_since = None;
    loop {
        let mut is_fresh = false;
        let answer = match &places.rendezvous {
            Some(place) => match tokio::time::timeout_at(until, place.ask()).await {
                Ok(Ok(answer)) => {
                    answered_at = Instant::now();
                    is_fresh = true;
                    Ok(answer)
                }
                Ok(Err(why)) if answered_at.elapsed() < PATIENCE => Err(why),
                Ok(Err(_)) => of_files(&places.directory),
                Err(_) => Err("the rendezvous has not answered in time".to_owned()),
            },
            None => of_files(&places.directory),
        };
        let found = answer.map(|answer| {
            if answer.full {
                let text = format!("{pod} has no place in the gang, which is complete without it");
                return Err(GangError::Full(text));
            }
            look(&answer.roster, pod).map(|gang| Gang {
                secret: answer.secret,
                topology: answer.topology,
                ..gang
            })
        });
        let (state, is_readable) = match found {
            Ok(Ok(gang)) => return Ok(gang),
            Ok(Err(error @ (GangError::Wrong(_) | GangError::Untestable(_)))) => return Err(error),
            Ok(Err(GangError::Missing(state))) => {
                without_place_since = None;
                (state, true)
            }
            Ok(Err(error)) => {
                let patience = match error {
                    GangError::Started(_) if is_fresh => RESTART,
                    GangError::Started(_) => STALE,
                    _ => SURPLUS,
                };
                let since = without_place_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= patience || Instant::now() + LOOK > until {
                    return Err(error);
                }
                tokio::time::sleep(LOOK).await;
                continue;
            }
            // The next check may find the gang complete.
            Err(error) => (error, places.rendezvous.is_some()),
        };
        if Instant::now() + LOOK > until {
            return Err(if is_readable {
                GangError::Missing(state)
            } else {
                GangError::Wrong(state)
            });
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn of_files(directory: &Path) -> Result<GangState, String> {
    read(directory).map(|roster| GangState {
        roster,
        full: false,
        secret: None,
        topology: None,
    })
}

fn read(directory: &Path) -> Result<Roster, String> {
    let roster = Roster::parse(|key| fs::read_to_string(directory.join(key)).ok());
    roster.map_err(|error| format!("{}: {error}", directory.display()))
}

/// Returns the gang, or what is missing from it.
fn look(roster: &Roster, pod: &str) -> Result<Gang, GangError> {
    if let Some(other) = roster.started.as_ref().filter(|other| *other != pod) {
        let text = format!(
            "the gang has started: {other} has been through this check and does not come back to it, so \
             there is no peer to reduce with"
        );
        return Err(GangError::Started(text));
    }
    if let Some(why) = &roster.untestable {
        return Err(GangError::Untestable(format!(
            "the gang is not tested: {why}"
        )));
    }
    if let Some((one, other)) = roster.disagreement() {
        let checks = |member: &Member| member.checks.clone().unwrap_or_default();
        return Err(GangError::Wrong(format!(
            "the members of the gang wait for different checks: {} has {:?}, and {} has {:?}; give all \
             pods of the gang the same annotation nvsentinel.nvidia.com/preflight-checks",
            one.pod,
            checks(one),
            other.pod,
            checks(other)
        )));
    }
    let expected = usize::try_from(roster.expected).unwrap_or(usize::MAX);
    let there: Vec<&str> = roster
        .members
        .iter()
        .map(|member| member.pod.as_str())
        .collect();
    let there = if there.is_empty() {
        "no member".to_owned()
    } else {
        there.join(", ")
    };
    if expected == 0 {
        let text = format!("the size of the gang is not known; {there} is there");
        return Err(GangError::Missing(text));
    }
    if !roster.is_complete() {
        let missing = expected - roster.members.len();
        let text =
            format!("{missing} of {expected} members of the gang are missing; there are {there}");
        return Err(GangError::Missing(text));
    }
    let Some(rank) = roster.rank(pod).filter(|rank| *rank < expected) else {
        let text = format!("{pod} has no place in the gang, which is full: {there}");
        return Err(GangError::Full(text));
    };
    let members: Vec<Member> = roster.members.iter().take(expected).cloned().collect();
    let master = members.first().map(|first| first.address);
    let master = master.unwrap_or(IpAddr::from([127, 0, 0, 1]));
    Ok(Gang {
        id: roster.gang_id.clone(),
        rank,
        master: SocketAddr::new(master, roster.master_port),
        secret: None,
        topology: None,
        members,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn waited(files: &[(&str, &str)], pod: &str) -> Result<Gang, String> {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        let until = Instant::now() + LOOK / 2;
        let places = GangSources {
            directory: directory.path().to_owned(),
            rendezvous: None,
        };
        let waited = wait(&places, pod, until).await;
        waited.map_err(|error| format!("{error:?}"))
    }

    #[tokio::test]
    async fn all_three_forms_of_peers_make_a_gang() {
        for (peers, master) in [
            ("a-0:10.0.0.5\na-1:10.0.0.6\n", "10.0.0.5:29500"),
            ("a-0;10.0.0.5;0\na-1;10.0.0.6;1\n", "10.0.0.5:29500"),
            (
                "a-1;fd00::6;1;one,two\na-0;fd00::5;0;one,two\n",
                "[fd00::5]:29500",
            ),
        ] {
            let gang = waited(
                &[("expected_count", "2"), ("peers", peers), ("gang_id", "g")],
                "a-1",
            )
            .await;
            let gang = gang.unwrap();
            assert_eq!(
                (gang.rank, gang.members.len(), gang.id.as_str()),
                (1, 2, "g"),
                "{peers}"
            );
            assert_eq!(gang.master.to_string(), master);
        }
    }

    #[tokio::test]
    async fn who_is_missing_too_many_or_different_is_named() {
        let two = "a-0;10.0.0.5;0;x\na-1;10.0.0.6;1;x\n";
        for (files, pod, expected) in [
            (
                &[][..],
                "a-0",
                "Missing(\"the size of the gang is not known; no member is there",
            ),
            (
                &[("peers", two)],
                "a-0",
                "the size of the gang is not known; a-0, a-1 is there",
            ),
            (
                &[("expected_count", "4"), ("peers", two)],
                "a-0",
                "Missing(\"2 of 4 members of the gang are missing; there are a-0, a-1",
            ),
            (
                &[("expected_count", "1"), ("peers", two)],
                "a-1",
                "Full(\"a-1 has no place in the gang, which is full: a-0, a-1",
            ),
            (
                &[
                    ("expected_count", "3"),
                    ("peers", "a-0;10.0.0.5;0;x,y\na-1;10.0.0.6;1;y\n"),
                ],
                "a-0",
                "Wrong(\"the members of the gang wait for different checks: a-0 has \\\"x,y\\\", and a-1 has \\\"y\\\"",
            ),
            (
                &[("expected_count", "3"), ("peers", two), ("started", "a-1")],
                "a-0",
                "Started(\"the gang has started: a-1 has been through this check",
            ),
            (
                &[
                    ("expected_count", "0"),
                    ("peers", two),
                    ("untestable", "minMember is 0"),
                ],
                "a-0",
                "Untestable(\"the gang is not tested: minMember is 0",
            ),
            // The entry of this very pod, from an earlier run.
            (
                &[("expected_count", "3"), ("peers", two), ("started", "a-0")],
                "a-0",
                "Missing(\"1 of 3",
            ),
            (&[("expected_count", "many")], "a-0", "expected_count"),
            (
                &[("expected_count", "2"), ("peers", "a-0;nowhere;0")],
                "a-0",
                "peers",
            ),
        ] {
            let error = waited(files, pod).await.unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[tokio::test]
    async fn different_checks_are_refused_at_once() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(
            directory.path().join("peers"),
            "a;10.0.0.5;0;x\nb;10.0.0.6;1;y\n",
        )
        .unwrap();
        let until = Instant::now() + Duration::from_secs(3600);
        let places = GangSources {
            directory: directory.path().to_owned(),
            rendezvous: None,
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), wait(&places, "a", until));
        assert!(matches!(waited.await, Ok(Err(GangError::Wrong(_)))));
    }
}
