//! Reports of two windows, counted in parts of a window.
//!
//! The parts begin at the same times for everybody, so the result does not depend on when the first
//! report came.

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{EntryKey, Report};
use crate::text::Text;

/// Parts of a window. A window consists of the part of the newest report and those before it.
const PARTS: i64 = 12;

/// Parts with reports, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Parts(VecDeque<Part>);

/// Reports of a part of a window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Part {
    /// Number of the part since 1970.
    index: i64,
    reports: u64,
    /// First event of the part.
    id: Text,
}

// === impl Parts ===

impl Parts {
    /// Adds a report, and forgets what is older than the window before. Reports of a job in one
    /// event are one.
    pub(super) fn add(&mut self, window: SignedDuration, key: &EntryKey, report: &Report) {
        let index = part_of(key.at, window);
        let reports = if report.job.is_some() {
            1
        } else {
            report.count
        };
        match self.0.back_mut() {
            Some(part) if part.index == index => {
                part.reports = part.reports.saturating_add(reports);
            }
            _ => self.0.push_back(Part {
                index,
                reports,
                id: key.id.clone(),
            }),
        }
        self.0.retain(|part| part.index > index - 2 * PARTS);
    }

    /// Returns the reports of the window that ends at a time, and of the window before.
    pub(super) fn sums(&self, window: SignedDuration, at: Timestamp) -> (u64, u64) {
        let index = part_of(at, window);
        let sum = |newest: i64| {
            let within = |part: &&Part| part.index > newest - PARTS && part.index <= newest;
            let parts = self.0.iter().filter(within);
            parts.fold(0_u64, |total, part| total.saturating_add(part.reports))
        };
        (sum(index), sum(index - PARTS))
    }

    /// Returns the reports of all parts that are kept, no fewer than those of a window.
    pub(super) fn total(&self) -> u64 {
        let reports = self.0.iter().map(|part| part.reports);
        reports.fold(0, u64::saturating_add)
    }

    /// Returns the first event of each part of the window that ends at a time.
    pub(super) fn evidence(&self, window: SignedDuration, at: Timestamp) -> Vec<Text> {
        let index = part_of(at, window);
        let parts = self.0.iter().filter(|part| part.index > index - PARTS);
        parts.map(|part| part.id.clone()).collect()
    }
}

/// Returns the number of the part of a window that a time is in.
fn part_of(at: Timestamp, window: SignedDuration) -> i64 {
    let length = i64::try_from(window.as_millis() / i128::from(PARTS)).unwrap_or(i64::MAX);
    at.as_millisecond().div_euclid(length.max(1))
}
