use clouds::Announced;
use notices::{Kind, Notice, Phase};

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

fn clock() -> Timestamp {
    at(0)
}

fn node(name: &str, provider_id: &str) -> NodeView {
    let mut node = NodeView::unknown(name);
    node.provider_id = provider_id.into();
    node
}

fn announced(instance: &str) -> Announced {
    Announced {
        instance: Instance::aws(instance),
        notice: Notice {
            node: String::new(),
            event: format!("e-{instance}"),
            provider: "aws".to_owned(),
            resource: ("instance".to_owned(), instance.to_owned()),
            kind: Kind::Reboot,
            phase: Phase::Scheduled,
            word: "upcoming".to_owned(),
            start: Some(at(3600)),
            end: None,
            emergency: false,
            updated: None,
        },
    }
}

fn told(instances: &[&str]) -> Told {
    Told {
        announced: instances
            .iter()
            .map(|instance| announced(instance))
            .collect(),
        complete: true,
        ..Told::default()
    }
}

fn failure(retry_after: Option<u64>) -> Failure {
    Failure {
        what: "host/: status 500".to_owned(),
        retry_after: retry_after.map(Duration::from_secs),
    }
}

/// The monitor's side of one cloud, and the end that a loop has.
struct Parts {
    apis: Apis,
    answers: mpsc::Sender<Polled>,
    sources: Sources,
    book: Book,
    nodes: Vec<NodeView>,
}

impl Parts {
    fn new() -> Self {
        let sources = Sources::default();
        let (since, _) = watch::channel(Since::new());
        let (answers, receiver) = mpsc::channel(MOST_WAITING);
        let api = Api {
            handle: sources.add_optional("aws-ec2", "not asked yet", at(0)),
            failure: None,
            odd: 0,
        };
        let apis = Apis {
            sources: BTreeMap::from([("aws-ec2", api)]),
            answers: receiver,
            since,
            clock,
        };
        Self {
            apis,
            answers,
            sources,
            book: Book::default(),
            nodes: vec![
                node("a", "aws:///z/i-1"),
                node("b", "aws:///z/i-2"),
                node("c", ""),
            ],
        }
    }

    /// Takes an answer to a poll of this time, ten seconds later.
    fn take(&mut self, second: i64, told: Result<Told, Failure>) {
        let answer = Answer {
            source: "aws-ec2",
            told,
        };
        let polled = Polled {
            at: at(second),
            answers: vec![answer],
        };
        assert!(self.answers.try_send(polled).is_ok());
        self.apis
            .take(&mut self.book, &self.nodes.iter(), at(second + 10));
        self.apis.show(&self.book);
    }

    fn nodes_in_the_book(&self) -> Vec<(&str, bool)> {
        let records = self.book.records().iter();
        records
            .map(|record| (record.node.as_str(), record.vanished.is_some()))
            .collect()
    }

    fn since(&self) -> Option<Timestamp> {
        self.apis.since.borrow().get("aws-ec2").copied()
    }
}

#[test]
fn notices_about_nodes_enter_the_book_and_those_about_others_once_they_are_nodes() {
    let mut parts = Parts::new();
    parts.take(0, Ok(told(&["i-2", "i-9"])));
    assert_eq!(parts.nodes_in_the_book(), [("b", false)]);
    let status = parts.sources.statuses().remove(0);
    assert_eq!(status.state, SourceState::Following);
    assert_eq!(status.detail, "2 notices, 1 of them about nodes");
    parts.nodes.push(node("late", "aws:///z/i-9"));
    parts.take(60, Ok(told(&["i-2", "i-9"])));
    assert_eq!(parts.nodes_in_the_book(), [("b", false), ("late", false)]);
    parts.take(120, Ok(told(&["i-9"])));
    assert_eq!(parts.nodes_in_the_book(), [("b", true), ("late", false)]);
}

#[test]
fn a_poll_that_fails_blinds_its_source_changes_nothing_and_loses_no_window() {
    let mut parts = Parts::new();
    parts.take(-60, Err(failure(None)));
    assert!(!parts.apis.have_answered(&parts.book));
    parts.take(0, Ok(told(&["i-1"])));
    assert!(parts.apis.have_answered(&parts.book));
    assert_eq!(parts.since(), Some(at(0)), "the begin of the poll");
    let book = parts.book.clone();
    parts.take(60, Err(failure(None)));
    assert_eq!((parts.since(), &parts.book), (Some(at(0)), &book));
    let status = parts.sources.statuses().remove(0);
    assert_eq!(
        (status.state, status.detail.as_str()),
        (SourceState::Failing, "host/: status 500")
    );
    assert!(
        parts.sources.not_seen().is_empty(),
        "the process is ready without it"
    );
    parts.take(120, Ok(told(&["i-1"])));
    assert_eq!(parts.since(), Some(at(120)));
    assert_eq!(parts.sources.statuses()[0].state, SourceState::Following);
}

#[test]
fn what_cannot_be_understood_is_counted_once_and_hides_its_node() {
    let mut parts = Parts::new();
    parts.take(0, Ok(told(&["i-1", "i-2"])));
    let odd = |odd| Told {
        odd,
        unseen: vec![Instance::aws("i-2"), Instance::aws("i-9")],
        ..told(&["i-1"])
    };
    for (second, count, malformed) in [
        (60, 1, 1),
        (120, 1, 1),
        (180, 3, 3),
        (240, 0, 3),
        (300, 1, 4),
    ] {
        parts.take(second, Ok(odd(count)));
        assert_eq!(parts.sources.statuses()[0].malformed, malformed);
    }
    assert_eq!(parts.nodes_in_the_book(), [("a", false), ("b", false)]);
}

#[test]
fn the_pause_grows_while_all_fail_and_is_never_shorter_than_a_server_asks_for() {
    let every = Duration::from_secs(60);
    let mut backoff = Backoff::new(every, LONGEST_PAUSE);
    let answer = |told| Answer {
        source: "aws-ec2",
        told,
    };
    let (good, bad) = (|| answer(Ok(told(&[]))), |wait| answer(Err(failure(wait))));
    let mut next = |answers: &[Answer]| pause(answers, every, &mut backoff);
    assert_eq!(next(&[good(), bad(None)]), every);
    assert_eq!(next(&[good(), bad(Some(90))]).as_secs(), 90);
    let pauses: Vec<Duration> = (0..8).map(|_| next(&[bad(None), bad(None)])).collect();
    assert!(
        pauses[0] >= every / 2 && pauses[7] >= LONGEST_PAUSE / 2,
        "{pauses:?}"
    );
    assert!(
        pauses.iter().all(|pause| *pause <= LONGEST_PAUSE),
        "{pauses:?}"
    );
    assert_eq!(next(&[bad(Some(3000))]).as_secs(), 3000);
    assert_eq!(next(&[good()]), every);
}
