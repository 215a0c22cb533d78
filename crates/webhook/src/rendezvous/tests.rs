use std::net::SocketAddr;

use futures::FutureExt as _;
use preflight::roster::{Member, Roster};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::*;
use crate::fake::FakeApi;

const MAP: &str = "preflight-labels-training-g";
const ENOUGH: Duration = Duration::from_secs(120);

/// Rendezvous and its API server.
struct Meeting {
    api: FakeApi,
    rendezvous: Rendezvous,
    address: SocketAddr,
    over: CancellationToken,
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.over.cancel();
    }
}

impl Meeting {
    async fn start() -> Self {
        let (api, cluster) = FakeApi::start().await;
        let over = CancellationToken::new();
        let text = "image: i\ngangDiscovery: {method: labels, labels: {gangIdLabel: gang, gangSizeLabel: size}}\n";
        let config = Config::parse(text, "test").expect("a configuration");
        let (facts, _following) = Facts::new(Arc::clone(&cluster), over.clone());
        let by = Discoveries::new(config.discovery.clone());
        let rendezvous = Rendezvous::new(cluster, "key", facts, by, config.topologies.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let routes = rendezvous.routes();
        tokio::spawn(http_server::serve_clients(
            CLIENTS,
            listener,
            None,
            routes,
            over.clone(),
        ));
        Self {
            api,
            rendezvous,
            address,
            over,
        }
    }

    /// Starts to watch changes.
    fn follow(&self) {
        let (rosters, over) = (Arc::clone(&self.rendezvous.rosters), self.over.clone());
        tokio::spawn(async move { rosters.follow(over).await });
    }

    /// Creates pods of the gang `g`.
    fn pods(&self, names: &[&str]) {
        for name in names {
            let labels = json!({"gang": "g", "size": "2"});
            let pod =
                json!({"metadata": {"namespace": "training", "name": name, "labels": labels}});
            let key = ("training".to_owned(), (*name).to_owned());
            self.api.objects().pods.insert(key, pod);
        }
    }

    /// Asks for a gang as a pod, and returns status and body of the answer.
    async fn ask(&self, pod: &str, map: &str, wait: u64) -> (u16, String) {
        let head = format!(
            "GET /gangs/training/{map}?wait={wait} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\
             Authorization: Bearer training/{pod}\r\n\r\n"
        );
        exchange(self.address, head.as_bytes()).await
    }
}

async fn exchange(address: SocketAddr, request: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.expect("a server");
    stream.write_all(request).await.expect("a request");
    let mut answer = Vec::new();
    let reading = tokio::time::timeout(ENOUGH, stream.read_to_end(&mut answer));
    reading
        .await
        .expect("an answer in time")
        .expect("an answer");
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    (status.unwrap_or_default(), body.to_owned())
}

/// Returns the data of a gang with these members, where `expected` are needed.
fn data(members: &[&str], expected: u32) -> Value {
    let members = members.iter().map(|pod| Member {
        pod: (*pod).to_owned(),
        address: [10, 0, 0, 1].into(),
        checks: None,
    });
    let roster = Roster {
        gang_id: "g".to_owned(),
        expected,
        master_port: 29500,
        members: members.collect(),
        ..Roster::default()
    };
    json!(roster.data())
}

#[tokio::test]
async fn a_pod_hears_of_its_whole_gang_as_the_answer_is_read() {
    let meeting = Meeting::start().await;
    meeting.pods(&["a", "b", "z"]);
    // The `ConfigMap` does not exist yet.
    let nothing = serde_json::to_value(RendezvousAnswer::default()).expect("JSON");
    let (status, body) = meeting.ask("a", MAP, 0).await;
    let received: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((status, received), (200, nothing));
    meeting.api.put_map("training", MAP, &data(&["a", "b"], 2));
    meeting.rendezvous.rosters.all_changed();
    let (status, body) = meeting.ask("a", MAP, 0).await;
    assert_eq!(status, 200, "{body}");
    let answer: RendezvousAnswer = serde_json::from_str(&body).expect("an answer");
    assert_eq!(json!(answer.data), data(&["a", "b"], 2));
    assert!(answer.secret.is_some() && !answer.full);
    let (_, body) = meeting.ask("z", MAP, 0).await;
    let answer: RendezvousAnswer = serde_json::from_str(&body).expect("an answer");
    assert!(answer.full && answer.secret.is_none() && answer.data.is_empty());
}

/// Anybody with write access to `ConfigMap`s can list any pod in one.
#[tokio::test]
async fn a_pod_that_is_of_no_such_gang_by_its_own_words_is_told_nothing() {
    let meeting = Meeting::start().await;
    meeting.pods(&["a", "b"]);
    let stranger =
        json!({"metadata": {"namespace": "training", "name": "x", "labels": {"app": "x"}}});
    let key = ("training".to_owned(), "x".to_owned());
    meeting.api.objects().pods.insert(key, stranger);
    meeting
        .api
        .put_map("training", MAP, &data(&["a", "b", "x"], 3));
    for _ in 0..2 {
        let (status, body) = meeting.ask("x", MAP, 0).await;
        assert_eq!(
            (status, &*body),
            (403, "a pod may only ask for its own gang\n")
        );
    }
    // A deleted pod is refused, too.
    let (status, _) = meeting.ask("gone", MAP, 0).await;
    assert_eq!(status, 403);
    let (status, body) = meeting.ask("a", MAP, 0).await;
    assert!(status == 200 && body.contains("\"secret\""), "{body}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_the_config_maps_of_others_nothing_is_read_or_kept() {
    let meeting = Meeting::start().await;
    let large = json!({"peers": "x".repeat(700_000)});
    for number in 0..150 {
        let name = format!("preflight-{number}");
        meeting.api.put_map("tenant", &name, &large);
    }
    meeting.pods(&["a"]);
    meeting.api.put_map("training", MAP, &data(&["a"], 1));
    meeting.follow();
    // A change reaches a waiting pod.
    let meeting = &meeting;
    let received = async {
        loop {
            let (_, body) = meeting.ask("a", MAP, 0).await;
            if body.contains("10.0.0.1;0") && meeting.api.objects().page > 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(ENOUGH, received)
        .await
        .expect("it is told");
    let objects = meeting.api.objects();
    assert_eq!(objects.whole_lists, 0, "their data are not asked for");
    assert!(objects.page <= 32, "{}", objects.page);
    drop(objects);
    let (gangs, bytes) = meeting.rendezvous.rosters.size();
    assert!(gangs == 1 && bytes < 4096, "{gangs} gangs, {bytes} bytes");
}

#[tokio::test]
async fn who_hangs_up_while_a_gang_is_read_leaves_nothing_old_to_the_others() {
    let meeting = Meeting::start().await;
    let rosters = &meeting.rendezvous.rosters;
    let gang = ("training".to_owned(), MAP.to_owned());
    meeting.api.put_map("training", MAP, &data(&["a"], 2));
    let contents = rosters.contents(&gang).await.expect("a gang");
    assert!(!contents.has("b"));
    meeting.api.put_map("training", MAP, &data(&["a", "b"], 2));
    rosters.all_changed();
    // The first call has sent its request when its future is dropped.
    assert!(rosters.contents(&gang).now_or_never().is_none());
    let contents = rosters.contents(&gang).await.expect("a gang");
    assert!(contents.has("b"), "the others hear of the change");
    // The contents are read once.
    let read = meeting.api.objects().read;
    assert!(rosters.contents(&gang).await.is_some());
    assert_eq!(meeting.api.objects().read, read);
}

#[tokio::test]
async fn what_is_kept_of_the_gangs_of_a_namespace_is_bounded() {
    let meeting = Meeting::start().await;
    let members: Vec<String> = (0..8000).map(|at| format!("member-{at:05}")).collect();
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    let large = data(&members, 8000);
    meeting.api.put_map("training", MAP, &data(&["a"], 1));
    let rosters = &meeting.rendezvous.rosters;
    let usual = ("training".to_owned(), MAP.to_owned());
    assert!(rosters.contents(&usual).await.is_some());
    for number in 0..30 {
        let key = ("tenant".to_owned(), format!("preflight-{number}"));
        meeting.api.put_map("tenant", &key.1, &large);
        let contents = rosters.contents(&key).await.expect("a gang");
        assert!(contents.has("member-07999"));
        let (_, bytes) = rosters.size();
        assert!(bytes <= 7 * 1024 * 1024, "{bytes}");
    }
    // Gangs of other namespaces are still cached.
    let read = meeting.api.objects().read;
    assert!(rosters.contents(&usual).await.is_some());
    assert_eq!(meeting.api.objects().read, read);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_is_read_once_for_all_who_wait() {
    let meeting = Arc::new(Meeting::start().await);
    let names: Vec<String> = (0..100).map(|at| format!("p{at:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    meeting.pods(&names);
    meeting
        .api
        .put_map("training", MAP, &data(&names[..99], 100));
    meeting.follow();
    let mut waiting = tokio::task::JoinSet::new();
    for name in &names {
        let (meeting, name) = (Arc::clone(&meeting), (*name).to_owned());
        waiting.spawn(async move { meeting.ask(&name, MAP, 600).await });
    }
    // All pods wait, and the watch is running.
    let free = &meeting.rendezvous.waiting;
    let settled = async {
        while free.available_permits() > MAX_WAITING - names.len() || meeting.api.watchers() == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(ENOUGH, settled)
        .await
        .expect("they wait");
    let before = meeting.api.objects().read;
    meeting.api.put_map("training", MAP, &data(&names, 100));
    while let Some(answer) = waiting.join_next().await {
        let (status, body) = answer.expect("an answer");
        assert_eq!(status, 200);
        assert!(body.contains("\"secret\""), "{}", body.len());
    }
    let read = meeting.api.objects().read - before;
    assert!((1..=3).contains(&read), "{read}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_strangers_no_body_is_waited_for() {
    let meeting = Meeting::start().await;
    meeting.pods(&["a"]);
    meeting.api.put_map("training", MAP, &data(&["a"], 1));
    // Requests whose bodies never arrive.
    let head = "POST /events HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 500000\r\n\
                Authorization: Bearer none\r\n\r\n";
    let mut strangers = tokio::task::JoinSet::new();
    for _ in 0..400 {
        let address = meeting.address;
        strangers.spawn(async move { exchange(address, head.as_bytes()).await });
    }
    let (status, body) = meeting.ask("a", MAP, 0).await;
    assert!(
        status == 200 && body.contains("\"secret\""),
        "{status} {body}"
    );
    while let Some(answer) = strangers.join_next().await {
        let (status, _) = answer.expect("an answer");
        assert_eq!(status, 404, "nobody takes reports here");
    }
}
