//! Listens for events on a thread of its own, because to wait for them blocks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, mem};

use diagnosis::gpu::GpuEvent;

use crate::nvml::{Events, NvmlError};

/// Longest wait within the library, as the design of the NVML provider has it: so long it takes to stop.
const WAIT: Duration = Duration::from_secs(5);
/// Pause after a wait that failed.
const RETRY: Duration = Duration::from_secs(1);
/// Most events that are told within [`SPAN`]: far more than a broken GPU makes. Where more come, as
/// from a driver that does not pause, the driver keeps them, and drops what is too much.
const MOST: u32 = 32;
/// The time in which so many events are told.
const SPAN: Duration = Duration::from_secs(1);
/// After so long a wait counts as hung; drivers under load answer late by three quarters of that.
const HUNG: Duration = Duration::from_secs(60);

/// The thread that listens.
pub(super) struct Listening {
    stop: Arc<AtomicBool>,
    /// The time at which the last wait came back.
    back: Arc<Mutex<Instant>>,
    /// The news of the waits: an event or the end of failures (`None`), or why a wait failed.
    heard: Receiver<Option<String>>,
    /// The reason why no events can be heard, as of the last wait.
    pub(super) error: Option<String>,
    thread: Option<JoinHandle<()>>,
}

// === impl Listening ===

impl Listening {
    /// Begins to hand events to `say`.
    pub(super) fn begin(
        mut events: Events,
        say: impl Fn(GpuEvent) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let back = Arc::new(Mutex::new(Instant::now()));
        let (tell, heard) = channel();
        let thread = {
            let (stop, back) = (Arc::clone(&stop), Arc::clone(&back));
            thread::Builder::new()
                .name("events".to_owned())
                .spawn(move || listen(|longest| events.wait(longest), &stop, &back, &tell, say))?
        };
        Ok(Self {
            stop,
            back,
            heard,
            error: None,
            thread: Some(thread),
        })
    }

    /// Waits until `latest`, or only until `soonest` where something was heard.
    pub(super) fn wait(&mut self, soonest: Instant, latest: Instant) {
        let mut until = latest;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.heard.recv_timeout(left) {
                Ok(error) => {
                    self.error = error;
                    until = until.min(soonest);
                }
                Err(RecvTimeoutError::Timeout) => return,
                // The thread has ended, because nobody hears it; so will this one.
                Err(RecvTimeoutError::Disconnected) => return thread::sleep(left),
            }
        }
    }

    /// Fails where the library does not come back from a wait.
    pub(super) fn check(&self) -> Result<(), String> {
        let back = self.back.lock().unwrap_or_else(PoisonError::into_inner);
        if back.elapsed() < WAIT + HUNG {
            return Ok(());
        }
        let seconds = back.elapsed().as_secs();
        Err(format!(
            "nvmlEventSetWait_v2 has not come back for {seconds} s"
        ))
    }

    /// Ends the thread, and with it frees its events.
    pub(super) fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Err(_)) = ended {
            tracing::error!("the thread that listens for events has panicked");
        }
    }
}

impl Drop for Listening {
    /// Lets the thread end, and does not wait for it: it may hang.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// The number of events told within one [`SPAN`].
struct Pace {
    began: Instant,
    told: u32,
}

// === impl Pace ===

impl Pace {
    /// Returns how long to pause before one more is waited for, `now` that one was told.
    fn after(&mut self, now: Instant) -> Duration {
        if now.saturating_duration_since(self.began) >= SPAN {
            (self.began, self.told) = (now, 0);
        }
        self.told += 1;
        if self.told < MOST {
            return Duration::ZERO;
        }
        let rest = (self.began + SPAN).saturating_duration_since(now);
        (self.began, self.told) = (now + rest, 0);
        rest
    }
}

/// Waits for one event after the other until `stop`, or until nobody hears of them.
fn listen(
    mut wait: impl FnMut(Duration) -> Result<Option<GpuEvent>, NvmlError>,
    stop: &AtomicBool,
    back: &Mutex<Instant>,
    tell: &Sender<Option<String>>,
    say: impl Fn(GpuEvent) -> io::Result<()>,
) {
    let mut failed = false;
    let mut pace = Pace {
        began: Instant::now(),
        told: 0,
    };
    while !stop.load(Ordering::Relaxed) {
        let waited = wait(WAIT);
        *back.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        let had_failed = mem::replace(&mut failed, waited.is_err());
        let told = match waited {
            Ok(None) if !had_failed => continue,
            Ok(None) => tell.send(None),
            Ok(Some(event)) => {
                if say(event).is_err() {
                    return;
                }
                thread::sleep(pace.after(Instant::now()));
                tell.send(None)
            }
            Err(error) => {
                thread::sleep(RETRY);
                tell.send(Some(error.to_string()))
            }
        };
        if told.is_err() {
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
            told: 0,
        };
        let began = now;
        for _ in 0..10 * MOST {
            now += pace.after(now) + Duration::from_micros(10);
        }
        let took = (now - began).as_secs_f64();
        assert!((9.9..10.1).contains(&took), "{took}");
        // What comes now and then waits for nothing.
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
        let (stop, back) = (AtomicBool::new(false), Mutex::new(Instant::now()));
        let (tell, heard) = channel();
        let (said, events) = channel();
        let mut answers = [None, Some(event.clone()), None].into_iter();
        let mut waits = Vec::new();
        let wait = |longest: Duration| {
            waits.push(longest);
            stop.store(answers.len() == 1, Ordering::Relaxed);
            Ok(answers.next().flatten())
        };
        let say = |event| said.send(event).map_err(io::Error::other);
        listen(wait, &stop, &back, &tell, say);
        assert_eq!(waits, [Duration::from_secs(5); 3]);
        drop((tell, said));
        assert_eq!(heard.iter().collect::<Vec<_>>(), [None]);
        assert_eq!(events.iter().collect::<Vec<_>>(), [event]);
    }
}
