//! Hands events on to another gRPC service, beside the store: NVSentinel's gRPC sink.
//!
//! ```text
//! Connector -> store, and only then -> outbox in `forward/` -> deliver.rs -> the target
//! ```
//!
//! What the store has taken is on disk for the target, too, before its sender is told OK;
//! from there it is delivered like an agent's events: in order, tried for ever. The target
//! never holds up the store: while it is away events wait in the outbox, and where that is
//! full or its disk hangs they are not handed on, counted and logged.
//!
//! A target by `https://` is talked to by TLS, as an agent does with its controller. Any other
//! is in the open, as all are in NVSentinel; that the log says so is up to [`crate::ConnectorConfig`].

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
use crate::outbox::{Limits, OpenError, Outbox, OutboxError};
use crate::{Sink, SinkError};

/// Name of the directory inside the data directory.
const DIRECTORY: &str = "forward";
/// The longest that the store's callers wait for the outbox: far above a synchronisation, far below
/// their own patience.
const PATIENCE: Duration = Duration::from_secs(1);
/// Calls that the outbox may be behind with. More come only from a disk that hangs; their
/// events are not handed on, for they would fill the memory.
const MAX_BEHIND: usize = 16;

/// A service that gets all events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardTarget {
    /// Its host: a name, or an IP address without brackets.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// A file with the token that each request carries. Read for each, so it may change.
    pub token: Option<PathBuf>,
    /// The files for TLS; `None`: it is talked to in the open.
    pub tls: Option<TargetTls>,
}

/// Files in PEM form for TLS with a target; read again when they change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetTls {
    /// The certificates of the authority that vouches for the target.
    pub authority: PathBuf,
    /// Our certificate, for a target that asks who we are.
    pub own: Option<CertificateFiles>,
}

/// The reason why events cannot be handed on.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// The target is no address.
    #[error("GRPCSinkTarget")]
    Address(#[source] AddressError),
    /// The files for TLS cannot be used.
    #[error("certificates for GRPCSinkTarget")]
    Certificates(#[source] TlsError),
    /// The events on their way cannot be kept.
    #[error("what waits for the gRPC sink's target")]
    Outbox(#[source] OpenError),
}

/// The way of events to a [`ForwardTarget`]. Cheap to clone.
#[derive(Clone)]
pub struct Forwarding {
    target: String,
    outbox: Outbox,
    delivery: watch::Receiver<DeliveryStatus>,
    /// Events that were not handed on, since the start.
    missed: Arc<AtomicU64>,
    missed_metric: Counter,
    behind: Arc<Semaphore>,
    seldom: Arc<Seldom>,
}

/// The state of handing on, for those who show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardStatus {
    /// Host and port of the target; `https://` before them where it is talked to by TLS.
    pub target: String,
    /// Events that wait for it.
    pub waiting: usize,
    /// Events that were never handed on, for want of room on the disk, since the start.
    pub missed: u64,
    /// Events that it did not take and that are kept on disk.
    pub aside: u64,
    /// The state of its delivery.
    pub delivery: DeliveryStatus,
}

/// A sink that hands on what its store has taken.
pub(crate) struct ForwardingSink {
    pub(crate) store: Arc<dyn Sink>,
    pub(crate) forwarding: Forwarding,
}

// === impl Forwarding ===

impl Forwarding {
    /// Opens what waits in `data_dir`, and says what delivers it, which is to be
    /// [run](Delivery::run).
    pub fn open(
        target: &ForwardTarget,
        data_dir: &Path,
        metrics: &Metrics,
    ) -> Result<(Self, Delivery), ForwardError> {
        let channel = target.channel()?;
        let outbox = Outbox::open_as(
            "gpuwarden_forward_outbox",
            &data_dir.join(DIRECTORY),
            Limits::default(),
            // Its target says nothing of stores.
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
            missed_metric: metrics.counter(
                "gpuwarden_forward_missed_events",
                "Health events that were stored and not handed on, for want of room on the disk",
            ),
            behind: Arc::new(Semaphore::new(MAX_BEHIND)),
            seldom: Arc::default(),
        };
        Ok((forwarding, delivery))
    }

    /// Returns the state of handing on.
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

    /// Lets go of the disk; see [`Outbox::close`].
    pub async fn close(&self) {
        self.outbox.close().await;
    }

    /// Puts events on disk for the target. Takes no longer than [`PATIENCE`], whatever
    /// happens.
    async fn hand_on(&self, events: Vec<NewEvent>) {
        let count = events.len();
        let Ok(place) = Arc::clone(&self.behind).try_acquire_owned() else {
            self.missed(count, "the disk hangs");
            return;
        };
        let own = self.clone();
        // Goes on where the caller does not wait for it.
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
                "events are stored, and not handed on to the gRPC sink's target"
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
        // Also what was stored before: its sender was not told so, perhaps because we ended
        // before it was handed on.
        self.forwarding.hand_on(copies).await;
        Ok(appended)
    }

    fn store(&self) -> Option<Identity> {
        self.store.store()
    }
}

// === impl ForwardTarget ===

impl ForwardTarget {
    /// Returns whether others can read on the way what is sent, so that an operator is to be told.
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
