//! Carries out what `MaintenanceRequest` objects ask for; `notices::request` decides.
//!
//! Each step follows from the object alone, and its event has a fixed id: a crash at any moment
//! repeats a step and loses none, also with another leader.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, ObjectKind, Selection, Signal};
use connector::{AcceptError, Caller, Connector};
use contract::{EVENT_VERSION, HealthEvent, HealthEvents};
use jiff::Timestamp;
use model::event::mark_accepted;
use notices::request::{FINALIZER, GROUP, PLURAL, Request, Step, VERSION, emitted, failed};
use runtime::logging::{Seldom, chain};
use runtime::sources::{SourceHandle, SourceState, Sources};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// Name of the source.
const SOURCE: &str = "maintenance-requests";
const DETAIL: &str = "maintenancerequests.nvsentinel.dgxc.nvidia.com";
/// Pause after which what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// The task; see the [module](self).
pub struct MaintenanceRequests {
    cluster: Arc<Cluster>,
    connector: Connector,
    source: SourceHandle,
    clock: fn() -> Timestamp,
    requests: BTreeMap<String, Request>,
    /// True unless a list of the requests is on its way.
    is_listed: bool,
    seldom: Seldom,
}

/// Reason why a step was not carried out.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error("the object cannot be written")]
    Api(#[from] ApiError),
    #[error("the event is not stored")]
    Event(#[from] AcceptError),
}

// === impl MaintenanceRequests ===

impl MaintenanceRequests {
    /// Creates the task, which [`Self::run`] starts.
    pub fn new(
        cluster: Arc<Cluster>,
        connector: Connector,
        sources: &Sources,
        clock: fn() -> Timestamp,
    ) -> Self {
        Self {
            source: sources.add_optional(SOURCE, DETAIL, clock()),
            cluster,
            connector,
            clock,
            requests: BTreeMap::new(),
            is_listed: false,
            seldom: Seldom::default(),
        }
    }

    /// Runs until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let selection = Selection::of_kind(&kind(), None);
        let mut signals = self.cluster.watch::<Value>(selection, cancel.clone());
        let work = async {
            let mut pause = Duration::MAX;
            loop {
                match tokio::time::timeout(pause, signals.recv()).await {
                    Ok(Some(signal)) => self.take(signal),
                    Ok(None) => return,
                    Err(_) => {}
                }
                while let Ok(signal) = signals.try_recv() {
                    self.take(signal);
                }
                let done = self.advance().await;
                pause = if done { Duration::MAX } else { RETRY };
            }
        };
        cancel.run_until_cancelled(work).await;
    }

    fn take(&mut self, signal: Signal<Value>) {
        let (state, detail) = match &signal {
            Signal::Failing { error, .. } => (SourceState::Failing, error.clone()),
            _ => (SourceState::Following, DETAIL.to_owned()),
        };
        self.source.update((self.clock)(), |status| {
            status.state = state;
            status.detail = detail;
        });
        match signal {
            Signal::Restarted => {
                self.requests.clear();
                self.is_listed = false;
            }
            Signal::Listed => self.is_listed = true,
            Signal::Applied(object) => {
                let request = Request::read(&object);
                self.requests.insert(request.name.clone(), request);
            }
            Signal::Deleted(name) => drop(self.requests.remove(&name)),
            Signal::Failing { .. } | Signal::Recovered => {}
        }
    }

    /// Carries out the steps of all requests. Returns false if one has to be tried again.
    async fn advance(&mut self) -> bool {
        // Whether another request goes first is known from all of them.
        if !self.is_listed {
            return true;
        }
        let all: Vec<Request> = self.requests.values().cloned().collect();
        let mut done = true;
        for request in &all {
            let Err(error) = self.carry_out(request, request.step(&all)).await else {
                continue;
            };
            done = false;
            if let Some(before) = self.seldom.now() {
                tracing::warn!(
                    request = request.name,
                    err = chain(&error),
                    not_logged_before = before,
                    "a MaintenanceRequest waits; trying again"
                );
            }
        }
        done
    }

    async fn carry_out(&self, request: &Request, step: Step) -> Result<(), StepError> {
        match step {
            Step::Wait => {}
            Step::Hold => {
                let mut finalizers = request.finalizers.clone();
                finalizers.push(FINALIZER.to_owned());
                self.set_finalizers(request, &finalizers).await?;
            }
            Step::Open(event) => {
                let said = match self.store(*event).await {
                    Ok(()) => emitted(),
                    Err(error) if error.blames_events() => failed(&chain(&error)),
                    Err(error) => return Err(error.into()),
                };
                self.say(request, said).await?;
            }
            Step::Say(condition) => self.say(request, condition).await?,
            Step::Close(event) => {
                if let Some(event) = event {
                    match self.store(*event).await {
                        // What was refused was never open.
                        Err(error) if !error.blames_events() => return Err(error.into()),
                        _ => {}
                    }
                }
                let mut finalizers = request.finalizers.clone();
                finalizers.retain(|one| one != FINALIZER);
                self.set_finalizers(request, &finalizers).await?;
            }
        }
        Ok(())
    }

    /// Stores an event; one that is stored already counts.
    async fn store(&self, mut event: HealthEvent) -> Result<(), AcceptError> {
        mark_accepted(&mut event, (self.clock)());
        let batch = HealthEvents {
            version: EVENT_VERSION,
            events: vec![event],
        };
        self.connector.accept(batch, &Caller::Monitor).await?;
        Ok(())
    }

    async fn set_finalizers(
        &self,
        request: &Request,
        finalizers: &[String],
    ) -> Result<(), ApiError> {
        let metadata = json!({"resourceVersion": request.version, "finalizers": finalizers});
        let change = json!({"metadata": metadata});
        let (kind, name) = (kind(), &request.name);
        until_changed(self.cluster.merge_object(&kind, name, &change).await)
    }

    async fn say(&self, request: &Request, mut condition: Value) -> Result<(), ApiError> {
        condition["lastTransitionTime"] = json!((self.clock)());
        let change = json!({
            "metadata": {"resourceVersion": request.version},
            "status": {"conditions": [condition]},
        });
        let (kind, name) = (kind(), &request.name);
        until_changed(self.cluster.merge_status(&kind, name, &change).await)
    }
}

fn kind() -> ObjectKind {
    ObjectKind::new(GROUP, VERSION, PLURAL)
}

/// Ignores that the object has changed meanwhile, or is gone: the watch tells it.
fn until_changed(merged: Result<Value, ApiError>) -> Result<(), ApiError> {
    match merged {
        Ok(_) | Err(ApiError::Conflict { .. } | ApiError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}
