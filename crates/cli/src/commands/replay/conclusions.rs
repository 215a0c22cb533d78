//! Analysis of replayed events. Its conclusions are events, as those of monitors are.

use std::path::Path;

use analysis::{Analyzer, BUILT_IN, Change, Finding};
use anyhow::Context as _;
use contract::findings::MAX_FILE_BYTES;
use jiff::Timestamp;
use model::event::{EventRecord, event_id};
use model::position::Position;
use runtime::text_file;

/// Name of the rules of this program.
const BUILT_IN_NAME: &str = "built-in";

/// Rules that replayed events go through, and the number of events that came too late for them.
pub(crate) struct Analysis {
    analyzer: Analyzer,
    pub(super) too_late: u64,
}

// === impl Analysis ===

impl Analysis {
    /// Reads rules from a file, or takes the built-in ones.
    pub(super) fn load(source: &str) -> anyhow::Result<Self> {
        let rules = if source == BUILT_IN_NAME {
            analysis::parse(BUILT_IN, BUILT_IN_NAME)?
        } else {
            let text = text_file::read(Path::new(source), MAX_FILE_BYTES)
                .with_context(|| format!("cannot read the rules {source}"))?;
            analysis::parse(&text, source)?
        };
        Ok(Self {
            analyzer: Analyzer::new(rules),
            too_late: 0,
        })
    }

    /// Returns the events that follow from an event, at the time of that event.
    pub(super) fn events(&mut self, record: &EventRecord) -> Vec<EventRecord> {
        let now = record.created_at;
        let mut changes = self.analyzer.time(now);
        changes.extend(self.analyzer.record(record));
        let mut events = Vec::new();
        for change in changes {
            match change {
                Change::Opened(finding) => events.extend(self.event(&finding, now, None)),
                Change::Ended(finding) => events.extend(self.event(&finding, now, Some(now))),
                // A replay does not keep the events for another look.
                Change::TooLate(..) => self.too_late += 1,
            }
        }
        events
    }

    fn event(
        &self,
        finding: &Finding,
        now: Timestamp,
        ended: Option<Timestamp>,
    ) -> Option<EventRecord> {
        let event = finding.event(self.analyzer.rule_of(finding)?, ended);
        Some(EventRecord {
            seq: Position::START, // The replay assigns the position.
            id: event_id(&event),
            created_at: now,
            event,
        })
    }
}
