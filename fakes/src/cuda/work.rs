//! The memory of fake devices, and their work: what is begun takes its time on the clock of its stream,
//! which moves by nothing else, and ends that much later in ours.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes that are kept of a piece of memory, from its beginning on: those of a real one would be more
/// than a machine has. What a check of gpuwarden compares is no more.
const KEPT_BYTES: usize = 32 << 20;
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
    pub(crate) gpu: u32,
    pub(crate) bytes: usize,
    /// Its beginning, as far as it was written.
    kept: Vec<u8>,
    /// Each byte behind that.
    fill: u8,
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
            kept: Vec::new(),
            fill: 0,
        }
    }

    /// Returns the number of bytes that were written, and are kept.
    pub(crate) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Returns so much of its beginning, as far as it is kept.
    pub(crate) fn beginning(&self, bytes: usize) -> Vec<u8> {
        let mut beginning = vec![self.fill; bytes.min(self.bytes).min(KEPT_BYTES)];
        for (into, kept) in beginning.iter_mut().zip(&self.kept) {
            *into = *kept;
        }
        beginning
    }

    /// Writes its beginning, as far as it is kept.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let length = bytes.len().min(self.bytes).min(KEPT_BYTES);
        if self.kept.len() < length {
            self.kept.resize(length, self.fill);
        }
        for (into, byte) in self.kept.iter_mut().zip(bytes) {
            *into = *byte;
        }
    }

    /// Sets each byte of its beginning.
    pub(crate) fn set(&mut self, byte: u8, bytes: usize) {
        if bytes == self.bytes {
            self.kept.clear();
            self.fill = byte;
        } else {
            self.write(&vec![byte; bytes.min(KEPT_BYTES)]);
        }
    }

    /// Reads its beginning into as much room as there is.
    pub(crate) fn read(&self, into: &mut [u8]) {
        into.fill(self.fill);
        for (into, kept) in into.iter_mut().zip(&self.kept) {
            *into = *kept;
        }
    }

    /// Changes the lowest bit of its first byte, as broken hardware may.
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
