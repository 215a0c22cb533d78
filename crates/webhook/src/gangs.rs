//! The `ConfigMap`s by which the pods of a gang find each other, kept by the replica that leads.
//!
//! Pods of gangs carry a label. Each change of one is a reason to look at its gang: who is there, how many
//! are needed, and what the `ConfigMap` says. What it is to say follows from that (`preflight::roster`), and
//! is written only where it still is as it was seen.

mod accused;
mod board;

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, Kind, LeaseName, Signal};
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
use crate::seen::SeenPod;
use board::{Board, GangKey, Look, is_over};

/// Name of the Lease whose holder keeps the `ConfigMap`s.
pub const LEASE: &str = "gpuwarden-webhook";
/// Time between two looks at gangs of which nothing is heard: the object that says how many members are
/// needed may change, and a `ConfigMap` may be left over.
const LOOK: Duration = Duration::from_secs(10);
/// Pause after a failure.
const RETRY: Duration = Duration::from_secs(1);
/// Reports of members that are under way at a time: the controller may take ten seconds for each, or for its silence.
const MAX_REPORTS: usize = 64;

/// Most names that one line has.
const FEW: usize = 10;

/// Members that have no check of their gang, by namespace and id of the gang, as they were counted in one round of looks.
type Counted = BTreeMap<String, BTreeMap<String, u32>>;

/// The reports that are under way, and what became of each.
type Reports = JoinSet<(Report, Result<(), String>)>;

/// The report of a member that a majority of its gang does not reach.
struct Report {
    key: GangKey,
    pod: String,
    node: String,
    message: String,
    /// The speaker, for the connector.
    caller: Caller,
}

/// Keeps the `ConfigMap`s.
pub struct GangKeeper {
    /// The cluster.
    pub cluster: Arc<Cluster>,
    /// The configuration.
    pub config: Arc<Config>,
    /// How gangs are known.
    pub discoveries: Discoveries,
    /// What the cluster says of gangs.
    pub facts: Facts,
    /// The namespace of the Lease.
    pub namespace: String,
    /// A name of this process that no other has.
    pub identity: String,
    /// The way to the controller, if there is one.
    pub connector: Option<Connector>,
    pub(crate) metrics: Arc<WebhookMetrics>,
    /// The line of gangs that could not be looked at.
    failed: Seldom,
    /// The line of members that could not be reported.
    unreported: Seldom,
    /// The line of gangs whose size is not known.
    unknown: Seldom,
}

// === impl GangKeeper ===

impl GangKeeper {
    /// Returns who keeps the gangs of pods that `admission` lets in.
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

    /// Reports to a controller whom gangs do not reach.
    #[must_use]
    pub fn with_connector(self, connector: Option<Connector>) -> Self {
        Self { connector, ..self }
    }

    /// Keeps the `ConfigMap`s while it leads, until `cancel`. Who does not lead waits.
    pub async fn run(self, cancel: CancellationToken) {
        let name = LeaseName {
            namespace: self.namespace.clone(),
            name: LEASE.to_owned(),
        };
        let failed = Seldom::default();
        for term in 0_u64.. {
            // A name that nobody has had: whoever lost the lead stands as another.
            let me = format!("{}-{term}", self.identity);
            let mut candidate = match self.cluster.candidate(name.clone(), me) {
                Ok(candidate) => candidate,
                Err(error) => {
                    if failed.now().is_some() {
                        tracing::error!(err = chain(&error), "gangs cannot be kept");
                    }
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            let Some(tenure) = cancel.run_until_cancelled(candidate.elected()).await else {
                return candidate.resign().await;
            };
            tracing::info!("this replica keeps the gangs");
            let leading = Arc::new(self.cluster.under(&tenure));
            tokio::select! {
                () = self.keep(&leading, &cancel) => return candidate.resign().await,
                deposed = candidate.keep() => {
                    tracing::warn!("{deposed}: another replica keeps the gangs");
                }
            }
        }
    }

    /// Follows pods and `ConfigMap`s until `cancel`.
    async fn keep(&self, cluster: &Cluster, cancel: &CancellationToken) {
        let over = cancel.child_token();
        // Also where the lead is lost, and this is dropped.
        let _guard = over.clone().drop_guard();
        let managed = format!("{MANAGED_BY_LABEL}={MANAGED_BY}");
        let mut pods = cluster.watch_objects_as(
            &kind("pods"),
            None,
            |all| all.with_labels(GANG_ID_LABEL),
            over.clone(),
        );
        // Whoever may write ConfigMaps can label one so: those of gangs with pods are read, one by one.
        let mut maps = cluster.watch_objects_as(
            &kind("configmaps"),
            None,
            |all| all.with_labels(&managed).metadata_only(),
            over,
        );
        let mut board = Board::default();
        let mut reports = Reports::new();
        let mut next = tokio::time::Instant::now() + LOOK;
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                Some(signal) = pods.recv() => {
                    board.pod(signal, &self.config, &self.discoveries);
                    drain(&mut pods, |signal| board.pod(signal, &self.config, &self.discoveries));
                }
                Some(signal) = maps.recv() => {
                    board.map(signal);
                    drain(&mut maps, |signal| board.map(signal));
                }
                Some(reported) = reports.join_next() => {
                    if let Ok((report, sent)) = reported {
                        self.reported(&mut board, report, sent);
                    }
                }
                () = tokio::time::sleep_until(board.next_due().map_or(next, |due| next.min(due.into()))) => {
                    board.due_again();
                    if tokio::time::Instant::now() >= next {
                        board.all_again();
                        next = tokio::time::Instant::now() + LOOK;
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
                if let Err(error) = self.look_at(cluster, &mut board, &key, &mut counted).await {
                    if let Some(not_logged_before) = self.failed.now() {
                        let err = chain(&error);
                        tracing::warn!(gang = %key, err, not_logged_before, "it is tried again");
                    }
                    board.failed(&key);
                    if is_of_all(&error) {
                        next = next.min(tokio::time::Instant::now() + RETRY);
                        break;
                    }
                    // What a namespace does not let us write holds up no other.
                    continue;
                }
                board.went_well(&key);
                self.tell_of_accused(&mut board, &key, &mut reports);
            }
            self.metrics.gangs.set(board.gangs());
            self.metrics.surplus.set(board.surplus());
        }
    }

    /// Looks at a gang, and writes its `ConfigMap` if that is to say something else.
    async fn look_at(
        &self,
        cluster: &Cluster,
        board: &mut Board,
        key: &GangKey,
        counted: &mut Counted,
    ) -> Result<(), ApiError> {
        let Some(gang) = board.gang(key) else {
            return self.clean_up(cluster, board, key).await;
        };
        let told = match &gang.size {
            SizeFrom::Pods(size) => Ok(Some((Size::Members(*size), None))),
            SizeFrom::Object { .. } => self.size(&gang).await,
        };
        // What is not known is not guessed: a gang of who happens to be there would be none.
        let (expected, owner) = match told {
            Ok(Some((Size::Members(count), owner))) => {
                if board.is_short(key, count) {
                    let without = self.without_checks(cluster, &gang, counted).await;
                    board.count_without_checks(key, without);
                }
                (Ok(board.with_checks(key, count)), owner)
            }
            Ok(Some((Size::NoGang, owner))) => (Ok(1), owner),
            Ok(Some((Size::NotSaid, owner))) => (Ok(board.pods(key)), owner),
            // It may come yet, or be gone, and its ConfigMap with it: one that is made now would belong to nobody.
            Ok(None) if !board.has_map(key) => return Ok(()),
            Ok(None) => (Ok(0), None),
            Err(Unknown::ForGood(why)) => (
                Err(format!("its number of members is not known: {why}")),
                None,
            ),
            Err(Unknown::Now(why)) => {
                if let Some(not_logged_before) = self.unknown.now() {
                    tracing::warn!(
                        gang = %gang, not_logged_before,
                        "how many members it has is not known: {why}"
                    );
                }
                return Ok(());
            }
        };
        let (configs, namespace) = (kind("configmaps"), Some(&*key.namespace));
        if board.is_unread(key) {
            board.read(key, cluster.object(&configs, namespace, &key.name).await?);
        }
        let Look { map, is_new } = board.look(key, &gang, expected, owner, &self.config);
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
            // The watch brings what it is now.
            Err(ApiError::Conflict { .. }) => Ok(()),
            // The namespace is going away.
            Err(ApiError::Forbidden {
                status: 403,
                message,
            }) if message.contains("terminat") => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns what the object of a gang says of its size, if it is there, and the reference to it as an
    /// owner. The error says why that is not known.
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

    /// Begins to report the members of a gang that a majority of it does not reach. Those for which there is no room now
    /// are reported at a later look.
    fn tell_of_accused(&self, board: &mut Board, key: &GangKey, reports: &mut Reports) {
        let Some(gang) = board.gang(key) else {
            return;
        };
        for accused in board.accused(key, self.config.coordination.timeout) {
            if reports.len() >= MAX_REPORTS {
                return;
            }
            let message = format!(
                "{} of {} members of the gang {gang} do not reach {}, which says nothing itself: {}",
                accused.by.len(),
                accused.members,
                accused.pod,
                few(&accused.by)
            );
            let first = accused.by.first().map_or("", String::as_str);
            let caller = Caller::Pod {
                node: accused.node.clone(),
                name: format!("{}/{first}", key.namespace),
            };
            board.told_of(key, &accused.pod);
            let report = Report {
                key: key.clone(),
                pod: accused.pod,
                node: accused.node,
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

    /// Notes what became of a report. What the controller did not take is reported at the next look.
    fn reported(&self, board: &mut Board, report: Report, sent: Result<(), String>) {
        let Report { node, message, .. } = report;
        if let Err(error) = sent {
            board.not_told_of(&report.key, &report.pod);
            if let Some(not_logged_before) = self.unreported.now() {
                tracing::warn!(
                    node,
                    error,
                    not_logged_before,
                    "{message}; it is not reported yet"
                );
            }
            return;
        }
        tracing::warn!(node, "{message}");
        self.metrics.unreached.inc();
    }

    /// Returns the number of members of a gang that have no check of it: a launcher without GPUs, one that
    /// wants none, or one that was let in without us. They carry no label, so they are looked for in the
    /// gang's namespace, once in a round for all gangs there.
    async fn without_checks(&self, cluster: &Cluster, gang: &Gang, counted: &mut Counted) -> u32 {
        if !counted.contains_key(&gang.namespace) {
            let all = self.all_without_checks(cluster, &gang.namespace).await;
            counted.insert(gang.namespace.clone(), all);
        }
        let all = counted.get(&gang.namespace);
        let count = all.and_then(|all| all.get(&gang.id()));
        count.copied().unwrap_or_default()
    }

    /// Returns the numbers of members without checks of the gangs of a namespace, by the gang's id.
    async fn all_without_checks(
        &self,
        cluster: &Cluster,
        namespace: &str,
    ) -> BTreeMap<String, u32> {
        let over = CancellationToken::new();
        let _guard = over.clone().drop_guard();
        let by = self.discoveries.of(namespace);
        let mut pods = cluster.watch_objects_as(&kind("pods"), Some(namespace), |all| all, over);
        let mut counts = BTreeMap::new();
        while let Some(signal) = pods.recv().await {
            match signal {
                Signal::Restarted => counts.clear(),
                Signal::Applied(pod) => {
                    let pod: &SeenPod = &pod;
                    if is_over(&pod.0) || !checks_of(&pod.0, &self.config).is_empty() {
                        continue;
                    }
                    if let Ok(Some(gang)) = Gang::of(&pod.0, namespace, &by) {
                        *counts.entry(gang.id()).or_default() += 1;
                    }
                }
                // What cannot be listed now is counted the next time.
                Signal::Listed | Signal::Failing { .. } => break,
                Signal::Deleted(_) | Signal::Recovered => {}
            }
        }
        counts
    }

    /// Deletes the `ConfigMap` of a gang that has no pods any more.
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

/// Returns what is reported of a node whose pod a gang does not reach: as its own check would say that the
/// gang has not formed, so that the next one that passes there ends it.
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

/// Returns names for one line: the first of them, and how many more there are.
fn few<T: Borrow<str>>(names: &[T]) -> String {
    let first = names.get(..FEW).unwrap_or(names).join(", ");
    match names.len().saturating_sub(FEW) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// Returns whether what failed for one gang fails for all others now.
fn is_of_all(error: &ApiError) -> bool {
    matches!(
        error,
        ApiError::Unavailable { .. } | ApiError::Throttled { .. } | ApiError::NotLeading
    )
}

/// Takes in all that waits, so that a gang is looked at once for many changes.
fn drain<T>(signals: &mut mpsc::Receiver<Signal<T>>, mut take: impl FnMut(Signal<T>)) {
    while let Ok(signal) = signals.try_recv() {
        take(signal);
    }
}

fn kind(resource: &str) -> Kind {
    Kind::new("", "v1", resource)
}

#[cfg(test)]
mod tests;
