//! Analysis of all stored events: a task of its own, which reads the feed, concludes by the rules
//! (`analysis`), and reports each conclusion as an event.
//!
//! ```text
//! store feed -> Analyzer -> evidence noted in the store -> connector -> store -> quarantine
//! ```
//!
//! The state is saved with its position in the feed every [`SAVE_EVERY`]. After a restart the later
//! events are read again, which changes nothing. Without a state that fits the rules, all stored
//! events are read, and only what differs from the conclusions reported so far is said.

mod metrics;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use analysis::{Analyzer, Rule, Saved, Saying, Text};
use cluster::KnownNodes;
use connector::{AcceptError, Caller, Connector};
use contract::HealthEvents;
use contract::keys::ANALYZER_AGENT;
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use runtime::backoff::Backoff;
use runtime::logging::chain;
use runtime::metrics::{Group, Metrics};
use store::{Checkpoint, EventQuery, EventStore, Position, StoreError};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use metrics::{AnalysisMetrics, RulesMetrics};

pub use rules::{RulesError, RulesFollower, RulesTextReceiver};

/// Name of the feed token.
const CONSUMER: &str = ANALYZER_AGENT;
/// Events per page of the feed.
const PAGE: usize = 1_000;
/// Pause between two saves of a changed state. After a restart the events of that time are read
/// again.
const SAVE_EVERY: Duration = Duration::from_secs(60);
/// Pause between two saves of an unchanged state. A consumer that does not save for long counts as
/// gone (`retention.rs`).
const SAVE_UNCHANGED_EVERY: Duration = Duration::from_secs(3600);
/// Pause between two updates of the metrics that show a state.
const SHOW_EVERY: Duration = Duration::from_secs(1);
/// Most conclusions that are reported at once.
const MAX_SAYINGS: usize = 100;
/// Newest events of a node that are read again because one came late. Older ones do not count then.
const MAX_REREAD: usize = 20_000;
/// Pause between two rounds of reading nodes again.
const REREAD_EVERY: Duration = Duration::from_secs(10);
/// Most nodes that are read again in a round.
const MAX_REREAD_NODES: usize = 10;
/// First and longest pause after a failure of the store or the connector.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// Longest wait for the list of the nodes.
const NODES_WITHIN: Duration = Duration::from_secs(60);
/// Pause between two looks for that list.
const LOOK_FOR_NODES: Duration = Duration::from_millis(100);
/// Pause between two counts of the nodes of each group.
const COUNT_NODES_EVERY: Duration = Duration::from_secs(10);
/// Longest pause between two looks, without an event.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Shortest pause between two looks at what ends with time.
const TICK: Duration = Duration::from_secs(1);

/// Settings and parts of the task.
pub struct AnalysisConfig {
    /// Store of the events.
    pub store: Arc<dyn EventStore>,
    /// Entry point for the conclusions.
    pub connector: Connector,
    /// Receiver of the rules in effect.
    pub rules: watch::Receiver<Arc<Vec<Rule>>>,
    /// Nodes with their labels, for rules that group nodes; `None` without a cluster.
    pub nodes: Option<KnownNodes>,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
    /// Sender of the position up to which the events are read, and what follows is stored.
    pub analysed: watch::Sender<Position>,
}

/// The task; see the [module](self).
pub struct Analysis {
    config: AnalysisConfig,
    analyzer: Analyzer,
    /// Labels that rules group nodes by.
    keys: Vec<String>,
    /// Position of the last event that was recorded.
    read: Position,
    reread_at: Instant,
    /// Time when the nodes were last counted.
    counted_at: Option<Instant>,
    saved_at: Instant,
    shown_at: Option<Instant>,
    /// Parts of the state that are being written; they are written again where that is cut off.
    saving: Vec<String>,
    /// Position of the saved state; `None` before the first one.
    saved: Option<Position>,
    /// True once all events that were stored at the start are recorded.
    begun: bool,
    retry: Backoff,
    metrics: AnalysisMetrics,
}

/// Returns the descriptions of the metrics of the analysis.
pub(crate) fn described_metrics() -> Group {
    let rules = RulesMetrics::described();
    Group::new(
        "analysis",
        AnalysisMetrics::described().into_iter().chain(rules),
    )
}

// === impl Analysis ===

impl Analysis {
    /// Creates the task, which [`Self::run`] starts.
    pub fn new(config: AnalysisConfig, metrics: &Metrics) -> Self {
        let now = Instant::now();
        Self {
            config,
            analyzer: Analyzer::default(),
            keys: Vec::new(),
            read: Position::START,
            reread_at: now,
            counted_at: None,
            saved_at: now,
            shown_at: None,
            saving: Vec::new(),
            saved: None,
            begun: false,
            retry: Backoff::new(RETRY.0, RETRY.1),
            metrics: AnalysisMetrics::new(metrics),
        }
    }

    /// Runs until `cancel`, or until the store is closed. Then saves the state.
    pub async fn run(mut self, cancel: CancellationToken) {
        let stop = cancel.clone();
        let mut rules = self.config.rules.clone();
        loop {
            let current = rules.borrow_and_update().clone();
            let ended = stop.run_until_cancelled(async {
                self.begin(&current).await?;
                self.follow(&mut rules).await
            });
            match ended.await {
                // The rules have changed.
                Some(Ok(())) => {}
                Some(Err(StoreError::Closed)) => return,
                Some(Err(error)) => {
                    self.metrics.error("store_error");
                    let err = chain(&error);
                    tracing::error!(err, "the analysis cannot read the store; trying again");
                    let pause = tokio::time::sleep(self.retry.pause());
                    stop.run_until_cancelled(pause).await;
                }
                None => break,
            }
        }
        if self.begun {
            drop(self.save().await);
        }
    }

    /// Takes over the saved state, or reads all events, and says what differs.
    async fn begin(&mut self, rules: &[Rule]) -> Result<(), StoreError> {
        let store = Arc::clone(&self.config.store);
        self.begun = false;
        self.config.analysed.send_replace(Position::START);
        self.analyzer = Analyzer::new(rules.to_vec());
        self.keys = rules.iter().flat_map(Rule::labels).cloned().collect();
        let since = store.identity().since;
        self.await_nodes().await;
        let restored = store.checkpoint(CONSUMER).await?.map(|found| {
            let saved = Saved {
                state: found.state,
                parts: found.parts,
            };
            self.saved = Some(found.token);
            let restored = self.analyzer.restore(&saved);
            (restored, found.token, saved.parts)
        });
        let replays = match restored {
            Some((Ok(()), token, _)) if token >= since => {
                self.read = token;
                None
            }
            Some((result, _, parts)) => {
                let why = result
                    .err()
                    .unwrap_or_else(|| "the store is new".to_owned());
                Some((why, parts))
            }
            None => Some(("there is none".to_owned(), BTreeMap::new())),
        };
        let reads_all = replays.is_some();
        if let Some((why, parts)) = replays {
            tracing::info!("the analysis reads all stored events, because of its state: {why}");
            self.analyzer = Analyzer::new(rules.to_vec());
            // The parts of before would be taken for those of the new state.
            self.analyzer.not_saved(parts.into_keys());
            self.read = since;
        }
        self.count_nodes();
        let until = *store.latest().borrow();
        while self.read < until && self.read_page().await? {
            // Only the backlog: conclusions are not complete before.
            if self.shown_at.is_none_or(|at| at.elapsed() >= SHOW_EVERY) {
                self.show_backlog().await;
            }
        }
        while !self.analyzer.late().is_empty() {
            self.reread().await?;
        }
        if reads_all {
            self.adopt().await?;
        }
        self.begun = true;
        self.retry.reset();
        Ok(())
    }

    /// Waits for the labels of the nodes, if a rule needs them: the events that are read now get them
    /// only once.
    async fn await_nodes(&self) {
        let Some(nodes) = self.config.nodes.as_ref().filter(|_| !self.keys.is_empty()) else {
            return;
        };
        let until = Instant::now() + NODES_WITHIN;
        while !nodes.is_complete() {
            if until <= Instant::now() {
                tracing::warn!("the analysis begins without the labels of the nodes");
                return;
            }
            tokio::time::sleep(LOOK_FOR_NODES).await;
        }
    }

    /// Passes the nodes to the analyzer, which counts them for rules with a share.
    fn count_nodes(&mut self) {
        let shares = self
            .analyzer
            .rules()
            .iter()
            .any(|rule| rule.share.is_some());
        let nodes = self.config.nodes.as_ref();
        if let Some(nodes) = nodes.filter(|nodes| shares && nodes.is_complete()) {
            let nodes = nodes.all();
            let nodes = nodes.iter().map(|node| (node.name.as_str(), &node.labels));
            self.analyzer.set_nodes(&nodes.collect::<Vec<_>>());
        }
        self.counted_at = Some(Instant::now());
    }

    /// Keeps conclusions whose evidence is not stored any longer.
    async fn adopt(&mut self) -> Result<(), StoreError> {
        for (group, evidence) in self.analyzer.unconfirmed() {
            let found = self.config.store.statuses(strings(&evidence)).await?;
            if found.iter().any(Option::is_none) {
                self.analyzer.adopt(&group);
            }
        }
        Ok(())
    }

    /// Follows the feed until the rules change.
    async fn follow(
        &mut self,
        rules: &mut watch::Receiver<Arc<Vec<Rule>>>,
    ) -> Result<(), StoreError> {
        let mut hints = self.config.store.latest();
        loop {
            while self.read_page().await? {}
            let counted = self.counted_at.map(|at| at.elapsed());
            if counted.is_none_or(|ago| ago >= COUNT_NODES_EVERY) {
                self.count_nodes();
            }
            if !self.analyzer.late().is_empty() && self.reread_at <= Instant::now() {
                self.reread().await?;
            }
            let now = (self.config.clock)();
            self.analyzer.time(now);
            let mut wake = Instant::now() + LOOK_EVERY;
            if self.say(now).await? {
                self.retry.reset();
                if self.analyzer.late().is_empty() {
                    let (read, analysed) = (self.read, &self.config.analysed);
                    analysed.send_if_modified(|upto| std::mem::replace(upto, read) != read);
                }
            } else {
                wake = Instant::now() + self.retry.pause();
            }
            if self.save_due() {
                self.save().await?;
            }
            if self.shown_at.is_none_or(|at| at.elapsed() >= SHOW_EVERY) {
                self.show().await;
            }
            if let Some(next) = self.analyzer.next_time() {
                let until = next.duration_since(now).max(SignedDuration::ZERO);
                wake = wake.min(Instant::now() + until.unsigned_abs().max(TICK));
            }
            if !self.analyzer.late().is_empty() {
                wake = wake.min(self.reread_at);
            }
            tokio::select! {
                changed = hints.changed() => changed.map_err(|_| StoreError::Closed)?,
                changed = rules.changed() => {
                    changed.map_err(|_| StoreError::Closed)?;
                    drop(self.save().await);
                    return Ok(());
                }
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    /// Reads one page of the feed. Returns true if there may be more.
    async fn read_page(&mut self) -> Result<bool, StoreError> {
        let page = self.config.store.feed(self.read, PAGE).await?;
        let more = page.len() == PAGE;
        for mut record in page {
            let began = Instant::now();
            self.read = record.seq;
            self.metrics.received(&record.event.node_name);
            self.add_labels(&mut record);
            self.analyzer.record(&record);
            self.metrics.processed(began.elapsed());
        }
        for error in self.analyzer.take_errors() {
            self.metrics.error("expression_error");
            tracing::debug!(error, "an expression of a rule cannot be evaluated");
        }
        Ok(more)
    }

    /// Adds the labels that rules group nodes by to an event of the node.
    fn add_labels(&self, record: &mut EventRecord) {
        let nodes = self.config.nodes.as_ref();
        let Some(node) = nodes.and_then(|nodes| nodes.get(&record.event.node_name)) else {
            return;
        };
        for key in &self.keys {
            if let Some(value) = node.labels.get(key) {
                let known = record.event.metadata.entry(key.clone());
                known.or_insert_with(|| value.clone());
            }
        }
    }

    /// Reads all events of some nodes again, because one came later than the analyzer keeps them.
    async fn reread(&mut self) -> Result<(), StoreError> {
        self.reread_at = Instant::now() + REREAD_EVERY;
        for _ in 0..MAX_REREAD_NODES {
            let Some(node) = self.analyzer.late().first().cloned() else {
                return Ok(());
            };
            let records = self.events_of(&node).await?;
            self.analyzer.rebuild(&node, &records);
            self.metrics.rebuilds.inc();
        }
        Ok(())
    }

    /// Returns the newest events of a node up to the position that was read; of all nodes for an
    /// empty name.
    async fn events_of(&self, node: &str) -> Result<Vec<EventRecord>, StoreError> {
        let mut records: Vec<EventRecord> = Vec::new();
        // Events from before another store was in use do not count.
        let since = self.config.store.identity().since;
        let mut before = None;
        loop {
            let query = EventQuery {
                node: (!node.is_empty()).then(|| node.to_owned()),
                before,
                limit: PAGE,
                ..EventQuery::default()
            };
            let page = self.config.store.events(query).await?;
            let Some(last) = page.last() else {
                break;
            };
            before = Some(last.seq);
            records.extend(
                page.into_iter()
                    .filter(|record| since < record.seq && record.seq <= self.read),
            );
            if records.len() >= MAX_REREAD {
                tracing::warn!(
                    node,
                    "only its newest {MAX_REREAD} events count in the analysis"
                );
                break;
            }
        }
        for record in &mut records {
            self.add_labels(record);
        }
        Ok(records)
    }

    /// Reports what changed. Returns false if that has to be tried again.
    async fn say(&mut self, now: Timestamp) -> Result<bool, StoreError> {
        loop {
            let sayings = self.analyzer.to_say(now, MAX_SAYINGS);
            if sayings.is_empty() {
                return Ok(true);
            }
            for saying in &sayings {
                if let Some(finding) = &saying.finding {
                    let evidence = strings(&finding.conclusion.evidence);
                    let store = &self.config.store;
                    store.note_conclusion(evidence, finding.note()).await?;
                }
            }
            let events = sayings.iter().map(|saying| saying.event.clone()).collect();
            let batch = HealthEvents { version: 1, events };
            match self.config.connector.accept(batch, &Caller::Monitor).await {
                Ok(_) => {}
                Err(AcceptError::Refused { refused, .. }) => {
                    self.metrics.publishing_error("event_rejected");
                    for one in refused {
                        tracing::error!(problem = %one.problem, "a conclusion is refused");
                    }
                }
                Err(error) => {
                    self.metrics
                        .publishing_error("event_publishing_to_UDS_error");
                    let err = chain(&error);
                    tracing::warn!(err, "conclusions cannot be reported; trying again");
                    return Ok(false);
                }
            }
            for saying in &sayings {
                self.analyzer.said(saying);
                self.metrics.said(saying);
                log(saying);
            }
        }
    }

    fn save_due(&self) -> bool {
        let is_changed = self.saved != Some(self.read);
        let pause = if is_changed {
            SAVE_EVERY
        } else {
            SAVE_UNCHANGED_EVERY
        };
        self.saved.is_none() || self.saved_at.elapsed() >= pause
    }

    /// Saves the state with its position.
    async fn save(&mut self) -> Result<(), StoreError> {
        self.saved_at = Instant::now();
        let cut_off = std::mem::take(&mut self.saving);
        self.analyzer.not_saved(cut_off);
        let saved = self.analyzer.save();
        self.saving = saved.parts.keys().cloned().collect();
        let checkpoint = Checkpoint {
            token: self.read,
            state: saved.state,
            parts: saved.parts,
        };
        match self
            .config
            .store
            .save_checkpoint(CONSUMER, checkpoint)
            .await
        {
            Ok(()) => {
                self.saved = Some(self.read);
                self.saving.clear();
                Ok(())
            }
            Err(error) => {
                self.metrics.error("save_error");
                Err(error)
            }
        }
    }

    /// Sets the metrics that show a state.
    async fn show(&mut self) {
        self.show_backlog().await;
        let groups = self.analyzer.groups();
        self.metrics.state(groups, self.analyzer.refused());
        let open = self.analyzer.open().map(|finding| finding.rule.as_str());
        self.metrics.open(self.analyzer.rules(), open);
    }

    /// Sets the metric of the events that are not read yet, if the store can count them.
    async fn show_backlog(&mut self) {
        self.shown_at = Some(Instant::now());
        let is_behind = *self.config.store.latest().borrow() > self.read;
        let backlog = if is_behind {
            self.config.store.behind(self.read).await
        } else {
            Ok(0)
        };
        if let Ok(backlog) = backlog {
            self.metrics.backlog(backlog);
        }
    }
}

fn strings(ids: &[Text]) -> Vec<String> {
    ids.iter().map(|id| id.to_string()).collect()
}

/// Logs a conclusion or its end.
fn log(saying: &Saying) {
    let event = &saying.event;
    let rule = &event.check_name;
    let node = &event.node_name;
    if saying.finding.is_some() {
        tracing::info!(node, rule, message = event.message, "concluded from events");
    } else {
        tracing::info!(node, rule, "a conclusion has ended");
    }
}
