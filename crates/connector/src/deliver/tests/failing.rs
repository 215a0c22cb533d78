//! Tests with controllers that fail, on some events or on all.

use super::*;

#[tokio::test]
async fn an_event_on_which_the_controller_fails_holds_up_nothing() {
    let script = Script {
        fatal: vec!["3".into()],
        ..Script::default()
    };
    let (open, port) = listener().await;
    let (_stop, _served) = serve(open, PlatformConnectorServer::new(script.clone()));
    // With the pauses of production: events behind a failing one wait for seconds.
    let node = Node::new(port);
    node.accept((0..8).map(|index| event(&index.to_string())).collect())
        .await;
    node.empty().await;
    assert_eq!(
        *script.taken.lock().unwrap(),
        ["0", "1", "2", "4", "5", "6", "7"]
    );
    assert_eq!(node.aside(), ["3"]);
    let status = node.status.borrow().clone();
    assert_eq!(
        (status.refused, status.not_taken, status.suspects),
        (0, 1, 0)
    );
    assert_eq!(status.failing, None);
    assert_eq!(node.outbox.status().borrow().aside, 1);
    let text = node.metrics.encode();
    for line in [
        "gpuwarden_delivery_not_taken_events_total 1",
        "gpuwarden_delivery_refused_events_total 0",
        "gpuwarden_outbox_aside_events 1",
        "gpuwarden_delivery_suspect_events 0",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[tokio::test]
async fn an_event_over_which_the_controller_falls_is_put_aside() {
    let script = Script {
        deadly: Some("deadly"),
        ..Script::default()
    };
    let (node, _stop) = scripted(&script).await;
    node.accept(vec![event("one"), event("deadly"), event("two")])
        .await;
    node.empty().await;
    assert_eq!(*script.taken.lock().unwrap(), ["one", "two"]);
    assert_eq!(node.aside(), ["deadly"]);
}

#[tokio::test]
async fn a_controller_that_fails_on_all_gets_all_once_it_is_mended() {
    let script = Script {
        broken: 0..300,
        ..Script::default()
    };
    let (node, _stop) = scripted(&script).await;
    node.accept((0..20).map(|index| event(&index.to_string())).collect())
        .await;
    let mut status = node.status.clone();
    status.wait_for(|one| one.suspects == 20).await.unwrap();
    assert!(status.borrow().failing.is_some());
    node.empty().await;
    let mut taken = script.taken.lock().unwrap().clone();
    taken.sort_by_key(|message| message.parse::<u32>().unwrap());
    let expected: Vec<String> = (0..20).map(|index| index.to_string()).collect();
    assert_eq!(taken, expected);
    assert!(node.aside().is_empty());

    // The only event waits until another one has shown which side is at fault.
    let script = Script {
        fatal: vec!["lone".into()],
        ..Script::default()
    };
    let (node, _stop) = scripted(&script).await;
    node.accept(vec![event("lone")]).await;
    let mut status = node.status.clone();
    status.wait_for(|one| one.suspects == 1).await.unwrap();
    while script.calls.load(Ordering::Relaxed) < 40 {
        tokio::task::yield_now().await;
    }
    assert!(node.aside().is_empty());
    node.accept(vec![event("other")]).await;
    node.empty().await;
    assert_eq!(*script.taken.lock().unwrap(), ["other"]);
    assert_eq!(node.aside(), ["lone"]);
}

#[tokio::test]
async fn what_cannot_be_put_aside_is_kept_and_holds_up_nothing() {
    let script = Script {
        poison: vec!["bad"],
        fatal: vec!["fatal".into()],
        ..Script::default()
    };
    let (node, _stop) = scripted(&script).await;
    // Has the same effect as a full disk: nothing can be written there.
    let file = node.dir.path().join("outbox/refused.jsonl");
    std::fs::create_dir(&file).unwrap();
    let events = ["one", "bad", "two", "fatal", "three"].map(event);
    node.accept(events.into()).await;
    let mut status = node.status.clone();
    status.wait_for(|one| one.delivered == 3).await.unwrap();
    status.wait_for(|one| one.suspects == 2).await.unwrap();
    let calls = script.calls.load(Ordering::Relaxed);
    while script.calls.load(Ordering::Relaxed) < calls + 20 {
        tokio::task::yield_now().await;
    }
    assert_eq!(node.status.borrow().refused, 0);
    assert!(node.outbox.status().borrow().events >= 2);
    std::fs::remove_dir(&file).unwrap();
    node.empty().await;
    assert_eq!(*script.taken.lock().unwrap(), ["one", "two", "three"]);
    let mut aside = node.aside();
    aside.sort();
    assert_eq!(aside, ["bad", "fatal"]);
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(48))]

    /// Events that the controller cannot accept are put aside, however they arrive; all others
    /// arrive once and in order.
    #[test]
    fn any_poison_is_put_aside_and_all_else_is_delivered_once_in_order(
        poison in proptest::collection::vec(proptest::bool::weighted(0.2), 1..60),
        batch in 1_usize..20,
    ) {
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let named = |bad: bool| {
                let chosen = poison.iter().enumerate().filter(move |(_, is)| **is == bad);
                chosen.map(|(index, _)| index.to_string()).collect::<Vec<_>>()
            };
            let script = Script { fatal: named(true), ..Script::default() };
            let (node, stop) = scripted(&script).await;
            let events: Vec<_> = (0..poison.len()).map(|index| event(&index.to_string())).collect();
            for events in events.chunks(batch) {
                node.accept(events.to_vec()).await;
            }
            // Accepting this one shows that the last ones are at fault.
            node.accept(vec![event("last")]).await;
            node.empty().await;
            let mut good = named(false);
            good.push("last".into());
            assert_eq!(*script.taken.lock().unwrap(), good);
            let mut aside = node.aside();
            aside.sort_by_key(|message| message.parse::<u32>().unwrap());
            assert_eq!(aside, named(true));
            stop.cancel();
        });
    }

    /// A controller that fails on everything for a while loses no event, and stores none twice.
    #[test]
    fn no_event_is_given_up_for_a_fault_of_the_controller(
        poison in proptest::collection::vec(proptest::bool::weighted(0.2), 1..40),
        from in 0_usize..30,
        calls in 1_usize..120,
    ) {
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let fatal: Vec<_> = poison
                .iter()
                .enumerate()
                .filter(|(_, is)| **is)
                .map(|(index, _)| index.to_string())
                .collect();
            let script = Script { fatal, broken: from..from + calls, ..Script::default() };
            let (node, stop) = scripted(&script).await;
            for index in 0..poison.len() {
                node.accept(vec![event(&index.to_string())]).await;
            }
            node.accept(vec![event("1000")]).await;
            node.empty().await;
            let number = |message: &String| message.parse::<u32>().unwrap();
            let mut all = script.taken.lock().unwrap().clone();
            let mut aside = node.aside();
            aside.sort_by_key(number);
            assert_eq!(aside, script.fatal);
            all.extend(aside);
            all.sort_by_key(number);
            let expected = (0..poison.len()).chain([1000]).map(|index| index.to_string());
            assert_eq!(all, expected.collect::<Vec<_>>());
            stop.cancel();
        });
    }
}
