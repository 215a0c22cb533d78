//! Functions of NCCL that gpuwarden calls, as declared in `nccl.h`. An all-reduce takes as long
//! as its bytes need at the bandwidth of the scenario. Ranks in several processes meet through
//! [`exchange`], and the lowest bandwidth counts.

#![allow(unsafe_code, reason = "exports the functions of a C library")]
#![allow(non_snake_case, reason = "the names of nccl.h")]

mod exchange;

use std::cell::{Cell, RefCell};
use std::collections::hash_map::RandomState;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::hash::{BuildHasher as _, Hasher as _};
use std::os::unix::ffi::OsStrExt as _;
use std::time::Duration;

use crate::cuda::selected;
use crate::cuda::work::{Memory, Rank, Work, work};
use crate::nvml::{behave, current, directory};
use crate::scenario::{FakeNccl, Scenario};
use exchange::Part;

const OK: u32 = 0;
const SYSTEM_ERROR: u32 = 2;
const INVALID_ARGUMENT: u32 = 4;
const INVALID_USAGE: u32 = 5;
const REMOTE_ERROR: u32 = 6;

/// Texts of the codes, from code 0 on.
const TEXTS: [&CStr; 8] = [
    c"no error",
    c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
    c"internal error - please report this issue to the NCCL developers",
    c"invalid argument (run with NCCL_DEBUG=WARN for details)",
    c"invalid usage (run with NCCL_DEBUG=WARN for details)",
    c"remote process exited or there was a network error",
    c"NCCL operation in progress",
];
/// Type number of 32-bit floating-point numbers (`ncclFloat32`).
const FLOAT32: c_uint = 7;
/// Size of each type in bytes, by its number.
const TYPE_BYTES: [usize; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];

/// Number of bytes that a reduction computes at least, if less was written.
const LEAST_RECKONED: usize = 1 << 20;

/// Id of a communicator (`ncclUniqueId`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; 128]);

/// A call that is deferred to the end of its group.
#[derive(Clone, Copy)]
enum Call {
    Join {
        into: *mut usize,
        group: [u8; 128],
        ranks: u32,
        rank: u32,
        gpu: u32,
    },
    Reduce(Reduce),
}

/// Part of a rank in an all-reduce.
#[derive(Clone, Copy)]
struct Reduce {
    rank: usize,
    send: usize,
    receive: usize,
    numbers: usize,
    kind: c_uint,
    operation: c_uint,
    stream: usize,
}

/// Code and text of an error.
type Failure = (u32, &'static CStr);

thread_local! {
    /// Number of groups that are open, by `ncclGroupStart`.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static CALLS: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) };
    /// Text of the last error.
    static LAST: Cell<&'static CStr> = const { Cell::new(c"") };
}

fn answer(call: &str, tell: impl FnOnce(&Scenario) -> Result<(), Failure>) -> u32 {
    let scenario = current();
    if let Some(behaviour) = scenario.calls.get(call) {
        return behave(behaviour);
    }
    match tell(&scenario) {
        Ok(()) => OK,
        Err((code, about)) => {
            LAST.set(about);
            code
        }
    }
}

/// Writes a result through a pointer.
fn write<T>(to: *mut T, value: T) -> Result<(), Failure> {
    if to.is_null() {
        return Err((INVALID_ARGUMENT, c"a pointer is null"));
    }
    // SAFETY: The caller of an NCCL function passes a pointer to a value of this type.
    unsafe { to.write(value) };
    Ok(())
}

/// Makes a call, or defers it to the end of the open group.
fn make(scenario: &Scenario, call: Call) -> Result<(), Failure> {
    CALLS.with_borrow_mut(|calls| calls.push(call));
    if DEPTH.get() == 0 {
        make_all(scenario)?;
    }
    Ok(())
}

/// Makes the deferred calls.
fn make_all(scenario: &Scenario) -> Result<(), Failure> {
    let calls = CALLS.take();
    let mut work = work();
    let mut reduces = Vec::new();
    for call in calls {
        match call {
            Call::Join {
                into,
                group,
                ranks,
                rank,
                gpu,
            } => {
                let mut others = work.ranks.values().filter(|other| other.group == group);
                if rank >= ranks {
                    return Err((INVALID_ARGUMENT, c"a rank is beyond the last"));
                }
                if others.any(|other| other.number == rank || other.gpu == gpu) {
                    return Err((INVALID_USAGE, c"a rank, or a GPU, is there twice"));
                }
                let joined = work.join(Rank {
                    group,
                    number: rank,
                    ranks,
                    gpu,
                });
                write(into, joined)?;
            }
            Call::Reduce(reduce) => reduces.push(reduce),
        }
    }
    while let Some(first) = reduces.first().copied() {
        let group = group(&work, first.rank)?;
        let mut parts = Vec::new();
        let mut rest = Vec::new();
        for reduce in reduces {
            let is_same = self::group(&work, reduce.rank)? == group;
            if is_same { &mut parts } else { &mut rest }.push(reduce);
        }
        all_reduce(&mut work, scenario, &parts)?;
        reduces = rest;
    }
    Ok(())
}

fn group(work: &Work, rank: usize) -> Result<[u8; 128], Failure> {
    let known = work.ranks.get(&rank);
    let known = known.ok_or((INVALID_ARGUMENT, c"a communicator is not known"))?;
    Ok(known.group)
}

/// Runs an all-reduce of a communicator with the parts of this process.
#[allow(
    clippy::cast_precision_loss,
    reason = "bytes and ranks are far below what a number with a point holds"
)]
fn all_reduce(work: &mut Work, scenario: &Scenario, parts: &[Reduce]) -> Result<(), Failure> {
    let Some(first) = parts.first() else {
        return Ok(());
    };
    let group = group(work, first.rank)?;
    let here = work.ranks.values().filter(|rank| rank.group == group);
    let ranks = here.clone().map(|rank| rank.ranks).max().unwrap_or(1);
    if here.count() != parts.len() {
        // The real library waits forever for that rank.
        return Err((INVALID_USAGE, c"a rank of this process does not take part"));
    }
    let same = |part: &Reduce| (part.numbers, part.kind, part.operation);
    if parts.iter().any(|part| same(part) != same(first)) {
        return Err((INVALID_USAGE, c"the parts are not alike"));
    }
    let kind = usize::try_from(first.kind).unwrap_or(usize::MAX);
    let width = TYPE_BYTES.get(kind);
    let width = width.ok_or((INVALID_ARGUMENT, c"a type is not known"))?;
    let bytes = first.numbers.saturating_mul(*width);
    for part in parts {
        for at in [part.send, part.receive] {
            if work
                .memory
                .get(&at)
                .is_none_or(|memory| memory.bytes < bytes)
            {
                return Err((INVALID_ARGUMENT, c"a buffer is not known, or too small"));
            }
        }
        let rank = work.ranks.get(&part.rank).map(|rank| rank.gpu);
        if work.streams.get(&part.stream).map(|stream| stream.gpu) != rank {
            return Err((
                INVALID_ARGUMENT,
                c"a stream is not known, or of another GPU",
            ));
        }
    }
    let numbers = if first.kind == FLOAT32 {
        reckon(work, parts)
    } else {
        Vec::new()
    };
    let mut whole = Part {
        ranks: u32::try_from(parts.len()).unwrap_or(u32::MAX),
        gb_s: bandwidth(&scenario.nccl),
        numbers,
    };
    if whole.ranks < ranks {
        let together = exchange::with_others(group, ranks, first.operation, whole);
        whole =
            together.map_err(|_| (REMOTE_ERROR, c"the process that named the group is gone"))?;
    }
    tell(work, scenario, parts, &whole);
    let ranks = f64::from(ranks);
    // Each GPU sends and receives this multiple of its buffer. A single GPU copies it.
    let times = if ranks > 1.0 {
        2.0 * (ranks - 1.0) / ranks
    } else {
        1.0
    };
    let seconds = bytes as f64 * times / (whole.gb_s * 1e9);
    let streams: Vec<(usize, usize)> = parts.iter().map(|part| (part.stream, part.rank)).collect();
    work.occupy(&streams, Duration::try_from_secs_f64(seconds).ok());
    Ok(())
}

/// Returns the bandwidth of this process.
fn bandwidth(nccl: &FakeNccl) -> f64 {
    if let Some(gb_s) = nccl.bandwidth_with_topology_gb_s.filter(|_| has_topology()) {
        return gb_s;
    }
    let mut slowed = nccl.slowed_by.iter();
    let slowed = slowed.find(|(name, _)| std::env::var_os(name).is_some());
    slowed.map_or(nccl.bandwidth_gb_s, |(_, gb_s)| *gb_s)
}

/// Returns true if `NCCL_TOPO_FILE` names a topology file.
fn has_topology() -> bool {
    let file = std::env::var_os("NCCL_TOPO_FILE");
    let text = file.and_then(|file| std::fs::read_to_string(file).ok());
    text.is_some_and(|text| text.starts_with("<system version=\"1\""))
}

/// Reduces the stored numbers of this process.
fn reckon(work: &Work, parts: &[Reduce]) -> Vec<f32> {
    let kept = parts.iter().filter_map(|part| work.memory.get(&part.send));
    let kept = kept.map(Memory::kept).max().unwrap_or_default();
    // The bytes behind the written ones are all equal: it is enough to compute a few.
    let bytes = (first_numbers(parts) * 4).min(kept.max(LEAST_RECKONED));
    let mut result: Vec<f32> = Vec::new();
    for part in parts {
        let Some(memory) = work.memory.get(&part.send) else {
            continue;
        };
        let beginning = memory.beginning(bytes);
        let (numbers, _) = beginning.as_chunks::<4>();
        let numbers = numbers.iter().map(|bytes| f32::from_ne_bytes(*bytes));
        exchange::combine(&mut result, numbers.collect(), part.operation);
    }
    result
}

/// Writes the result to the devices of this process.
#[allow(clippy::cast_precision_loss, reason = "a number of ranks")]
fn tell(work: &mut Work, scenario: &Scenario, parts: &[Reduce], whole: &Part) {
    for part in parts {
        let average = part.operation == 4;
        let told = whole.numbers.iter().map(|number| {
            if average {
                *number / whole.ranks as f32
            } else {
                *number
            }
        });
        let told: Vec<u8> = told.flat_map(f32::to_ne_bytes).collect();
        if told.is_empty() {
            continue;
        }
        if let Some(memory) = work.memory.get_mut(&part.receive) {
            memory.write(&told);
            if scenario.gpu(memory.gpu).corrupts {
                memory.corrupt();
            }
        }
    }
}

fn first_numbers(parts: &[Reduce]) -> usize {
    parts.first().map(|part| part.numbers).unwrap_or_default()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetVersion(version: *mut c_int) -> u32 {
    answer("ncclGetVersion", |scenario| {
        write(version, scenario.nccl.version)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetUniqueId(id: *mut Id) -> u32 {
    answer("ncclGetUniqueId", |_| {
        let random = RandomState::new().build_hasher().finish();
        let path = directory().join(format!("nccl-{random:016x}"));
        let mut name = [0; 128];
        let text = path.as_os_str().as_bytes();
        // A path that is too long is not valid for a socket either.
        exchange::listen(&path)
            .map_err(|_| (SYSTEM_ERROR, c"nobody can listen beside this library"))?;
        for (into, byte) in name.iter_mut().zip(text) {
            *into = *byte;
        }
        write(id, Id(name))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRank(into: *mut usize, ranks: c_int, id: Id, rank: c_int) -> u32 {
    answer("ncclCommInitRank", |scenario| {
        let (Ok(ranks), Ok(rank)) = (u32::try_from(ranks), u32::try_from(rank)) else {
            return Err((INVALID_ARGUMENT, c"a rank is below zero"));
        };
        let gpu = selected(scenario).ok_or((INVALID_USAGE, c"there is no device"))?;
        let call = Call::Join {
            into,
            group: id.0,
            ranks,
            rank,
            gpu,
        };
        make(scenario, call)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    send: usize,
    receive: usize,
    numbers: usize,
    kind: c_uint,
    operation: c_uint,
    rank: usize,
    stream: usize,
) -> u32 {
    answer("ncclAllReduce", |scenario| {
        let reduce = Reduce {
            rank,
            send,
            receive,
            numbers,
            kind,
            operation,
            stream,
        };
        make(scenario, Call::Reduce(reduce))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> u32 {
    answer("ncclGroupStart", |_| {
        DEPTH.set(DEPTH.get() + 1);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> u32 {
    answer("ncclGroupEnd", |scenario| {
        let left = DEPTH.get().checked_sub(1);
        let left = left.ok_or((INVALID_USAGE, c"no group was begun"))?;
        DEPTH.set(left);
        if left == 0 {
            make_all(scenario)
        } else {
            Ok(())
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommGetAsyncError(rank: usize, code: *mut u32) -> u32 {
    answer("ncclCommGetAsyncError", |scenario| {
        group(&work(), rank)?;
        write(code, scenario.nccl.async_error)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(rank: usize) -> u32 {
    answer("ncclCommAbort", |_| end(rank))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(rank: usize) -> u32 {
    answer("ncclCommDestroy", |_| end(rank))
}

fn end(rank: usize) -> Result<(), Failure> {
    let ended = work().ranks.remove(&rank);
    ended
        .map(drop)
        .ok_or((INVALID_ARGUMENT, c"a communicator is not known"))
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: u32) -> *const c_char {
    let text = usize::try_from(code).ok().and_then(|at| TEXTS.get(at));
    text.copied().unwrap_or(c"unknown result code").as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_: usize) -> *const c_char {
    LAST.get().as_ptr()
}
