//! Tests of the dump after an XID 119, and its event.

use super::*;

#[tokio::test]
async fn the_event_of_the_repeats_has_the_dump_and_the_first_waits_for_none() {
    let mut bench = Bench::new();
    let timeout = "NVRM: Xid (PCI:0000:03:00): 119, pid=1, name=a, Timeout waiting for RPC from \
                   GPU0 GSP! Expected function 76 (GSP_RM_CONTROL) (0x2080a097 0x490).";
    let dump = [
        "GPU0 RPC history (CPU -> GSP):",
        "     0    76   GSP_RM_CONTROL        0x000000002080a097 0x0000000000000490",
    ];
    bench.append(&at(1, 0, timeout));
    for line in dump {
        bench.append(&at(1, 0, &format!("NVRM: {line}")));
    }
    for second in [6, 12, 100] {
        bench.append(&at(1, second, timeout));
    }
    let events = bench.run_until(2).await;
    let told: Vec<_> = events
        .iter()
        .map(|event| {
            let get = |key| event.metadata.get(key).map(String::as_str);
            (get(keys::META_COUNT), get(keys::META_RPC_HISTORY))
        })
        .collect();
    assert_eq!(told, [(None, None), (Some("2"), Some(&*dump.join("\n")))]);
}
