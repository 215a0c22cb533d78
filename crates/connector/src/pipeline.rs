//! The transformers at work, between the check of an event and its storing.
//!
//! What they do is decided in [`crate::transform`]; here are their state, the way to what is
//! known of nodes, and the counters. None of them waits for anything.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use crate::transform::Transformer;
use crate::transform::augment::Labels;
use crate::transform::dedup::{Batch, Deduplicator, Original, Treatment};
use crate::transform::overrides::Overrides;
use contract::HealthEvent;
use jiff::Timestamp;
use model::event::Record;
use model::node::NodeView;
use runtime::metrics::Metrics;
use store::{Appended, EventQuery, EventStore, NewEvent, Position, StoreError};

use crate::metrics::PipelineMetrics;

/// Events that are transformed before other tasks of the thread have their turn: expressions
/// take microseconds each, and a batch may have 10,000 events.
const TURN: usize = 128;
/// Most events that are read back at a start to know what was seen.
const RECALLED: usize = 20_000;
/// Events of one read of the store.
const PAGE: usize = 1_000;

/// A way to look nodes up. It is asked for each event, so it answers from memory, at once.
pub trait NodeLookup: Send + Sync + 'static {
    /// Returns the node of this name, if it is known.
    fn node(&self, name: &str) -> Option<Arc<NodeView>>;
}

/// The transformers that events go through, in their order.
pub struct Pipeline {
    stages: Vec<Stage>,
    metrics: PipelineMetrics,
}

/// A transformer with its state.
enum Stage {
    Augment {
        labels: Labels,
        nodes: Arc<dyn NodeLookup>,
    },
    Override {
        overrides: Overrides,
        /// Rules of which it was logged that they fail.
        said: Mutex<BTreeSet<String>>,
    },
    Deduplicate(Mutex<Deduplicator>),
}

/// A batch that has been transformed, until it is stored.
#[must_use]
pub(super) struct Passage {
    /// The notes of each stage that deduplicates.
    batches: Vec<Batch>,
    /// For each event the one that it repeats.
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
    /// Returns a pipeline of these transformers. `nodes` is where `MetadataAugmentor` looks.
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
                said: Mutex::default(),
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

    /// Makes known what was stored before a restart, so that it holds back repeats as
    /// before. Reads the events of the longest window, newest first, and at most
    /// [`RECALLED`]; older ones hold back nothing, which is never wrong.
    pub async fn recall(&self, store: &dyn EventStore, now: Timestamp) -> Result<(), StoreError> {
        let windows = self.deduplicators().map(|dedup| lock(dedup).window());
        let Some(from) = windows
            .max()
            .and_then(|window| now.checked_sub(window).ok())
        else {
            return Ok(());
        };
        let mut records: Vec<Record> = Vec::new();
        loop {
            let query = EventQuery {
                before: records.last().map(|record| record.seq),
                // What is history holds back nothing: it may come again, and counts then.
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

    /// Transforms a batch that came at `now`.
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

    /// Takes in what became of a batch: the answers of the sink, or `None` where it failed.
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
            Stage::Override { overrides, said } => {
                for NewEvent { event, .. } in events {
                    self.overridden(overrides, said, event);
                }
            }
            Stage::Deduplicate(dedup) => {
                let (mut dedup, Some(batch)) = (lock(dedup), batch) else {
                    return;
                };
                for (index, NewEvent { event, received_at }) in (first..).zip(events) {
                    // As after a restart: a report is as old as what it reports.
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
        said: &Mutex<BTreeSet<String>>,
        event: &mut HealthEvent,
    ) {
        let outcome = overrides.apply(event);
        for (rule, why) in outcome.failed {
            self.metrics.evaluation_errors.inc();
            if lock(said).insert(rule.to_owned()) {
                tracing::warn!(
                    rule,
                    err = why,
                    "an override cannot be evaluated for an event and is passed over; said once"
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
    /// Returns how many events repeat others.
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

    /// Returns the answers for all events, from those for the [`firsts`](Self::firsts) and their
    /// ids: a repeat is answered with what it repeats.
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
