//! Descriptions of metrics, for the page of all metrics, the rules and the dashboards. A
//! declaration by [`metrics!`](crate::metrics!) returns those of its metrics.

use std::fmt::Debug;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use serde::Serialize;

use super::{BoundedFamily, LegacyCounter};

/// Description of one metric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Description {
    /// Name without the suffix `_total` of a counter, which is added when it is written.
    pub name: String,
    /// Kind of the metric.
    pub kind: Kind,
    /// Names of its labels, in written order.
    pub labels: Vec<&'static str>,
    /// Meaning, without a full stop.
    pub help: String,
}

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A count that only grows; its name ends in `_total`.
    Counter,
    /// A count whose name is written unchanged.
    LegacyCounter,
    /// A value that rises and falls.
    Gauge,
    /// Counts of values, by size.
    Histogram,
}

/// Metrics of one part of the program, which have a table of their own on the page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Name of the table.
    pub name: &'static str,
    /// Metrics, in the order of the table.
    pub metrics: Vec<Description>,
}

/// Type of a metric with a kind and a number of labels.
pub trait Described {
    /// Kind of the metric.
    const KIND: Kind;
    /// Number of its labels.
    const LABELS: usize = 0;
}

/// Labels of a number that the type states.
pub trait LabelCount {
    /// Number of labels.
    const COUNT: usize;
}

// === impl Description ===

impl Description {
    /// Creates the description of a metric. The help may be a doc comment.
    pub fn new(kind: Kind, name: &str, labels: &[&'static str], help: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            labels: labels.to_vec(),
            help: help.trim().trim_end_matches('.').to_owned(),
        }
    }

    /// Returns the description of a metric whose name has this prefix and `_` before it.
    #[must_use]
    pub fn with_prefix(self, prefix: &str) -> Self {
        Self {
            name: format!("{prefix}_{}", self.name),
            ..self
        }
    }
}

// === impl Group ===

impl Group {
    /// Creates a group of these metrics.
    pub fn new(name: &'static str, metrics: impl IntoIterator<Item = Description>) -> Self {
        Self {
            name,
            metrics: metrics.into_iter().collect(),
        }
    }
}

// === impl Described ===

impl Described for Counter {
    const KIND: Kind = Kind::Counter;
}

impl Described for LegacyCounter {
    const KIND: Kind = Kind::LegacyCounter;
}

impl<N, A> Described for Gauge<N, A> {
    const KIND: Kind = Kind::Gauge;
}

impl Described for Histogram {
    const KIND: Kind = Kind::Histogram;
}

impl<L: LabelCount, M: Described, C> Described for Family<L, M, C> {
    const KIND: Kind = M::KIND;
    const LABELS: usize = L::COUNT;
}

impl<L: LabelCount, M: Described> Described for BoundedFamily<L, M> {
    const KIND: Kind = M::KIND;
    const LABELS: usize = L::COUNT;
}

// === impl LabelCount ===

impl<const N: usize, V> LabelCount for [(&'static str, V); N] {
    const COUNT: usize = N;
}
