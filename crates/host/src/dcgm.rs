//! DCGM, NVIDIA's management service for GPUs: what its health watches tell, asked of a host engine
//! that runs elsewhere, by NVIDIA's own library. Its protocol is private, so there is no other way.
//!
//! A call may hang or crash inside the vendor's code, so only [`crate::gpu_probe`] uses this, in a
//! process of its own.

mod error;
mod functions;
mod response;

use std::path::Path;

use diagnosis::gpu::dcgm::{DcgmEntity, DcgmGpu, DcgmLook, all_watches};
use diagnosis::gpu::pci_address;

pub use self::error::{DcgmError, OpenError};
use crate::library::{Listener, Places};
use functions::{Connection, Functions, Group, Value};
use response::{LAYOUTS, Response};

/// The fields that name a GPU, by the numbers of `dcgm_fields.h`: index of NVML, UUID, PCI address.
const INDEX: u16 = 52;
const UUID: u16 = 54;
const PCI: u16 = 57;

/// A host engine, and the group of its devices that is watched. It forgets both when the connection
/// ends.
pub struct Dcgm {
    /// The devices that were put into the group.
    in_group: Vec<DcgmEntity>,
    /// Those of them that are there: GPUs, then switches.
    watched: Vec<DcgmEntity>,
    names: Vec<DcgmGpu>,
    version: Option<String>,
    /// The last answer, in the form that the library knows; `None` before the first.
    response: Option<Response>,
    group: Group,
    connection: Connection,
    /// Last, for what it has given out is gone with it.
    functions: Functions,
}

// === impl Dcgm ===

impl Dcgm {
    /// Opens the library, and connects to the host engine at an address, `HOST` or `HOST:PORT`.
    /// `listener` hears of every call before it is made.
    pub fn connect(places: &Places, address: &str, listener: Listener) -> Result<Self, OpenError> {
        let functions = Functions::open(places, listener)?;
        let unusable = |source| OpenError::NotUsable {
            library: functions.found_at().to_owned(),
            source,
        };
        functions.init().map_err(unusable)?;
        let connected = functions.connect(address);
        let connection = connected.map_err(|source| OpenError::NotConnected {
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

    /// Returns the path or the name by which the library was found.
    pub fn found_at(&self) -> &Path {
        self.functions.found_at()
    }

    /// Returns what its watches tell now, of the devices that there are now.
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

    /// Has it watch the devices that it did not watch yet. One that cannot be watched hides no other.
    fn watch(&mut self) -> Result<(), DcgmError> {
        let mut there = self.functions.entities(&self.connection, DcgmEntity::GPU)?;
        // Machines without switches may answer that they have none, or that they cannot tell.
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
            // Else the first look finds nothing, for nothing was read yet. It is no more than that.
            if let Err(error) = self.functions.update(&self.connection) {
                tracing::debug!(%error, "DCGM reads its fields in its own time");
            }
        }
        if there != self.watched {
            self.names = self.name(&there);
            self.watched = there;
        }
        Ok(())
    }

    /// Returns how it names the GPUs among the devices.
    fn name(&self, devices: &[DcgmEntity]) -> Vec<DcgmGpu> {
        let is_gpu = |entity: &&DcgmEntity| entity.group == DcgmEntity::GPU;
        let gpus: Vec<DcgmEntity> = devices.iter().filter(is_gpu).copied().collect();
        let told = self
            .functions
            .values(&self.connection, &gpus, &[INDEX, UUID, PCI]);
        let values = told.unwrap_or_else(|error| {
            tracing::debug!(%error, "DCGM does not name its GPUs");
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

    /// Asks for the incidents, in the form that the library knows.
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

    /// Asks in each form until one is taken. A version says the size of its structure, so the
    /// library takes only a form that is its own.
    fn find_response(&self) -> Result<Response, DcgmError> {
        for layout in LAYOUTS {
            let mut response = Response::new(layout);
            let told = self
                .functions
                .health(&self.connection, &self.group, response.words_mut());
            match told {
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
