//! Reductions of communicators with ranks in several processes. The process that created the id
//! listens on a Unix socket, and the id holds its path. For each reduction, each process sends
//! the result of its own ranks and receives the result of all.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Largest count of numbers in a message: as many as fake devices store.
const MOST_NUMBERS: usize = 8 << 20;

/// Number of reductions so far, by communicator, in this process.
static ROUNDS: Mutex<BTreeMap<[u8; 128], u64>> = Mutex::new(BTreeMap::new());

/// Result of a part of the ranks.
pub(super) struct Part {
    pub(super) ranks: u32,
    /// Lowest bandwidth of the ranks, in GB/s.
    pub(super) gb_s: f64,
    pub(super) numbers: Vec<f32>,
}

/// Message with a part of a reduction.
struct Message {
    round: u64,
    /// Number of all ranks.
    total: u32,
    operation: u32,
    part: Part,
}

/// Combines numbers with an operation of NCCL. An average is summed up first, and divided at the
/// end.
pub(super) fn combine(into: &mut Vec<f32>, numbers: Vec<f32>, operation: u32) {
    if into.is_empty() {
        *into = numbers;
        return;
    }
    for (into, number) in into.iter_mut().zip(numbers) {
        *into = match operation {
            1 => *into * number,
            2 => into.max(number),
            3 => into.min(number),
            _ => *into + number,
        };
    }
}

/// Listens on a path for the processes of a communicator, until this process ends.
pub(super) fn listen(path: &Path) -> io::Result<()> {
    let listener = UnixListener::bind(path)?;
    thread::Builder::new().spawn(move || {
        let mut rounds: BTreeMap<u64, Vec<(UnixStream, Message)>> = BTreeMap::new();
        for mut stream in listener.incoming().flatten() {
            let Ok(message) = Message::receive(&mut stream) else {
                continue;
            };
            let (round, total) = (message.round, message.total);
            let there = rounds.entry(round).or_default();
            there.push((stream, message));
            let ranks: u32 = there.iter().map(|(_, message)| message.part.ranks).sum();
            if ranks >= total {
                answer(rounds.remove(&round).unwrap_or_default());
            }
        }
    })?;
    Ok(())
}

/// Sends the result of all ranks to all processes.
fn answer(parts: Vec<(UnixStream, Message)>) {
    let mut streams = Vec::new();
    let mut whole: Option<Message> = None;
    for (stream, message) in parts {
        streams.push(stream);
        match &mut whole {
            None => whole = Some(message),
            Some(whole) => {
                whole.part.ranks += message.part.ranks;
                whole.part.gb_s = whole.part.gb_s.min(message.part.gb_s);
                combine(
                    &mut whole.part.numbers,
                    message.part.numbers,
                    message.operation,
                );
            }
        }
    }
    let Some(whole) = whole else {
        return;
    };
    for mut stream in streams {
        // A process that has ended receives no result.
        drop(whole.send(&mut stream));
    }
}

/// Reduces with the other processes of a communicator, and waits for them.
pub(super) fn with_others(
    group: [u8; 128],
    total: u32,
    operation: u32,
    part: Part,
) -> io::Result<Part> {
    let path = group.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut stream = UnixStream::connect(Path::new(OsStr::from_bytes(path)))?;
    let mut rounds = ROUNDS.lock().unwrap_or_else(PoisonError::into_inner);
    let round = rounds.entry(group).or_default();
    *round += 1;
    let message = Message {
        round: *round,
        total,
        operation,
        part,
    };
    drop(rounds);
    message.send(&mut stream)?;
    Ok(Message::receive(&mut stream)?.part)
}

// === impl Message ===

impl Message {
    fn send(&self, stream: &mut UnixStream) -> io::Result<()> {
        let part = &self.part;
        let header = [
            self.round,
            self.total.into(),
            self.operation.into(),
            part.ranks.into(),
            part.gb_s.to_bits(),
            part.numbers.len() as u64,
        ];
        let mut bytes = header.map(u64::to_ne_bytes).concat();
        bytes.extend(part.numbers.iter().flat_map(|number| number.to_ne_bytes()));
        stream.write_all(&bytes)
    }

    fn receive(stream: &mut UnixStream) -> io::Result<Self> {
        let mut header = [[0; 8]; 6];
        stream.read_exact(header.as_flattened_mut())?;
        let [round, total, operation, ranks, gb_s, count] = header.map(u64::from_ne_bytes);
        let small = |number: u64| u32::try_from(number).map_err(io::Error::other);
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if count > MOST_NUMBERS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut numbers = vec![[0; 4]; count];
        stream.read_exact(numbers.as_flattened_mut())?;
        Ok(Self {
            round,
            total: small(total)?,
            operation: small(operation)?,
            part: Part {
                ranks: small(ranks)?,
                gb_s: f64::from_bits(gb_s),
                numbers: numbers.into_iter().map(f32::from_ne_bytes).collect(),
            },
        })
    }
}
