//! Copies within a device, for a pod with a single GPU, which has no peer to reduce with: tests
//! whether its memory keeps data, and how fast it is.

use std::mem::ManuallyDrop;

use host::cuda::{Cuda, Device};

use crate::numbers::{self, MOST_COMPARED, Numbers};

use super::benchmark::settle;
use super::{Benchmark, Measured, WorkerFailure};

/// Measures copies within each device. Returns the time of the slowest device for each size.
pub(super) fn copy(cuda: &Cuda, benchmark: &Benchmark) -> Result<Vec<Measured>, WorkerFailure> {
    let mut slowest: Vec<Measured> = Vec::new();
    for device in cuda.devices()? {
        let measured = of_device(&device, benchmark)?;
        if slowest.is_empty() {
            slowest = measured;
            continue;
        }
        for (slowest, measured) in slowest.iter_mut().zip(measured) {
            slowest.seconds = slowest.seconds.max(measured.seconds);
        }
    }
    Ok(slowest)
}

fn of_device(device: &Device, benchmark: &Benchmark) -> Result<Vec<Measured>, WorkerFailure> {
    let mut measured = Vec::new();
    for bytes in &benchmark.sizes {
        let room = usize::try_from(*bytes).unwrap_or(usize::MAX);
        // Not freed on failure, since that would wait for work that may never end.
        let mut from = ManuallyDrop::new(device.buffer(room)?);
        let mut to = ManuallyDrop::new(device.buffer(room)?);
        let stream = ManuallyDrop::new(device.stream()?);
        let mut begin = ManuallyDrop::new(device.event()?);
        let mut end = ManuallyDrop::new(device.event()?);

        let count = usize::try_from((*bytes).min(MOST_COMPARED) / 4).unwrap_or_default();
        let written = Numbers::of(1).brought(0, count);
        from.write(&written)?;
        settle(&from)?;
        begin.record(&stream)?;
        for _ in 0..benchmark.iterations.max(1) {
            stream.copy(&from, &mut to)?;
        }
        end.record(&stream)?;
        stream.synchronize()?;
        let mut found = vec![0; written.len()];
        to.read(&mut found)?;
        numbers::compare(&written, &found).map_err(WorkerFailure::of_gpu(&device.pci()?))?;
        measured.push(Measured {
            bytes: *bytes,
            seconds: f64::from(end.milliseconds_since(&begin)?)
                / 1e3
                / f64::from(benchmark.iterations.max(1)),
        });
        drop(ManuallyDrop::into_inner(from));
        drop(ManuallyDrop::into_inner(to));
    }
    Ok(measured)
}
