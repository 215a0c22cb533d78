//! The lead among several controllers: this one waits here until it has it.
//!
//! A controller that stands by has its page, metrics and probes, and nothing else: no store, no port for
//! agents, no watch of nodes. Who loses the lead ends; its supervisor starts it again, and
//! it stands by. So no state of one term is ever carried into another.

use std::pin::Pin;
use std::sync::Arc;

use anyhow::Context as _;
use cli::{Endpoint, ProcessSettings};
use cluster::{Candidate, Cluster, Deposed, LeaseName, StoreNote, Tenure};
use console::api::{LeadershipView, ProcessView};
use console::{Console, LeadershipSource};
use contract::keys::LEASE;
use controller::leadership;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use store::{DirectoryError, DirectoryLock, EventStore};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::parts::CLOCK;

/// `Leading` is what a controller that leads works with.
pub(crate) struct Leading {
    /// The cluster, for writes while we lead.
    pub(crate) cluster: Arc<Cluster>,
    /// The listener of the page.
    pub(crate) listener: TcpListener,
    /// The state of the election, for the page.
    pub(crate) shown: LeadershipSource,
    /// The lead itself.
    pub(crate) term: Term,
}

/// A `Term` is the time in which we lead.
pub(crate) struct Term {
    tenure: Tenure,
    note: StoreNote,
    stop: CancellationToken,
    keeping: JoinHandle<(Candidate, Option<Deposed>)>,
}

/// A `Standby` is a controller that stands by.
pub(crate) struct Standby<'a> {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) namespace: &'a str,
    pub(crate) settings: &'a ProcessSettings,
    pub(crate) process: ProcessView,
    pub(crate) metrics: Metrics,
    pub(crate) listener: TcpListener,
}

// === impl Standby ===

impl Standby<'_> {
    /// Waits until we lead; `None` where `told` to end before.
    pub(crate) async fn until_elected(
        self,
        told: &mut Pin<&mut impl Future<Output = anyhow::Result<()>>>,
    ) -> anyhow::Result<Option<Leading>> {
        let lease = LeaseName {
            namespace: self.namespace.to_owned(),
            name: LEASE.to_owned(),
        };
        let me = identity(&self.process.node_name)?;
        let mut candidate = self.cluster.candidate(lease.clone(), me.clone())?;
        leadership::register(&candidate, LEASE, &self.metrics);
        let standing = candidate.standing();
        let note = candidate.store();
        let shown: LeadershipSource = Arc::new(move || {
            let standing = standing.borrow().clone();
            LeadershipView {
                lease: lease.to_string(),
                identity: me.clone(),
                leader: standing.leader,
                leads: standing.leads,
                error: standing.error,
            }
        });

        let noted = self.note()?;
        let console = Console {
            process: self.process,
            sources: Sources::default(),
            places: watch::Sender::default().subscribe(),
            leadership: Some(Arc::clone(&shown)),
            controller: None,
            agent: None,
            devices: None,
            metrics: self.metrics,
            clock: CLOCK,
        };
        let over = CancellationToken::new();
        let page = tokio::spawn(console::serve(self.listener, console, over.clone()));
        let elected = tokio::select! {
            biased;
            told = told => {
                told?;
                None
            }
            tenure = candidate.elected() => Some(tenure),
        };
        over.cancel();
        let Some(tenure) = elected else {
            candidate.resign().await;
            page.await?;
            if noted {
                Endpoint::remove(&self.settings.data_dir);
            }
            return Ok(None);
        };
        // From here on it is renewed, whatever else takes its time.
        let cluster = Arc::new(self.cluster.under(&tenure));
        let stop = CancellationToken::new();
        let until = stop.clone();
        let keeping = tokio::spawn(async move {
            let lost = until.run_until_cancelled(candidate.keep()).await;
            (candidate, lost)
        });
        Ok(Some(Leading {
            cluster,
            listener: page.await?,
            shown,
            term: Term {
                tenure,
                note,
                stop,
                keeping,
            },
        }))
    }

    /// Notes where the page is, for commands on this machine, unless the data directory is
    /// another's now: who leads may share it with us.
    fn note(&self) -> anyhow::Result<bool> {
        let data_dir = &self.settings.data_dir;
        let lock = match DirectoryLock::acquire(data_dir) {
            Ok(lock) => lock,
            Err(DirectoryError::InUse { .. }) => return Ok(false),
            // Who stands by learns now what would keep it from leading.
            Err(error) => return Err(error.into()),
        };
        let endpoint = Endpoint {
            server: format!("http://{}", self.listener.local_addr()?),
            socket: self.process.socket.clone().into(),
            device_api: None,
            pid: std::process::id(),
        };
        let written = endpoint.write(data_dir);
        drop(lock);
        written.with_context(|| format!("cannot write to {}", data_dir.display()))?;
        Ok(true)
    }
}

// === impl Term ===

impl Term {
    /// Says on the Lease that `store` is acted on from now on. To be called before anything
    /// is taken in: where another store was acted on before, this one begins anew first.
    ///
    /// In this order: who ends in between, or never gets to write it, does the same again.
    pub(crate) async fn act_on(&self, store: &dyn EventStore) -> anyhow::Result<()> {
        let own = store.identity().id;
        if let Some(before) = self.note.seen().filter(|before| *before != own) {
            let begun = store.begin_anew().await?;
            tracing::info!(
                before,
                store = %begun,
                "another store was acted on before: events up to here are history, and faults are \
                 those that agents send again and nodes carry"
            );
        }
        tokio::select! {
            () = self.note.write(&own) => Ok(()),
            () = self.lost() => anyhow::bail!("the lead was lost before anything was done"),
        }
    }

    /// Waits until the lead is lost.
    pub(crate) async fn lost(&self) {
        self.tenure.over().await;
    }

    /// Ends it, after the last write: gives the Lease back where we have it. Where a write was
    /// cut off (`written` is false), the API server may still be about to make it: then the
    /// Lease has to run out, by when it has given up. Says why where we had lost it before.
    pub(crate) async fn end(self, written: bool) -> Option<String> {
        self.stop.cancel();
        match self.keeping.await {
            Ok((_, Some(deposed))) => Some(deposed.to_string()),
            Ok(_) if !written => {
                tracing::warn!(
                    "a write into the cluster was cut off: the Lease is not given back, it has to \
                     run out"
                );
                None
            }
            Ok((candidate, None)) => {
                candidate.resign().await;
                None
            }
            // A bug. Who does not know whether we lead does not act.
            Err(error) => Some(format!("the election has failed: {error}")),
        }
    }
}

/// Returns a name that no other process has or has had: a successor must not take our Lease for its
/// own.
fn identity(host: &str) -> anyhow::Result<String> {
    let id = host::identity::fresh_id().context("cannot make up a name for the election")?;
    Ok(format!("{host}_{id}"))
}
