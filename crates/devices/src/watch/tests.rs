//! However watchers and writers take turns, a watcher ends up with the board's state.

use std::collections::BTreeMap;

use contract::device::{Condition, ConditionStatus, GpuSpec, GpuStatus};
use diagnosis::gpu::{Gpu as Found, Inventory};
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::*;
use crate::board::{MAX_MESSAGE, Own, Provider, Said};

/// A step of a test.
#[derive(Clone, Debug)]
enum Step {
    Inventory(Vec<u8>),
    Own {
        gpu: u8,
        status: u8,
        large: bool,
    },
    Away,
    Register {
        by: u8,
        gpu: u8,
    },
    Update {
        by: u8,
        gpu: u8,
        status: u8,
        large: bool,
    },
    Unregister {
        by: u8,
        gpu: u8,
    },
    Heartbeat {
        by: u8,
    },
    /// Number of seconds that pass.
    Pass(u8),
    /// A watcher receives up to `events` events.
    Read {
        watcher: u8,
        events: u8,
    },
    /// A watcher reconnects with the last version that it has received.
    Reconnect(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let (gpu, by, watcher) = (0..4_u8, 0..2_u8, 0..3_u8);
    prop_oneof![
        1 => prop::collection::vec(gpu.clone(), 0..4).prop_map(Step::Inventory),
        1 => (gpu.clone(), 1..4_u8, any::<bool>())
            .prop_map(|(gpu, status, large)| Step::Own { gpu, status, large }),
        1 => Just(Step::Away),
        1 => (by.clone(), gpu.clone()).prop_map(|(by, gpu)| Step::Register { by, gpu }),
        4 => (by.clone(), gpu.clone(), 1..4_u8, any::<bool>())
            .prop_map(|(by, gpu, status, large)| Step::Update { by, gpu, status, large }),
        1 => (by.clone(), gpu).prop_map(|(by, gpu)| Step::Unregister { by, gpu }),
        1 => by.prop_map(|by| Step::Heartbeat { by }),
        1 => (0..80_u8).prop_map(Step::Pass),
        6 => (watcher.clone(), 1..8_u8)
            .prop_map(|(watcher, events)| Step::Read { watcher, events }),
        1 => watcher.prop_map(Step::Reconnect),
    ]
}

/// A watcher, with the state that it derives from its messages.
#[derive(Default)]
struct Watcher {
    cursor: Cursor,
    gpus: BTreeMap<String, Gpu>,
    /// Last version that the watcher has received.
    version: String,
}

impl Watcher {
    /// Receives the next event; returns true if there was one.
    fn read(&mut self, board: &Board) -> bool {
        let Some(told) = self.cursor.next(board) else {
            return false;
        };
        let event = WatchGpusResponse::from(told);
        let name = event.gpu.as_ref().map(|gpu| gpu.name.clone());
        match (event.r#type(), event.gpu, name) {
            (WatchEventType::Added, Some(gpu), Some(name)) => {
                assert!(self.gpus.insert(name, gpu).is_none(), "it was sent before");
            }
            (WatchEventType::Modified, Some(gpu), Some(name)) => {
                assert!(
                    self.gpus.insert(name, gpu).is_some(),
                    "it was not sent before"
                );
            }
            (WatchEventType::Deleted, Some(_), Some(name)) => {
                assert!(self.gpus.remove(&name).is_some(), "it was not sent before");
            }
            (WatchEventType::Resync, None, None) => self.gpus.clear(),
            (WatchEventType::Bookmark, None, None) => {}
            other => panic!("{other:?}"),
        }
        if !event.resource_version.is_empty() {
            self.version = event.resource_version;
        }
        true
    }

    fn reconnect(&mut self, board: &Board) {
        // Within a snapshot the watcher has no version yet.
        let from = match self.version.as_str() {
            "" => None,
            version => Some(board.position(version).unwrap()),
        };
        let is_whole = self.cursor.last.is_none() && self.cursor.at.is_some();
        if from.is_none() || !is_whole {
            *self = Self::default();
        } else {
            self.cursor = Cursor::new(from);
        }
    }
}

fn write(board: &mut Board, step: &Step, now: Timestamp) {
    let name = |gpu: u8| format!("GPU-{gpu}");
    let provider = |by: u8| Provider {
        id: format!("p{by}"),
        uid: 0,
        is_operator: true,
    };
    let message = |large: bool| {
        if large {
            "x".repeat(MAX_MESSAGE)
        } else {
            String::new()
        }
    };
    // A refused write changes nothing, which is checked at the end.
    match step {
        Step::Inventory(gpus) => {
            let found = |gpu: &u8| Found {
                index: u32::from(*gpu),
                uuid: name(*gpu),
                ..Found::default()
            };
            let inventory = Inventory {
                gpus: gpus.iter().map(found).collect(),
                ..Inventory::default()
            };
            board.set_inventory(&inventory, now);
        }
        Step::Own { gpu, status, large } => {
            let status = ConditionStatus::try_from(i32::from(*status)).unwrap();
            let (reason, message) = ("R".to_owned(), message(*large));
            let said = Said {
                status,
                reason,
                message,
            };
            let _ = board.set_own(Own::Health, &name(*gpu), said, now);
        }
        Step::Away => board.own_away(Own::Nvml, "Away", "", now),
        Step::Register { by, gpu } => {
            let _ = board.register(&provider(*by), &name(*gpu), GpuSpec::default(), None, now);
        }
        Step::Update {
            by,
            gpu,
            status,
            large,
        } => {
            let one = Condition {
                r#type: format!("Type{by}"),
                status: i32::from(*status),
                message: message(*large),
                ..Condition::default()
            };
            let status = GpuStatus {
                conditions: vec![one],
                ..GpuStatus::default()
            };
            let _ = board.update_status(&provider(*by), &name(*gpu), status, now);
        }
        Step::Unregister { by, gpu } => {
            let _ = board.unregister(&provider(*by), &name(*gpu), now);
        }
        Step::Heartbeat { by } => {
            let _ = board.heartbeat(&provider(*by), &[], now);
        }
        Step::Pass(_) | Step::Read { .. } | Step::Reconnect(_) => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn however_they_take_turns_every_watcher_ends_up_with_the_board(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        // A history so short that watchers fall out of it.
        let mut board = Board::with_history("e".to_owned(), 6 * 1024);
        let mut watchers: [Watcher; 3] = Default::default();
        let mut now = Timestamp::UNIX_EPOCH;
        for step in &steps {
            let version = board.version();
            write(&mut board, step, now);
            match step {
                Step::Pass(seconds) => {
                    now += SignedDuration::from_secs(i64::from(*seconds));
                    board.expire(now);
                }
                Step::Read { watcher, events } => {
                    for _ in 0..*events {
                        watchers[usize::from(*watcher)].read(&board);
                    }
                }
                Step::Reconnect(watcher) => watchers[usize::from(*watcher)].reconnect(&board),
                _ => {}
            }
            prop_assert!(board.version() >= version);
        }
        let expected: BTreeMap<String, Gpu> =
            board.gpus().map(|gpu| (gpu.name.clone(), Gpu::clone(gpu))).collect();
        for watcher in &mut watchers {
            while watcher.read(&board) {}
            prop_assert_eq!(&watcher.gpus, &expected);
            prop_assert_eq!(&watcher.version, &board.name_of(board.version()));
        }
    }
}

#[test]
fn a_version_of_another_board_or_of_the_future_begins_anew() {
    let board = Board::new("e".to_owned());
    for version in ["d-0", "e-1"] {
        let mut cursor = Cursor::new(Some(board.position(version).unwrap()));
        assert!(matches!(cursor.next(&board), Some(Message::Resync)));
        assert!(
            matches!(cursor.next(&board), Some(Message::Bookmark(version)) if version == "e-0")
        );
        assert!(cursor.next(&board).is_none());
    }
    for version in ["", "e", "e-", "e-x", "0"] {
        assert!(board.position(version).is_err(), "{version}");
    }
}
