//! The memory of fake devices, and their work: what is begun takes its time on the clock of its stream,
//! which moves by nothing else, and ends that much later in ours.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that are kept of a piece of memory, from its beginning on: those of a real one would be more
/// than a machine has.
const KEPT_BYTES: usize = 1 << 20;
/// Distance between two handles, so that none is mistaken for another with an offset.
const STEP: usize = 0x100;

static WORK: Mutex<Work> = Mutex::new(Work::new());

/// All devices.
pub(crate) struct Work {
    last: usize,
    /// Pieces of memory by their addresses.
    pub(crate) memory: BTreeMap<usize, Memory>,
    pub(crate) streams: BTreeMap<usize, Stream>,
    pub(crate) events: BTreeMap<usize, Event>,
    /// Parts of ranks in groups.
    pub(crate) ranks: BTreeMap<usize, Rank>,
}

/// A piece of memory.
pub(crate) struct Memory {
    gpu: u32,
    pub(crate) bytes: usize,
    /// Its beginning.
    pub(crate) kept: Vec<u8>,
}

/// A stream.
pub(crate) struct Stream {
    pub(crate) gpu: u32,
    pub(crate) end: End,
}

/// The end of what a stream has to do.
#[derive(Clone)]
pub(crate) struct End {
    /// The clock of the stream then.
    pub(crate) clock_ns: u64,
    /// Our own time then; `None` where it has had nothing to do.
    at: Option<Instant>,
    /// The rank whose work never ends.
    stuck: Option<usize>,
}

/// An event, and the end of the work that it waits for.
pub(crate) struct Event {
    pub(crate) gpu: u32,
    pub(crate) at: Option<End>,
}

/// The part of a rank in a group.
pub(crate) struct Rank {
    pub(crate) group: [u8; 128],
    /// Its number in the group.
    pub(crate) number: u32,
    pub(crate) ranks: u32,
    pub(crate) gpu: u32,
}

/// The progress of some work.
pub(crate) enum Progress {
    Done,
    /// So much time is left.
    Left(Duration),
    /// It never ends.
    Stuck,
}

/// Returns all work.
pub(crate) fn work() -> MutexGuard<'static, Work> {
    WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Work ===

impl Work {
    const fn new() -> Self {
        Self {
            last: 0,
            memory: BTreeMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            ranks: BTreeMap::new(),
        }
    }

    /// Returns a new handle.
    fn next(&mut self) -> usize {
        self.last += STEP;
        self.last
    }

    pub(crate) fn allocate(&mut self, memory: Memory) -> usize {
        let at = self.next();
        self.memory.insert(at, memory);
        at
    }

    pub(crate) fn begin(&mut self, stream: Stream) -> usize {
        let at = self.next();
        self.streams.insert(at, stream);
        at
    }

    pub(crate) fn create(&mut self, event: Event) -> usize {
        let at = self.next();
        self.events.insert(at, event);
        at
    }

    pub(crate) fn join(&mut self, rank: Rank) -> usize {
        let at = self.next();
        self.ranks.insert(at, rank);
        at
    }

    /// Returns the bytes of a GPU that are in use.
    pub(crate) fn used(&self, gpu: u32) -> u64 {
        let of_gpu = self.memory.values().filter(|memory| memory.gpu == gpu);
        of_gpu.map(|memory| memory.bytes as u64).sum()
    }

    /// Returns how far some work is. What an aborted rank was doing is done.
    pub(crate) fn progress(&self, end: &End) -> Progress {
        if end.stuck.is_some_and(|rank| self.ranks.contains_key(&rank)) {
            return Progress::Stuck;
        }
        let left = end
            .at
            .map(|at| at.saturating_duration_since(Instant::now()));
        match left {
            None | Some(Duration::ZERO) => Progress::Done,
            Some(left) => Progress::Left(left),
        }
    }

    /// Gives streams something to do together: it begins when the last of them comes to it. `None` never
    /// ends, and is the work of the ranks.
    pub(crate) fn occupy(&mut self, streams: &[(usize, usize)], time: Option<Duration>) {
        let now = Instant::now();
        let ends = streams
            .iter()
            .filter_map(|(stream, _)| self.streams.get(stream));
        let ends: Vec<&End> = ends.map(|stream| &stream.end).collect();
        let clock = ends
            .iter()
            .map(|end| end.clock_ns)
            .max()
            .unwrap_or_default();
        let at = ends.iter().filter_map(|end| end.at).max();
        let at = at.map_or(now, |at| at.max(now));
        let before = ends.iter().find_map(|end| end.stuck);
        let taken = time.unwrap_or_default();
        for (stream, rank) in streams {
            if let Some(stream) = self.streams.get_mut(stream) {
                let nanoseconds = u64::try_from(taken.as_nanos()).unwrap_or(u64::MAX);
                stream.end = End {
                    clock_ns: clock.saturating_add(nanoseconds),
                    at: Some(at + taken),
                    stuck: if time.is_none() { Some(*rank) } else { before },
                };
            }
        }
    }
}

// === impl Memory ===

impl Memory {
    pub(crate) fn new(gpu: u32, bytes: usize) -> Self {
        Self {
            gpu,
            bytes,
            kept: vec![0; bytes.min(KEPT_BYTES)],
        }
    }
}

// === impl Stream ===

impl Stream {
    pub(crate) fn of(gpu: u32) -> Self {
        Self {
            gpu,
            end: End {
                clock_ns: 0,
                at: None,
                stuck: None,
            },
        }
    }
}
