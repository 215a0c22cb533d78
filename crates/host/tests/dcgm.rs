//! DCGM against a fake library, which is found and loaded like the real one.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use diagnosis::gpu::dcgm::{DcgmEntity, DcgmGpu, DcgmIncident, DcgmLook};
use fakes::{Behaviour, FakeIncident, Scenario};
use gpuwarden_host::dcgm::{Dcgm, DcgmOpenError};
use gpuwarden_host::library::LibraryPlaces;

/// DCGM with a scenario, in a directory of its own.
struct Machine {
    dcgm: Dcgm,
    /// Dropped last, since the library reads it until it is shut down.
    directory: tempfile::TempDir,
}

impl Machine {
    fn new(scenario: &Scenario) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let dcgm = connect(directory.path(), scenario).unwrap();
        Self { dcgm, directory }
    }

    fn becomes(&self, scenario: &Scenario) {
        fakes::write(self.directory.path(), scenario).unwrap();
    }

    fn look(&mut self) -> DcgmLook {
        self.dcgm.look().unwrap()
    }
}

fn connect(directory: &Path, scenario: &Scenario) -> Result<Dcgm, DcgmOpenError> {
    fakes::install(directory, scenario).unwrap();
    let places = LibraryPlaces {
        path: Some(directory.join(fakes::DCGM_LIBRARY)),
        driver_root: None,
    };
    Dcgm::connect(&places, "localhost:5555", Box::new(|_, _| {}))
}

fn code(code: i32) -> Behaviour {
    Behaviour::try_from(code.to_string()).unwrap()
}

/// Returns the error of a poll during which a function returns a code.
fn failing(call: &str, answer: i32) -> String {
    let mut scenario = Scenario::healthy(1);
    scenario.calls.insert(call.to_owned(), code(answer));
    let directory = tempfile::tempdir().unwrap();
    let result = match connect(directory.path(), &scenario) {
        Ok(mut dcgm) => dcgm.look().map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    let directory = directory.path().display().to_string();
    result.unwrap_err().replace(&directory, "DIR")
}

#[test]
fn incidents_are_told_with_the_devices_that_they_are_about() {
    let mut scenario = Scenario::healthy(2);
    scenario.dcgm.switches = 1;
    scenario.dcgm.incident = vec![
        FakeIncident {
            gpu: 1,
            ..FakeIncident::default()
        },
        FakeIncident {
            switch: Some(0),
            watch: 0x800,
            health: 10,
            code: 15,
            message: "SXid 12028".to_owned(),
            ..FakeIncident::default()
        },
    ];
    let mut machine = Machine::new(&scenario);
    let look = machine.look();
    assert_eq!(look.version.as_deref(), Some("4.6.0"));
    assert_eq!(
        look.gpus[1],
        DcgmGpu {
            id: 1,
            index: Some(1),
            uuid: Some("GPU-fa4e0000-0000-4000-8000-000000000001".to_owned()),
            pci: Some("0000:19:00.0".to_owned()),
        }
    );
    assert_eq!((look.gpus.len(), &look.switches[..]), (2, &[0][..]));
    assert_eq!(
        look.incidents,
        [
            DcgmIncident {
                system: 0x10,
                health: 20,
                code: 80,
                message: "A row could not be replaced".to_owned(),
                entity: DcgmEntity { group: 1, id: 1 },
            },
            DcgmIncident {
                system: 0x800,
                health: 10,
                code: 15,
                message: "SXid 12028".to_owned(),
                entity: DcgmEntity { group: 3, id: 0 },
            },
        ]
    );
    assert!(look.is_whole);
    scenario.dcgm.incident.clear();
    scenario.gpus = 3;
    machine.becomes(&scenario);
    let look = machine.look();
    assert_eq!((look.incidents.len(), look.gpus.len()), (0, 3));
}

#[test]
fn each_known_form_of_the_answer_is_found_and_another_is_refused() {
    for (response, most_incidents, text_bytes) in [
        (5, 1024, 1024),
        (5, 1024, 512),
        (5, 64, 1024),
        (4, 64, 512),
        (4, 64, 1024),
    ] {
        let mut scenario = Scenario::healthy(2);
        let dcgm = &mut scenario.dcgm;
        (dcgm.response, dcgm.most_incidents) = (response, most_incidents);
        dcgm.text_bytes = text_bytes;
        let incident = |gpu| FakeIncident {
            gpu,
            message: "x".repeat(2000),
            ..FakeIncident::default()
        };
        dcgm.incident = vec![incident(0), incident(1)];
        let mut machine = Machine::new(&scenario);
        for _ in 0..2 {
            let look = machine.look();
            assert_eq!(look.incidents.len(), 2);
            let last = &look.incidents[1];
            assert_eq!(last.message.len(), text_bytes as usize - 1);
            assert_eq!((last.code, last.entity.id), (80, 1));
        }
    }
    let mut scenario = Scenario::healthy(1);
    scenario.dcgm.response = 6;
    let error = Machine::new(&scenario).dcgm.look().unwrap_err();
    assert_eq!(
        error.to_string(),
        "dcgmHealthCheck answered -12 (this version of DCGM is not supported)"
    );
}

#[test]
fn incidents_beyond_the_room_are_said_to_be_missing() {
    let mut scenario = Scenario::healthy(1);
    scenario.dcgm.incident = vec![FakeIncident::default(); 1025];
    let look = Machine::new(&scenario).look();
    assert_eq!((look.incidents.len(), look.is_whole), (1024, false));
}

#[test]
fn what_is_not_told_beside_the_incidents_is_missing_only() {
    let mut scenario = Scenario::healthy(2);
    for call in [
        "dcgmEntitiesGetLatestValues",
        "dcgmHostengineVersionInfo",
        "dcgmUpdateAllFields",
    ] {
        scenario.calls.insert(call.to_owned(), code(-20));
    }
    let look = Machine::new(&scenario).look();
    assert_eq!(look.version, None);
    assert_eq!(
        look.gpus[1],
        DcgmGpu {
            id: 1,
            ..DcgmGpu::default()
        }
    );
}

#[test]
fn what_fails_is_named_with_the_librarys_own_text() {
    assert_eq!(
        failing("dcgmConnect_v2", -21),
        "no host engine answers at localhost:5555: dcgmConnect_v2 answered -21 (The connection to \
         the host engine is not valid any longer)"
    );
    assert_eq!(
        failing("dcgmInit", -7),
        "DIR/libdcgm.so.4 cannot be used: dcgmInit answered -7"
    );
    for call in [
        "dcgmGetEntityGroupEntities",
        "dcgmGroupAddEntity",
        "dcgmHealthSet",
        "dcgmHealthCheck",
    ] {
        assert_eq!(failing(call, -3), format!("{call} answered -3"));
    }
}

#[test]
fn a_library_that_is_none_of_dcgm_is_refused_by_what_it_lacks() {
    let open = |path: Option<&str>| {
        let places = LibraryPlaces {
            path: path.map(Into::into),
            driver_root: None,
        };
        let opened = Dcgm::connect(&places, "localhost", Box::new(|_, _| {}));
        opened.err().unwrap().to_string()
    };
    assert_eq!(
        open(Some("libc.so.6")),
        "libc.so.6 is not DCGM: it has no function dcgmInit"
    );
    let error = open(Some("/nowhere/libdcgm.so"));
    assert_eq!(
        error,
        "libdcgm.so.4 or libdcgm.so.3 cannot be loaded: /nowhere/libdcgm.so: not there"
    );
}
