use std::io::BufRead as _;
use std::path::Path;

use diagnosis::gpu::GpuEventKind;
use fakes::{Behaviour, FakeEvent, Scenario};

use super::*;

/// A probe that runs on a thread, and its fake driver.
struct Probed {
    lines: io::Lines<io::BufReader<io::PipeReader>>,
    directory: tempfile::TempDir,
}

impl Probed {
    fn new(scenario: &Scenario) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let library = fakes::install(directory.path(), scenario).unwrap();
        let (reader, writer) = io::pipe().unwrap();
        thread::spawn(move || watch(&settings(&library), Box::new(writer)));
        Self {
            lines: io::BufReader::new(reader).lines(),
            directory,
        }
    }

    fn becomes(&self, scenario: &Scenario) {
        fakes::write(self.directory.path(), scenario).unwrap();
    }

    /// Returns the next message other than a call or unchanged readings.
    fn next(&mut self) -> Said {
        loop {
            let line = self.lines.next().expect("it goes on").unwrap();
            match serde_json::from_str(&line).unwrap() {
                Said::Doing { .. } => {}
                message => return message,
            }
        }
    }

    /// Returns the next inventory.
    fn inventory(&mut self) -> Inventory {
        loop {
            match self.next() {
                Said::Inventory(inventory) => return inventory,
                Said::Cannot(why) => panic!("{why}"),
                _ => {}
            }
        }
    }
}

fn settings(library: &Path) -> ProbeSettings {
    ProbeSettings {
        library: Some(library.to_owned()),
        driver_root: None,
        interval_ms: 1,
        dcgm: None,
    }
}

fn named(name: &str) -> Behaviour {
    Behaviour::try_from(name.to_owned()).unwrap()
}

#[test]
fn it_says_what_it_found_what_is_there_and_how_it_does() {
    let mut probed = Probed::new(&Scenario::healthy(2));
    let library = probed.directory.path().join(fakes::LIBRARY);
    assert_eq!(
        probed.next(),
        Said::Hello {
            protocol: PROTOCOL,
            library: library.display().to_string(),
        }
    );
    let Said::Inventory(inventory) = probed.next() else {
        panic!("an inventory");
    };
    assert_eq!(inventory.gpus.len(), 2);
    for _ in 0..2 {
        // The second poll sends no inventory, since nothing has changed.
        let Said::Readings(readings) = probed.next() else {
            panic!("readings");
        };
        assert_eq!(readings.len(), 2);
    }
}

#[test]
fn a_gpu_that_goes_is_named_by_what_it_was_and_comes_back() {
    let healthy = Scenario::healthy(3);
    let mut probed = Probed::new(&healthy);
    let before = probed.inventory();
    let mut unknown = healthy.clone();
    unknown.gpu_mut(1).lost = true;
    // The driver still knows the GPU's handle and name.
    let mut unreadable = healthy.clone();
    let call = "nvmlDeviceGetUtilizationRates".to_owned();
    let gone = named("NVML_ERROR_GPU_IS_LOST");
    unreadable.gpu_mut(1).calls.insert(call, gone);
    for lost in [unknown, unreadable] {
        probed.becomes(&lost);
        let without = probed.inventory();
        assert_eq!(without.gpus.len(), 2);
        let lost = &without.unreadable[0];
        assert!(lost.is_lost, "{lost:?}");
        assert_eq!(lost.uuid.as_ref(), Some(&before.gpus[1].uuid));
        assert_eq!(lost.pci.as_ref(), Some(&before.gpus[1].pci));
        probed.becomes(&healthy);
        assert_eq!(probed.inventory(), before);
    }
}

#[test]
fn events_are_said_and_a_wait_that_fails_makes_all_unmonitored() {
    let mut scenario = Scenario::healthy(2);
    let mut probed = Probed::new(&scenario);
    let before = probed.inventory();
    scenario.event.push(FakeEvent {
        gpu: 1,
        xid: Some(48),
        ..FakeEvent::default()
    });
    probed.becomes(&scenario);
    let event = loop {
        if let Said::Event(event) = probed.next() {
            break event;
        }
    };
    assert_eq!(event.uuid.as_ref(), Some(&before.gpus[1].uuid));
    assert!(matches!(event.kind, GpuEventKind::Xid { code: 48, .. }));
    let call = "nvmlEventSetWait_v2".to_owned();
    scenario.calls.insert(call, named("NVML_ERROR_UNKNOWN"));
    probed.becomes(&scenario);
    let why = "nvmlEventSetWait_v2 answered NVML_ERROR_UNKNOWN".to_owned();
    for gpu in probed.inventory().gpus {
        assert_eq!(gpu.unmonitored.as_ref(), Some(&why));
    }
    scenario.calls.clear();
    probed.becomes(&scenario);
    assert_eq!(probed.inventory(), before);
}

#[test]
fn without_a_driver_it_says_why_and_ends() {
    let mut scenario = Scenario::healthy(1);
    let mut probed = Probed::new(&scenario);
    probed.inventory();
    let call = "nvmlDeviceGetCount_v2".to_owned();
    let exchanged = named("NVML_ERROR_LIB_RM_VERSION_MISMATCH");
    scenario.calls.insert(call, exchanged);
    probed.becomes(&scenario);
    let (mut calls, mut cannot) = (Vec::new(), Vec::new());
    for line in probed.lines {
        match serde_json::from_str(&line.unwrap()).unwrap() {
            Said::Doing { call, .. } => calls.push(call),
            Said::Cannot(why) => cannot.push(why),
            _ => {}
        }
    }
    let why = "nvmlDeviceGetCount_v2 answered NVML_ERROR_LIB_RM_VERSION_MISMATCH";
    assert_eq!(cannot, [why]);
    // The probe frees the library's resources before it ends.
    let end = ["nvmlEventSetFree", "nvmlShutdown"];
    assert_eq!(calls[calls.len() - 2..], end);
}

#[test]
fn it_begins_with_what_is_there_and_its_events_before_it_tells_of_a_gpu() {
    let probed = Probed::new(&Scenario::healthy(2));
    let mut steps = Vec::new();
    for line in probed.lines {
        let step = match serde_json::from_str(&line.unwrap()).unwrap() {
            Said::Doing { call, .. } => call.into_owned(),
            Said::Hello { .. } => "hello".to_owned(),
            Said::Inventory(_) => "inventory".to_owned(),
            Said::Readings(_) => break,
            message => panic!("{message:?}"),
        };
        steps.push(step);
    }
    let order = [
        "nvmlInit_v2",
        "hello",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetName",
        "nvmlEventSetCreate",
        "nvmlDeviceRegisterEvents",
        "nvmlDeviceGetPowerUsage",
        "inventory",
    ];
    let first = |step: &&str| steps.iter().position(|it| it == step);
    let places: Vec<_> = order.iter().map(first).collect();
    assert!(places.is_sorted() && places[0].is_some(), "{steps:?}");
}

#[test]
fn what_it_does_is_said_before_it_is_done() {
    let mut scenario = Scenario::healthy(2);
    let call = "nvmlDeviceGetPowerUsage";
    let calls = &mut scenario.gpu_mut(1).calls;
    calls.insert(call.to_owned(), Behaviour::Hang);
    let probed = Probed::new(&scenario);
    let hung = Said::Doing {
        call: Cow::Borrowed(call),
        gpu: Some(1),
    };
    // No message follows this one, so a search that misses it would block.
    let mut messages = probed
        .lines
        .map(|line| serde_json::from_str::<Said>(&line.unwrap()).unwrap());
    assert!(messages.any(|message| message == hung));
}

/// Starts a probe of DCGM on a thread.
fn probe_of_dcgm(scenario: &Scenario) -> Probed {
    let directory = tempfile::tempdir().unwrap();
    fakes::install(directory.path(), scenario).unwrap();
    let settings = ProbeSettings {
        dcgm: Some("localhost".to_owned()),
        ..settings(&directory.path().join(fakes::DCGM_LIBRARY))
    };
    let (reader, writer) = io::pipe().unwrap();
    thread::spawn(move || watch(&settings, Box::new(writer)));
    Probed {
        lines: io::BufReader::new(reader).lines(),
        directory,
    }
}

#[test]
fn dcgm_is_looked_at_until_its_host_engine_is_gone() {
    let mut scenario = Scenario::healthy(2);
    let mut probed = probe_of_dcgm(&scenario);
    let library = probed.directory.path().join(fakes::DCGM_LIBRARY);
    let library = library.display().to_string();
    assert!(matches!(probed.next(), Said::Hello { library: said, .. } if said == library));
    let Said::Dcgm(look) = probed.next() else {
        panic!("a poll");
    };
    assert_eq!((look.gpus.len(), look.incidents.len()), (2, 0));
    scenario.dcgm.incident = vec![fakes::FakeIncident::default()];
    probed.becomes(&scenario);
    let Said::Dcgm(look) = probed.next() else {
        panic!("another poll");
    };
    assert_eq!(look.incidents.len(), 1);
    let behaviour = named("-21");
    (scenario.calls).insert("dcgmGetEntityGroupEntities".to_owned(), behaviour);
    // Closing the connection then hangs; the reason must be sent before.
    (scenario.calls).insert("dcgmDisconnect".to_owned(), Behaviour::Hang);
    probed.becomes(&scenario);
    let Said::Cannot(why) = probed.next() else {
        panic!("an end");
    };
    let expected = "the host engine at localhost: dcgmGetEntityGroupEntities answered -21";
    assert!(why.starts_with(expected), "{why}");
}

#[test]
fn the_call_of_dcgm_that_hangs_is_said_before_it_is_made() {
    let mut scenario = Scenario::healthy(1);
    let call = "dcgmHealthCheck";
    scenario.calls.insert(call.to_owned(), Behaviour::Hang);
    let probed = probe_of_dcgm(&scenario);
    let hung = Said::Doing {
        call: Cow::Borrowed(call),
        gpu: None,
    };
    let mut messages = probed
        .lines
        .map(|line| serde_json::from_str::<Said>(&line.unwrap()).unwrap());
    assert!(messages.any(|message| message == hung));
}

/// Uses the real library; this machine most likely has no driver.
#[test]
fn without_a_driver_it_says_so_and_ends_in_order() {
    let Some(drivers) = testkit::require(testkit::Component::DriverLibraries) else {
        return;
    };
    let driver = std::fs::read_dir(drivers).unwrap().next().unwrap();
    let library = driver.unwrap().path().join(fakes::LIBRARY);
    let no_driver = format!(
        "{} cannot be used: nvmlInit_v2 answered NVML_ERROR_DRIVER_NOT_LOADED",
        library.display()
    );
    // Each new child tries again.
    for _ in 0..2 {
        let library = library.clone();
        let (reader, writer) = io::pipe().unwrap();
        let probe = thread::spawn(move || watch(&settings(&library), Box::new(writer)));
        let lines = io::BufReader::new(reader).lines();
        let mut messages = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        let first = messages.find(|message| !matches!(message, Said::Doing { .. }));
        if Path::new("/proc/driver/nvidia/version").exists() {
            assert!(first.is_some());
        } else {
            assert_eq!(first, Some(Said::Cannot(no_driver.clone())));
            assert_eq!(messages.next(), None);
            probe.join().unwrap().unwrap();
        }
    }
}
