//! Looking at a node: what its faults ask for, what its session says, and what follows.

use std::sync::Arc;

use contract::keys;
use domain::assess::{Desired, Verdict, assess};
use domain::brake::Hold;
use domain::fault::Fault;
use domain::journal::EntryKind;
use domain::node::NodeView;
use domain::policy::Policy;
use domain::session::ownership::Ownership;
use domain::session::{Marks, Phase, ownership, step};
use serde_json::Value;

use super::claim::Claim;
use super::fleet::NodeEntry;
use super::{Mode, Owns, Quarantine};

/// Faults whose verdicts one journal entry tells.
const MAX_VERDICTS: usize = 50;

impl Quarantine {
    /// Looks at all nodes that anything has happened to.
    pub(super) async fn look(&mut self) {
        // Before all is known, nothing follows from what is known.
        if !self.caught_up || !self.listed {
            return;
        }
        let Some(policy) = self.policy.clone() else {
            return;
        };
        let mut looked_at = Vec::new();
        while let Some(name) = self.dirty.pop_first() {
            self.publishing.unshown.insert(name.clone());
            if !self.part_from_machine(&name).await {
                continue;
            }
            self.forget_notices(&name);
            if self.mode != Mode::Observe {
                self.look_at(&name, &policy).await;
                looked_at.push(name.clone());
            }
            let entry = self.nodes.get(&name);
            // Of one that the cluster lacks it is remembered when its faults are dropped.
            if self.cluster.is_none() || entry.is_some_and(|entry| entry.view.is_some()) {
                self.remember_wake(&name);
            }
            let entry = self.nodes.get_mut(&name);
            if let Some((since, events)) = entry.and_then(|entry| entry.undecided.take()) {
                self.metrics.handled(events, since.elapsed());
            }
        }
        self.let_go(&policy);
        for name in looked_at {
            self.tell(&name);
        }
    }

    /// Drops the node's notices of more than a day ago, but for those for which it is out.
    fn forget_notices(&mut self, name: &str) {
        let now = (self.clock)();
        let is_old = |fault: &Fault| fault.notice_until().is_some_and(|until| until <= now);
        if !self.book.faults(name).iter().any(is_old) {
            return;
        }
        let view = self.nodes.get(name).and_then(NodeEntry::effective_view);
        let listed = view.and_then(|view| Ownership::read(&view));
        let listed = listed.map_or(Vec::new(), |own| own.events);
        let holds = |id: &str| listed.iter().any(|event| event.id == id);
        if self.book.forget_notices(name, now, holds) {
            self.saving.unsaved.insert(name.to_owned());
        }
    }

    /// Says on the board what is known of the node. Not while a patch of it is under way: the
    /// API server works on both writes of one object in turn, and the cordon would wait for
    /// what only tells of it. It is looked at again when the answer is there.
    fn tell(&self, name: &str) {
        let Some(board) = &self.board else {
            return;
        };
        if self.nodes.get(name).is_some_and(|entry| entry.in_flight) {
            return;
        }
        match self.nodes.get(name).and_then(|entry| entry.view.as_ref()) {
            Some(view) => {
                let (faults, heard) = (self.book.faults(name), self.book.heard(name));
                board.post(faults, heard, view, (self.clock)());
            }
            None => board.gone(name),
        }
    }

    async fn look_at(&mut self, name: &str, policy: &Policy) {
        let Some(entry) = self.nodes.get(name) else {
            return;
        };
        if entry.in_flight {
            return; // Looked at again when the answer is there.
        }
        let Some(view) = entry.effective_view() else {
            self.brake.forget(name);
            self.forget_statuses(name);
            if self.cluster.is_some() {
                self.look_at_missing(name, policy);
            }
            return;
        };
        self.take_in_times(&view);
        let claim = self.claim(&view).await;
        self.left_alone(&view, claim);
        if claim != Claim::Ours {
            self.brake.forget(name);
            if claim == Claim::Anothers {
                self.forget_statuses(name);
            }
            self.schedule_publish();
            return;
        }
        self.note_choice(&view, policy);
        let dismissed =
            ownership::dismissal(&view, self.dropped_at(), &self.entry(name).session.times);
        let faults = self.book.faults(name);
        let desired = assess(faults, policy, &view, dismissed);
        self.note_statuses(&view, &desired);
        if desired.wanted() && self.entry(name).in_service() {
            // To be taken out: the brake has a say. It is asked about all at once.
            self.brake.wait(name, desired);
            return;
        }
        self.brake.forget(name);
        // A patch of which nobody knows may still be made: that goes on counting.
        self.entry(name).hold = None;
        self.drive(name, &view, policy, &desired, None);
    }

    /// Steps the session of a node, and carries out what follows.
    pub(super) fn drive(
        &mut self,
        name: &str,
        view: &Arc<NodeView>,
        policy: &Policy,
        desired: &Desired,
        hold: Option<&Hold>,
    ) {
        let now = (self.clock)();
        let marks = self.marks(policy);
        let entry = self.entry(name);
        let step = step(&entry.session, desired, Some(view), &marks, hold, now);
        let changed = entry.session != step.session;
        entry.session = step.session;
        let session = entry.session.id.clone();
        if changed {
            self.session_changed(name);
        }
        let entry = self.entry(name);
        if entry.verdicts != desired.verdicts {
            entry.verdicts.clone_from(&desired.verdicts);
            self.metrics.evaluated(policy.rule_sets_of(view), desired);
            let text = rules_text(&desired.verdicts);
            self.note(
                name,
                session.as_deref(),
                EntryKind::Rules,
                text,
                Value::Null,
            );
        }
        for note in step.notes {
            tracing::info!(node = name, kind = note.kind.name(), "{}", note.text);
            self.note(name, session.as_deref(), note.kind, note.text, note.detail);
        }
        if let Some(patch) = step.patch {
            self.carry_out(name, view, patch, desired);
        }
        self.remember_wake(name);
        self.schedule_publish();
    }

    /// Takes in the times that others have written on a node, and says once which of them lie
    /// in the future.
    fn take_in_times(&mut self, view: &NodeView) {
        let now = (self.clock)();
        let entry = self.entry(&view.name);
        let before = entry.session.times.clone();
        entry.session.take_in_times(view, now);
        if entry.session.times == before {
            return;
        }
        entry.read_own();
        let notes: Vec<String> = entry.session.times.notes().collect();
        self.brake.changed();
        self.session_changed(&view.name);
        for text in notes {
            tracing::warn!(node = view.name, "{text}");
            self.note(&view.name, None, EntryKind::Attention, text, Value::Null);
        }
    }

    /// How our sessions mark a node.
    fn marks(&self, policy: &Policy) -> Marks {
        Marks {
            maker: Some(self.owns.maker()),
            store: match self.owns {
                Owns::Node(_) => Some(self.store.identity().id),
                Owns::All => None,
            },
            ..policy.marks()
        }
    }

    /// Takes another policy in: all nodes are looked at.
    pub(super) fn policy_changed(&mut self) {
        let policy = self.policies.borrow().clone();
        let before = std::mem::replace(&mut self.policy, policy.clone());
        self.touch_all();
        self.brake.changed();
        self.schedule_publish();
        let (Some(policy), Some(_)) = (policy, before) else {
            return; // The first one: it has changed nothing.
        };
        let names: Vec<&str> = policy
            .rule_sets
            .iter()
            .map(|set| set.name.as_str())
            .collect();
        let text = format!(
            "the policy {} has changed; its rule sets are: {}",
            policy.source,
            names.join(", ")
        );
        let concerned: Vec<String> = self
            .nodes
            .iter()
            .filter(|(name, entry)| {
                entry.session.phase != Phase::Idle || !self.book.faults(name).is_empty()
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in concerned {
            let session = self.entry(&name).session.id.clone();
            self.note(
                &name,
                session.as_deref(),
                EntryKind::Rules,
                text.clone(),
                Value::Null,
            );
        }
    }

    /// Says once that a node names a policy that does not exist.
    fn note_choice(&mut self, view: &NodeView, policy: &Policy) {
        let unknown = policy.unknown_choice(view).map(str::to_owned);
        let entry = self.entry(&view.name);
        let news = entry.unknown_policy != unknown;
        entry.unknown_policy.clone_from(&unknown);
        if let Some(unknown) = unknown.filter(|_| news) {
            let text = unknown_policy(&unknown);
            tracing::warn!(node = view.name, "{text}");
            self.note(&view.name, None, EntryKind::Attention, text, Value::Null);
        }
    }

    /// A node with faults that the cluster does not know.
    fn look_at_missing(&mut self, name: &str, policy: &Policy) {
        let now = (self.clock)();
        let unknown = NodeView::unknown(name);
        let desired = assess(self.book.faults(name), policy, &unknown, None);
        let marks = self.marks(policy);
        let entry = self.entry(name);
        let step = step(&entry.session, &desired, None, &marks, None, now);
        let changed = entry.session != step.session;
        entry.session = step.session;
        let say = desired.wanted() && !entry.missing_said;
        entry.missing_said = desired.wanted();
        if changed {
            self.session_changed(name);
        }
        if say {
            tracing::warn!(
                node = name,
                "a fault asks to quarantine a node that the cluster does not have; waiting for it"
            );
            let text =
                "the cluster has no node of this name; it is quarantined as soon as it appears";
            self.note(
                name,
                None,
                EntryKind::Attention,
                text.to_owned(),
                Value::Null,
            );
        }
        self.schedule_publish();
    }
}

/// What is said of a node that names a policy which does not exist.
pub(super) fn unknown_policy(name: &str) -> String {
    format!(
        "the annotation {} names the policy {name:?}, which the cluster's policy does not have: \
         the cluster's holds",
        keys::POLICY
    )
}

/// What the rules said, for people. The gravest faults come first; a node with more than
/// a story can show is out of service anyway.
fn rules_text(verdicts: &[Verdict]) -> String {
    if verdicts.is_empty() {
        return "no open fault".to_owned();
    }
    let shown = verdicts.iter().take(MAX_VERDICTS).map(Verdict::to_string);
    let mut text = shown.collect::<Vec<_>>().join("; ");
    if let Some(more) = verdicts
        .len()
        .checked_sub(MAX_VERDICTS)
        .filter(|more| *more > 0)
    {
        text.push_str(&format!("; and {more} more faults"));
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use cluster::{Cluster, ConnectOptions, NodeEvent};
    use contract::HealthEvent;
    use domain::brake::{DOUBT, NodeLabel};
    use domain::condition::Options;
    use domain::event::normalise;
    use domain::session::Failure;
    use jiff::{SignedDuration, Timestamp};
    use runtime::metrics::Metrics;
    use runtime::sources::Sources;
    use serde_json::json;
    use store::sqlite::SqliteStore;
    use store::{EventStore, NewEvent};
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::watch;
    use tokio::time::Instant;

    use super::super::{Config, Handles};
    use super::*;
    use crate::conditions;

    fn now() -> Timestamp {
        Timestamp::from_second(1_800_000_000).unwrap()
    }

    async fn cluster(server: &TcpListener, directory: &std::path::Path) -> Arc<Cluster> {
        let text = format!(
            "{{current-context: c, users: [{{name: u, user: {{}}}}], \
             clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}], \
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]}}",
            server.local_addr().unwrap()
        );
        let path = directory.join("kubeconfig");
        std::fs::write(&path, text).unwrap();
        let options = ConnectOptions {
            kubeconfig: Some(path),
            ..ConnectOptions::default()
        };
        Arc::new(Cluster::connect(options).await.unwrap())
    }

    async fn store(directory: &std::path::Path) -> Arc<dyn EventStore> {
        let mut event = HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "Check".into(),
            node_name: "n1".into(),
            is_fatal: true,
            ..HealthEvent::default()
        };
        normalise(&mut event, now());
        let store = SqliteStore::open(directory).unwrap();
        let received_at = now();
        let events = vec![NewEvent { event, received_at }];
        store.append(events).await.unwrap();
        Arc::new(store)
    }

    /// A quarantine that acts on the one node, which has one fault, what it tells, and the API
    /// server that it asks.
    pub(in crate::quarantine) struct Bench {
        pub(in crate::quarantine) quarantine: Quarantine,
        metrics: Metrics,
        server: TcpListener,
        _handles: Handles,
        _reporter: conditions::Reporter,
        _directory: TempDir,
    }

    impl Bench {
        pub(in crate::quarantine) async fn new() -> Self {
            let directory = TempDir::new().unwrap();
            let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let metrics = Metrics::default();
            let cluster = cluster(&server, directory.path()).await;
            let telling = conditions::Config {
                cluster: Arc::clone(&cluster),
                conditions: Some(Options {
                    limits: domain::condition::Limits::default(),
                    summary: false,
                }),
                events: None,
                clock: now,
            };
            let (board, reporter) = conditions::new(telling, &metrics);
            let config = Config {
                store: store(directory.path()).await,
                cluster: Some(cluster),
                policy: watch::channel(Some(Arc::new(Policy::builtin()))).1,
                mode: Mode::Act,
                owns: Owns::All,
                sources: Sources::default(),
                brake: false,
                gpu_label: NodeLabel::parse("gpu=true").unwrap(),
                namespace: "gpuwarden".to_owned(),
                retention: SignedDuration::from_hours(30 * 24),
                board: Some(board),
                clock: now,
            };
            let (mut quarantine, handles) = Quarantine::new(config, &metrics);
            quarantine.take_in().await;
            quarantine.node_event(NodeEvent::Restarted);
            let node = NodeView::from_object(node(1)).unwrap();
            quarantine.node_event(NodeEvent::Applied(Arc::new(node)));
            quarantine.node_event(NodeEvent::Listed);
            Self {
                quarantine,
                metrics,
                server,
                _handles: handles,
                _reporter: reporter,
                _directory: directory,
            }
        }

        /// A request for a patch that the API server has got, and not answered yet: its
        /// connection, its head and the patch.
        async fn asked(&self) -> (TcpStream, String, String) {
            let (mut connection, _) = self.server.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"]") {
                assert_ne!(connection.read_buf(&mut request).await.unwrap(), 0);
            }
            let request = String::from_utf8(request).unwrap();
            let (head, patch) = request.split_once("\r\n\r\n").unwrap();
            (connection, head.to_owned(), patch.to_owned())
        }

        /// Answers it with the node as it is now, which the quarantine takes in.
        async fn answer(&mut self, mut connection: TcpStream, node: &Value) {
            let body = node.to_string();
            let length = body.len();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
            connection.write_all(answer.as_bytes()).await.unwrap();
            let done = self.quarantine.applying.join_next().await.unwrap();
            self.quarantine.applied(done);
        }

        /// On how many nodes there was something to tell.
        fn told(&self) -> u32 {
            let name =
                "platform_connector_workqueue_adds_total_kubernetes{workqueue=\"kubernetes\"} ";
            let text = self.metrics.encode();
            let value = text.lines().find_map(|line| line.strip_prefix(name));
            value.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
        }
    }

    fn node(version: u32) -> Value {
        let metadata = json!({"name": "n1", "uid": "u", "resourceVersion": version.to_string()});
        json!({"metadata": metadata, "spec": {}, "status": {}})
    }

    /// What the API server makes of a patch of a node that has neither labels nor annotations.
    fn patched(mut node: Value, patch: &str) -> Value {
        for one in serde_json::from_str::<Vec<Value>>(patch).unwrap() {
            if one["op"] == "add" {
                let (place, key) = one["path"].as_str().unwrap().rsplit_once('/').unwrap();
                node.pointer_mut(place).unwrap()[key] = one["value"].clone();
            }
        }
        assert_eq!(node["spec"]["unschedulable"], true, "{patch}");
        node
    }

    #[tokio::test]
    async fn of_a_node_that_the_cluster_lacks_no_events_are_kept_for_their_status() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        assert!(quarantine.statuses.share("n1").is_some());
        quarantine.node_event(NodeEvent::Deleted("n1".to_owned()));
        quarantine.look().await;
        assert!(quarantine.statuses.share("n1").is_none());
        assert!(!quarantine.book.faults("n1").is_empty());
    }

    #[tokio::test]
    async fn nothing_is_told_on_a_node_before_its_cordon_is_answered() {
        let mut bench = Bench::new().await;
        bench.quarantine.look().await;

        // The API server has the cordon and does not answer yet.
        let (connection, head, patch) = bench.asked().await;
        assert!(head.starts_with("PATCH /api/v1/nodes/n1 "), "{head}");
        assert_eq!(bench.told(), 0);
        // Not for another look either: the watch brings what others do to the node.
        let mut labelled = node(2);
        labelled["metadata"]["labels"] = json!({"zone": "a"});
        let labelled = NodeView::from_object(labelled).unwrap();
        let event = NodeEvent::Applied(Arc::new(labelled));
        bench.quarantine.node_event(event);
        bench.quarantine.look().await;
        assert_eq!(bench.told(), 0);

        bench.answer(connection, &patched(node(3), &patch)).await;
        bench.quarantine.look().await;
        assert_eq!(bench.told(), 1);
    }

    #[tokio::test]
    async fn a_watch_that_fails_again_for_the_same_reason_is_no_news() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        let failing = |error: &str| NodeEvent::Failing {
            error: error.to_owned(),
            refused: false,
        };
        for (event, news) in [
            (failing("refused"), true),
            (failing("refused"), false),
            (failing("no answer"), true),
            (NodeEvent::Recovered, true),
            (failing("no answer"), true),
        ] {
            quarantine.publish();
            quarantine.node_event(event.clone());
            assert_eq!(quarantine.publishing.at.is_some(), news, "{event:?}");
        }
    }

    #[tokio::test]
    async fn a_session_that_begins_in_the_future_counts_from_when_it_was_seen() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        let session = json!({"id": "s", "since": Timestamp::MAX.to_string()});
        let mut out = node(2);
        out["metadata"]["annotations"] = json!({keys::SESSION: session.to_string()});
        let view = NodeView::from_object(out).unwrap();
        quarantine.node_event(NodeEvent::Applied(Arc::new(view)));
        quarantine.look().await;
        assert_eq!(quarantine.nodes["n1"].out_since(), Some(now()));
    }

    /// As after etcd was restored from a backup.
    #[tokio::test]
    async fn a_list_may_go_back_but_not_behind_our_own_patch() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        let applied = |version| {
            let view = NodeView::from_object(node(version)).unwrap();
            NodeEvent::Applied(Arc::new(view))
        };
        let known = |quarantine: &Quarantine| {
            let view = quarantine.nodes["n1"].view.clone().unwrap();
            view.resource_version.clone()
        };
        quarantine.node_event(applied(1_000));
        quarantine.node_event(applied(5));
        assert_eq!(known(quarantine), "1000", "late, and not from a list");
        quarantine.entry("n1").patched_at = Some(Instant::now());
        for (events, expected) in [
            (
                [NodeEvent::Restarted, applied(6), NodeEvent::Listed],
                "1000",
            ),
            ([NodeEvent::Restarted, applied(7), NodeEvent::Listed], "7"),
            ([applied(6), applied(8), applied(5)], "8"),
        ] {
            for event in events {
                quarantine.node_event(event);
            }
            assert_eq!(known(quarantine), expected);
            // Longer ago than a list takes.
            quarantine.entry("n1").patched_at = None;
        }
    }

    #[tokio::test]
    async fn a_clock_that_is_put_back_ends_all_waits() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        let failure = Failure::Error { retry_after: None };
        let doubt = now() + DOUBT;
        // A first try whose answer is lost.
        quarantine.look().await;
        quarantine.applying.shutdown().await;
        let entry = quarantine.entry("n1");
        (entry.in_flight, entry.taking_out) = (false, false);
        entry.session.failed(failure, now());
        entry.in_doubt = Some(doubt);
        quarantine.touch("n1");
        quarantine.watch_the_clock();
        quarantine.look().await;
        assert!(quarantine.applying.is_empty(), "it waits");

        let hour = SignedDuration::from_hours(1);
        quarantine.clock = || now() - SignedDuration::from_hours(1);
        quarantine.watch_the_clock();
        assert_eq!(quarantine.entry("n1").in_doubt, Some(doubt - hour));
        assert_eq!(quarantine.brake.doubt_ends, Some(doubt - hour));
        quarantine.look().await;
        assert_eq!(quarantine.applying.len(), 1);
    }

    #[tokio::test]
    async fn heartbeats_and_answers_ask_the_brake_nothing() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        quarantine.look().await;
        quarantine.publish();
        assert!(!quarantine.brake.stale, "its cordon was counted before");

        let (connection, _, patch) = bench.asked().await;
        let mut out = patched(node(2), &patch);
        let ready = json!({"type": "Ready", "status": "True", "lastHeartbeatTime": "1"});
        out["status"]["conditions"] = json!([ready]);
        bench.answer(connection, &out).await;
        let quarantine = &mut bench.quarantine;
        quarantine.look().await;
        assert!(!quarantine.brake.stale, "it counts as out, as before");
        quarantine.publish();

        // Nor is there anything to look at or to show.
        let mut heartbeat = out.clone();
        heartbeat["metadata"]["resourceVersion"] = "3".into();
        heartbeat["status"]["conditions"][0]["lastHeartbeatTime"] = "2".into();
        let view = Arc::new(NodeView::from_object(heartbeat).unwrap());
        quarantine.node_event(NodeEvent::Applied(Arc::clone(&view)));
        assert!(quarantine.dirty.is_empty() && quarantine.publishing.at.is_none());
        assert!(!quarantine.brake.stale);
        assert_eq!(
            quarantine.nodes["n1"].view,
            Some(view),
            "the newest is kept"
        );

        // Conditions are for the rules only; a GPU node more counts. What comes together is one
        // round.
        let (events, receiver) = tokio::sync::mpsc::channel(2);
        let mut changed = out.clone();
        for (version, place, value) in [
            (
                "4",
                "/status/conditions",
                json!([{"type": "Ready", "status": "False"}]),
            ),
            ("5", "/metadata/labels/gpu", "true".into()),
        ] {
            changed["metadata"]["resourceVersion"] = version.into();
            let (parent, key) = place.rsplit_once('/').unwrap();
            changed.pointer_mut(parent).unwrap()[key] = value;
            let view = NodeView::from_object(changed.clone()).unwrap();
            let event = NodeEvent::Applied(Arc::new(view));
            if version == "4" {
                quarantine.node_event(event.clone());
                assert!(quarantine.dirty.contains("n1") && !quarantine.brake.stale);
            }
            events.try_send(event).unwrap();
        }
        let mut receiver = Some(receiver);
        quarantine.node_events(receiver.as_mut());
        assert!(quarantine.brake.stale && receiver.unwrap().is_empty());
    }
}
