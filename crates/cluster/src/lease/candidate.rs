//! Candidate of the election: sends the requests for the Lease, on a connection of its own.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use tokio::sync::watch;
use tokio::time::Instant;

use super::election::{Ask, Deposed, Election, LEASE_DURATION, LeaseAnswer, LeaseRecord, NextStep};
use super::store_note::StoreNote;
use crate::audit::Reason;
use crate::causes::chain;
use crate::connect::{Cluster, ConnectError};
use crate::error::{ApiError, found};
use crate::pace::Urgency;
use crate::tenure::{RENEW_DEADLINE, Tenure};

/// Longest time of one request. Two that hang leave time for a third within [`RENEW_DEADLINE`].
const ATTEMPT: Duration = Duration::from_millis(3_500);
/// Longest time to release the Lease at the end. If it does not suffice, the other candidates
/// wait for [`LEASE_DURATION`].
const RESIGN: Duration = Duration::from_secs(3);

/// The namespace and name of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease object.
    pub name: String,
}

/// State of the election as this process has observed it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Last observed holder of the Lease; empty if there is none, or the Lease was never read.
    pub leader: String,
    /// True while this process leads.
    pub leads: bool,
    /// Error of the last request; `None` if it succeeded.
    pub error: Option<String>,
}

/// A candidate for the lead.
#[derive(Debug)]
pub struct Candidate {
    cluster: Cluster,
    lease: LeaseName,
    me: String,
    election: Election,
    tenure: Option<Tenure>,
    standing: watch::Sender<Standing>,
    store: StoreNote,
    /// True once a renewal was made early to write the id of the store.
    hurried: bool,
}

// === impl Cluster ===

impl Cluster {
    /// Creates a candidate named `me`, a name that no other process has or has had. Sends no
    /// request yet.
    ///
    /// Its requests use a connection of their own and wait for no turn, so that other requests
    /// to the API server cannot cost the lead.
    pub fn candidate(&self, lease: LeaseName, me: String) -> Result<Candidate, ConnectError> {
        Ok(Candidate {
            cluster: self.with_own_connection()?,
            lease,
            election: Election::new(me.clone(), Instant::now()),
            me,
            tenure: None,
            standing: watch::channel(Standing::default()).0,
            store: StoreNote::new(),
            hurried: false,
        })
    }
}

// === impl Candidate ===

impl Candidate {
    /// Returns a receiver of the state of the election.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// Returns the note of the store that the leader acts on. It has to be written before the
    /// leader acts.
    pub fn store(&self) -> StoreNote {
        self.store.clone()
    }

    /// Waits until this process leads, without a limit. The future may be dropped and created
    /// again.
    pub async fn elected(&mut self) -> Tenure {
        loop {
            if let Some(renewed_at) = self.election.renewed_at() {
                let tenure = self.tenure.get_or_insert_with(|| Tenure::begin(renewed_at));
                return tenure.clone();
            }
            // A candidate that has never led cannot be deposed.
            drop(self.step().await);
        }
    }

    /// Keeps the lead until it is lost; the tenure has ended then. The future may be dropped and
    /// created again soon.
    pub async fn keep(&mut self) -> Deposed {
        loop {
            if let Some(deposed) = self.step().await {
                return deposed;
            }
        }
    }

    /// Releases the Lease, so that another candidate leads at once. To be called after the last
    /// write. Tried once: if the API server cannot be reached, the Lease runs out.
    pub async fn resign(mut self) {
        if let Some(tenure) = &self.tenure {
            tenure.end();
        }
        if self.election.may_hold() {
            let error = match tokio::time::timeout(RESIGN, self.release()).await {
                Ok(Ok(())) => return self.publish_standing(None),
                Ok(Err(error)) => chain(&error),
                Err(_) => format!("no answer within {} s", RESIGN.as_secs()),
            };
            tracing::warn!(error, "the Lease was not released: it has to run out");
        }
    }

    /// Sends the next request, or waits.
    async fn step(&mut self) -> Option<Deposed> {
        let now = Instant::now();
        let ask = match self.election.next(now) {
            NextStep::Wait(until) => {
                let leads = self.election.renewed_at().is_some();
                tokio::select! {
                    () = tokio::time::sleep_until(until) => {}
                    () = self.store.until_outstanding(), if leads && !self.hurried => {
                        // Once only: a failing API server must not get more requests for it.
                        self.hurried = true;
                        self.election.ask_at_once(Instant::now());
                    }
                }
                return None;
            }
            NextStep::Deposed(deposed) => {
                if let Some(tenure) = &self.tenure {
                    tenure.end();
                }
                self.publish_standing(None);
                return Some(deposed);
            }
            NextStep::Ask(ask) => ask,
        };
        // A leader does not wait for an answer after its deadline.
        let left = self.election.renewed_at().map_or(ATTEMPT, |renewed_at| {
            (renewed_at + RENEW_DEADLINE).saturating_duration_since(now)
        });
        let limit = ATTEMPT.min(left);
        let result = tokio::time::timeout(limit, self.ask(&ask)).await;
        let result = result.unwrap_or_else(|_| {
            let error = format!("no answer within {:.1} s", limit.as_secs_f64());
            Err(ApiError::unavailable(error))
        });
        if let Ok(lease) = &result {
            self.store.read_from(&lease.metadata);
        }
        let (answer, mut error) = answer_of(&ask, result);
        if answer == LeaseAnswer::Found(None) {
            // The Lease has to be created; the error of the last attempt still holds.
            error.clone_from(&self.standing.borrow().error);
        }
        self.election.answered(now, answer, Instant::now());
        if let (Some(tenure), Some(renewed_at)) = (&self.tenure, self.election.renewed_at()) {
            tenure.note_renewal(renewed_at);
        }
        self.publish_standing(error);
        None
    }

    async fn ask(&self, ask: &Ask) -> Result<Lease, ApiError> {
        match ask {
            Ask::Read => Ok(self.leases().get(&self.lease.name).await?),
            Ask::Create => {
                let metadata = ObjectMeta {
                    name: Some(self.lease.name.clone()),
                    ..ObjectMeta::default()
                };
                let lease = Lease {
                    metadata,
                    spec: Some(self.spec(0, true)),
                };
                let leases = self.leases();
                let params = PostParams::default();
                Ok(reason().scope(leases.create(&params, &lease)).await?)
            }
            Ask::Take(record) => {
                let changes_hands = record.holder != self.me;
                let transitions = record.transitions.saturating_add(changes_hands.into());
                self.hold(record, self.spec(transitions, true)).await
            }
            Ask::Renew(record) => {
                let spec = self.spec(record.transitions, false);
                self.hold(record, spec).await
            }
        }
    }

    async fn hold(&self, seen: &LeaseRecord, spec: LeaseSpec) -> Result<Lease, ApiError> {
        let mut metadata = ObjectMeta::default();
        self.store.write_into(&mut metadata);
        self.change(seen, metadata, spec).await
    }

    /// Changes the Lease, if it is still in the version of `seen`.
    async fn change(
        &self,
        seen: &LeaseRecord,
        mut metadata: ObjectMeta,
        spec: LeaseSpec,
    ) -> Result<Lease, ApiError> {
        metadata.resource_version = Some(seen.version.clone());
        let change = Patch::Merge(Lease {
            metadata,
            spec: Some(spec),
        });
        let (leases, params) = (self.leases(), PatchParams::default());
        let patching = leases.patch(&self.lease.name, &params, &change);
        Ok(reason().scope(patching).await?)
    }

    async fn release(&mut self) -> Result<(), ApiError> {
        // Read first, since a renewal may be without an answer.
        let lease = found(self.leases().get(&self.lease.name).await)?;
        let seen = lease.as_ref().and_then(record_of);
        let Some(seen) = seen.filter(|seen| seen.holder == self.me) else {
            return Ok(());
        };
        let released = LeaseSpec {
            holder_identity: Some(String::new()),
            // The API server does not accept a duration of 0.
            lease_duration_seconds: Some(1),
            renew_time: Some(MicroTime(Timestamp::now())),
            ..LeaseSpec::default()
        };
        self.change(&seen, ObjectMeta::default(), released).await?;
        tracing::info!(lease = %self.lease, "the Lease is released");
        Ok(())
    }

    /// Returns the spec of the Lease while this process holds it.
    fn spec(&self, transitions: u32, acquired: bool) -> LeaseSpec {
        // For people: no candidate compares this time with a clock.
        let now = MicroTime(Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            lease_transitions: i32::try_from(transitions).ok(),
            acquire_time: acquired.then(|| now.clone()),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.cluster.client(Urgency::Act), &self.lease.namespace)
    }

    fn publish_standing(&self, error: Option<String>) {
        let leads = self.election.renewed_at().is_some()
            && (self.tenure.as_ref()).is_none_or(|tenure| tenure.time_left().is_ok());
        let standing = Standing {
            leader: self.election.holder().to_owned(),
            leads,
            error,
        };
        let lease = &self.lease;
        self.standing.send_if_modified(|known| {
            if *known == standing {
                return false;
            }
            match (&standing.error, &known.error) {
                (Some(error), None) => {
                    tracing::warn!(%lease, error, "the request for the Lease failed; trying again");
                }
                (Some(error), Some(_)) => {
                    tracing::debug!(%lease, error, "the request for the Lease failed again");
                }
                (None, _) if standing.leader != known.leader => {
                    tracing::info!(%lease, leader = standing.leader, "the leader has changed");
                }
                (None, _) => {}
            }
            *known = standing;
            true
        });
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        // Without its candidate the Lease is not renewed.
        if let Some(tenure) = &self.tenure {
            tenure.end();
        }
    }
}

// === impl LeaseName ===

impl std::fmt::Display for LeaseName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Interprets the answer to a request. Returns the error, if any, in words.
fn answer_of(ask: &Ask, result: Result<Lease, ApiError>) -> (LeaseAnswer, Option<String>) {
    let error = match (ask, result) {
        (_, Ok(lease)) => match (ask, record_of(&lease)) {
            (Ask::Read, Some(record)) => return (LeaseAnswer::Found(Some(record)), None),
            (_, Some(record)) => return (LeaseAnswer::Written(record), None),
            (_, None) => {
                return (
                    LeaseAnswer::Unknown,
                    Some("the answer is no Lease".to_owned()),
                );
            }
        },
        (Ask::Read, Err(ApiError::NotFound { .. })) => return (LeaseAnswer::Found(None), None),
        // On a change this means that the Lease is gone; on creation, that its namespace is.
        (Ask::Take(_) | Ask::Renew(_), Err(ApiError::NotFound { .. }))
        | (_, Err(ApiError::Conflict { .. })) => return (LeaseAnswer::Changed, None),
        (_, Err(error)) => error,
    };
    (LeaseAnswer::Unknown, Some(chain(&error)))
}

/// Returns the reason for writes of the Lease, for the audit log.
fn reason() -> Reason {
    Reason::new("leader election")
}

/// Reads the fields of a Lease that the election uses.
fn record_of(lease: &Lease) -> Option<LeaseRecord> {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.map(u64::try_from);
    let transitions = spec.lease_transitions.map(u32::try_from);
    Some(LeaseRecord {
        version: lease.metadata.resource_version.clone()?,
        holder: spec.holder_identity.unwrap_or_default(),
        duration: seconds.and_then(Result::ok).map(Duration::from_secs),
        transitions: transitions.and_then(Result::ok).unwrap_or(0),
    })
}

#[cfg(test)]
mod tests;
