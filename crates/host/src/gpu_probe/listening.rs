//! Waits for driver events on a thread of its own, since the wait blocks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, mem};

use diagnosis::gpu::GpuEvent;

use crate::nvml::{Events, NvmlError};

/// Longest wait within the library, as in the design of the NVML provider. Stopping takes at
/// most this long.
const WAIT: Duration = Duration::from_secs(5);
/// Pause after a wait that failed.
const RETRY: Duration = Duration::from_secs(1);
/// Most events that are forwarded within [`SPAN`]: far more than a broken GPU makes. If more
/// come, as from a driver whose wait does not block, the driver queues them and drops the
/// excess.
const MOST: u32 = 32;
/// Time span that [`MOST`] limits.
const SPAN: Duration = Duration::from_secs(1);
/// Time after which a wait counts as hung. A driver under load returns late by three quarters
/// of this.
const HUNG: Duration = Duration::from_secs(60);

/// Handle of the listening thread.
pub(super) struct Listening {
    stop: Arc<AtomicBool>,
    /// Time when the last wait returned.
    returned: Arc<Mutex<Instant>>,
    /// Outcomes of the waits: `None` for an event or the first success after failures, else the
    /// error.
    outcomes: Receiver<Option<String>>,
    /// Error of the last wait, while no events can be received.
    pub(super) error: Option<String>,
    thread: Option<JoinHandle<()>>,
}

// === impl Listening ===

impl Listening {
    /// Starts a thread that passes events to `send`.
    pub(super) fn begin(
        mut events: Events,
        send: impl Fn(GpuEvent) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let returned = Arc::new(Mutex::new(Instant::now()));
        let (report, outcomes) = channel();
        let thread = {
            let (stop, returned) = (Arc::clone(&stop), Arc::clone(&returned));
            thread::Builder::new()
                .name("events".to_owned())
                .spawn(move || {
                    listen(
                        |longest| events.wait(longest),
                        &stop,
                        &returned,
                        &report,
                        send,
                    );
                })?
        };
        Ok(Self {
            stop,
            returned,
            outcomes,
            error: None,
            thread: Some(thread),
        })
    }

    /// Waits until `latest`, or only until `soonest` if the thread reports an event or an
    /// error.
    pub(super) fn wait(&mut self, soonest: Instant, latest: Instant) {
        let mut until = latest;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.outcomes.recv_timeout(left) {
                Ok(error) => {
                    self.error = error;
                    until = until.min(soonest);
                }
                Err(RecvTimeoutError::Timeout) => return,
                // The thread ended because the parent stopped reading; the next write here will
                // fail too.
                Err(RecvTimeoutError::Disconnected) => return thread::sleep(left),
            }
        }
    }

    /// Fails if the library does not return from a wait.
    pub(super) fn check(&self) -> Result<(), String> {
        let returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        if returned.elapsed() < WAIT + HUNG {
            return Ok(());
        }
        let seconds = returned.elapsed().as_secs();
        Err(format!(
            "nvmlEventSetWait_v2 has not returned for {seconds} s"
        ))
    }

    /// Ends the thread and waits for it, which frees its events.
    pub(super) fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Err(_)) = ended {
            tracing::error!("the thread that waits for events has panicked");
        }
    }
}

impl Drop for Listening {
    /// Signals the thread to end without waiting for it, since it may hang.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Number of events that were forwarded in the current [`SPAN`].
struct Pace {
    began: Instant,
    count: u32,
}

// === impl Pace ===

impl Pace {
    /// Records an event forwarded at `now`; returns how long to pause before the next wait.
    fn after(&mut self, now: Instant) -> Duration {
        if now.saturating_duration_since(self.began) >= SPAN {
            (self.began, self.count) = (now, 0);
        }
        self.count += 1;
        if self.count < MOST {
            return Duration::ZERO;
        }
        let rest = (self.began + SPAN).saturating_duration_since(now);
        (self.began, self.count) = (now + rest, 0);
        rest
    }
}

/// Waits for events until `stop` is set or the receiver is gone.
fn listen(
    mut wait: impl FnMut(Duration) -> Result<Option<GpuEvent>, NvmlError>,
    stop: &AtomicBool,
    returned: &Mutex<Instant>,
    report: &Sender<Option<String>>,
    send: impl Fn(GpuEvent) -> io::Result<()>,
) {
    let mut failed = false;
    let mut pace = Pace {
        began: Instant::now(),
        count: 0,
    };
    while !stop.load(Ordering::Relaxed) {
        let waited = wait(WAIT);
        *returned.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        let had_failed = mem::replace(&mut failed, waited.is_err());
        let reported = match waited {
            Ok(None) if !had_failed => continue,
            Ok(None) => report.send(None),
            Ok(Some(event)) => {
                if send(event).is_err() {
                    return;
                }
                thread::sleep(pace.after(Instant::now()));
                report.send(None)
            }
            Err(error) => {
                thread::sleep(RETRY);
                report.send(Some(error.to_string()))
            }
        };
        if reported.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use diagnosis::gpu::GpuEventKind;

    use super::*;

    #[test]
    fn events_that_come_without_pause_are_told_at_a_pace() {
        let mut now = Instant::now();
        let mut pace = Pace {
            began: now,
            count: 0,
        };
        let began = now;
        for _ in 0..10 * MOST {
            now += pace.after(now) + Duration::from_micros(10);
        }
        let took = (now - began).as_secs_f64();
        assert!((9.9..10.1).contains(&took), "{took}");
        // An occasional event needs no pause.
        for _ in 0..10 * MOST {
            now += SPAN / (MOST - 2);
            assert_eq!(pace.after(now), Duration::ZERO);
        }
    }

    #[test]
    fn each_wait_lasts_five_seconds_and_only_what_happens_is_told() {
        let event = GpuEvent {
            uuid: None,
            kind: GpuEventKind::DoubleBitEcc,
        };
        let (stop, returned) = (AtomicBool::new(false), Mutex::new(Instant::now()));
        let (report, outcomes) = channel();
        let (events_sender, events) = channel();
        let mut answers = [None, Some(event.clone()), None].into_iter();
        let mut waits = Vec::new();
        let wait = |longest: Duration| {
            waits.push(longest);
            stop.store(answers.len() == 1, Ordering::Relaxed);
            Ok(answers.next().flatten())
        };
        let send = |event| events_sender.send(event).map_err(io::Error::other);
        listen(wait, &stop, &returned, &report, send);
        assert_eq!(waits, [Duration::from_secs(5); 3]);
        drop((report, events_sender));
        assert_eq!(outcomes.iter().collect::<Vec<_>>(), [None]);
        assert_eq!(events.iter().collect::<Vec<_>>(), [event]);
    }
}
