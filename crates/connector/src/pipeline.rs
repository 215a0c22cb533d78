//! Execution of the transformers, between the check of an event and its storing.
//!
//! The transformations are decided in [`crate::transform`]; this module has their state, the
//! access to node data, and the counters. No transformer waits for anything.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use crate::transform::Transformer;
use crate::transform::augment::Labels;
use crate::transform::dedup::{Batch, Deduplicator, Original, Treatment};
use crate::transform::overrides::Overrides;
use contract::HealthEvent;
use jiff::Timestamp;
use model::event::EventRecord;
use model::node::NodeView;
use runtime::metrics::Metrics;
use store::{Appended, EventQuery, EventStore, NewEvent, Position, StoreError};

use crate::metrics::PipelineMetrics;

/// Events that are transformed before other tasks of the thread get their turn: expressions
/// take microseconds each, and a batch may have 10,000 events.
const TURN: usize = 128;
/// Most events that are read back at startup to restore the deduplication.
const RECALLED: usize = 20_000;
/// Events per read of the store.
const PAGE: usize = 1_000;

/// Lookup of nodes. Called for each event, so it must answer from memory, without blocking.
pub trait NodeLookup: Send + Sync + 'static {
    /// Returns the node with this name, if it is known.
    fn node(&self, name: &str) -> Option<Arc<NodeView>>;
}

/// Transformers that events pass through, in order.
pub struct Pipeline {
    stages: Vec<Stage>,
    metrics: PipelineMetrics,
}

/// Transformer with its state.
enum Stage {
    Augment {
        labels: Labels,
        nodes: Arc<dyn NodeLookup>,
    },
    Override {
        overrides: Overrides,
        /// Rules whose failure has been logged.
        logged: Mutex<BTreeSet<String>>,
    },
    Deduplicate(Mutex<Deduplicator>),
}

/// Transformed batch that is not stored yet.
#[must_use]
pub(super) struct Passage {
    /// Records of each deduplicating stage.
    batches: Vec<Batch>,
    /// For each event, the event that it repeats.
    repeats: Vec<Option<Original>>,
}

// === impl NodeLookup ===

impl<F> NodeLookup for F
where
    F: Fn(&str) -> Option<Arc<NodeView>> + Send + Sync + 'static,
{
    fn node(&self, name: &str) -> Option<Arc<NodeView>> {
        self(name)
    }
}

// === impl Pipeline ===

impl Pipeline {
    /// Creates a pipeline of these transformers. `nodes` serves `MetadataAugmentor`.
    pub fn new(
        transformers: Vec<Transformer>,
        nodes: &Arc<dyn NodeLookup>,
        metrics: &Metrics,
    ) -> Self {
        let stage = |transformer| match transformer {
            Transformer::Augment(labels) => Stage::Augment {
                labels,
                nodes: Arc::clone(nodes),
            },
            Transformer::Override(overrides) => Stage::Override {
                overrides,
                logged: Mutex::default(),
            },
            Transformer::Deduplicate(settings) => {
                Stage::Deduplicate(Mutex::new(Deduplicator::new(settings)))
            }
        };
        Self {
            stages: transformers.into_iter().map(stage).collect(),
            metrics: PipelineMetrics::new(metrics),
        }
    }

    /// Restores the deduplication after a restart, from stored events. Reads the events of the
    /// longest window, newest first, and at most [`RECALLED`]; older ones hold back nothing,
    /// which is always safe.
    pub async fn recall(&self, store: &dyn EventStore, now: Timestamp) -> Result<(), StoreError> {
        let windows = self.deduplicators().map(|dedup| lock(dedup).window());
        let Some(from) = windows
            .max()
            .and_then(|window| now.checked_sub(window).ok())
        else {
            return Ok(());
        };
        let mut records: Vec<EventRecord> = Vec::new();
        loop {
            let query = EventQuery {
                before: records.last().map(|record| record.seq),
                // Events from the history hold back nothing: they may be sent again, and count
                // then.
                after: Some(store.identity().since),
                limit: PAGE,
                ..EventQuery::default()
            };
            let page = store.events(query).await?;
            let full = page.len() >= PAGE;
            let before = records.len();
            records.extend(page.into_iter().take_while(|one| one.created_at >= from));
            if !full || records.len() < before + PAGE || records.len() >= RECALLED {
                break;
            }
        }
        for dedup in self.deduplicators() {
            let mut dedup = lock(dedup);
            for record in records.iter().rev() {
                dedup.recall(record);
            }
        }
        Ok(())
    }

    /// Transforms a batch that arrived at `now`.
    pub(super) async fn apply(&self, events: &mut [NewEvent], now: Timestamp) -> Passage {
        let mut passage = Passage {
            batches: Vec::new(),
            repeats: vec![None; events.len()],
        };
        for stage in &self.stages {
            let mut batch = stage.begin(now);
            for (turn, events) in events.chunks_mut(TURN).enumerate() {
                self.turn(stage, events, turn * TURN, &mut batch, &mut passage.repeats);
                tokio::task::yield_now().await;
            }
            passage.batches.extend(batch);
        }
        passage
    }

    /// Records the outcome of a batch: the answers of the sink, or `None` if it failed.
    pub(super) fn done(&self, passage: Passage, appended: Option<&[Appended]>) {
        for (dedup, batch) in self.deduplicators().zip(passage.batches) {
            let mut dedup = lock(dedup);
            match appended {
                Some(appended) => dedup.stored(batch, |index| Some(appended.get(index)?.seq)),
                None => dedup.not_stored(batch),
            }
        }
    }

    /// Counts repeats that were left out.
    pub(super) fn left_out(&self, count: usize) {
        self.metrics.left_out.inc_by(count as u64);
    }

    fn turn(
        &self,
        stage: &Stage,
        events: &mut [NewEvent],
        first: usize,
        batch: &mut Option<Batch>,
        repeats: &mut [Option<Original>],
    ) {
        match stage {
            Stage::Augment { labels, nodes } => {
                for NewEvent { event, .. } in events {
                    match nodes.node(&event.node_name) {
                        Some(node) if labels.write(event, &node) == 0 => {}
                        Some(_) => self.metrics.unaugmented("no_room"),
                        None => self.metrics.unaugmented("unknown_node"),
                    }
                }
            }
            Stage::Override { overrides, logged } => {
                for NewEvent { event, .. } in events {
                    self.overridden(overrides, logged, event);
                }
            }
            Stage::Deduplicate(dedup) => {
                let (mut dedup, Some(batch)) = (lock(dedup), batch) else {
                    return;
                };
                for (index, NewEvent { event, received_at }) in (first..).zip(events) {
                    // A report is as old as its observation, as after a restart.
                    match dedup.judge(batch, index, event, *received_at) {
                        Treatment::Passes => {}
                        Treatment::NoRoom => {
                            self.metrics.not_remembered.inc();
                        }
                        Treatment::Repeats(original) => {
                            self.metrics.repeat(event);
                            if let Some(place) = repeats.get_mut(index) {
                                *place = Some(original);
                            }
                        }
                    }
                }
            }
        }
    }

    fn overridden(
        &self,
        overrides: &Overrides,
        logged: &Mutex<BTreeSet<String>>,
        event: &mut HealthEvent,
    ) {
        let outcome = overrides.apply(event);
        for (rule, why) in outcome.failed {
            self.metrics.evaluation_errors.inc();
            if lock(logged).insert(rule.to_owned()) {
                tracing::warn!(
                    rule,
                    err = why,
                    "an override cannot be evaluated for an event and is skipped; logged once per rule"
                );
            }
        }
        if let Some((rule, fields)) = outcome.applied {
            self.metrics.applied(rule, &fields);
        }
    }

    fn deduplicators(&self) -> impl Iterator<Item = &Mutex<Deduplicator>> {
        self.stages.iter().filter_map(|stage| match stage {
            Stage::Deduplicate(dedup) => Some(dedup),
            Stage::Augment { .. } | Stage::Override { .. } => None,
        })
    }
}

// === impl Stage ===

impl Stage {
    fn begin(&self, now: Timestamp) -> Option<Batch> {
        match self {
            Self::Deduplicate(dedup) => Some(lock(dedup).begin(now)),
            Self::Augment { .. } | Self::Override { .. } => None,
        }
    }
}

// === impl Passage ===

impl Passage {
    /// Returns the number of events that repeat others.
    pub(super) fn repeats(&self) -> usize {
        self.repeats.iter().flatten().count()
    }

    /// Returns the events that repeat no other.
    pub(super) fn firsts(&self, events: &[NewEvent]) -> Vec<NewEvent> {
        let firsts = events.iter().zip(&self.repeats);
        firsts
            .filter(|(_, repeats)| repeats.is_none())
            .map(|(event, _)| event.clone())
            .collect()
    }

    /// Returns the answers for all events, from those for the [`firsts`](Self::firsts) and
    /// their ids. A repeat gets the answer of the event that it repeats.
    pub(super) fn answers(&self, ids: Vec<String>, firsts: Vec<Appended>) -> Vec<Appended> {
        let by_id: HashMap<String, Position> = ids
            .into_iter()
            .zip(firsts.iter().map(|one| one.seq))
            .collect();
        let mut firsts = firsts.into_iter();
        let answers = self.repeats.iter().filter_map(|repeats| match repeats {
            None => firsts.next(),
            Some(original) => Some(Appended {
                id: original.id.clone(),
                seq: original.seq.or_else(|| by_id.get(&original.id).copied())?,
                new: false,
            }),
        });
        answers.collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
