//! Tests of the wire format against bytes written by hand from the field and enum numbers of
//! the contract. A number that changes in `proto/` or in the generated types fails here, even
//! if the two agree with each other.

#![allow(clippy::unwrap_used)]

use std::{
    convert::Infallible,
    future::ready,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
};

use gpuwarden_contract::{
    BehaviourOverrides, Entity, HealthEvent, HealthEvents, ProcessingStrategy, RecommendedAction,
    device::ConditionStatus,
    proto::{
        platform_connector_client::PlatformConnectorClient,
        platform_connector_server::{PlatformConnector, PlatformConnectorServer},
    },
};
use prost::Message as _;
use tonic::{
    Request, Response, Status,
    body::Body,
    codegen::{Service, http},
};

/// Encoding of one batch of one event, with every field set, in the order of their numbers. The
/// first byte of a line is `number << 3 | type`: type 0 is a number, 2 is length-delimited;
/// from field 16 on the tag takes two bytes.
#[rustfmt::skip]
const BATCH: &[u8] = &[
    0x08, 3,                                                  // HealthEvents 1 version
    0x12, 103,                                                // HealthEvents 2 events
        0x08, 7,                                              //   1 version
        0x12, 3, b'a', b'g', b't',                            //   2 agent
        0x1a, 3, b'G', b'P', b'U',                            //   3 componentClass
        0x22, 3, b'X', b'I', b'D',                            //   4 checkName
        0x28, 1,                                              //   5 isFatal
        0x30, 1,                                              //   6 isHealthy
        0x3a, 3, b'm', b's', b'g',                            //   7 message
        0x40, 24,                                             //   8 recommendedAction
        0x4a, 2, b'7', b'9',                                  //   9 errorCode, twice
        0x4a, 2, b'1', b'3',
        0x52, 8,                                              //  10 entitiesImpacted
            0x0a, 3, b'P', b'C', b'I',                        //     1 entityType
            0x12, 1, b'0',                                    //     2 entityValue
        0x5a, 6,                                              //  11 metadata, as a map's entry
            0x0a, 1, b'k',                                    //     1 key
            0x12, 1, b'v',                                    //     2 value
        0x62, 4,                                              //  12 generatedTimestamp
            0x08, 100,                                        //     1 seconds
            0x10, 50,                                         //     2 nanos
        0x6a, 2, b'n', b'1',                                  //  13 nodeName
        0x72, 2,                                              //  14 quarantineOverrides
            0x08, 1,                                          //     1 force
        0x7a, 2,                                              //  15 drainOverrides
            0x10, 1,                                          //     2 skip
        0x80, 0x01, 3,                                        //  16 processingStrategy
        0x8a, 0x01, 2, b'i', b'd',                            //  17 id
        0x92, 0x01, 20,                                       //  18 customRecommendedAction
            b'R', b'E', b'S', b'E', b'A', b'T', b'_', b'T', b'H', b'E', b'_',
            b'G', b'P', b'U', b'_', b'R', b'I', b'S', b'E', b'R',
];

/// Returns the batch that [`BATCH`] encodes.
fn batch() -> HealthEvents {
    HealthEvents {
        version: 3,
        events: vec![HealthEvent {
            version: 7,
            agent: "agt".to_owned(),
            component_class: "GPU".to_owned(),
            check_name: "XID".to_owned(),
            is_fatal: true,
            is_healthy: true,
            message: "msg".to_owned(),
            recommended_action: RecommendedAction::RestartBm.into(),
            error_code: vec!["79".to_owned(), "13".to_owned()],
            entities_impacted: vec![Entity {
                entity_type: "PCI".to_owned(),
                entity_value: "0".to_owned(),
            }],
            metadata: [("k".to_owned(), "v".to_owned())].into(),
            generated_timestamp: Some(prost_types::Timestamp {
                seconds: 100,
                nanos: 50,
            }),
            node_name: "n1".to_owned(),
            quarantine_overrides: Some(BehaviourOverrides {
                force: true,
                skip: false,
            }),
            drain_overrides: Some(BehaviourOverrides {
                force: false,
                skip: true,
            }),
            processing_strategy: ProcessingStrategy::StoreAndAnalyse.into(),
            id: "id".to_owned(),
            custom_recommended_action: "RESEAT_THE_GPU_RISER".to_owned(),
        }],
    }
}

#[test]
fn every_field_has_the_number_of_the_contract() {
    assert_eq!(HealthEvents::decode(BATCH).unwrap(), batch());
    assert_eq!(batch().encode_to_vec(), BATCH);
}

#[test]
fn isfatal_and_ishealthy_are_told_apart() {
    for (bytes, is_fatal, is_healthy) in [([0x28, 1], true, false), ([0x30, 1], false, true)] {
        let event = HealthEvent::decode(bytes.as_slice()).unwrap();
        assert_eq!((event.is_fatal, event.is_healthy), (is_fatal, is_healthy));
        assert_eq!(event.encode_to_vec(), bytes);
    }
}

#[test]
fn every_value_of_an_enum_has_the_number_of_the_contract() {
    let actions = [
        (0, RecommendedAction::None, "NONE"),
        (2, RecommendedAction::ComponentReset, "COMPONENT_RESET"),
        (5, RecommendedAction::ContactSupport, "CONTACT_SUPPORT"),
        (6, RecommendedAction::RunFielddiag, "RUN_FIELDDIAG"),
        (15, RecommendedAction::RestartVm, "RESTART_VM"),
        (24, RecommendedAction::RestartBm, "RESTART_BM"),
        (25, RecommendedAction::ReplaceVm, "REPLACE_VM"),
        (26, RecommendedAction::RunDcgmeud, "RUN_DCGMEUD"),
        (27, RecommendedAction::Custom, "CUSTOM"),
        (99, RecommendedAction::Unknown, "UNKNOWN"),
    ];
    for (number, action, name) in actions {
        let event = HealthEvent::decode([0x40, number].as_slice()).unwrap();
        assert_eq!(event.recommended_action(), action);
        assert_eq!(action.as_str_name(), name);
    }
    let strategies = [
        (0, ProcessingStrategy::Unspecified, "UNSPECIFIED"),
        (
            1,
            ProcessingStrategy::ExecuteRemediation,
            "EXECUTE_REMEDIATION",
        ),
        (2, ProcessingStrategy::StoreOnly, "STORE_ONLY"),
        (3, ProcessingStrategy::StoreAndAnalyse, "STORE_AND_ANALYSE"),
    ];
    for (number, strategy, name) in strategies {
        let event = HealthEvent::decode([0x80, 0x01, number].as_slice()).unwrap();
        assert_eq!(event.processing_strategy(), strategy);
        assert_eq!(strategy.as_str_name(), name);
    }
    // There is no further value.
    let known = |is_valid: fn(i32) -> bool| (0..1_000).filter(|number| is_valid(*number)).count();
    assert_eq!(known(RecommendedAction::is_valid), actions.len());
    assert_eq!(known(ProcessingStrategy::is_valid), strategies.len());
}

/// Path of the contract's only call on the wire.
const PATH: &str = "/datamodels.PlatformConnector/HealthEventOccurredV1";

/// Records the batches that it receives.
#[derive(Clone, Default)]
struct Taken(Arc<Mutex<Vec<HealthEvents>>>);

#[tonic::async_trait]
impl PlatformConnector for Taken {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(Response::new(()))
    }
}

/// Transport that only records the paths of calls.
#[derive(Clone, Default)]
struct Paths(Arc<Mutex<Vec<String>>>);

impl Service<http::Request<Body>> for Paths {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        self.0.lock().unwrap().push(request.uri().path().to_owned());
        ready(Ok(Status::unavailable("no server").into_http()))
    }
}

/// Returns the result of a future that waits for nothing outside.
fn finish<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..100 {
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return result;
        }
    }
    panic!("the future waits for something");
}

#[test]
fn a_client_calls_the_path_of_the_contract() {
    let paths = Paths::default();
    let mut client = PlatformConnectorClient::new(paths.clone());
    finish(client.health_event_occurred_v1(batch())).unwrap_err();
    assert_eq!(*paths.0.lock().unwrap(), [PATH]);
}

#[test]
fn a_server_takes_the_bytes_of_the_contract_at_its_path_and_nowhere_else() {
    let taken = Taken::default();
    let mut server = PlatformConnectorServer::new(taken.clone());
    let misspelt = "/datamodels.PlatformConnector/HealthEventOccuredV1";
    for (path, status) in [(PATH, None), (misspelt, Some("12"))] {
        // One message of gRPC: not compressed, its length, its bytes.
        let length = u32::try_from(BATCH.len()).unwrap().to_be_bytes();
        let message = [&[0], length.as_slice(), BATCH].concat();
        let request = http::Request::post(path)
            .header("content-type", "application/grpc")
            .body(message_body(message))
            .unwrap();
        let response = finish(server.call(request)).unwrap();
        let answered = response.headers().get("grpc-status");
        assert_eq!(
            answered.map(|value| value.to_str().unwrap()),
            status,
            "{path}"
        );
    }
    assert_eq!(*taken.0.lock().unwrap(), [batch()]);
}

fn message_body(message: Vec<u8>) -> Body {
    Body::new(http_body_util::Full::new(bytes::Bytes::from(message)))
}

/// Returns the fields of a message as `name number`, in the order of their numbers.
fn fields(package: &str, message: &str) -> String {
    let all = prost_types::FileDescriptorSet::decode(gpuwarden_contract::DESCRIPTORS).unwrap();
    let file = all.file.iter().find(|file| file.package() == package);
    let mut messages = file.unwrap().message_type.iter();
    let mut fields = messages
        .find(|one| one.name() == message)
        .unwrap()
        .field
        .clone();
    fields.sort_by_key(prost_types::FieldDescriptorProto::number);
    let fields = fields
        .iter()
        .map(|field| format!("{} {}", field.name(), field.number()));
    fields.collect::<Vec<_>>().join(", ")
}

#[test]
fn the_apis_of_gpus_have_the_numbers_of_their_contracts() {
    let (ours, theirs) = ("gpuwarden.device.v1alpha1", "nvidia.nvsentinel.v1alpha1");
    let condition = "type 1, status 2, reason 3, message 4, last_transition_time 5, source 6";
    assert_eq!(fields(ours, "Condition"), condition);
    let statuses = [
        ConditionStatus::Unspecified,
        ConditionStatus::True,
        ConditionStatus::False,
        ConditionStatus::Unknown,
    ];
    for (number, status) in (0..).zip(statuses) {
        assert_eq!(ConditionStatus::try_from(number), Ok(status));
    }
    let condition = "type 1, status 2, last_transition_time 3, reason 4, message 5";
    for (message, expected) in [
        ("Gpu", "name 1, spec 2, status 3"),
        ("GpuList", "items 1"),
        ("GpuSpec", "uuid 1"),
        ("GpuStatus", "conditions 1, recommended_action 2"),
        ("Condition", condition),
        ("GetGpuRequest", "name 1"),
        ("GetGpuResponse", "gpu 1"),
        ("ListGpusResponse", "gpu_list 1"),
        ("WatchGpusResponse", "type 1, object 2"),
    ] {
        assert_eq!(fields(theirs, message), expected, "{message}");
    }
    let answer = "success 1, exit_code 2, output 3, error 4";
    assert_eq!(fields("nvhcd", "HealthCheckResponse"), answer);
    assert_eq!(fields("nvhcd", "HealthCheckRequest"), "args 1");
}
