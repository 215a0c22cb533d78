//! Polls of the APIs of clouds: one loop for each cloud, and what the answers say about nodes.
//!
//! ```text
//! Poller --Polled--> Apis::take --> readings of the book, and the state of each source
//! ```
//!
//! A poll that fails makes its source blind, and nothing else. The next one covers its window, since the
//! book keeps the time of the last success.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use clouds::{Answer, Cloud, Environment, Failure, Instance, Since, Told, instance};
use futures::future;
use jiff::Timestamp;
use model::node::NodeView;
use notices::{Book, Clouds, Reading};
use runtime::backoff::Backoff;
use runtime::sources::{SourceHandle, SourceState, Sources};
use tokio::sync::{mpsc, watch};

/// Longest pause between two polls while all APIs of a cloud fail, if no longer one is configured.
const LONGEST_PAUSE: Duration = Duration::from_secs(10 * 60);
/// Most polls that wait for the monitor: one for each cloud.
const MOST_WAITING: usize = 4;

/// Result of asking the APIs of a cloud once.
struct Polled {
    /// Time at which the poll began.
    at: Timestamp,
    answers: Vec<Answer>,
}

/// Loop that asks the APIs of one cloud.
pub(super) struct Poller {
    cloud: Cloud,
    every: Duration,
    since: watch::Receiver<Since>,
    answers: mpsc::Sender<Polled>,
    clock: fn() -> Timestamp,
}

/// The APIs of all clouds, as the monitor has them.
pub(super) struct Apis {
    sources: BTreeMap<&'static str, Api>,
    answers: mpsc::Receiver<Polled>,
    since: watch::Sender<Since>,
    clock: fn() -> Timestamp,
}

/// One API.
struct Api {
    handle: SourceHandle,
    /// Failure that was last logged.
    failure: Option<Failure>,
    /// Number of notices of the last answer that cannot be understood.
    odd: u64,
}

/// Nodes by the names of their instances.
struct Index<'a> {
    nodes: BTreeMap<String, &'a str>,
}

// === impl Apis ===

impl Apis {
    /// Creates the loops, which [`ask`] runs, and lists the sources. `book` is the book of an earlier
    /// process.
    pub(super) fn new(
        config: &Clouds,
        environment: &Environment,
        book: &Book,
        sources: &Sources,
        clock: fn() -> Timestamp,
    ) -> Result<(Self, Vec<Poller>), Failure> {
        let (since, changes) = watch::channel(book.polled().clone());
        let (sender, answers) = mpsc::channel(MOST_WAITING);
        let mut listed = BTreeMap::new();
        let mut pollers = Vec::new();
        for (cloud, every) in Cloud::enabled(config, environment)? {
            for name in cloud.sources() {
                let handle = sources.add_optional(name, "not asked yet", clock());
                let api = Api {
                    handle,
                    failure: None,
                    odd: 0,
                };
                listed.insert(*name, api);
            }
            pollers.push(Poller {
                cloud,
                every: every.unsigned_abs(),
                since: changes.clone(),
                answers: sender.clone(),
                clock,
            });
        }
        let apis = Self {
            sources: listed,
            answers,
            since,
            clock,
        };
        Ok((apis, pollers))
    }

    /// Returns the names of all sources.
    pub(super) fn names(&self) -> BTreeSet<&'static str> {
        self.sources.keys().copied().collect()
    }

    /// Returns whether each API has answered once, now or to an earlier process.
    pub(super) fn have_answered(&self, book: &Book) -> bool {
        let mut names = self.sources.keys();
        names.all(|name| book.polled().contains_key(*name))
    }

    /// Brings the answers that have arrived into the book.
    pub(super) fn take<'a>(
        &mut self,
        book: &mut Book,
        nodes: &(impl Iterator<Item = &'a NodeView> + Clone),
        now: Timestamp,
    ) {
        for api in self.sources.values() {
            api.handle.beat((self.clock)());
        }
        let mut index = None;
        while let Ok(polled) = self.answers.try_recv() {
            let index = index.get_or_insert_with(|| Index::of(nodes.clone()));
            for answer in polled.answers {
                let told = match answer.told {
                    Ok(told) => told,
                    Err(failure) => {
                        self.failed(answer.source, failure, now);
                        continue;
                    }
                };
                let reading = index.reading(&told);
                self.answered(answer.source, &told, reading.notices.len(), now);
                book.poll(answer.source, &reading, polled.at, now);
            }
        }
    }

    /// Tells the loops the time of the last success of each source.
    pub(super) fn show(&self, book: &Book) {
        self.since.send_if_modified(|since| {
            let is_new = since != book.polled();
            if is_new {
                since.clone_from(book.polled());
            }
            is_new
        });
    }

    fn answered(&mut self, source: &str, told: &Told, of_nodes: usize, now: Timestamp) {
        let Some(api) = self.sources.get_mut(source) else {
            return;
        };
        if api.failure.take().is_some() {
            tracing::info!(source, "the API of a cloud answers again");
        }
        let before = std::mem::replace(&mut api.odd, told.odd);
        api.handle.update(now, |status| {
            status.state = SourceState::Following;
            let all = told.announced.len();
            status.detail = format!("{all} notices, {of_nodes} of them about nodes");
            status.records += 1;
            status.last_record_at = Some(now);
            // Each is counted once, not at every poll.
            status.malformed += told.odd.saturating_sub(before);
        });
    }

    fn failed(&mut self, source: &str, failure: Failure, now: Timestamp) {
        let Some(api) = self.sources.get_mut(source) else {
            return;
        };
        if api.failure.as_ref() != Some(&failure) {
            let err = &failure.what;
            tracing::error!(source, err, "the API of a cloud cannot be asked; retrying");
        }
        api.handle.update(now, |status| {
            status.state = SourceState::Failing;
            status.detail.clone_from(&failure.what);
        });
        api.failure = Some(failure);
    }
}

/// Runs the loops, until dropped.
pub(super) async fn ask(pollers: Vec<Poller>) {
    future::join_all(pollers.into_iter().map(Poller::run)).await;
    future::pending::<()>().await;
}

// === impl Poller ===

impl Poller {
    async fn run(mut self) {
        let mut backoff = Backoff::new(self.every, self.every.max(LONGEST_PAUSE));
        loop {
            let at = (self.clock)();
            let since = self.since.borrow().clone();
            let answers = self.cloud.poll(&since, at).await;
            let pause = pause(&answers, self.every, &mut backoff);
            if self.answers.send(Polled { at, answers }).await.is_err() {
                return;
            }
            tokio::time::sleep(pause).await;
        }
    }
}

/// Returns the pause after a poll: a growing one while all APIs fail, and never less than a server
/// asks for.
fn pause(answers: &[Answer], every: Duration, backoff: &mut Backoff) -> Duration {
    let pause = if answers.iter().any(|answer| answer.told.is_ok()) {
        backoff.reset();
        every
    } else {
        backoff.pause()
    };
    let asked = answers
        .iter()
        .filter_map(|answer| answer.told.as_ref().err()?.retry_after);
    asked.fold(pause, Duration::max)
}

// === impl Index ===

impl<'a> Index<'a> {
    fn of(nodes: impl Iterator<Item = &'a NodeView>) -> Self {
        let named = nodes.flat_map(|node| {
            let names = instance::names_of(node);
            names.into_iter().map(|name| (name, node.name.as_str()))
        });
        Self {
            nodes: named.collect(),
        }
    }

    /// Returns the node that is an instance.
    fn node(&self, instance: &Instance) -> Option<&'a str> {
        let mut names = instance.names().iter();
        names.find_map(|name| self.nodes.get(name).copied())
    }

    /// Returns what an API has said about nodes. Other instances are of no concern, until they are nodes.
    fn reading(&self, told: &Told) -> Reading {
        let notices = told.announced.iter().filter_map(|one| {
            let mut notice = one.notice.clone();
            self.node(&one.instance)?.clone_into(&mut notice.node);
            Some(notice)
        });
        let unseen = told.unseen.iter().filter_map(|one| self.node(one));
        Reading {
            notices: notices.collect(),
            complete: told.complete,
            unseen: unseen.map(str::to_owned).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
