//! Memory of the fake devices, and their work. Each stream has a clock that only its work
//! advances; the work also takes as long in real time.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Largest part of a memory allocation that is stored, from its start: a real device's memory
/// may not fit in this machine. The checks of gpuwarden do not compare more.
const KEPT_BYTES: usize = 32 << 20;
/// Distance between two handles, so that a handle with an offset is not mistaken for another.
const STEP: usize = 0x100;

static WORK: Mutex<Work> = Mutex::new(Work::new());

/// State of all devices.
pub(crate) struct Work {
    last: usize,
    /// Memory allocations by address.
    pub(crate) memory: BTreeMap<usize, Memory>,
    pub(crate) streams: BTreeMap<usize, Stream>,
    pub(crate) events: BTreeMap<usize, Event>,
    /// Ranks of communicators, by handle.
    pub(crate) ranks: BTreeMap<usize, Rank>,
}

/// A memory allocation on a device.
pub(crate) struct Memory {
    pub(crate) gpu: u32,
    pub(crate) bytes: usize,
    /// Stored bytes from the start of the allocation, up to the last one written.
    kept: Vec<u8>,
    /// Value of each byte behind the stored ones.
    fill: u8,
}

/// A stream of a device.
pub(crate) struct Stream {
    pub(crate) gpu: u32,
    pub(crate) end: End,
}

/// End of the queued work of a stream.
#[derive(Clone)]
pub(crate) struct End {
    /// Clock of the stream at the end, in ns.
    pub(crate) clock_ns: u64,
    /// Real time of the end; `None` if the stream has had no work.
    at: Option<Instant>,
    /// Rank whose work hangs.
    stuck: Option<usize>,
}

/// An event, and the end of the work recorded in it.
pub(crate) struct Event {
    pub(crate) gpu: u32,
    pub(crate) at: Option<End>,
}

/// A rank of a communicator.
pub(crate) struct Rank {
    pub(crate) group: [u8; 128],
    /// Number of the rank in its group.
    pub(crate) number: u32,
    pub(crate) ranks: u32,
    pub(crate) gpu: u32,
}

/// Progress of queued work.
pub(crate) enum Progress {
    Done,
    /// Remaining time of the work.
    Left(Duration),
    /// The work never ends.
    Stuck,
}

/// Locks the state of all devices.
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

    /// Returns the number of allocated bytes of a GPU.
    pub(crate) fn used(&self, gpu: u32) -> u64 {
        let of_gpu = self.memory.values().filter(|memory| memory.gpu == gpu);
        of_gpu.map(|memory| memory.bytes as u64).sum()
    }

    /// Returns the progress of work. The work of an aborted rank is done.
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

    /// Queues work that several streams do together: it begins once all of them have reached it.
    /// With `None` as `time` it hangs until the rank is aborted.
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
            kept: Vec::new(),
            fill: 0,
        }
    }

    /// Returns the number of stored bytes.
    pub(crate) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Returns the first `bytes` bytes, or fewer if the rest is not stored.
    pub(crate) fn beginning(&self, bytes: usize) -> Vec<u8> {
        let mut beginning = vec![self.fill; bytes.min(self.bytes).min(KEPT_BYTES)];
        for (into, kept) in beginning.iter_mut().zip(&self.kept) {
            *into = *kept;
        }
        beginning
    }

    /// Writes the first bytes, up to [`KEPT_BYTES`].
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let length = bytes.len().min(self.bytes).min(KEPT_BYTES);
        if self.kept.len() < length {
            self.kept.resize(length, self.fill);
        }
        for (into, byte) in self.kept.iter_mut().zip(bytes) {
            *into = *byte;
        }
    }

    /// Sets each of the first `bytes` bytes.
    pub(crate) fn set(&mut self, byte: u8, bytes: usize) {
        if bytes == self.bytes {
            self.kept.clear();
            self.fill = byte;
        } else {
            self.write(&vec![byte; bytes.min(KEPT_BYTES)]);
        }
    }

    /// Reads the first bytes into the whole slice.
    pub(crate) fn read(&self, into: &mut [u8]) {
        into.fill(self.fill);
        for (into, kept) in into.iter_mut().zip(&self.kept) {
            *into = *kept;
        }
    }

    /// Flips the lowest bit of the first byte, as broken hardware may.
    pub(crate) fn corrupt(&mut self) {
        let first = self.beginning(1).first().copied().unwrap_or_default();
        self.write(&[first ^ 1]);
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
