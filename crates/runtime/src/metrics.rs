//! Metrics in the Prometheus text format.
//!
//! A component asks [`Metrics`] for each of its metrics by name and help, and keeps the result;
//! most declare them as a struct ([`metrics!`](crate::metrics!)). Names that NVSentinel uses are
//! kept, including those that do not end in `_total`: [`LegacyCounter`] writes them unchanged.
//!
//! Every metric has a [`Description`], and each room returns all of its own as [`Group`]s:
//! `cargo xtask generate` writes docs/metrics.md from them. A struct whose descriptions are not
//! among these is an unused function, which the compiler reports.

mod description;

use std::collections::HashSet;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Metric, Registry};

pub use description::{Described, Description, Group, Kind, LabelCount};

/// Labels of one metric of a family, each with its value.
pub type Labels<const N: usize, V = &'static str> = [(&'static str, V); N];

/// All metrics of a process. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Prefix of the names of all metrics that are registered here.
    prefix: String,
}

/// Counter whose name is written without the suffix `_total`, for existing dashboards. Its type
/// is given as unknown, which `PromQL` ignores.
#[derive(Clone, Debug, Default)]
pub struct LegacyCounter(Counter);

/// Family of metrics whose labels come from outside. Metrics live until the process ends, so
/// their number is limited: further labels count as `others`. Cheap to clone.
#[derive(Clone, Debug)]
pub struct BoundedFamily<L, M> {
    family: Family<L, M>,
    known: Arc<Mutex<HashSet<L>>>,
    room: usize,
    others: L,
}

/// Kind of metric that a field of [`metrics!`](crate::metrics!) can have. `With` are the
/// arguments that it needs besides name and help.
pub trait Registered<With = ()>: Sized {
    /// Creates and registers a metric of this kind.
    fn registered(metrics: &Metrics, name: &str, help: String, with: With) -> Self;
}

/// Declares a struct of metrics, and its functions `registered`, which registers them, and
/// `described`, which returns their descriptions.
///
/// Each field gives the name of its metric, and its doc comment is the help text, without the
/// last full stop. The names of the labels of a family stand in braces, and the arguments of a
/// histogram or a bounded family in brackets. A field without a name is no metric and starts
/// with its default.
///
/// ```
/// use gpuwarden_runtime::metrics::{Labels, Metrics};
/// use prometheus_client::metrics::{counter::Counter, family::Family, histogram::Histogram};
///
/// gpuwarden_runtime::metrics! {
///     /// Counts what is brewed.
///     struct Kettle {
///         /// Cups that were filled.
///         cups: Counter = "cups",
///         /// Leaves, by kind.
///         leaves: Family<Labels<1>, Counter> = "leaves" {kind},
///         /// How long a cup took.
///         time: Histogram = "cup_seconds"([1.0, 60.0]),
///     }
/// }
/// let metrics = Metrics::default();
/// let kettle = Kettle::registered(&metrics.with_prefix("kettle"));
/// kettle.cups.inc();
/// kettle.time.observe(2.0);
/// let text = metrics.encode();
/// assert!(text.contains("# HELP kettle_cups Cups that were filled.\n"), "{text}");
/// assert!(text.contains("kettle_cups_total 1\n"), "{text}");
/// assert!(text.contains("kettle_cup_seconds_bucket{le=\"60.0\"} 1\n"), "{text}");
/// assert_eq!(Kettle::described()[1].labels, ["kind"]);
/// ```
#[macro_export]
macro_rules! metrics {
    ($(#[$attribute:meta])* $visible:vis struct $name:ident {
        $(
            $(#[doc = $help:literal])*
            $field_visible:vis $field:ident: $kind:ty
                $(= $metric:literal $({$($label:ident),* $(,)?})? $(($($with:expr),* $(,)?))?)?
        ),* $(,)?
    }) => {
        $(#[$attribute])*
        $visible struct $name {
            $($(#[doc = $help])* $field_visible $field: $kind,)*
        }

        impl $name {
            $visible fn registered(metrics: &$crate::metrics::Metrics) -> Self {
                Self {
                    $($field: $crate::metrics!(
                        @field metrics, [$($help)*] $(, $metric, ($($($with,)*)?))?
                    ),)*
                }
            }

            $visible fn described() -> Vec<$crate::metrics::Description> {
                [$($crate::metrics!(
                    @description $kind, [$($help)*] $(, $metric, [$($($label)*)?])?
                )),*].into_iter().flatten().collect()
            }
        }
    };
    (@description $kind:ty, [$($help:literal)*], $metric:literal, [$($label:ident)*]) => {{
        const LABELS: &[&str] = &[$(stringify!($label)),*];
        const {
            assert!(
                LABELS.len() == <$kind as $crate::metrics::Described>::LABELS,
                "the number of labels differs from that of the type",
            );
        }
        Some($crate::metrics::Description::new(
            <$kind as $crate::metrics::Described>::KIND,
            $metric,
            LABELS,
            concat!($($help),*),
        ))
    }};
    (@description $kind:ty, [$($help:literal)*]) => {
        None
    };
    (@field $metrics:ident, [$($help:literal)*], $metric:literal, $with:expr) => {
        $crate::metrics::Registered::registered(
            $metrics,
            $metric,
            concat!($($help),*).trim().trim_end_matches('.').to_owned(),
            $with,
        )
    };
    (@field $metrics:ident, [$($help:literal)*]) => {
        Default::default()
    };
}

// === impl Metrics ===

impl Metrics {
    /// Returns the same metrics for a component whose metric names all begin with `prefix` and
    /// `_`.
    #[must_use]
    pub fn with_prefix(&self, prefix: &str) -> Self {
        Self {
            prefix: format!("{}{prefix}_", self.prefix),
            ..self.clone()
        }
    }

    /// Creates a family of metrics whose labels come from outside, with `room` for that many,
    /// and `others` for all further ones.
    pub fn bounded_family<L, M>(
        &self,
        description: &Description,
        room: usize,
        others: L,
    ) -> BoundedFamily<L, M>
    where
        L: Clone + Eq + Hash + EncodeLabelSet + Debug + Send + Sync + 'static,
        M: Default + Metric + TypedMetric,
    {
        BoundedFamily {
            family: self.add(description, Family::default()),
            known: Arc::default(),
            room,
            others,
        }
    }

    /// Adds an existing metric.
    pub fn add<M: Clone + Metric>(&self, description: &Description, metric: M) -> M {
        self.register(&description.name, description.help.clone(), metric)
    }

    fn register<M: Clone + Metric>(&self, name: &str, help: String, metric: M) -> M {
        let name = format!("{}{name}", self.prefix);
        self.with_registry(|registry| add(registry, name, help, metric))
    }

    /// Adds metrics whose values are read at each scrape.
    pub fn collect_from(&self, collector: impl Collector) {
        self.with_registry(|registry| registry.register_collector(Box::new(collector)));
    }

    pub(crate) fn with_registry<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the text of [`Metrics::encode`], one caller at a time: hundreds of concurrent
    /// scrapers must not occupy all threads.
    pub async fn encode_in_turn(&self) -> String {
        let _turn = self.turn.lock().await;
        self.encode()
    }

    /// Returns all metrics as text (`application/openmetrics-text`).
    pub fn encode(&self) -> String {
        let mut out = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        match text::encode(&mut out, &registry) {
            Ok(()) => out,
            // Writing into a String does not fail; a half-written page would mislead.
            Err(std::fmt::Error) => String::new(),
        }
    }
}

// === impl LegacyCounter ===

impl LegacyCounter {
    /// Adds one to the count.
    pub fn inc(&self) {
        self.0.inc();
    }

    /// Returns the current count.
    pub fn get(&self) -> u64 {
        self.0.get()
    }
}

impl TypedMetric for LegacyCounter {
    const TYPE: MetricType = MetricType::Unknown;
}

impl EncodeMetric for LegacyCounter {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        encoder.encode_gauge(&self.0.get())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Unknown
    }
}

// === impl BoundedFamily ===

impl<L, M> BoundedFamily<L, M>
where
    L: Clone + Eq + Hash,
    M: Clone,
{
    /// Returns the metric with these labels, or `others` if there is no room.
    pub fn get(&self, labels: &L) -> M {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room =
            known.contains(labels) || (known.len() < self.room && known.insert(labels.clone()));
        drop(known);
        if has_room {
            self.family.get_or_create_owned(labels)
        } else {
            self.others()
        }
    }

    /// Returns the metric that counts for all labels beyond the limit.
    pub fn others(&self) -> M {
        self.family.get_or_create_owned(&self.others)
    }
}

// === impl Registered ===

impl<M: Default + Clone + Metric> Registered for M {
    fn registered(metrics: &Metrics, name: &str, help: String, (): ()) -> Self {
        metrics.register(name, help, M::default())
    }
}

impl<I: IntoIterator<Item = f64>> Registered<(I,)> for Histogram {
    fn registered(metrics: &Metrics, name: &str, help: String, (buckets,): (I,)) -> Self {
        metrics.register(name, help, Self::new(buckets))
    }
}

/// Family of histograms. The argument creates a histogram.
impl<L> Registered<(fn() -> Histogram,)> for Family<L, Histogram, fn() -> Histogram>
where
    L: Clone + Hash + Eq + EncodeLabelSet + Debug + Send + Sync + 'static,
{
    fn registered(metrics: &Metrics, name: &str, help: String, with: (fn() -> Histogram,)) -> Self {
        metrics.register(name, help, Self::new_with_constructor(with.0))
    }
}

impl<L, M> Registered<(usize, L)> for BoundedFamily<L, M>
where
    L: Clone + Eq + Hash + EncodeLabelSet + Debug + Send + Sync + 'static,
    M: Default + Metric + TypedMetric,
{
    fn registered(metrics: &Metrics, name: &str, help: String, (room, others): (usize, L)) -> Self {
        Self {
            family: metrics.register(name, help, Family::default()),
            known: Arc::default(),
            room,
            others,
        }
    }
}

/// Bounded family of metrics without a default, such as histograms. The last argument creates a
/// metric.
impl<L, M> Registered<(usize, L, fn() -> M)> for BoundedFamily<L, M>
where
    L: Clone + Eq + Hash + EncodeLabelSet + Debug + Send + Sync + 'static,
    M: Metric + TypedMetric,
{
    fn registered(
        metrics: &Metrics,
        name: &str,
        help: String,
        (room, others, make): (usize, L, fn() -> M),
    ) -> Self {
        Self {
            family: metrics.register(name, help, Family::new_with_constructor(make)),
            known: Arc::default(),
            room,
            others,
        }
    }
}

/// Registers a metric and returns it.
pub(crate) fn add<M: Clone + Metric>(
    registry: &mut Registry,
    name: String,
    help: impl Into<String>,
    metric: M,
) -> M {
    registry.register(name, help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legacy_counters_keep_their_name() {
        let metrics = Metrics::default();
        let named = |kind, name| Description::new(kind, name, &[], "Help");
        let legacy = named(Kind::LegacyCounter, "xid_errors");
        metrics.add(&legacy, LegacyCounter::default()).inc();
        let counter = named(Kind::Counter, "events");
        metrics.add(&counter, Counter::<u64>::default()).inc();
        let text = metrics.encode();
        assert!(text.contains("\nxid_errors 1\n"), "{text}");
        assert!(text.contains("\nevents_total 1\n"), "{text}");
    }

    #[test]
    fn who_chooses_labels_cannot_make_series_without_end() {
        let metrics = Metrics::default();
        let labels = |node: &str| [("node", node.to_owned())];
        let repeats = Description::new(Kind::Counter, "repeats", &["node"], "Repeats");
        let bounded: BoundedFamily<_, Counter> =
            metrics.bounded_family(&repeats, 3, labels("other"));
        for node in 0..10 {
            bounded.get(&labels(&node.to_string())).inc();
            // Labels that were counted before stay.
            bounded.get(&labels("0")).inc();
        }
        bounded.others().inc();
        let text = metrics.encode();
        let mut series: Vec<&str> = text.lines().filter(|line| line.contains('{')).collect();
        series.sort_unstable();
        let series_of = |node: &str, count| format!("repeats_total{{node=\"{node}\"}} {count}");
        let expected = [("0", 11), ("1", 1), ("2", 1), ("other", 8)];
        let expected = expected.map(|(node, count)| series_of(node, count));
        assert_eq!(series, expected);
    }
}
