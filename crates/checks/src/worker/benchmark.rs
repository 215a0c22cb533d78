//! All-reduces over the devices of this process, as ranks of a group. Checks the sums, measures
//! the time, and checks the sums again, since a warm GPU may fail where a cold one does not.

use std::thread;
use std::time::Duration;

use host::cuda::{Buffer, Cuda, Device, Event, Stream};
use host::nccl::{Communicator, Nccl, RankPart, Reduction, UniqueId};

use crate::numbers::{self, MOST_COMPARED, Numbers};

use super::{Benchmark, Join, Measured, WorkerFailure};

/// Interval of polling work in progress.
const LOOK: Duration = Duration::from_micros(200);
/// Byte that fills messages whose contents do not matter: as floats, numbers a little below
/// one.
const FILLING: u8 = 0x3f;

/// State of one device.
struct Member {
    pci: String,
    rank: u32,
    send: Buffer,
    receive: Buffer,
    stream: Stream,
    begin: Event,
    end: Event,
    communicator: Communicator,
}

/// Members of a group in this process.
struct Group<'a> {
    nccl: &'a Nccl,
    members: Vec<Member>,
}

/// Measures the time of all-reduces. Frees nothing, since that would wait for work that may
/// never end: the process ends instead.
pub(super) fn all_reduce(
    cuda: &Cuda,
    nccl: &Nccl,
    join: &Join,
    benchmark: &Benchmark,
) -> Result<Vec<Measured>, WorkerFailure> {
    let mut group = std::mem::ManuallyDrop::new(Group::join(cuda, nccl, join, benchmark)?);
    let numbers = Numbers::of(join.ranks);
    group.check_sums(numbers, benchmark)?;
    let mut measured = Vec::new();
    for bytes in &benchmark.sizes {
        group.time(*bytes, benchmark.warmups, benchmark)?;
        let seconds = group.time(*bytes, benchmark.iterations, benchmark)?;
        measured.push(Measured {
            bytes: *bytes / 4 * 4,
            seconds: seconds / f64::from(benchmark.iterations.max(1)),
        });
    }
    group.check_sums(numbers, benchmark)?;
    Ok(measured)
}

/// Waits until data written to a buffer has arrived. Writes use the device's default stream,
/// which the benchmark's streams do not wait for; reading back orders behind them.
pub(super) fn settle(buffer: &Buffer) -> Result<(), WorkerFailure> {
    Ok(buffer.read(&mut [0; 4])?)
}

/// Parses a group's id from hexadecimal digits.
fn id(text: &str) -> Option<UniqueId> {
    let digits = text.as_bytes().as_chunks::<2>().0.iter();
    let bytes = digits.map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok());
    let bytes: Vec<u8> = bytes.collect::<Option<_>>()?;
    Some(UniqueId::from(<[u8; 128]>::try_from(bytes).ok()?))
}

// === impl Group ===

impl<'a> Group<'a> {
    fn join(
        cuda: &Cuda,
        nccl: &'a Nccl,
        join: &Join,
        benchmark: &Benchmark,
    ) -> Result<Self, WorkerFailure> {
        let id = id(&join.id)
            .ok_or_else(|| WorkerFailure::Crashed("was given a group without a name".to_owned()))?;
        let devices = cuda.devices()?;
        let places: Vec<(&Device, u32)> = devices.iter().zip(join.first..).collect();
        let communicators = nccl.join(&id, join.ranks, &places)?;
        let largest = benchmark.sizes.iter().copied().max().unwrap_or_default();
        let largest = usize::try_from(largest).unwrap_or(usize::MAX);
        let mut group = Self {
            nccl,
            members: Vec::new(),
        };
        for ((device, rank), communicator) in places.into_iter().zip(communicators) {
            group.members.push(Member {
                pci: device.pci()?,
                rank,
                send: device.buffer(largest)?,
                receive: device.buffer(largest)?,
                stream: device.stream()?,
                begin: device.event()?,
                end: device.event()?,
                communicator,
            });
        }
        Ok(group)
    }

    /// Adds numbers with known sums, and compares the results.
    fn check_sums(&mut self, numbers: Numbers, benchmark: &Benchmark) -> Result<(), WorkerFailure> {
        let largest = benchmark.sizes.iter().copied().max().unwrap_or_default();
        let count = usize::try_from(largest.min(MOST_COMPARED) / 4).unwrap_or_default();
        for member in &mut self.members {
            member.send.write(&numbers.brought(member.rank, count))?;
            settle(&member.send)?;
        }
        self.begin(count, Reduction::Sum)?;
        self.finish()?;
        let expected = numbers.sums(count);
        let mut found = vec![0; expected.len()];
        for member in &self.members {
            member.receive.read(&mut found)?;
            numbers::compare(&expected, &found).map_err(WorkerFailure::of_gpu(&member.pci))?;
        }
        Ok(())
    }

    /// Returns the time that `times` all-reduces take on the slowest device (seconds).
    fn time(
        &mut self,
        bytes: u64,
        times: u32,
        benchmark: &Benchmark,
    ) -> Result<f64, WorkerFailure> {
        let count = usize::try_from(bytes / 4).unwrap_or(usize::MAX);
        for member in &mut self.members {
            member.send.fill(FILLING)?;
            settle(&member.send)?;
            member.begin.record(&member.stream)?;
        }
        for _ in 0..times {
            self.begin(count, benchmark.operation.of_nccl())?;
        }
        for member in &mut self.members {
            member.end.record(&member.stream)?;
        }
        self.finish()?;
        let mut slowest = 0.0_f64;
        for member in &self.members {
            let milliseconds = member.end.milliseconds_since(&member.begin)?;
            slowest = slowest.max(f64::from(milliseconds) / 1e3);
        }
        Ok(slowest)
    }

    fn begin(&mut self, count: usize, reduction: Reduction) -> Result<(), WorkerFailure> {
        let parts = self.members.iter_mut().map(|member| RankPart {
            communicator: &member.communicator,
            send: &member.send,
            receive: &mut member.receive,
            stream: &member.stream,
        });
        let parts: Vec<RankPart<'_>> = parts.collect();
        Ok(self.nccl.all_reduce(&parts, count, reduction)?)
    }

    /// Waits until all work is done, and fails as soon as some of it has failed.
    fn finish(&self) -> Result<(), WorkerFailure> {
        for member in &self.members {
            while !member.stream.is_done()? {
                for one in &self.members {
                    one.communicator.check().map_err(host::nccl::Error::from)?;
                }
                thread::sleep(LOOK);
            }
        }
        Ok(())
    }
}
