//! CUDA and NCCL against fake libraries, which are found and loaded like the real ones; and the
//! real libraries without a GPU.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use fakes::{Behaviour, Scenario};
use gpuwarden_host::cuda::{Buffer, Cuda, Device, Event, Stream};
use gpuwarden_host::library::{LibraryOpenError, LibraryPlaces};
use gpuwarden_host::nccl::{Communicator, Error, Nccl, RankPart, Reduction, UniqueId};
use testkit::Component;

/// Both libraries with a scenario, in a directory of their own.
struct Machine {
    cuda: Cuda,
    nccl: Nccl,
    /// Dropped last, since the libraries read it until they are unloaded.
    directory: tempfile::TempDir,
}

/// A GPU of a group, with its buffers, stream and events.
struct Member {
    send: Buffer,
    receive: Buffer,
    stream: Stream,
    begin: Event,
    end: Event,
    communicator: Communicator,
}

impl Machine {
    fn new(scenario: &Scenario) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fakes::install(directory.path(), scenario).unwrap();
        let cuda = cuda(directory.path().join(fakes::CUDA_LIBRARY)).unwrap();
        let nccl = nccl(directory.path().join(fakes::NCCL_LIBRARY)).unwrap();
        Self {
            cuda,
            nccl,
            directory,
        }
    }

    fn becomes(&self, scenario: &Scenario) {
        fakes::write(self.directory.path(), scenario).unwrap();
    }

    /// Returns all devices as one group, with buffers for `numbers` elements each.
    fn group(&self, numbers: usize) -> Vec<Member> {
        let devices = self.cuda.devices().unwrap();
        let ranks = u32::try_from(devices.len()).unwrap();
        let places: Vec<(&Device, u32)> = devices.iter().zip(0..).collect();
        let id = self.nccl.unique_id().unwrap();
        let joined = self.nccl.join(&id, ranks, &places).unwrap();
        let member = |(device, communicator): (&Device, Communicator)| Member {
            send: device.buffer(numbers * 4).unwrap(),
            receive: device.buffer(numbers * 4).unwrap(),
            stream: device.stream().unwrap(),
            begin: device.event().unwrap(),
            end: device.event().unwrap(),
            communicator,
        };
        devices.iter().zip(joined).map(member).collect()
    }

    /// Starts one all-reduce, between the two events of each member.
    fn reduce(
        &self,
        members: &mut [Member],
        numbers: usize,
        reduction: Reduction,
    ) -> Result<(), Error> {
        for member in &mut *members {
            member.begin.record(&member.stream)?;
        }
        let mut parts = Vec::new();
        for member in &mut *members {
            parts.push(RankPart {
                communicator: &member.communicator,
                send: &member.send,
                receive: &mut member.receive,
                stream: &member.stream,
            });
        }
        self.nccl.all_reduce(&parts, numbers, reduction)?;
        for member in &mut *members {
            member.end.record(&member.stream)?;
        }
        Ok(())
    }
}

fn at(path: PathBuf) -> LibraryPlaces {
    LibraryPlaces {
        path: Some(path),
        driver_root: None,
    }
}

fn cuda(path: PathBuf) -> Result<Cuda, LibraryOpenError> {
    Cuda::open(&at(path), Box::new(|_, _| {}))
}

fn nccl(path: PathBuf) -> Result<Nccl, LibraryOpenError> {
    Nccl::open(&at(path), Box::new(|_, _| {}))
}

/// Returns the bandwidth at each GPU in gigabytes a second, computed as nccl-tests do
/// (`busbw`), by the clock of the first GPU.
#[allow(clippy::cast_precision_loss)]
fn bandwidth(members: &[Member], numbers: usize) -> f64 {
    let first = &members[0];
    first.stream.synchronize().unwrap();
    let milliseconds = first.end.milliseconds_since(&first.begin).unwrap();
    let ranks = members.len() as f64;
    let bytes = (numbers * 4) as f64;
    bytes / (f64::from(milliseconds) / 1e3) / 1e9 * 2.0 * (ranks - 1.0) / ranks
}

#[test]
fn devices_are_known_by_their_place() {
    let mut scenario = Scenario::healthy(3);
    scenario.gpu_mut(1).absent = true;
    let machine = Machine::new(&scenario);
    assert_eq!(machine.cuda.version().unwrap(), "13.0");
    assert_eq!(machine.cuda.driver_version().unwrap().unwrap(), "13.0");
    assert_eq!(machine.nccl.version().unwrap(), "2.28.9");
    let devices = machine.cuda.devices().unwrap();
    let places: Vec<_> = devices.iter().map(|device| device.pci().unwrap()).collect();
    assert_eq!(places, ["0000:18:00.0", "0000:1a:00.0"]);
    for pci in ["0000:1a:00.0", "00000000:1A:00.0"] {
        assert_eq!(machine.cuda.device_at(pci).unwrap().index(), 1, "{pci}");
    }
    let error = machine.cuda.device_at("0000:19:00.0").err().unwrap();
    assert_eq!(
        error.to_string(),
        "cudaDeviceGetByPCIBusId answered cudaErrorInvalidValue (invalid argument)"
    );
}

#[test]
fn the_bandwidth_of_an_all_reduce_is_that_of_the_scenario() {
    const NUMBERS: usize = 64 << 20;
    for gpus in [2, 8] {
        let mut scenario = Scenario::healthy(gpus);
        let machine = Machine::new(&scenario);
        let mut members = machine.group(NUMBERS);
        // The bandwidth changes while the library is loaded.
        for gigabytes in [480.0, 7.25, 312.5] {
            scenario.nccl.bandwidth_gb_s = gigabytes;
            machine.becomes(&scenario);
            machine
                .reduce(&mut members, NUMBERS, Reduction::Sum)
                .unwrap();
            let measured = bandwidth(&members, NUMBERS);
            let differs = (measured / gigabytes - 1.0).abs();
            assert!(differs < 1e-4, "{gpus} GPUs: {measured} of {gigabytes}");
        }
    }
}

#[test]
fn work_begins_when_the_last_rank_comes_to_it_and_takes_its_turn() {
    const NUMBERS: usize = 1 << 20;
    let mut scenario = Scenario::healthy(2);
    scenario.nccl.bandwidth_gb_s = 4.0;
    let machine = Machine::new(&scenario);
    let mut members = machine.group(NUMBERS);
    // Each of two GPUs passes on as many bytes as it brings: about a millisecond each time.
    let once = f64::from(1 << 22) / 4e6;
    let mut all = machine.cuda.devices().unwrap()[0].event().unwrap();
    all.record(&members[0].stream).unwrap();
    for _ in 0..3 {
        machine
            .reduce(&mut members, NUMBERS, Reduction::Sum)
            .unwrap();
    }
    let first = &members[0];
    first.stream.synchronize().unwrap();
    assert!(first.stream.is_done().unwrap());
    let last = first.end.milliseconds_since(&first.begin).unwrap();
    let whole = first.end.milliseconds_since(&all).unwrap();
    assert!((f64::from(last) - once).abs() < 1e-3, "{last}");
    assert!((f64::from(whole) - 3.0 * once).abs() < 1e-3, "{whole}");
}

#[test]
fn the_numbers_are_reduced() {
    let machine = Machine::new(&Scenario::healthy(4));
    let mut members = machine.group(2);
    for (reduction, expected) in [
        (Reduction::Sum, [10.0, -2.0]),
        (Reduction::Product, [24.0, 0.0]),
        (Reduction::Max, [4.0, 1.0]),
        (Reduction::Min, [1.0, -2.0]),
        (Reduction::Average, [2.5, -0.5]),
    ] {
        for (member, numbers) in
            members
                .iter_mut()
                .zip([[1.0_f32, -2.0], [2.0, -1.0], [3.0, 0.0], [4.0, 1.0]])
        {
            member
                .send
                .write(&numbers.map(f32::to_ne_bytes).concat())
                .unwrap();
            member.receive.fill(0xff).unwrap();
        }
        machine.reduce(&mut members, 2, reduction).unwrap();
        for member in &members {
            member.stream.synchronize().unwrap();
            let mut bytes = [0; 8];
            member.receive.read(&mut bytes).unwrap();
            let (numbers, _) = bytes.as_chunks::<4>();
            let numbers: Vec<f32> = numbers.iter().map(|of| f32::from_ne_bytes(*of)).collect();
            assert_eq!(numbers, expected, "{reduction:?}");
        }
    }
}

#[test]
fn work_that_never_ends_is_ended_by_an_abort() {
    let mut scenario = Scenario::healthy(2);
    scenario.nccl.bandwidth_gb_s = 0.0;
    scenario.nccl.async_error = 6;
    let machine = Machine::new(&scenario);
    let mut members = machine.group(16);
    machine.reduce(&mut members, 16, Reduction::Sum).unwrap();
    for member in members {
        assert!(!member.stream.is_done().unwrap());
        let error = member.end.milliseconds_since(&member.begin).unwrap_err();
        assert!(error.to_string().contains("cudaErrorNotReady"), "{error}");
        let error = member.communicator.check().unwrap_err();
        assert_eq!(error.name(), "ncclRemoteError");
        assert_eq!(
            error.to_string(),
            "ncclCommGetAsyncError answered ncclRemoteError (remote process exited or there was a \
             network error)"
        );
        member.communicator.abort().unwrap();
        assert!(member.stream.is_done().unwrap());
    }
}

#[test]
fn a_group_may_have_ranks_in_other_processes() {
    const NUMBERS: usize = 1 << 20;
    // Each machine has a library of its own, as each process has.
    let names = Machine::new(&Scenario::healthy(1));
    let id = names.nccl.unique_id().unwrap().bytes();
    let reduce = |rank: u8, gb_s: f64| {
        let mut scenario = Scenario::healthy(1);
        scenario.nccl.bandwidth_gb_s = gb_s;
        let machine = Machine::new(&scenario);
        let devices = machine.cuda.devices().unwrap();
        let places = [(&devices[0], u32::from(rank))];
        let joined = machine.nccl.join(&UniqueId::from(id), 2, &places).unwrap();
        let [communicator]: [Communicator; 1] = joined.try_into().ok().unwrap();
        let mut members = [Member {
            send: devices[0].buffer(NUMBERS * 4).unwrap(),
            receive: devices[0].buffer(NUMBERS * 4).unwrap(),
            stream: devices[0].stream().unwrap(),
            begin: devices[0].event().unwrap(),
            end: devices[0].event().unwrap(),
            communicator,
        }];
        let brought = f32::from(rank + 1).to_ne_bytes().repeat(NUMBERS);
        members[0].send.write(&brought).unwrap();
        machine
            .reduce(&mut members, NUMBERS, Reduction::Sum)
            .unwrap();
        members[0].stream.synchronize().unwrap();
        let mut sums = vec![0; NUMBERS * 4];
        members[0].receive.read(&mut sums).unwrap();
        assert!(sums == 3.0_f32.to_ne_bytes().repeat(NUMBERS), "rank {rank}");
        let [member] = members;
        member.end.milliseconds_since(&member.begin).unwrap()
    };
    let took = thread::scope(|scope| {
        let all = [(0, 10.0), (1, 5.0)].map(|(rank, gb_s)| scope.spawn(move || reduce(rank, gb_s)));
        all.map(|one| one.join().unwrap())
    });
    // The slowest GPU counts. Each of two ranks passes on what it brings.
    let expected = f64::from(1 << 22) / 5e6;
    for took in took {
        assert!((f64::from(took) - expected).abs() < 1e-3, "{took}");
    }
}

#[test]
fn what_fails_says_what_and_why() {
    let mut scenario = Scenario::healthy(2);
    let machine = Machine::new(&scenario);
    let mut members = machine.group(16);
    let error = machine
        .reduce(&mut members, 17, Reduction::Sum)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot reduce 17 four-byte elements in a buffer of 64 bytes"
    );
    // One rank alone would wait for the other forever.
    let error = machine
        .reduce(&mut members[..1], 16, Reduction::Sum)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "ncclGroupEnd answered ncclInvalidUsage (invalid usage (run with NCCL_DEBUG=WARN for \
         details)): a rank of this process does not take part"
    );
    let devices = machine.cuda.devices().unwrap();
    let error = devices[0].buffer(81 << 30).err().unwrap();
    assert_eq!(
        error.to_string(),
        "cudaMalloc answered cudaErrorMemoryAllocation (out of memory)"
    );
    scenario.gpu_mut(1).lost = true;
    let code = Behaviour::Code(2);
    scenario.calls.insert("ncclAllReduce".to_owned(), code);
    machine.becomes(&scenario);
    let error = machine
        .reduce(&mut members, 16, Reduction::Sum)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("ncclAllReduce answered ncclSystemError"),
        "{error}"
    );
    let error = devices[1].stream().err().unwrap();
    assert_eq!(
        error.to_string(),
        "cudaSetDevice answered cudaErrorUnknown (unknown error)"
    );
    let code = Behaviour::Code(4711);
    scenario.calls.insert("cudaGetDeviceCount".to_owned(), code);
    machine.becomes(&scenario);
    let error = machine.cuda.devices().err().unwrap();
    assert!(
        error
            .to_string()
            .starts_with("cudaGetDeviceCount answered "),
        "{error}"
    );
    assert_eq!(error.code, 4711);
}

#[test]
fn a_library_that_is_another_one_is_refused_by_what_it_lacks() {
    let libc = Path::new("libc.so.6");
    let error = cuda(libc.to_owned()).err().unwrap().to_string();
    assert_eq!(
        error,
        "libc.so.6 is not the CUDA runtime: it has no function cudaRuntimeGetVersion"
    );
    let error = nccl(libc.to_owned()).err().unwrap().to_string();
    assert_eq!(
        error,
        "libc.so.6 is not NCCL: it has no function ncclGetVersion"
    );
}

/// Error when devices are listed with a driver that is older than the runtime.
const TOO_OLD: &str = "cudaErrorInsufficientDriver (CUDA driver version is insufficient for CUDA \
                       runtime version)";
/// Error when there is a driver and no GPU.
const NO_DEVICE: &str = "cudaErrorNoDevice (no CUDA-capable device is detected)";

#[test]
fn the_real_cuda_runtimes_of_three_generations_open() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    for (library, version) in [
        ("nvidia/cu13/lib/libcudart.so.13", "13.5"),
        ("nvidia/cuda_runtime/lib/libcudart.so.12", "12.9"),
        ("nvidia/cuda_runtime/lib/libcudart.so.11.0", "11.8"),
    ] {
        let cuda = cuda(wheels.join(library)).unwrap();
        let driver = cuda.driver_version().unwrap();
        match cuda.version() {
            Ok(found) => assert_eq!(found, version),
            // CUDA 11 needs its driver for the version.
            Err(error) => {
                assert_eq!((version, &driver), ("11.8", &None), "{error}");
                assert!(
                    error.to_string().contains("cudaErrorInsufficientDriver"),
                    "{error}"
                );
            }
        }
        match cuda.devices() {
            Ok(devices) => {
                for device in devices {
                    let pci = device.pci().unwrap();
                    assert_eq!(cuda.device_at(&pci).unwrap().index(), device.index());
                }
            }
            Err(error) => {
                let error = error.to_string();
                let answer = error.strip_prefix("cudaGetDeviceCount answered ");
                // A missing driver counts as one that is too old.
                let expected = match driver {
                    None => vec![TOO_OLD],
                    Some(_) => vec![TOO_OLD, NO_DEVICE],
                };
                assert!(expected.contains(&answer.unwrap()), "{error}");
            }
        }
    }
}

#[test]
fn the_real_nccl_opens() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let nccl = nccl(wheels.join("nvidia/nccl/lib/libnccl.so.2")).unwrap();
    assert_eq!(nccl.version().unwrap(), "2.28.9");
}

/// Our fakes and bindings share their signatures, so a second user is compiled with NVIDIA's
/// headers.
#[test]
fn a_program_of_nvidias_own_headers_works_with_the_fakes() {
    let Some(wheels) = testkit::require(Component::VendorWheels) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let mut scenario = Scenario::healthy(4);
    scenario.nccl.bandwidth_gb_s = 12.5;
    fakes::install(directory.path(), &scenario).unwrap();
    let program = directory.path().join("all_reduce");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/witness/all_reduce.c");
    let mut cc = Command::new("cc");
    // NVIDIA's FP16 and BF16 headers need more than a C compiler, and are not needed.
    cc.args(["-Wall", "-Werror", "-D__CUDA_FP16_H__", "-D__CUDA_BF16_H__"]);
    for include in ["cu13", "nccl"] {
        let include = wheels.join("nvidia").join(include).join("include");
        cc.arg("-isystem").arg(include);
    }
    cc.arg("-o").arg(&program).arg(source);
    cc.args([fakes::CUDA_LIBRARY, fakes::NCCL_LIBRARY].map(|name| directory.path().join(name)));
    let compiled = cc.output().unwrap();
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{errors}");
    let output = Command::new(program)
        .env("LD_LIBRARY_PATH", directory.path())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout).unwrap();
    // Each of four GPUs passes on one and a half of 64 MiB, at 12.5 GB/s.
    let expected: Vec<String> = (0..4)
        .map(|gpu| format!("0000:{:02x}:00.0 8.0531 10.0", 0x18 + gpu))
        .collect();
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
}
