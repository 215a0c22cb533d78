//! Random sequences of readings, with restarts and reboots.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// An event of GPU 1, or of all GPUs.
#[derive(Clone, Copy, Debug)]
enum Happens {
    Reports(usize),
    IsSilent(usize),
    Lasts(usize),
    IsWell,
    Vanishes,
    IsUnreadable(bool),
    IsReplaced,
    AllVanish,
    Restart,
    Reboot,
    Waits(u8),
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        4 => (0..WHILE_TOLD.len()).prop_map(Happens::Reports),
        2 => (0..WHILE_TOLD.len()).prop_map(Happens::IsSilent),
        2 => (0..WHEN_IT_LASTS.len()).prop_map(Happens::Lasts),
        2 => Just(Happens::IsWell),
        1 => Just(Happens::Vanishes),
        1 => any::<bool>().prop_map(Happens::IsUnreadable),
        1 => Just(Happens::IsReplaced),
        1 => Just(Happens::AllVanish),
        1 => Just(Happens::Restart),
        1 => Just(Happens::Reboot),
        4 => (1..24_u8).prop_map(Happens::Waits),
    ]
}

/// A machine whose GPU 1 is replaced now and then.
struct Machine {
    bench: Bench,
    uuid: String,
}

impl Machine {
    /// Restores GPU 1 and all others to health.
    fn is_whole(&mut self) {
        let Bench {
            mut inventory,
            mut readings,
            ..
        } = Bench::new(3);
        inventory.gpus[1].uuid.clone_from(&self.uuid);
        readings[1].uuid.clone_from(&self.uuid);
        (self.bench.inventory, self.bench.readings) = (inventory, readings);
    }

    fn undergoes(&mut self, happens: Happens) {
        if let Happens::IsReplaced = happens {
            self.uuid.push('x');
        }
        if !matches!(happens, Happens::Waits(_)) {
            self.is_whole();
        }
        let bench = &mut self.bench;
        let mut apply = |edit: Edit| edit(&mut bench.inventory.gpus[1], &mut bench.readings[1]);
        match happens {
            Happens::Reports(index) => apply(WHILE_TOLD[index].2),
            Happens::IsSilent(index) => apply(WHILE_TOLD[index].3),
            Happens::Lasts(index) => apply(WHEN_IT_LASTS[index].3),
            Happens::Vanishes => _ = bench.inventory.gpus.remove(1),
            Happens::IsUnreadable(is_lost) => {
                let gpu = bench.inventory.gpus.remove(1);
                bench.inventory.unreadable = vec![UnreadableGpu {
                    index: 1,
                    pci: Some(gpu.pci),
                    is_lost,
                    ..UnreadableGpu::default()
                }];
            }
            Happens::AllVanish => bench.inventory.gpus.clear(),
            Happens::Restart => bench.restart(),
            Happens::Reboot => bench.health.boot_has_begun(|_| false),
            Happens::IsWell | Happens::IsReplaced | Happens::Waits(_) => {}
        }
    }
}

proptest! {
    #[test]
    fn whatever_happens_all_is_over_once_all_is_well(
        all in proptest::collection::vec(happens(), 1..30)
    ) {
        let mut machine = Machine { bench: Bench::new(3), uuid: "GPU-1".to_owned() };
        let mut open = BTreeSet::new();
        for happens in all.into_iter().chain([Happens::IsWell, Happens::Waits(24)]) {
            machine.undergoes(happens);
            let bench = &mut machine.bench;
            let looks = if let Happens::Waits(looks) = happens { looks } else { 1 };
            for _ in 0..looks {
                bench.now += EVERY;
                let changes = bench.health.take(&bench.inventory, &bench.readings, bench.now);
                for change in changes {
                    prop_assert!(!bench.inventory.gpus.is_empty(), "nothing is seen: {change:?}");
                    let problem = (change.gpu.and_then(|gpu| gpu.uuid), change.code, change.link);
                    if change.message.is_some() {
                        open.insert(problem);
                    } else {
                        open.remove(&problem);
                    }
                }
            }
        }
        // The state as a receiver of the changes has it.
        prop_assert_eq!(open, BTreeSet::new());
    }
}
