//! Tests with several controllers, each with its own store.

use super::*;

#[tokio::test]
async fn another_store_gets_what_the_one_before_had_taken_before_anything_new() {
    let (first, second) = (Controller::new(), Controller::new());
    let (open, port) = listener().await;
    let (stop, served) = first.serve(open);
    let node = Node::with(port, SHORT);
    for name in ["fault", "recovery"] {
        node.accept(vec![event(name)]).await;
    }
    let foreign = HealthEvent {
        node_name: "n2".into(),
        ..event("foreign")
    };
    node.accept(vec![foreign]).await;
    node.empty().await;
    assert_eq!(node.aside(), ["foreign"]);
    stop.cancel();
    served.await.unwrap();
    // No new event comes from the node: the other controller gets all the old ones, except
    // those put aside.
    let open = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (stop, served) = second.serve(open);
    let other = second.store.identity().to_string();
    let mut status = node.status.clone();
    let has = |store: &str| {
        let store = store.to_owned();
        move |status: &DeliveryStatus| status.store.as_ref() == Some(&store)
    };
    status.wait_for(has(&other)).await.unwrap();
    node.empty().await;
    node.accept(vec![event("new")]).await;
    node.empty().await;
    assert_eq!(second.messages().await, ["fault", "recovery", "new"]);
    assert_eq!(first.messages().await, ["fault", "recovery"]);
    let seen = status.borrow().clone();
    assert_eq!((seen.store_changes, seen.resent, seen.refused), (1, 2, 1));
    let text = node.metrics.encode();
    assert!(
        text.contains("gpuwarden_delivery_store_changes_total 1"),
        "{text}"
    );

    // After `begin_anew`, the store counts as another one, and events count again in order.
    stop.cancel();
    served.await.unwrap();
    second.store.begin_anew().await.unwrap();
    let open = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (stop, served) = second.serve(open);
    node.accept(vec![event("newer")]).await;
    node.empty().await;
    let expected = ["fault", "recovery", "new", "newer"];
    assert_eq!(second.messages().await, expected);
    assert_eq!(second.store.feed(3.into(), 10).await.unwrap().len(), 4);
    // A successor that continues with the same store gets nothing again.
    let before = node.status.borrow().resent;
    stop.cancel();
    served.await.unwrap();
    let open = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let (_stop, _served) = second.serve(open);
    node.accept(vec![event("last")]).await;
    node.empty().await;
    assert_eq!(node.status.borrow().resent, before);
}

#[tokio::test]
async fn two_stores_that_answer_in_turn_do_not_keep_events_for_ever() {
    /// Passes each request to the other connector than the last one.
    #[derive(Clone)]
    struct InTurn(Arc<[Connector; 2]>, Arc<AtomicUsize>);
    #[tonic::async_trait]
    impl PlatformConnector for InTurn {
        async fn health_event_occurred_v1(
            &self,
            request: Request<HealthEvents>,
        ) -> Result<Response<()>, Status> {
            let call = self.1.fetch_add(1, Ordering::Relaxed);
            let (connector, caller) = (&self.0[call % 2], Caller::Node("n1".into()));
            let ours = connector.store();
            addressee::check(request.metadata(), ours.as_ref())?;
            let accepted = connector.accept(request.into_inner(), &caller).await;
            accepted.map_err(|error| crate::server::status(&error))?;
            Ok(addressee::taken(ours.as_ref()))
        }
    }
    let controllers = [Controller::new(), Controller::new()];
    let connectors = controllers.each_ref().map(|one| {
        let store: Arc<dyn EventStore> = Arc::clone(&one.store) as Arc<dyn EventStore>;
        Connector::new(store, AcceptNodes::Any, &Metrics::default(), Timestamp::now)
    });
    let service = InTurn(Arc::new(connectors), Arc::default());
    let (open, port) = listener().await;
    let (_stop, _served) = serve(open, PlatformConnectorServer::new(service));
    // As in production, longer than a request takes, even on a busy machine.
    let stays = (Duration::from_millis(100), Duration::from_millis(400));
    let node = Node::with(port, Pauses { stays, ..SHORT });
    for index in 0..4 {
        node.accept(vec![event(&index.to_string())]).await;
        node.empty().await;
    }
    // Each store has all events, including those accepted by the other.
    for one in &controllers {
        let wanted: Vec<String> = (0..4).map(|index| index.to_string()).collect();
        let mut changes = node.status.clone();
        while one.messages().await != wanted {
            changes.changed().await.unwrap();
        }
    }
}
