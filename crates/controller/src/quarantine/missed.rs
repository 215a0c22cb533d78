//! Reads events again that found no room in the fault book, once there is room.
//!
//! A page at a turn of the task's loop: the feed may be long, and whoever fills the book must
//! not be able to hold up what is new.

use std::time::Duration;

use fleet::FleetInput;
use model::fault::Rereading;
use runtime::logging::chain;
use tokio::time::Instant;

use super::Quarantine;

/// Events read from the feed in one turn.
const PAGE: usize = 1_000;
/// Pause between two readings: what comes and goes all the time is not read all the time.
const PAUSE: Duration = Duration::from_secs(10);

/// The state of reading again.
pub(super) struct Missed {
    under_way: Option<Rereading>,
    not_before: Instant,
    /// The node that was read last.
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

// === impl Quarantine ===

impl Quarantine {
    /// Returns when the next page is to be read; `None`: nothing was missed, or there is no
    /// room for it.
    pub(super) fn read_missed_at(&self) -> Option<Instant> {
        if self.missed.under_way.is_some() {
            return Some(Instant::now());
        }
        let next = self.fleet.book().read_again(&self.missed.last);
        next.map(|_| self.missed.not_before)
    }

    /// Reads a page of what was missed, where it is time.
    pub(super) async fn read_missed(&mut self) {
        let is_due = self.missed.not_before <= Instant::now();
        let under_way = self.missed.under_way.take();
        let begin = || {
            self.fleet
                .book()
                .read_again(&self.missed.last)
                .filter(|_| is_due)
        };
        let Some(mut reading) = under_way.or_else(begin) else {
            return;
        };
        // What is before is history, and counts no more.
        let after = reading.read_up_to().max(self.store.identity().since);
        let page = match self.store.feed(after, PAGE).await {
            Ok(page) => page,
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(
                    error,
                    "what found no room among the open faults cannot be read again yet"
                );
                self.missed.not_before = Instant::now() + PAUSE;
                return;
            }
        };
        let applied = self.fleet.book().applied();
        let is_last = page.last().is_none_or(|record| record.seq >= applied);
        for record in page.iter().filter(|record| record.seq <= applied) {
            reading.record(record);
        }
        if !is_last {
            self.missed.under_way = Some(reading);
            return;
        }
        self.missed.not_before = Instant::now() + PAUSE;
        reading.node().clone_into(&mut self.missed.last);
        self.take(FleetInput::Reread(Box::new(reading)));
    }
}

#[cfg(test)]
mod tests {
    use model::fault::MAX_OPEN_FAULTS_PER_NODE;

    use super::super::tests::Bench;
    use super::*;

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
        quarantine.take_in().await;
        assert_eq!(quarantine.fleet.book().missed("n1"), 10);
        assert!(quarantine.read_missed_at().is_none(), "there is no room");
        quarantine.publish();
        let notes = quarantine.publishing.view.borrow().nodes[0]
            .notes
            .join("; ");
        assert!(notes.contains("10 reports found no room"), "{notes}");

        quarantine.store.append(recoveries).await.unwrap();
        quarantine.take_in().await;
        while quarantine.read_missed_at().is_some() {
            tokio::time::sleep(PAUSE).await;
            quarantine.read_missed().await;
        }
        assert_eq!(quarantine.fleet.book().missed("n1"), 0);
        let open = quarantine.fleet.book().faults("n1").len();
        assert_eq!(open, 1 + most / 2 + 9);
        assert!(quarantine.fleet.take_unsaved().nodes.contains("n1"));
        quarantine.publish();
        let notes = quarantine.publishing.view.borrow().nodes[0]
            .notes
            .join("; ");
        assert!(!notes.contains("no room"), "{notes}");
    }
}
