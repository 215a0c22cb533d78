//! NVSentinel's gRPC sink: stored events are delivered to another service, across outages of the
//! service and kills of the product.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use contract::proto::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use contract::{HealthEvent, HealthEvents};
use runtime::tcp_grpc;
use runtime::tls::{CertificateFiles, ClientCertificates, ServerTls};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{Authority, Launch, Product, Purpose};
use tokio::net::TcpSocket;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::crash::{ALL_SENT, Moments, events, kills, send_all};
use crate::support::{SOON, bound, event, own_port, send_to};

/// Kills of the sender, and outages of the receiver, outside of the soak.
const KILLS: u32 = 10;
/// More than the longest pause between two deliveries, which may occur several times in 2,000
/// events.
const LIMIT: Duration = Duration::from_secs(120);
/// Name of the only node.
const NODE: &str = "forward-1";

/// The other service, with a port that is reserved during its outages.
struct Receiver {
    place: TcpSocket,
    taken: Taken,
    /// TLS of the service; `None` for plain text.
    tls: Option<Arc<ServerTls>>,
    serving: Option<(
        CancellationToken,
        JoinHandle<Result<(), tonic::transport::Error>>,
    )>,
}

/// Received events in order, each with the header of its request.
#[derive(Clone, Default)]
struct Taken(Arc<Mutex<Vec<(HealthEvent, String)>>>);

// === impl Receiver ===

impl Receiver {
    /// Creates a service that is down. Its socket is bound and does not listen, which reserves
    /// the port and refuses connections.
    fn away() -> anyhow::Result<Self> {
        Ok(Self {
            place: own_port()?,
            taken: Taken::default(),
            tls: None,
            serving: None,
        })
    }

    /// Creates a service that uses TLS and requires client certificates. The certificates of
    /// both sides are in `directory`.
    fn secured(directory: &Path) -> anyhow::Result<Self> {
        let authority = Authority::new("sink")?;
        let own = authority.sign(Purpose::Server, "receiver", &["127.0.0.1"])?;
        own.write(directory, "receiver")?;
        let sender = authority.sign(Purpose::Client, "gpuwarden", &[])?;
        sender.write(directory, "sender")?;
        std::fs::write(directory.join("ca.crt"), authority.pem())?;
        let files = CertificateFiles {
            certificate: directory.join("receiver.crt"),
            key: directory.join("receiver.key"),
        };
        let clients = ClientCertificates::Required(directory.join("ca.crt"));
        Ok(Self {
            tls: Some(Arc::new(ServerTls::load(files, clients)?)),
            ..Self::away()?
        })
    }

    fn comes(&mut self) -> anyhow::Result<()> {
        let listener = bound(self.place.local_addr()?)?.listen(64)?;
        let stop = CancellationToken::new();
        let serving = Server::builder()
            .add_service(PlatformConnectorServer::new(self.taken.clone()))
            .serve_with_incoming_shutdown(
                tcp_grpc::incoming(listener, self.tls.clone()),
                stop.clone().cancelled_owned(),
            );
        self.serving = Some((stop, tokio::spawn(serving)));
        Ok(())
    }

    async fn goes(&mut self) -> anyhow::Result<()> {
        if let Some((stop, served)) = self.serving.take() {
            stop.cancel();
            served.await??;
            // The accepting task ends with a delay.
            let address = self.place.local_addr()?;
            testkit::wait_for("the port", SOON, || async { bound(address).map(drop) }).await?;
        }
        Ok(())
    }

    /// Returns the launch of a product that delivers to this service, configured in `directory`.
    fn sender(&self, directory: &Path) -> anyhow::Result<Launch> {
        let address = self.place.local_addr()?;
        let mut config = json!({
            "enableGRPCSinkConnector": "true",
            "GRPCSinkTarget": address.to_string(),
            "GRPCSinkTokenPath": "token",
            "pipeline": [],
        });
        if self.tls.is_some() {
            config["GRPCSinkTarget"] = json!(format!("https://{address}"));
            config["GRPCSinkCAPath"] = json!("ca.crt");
            config["GRPCSinkCertPath"] = json!("sender.crt");
            config["GRPCSinkKeyPath"] = json!("sender.key");
        }
        std::fs::write(directory.join("config.json"), config.to_string())?;
        std::fs::write(directory.join("token"), "a-token\n")?;
        let config = directory.join("config.json");
        Ok(Launch::new()?
            .node_name(NODE)
            .option("--connector-config", config))
    }
}

// === impl Taken ===

impl Taken {
    fn ids(&self) -> Vec<String> {
        let taken = self.0.lock().unwrap();
        taken.iter().map(|(event, _)| event.id.clone()).collect()
    }
}

#[tonic::async_trait]
impl PlatformConnector for Taken {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        let header = request.metadata().get("authorization");
        let header = header.and_then(|value| value.to_str().ok());
        let header = header.unwrap_or_default().to_owned();
        let events = request.into_inner().events;
        let mut taken = self.0.lock().unwrap();
        taken.extend(events.into_iter().map(|event| (event, header.clone())));
        Ok(Response::new(()))
    }
}

/// Returns distinct faults, in order.
fn faults(range: std::ops::Range<u32>) -> Vec<HealthEvent> {
    range
        .map(|index| HealthEvent {
            message: format!("fault {index}"),
            ..event(NODE, &index.to_string())
        })
        .collect()
}

/// Returns the ids of all stored events, oldest first.
async fn stored(product: &Product) -> anyhow::Result<Vec<String>> {
    let all = ["events", "--limit", "10000", "-o", "json"];
    let found = product.client(all).await?.json(0)?;
    let mut found = found.as_array().cloned().unwrap_or_default();
    found.sort_by_key(|view| view["seq"].as_u64());
    let ids = found.iter().map(|view| view["event"]["id"].as_str());
    Ok(ids.map(|id| id.unwrap_or_default().to_owned()).collect())
}

/// Waits until the sender's status of its sink meets `holds`.
async fn sink(
    product: &Product,
    what: &str,
    limit: Duration,
    holds: impl Fn(&Value) -> bool,
) -> anyhow::Result<Value> {
    product
        .wait_for(what, limit, || async {
            let output = product.client(["status", "-o", "json"]).await;
            let output = output.map_err(|error| error.to_string())?;
            let status: Value =
                serde_json::from_str(&output.stdout).map_err(|error| error.to_string())?;
            if holds(&status["forward"]) {
                Ok(status["forward"].clone())
            } else {
                Err(status["forward"].to_string())
            }
        })
        .await
}

/// Waits until all events are delivered and none is in flight.
async fn handed_on(product: &Product) -> anyhow::Result<Value> {
    sink(product, "all to be handed on", LIMIT, |sink| {
        sink["waiting"] == 0
    })
    .await
}

/// Waits until the service has all stored events in their order, each once. On a slow disk an event
/// is handed on after its sender was answered.
async fn all_taken(receiver: &Receiver, product: &Product) -> anyhow::Result<()> {
    let all = || async {
        let (taken, stored) = (receiver.taken.ids(), stored(product).await?);
        anyhow::ensure!(taken == stored, "{taken:?} and not {stored:?}");
        Ok(())
    };
    product.wait_for("all events", LIMIT, all).await
}

#[tokio::test]
async fn events_arrive_at_the_grpc_sink_once_each_over_its_absence_and_a_kill() -> anyhow::Result<()>
{
    let directory = TempDir::new()?;
    let mut receiver = Receiver::secured(directory.path())?;
    receiver.comes()?;
    let mut product = receiver.sender(directory.path())?.start().await?;

    // The service is up: events from a command and from a monitor arrive one by one.
    let inject = ["inject", "xid", "79"];
    product.client(inject).await?.expect(0)?;
    for fault in faults(0..5) {
        send_to(&product, vec![fault]).await?;
    }
    handed_on(&product).await?;
    all_taken(&receiver, &product).await?;
    assert_eq!(receiver.taken.ids().len(), 6);

    // The service is down, which a reporter does not notice, and then up again.
    receiver.goes().await?;
    for first in (5..205).step_by(10) {
        send_to(&product, faults(first..first + 10)).await?;
    }
    let away = |waiting: u64| {
        move |sink: &Value| sink["waiting"] == waiting && sink["failing"].is_string()
    };
    sink(&product, "200 events to wait", SOON, away(200)).await?;
    assert_eq!(receiver.taken.ids().len(), 6);
    receiver.comes()?;
    all_taken(&receiver, &product).await?;
    let status = handed_on(&product).await?;
    assert_eq!(receiver.taken.ids().len(), 206);
    assert_eq!(status["delivered"], 206, "{status}");

    // The sender is killed twice during an outage, and accepts events in between.
    receiver.goes().await?;
    for first in [205, 255] {
        send_to(&product, faults(first..first + 50)).await?;
        product.kill9()?;
        product.restart().await?;
    }
    sink(&product, "100 events to wait", SOON, away(100)).await?;
    receiver.comes()?;
    all_taken(&receiver, &product).await?;
    let status = handed_on(&product).await?;
    assert_eq!(receiver.taken.ids().len(), 306);
    assert_eq!(
        (&status["missed"], &status["aside"]),
        (&json!(0), &json!(0)),
        "{status}"
    );

    // Events arrive as stored, with the token of the configured file.
    let taken = receiver.taken.0.lock().unwrap();
    for (index, (event, header)) in taken.iter().skip(1).enumerate() {
        assert_eq!(event.message, format!("fault {index}"));
        assert_eq!(event.node_name, NODE);
        assert_eq!(header, "Bearer a-token");
    }
    Ok(())
}

/// A kill between the receiver's response and its recording sends a batch again. That cannot be
/// avoided, so the id of each event marks the repetition.
#[tokio::test]
async fn killed_while_it_hands_on_all_arrive_in_order_and_what_comes_twice_has_its_id()
-> anyhow::Result<()> {
    let kills = kills(KILLS)?;
    let directory = TempDir::new()?;
    let mut receiver = Receiver::away()?;
    let mut product = receiver.sender(directory.path())?.start().await?;
    let socket = product.socket().to_owned();
    let mut sender = tokio::spawn(send_all(socket, NODE.to_owned()));
    let mut moments = Moments::new();
    for _ in 0..kills {
        receiver.comes()?;
        tokio::time::sleep(Duration::from_millis(20 + moments.below(180))).await;
        product.kill9()?;
        product.restart().await?;
        // A short outage, right after the sender has started.
        receiver.goes().await?;
        tokio::time::sleep(Duration::from_millis(moments.below(50))).await;
    }
    receiver.comes()?;
    let again = tokio::time::timeout(ALL_SENT, &mut sender).await???;
    handed_on(&product).await?;

    let stored = stored(&product).await?;
    assert_eq!(stored.len(), usize::try_from(events())?);
    let taken = receiver.taken.ids();
    let mut seen = BTreeSet::new();
    let mut first_times = taken.clone();
    first_times.retain(|id| seen.insert(id.clone()));
    let doubled = taken.len() - first_times.len();
    println!("{kills} kills, {again} events sent again, {doubled} taken twice");
    assert_eq!(first_times, stored, "events are lost or out of order");
    Ok(())
}
