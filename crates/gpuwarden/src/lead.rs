//! Leader election: a controller stands by here until it is elected.
//!
//! A standby serves its page, metrics and probes only: it opens no store and no port for agents,
//! and watches no nodes. A controller that loses the lead exits; its supervisor restarts it as a
//! standby. So no state is carried from one term into another.

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

/// State that an elected controller starts with.
pub(crate) struct Leading {
    /// Client of the cluster whose writes are limited to the term.
    pub(crate) cluster: Arc<Cluster>,
    /// Listener of the page.
    pub(crate) listener: TcpListener,
    /// State of the election, for the page.
    pub(crate) shown: LeadershipSource,
    /// Term of this leader.
    pub(crate) term: Term,
}

/// Period during which this process leads.
pub(crate) struct Term {
    tenure: Tenure,
    note: StoreNote,
    stop: CancellationToken,
    keeping: JoinHandle<(Candidate, Option<Deposed>)>,
}

/// A controller that stands by.
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
    /// Waits until this process is elected. Returns `None` if `shutdown` completes first.
    pub(crate) async fn until_elected(
        self,
        shutdown: &mut Pin<&mut impl Future<Output = anyhow::Result<()>>>,
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
            result = shutdown => {
                result?;
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
        // From here on the Lease is renewed in a task of its own, however long the start takes.
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

    /// Writes the endpoint file for commands on this machine. Returns `false` if another process
    /// holds the data directory: a leader may share it with this standby.
    fn note(&self) -> anyhow::Result<bool> {
        let data_dir = &self.settings.data_dir;
        let lock = match DirectoryLock::acquire(data_dir) {
            Ok(lock) => lock,
            Err(DirectoryError::InUse { .. }) => return Ok(false),
            // A standby reports now what would keep it from leading.
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
    /// Records on the Lease that `store` is in use from now on. Must be called before any event
    /// is received. If the Lease names another store, `store` is reset first.
    ///
    /// The reset comes before the write: a process that dies in between repeats both.
    pub(crate) async fn act_on(&self, store: &dyn EventStore) -> anyhow::Result<()> {
        let own = store.identity().id;
        if let Some(before) = self.note.seen().filter(|before| *before != own) {
            let begun = store.begin_anew().await?;
            tracing::info!(
                before,
                store = %begun,
                "another store was acted on before: events up to here are history, and open faults \
                 are those that agents resend and nodes carry"
            );
        }
        tokio::select! {
            () = self.note.write(&own) => Ok(()),
            () = self.lost() => anyhow::bail!("the lead was lost before the controller began to act"),
        }
    }

    /// Waits until the lead is lost.
    pub(crate) async fn lost(&self) {
        self.tenure.over().await;
    }

    /// Ends the term after the last write, and releases the Lease if this process still holds
    /// it. After an interrupted write (`written` is `false`), the API server may still execute
    /// it, so the Lease is left to expire: by then the API server has given up. Returns the
    /// reason if the lead was lost before.
    pub(crate) async fn end(self, written: bool) -> Option<String> {
        self.stop.cancel();
        match self.keeping.await {
            Ok((_, Some(deposed))) => Some(deposed.to_string()),
            Ok(_) if !written => {
                tracing::warn!(
                    "a write into the cluster was cut off: the Lease is not released, it has to \
                     expire"
                );
                None
            }
            Ok((candidate, None)) => {
                candidate.resign().await;
                None
            }
            // A bug in the election. A process that cannot know whether it leads must not act.
            Err(error) => Some(format!("the election has failed: {error}")),
        }
    }
}

/// Returns a name that is unique across processes and restarts, so that a successor cannot
/// mistake this process's Lease for its own.
fn identity(host: &str) -> anyhow::Result<String> {
    let id = host::identity::fresh_id().context("cannot create a name for the election")?;
    Ok(format!("{host}_{id}"))
}
