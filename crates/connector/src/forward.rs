//! Forwarding of events to another gRPC service, in addition to the store: NVSentinel's gRPC
//! sink.
//!
//! ```text
//! Connector -> store, and only then -> outbox in `forward/` -> deliver.rs -> the target
//! ```
//!
//! Events that the store has accepted are also on disk for the target before the sender gets
//! OK. From there they are delivered like an agent's events: in order, retried forever. The
//! target never delays the store: while it is unreachable, events wait in the outbox. If the
//! outbox is full or its disk hangs, events are not forwarded, which is counted and logged.
//!
//! A target with `https://` is reached by TLS, like a controller by its agents. Any other
//! target is reached in plain text, as in NVSentinel; [`crate::ConnectorConfig`] notes that for
//! the log.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::transform::load;
use async_trait::async_trait;
use prometheus_client::metrics::counter::Counter;
use runtime::logging::{Seldom, chain};
use runtime::metrics::Metrics;
use runtime::tcp_grpc::{self, AddressError};
use runtime::tls::{CertificateFiles, ClientTls, TlsError};
use store::{Appended, Identity, NewEvent};
use tokio::sync::{Semaphore, watch};
use tonic::transport::Channel;

use crate::deliver::{Delivery, DeliveryStatus, Receiver, token_header};
use crate::outbox::{Outbox, OutboxError, OutboxLimits, OutboxOpenError};
use crate::{Sink, SinkError};

runtime::metrics! {
    /// Counts events that forwarding has missed.
    pub(crate) struct ForwardMetrics {
        /// Health events that were stored but not forwarded, for want of room on the disk.
        missed: Counter = "gpuwarden_forward_missed_events",
    }
}

/// Prefix of the metrics of the outbox.
pub(crate) const OUTBOX_PREFIX: &str = "gpuwarden_forward_outbox";
/// Name of the directory inside the data directory.
const DIRECTORY: &str = "forward";
/// Longest time that callers of the store wait for the outbox: far above a sync, far below
/// their own time limits.
const PATIENCE: Duration = Duration::from_secs(1);
/// Most calls that wait for the outbox. Only a hanging disk causes more; their events are not
/// forwarded, since they would fill the memory.
const MAX_BEHIND: usize = 16;

/// Service that receives all events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardTarget {
    /// Host of the service: a name, or an IP address without brackets.
    pub host: String,
    /// TCP port of the service.
    pub port: u16,
    /// File with the token that each request carries. Read for each request, so it may change.
    pub token: Option<PathBuf>,
    /// Files for TLS; `None` for plain text.
    pub tls: Option<TargetTls>,
}

/// Files in PEM form for TLS with a target; read again when they change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetTls {
    /// Certificates of the authority that must have signed the target's certificate.
    pub authority: PathBuf,
    /// Certificate of this client, for a target that asks for one.
    pub own: Option<CertificateFiles>,
}

/// Reason why events cannot be forwarded.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// The target's address is invalid.
    #[error("GRPCSinkTarget")]
    Address(#[source] AddressError),
    /// The files for TLS cannot be used.
    #[error("the certificates for GRPCSinkTarget cannot be used")]
    Certificates(#[source] TlsError),
    /// The outbox cannot be opened.
    #[error("the outbox for the gRPC sink's target cannot be opened")]
    Outbox(#[source] OutboxOpenError),
}

/// Forwarding of events to a [`ForwardTarget`]. Cheap to clone.
#[derive(Clone)]
pub struct Forwarding {
    target: String,
    outbox: Outbox,
    delivery: watch::Receiver<DeliveryStatus>,
    /// Events that were not forwarded, since the start.
    missed: Arc<AtomicU64>,
    missed_metric: Counter,
    behind: Arc<Semaphore>,
    seldom: Arc<Seldom>,
}

/// State of forwarding, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardStatus {
    /// Host and port of the target, with `https://` if it is reached by TLS.
    pub target: String,
    /// Number of events that wait for the target.
    pub waiting: usize,
    /// Number of events that were never forwarded, for want of room on the disk, since the
    /// start.
    pub missed: u64,
    /// Number of events that the target refused and that are kept on disk.
    pub aside: u64,
    /// State of the delivery to the target.
    pub delivery: DeliveryStatus,
}

/// Sink that forwards the events stored by its inner sink.
pub(crate) struct ForwardingSink {
    pub(crate) store: Arc<dyn Sink>,
    pub(crate) forwarding: Forwarding,
}

// === impl Forwarding ===

impl Forwarding {
    /// Opens the outbox in `data_dir`. Returns the forwarding, and the delivery, which must be
    /// [run](Delivery::run).
    pub fn open(
        target: &ForwardTarget,
        data_dir: &Path,
        metrics: &Metrics,
    ) -> Result<(Self, Delivery), ForwardError> {
        let channel = target.channel()?;
        let outbox = Outbox::open_as(
            OUTBOX_PREFIX,
            &data_dir.join(DIRECTORY),
            OutboxLimits::default(),
            // The target does not identify its store.
            None,
            metrics,
        );
        let outbox = outbox.map_err(ForwardError::Outbox)?;
        let header = token_header(target.token.clone());
        let delivery = Delivery::to(
            Receiver::SinkTarget,
            outbox.clone(),
            channel,
            header,
            metrics,
        );
        let forwarding = Self {
            target: target.to_string(),
            outbox,
            delivery: delivery.status(),
            missed: Arc::default(),
            missed_metric: ForwardMetrics::registered(metrics).missed,
            behind: Arc::new(Semaphore::new(MAX_BEHIND)),
            seldom: Arc::default(),
        };
        Ok((forwarding, delivery))
    }

    /// Returns the state of forwarding.
    pub fn status(&self) -> ForwardStatus {
        let outbox = *self.outbox.status().borrow();
        ForwardStatus {
            target: self.target.clone(),
            waiting: outbox.events,
            missed: self.missed.load(Ordering::Relaxed),
            aside: outbox.aside,
            delivery: self.delivery.borrow().clone(),
        }
    }

    /// Releases the disk; see [`Outbox::close`].
    pub async fn close(&self) {
        self.outbox.close().await;
    }

    /// Puts events on disk for the target. Never takes longer than [`PATIENCE`].
    async fn hand_on(&self, events: Vec<NewEvent>) {
        let count = events.len();
        let Ok(place) = Arc::clone(&self.behind).try_acquire_owned() else {
            self.missed(count, "the disk hangs");
            return;
        };
        let own = self.clone();
        // Continues even if the caller stops waiting.
        let appended = tokio::spawn(async move {
            match own.outbox.append(events).await {
                Ok(_) | Err(OutboxError::Closed) => {}
                Err(error) => own.missed(count, &chain(&error)),
            }
            drop(place);
        });
        drop(tokio::time::timeout(PATIENCE, appended).await);
    }

    fn missed(&self, count: usize, why: &str) {
        let count = count as u64;
        self.missed.fetch_add(count, Ordering::Relaxed);
        self.missed_metric.inc_by(count);
        if let Some(before) = self.seldom.now() {
            tracing::error!(
                receiver = self.target,
                count,
                err = why,
                not_logged_before = before,
                "events are stored, but not forwarded to the gRPC sink's target"
            );
        }
    }
}

// === impl ForwardingSink ===

#[async_trait]
impl Sink for ForwardingSink {
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, SinkError> {
        let copies = events.clone();
        let appended = self.store.append(events).await?;
        // Includes events that were stored before: their sender got no answer, perhaps because
        // the process ended before they were forwarded.
        self.forwarding.hand_on(copies).await;
        Ok(appended)
    }

    fn store(&self) -> Option<Identity> {
        self.store.store()
    }
}

// === impl ForwardTarget ===

impl ForwardTarget {
    /// Returns true if others on the network can read the events, so that the operator must be
    /// warned.
    pub fn is_open_to_others(&self) -> bool {
        self.tls.is_none() && !load::is_this_machine(&self.host)
    }

    fn channel(&self) -> Result<Channel, ForwardError> {
        let channel = match self.tls.clone() {
            None => tcp_grpc::open_channel(&self.host, self.port),
            Some(files) => {
                let tls = ClientTls::load(files.authority, files.own);
                let tls = tls.map_err(ForwardError::Certificates)?;
                tcp_grpc::channel(&self.to_string(), Some(Arc::new(tls)))
            }
        };
        channel.map_err(ForwardError::Address)
    }
}

impl fmt::Display for ForwardTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tls.is_some() {
            f.write_str("https://")?;
        }
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests;
