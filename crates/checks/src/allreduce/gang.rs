//! The gang, as the files of its `ConfigMap` in the container tell of it.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use preflight::rendezvous::{self, Topology};
use preflight::roster::{Member, Roster};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::rendezvous::{Place, Told};

/// Pause between two looks. A rendezvous answers when there is something to tell, or after a while.
const LOOK: Duration = Duration::from_millis(500);
/// Time for which a pod waits for a place in a gang that is full: one of its members may be on its way out.
const SURPLUS: Duration = Duration::from_secs(60);
/// Time for which a pod that comes after the gang has started looks whether that stays so. Where all pods of
/// a gang are made anew, the first of them may still see some that are on their way out.
const RESTART: Duration = Duration::from_secs(10);
/// The same where the files tell it, which are as old as the kubelet's last look.
const STALE: Duration = Duration::from_secs(90);
/// Time after which the files are looked at if no rendezvous has answered: by then the kubelet has brought
/// what they are now.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time in which a member that can be reached answers a call.
const REACH: Duration = Duration::from_secs(3);

/// The gang, once all of it is known.
#[derive(Clone, Debug)]
pub(super) struct Gang {
    pub(super) id: String,
    /// The members, by their ranks.
    pub(super) members: Vec<Member>,
    pub(super) rank: usize,
    /// The place where rank 0 listens.
    pub(super) master: SocketAddr,
    /// The gang's secret, if a rendezvous has told it.
    pub(super) secret: Option<Vec<u8>>,
    /// The topology file of this machine, if a rendezvous has told of it.
    pub(super) topology: Option<Topology>,
}

/// There is no gang.
#[derive(Debug, thiserror::Error)]
pub(super) enum GangError {
    /// Nobody can join it as it is told.
    #[error("{0}")]
    Wrong(String),
    /// It is whole without this pod, and stays so.
    #[error("{0}")]
    Full(String),
    /// Others of it have been through this check, and do not come back.
    #[error("{0}")]
    Started(String),
    /// Nobody can know how many members it has.
    #[error("{0}")]
    Untestable(String),
    /// It has not formed in time.
    #[error("{0}")]
    Missing(String),
}

/// The places where a gang is told of.
pub(super) struct Places {
    /// The directory with the files of its `ConfigMap`.
    pub(super) directory: PathBuf,
    /// The rendezvous, which is asked first.
    pub(super) rendezvous: Option<Place>,
}

// === impl Gang ===

impl Gang {
    /// Calls members, and returns in words which of them do not answer from here, so that the webhook can
    /// compare who reaches whom. Who refuses the call is there.
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
/// The files are looked at where there is no rendezvous, or where none has answered for a while: a gang
/// of which some know the secret, and some do not, does not come together.
pub(super) async fn wait(places: &Places, pod: &str, until: Instant) -> Result<Gang, GangError> {
    let mut answered_at = Instant::now();
    let mut without_place_since = None;
    loop {
        let mut is_fresh = false;
        let told = match &places.rendezvous {
            Some(place) => match tokio::time::timeout_at(until, place.ask()).await {
                Ok(Ok(told)) => {
                    answered_at = Instant::now();
                    is_fresh = true;
                    Ok(told)
                }
                Ok(Err(why)) if answered_at.elapsed() < PATIENCE => Err(why),
                Ok(Err(_)) => of_files(&places.directory),
                Err(_) => Err("the rendezvous has not answered in time".to_owned()),
            },
            None => of_files(&places.directory),
        };
        let looked = told.map(|told| {
            if told.full {
                let text = format!("{pod} has no place in the gang, which is whole without it");
                return Err(GangError::Full(text));
            }
            look(&told.roster, pod).map(|gang| Gang {
                secret: told.secret,
                topology: told.topology,
                ..gang
            })
        });
        let (state, is_readable) = match looked {
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
            // The next look may find it whole.
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

fn of_files(directory: &Path) -> Result<Told, String> {
    read(directory).map(|roster| Told {
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

/// Returns the gang, or what is not there of it.
fn look(roster: &Roster, pod: &str) -> Result<Gang, GangError> {
    if let Some(other) = roster.started.as_ref().filter(|other| *other != pod) {
        let text = format!(
            "the gang has started: {other} has been through this check and does not come back to it, so \
             there is nobody to reduce with"
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
        "nobody".to_owned()
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
        let places = Places {
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
        for (files, pod, told) in [
            (
                &[][..],
                "a-0",
                "Missing(\"the size of the gang is not known; nobody is there",
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
            // Its own word of an earlier life.
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
            assert!(error.contains(told), "{error}");
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
        let places = Places {
            directory: directory.path().to_owned(),
            rendezvous: None,
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), wait(&places, "a", until));
        assert!(matches!(waited.await, Ok(Err(GangError::Wrong(_)))));
    }
}
