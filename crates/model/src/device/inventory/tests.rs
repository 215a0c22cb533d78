use super::*;
use crate::device::test_util::slice;
use crate::device::{DeviceTaint, Dimension, RuleSpec, TaintEffect};
use crate::ownership::Maker;

fn subject(kind: &str, value: &str) -> Subject {
    let entity = contract::Entity {
        entity_type: kind.into(),
        entity_value: value.into(),
    };
    Subject::of_entities(&[entity]).remove(0)
}

/// Returns the names of the devices of a GPU on `n1`.
fn found(inventory: &Inventory, kind: &str, value: &str) -> Vec<String> {
    let devices = inventory.of_node("n1", [].iter());
    let found = devices.find(&subject(kind, value));
    found.into_iter().map(|id| id.name.clone()).collect()
}

#[test]
fn a_device_is_found_by_the_uuid_or_the_address_of_its_gpu() {
    let mut inventory = Inventory::default();
    let mut slice = slice("n1", 2);
    for (name, mig) in [("gpu-1-mig-0", "MIG-a"), ("gpu-1-mig-1", "MIG-b")] {
        let mut device = slice.devices[1].clone();
        (device.name, device.mig) = (name.into(), Some(mig.into()));
        slice.devices.push(device);
    }
    inventory.take("s", Some(slice));
    let divided = ["gpu-1", "gpu-1-mig-0", "gpu-1-mig-1"];
    for (kind, value, expected) in [
        ("GPU_UUID", "GPU-0", &["gpu-0"][..]),
        ("GPU_UUID", "gpu-0", &["gpu-0"]),
        ("PCI", "00000000:00:00.0", &["gpu-0"]),
        // A fault of one partition concerns the others.
        ("GPU_UUID", "GPU-1", &divided),
        ("GPU_UUID", "MIG-b", &divided),
        ("GPU_UUID", "GPU-2", &[]),
        ("GPU", "0", &[]),
    ] {
        assert_eq!(found(&inventory, kind, value), expected, "{kind} {value}");
    }
    assert!(inventory.of_node("n2", [].iter()).is_empty());
}

#[test]
fn the_newest_generation_counts_once_it_is_whole() {
    let mut inventory = Inventory::default();
    let part = |generation, slices, name: &str| {
        let mut slice = slice("n1", 1);
        (slice.generation, slice.slices) = (generation, slices);
        slice.devices[0].name = name.into();
        slice
    };
    let of_gpu = |inventory: &Inventory| found(inventory, "GPU_UUID", "GPU-0");
    inventory.take("a", Some(part(1, 2, "old-a")));
    assert!(of_gpu(&inventory).is_empty(), "half of it is there");
    inventory.take("b", Some(part(1, 2, "old-b")));
    assert_eq!(of_gpu(&inventory), ["old-a", "old-b"]);
    // The old devices stay until a generation is complete, in whatever order slices are
    // updated.
    inventory.take("c", Some(part(2, 2, "new-c")));
    assert_eq!(of_gpu(&inventory), ["old-a", "old-b"]);
    inventory.take("a", Some(part(2, 2, "new-a")));
    assert_eq!(
        of_gpu(&inventory),
        ["new-c", "new-a"]
            .map(String::from)
            .iter()
            .rev()
            .cloned()
            .collect::<Vec<_>>()
    );
    inventory.take("b", None);
    // A slice that moves to another node takes its devices along.
    let mut moved = part(3, 1, "moved");
    moved.node = Some("n2".into());
    let nodes = inventory.take("a", Some(moved));
    assert_eq!(nodes, ["n1", "n2"].map(String::from).into());
    assert!(of_gpu(&inventory).is_empty());
    inventory.take("a", None);
    inventory.take("c", None);
    assert!(inventory.of_node("n2", [].iter()).is_empty());
}

#[test]
fn a_gpu_that_is_published_no_more_is_known_by_its_rule() {
    let inventory = Inventory::default();
    let rule = |gpu: &str| DeviceTaintRule {
        name: "r".into(),
        resource_version: "1".into(),
        created_at: None,
        spec: RuleSpec {
            device: DeviceId {
                name: "gpu-7".into(),
                ..DeviceId::default()
            },
            taint: DeviceTaint {
                key: Dimension::Xid.key(),
                value: "79".into(),
                effect: TaintEffect::NoSchedule,
            },
            node: "n1".into(),
            gpu: gpu.into(),
            by: Maker::Controller,
            store: None,
        },
        eviction: None,
    };
    for (gpu, kind) in [("GPU-7", "GPU_UUID"), ("0000:07:00.0", "PCI")] {
        let devices = inventory.of_node("n1", [rule(gpu)].iter());
        assert_eq!(devices.find(&subject(kind, gpu)).len(), 1, "{gpu}");
    }
}
