//! `ConfigMap`s that list the members of a gang for each other, maintained by the leading
//! replica.
//!
//! Pods of gangs carry a label. Each change of such a pod reconciles its gang: its pods and the
//! number of members needed determine the contents of the `ConfigMap` (`preflight::roster`). It
//! is written only if it has not changed since it was read.

mod accused;
mod board;

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, LeaseName, ObjectKind, Selection, Signal};
use connector::{Caller, Connector};
use contract::{EVENT_VERSION, HealthEvent, HealthEvents, RecommendedAction};
use preflight::config::Config;
use preflight::gang::{Gang, Size, SizeFrom};
use preflight::inject::checks_of;
use preflight::roster::{GANG_ID_LABEL, MANAGED_BY, MANAGED_BY_LABEL};
use runtime::logging::{Seldom, chain};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::discoveries::Discoveries;
use crate::facts::{DEADLINE, Facts, Unknown};
use crate::metrics::WebhookMetrics;
use crate::seen::WatchedPod;
use board::{Board, GangKey, MapUpdate, is_over};

/// Name of the Lease; its holder maintains the `ConfigMap`s.
pub const LEASE: &str = "gpuwarden-webhook";
/// Interval for reconciling gangs without an event: the object with the number of members may
/// have changed, and a `ConfigMap` may be left over.
const INTERVAL: Duration = Duration::from_secs(10);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);
/// Most concurrent reports of members. The controller may take ten seconds for each before it
/// answers or times out.
const MAX_REPORTS: usize = 64;

/// Most names in one log line.
const FEW: usize = 10;

/// Numbers of members without gang checks, by namespace and gang id, cached for one round.
type Counted = BTreeMap<String, BTreeMap<String, u32>>;

/// Running reports and their results.
type Reports = JoinSet<(Report, Result<(), String>)>;

/// Report of a member that a majority of its gang does not reach.
struct Report {
    key: GangKey,
    pod: String,
    node: String,
    message: String,
    /// Sender of the report, for the connector's limits.
    caller: Caller,
}

/// Controller of the gang `ConfigMap`s.
pub struct GangKeeper {
    pub cluster: Arc<Cluster>,
    pub config: Arc<Config>,
    pub discoveries: Discoveries,
    pub facts: Facts,
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of this process, unique among the replicas.
    pub identity: String,
    /// Connection to the controller, if configured.
    pub connector: Option<Connector>,
    pub(crate) metrics: Arc<WebhookMetrics>,
    /// Rate limit of the log line about gangs that could not be reconciled.
    failed: Seldom,
    /// Rate limit of the log line about members that could not be reported.
    unreported: Seldom,
    /// Rate limit of the log line about gangs of unknown size.
    unknown: Seldom,
}

// === impl GangKeeper ===

impl GangKeeper {
    /// Creates a keeper for the gangs of pods that `admission` injects.
    pub fn new(
        cluster: Arc<Cluster>,
        facts: Facts,
        admission: &crate::admission::Admission,
        namespace: &str,
        identity: String,
    ) -> Self {
        Self {
            cluster,
            config: admission.config(),
            discoveries: admission.discoveries(),
            facts,
            namespace: namespace.to_owned(),
            identity,
            connector: None,
            metrics: admission.metrics(),
            failed: Seldom::default(),
            unreported: Seldom::default(),
            unknown: Seldom::default(),
        }
    }

    /// Reports members that a majority of their gang cannot reach.
    #[must_use]
    pub fn with_connector(self, connector: Option<Connector>) -> Self {
        Self { connector, ..self }
    }

    /// Maintains the `ConfigMap`s whenever this replica leads, until `cancel`.
    pub async fn run(self, cancel: CancellationToken) {
        let name = LeaseName {
            namespace: self.namespace.clone(),
            name: LEASE.to_owned(),
        };
        let failed = Seldom::default();
        for term in 0_u64.. {
            // A candidate that lost the lead must not return under its old name.
            let me = format!("{}-{term}", self.identity);
            let mut candidate = match self.cluster.candidate(name.clone(), me) {
                Ok(candidate) => candidate,
                Err(error) => {
                    if failed.now().is_some() {
                        tracing::error!(
                            err = chain(&error),
                            "cannot stand for election to maintain gangs"
                        );
                    }
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            let Some(tenure) = cancel.run_until_cancelled(candidate.elected()).await else {
                return candidate.resign().await;
            };
            tracing::info!("this replica maintains the gangs");
            let leading = Arc::new(self.cluster.under(&tenure));
            tokio::select! {
                () = self.keep(&leading, &cancel) => return candidate.resign().await,
                deposed = candidate.keep() => {
                    tracing::warn!("{deposed}: another replica maintains the gangs");
                }
            }
        }
    }

    /// Watches pods and `ConfigMap`s, and reconciles gangs, until `cancel`.
    async fn keep(&self, cluster: &Cluster, cancel: &CancellationToken) {
        let over = cancel.child_token();
        // Also ends the watches if the lead is lost and this future is dropped.
        let _guard = over.clone().drop_guard();
        let managed = format!("{MANAGED_BY_LABEL}={MANAGED_BY}");
        let pods = Selection::of_kind(&kind("pods"), None).with_labels(GANG_ID_LABEL);
        let mut pods = cluster.watch(pods, over.clone());
        // Anybody can set the label on a large ConfigMap, so the watch is metadata-only, and
        // only those of gangs with pods are read.
        let maps = Selection::of_kind(&kind("configmaps"), None).with_labels(&managed);
        let mut maps = cluster.watch(maps.metadata_only(), over);
        let mut board = Board::default();
        let mut reports = Reports::new();
        let mut next = tokio::time::Instant::now() + INTERVAL;
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                Some(signal) = pods.recv() => {
                    board.pod(signal, &self.config, &self.discoveries);
                    drain(&mut pods, |signal| board.pod(signal, &self.config, &self.discoveries));
                }
                Some(signal) = maps.recv() => {
                    board.config_map(signal);
                    drain(&mut maps, |signal| board.config_map(signal));
                }
                Some(reported) = reports.join_next() => {
                    if let Ok((report, sent)) = reported {
                        self.reported(&mut board, report, sent);
                    }
                }
                () = tokio::time::sleep_until(board.next_due().map_or(next, |due| next.min(due.into()))) => {
                    board.queue_due();
                    if tokio::time::Instant::now() >= next {
                        board.queue_all();
                        next = tokio::time::Instant::now() + INTERVAL;
                    }
                }
            }
            if !board.is_listed() {
                continue;
            }
            let mut counted = Counted::default();
            while let Some(key) = board.next() {
                if cancel.is_cancelled() {
                    return;
                }
                if let Err(error) = self
                    .reconcile(cluster, &mut board, &key, &mut counted)
                    .await
                {
                    if let Some(not_logged_before) = self.failed.now() {
                        let err = chain(&error);
                        tracing::warn!(gang = %key, err, not_logged_before, "cannot reconcile a gang; retrying");
                    }
                    board.failed(&key);
                    if is_of_all(&error) {
                        next = next.min(tokio::time::Instant::now() + RETRY);
                        break;
                    }
                    // A namespace that refuses our writes must not block other gangs.
                    continue;
                }
                board.succeeded(&key);
                self.report_unreached(&mut board, &key, &mut reports);
            }
            self.metrics.gangs.set(board.gangs());
            self.metrics.surplus.set(board.surplus());
        }
    }

    /// Writes the `ConfigMap` of a gang if its contents should change.
    async fn reconcile(
        &self,
        cluster: &Cluster,
        board: &mut Board,
        key: &GangKey,
        counted: &mut Counted,
    ) -> Result<(), ApiError> {
        let Some(gang) = board.gang(key) else {
            return self.clean_up(cluster, board, key).await;
        };
        let size = match &gang.size {
            SizeFrom::Pods(size) => Ok(Some((Size::Members(*size), None))),
            SizeFrom::Object { .. } => self.size(&gang).await,
        };
        // An unknown size is not guessed: the pods that happen to exist need not be the whole
        // gang.
        let (expected, owner) = match size {
            Ok(Some((Size::Members(count), owner))) => {
                if board.is_short(key, count) {
                    let without = self.without_checks(cluster, &gang, counted).await;
                    board.count_without_checks(key, without);
                }
                (Ok(board.with_checks(key, count)), owner)
            }
            Ok(Some((Size::NoGang, owner))) => (Ok(1), owner),
            Ok(Some((Size::NotSaid, owner))) => (Ok(board.pods(key)), owner),
            // The object may still appear, or may be gone together with its ConfigMap. A
            // ConfigMap created now would have no owner.
            Ok(None) if !board.has_map(key) => return Ok(()),
            Ok(None) => (Ok(0), None),
            Err(Unknown::ForGood(why)) => (
                Err(format!("its number of members cannot be determined: {why}")),
                None,
            ),
            Err(Unknown::Now(why)) => {
                if let Some(not_logged_before) = self.unknown.now() {
                    tracing::warn!(
                        gang = %gang, not_logged_before,
                        "the size of a gang is unknown: {why}"
                    );
                }
                return Ok(());
            }
        };
        let (configs, namespace) = (kind("configmaps"), Some(&*key.namespace));
        if board.is_unread(key) {
            board.set_read(key, cluster.object(&configs, namespace, &key.name).await?);
        }
        let MapUpdate { map, is_new } = board.update_for(key, &gang, expected, owner, &self.config);
        let Some(map) = map else {
            return Ok(());
        };
        let written = if is_new {
            cluster.create_object(&configs, namespace, &map).await
        } else {
            cluster
                .replace_object(&configs, namespace, &key.name, &map)
                .await
        };
        match written {
            Ok(map) => {
                board.wrote(key, map);
                Ok(())
            }
            // The watch delivers the new version.
            Err(ApiError::Conflict { .. }) => Ok(()),
            // The namespace is being deleted.
            Err(ApiError::Forbidden {
                status: 403,
                message,
            }) if message.contains("terminat") => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns the size of a gang that its object specifies, and an owner reference to the
    /// object; `None` if the object does not exist. The error is the reason why the size is not
    /// known.
    async fn size(&self, gang: &Gang) -> Result<Option<(Size, Option<Value>)>, Unknown> {
        let by = self.discoveries.of(&gang.namespace);
        let until = tokio::time::Instant::now() + DEADLINE;
        let Some((size, object)) = self.facts.size_of(gang, &by, until).await? else {
            return Ok(None);
        };
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let owner = text("/metadata/uid").zip(text("/metadata/name"));
        let owner = owner.map(|(uid, name)| {
            json!({
                "apiVersion": text("/apiVersion"), "kind": text("/kind"), "name": name, "uid": uid,
            })
        });
        Ok(Some((size, owner)))
    }

    /// Starts to report the members that a majority of a gang does not reach. If too many
    /// reports are running, the rest follow at a later reconciliation.
    fn report_unreached(&self, board: &mut Board, key: &GangKey, reports: &mut Reports) {
        let Some(gang) = board.gang(key) else {
            return;
        };
        for member in board.unreached(key, self.config.coordination.timeout) {
            if reports.len() >= MAX_REPORTS {
                return;
            }
            let message = format!(
                "{} of {} members of the gang {gang} do not reach {}, which says nothing itself: {}",
                member.by.len(),
                member.members,
                member.pod,
                few(&member.by)
            );
            let first = member.by.first().map_or("", String::as_str);
            let caller = Caller::Pod {
                node: member.node.clone(),
                name: format!("{}/{first}", key.namespace),
            };
            board.mark_reported(key, &member.pod);
            let report = Report {
                key: key.clone(),
                pod: member.pod,
                node: member.node,
                message,
                caller,
            };
            let connector = self.connector.clone();
            reports.spawn(async move {
                let Some(connector) = connector else {
                    return (report, Ok(()));
                };
                let event = not_reached(&report.node, &report.message);
                let sent = connector.accept(event, &report.caller).await;
                (report, sent.map(drop).map_err(|error| chain(&error)))
            });
        }
    }

    /// Handles the result of a report. A failed report is repeated at the next reconciliation.
    fn reported(&self, board: &mut Board, report: Report, sent: Result<(), String>) {
        let Report { node, message, .. } = report;
        if let Err(error) = sent {
            board.mark_unreported(&report.key, &report.pod);
            if let Some(not_logged_before) = self.unreported.now() {
                tracing::warn!(
                    node,
                    error,
                    not_logged_before,
                    "{message}; reporting it failed and is retried"
                );
            }
            return;
        }
        tracing::warn!(node, "{message}");
        self.metrics.unreached.inc();
    }

    /// Returns the number of members without gang checks: a launcher without GPUs, a pod that
    /// opted out, or one created while the webhook was unreachable. They carry no label, so the
    /// pods of the gang's namespace are listed, once per round for all its gangs.
    async fn without_checks(&self, cluster: &Cluster, gang: &Gang, counted: &mut Counted) -> u32 {
        if !counted.contains_key(&gang.namespace) {
            let all = self.all_without_checks(cluster, &gang.namespace).await;
            counted.insert(gang.namespace.clone(), all);
        }
        let all = counted.get(&gang.namespace);
        let count = all.and_then(|all| all.get(&gang.id()));
        count.copied().unwrap_or_default()
    }

    /// Returns the numbers of members without gang checks in a namespace, by gang id.
    async fn all_without_checks(
        &self,
        cluster: &Cluster,
        namespace: &str,
    ) -> BTreeMap<String, u32> {
        let over = CancellationToken::new();
        let _guard = over.clone().drop_guard();
        let by = self.discoveries.of(namespace);
        let mut pods = cluster.watch(Selection::of_kind(&kind("pods"), Some(namespace)), over);
        let mut counts = BTreeMap::new();
        while let Some(signal) = pods.recv().await {
            match signal {
                Signal::Restarted => counts.clear(),
                Signal::Applied(pod) => {
                    let pod: &WatchedPod = &pod;
                    if is_over(&pod.0) || !checks_of(&pod.0, &self.config).is_empty() {
                        continue;
                    }
                    if let Ok(Some(gang)) = Gang::of(&pod.0, namespace, &by) {
                        *counts.entry(gang.id()).or_default() += 1;
                    }
                }
                // If the list fails, the count is repeated later.
                Signal::Listed | Signal::Failing { .. } => break,
                Signal::Deleted(_) | Signal::Recovered => {}
            }
        }
        counts
    }

    /// Deletes the `ConfigMap` of a gang without pods.
    async fn clean_up(
        &self,
        cluster: &Cluster,
        board: &mut Board,
        key: &GangKey,
    ) -> Result<(), ApiError> {
        if let Some(uid) = board.left_over(key) {
            let (maps, namespace) = (kind("configmaps"), Some(&*key.namespace));
            cluster
                .delete_object(&maps, namespace, &key.name, &uid)
                .await?;
        }
        Ok(())
    }
}

/// Returns the event about a node whose pod a gang does not reach. It equals the event that the
/// check on that node would send, so that the next check that passes there clears it.
fn not_reached(node: &str, message: &str) -> HealthEvents {
    let event = HealthEvent {
        version: EVENT_VERSION,
        agent: "preflight-nccl-allreduce".to_owned(),
        component_class: "Node".to_owned(),
        check_name: "NCCLAllReduceTest".to_owned(),
        recommended_action: RecommendedAction::None as i32,
        error_code: vec!["NCCL_GANG_TIMEOUT".to_owned()],
        message: message.to_owned(),
        node_name: node.to_owned(),
        ..HealthEvent::default()
    };
    HealthEvents {
        version: EVENT_VERSION,
        events: vec![event],
    }
}

/// Joins the first names, and adds the number of the others.
fn few<T: Borrow<str>>(names: &[T]) -> String {
    let first = names.get(..FEW).unwrap_or(names).join(", ");
    match names.len().saturating_sub(FEW) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// Returns true if an error for one gang would repeat for all gangs.
fn is_of_all(error: &ApiError) -> bool {
    matches!(
        error,
        ApiError::Unavailable { .. } | ApiError::Throttled { .. } | ApiError::NotLeading
    )
}

/// Handles all queued events, so that a gang is reconciled once for many changes.
fn drain<T>(signals: &mut mpsc::Receiver<Signal<T>>, mut take: impl FnMut(Signal<T>)) {
    while let Ok(signal) = signals.try_recv() {
        take(signal);
    }
}

fn kind(resource: &str) -> ObjectKind {
    ObjectKind::new("", "v1", resource)
}

#[cfg(test)]
mod tests;
