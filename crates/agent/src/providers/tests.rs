//! Tests from a provider's write to the fault book, and back.

use std::sync::Arc;

use connector::{AcceptNodes, Connector};
use contract::device::provider_service_client::ProviderServiceClient;
use contract::device::{GpuStatus, RegisterGpuRequest};
use devices::{Providers, serve};
use jiff::Timestamp;
use model::fault::FaultBook;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use runtime::unix_grpc;
use store::sqlite::SqliteStore;
use store::{EventLog as _, EventQuery, EventStore};
use tonic::transport::Endpoint;

use super::*;
use monitor::WINDOW;

/// A monitor over a store, with the API that it reads.
struct Scene {
    directory: tempfile::TempDir,
    store: Arc<SqliteStore>,
    api: DeviceApi,
}

impl Scene {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(directory.path()).unwrap());
        let api = DeviceApi::new(&Metrics::default(), Timestamp::now);
        Self {
            directory,
            store,
            api,
        }
    }

    /// Sets the condition of the GPU, as a provider does over the socket.
    async fn set(&self, status: ConditionStatus) {
        let path = self.directory.path().join("api.sock");
        let cancel = CancellationToken::new();
        let listener = unix_grpc::bind(&path, 0o600).unwrap();
        let served = serve(
            listener,
            self.api.clone(),
            Providers::Operators,
            cancel.clone(),
        );
        let serving = tokio::spawn(served);
        let target = format!("unix://{}", path.display());
        let channel = Endpoint::from_shared(target)
            .unwrap()
            .connect()
            .await
            .unwrap();
        let mut provider = ProviderServiceClient::new(channel);
        let condition = Condition {
            r#type: "Looks".to_owned(),
            status: status.into(),
            reason: "Smoke".to_owned(),
            ..Condition::default()
        };
        let request = RegisterGpuRequest {
            name: "GPU-1".to_owned(),
            provider_id: "site".to_owned(),
            initial_status: Some(GpuStatus {
                conditions: vec![condition],
                ..GpuStatus::default()
            }),
            ..RegisterGpuRequest::default()
        };
        provider.register_gpu(request).await.unwrap();
        cancel.cancel();
        serving.await.unwrap().unwrap();
    }

    /// Runs a monitor for one check; returns the messages of the faults that are open then.
    async fn open_faults(&self) -> Vec<String> {
        let store: Arc<dyn EventStore> = Arc::clone(&self.store) as _;
        let nodes = AcceptNodes::Own("n1".to_owned());
        let frame = Frame {
            node_name: "n1".to_owned(),
            state_dir: Some(self.directory.path().to_owned()),
            boot: None,
            window: WINDOW,
            connector: Connector::new(store, nodes, &Metrics::default(), Timestamp::now),
            sources: Sources::default(),
            metrics: Metrics::default(),
            clock: Timestamp::now,
        };
        let cancel = CancellationToken::new();
        cancel.cancel();
        ProviderMonitor::new(self.api.clone(), &frame)
            .run(cancel)
            .await;
        let mut book = FaultBook::default();
        for record in self.records().await {
            book.record(&record);
        }
        let open = book.faults("n1").iter();
        open.map(|fault| fault.event.message.clone()).collect()
    }

    /// Returns the stored records, oldest first.
    async fn records(&self) -> Vec<model::event::EventRecord> {
        let mut records = self.store.events(EventQuery::default()).await.unwrap();
        records.reverse();
        records
    }
}

#[tokio::test]
async fn a_condition_that_is_false_is_a_fault_until_its_provider_says_otherwise() {
    let scene = Scene::new();
    assert_eq!(scene.open_faults().await, [""; 0]);
    scene.set(ConditionStatus::True).await;
    assert_eq!(scene.open_faults().await, [""; 0]);
    for status in [
        ConditionStatus::False,
        ConditionStatus::False,
        ConditionStatus::Unknown,
    ] {
        scene.set(status).await;
        assert_eq!(scene.open_faults().await, ["site: Smoke"], "{status:?}");
    }
    scene.set(ConditionStatus::True).await;
    assert_eq!(scene.open_faults().await, [""; 0]);
    // One fault and its end: repeats over restarts made no event.
    let records = scene.records().await;
    assert_eq!(records.len(), 2);
    let event = &records[0].event;
    assert_eq!(
        (event.agent.as_str(), event.check_name.as_str()),
        (PROVIDERS_AGENT, "Looks")
    );
    assert!(!event.is_fatal);
}
