//! Tests of a watch during outages of the API server, simulated in memory on a paused clock.
//!
//! The server keeps objects, and their history from some version on. During an outage every
//! request is answered with an error, and open watches are cut.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::http::{Request as HttpRequest, Response};
use futures::stream;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tower::{BoxError, service_fn};

use super::selection::QUEUE;
use super::*;

/// Answer of the API server during an outage.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    /// Status 429 with `Retry-After`, in plain text, as from the API server itself.
    TooMany,
    /// HTTP status 500 with a `Status`.
    Internal,
    /// HTTP status 503 from a proxy in front of the server.
    Proxy,
}

/// An event at the API server.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// An object is created or changed.
    Set(u8, u8),
    /// An object is deleted.
    Delete(u8),
    /// The next change arrives damaged for this number of times.
    Damage(u8),
    /// An object without a name is created.
    Malformed,
    /// The history is compacted.
    Compact,
    /// An outage begins with this trouble.
    Begin(Trouble),
    /// The outage is over.
    End,
}

#[derive(Default)]
struct State {
    version: u64,
    objects: BTreeMap<String, (u64, u8)>,
    /// Changes of objects, oldest first.
    history: Vec<(u64, Value)>,
    /// Last version that was compacted.
    forgotten: u64,
    trouble: Option<Trouble>,
    damage: BTreeMap<u64, u8>,
    damage_next: u8,
    requests: u32,
}

/// The simulated API server.
#[derive(Clone, Default)]
struct Server {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

/// A watch that is open.
struct Open {
    server: Server,
    seen: u64,
    until: Instant,
}

fn object(name: &str, version: u64, value: u8) -> Value {
    json!({
        "metadata": {
            "name": name,
            "uid": name,
            "resourceVersion": version.to_string(),
            "labels": {"value": value.to_string()},
        },
        "spec": {},
    })
}

impl State {
    fn log(&mut self, kind: &str, object: &Value) {
        let event = json!({"type": kind, "object": object});
        self.history.push((self.version, event));
        if self.damage_next > 0 {
            self.damage.insert(self.version, self.damage_next);
            self.damage_next = 0;
        }
    }

    fn happens(&mut self, happening: Happening) {
        match happening {
            Happening::Set(name, value) => {
                self.version += 1;
                let (name, version) = (format!("n{name}"), self.version);
                let new = self
                    .objects
                    .insert(name.clone(), (version, value))
                    .is_none();
                let kind = if new { "ADDED" } else { "MODIFIED" };
                self.log(kind, &object(&name, version, value));
            }
            Happening::Delete(name) => {
                let name = format!("n{name}");
                if let Some((_, value)) = self.objects.remove(&name) {
                    self.version += 1;
                    self.log("DELETED", &object(&name, self.version, value));
                }
            }
            Happening::Damage(times) => self.damage_next = times,
            Happening::Malformed => {
                self.version += 1;
                let version = self.version.to_string();
                let object = json!({"metadata": {"name": 7, "resourceVersion": version}});
                self.log("ADDED", &object);
            }
            Happening::Compact => {
                self.forgotten = self.version;
                self.history.clear();
            }
            Happening::Begin(trouble) => self.trouble = Some(trouble),
            Happening::End => self.trouble = None,
        }
    }

    fn list(&self) -> Response<Body> {
        let items: Vec<Value> = (self.objects.iter())
            .map(|(name, (version, value))| object(name, *version, *value))
            .collect();
        let metadata = json!({"resourceVersion": self.version.to_string()});
        Response::new(Body::from(
            json!({"metadata": metadata, "items": items}).to_string(),
        ))
    }
}

fn status(code: u16, text: String) -> Response<Body> {
    let response = Response::builder().status(code);
    response.body(Body::from(text)).unwrap()
}

impl Server {
    fn happens(&self, happening: Happening) {
        self.state.lock().unwrap().happens(happening);
        self.changed.notify_waiters();
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = service_fn(move |request: HttpRequest<kube::client::Body>| {
            let answer = server.answer(request.uri().query().unwrap_or_default());
            async move { Ok::<_, BoxError>(answer) }
        });
        Client::new(service, "default")
    }

    fn answer(&self, query: &str) -> Response<Body> {
        let mut state = self.state.lock().unwrap();
        state.requests += 1;
        let told = |code: u16| {
            json!({"kind": "Status", "status": "Failure", "code": code, "message": "trouble"})
                .to_string()
        };
        match state.trouble {
            Some(Trouble::TooMany) => {
                let response = Response::builder().status(429).header("Retry-After", "1");
                return response.body(Body::from("Too many requests.\n")).unwrap();
            }
            Some(Trouble::Internal) => return status(500, told(500)),
            Some(Trouble::Proxy) => return status(503, "<html>no healthy upstream".into()),
            None => {}
        }
        let parameter = |name: &str| {
            query
                .split('&')
                .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
        };
        if parameter("watch") != Some("true") {
            return state.list();
        }
        let seen = parameter("resourceVersion").unwrap().parse().unwrap();
        if seen < state.forgotten {
            return status(410, told(410));
        }
        let seconds = parameter("timeoutSeconds").unwrap().parse().unwrap();
        let open = Open {
            server: self.clone(),
            seen,
            until: Instant::now() + Duration::from_secs(seconds),
        };
        let lines = stream::unfold(open, |mut open| async {
            let line = open.next().await?;
            Some((Ok::<_, std::io::Error>(Bytes::from(line + "\n")), open))
        });
        Response::new(Body::from_stream(lines))
    }

    /// Returns the objects that a consumer should know.
    fn objects(&self) -> BTreeMap<String, String> {
        let state = self.state.lock().unwrap();
        let value = |(_, value): &(u64, u8)| value.to_string();
        (state.objects.iter())
            .map(|(name, object)| (name.clone(), value(object)))
            .collect()
    }
}

impl Open {
    /// Returns the next line; `None` after the end of the watch.
    async fn next(&mut self) -> Option<String> {
        loop {
            let changed = self.server.changed.notified();
            {
                let mut state = self.server.state.lock().unwrap();
                if state.trouble.is_some() || self.seen < state.forgotten {
                    return None;
                }
                let next = state
                    .history
                    .iter()
                    .find(|(version, _)| *version > self.seen);
                if let Some((version, event)) = next.cloned() {
                    self.seen = version;
                    let mut line = event.to_string();
                    if let Some(times) = state.damage.get_mut(&version).filter(|times| **times > 0)
                    {
                        *times -= 1;
                        line.truncate(line.len() / 2);
                    }
                    return Some(line);
                }
            }
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(self.until) => return None,
            }
        }
    }
}

/// Two consumers: one of nodes, one of objects of any kind.
struct Followers {
    known: KnownNodes,
    plain: Arc<Mutex<BTreeMap<String, String>>>,
}

impl Followers {
    fn new(server: &Server) -> Self {
        let known = KnownNodes::default();
        let taken = known.clone();
        let look = move |event: &NodeEvent| taken.apply(event);
        let (events, mut receiver) = mpsc::channel(QUEUE);
        let nodes = Selection::of::<Node>(&(), None);
        let watch = Watch::new(server.client(), nodes, look, events);
        tokio::spawn(watch.run());
        tokio::spawn(async move { while receiver.recv().await.is_some() {} });

        let plain = Arc::new(Mutex::new(BTreeMap::new()));
        let (signals, mut receiver) = mpsc::channel::<Signal<Value>>(QUEUE);
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("example.com", "v1", "Thing"));
        let things = Selection::of::<DynamicObject>(&kind, None);
        let watch = Watch::new(server.client(), things, |_| {}, signals);
        tokio::spawn(watch.run());
        let kept = Arc::clone(&plain);
        tokio::spawn(async move {
            let mut listed = BTreeSet::new();
            while let Some(signal) = receiver.recv().await {
                let mut kept = kept.lock().unwrap();
                match signal {
                    Signal::Restarted => listed.clear(),
                    Signal::Applied(object) => {
                        let metadata = &object["metadata"];
                        if let Some(name) = metadata["name"].as_str() {
                            let value = metadata["labels"]["value"].as_str().unwrap();
                            listed.insert(name.to_owned());
                            kept.insert(name.to_owned(), value.to_owned());
                        }
                    }
                    Signal::Listed => kept.retain(|name, _| listed.contains(name)),
                    Signal::Deleted(name) => drop(kept.remove(&name)),
                    Signal::Failing { .. } | Signal::Recovered => {}
                }
            }
        });
        Self { known, plain }
    }

    fn check(&self, server: &Server) -> Result<(), TestCaseError> {
        let objects = server.objects();
        prop_assert_eq!(&*self.plain.lock().unwrap(), &objects);
        let names = (0..=u8::MAX).map(|name| format!("n{name}"));
        let nodes: BTreeMap<String, String> = names
            .filter_map(|name| {
                let node = self.known.get(&name)?;
                Some((name, node.labels["value"].clone()))
            })
            .collect();
        prop_assert_eq!(&nodes, &objects);
        Ok(())
    }
}

async fn pass(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn what_changes_in_a_minute_of_trouble_is_seen_after_it() {
    use Happening::{Begin, Compact, Delete, End, Malformed, Set};
    for trouble in [Trouble::TooMany, Trouble::Internal, Trouble::Proxy] {
        for forgets in [false, true] {
            let server = Server::default();
            server.happens(Set(1, 1));
            server.happens(Set(2, 1));
            let followers = Followers::new(&server);
            pass(1).await;
            followers.check(&server).unwrap();
            server.happens(Begin(trouble));
            for happening in [Set(1, 2), Delete(2), Malformed, Set(3, 1)] {
                pass(15).await;
                server.happens(happening);
            }
            if forgets {
                server.happens(Compact);
            }
            let asked = server.state.lock().unwrap().requests;
            // Each of the two watches retries every 2.5 to 5 s.
            assert!(
                (2 * 12..2 * 32).contains(&asked),
                "{trouble:?}: {asked} requests"
            );
            server.happens(End);
            pass(BACK_OFF_MAX.as_secs() + 1).await;
            followers.check(&server).unwrap();
            // The watch continues to deliver changes.
            server.happens(Set(4, 1));
            pass(1).await;
            followers.check(&server).unwrap();
        }
    }
}

fn happening() -> impl Strategy<Value = Happening> {
    let trouble = prop_oneof![
        Just(Trouble::TooMany),
        Just(Trouble::Internal),
        Just(Trouble::Proxy)
    ];
    prop_oneof![
        6 => (0..6_u8, any::<u8>()).prop_map(|(name, value)| Happening::Set(name, value)),
        3 => (0..6_u8).prop_map(Happening::Delete),
        2 => (1..4_u8).prop_map(Happening::Damage),
        1 => Just(Happening::Malformed),
        1 => Just(Happening::Compact),
        2 => trouble.prop_map(Happening::Begin),
        2 => Just(Happening::End),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Sends damaged lines, compactions, outages and malformed objects in any order. In the end
    /// the consumers have the objects of the server.
    #[test]
    fn whatever_an_api_server_goes_through_nothing_is_lost(
        script in prop::collection::vec((happening(), 0..12_000_u64), 1..60),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let server = Server::default();
            let followers = Followers::new(&server);
            for (happening, wait) in script {
                server.happens(happening);
                tokio::time::sleep(Duration::from_millis(wait)).await;
            }
            server.happens(Happening::End);
            pass(60).await;
            followers.check(&server)
        })?;
    }
}
