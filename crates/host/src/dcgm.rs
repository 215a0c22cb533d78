//! DCGM, NVIDIA's management service for GPUs: reads the results of its health watches from a
//! host engine in another process. The protocol is private, so NVIDIA's own library is the only
//! way in.
//!
//! A call may hang or crash inside the vendor's code, so only [`crate::gpu_probe`] uses this
//! module, in a process of its own.

mod error;
mod functions;
mod response;

use std::path::Path;

use diagnosis::gpu::dcgm::{DcgmEntity, DcgmGpu, DcgmLook, all_watches};
use diagnosis::gpu::pci_address;

pub use self::error::{DcgmError, DcgmOpenError};
use crate::library::{LibraryPlaces, Listener};
use functions::{DcgmConnection, DeviceGroup, Functions, Value};
use response::{LAYOUTS, Response};

/// Fields that identify a GPU, numbered as in `dcgm_fields.h`: NVML index, UUID, PCI address.
const INDEX: u16 = 52;
const UUID: u16 = 54;
const PCI: u16 = 57;

/// A connection to a host engine, and the group of devices that it watches. The host engine
/// drops the group when the connection ends.
pub struct Dcgm {
    /// Devices that were added to the group.
    in_group: Vec<DcgmEntity>,
    /// Devices of the group that are present: GPUs, then switches.
    watched: Vec<DcgmEntity>,
    names: Vec<DcgmGpu>,
    version: Option<String>,
    /// The last response, in the layout that the library accepts; `None` before the first.
    response: Option<Response>,
    group: DeviceGroup,
    connection: DcgmConnection,
    /// Declared last, since dropping it invalidates the handles above.
    functions: Functions,
}

// === impl Dcgm ===

impl Dcgm {
    /// Opens the library and connects to the host engine at `address`, `HOST` or `HOST:PORT`.
    /// `listener` is called before every library call.
    pub fn connect(
        places: &LibraryPlaces,
        address: &str,
        listener: Listener,
    ) -> Result<Self, DcgmOpenError> {
        let functions = Functions::open(places, listener)?;
        let unusable = |source| DcgmOpenError::NotUsable {
            library: functions.found_at().to_owned(),
            source,
        };
        functions.init().map_err(unusable)?;
        let connected = functions.connect(address);
        let connection = connected.map_err(|source| DcgmOpenError::NotConnected {
            address: address.to_owned(),
            source,
        })?;
        let group = functions.group(&connection).map_err(unusable)?;
        Ok(Self {
            in_group: Vec::new(),
            watched: Vec::new(),
            names: Vec::new(),
            version: functions.version(&connection),
            response: None,
            group,
            connection,
            functions,
        })
    }

    /// Returns the path or name that the library was loaded from.
    pub fn found_at(&self) -> &Path {
        self.functions.found_at()
    }

    /// Returns the current findings of the watches, for the devices that are present now.
    pub fn look(&mut self) -> Result<DcgmLook, DcgmError> {
        self.watch()?;
        let response = self.check()?;
        let (incidents, is_whole) = response.read();
        let switches = self.watched.iter();
        let switches = switches.filter(|it| it.group == DcgmEntity::SWITCH);
        Ok(DcgmLook {
            version: self.version.clone(),
            gpus: self.names.clone(),
            switches: switches.map(|it| it.id).collect(),
            incidents,
            is_whole,
        })
    }

    /// Adds new devices to the group. A device that cannot be watched does not hide the others.
    fn watch(&mut self) -> Result<(), DcgmError> {
        let mut there = self.functions.entities(&self.connection, DcgmEntity::GPU)?;
        // A machine without switches may answer with an empty list or with an error.
        let switches = (self.functions).entities(&self.connection, DcgmEntity::SWITCH);
        there.extend(switches.unwrap_or_default());
        let before = self.in_group.len();
        let mut failed = None;
        for entity in &there {
            if self.in_group.contains(entity) {
                continue;
            }
            match self.functions.add(&self.connection, &self.group, *entity) {
                Ok(()) => self.in_group.push(*entity),
                Err(error) => failed = Some(error),
            }
        }
        there.retain(|entity| self.in_group.contains(entity));
        if there.is_empty()
            && let Some(error) = failed
        {
            return Err(error);
        }
        if self.in_group.len() > before {
            (self.functions).set_watches(&self.connection, &self.group, all_watches())?;
            // Without this call the first poll finds nothing, since nothing was read yet. A
            // failure does no other harm.
            if let Err(error) = self.functions.update(&self.connection) {
                tracing::debug!(%error, "cannot make DCGM read all fields now");
            }
        }
        if there != self.watched {
            self.names = self.name(&there);
            self.watched = there;
        }
        Ok(())
    }

    /// Returns the index, UUID and PCI address of each GPU among the devices.
    fn name(&self, devices: &[DcgmEntity]) -> Vec<DcgmGpu> {
        let is_gpu = |entity: &&DcgmEntity| entity.group == DcgmEntity::GPU;
        let gpus: Vec<DcgmEntity> = devices.iter().filter(is_gpu).copied().collect();
        let result = self
            .functions
            .values(&self.connection, &gpus, &[INDEX, UUID, PCI]);
        let values = result.unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot read the UUIDs and PCI addresses of DCGM's GPUs");
            Vec::new()
        });
        let name = |gpu: &DcgmEntity| {
            let value = |field| {
                let mut values = values.iter();
                values.find(|value| value.is_of(*gpu, field))
            };
            DcgmGpu {
                id: gpu.id,
                index: value(INDEX).and_then(Value::number),
                uuid: value(UUID).and_then(Value::text),
                pci: value(PCI)
                    .and_then(Value::text)
                    .map(|pci| pci_address(&pci)),
            }
        };
        gpus.iter().map(name).collect()
    }

    /// Fetches the incidents, in the layout that the library accepts.
    fn check(&mut self) -> Result<&Response, DcgmError> {
        if self.response.is_none() {
            self.response = Some(self.find_response()?);
        } else if let Some(response) = &mut self.response {
            response.clear();
            self.functions
                .health(&self.connection, &self.group, response.words_mut())?;
        }
        self.response.as_ref().ok_or_else(DcgmError::other_version)
    }

    /// Tries each layout until the library accepts one. A version encodes the size of its
    /// structure, so the library accepts only the layout that it was built with.
    fn find_response(&self) -> Result<Response, DcgmError> {
        for layout in LAYOUTS {
            let mut response = Response::new(layout);
            let result = self
                .functions
                .health(&self.connection, &self.group, response.words_mut());
            match result {
                Ok(()) => return Ok(response),
                Err(error) if error.is_other_version() => {}
                Err(error) => return Err(error),
            }
        }
        Err(DcgmError::other_version())
    }
}

impl Drop for Dcgm {
    fn drop(&mut self) {
        self.functions.disconnect(&self.connection);
    }
}
