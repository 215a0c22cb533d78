//! The ledger of GPUs.

use contract::keys;
use gpuwarden_console::api::{ErrorBody, LedgerEntry, LedgerView};
use hyper::StatusCode;
use jiff::Timestamp;
use model::event::EventRecord;
use model::reporter::Reporter;

use crate::server::{Server, xid};

#[tokio::test]
async fn the_ledger_lists_its_gpus_and_tells_one_by_any_of_its_names() {
    let server = Server::start().await;
    for (node, serial) in [("gpu-a-01", "17"), ("gpu-a-02", "18"), ("gpu-a-03", "17")] {
        let mut event = xid(node, "79", "fell off the bus", Timestamp::now());
        let serial = (keys::META_GPU_SERIAL.to_owned(), serial.to_owned());
        let uuid = (
            keys::META_GPU_UUID.to_owned(),
            format!("GPU-of-{}", serial.1),
        );
        event.metadata.extend([serial, uuid]);
        Reporter::Monitor.note_in(&mut event);
        let record = EventRecord {
            seq: 1.into(),
            id: node.to_owned(),
            created_at: Timestamp::now(),
            event,
        };
        server.ledger.send_modify(|ledger| ledger.record(&record));
    }
    let view: LedgerView = server.get("/api/v1/ledger?limit=1").await.json();
    assert_eq!(
        (view.gpus.len(), view.total_gpus, view.total_nodes),
        (1, 2, 3)
    );
    assert_eq!(view.gpus[0].id, "17", "two faults count more than one");
    for name in ["17", "GPU-of-17"] {
        let entry: LedgerEntry = server.get(&format!("/api/v1/ledger/{name}")).await.json();
        let gpu = entry.gpu.unwrap();
        assert_eq!((gpu.row.places.len(), gpu.score.terms.len()), (2, 2));
        assert_eq!(entry.node, None);
    }
    let entry: LedgerEntry = server.get("/api/v1/ledger/gpu-a-03").await.json();
    assert_eq!(entry.gpu, None);
    assert_eq!(entry.node.unwrap().gpus[0].id, "17");
    let unknown = server.get("/api/v1/ledger/19").await;
    assert_eq!(unknown.status, StatusCode::NOT_FOUND);
    assert!(unknown.json::<ErrorBody>().error.contains("\"19\""));
    let bad = server.get("/api/v1/ledger?limit=0").await;
    assert_eq!(bad.status, StatusCode::BAD_REQUEST);
}
