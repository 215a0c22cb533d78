//! Reads events again that found no room in the fault book, once there is room.
//!
//! Each iteration of the task's loop reads one page: the feed may be long, and a sender that
//! fills the book must not delay new events.

use std::time::Duration;

use fleet::{Fleet, FleetInput};
use model::fault::Rereading;
use runtime::logging::chain;
use tokio::time::Instant;

use super::Feed;

/// Events per page of the feed.
const PAGE: usize = 1_000;
/// Pause between two readings, for a node whose faults open and close all the time.
const PAUSE: Duration = Duration::from_secs(10);

/// State of reading missed events again.
pub(super) struct Missed {
    under_way: Option<Rereading>,
    not_before: Instant,
    /// Node of the last reading.
    last: String,
}

// === impl Missed ===

impl Default for Missed {
    fn default() -> Self {
        Self {
            under_way: None,
            not_before: Instant::now(),
            last: String::new(),
        }
    }
}

impl Feed {
    /// Returns when the next page of missed events is read; `None` if no event was missed, or
    /// the book has no room.
    pub(in crate::quarantine) fn read_missed_at(&self, fleet: &Fleet) -> Option<Instant> {
        if self.missed.under_way.is_some() {
            return Some(Instant::now());
        }
        let next = fleet.book().read_again(&self.missed.last);
        next.map(|_| self.missed.not_before)
    }

    /// Reads a page of missed events, if due.
    pub(in crate::quarantine) async fn read_missed(&mut self, fleet: &mut Fleet) {
        let is_due = self.missed.not_before <= Instant::now();
        let under_way = self.missed.under_way.take();
        let begin = || {
            let book = fleet.book();
            book.read_again(&self.missed.last).filter(|_| is_due)
        };
        let Some(mut reading) = under_way.or_else(begin) else {
            return;
        };
        // Earlier events are history, which has no effect on the book.
        let after = reading.read_up_to().max(self.store.identity().since);
        let mut page = match self.store.feed(after, PAGE).await {
            Ok(page) => page,
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(
                    error,
                    "the events that found no room in the fault book cannot be read again yet"
                );
                self.missed.not_before = Instant::now() + PAUSE;
                return;
            }
        };
        let applied = fleet.book().applied();
        let is_last = page.last().is_none_or(|record| record.seq >= applied);
        for record in page.iter_mut().filter(|record| record.seq <= applied) {
            self.places.locate(&mut record.event);
            reading.record(record);
        }
        if !is_last {
            self.missed.under_way = Some(reading);
            return;
        }
        self.missed.not_before = Instant::now() + PAUSE;
        reading.node().clone_into(&mut self.missed.last);
        fleet.handle(FleetInput::Reread(Box::new(reading)), (self.clock)());
    }
}

#[cfg(test)]
mod tests {
    use model::fault::MAX_OPEN_FAULTS_PER_NODE;

    use super::*;
    use crate::quarantine::tests::Bench;

    #[tokio::test(start_paused = true)]
    async fn what_found_no_room_is_taken_in_when_there_is_some() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        let event = quarantine.fleet.book().faults("n1")[0].event.clone();
        let new = |code: usize, healthy: bool| {
            let mut event = event.clone();
            event.error_code = vec![code.to_string()];
            event.is_healthy = healthy;
            event.id.clear();
            event.id = model::event::event_id(&event);
            store::NewEvent {
                event,
                received_at: (quarantine.clock)(),
            }
        };
        let most = MAX_OPEN_FAULTS_PER_NODE;
        let reports = (1_000..1_000 + most + 9).map(|code| new(code, false));
        let reports: Vec<_> = reports.collect();
        let recoveries: Vec<_> = (1_000..1_000 + most / 2)
            .map(|code| new(code, true))
            .collect();
        quarantine.store.append(reports).await.unwrap();
        quarantine.catch_up().await;
        assert_eq!(quarantine.fleet.book().missed("n1"), 10);
        assert!(
            quarantine.feed.read_missed_at(&quarantine.fleet).is_none(),
            "there is no room"
        );
        quarantine.publish();
        let notes = quarantine.publishing.view().nodes[0].notes.join("; ");
        assert!(notes.contains("10 reports exceeded the limit"), "{notes}");

        quarantine.store.append(recoveries).await.unwrap();
        quarantine.catch_up().await;
        while quarantine.feed.read_missed_at(&quarantine.fleet).is_some() {
            tokio::time::sleep(PAUSE).await;
            quarantine.feed.read_missed(&mut quarantine.fleet).await;
        }
        assert_eq!(quarantine.fleet.book().missed("n1"), 0);
        let open = quarantine.fleet.book().faults("n1").len();
        assert_eq!(open, 1 + most / 2 + 9);
        assert!(quarantine.fleet.take_unsaved().nodes.contains("n1"));
        quarantine.publish();
        let notes = quarantine.publishing.view().nodes[0].notes.join("; ");
        assert!(!notes.contains("exceeded the limit"), "{notes}");
    }
}
