//! Events of GPUs, as the driver sends them.

use std::sync::Arc;
use std::time::Duration;

use diagnosis::gpu::{GpuEvent, GpuEventKind, Inventory};
use nvml_wrapper_sys::bindings as sys;

use super::error::NvmlError;
use super::functions::{Device, EventSet, Functions, RawEvent};

/// Event types about the health of a GPU; the others are about its clocks and its power source.
const ASKED: u64 = (sys::nvmlEventTypeXidCriticalError
    | sys::nvmlEventTypeSingleBitEccError
    | sys::nvmlEventTypeDoubleBitEccError
    | sys::nvmlEventTypeDramRetirementEvent
    | sys::nvmlEventTypeDramRetirementFailure
    | sys::nvmlEventTypeNonFatalPoisonError
    | sys::nvmlEventTypeFatalPoisonError
    | sys::nvmlEventTypeGpuUnavailableError
    | sys::nvmlEventTypeGpuRecoveryAction) as u64;
/// Instance number of an event about the whole GPU.
const NO_INSTANCE: u32 = u32::MAX;

/// Event subscription for the GPUs of an inventory. Waiting blocks, so it needs a thread of its
/// own.
pub struct Events {
    functions: Arc<Functions>,
    /// `Some` until the set is freed.
    set: Option<EventSet>,
    /// Devices of the set with their UUIDs, so that an event names its GPU even when the GPU
    /// does not answer.
    devices: Vec<(Device, String)>,
}

// === impl Events ===

impl Events {
    /// Registers the GPUs of an inventory, and records there which cannot be registered.
    pub(super) fn new(
        functions: &Arc<Functions>,
        inventory: &mut Inventory,
    ) -> Result<Self, NvmlError> {
        let mut events = Self {
            functions: Arc::clone(functions),
            set: Some(functions.event_set()?),
            devices: Vec::new(),
        };
        for gpu in &mut inventory.gpus {
            let registered = events.register(gpu.index, &gpu.uuid);
            gpu.unmonitored = registered.err();
        }
        Ok(events)
    }

    /// Registers one GPU for the event types that it supports; fails with the reason if it has
    /// none.
    fn register(&mut self, index: u32, uuid: &str) -> Result<(), String> {
        let Some(set) = &self.set else {
            return Ok(());
        };
        let register = || {
            let device = self.functions.gpu(index)?;
            let mut supported = 0;
            self.functions
                .nvmlDeviceGetSupportedEventTypes(device, &mut supported)?;
            self.functions.register(device, ASKED & supported, set)?;
            Ok((device, supported))
        };
        let (device, supported) = register().map_err(|error: NvmlError| error.to_string())?;
        self.devices.push((device, uuid.to_owned()));
        if supported & u64::from(sys::nvmlEventTypeXidCriticalError) == 0 {
            return Err("its driver does not report XIDs".to_owned());
        }
        Ok(())
    }

    /// Waits for the next event; `None` if none came in that time.
    pub fn wait(&mut self, longest: Duration) -> Result<Option<GpuEvent>, NvmlError> {
        let milliseconds = u32::try_from(longest.as_millis()).unwrap_or(u32::MAX);
        let Some(set) = &mut self.set else {
            return Ok(None);
        };
        match self.functions.wait(set, milliseconds) {
            Ok(raw) => Ok(Some(GpuEvent {
                uuid: self.uuid(&raw),
                kind: kind(&raw),
            })),
            Err(error) if error.is_timeout() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn uuid(&self, event: &RawEvent) -> Option<String> {
        let mut devices = self.devices.iter();
        let found = devices.find(|(device, _)| event.is_of(*device));
        found.map(|(_, uuid)| uuid.clone())
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if let Some(set) = self.set.take()
            && let Err(error) = self.functions.free(set)
        {
            tracing::debug!(%error, "a set of events was not freed");
        }
    }
}

fn kind(event: &RawEvent) -> GpuEventKind {
    let instance = |id| (id != NO_INSTANCE).then_some(id);
    let is = |bit: u32| event.kind == u64::from(bit);
    if is(sys::nvmlEventTypeXidCriticalError) {
        return GpuEventKind::Xid {
            code: u32::try_from(event.data).unwrap_or(u32::MAX),
            gpu_instance: instance(event.gpu_instance),
            compute_instance: instance(event.compute_instance),
        };
    }
    if is(sys::nvmlEventTypeSingleBitEccError) {
        GpuEventKind::SingleBitEcc
    } else if is(sys::nvmlEventTypeDoubleBitEccError) {
        GpuEventKind::DoubleBitEcc
    } else {
        GpuEventKind::Other(event.kind)
    }
}
