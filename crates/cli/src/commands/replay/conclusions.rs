//! Analysis of replayed events. Its conclusions are events, as those of monitors are.

use std::collections::BTreeSet;
use std::path::Path;

use analysis::{Analyzer, Rule, Saying};
use anyhow::Context as _;
use contract::findings::MAX_FILE_BYTES;
use jiff::Timestamp;
use model::event::{EventRecord, event_id};
use model::position::Position;
use runtime::text_file;

/// Name of the rules of this program.
const BUILT_IN_NAME: &str = "built-in";
/// Most conclusions of one event.
const MAX_SAYINGS: usize = 10_000;

/// Rules that replayed events go through, and the nodes with events that came too late for them.
pub(crate) struct Analysis {
    analyzer: Analyzer,
    late: BTreeSet<String>,
}

/// Reads rules from a file, beside the built-in ones, or takes only those.
pub(super) fn load_rules(source: &str) -> anyhow::Result<Vec<Rule>> {
    if source == BUILT_IN_NAME {
        return Ok(analysis::built_in());
    }
    let text = text_file::read(Path::new(source), MAX_FILE_BYTES)
        .with_context(|| format!("cannot read the rules {source}"))?;
    Ok(analysis::parse(&text, source)?)
}

// === impl Analysis ===

impl Analysis {
    /// Reads rules from a file, beside the built-in ones, or takes only those.
    pub(super) fn load(source: &str) -> anyhow::Result<Self> {
        Ok(Self {
            analyzer: Analyzer::new(load_rules(source)?),
            late: BTreeSet::new(),
        })
    }

    /// Returns the number of nodes with events that came too late.
    pub(super) fn late(&self) -> usize {
        self.late.len()
    }

    /// Returns the events that follow from an event, at the time of that event.
    pub(super) fn events(&mut self, record: &EventRecord) -> Vec<EventRecord> {
        let now = record.created_at;
        self.analyzer.time(now);
        self.analyzer.record(record);
        // A replay does not keep the events for another look.
        self.late.extend(self.analyzer.late().iter().cloned());
        let sayings = self.analyzer.to_say(now, MAX_SAYINGS);
        let said = sayings.into_iter().map(|saying| {
            self.analyzer.said(&saying);
            event_of(saying, now)
        });
        said.collect()
    }
}

fn event_of(saying: Saying, now: Timestamp) -> EventRecord {
    EventRecord {
        seq: Position::START, // The replay assigns the position.
        id: event_id(&saying.event),
        created_at: now,
        event: saying.event,
    }
}
