//! A file of the systemd journal: any bytes, read as on a node, from the start and from a
//! position in it.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use host::boot::BootId;
use host::kernel_log::{Cursor, Event, KernelLogSpec, LINE_MAX, Position, open};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Batch size of the monitor.
const BATCH: usize = 512;
/// Upper bound of the number of events in a file of this size.
const MAX_EVENTS: usize = 1 << 20;
/// Sequence number id and boot id of the seeds.
const SEQUENCE: u128 = u128::from_be_bytes([1; 16]);
const BOOT: [u8; 16] = [2; 16];

struct Place {
    runtime: Runtime,
    directory: TempDir,
}

thread_local! {
    static PLACE: OnceCell<Place> = const { OnceCell::new() };
}

/// Panics if the reader breaks an invariant on this input.
pub fn run(bytes: &[u8]) {
    PLACE.with(|place| {
        let place = place.get_or_init(Place::new);
        let file = place.directory.path().join("system.journal");
        std::fs::write(&file, bytes).unwrap();
        // After a position, the entries of all boots are read.
        let behind = |seqnum_id, seqnum| {
            Some(Position::Journal(Cursor {
                seqnum_id,
                seqnum,
                boot_id: BootId::from_bytes([9; 16]),
                monotonic: 0,
                realtime: 0,
                xor_hash: 0,
            }))
        };
        let all = place.read(behind(0, 0).as_ref());
        let rest = place.read(behind(SEQUENCE, 2).as_ref());
        place.read(None);
        assert!(all <= bytes.len() && rest <= bytes.len());
    });
}

impl Place {
    fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let root = if memory.is_dir() {
            memory.to_owned()
        } else {
            std::env::temp_dir()
        };
        Self {
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap(),
            directory: TempDir::new_in(root).unwrap(),
        }
    }

    /// Reads the journal to its end. Returns the number of records.
    fn read(&self, resume: Option<&Position>) -> usize {
        self.runtime.block_on(async {
            let spec = KernelLogSpec::Journal(Some(PathBuf::from(self.directory.path())));
            let Ok(mut source) = open(&spec, resume) else {
                return 0;
            };
            let (mut events, mut records) = (Vec::new(), 0);
            loop {
                // Damage in the file that is being written is an error and ends the read for
                // now.
                let read = source.next_batch(&mut events, BATCH).await;
                for event in events.drain(..) {
                    match event {
                        Event::CaughtUp => return records,
                        Event::Record(record) => {
                            records += 1;
                            // A byte that is not UTF-8 is escaped as four.
                            assert!(record.text.len() <= 4 * LINE_MAX);
                            assert!(
                                record.boot_id != Some(BootId::from_bytes(BOOT))
                                    || resume.is_some()
                            );
                        }
                        _ => {}
                    }
                }
                if read.is_err() {
                    return records;
                }
                assert!(records < MAX_EVENTS);
            }
        })
    }
}
