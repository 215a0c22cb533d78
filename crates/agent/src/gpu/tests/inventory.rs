//! Events that name the GPUs of the machine.

use super::*;

/// Returns the UUID, address and serial number of each reported GPU, oldest first.
async fn named(bench: &Bench) -> Vec<[String; 3]> {
    let mut events = bench.all_stored().await;
    events.retain(|event| event.check_name == keys::CHECK_GPU_INVENTORY);
    let name = |event: &HealthEvent| {
        assert!(event.is_healthy, "{event:?}");
        let [_, (_, pci), (_, uuid)] = entities(event)[..] else {
            panic!("{event:?}");
        };
        let serial = &event.metadata[keys::META_GPU_SERIAL];
        [uuid, pci, serial].map(str::to_owned)
    };
    events.iter().map(name).collect()
}

#[tokio::test]
async fn each_gpu_is_named_once_per_boot_place_and_week() {
    let mut bench = Bench::new();
    let first = ["GPU-0", "0000:b0:00.0", "S0"];
    let second = ["GPU-1", "0000:b1:00.0", "S1"];
    bench.poll_once().await;
    bench.poll_once().await;
    assert_eq!(named(&bench).await, [first, second]);
    bench.inventory.gpus[1].pci = "0000:b7:00.0".to_owned();
    bench.poll_once().await;
    let moved = ["GPU-1", "0000:b7:00.0", "S1"];
    assert_eq!(named(&bench).await, [first, second, moved]);
    bench.boot = 2;
    bench.poll_once().await;
    assert_eq!(named(&bench).await, [first, second, moved, first, moved]);
    let days = |days: i64| AHEAD.set(SignedDuration::from_hours(24 * days));
    days(6);
    bench.poll_once().await;
    assert_eq!(named(&bench).await.len(), 5);
    days(7);
    bench.poll_once().await;
    bench.poll_once().await;
    assert_eq!(named(&bench).await[5..], [first, moved]);
    // None of them can open or close a fault.
    let events = bench.all_stored().await;
    let names = |event: &&HealthEvent| event.check_name == keys::CHECK_GPU_INVENTORY;
    assert!(!events.iter().filter(names).any(model::event::counts));
}
