//! GPU resets with a fake driver and a script in place of `nvidia-smi`.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fakes::Scenario;
use gpuwarden_host::gpu_reset::{GpuReset, ResetError, ResetSettings, reset, tell};
use gpuwarden_host::library::LibraryPlaces;

/// The driver of a machine, its tool and its processes.
struct Machine {
    settings: ResetSettings,
    directory: tempfile::TempDir,
}

impl Machine {
    /// Returns a machine whose GPUs become `after` when the tool runs, which prints `says` and
    /// exits with `ends`.
    fn new(before: &Scenario, after: &Scenario, says: &str, ends: u8) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let library = fakes::install(path, before).unwrap();
        let later = path.join("later");
        fs::create_dir(&later).unwrap();
        fakes::write(&later, after).unwrap();
        let tool = path.join("nvidia-smi");
        let script = format!(
            "#!/bin/sh\necho \"$@\" >> {0}/asked\ncp {0}/later/gpus.toml {0}/gpus.toml.new\nmv {0}/gpus.toml.new \
             {0}/gpus.toml\ncat <<'END'\n{says}\nEND\nexit {ends}\n",
            path.display()
        );
        fs::write(&tool, script).unwrap();
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(path.join("dev")).unwrap();
        fs::create_dir(path.join("proc")).unwrap();
        let settings = ResetSettings {
            targets: Vec::new(),
            places: LibraryPlaces {
                path: Some(library),
                driver_root: None,
            },
            tool: Some(tool),
            tool_time: Duration::from_secs(60),
            devices: path.join("dev"),
            processes: path.join("proc"),
        };
        Self {
            settings,
            directory,
        }
    }

    /// Returns a machine whose tool succeeds.
    fn well(before: &Scenario) -> Self {
        let mut after = before.clone();
        for gpu in &mut after.gpu {
            (gpu.recovery_action, gpu.persistence) = (0, false);
        }
        Self::new(
            before,
            &after,
            "GPU 00000000:18:00.0 was successfully reset.\nAll done.",
            0,
        )
    }

    fn asks(mut self, targets: &[&str]) -> Self {
        self.settings.targets = targets.iter().map(|one| (*one).to_owned()).collect();
        self
    }

    fn process(&self, pid: u32, name: &str, file: Option<&str>) {
        let process = self.directory.path().join("proc").join(pid.to_string());
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::write(process.join("comm"), format!("{name}\n")).unwrap();
        if let Some(file) = file {
            symlink(self.settings.devices.join(file), process.join("fd/7")).unwrap();
        }
    }

    fn reset(&self) -> Vec<GpuReset> {
        reset(&self.settings).unwrap()
    }

    /// Returns the arguments of the tool; `None` if it was not run.
    fn asked(&self) -> Option<String> {
        fs::read_to_string(self.directory.path().join("asked")).ok()
    }

    fn scenario(&self) -> Scenario {
        fakes::read(&self.directory.path().join(fakes::SCENARIO)).unwrap()
    }
}

fn uuid(index: u32) -> String {
    format!("GPU-fa4e0000-0000-4000-8000-{index:012x}")
}

fn well(index: u32) -> GpuReset {
    GpuReset {
        gpu: uuid(index),
        failure: None,
    }
}

fn failure(results: &[GpuReset], index: u32) -> &str {
    let found = results.iter().find(|one| one.gpu == uuid(index));
    found.unwrap().failure.as_deref().unwrap()
}

/// Two GPUs; the driver requests a reset of the first.
fn sick() -> Scenario {
    let mut scenario = Scenario::healthy(2);
    scenario.gpu_mut(0).recovery_action = 1;
    scenario
}

#[test]
fn a_gpu_is_reset_and_no_other() {
    let machine = Machine::well(&sick()).asks(&[&uuid(0)]);
    assert_eq!(machine.reset(), [well(0)]);
    let asked = format!("--gpu-reset -i {}\n", uuid(0));
    assert_eq!(machine.asked().unwrap(), asked);
    // A second name for the same GPU, by PCI address, changes nothing.
    let pci = sick_pci(&machine);
    let machine = Machine::well(&sick()).asks(&[&pci, &uuid(0).to_uppercase()]);
    assert_eq!(machine.reset(), [well(0)]);
    assert_eq!(machine.asked().unwrap(), asked);
    // Without targets, all GPUs of the machine are reset.
    let machine = Machine::well(&sick());
    assert_eq!(machine.reset(), [well(0), well(1)]);
    let asked = format!("--gpu-reset -i {},{}\n", uuid(0), uuid(1));
    assert_eq!(machine.asked().unwrap(), asked);
}

/// PCI bus id of the first GPU, in NVML's form.
fn sick_pci(machine: &Machine) -> String {
    let places = &machine.settings.places;
    let nvml = gpuwarden_host::nvml::Nvml::open(places, Box::new(|_, _| {})).unwrap();
    format!("0000{}", nvml.inventory().unwrap().gpus[0].pci).to_uppercase()
}

#[test]
fn who_holds_a_gpu_is_named_and_nothing_is_touched() {
    let mut scenario = sick();
    scenario.gpu_mut(0).processes = vec![4711];
    let machine = Machine::well(&scenario).asks(&[&uuid(0), &uuid(1)]);
    machine.process(4711, "python3", None);
    machine.process(4712, "dcgm-exporter", Some("nvidia0"));
    machine.process(4713, "other", Some("nvidiactl"));
    let results = machine.reset();
    assert_eq!(
        failure(&results, 0),
        "it is held by python3 (pid 4711), dcgm-exporter (pid 4712)"
    );
    assert!(failure(&results, 1).starts_with("it was not touched"));
    assert_eq!(machine.asked(), None);
}

#[test]
fn the_persistence_mode_is_off_for_the_reset_and_on_again_whatever_happens() {
    for (ends, held) in [(0, false), (1, false), (0, true)] {
        let mut scenario = sick();
        scenario.gpu_mut(0).persistence = true;
        let mut after = scenario.clone();
        (
            after.gpu_mut(0).persistence,
            after.gpu_mut(0).recovery_action,
        ) = (false, 0);
        let machine = Machine::new(&scenario, &after, "", ends).asks(&[&uuid(0)]);
        if held {
            machine.process(1, "python3", Some("nvidia0"));
        }
        let results = machine.reset();
        assert_eq!(
            results[0].failure.is_none(),
            ends == 0 && !held,
            "{results:?}"
        );
        assert_eq!(machine.asked().is_some(), !held);
        assert!(machine.scenario().gpu[0].persistence, "{ends} {held}");
        assert!(machine.scenario().gpu.iter().all(|gpu| gpu.index == 0));
    }
}

#[test]
fn a_reset_that_fails_says_why_for_each_gpu() {
    let mut after = sick();
    after.gpu_mut(0).recovery_action = 0;
    let address = sick_pci(&Machine::well(&sick()));
    let says = format!(
        "GPU {address} was successfully reset.\nUnable to reset this GPU because it's being used"
    );
    let machine = Machine::new(&sick(), &after, &says, 1).asks(&[&uuid(0), &uuid(1)]);
    let results = machine.reset();
    assert_eq!(results[0], well(0));
    let why = failure(&results, 1);
    assert!(
        why.contains("ended with exit status: 1") && why.contains("being used"),
        "{why}"
    );
}

#[test]
fn after_a_reset_a_gpu_that_is_lost_or_still_sick_has_failed() {
    let mut lost = sick();
    lost.gpu_mut(0).lost = true;
    let mut absent = sick();
    absent.gpu_mut(0).absent = true;
    for (after, words) in [
        (lost, "lost"),
        (absent, "lost"),
        (sick(), "still requests Reset"),
    ] {
        let machine = Machine::new(&sick(), &after, "All done.", 0).asks(&[&uuid(0), &uuid(1)]);
        let results = machine.reset();
        assert!(failure(&results, 0).contains(words), "{results:?}");
        assert_eq!(results[1], well(1));
    }
}

#[test]
fn a_gpu_that_is_not_here_keeps_the_others_from_being_touched() {
    let machine = Machine::well(&sick()).asks(&[&uuid(0), &uuid(9)]);
    let results = machine.reset();
    assert!(failure(&results, 0).starts_with("it was not touched"));
    assert!(failure(&results, 9).contains("no such GPU"));
    assert_eq!(machine.asked(), None);
    let machine = Machine::well(&sick()).asks(&["0"]);
    assert!(matches!(
        reset(&machine.settings),
        Err(ResetError::NotAName(_))
    ));
    assert_eq!(machine.asked(), None);
}

#[test]
fn with_switches_the_fabric_manager_has_to_run() {
    let machine = Machine::well(&sick()).asks(&[&uuid(0)]);
    fs::write(machine.settings.devices.join("nvidia-nvswitch0"), "").unwrap();
    assert!(failure(&machine.reset(), 0).contains("Fabric Manager"));
    assert_eq!(machine.asked(), None);
    machine.process(80, "nv-fabricmanage", None);
    assert_eq!(machine.reset(), [well(0)]);
}

#[test]
fn without_a_driver_or_its_tool_it_is_said() {
    let mut machine = Machine::well(&sick());
    machine.settings.tool = Some(PathBuf::from("/nowhere/nvidia-smi"));
    let error = reset(&machine.settings).unwrap_err().to_string();
    assert!(error.contains("/nowhere/nvidia-smi"), "{error}");
    machine.settings.places.path = Some(PathBuf::from("/nowhere/libnvidia-ml.so.1"));
    assert!(matches!(reset(&machine.settings), Err(ResetError::Nvml(_))));
}

#[test]
fn a_tool_that_hangs_is_ended() {
    let mut machine = Machine::well(&sick()).asks(&[&uuid(0)]);
    let tool = machine.settings.tool.clone().unwrap();
    fs::write(tool, "#!/bin/sh\nexec sleep 1000\n").unwrap();
    machine.settings.tool_time = Duration::from_millis(200);
    assert!(failure(&machine.reset(), 0).contains("did not end"));
}

#[test]
fn the_line_is_that_of_nvsentinels_job() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dev-log");
    let socket = UnixDatagram::bind(&path).unwrap();
    let mut failed = well(1);
    failed.failure = Some("why".to_owned());
    let places = [Path::new("/nowhere/dev-log").to_owned(), path];
    for (result, word) in [(well(0), "true"), (failed, "false")] {
        assert!(tell(&result, &places, false).is_empty());
        let mut bytes = [0; 256];
        let length = socket.recv(&mut bytes).unwrap();
        let expected = format!(
            "<27>nvsentinel-gpu-reset: GPU reset executed: {}, success: {word}",
            result.gpu
        );
        assert_eq!(String::from_utf8_lossy(&bytes[..length]), expected);
    }
    assert_eq!(tell(&well(0), &places[..1], false).len(), 1);
}
