//! Metrics of queued work, under the names that NVSentinel's connector gives to those of its
//! queues: the name of the queue is both a label and the suffix of each metric.
//!
//! The metrics need no actual queue. Work is added, begins and ends; dropped work has ended.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use crate::metrics::{Description, Kind, LegacyCounter, Metrics, add};

/// Metrics of one queue. Cheap to clone.
#[derive(Clone, Debug)]
pub struct WorkQueue(Arc<Inner>);

/// Piece of work, which ends when dropped.
#[derive(Debug)]
pub struct Work {
    queue: WorkQueue,
    added: Instant,
    /// Number of this work among the work in progress, and the time when it began.
    begun: Option<(u64, Instant)>,
}

#[derive(Debug)]
struct Inner {
    depth: Gauge,
    adds: LegacyCounter,
    latency: Histogram,
    duration: Histogram,
    retries: LegacyCounter,
    under_way: Arc<Mutex<UnderWay>>,
}

#[derive(Debug, Default)]
struct UnderWay {
    next: u64,
    since: BTreeMap<u64, Instant>,
}

/// Collector that computes the ages of work in progress at each scrape.
#[derive(Debug)]
struct Ages {
    queue: &'static str,
    what: &'static str,
    under_way: Arc<Mutex<UnderWay>>,
}

/// Names of the metrics of [`Ages`].
const OLDEST: &str = "longest_running_processor_seconds";
const UNFINISHED: &str = "unfinished_work_seconds";

// === impl WorkQueue ===

impl WorkQueue {
    /// Registers the metrics of `queue`. `what` names a piece of work in the help texts.
    pub fn new(metrics: &Metrics, queue: &'static str, what: &'static str) -> Self {
        // 10 ms to 20 s, as NVSentinel has it.
        let histogram = || Histogram::new(exponential_buckets(0.01, 2.0, 12));
        let labels = [("workqueue".into(), queue.into())];
        let [depth, adds, latency, duration, retries, ..] = Self::described(queue, what);
        let inner = metrics.with_registry(|registry| {
            let registry = registry.sub_registry_with_labels(labels.into_iter());
            let under_way = Arc::<Mutex<UnderWay>>::default();
            registry.register_collector(Box::new(Ages {
                queue,
                what,
                under_way: Arc::clone(&under_way),
            }));
            Inner {
                depth: add(registry, depth.name, depth.help, Gauge::default()),
                adds: add(registry, adds.name, adds.help, LegacyCounter::default()),
                latency: add(registry, latency.name, latency.help, histogram()),
                duration: add(registry, duration.name, duration.help, histogram()),
                retries: add(
                    registry,
                    retries.name,
                    retries.help,
                    LegacyCounter::default(),
                ),
                under_way,
            }
        });
        Self(Arc::new(inner))
    }

    /// Returns the descriptions of the metrics of `queue`.
    pub fn described(queue: &str, what: &str) -> [Description; 7] {
        [
            (Kind::Gauge, "depth", "Waiting or in progress"),
            (Kind::LegacyCounter, "adds_total", "Total number"),
            (
                Kind::Histogram,
                "latency_seconds",
                "Wait before the start of work",
            ),
            (Kind::Histogram, "work_duration_seconds", "Duration of work"),
            (
                Kind::LegacyCounter,
                "retries_total",
                "Number of failures that may be temporary",
            ),
            (Kind::Gauge, OLDEST, "Age of the oldest work in progress"),
            (Kind::Gauge, UNFINISHED, "Total age of all work in progress"),
        ]
        .map(|(kind, metric, help)| {
            let help = format!("{help}: {what}");
            Description::new(kind, &name(metric, queue), &["workqueue"], &help)
        })
    }

    /// Adds a piece of work, which waits to begin.
    #[must_use = "it ends when it is dropped"]
    pub fn add(&self) -> Work {
        self.0.adds.inc();
        self.0.depth.inc();
        Work {
            queue: self.clone(),
            added: Instant::now(),
            begun: None,
        }
    }

    /// Counts work that failed and is retried, by this process or by the requester.
    pub fn retry(&self) {
        self.0.retries.inc();
    }
}

// === impl Work ===

impl Work {
    /// Begins the work. A second call changes nothing.
    pub fn begin(&mut self) {
        if self.begun.is_some() {
            return;
        }
        let now = Instant::now();
        let waited = now.duration_since(self.added);
        self.queue.0.latency.observe(waited.as_secs_f64());
        let mut under_way = lock(&self.queue.0.under_way);
        let number = under_way.next;
        under_way.next = number.wrapping_add(1);
        under_way.since.insert(number, now);
        self.begun = Some((number, now));
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.queue.0.depth.dec();
        if let Some((number, since)) = self.begun {
            lock(&self.queue.0.under_way).since.remove(&number);
            let took = since.elapsed().as_secs_f64();
            self.queue.0.duration.observe(took);
        }
    }
}

// === impl Ages ===

impl Collector for Ages {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (oldest, all) = {
            let under_way = lock(&self.under_way);
            let ages = under_way.since.values().map(Instant::elapsed);
            ages.map(|age| age.as_secs_f64())
                .fold((0.0_f64, 0.0), |(oldest, all), age| {
                    (oldest.max(age), all + age)
                })
        };
        let [.., oldest_described, all_described] = WorkQueue::described(self.queue, self.what);
        for (described, value) in [(oldest_described, oldest), (all_described, all)] {
            let gauge = ConstGauge::new(value);
            let (name, help) = (&described.name, &described.help);
            let kind = gauge.metric_type();
            gauge.encode(encoder.encode_descriptor(name, help, None, kind)?)?;
        }
        Ok(())
    }
}

fn name(metric: &str, queue: &str) -> String {
    format!("platform_connector_workqueue_{metric}_{queue}")
}

fn lock(under_way: &Mutex<UnderWay>) -> std::sync::MutexGuard<'_, UnderWay> {
    under_way.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_while_it_waits_while_it_is_done_and_afterwards() {
        let metrics = Metrics::default();
        let queue = WorkQueue::new(&metrics, "q", "tests");
        let value = |metric: &str| {
            let start = format!("platform_connector_workqueue_{metric}{{workqueue=\"q\"}} ");
            let text = metrics.encode();
            let mut found = text.lines().filter_map(|line| line.strip_prefix(&start));
            found.next().expect(metric).to_owned()
        };
        let seconds = |metric: &str| -> f64 { value(metric).parse().unwrap() };
        let seen = || {
            [
                "depth_q",
                "adds_total_q",
                "latency_seconds_q_count",
                "work_duration_seconds_q_count",
                "retries_total_q",
            ]
            .map(value)
        };
        assert_eq!(seen(), ["0"; 5]);
        let (mut first, second) = (queue.add(), queue.add());
        assert_eq!(seen(), ["2", "2", "0", "0", "0"]);
        assert!(seconds("unfinished_work_seconds_q") <= 0.0);
        first.begin();
        first.begin();
        assert_eq!(seen(), ["2", "2", "1", "0", "0"]);
        assert!(seconds("unfinished_work_seconds_q") > 0.0);
        assert!(seconds("longest_running_processor_seconds_q") > 0.0);
        queue.retry();
        drop(first);
        // Work that was dropped before it began took no time.
        drop(second);
        assert_eq!(seen(), ["0", "2", "1", "1", "1"]);
        assert!(seconds("longest_running_processor_seconds_q") <= 0.0);
    }
}
