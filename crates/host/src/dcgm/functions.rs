//! Bindings to the DCGM functions in use, with the signatures of `dcgm_agent.h` and
//! `dcgm_structs.h` of DCGM 4. Each has a safe method of [`Functions`].

#![allow(
    unsafe_code,
    reason = "functions of a C library; no other module calls them"
)]
#![allow(non_snake_case, reason = "the names of dcgm_agent.h")]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ushort};
use std::{mem, ptr};

use diagnosis::gpu::dcgm::DcgmEntity;

use super::error::{DcgmError, FUNCTION_NOT_FOUND};
use crate::library::functions;

/// Library names of DCGM 4 and 3.
const NAMES: &[&str] = &["libdcgm.so.4", "libdcgm.so.3"];
/// Name of the device group, as `dcgmi group --list` shows it.
const GROUP_NAME: &CStr = c"gpuwarden";
/// Group type: empty (`DCGM_GROUP_EMPTY`).
const EMPTY: c_uint = 1;
/// Timeout of a connection attempt, in milliseconds.
const CONNECT_MS: c_uint = 10_000;
/// Most devices of one kind that are read: four times DCGM's own limit.
const MAX_ENTITIES: usize = 256;
/// Flag: only devices that DCGM can watch (`DCGM_GEGE_FLAG_ONLY_SUPPORTED`).
const ONLY_SUPPORTED: c_uint = 1;
/// Flag: read from the driver a value that no watch updates (`DCGM_FV_FLAG_LIVE_DATA`).
const LIVE: c_uint = 1;
/// Size of a text value, in bytes (`DCGM_MAX_BLOB_LENGTH`).
const VALUE_BYTES: usize = 4096;
/// Prefix of unknown text values, such as `<<<NULL>>>`.
const BLANK: &str = "<<<";
/// First of the numbers that mean an unknown value (`DCGM_INT64_BLANK`).
const BLANK_NUMBER: i64 = 0x7fff_ffff_ffff_fff0;

type Code = c_int;
type Handle = usize;

/// A connection that is valid until [`Functions::disconnect`].
#[derive(Debug)]
pub(super) struct DcgmConnection(Handle);

/// A device group of a connection.
#[derive(Debug)]
pub(super) struct DeviceGroup(usize);

/// Parameters of a connection (`dcgmConnectV2Params_v2`).
#[repr(C)]
struct ConnectParams {
    version: c_uint,
    persists: c_uint,
    timeout_ms: c_uint,
    is_unix_socket: c_uint,
}

/// A GPU or switch (`dcgmGroupEntityPair_t`).
#[repr(C)]
struct Entity {
    group: c_uint,
    id: c_uint,
}

/// Value of one field of one device (`dcgmFieldValue_v2`).
#[repr(C)]
pub(super) struct Value {
    version: c_uint,
    entity_group: c_uint,
    entity: c_uint,
    field: c_ushort,
    kind: c_ushort,
    status: c_int,
    unused: c_uint,
    time: i64,
    bytes: [u8; VALUE_BYTES],
}

/// Version of a host engine (`dcgmVersionInfo_v2`).
#[repr(C)]
struct VersionInfo {
    version: c_uint,
    text: [u8; 512],
}

functions! {
    "DCGM", NAMES;
    required {
        dcgmInit() -> Code;
        dcgmShutdown() -> Code;
        dcgmConnect_v2(*const c_char, *mut ConnectParams, *mut Handle) -> Code;
        dcgmDisconnect(Handle) -> Code;
        dcgmGroupCreate(Handle, c_uint, *const c_char, *mut usize) -> Code;
        dcgmGroupAddEntity(Handle, usize, c_uint, c_uint) -> Code;
        dcgmGetEntityGroupEntities(Handle, c_uint, *mut c_uint, *mut c_int, c_uint) -> Code;
        dcgmHealthSet(Handle, usize, c_uint) -> Code;
        dcgmHealthCheck(Handle, usize, *mut u32) -> Code;
    }
    optional {
        dcgmUpdateAllFields(Handle, c_int) -> Code;
        dcgmHostengineVersionInfo(Handle, *mut VersionInfo) -> Code;
        dcgmEntitiesGetLatestValues(
            Handle,
            *const Entity,
            c_uint,
            *const c_ushort,
            c_uint,
            c_uint,
            *mut Value
        ) -> Code;
        errorString(Code) -> *const c_char;
    }
}

// === impl Functions ===

impl Functions {
    pub(super) fn init(&self) -> Result<(), DcgmError> {
        // SAFETY: The signature is that of the header, and the function takes no arguments.
        self.call("dcgmInit", || unsafe { (self.dcgmInit)() })
    }

    /// Connects to a host engine, which drops the connection's groups when the connection ends.
    pub(super) fn connect(&self, address: &str) -> Result<DcgmConnection, DcgmError> {
        let mut params = ConnectParams {
            version: version::<ConnectParams>(2),
            persists: 0,
            timeout_ms: CONNECT_MS,
            is_unix_socket: 0,
        };
        let address = CString::new(address).unwrap_or_default();
        let mut handle = 0;
        self.call("dcgmConnect_v2", || {
            // SAFETY: The address is zero-terminated; both out-parameters are borrowed
            // exclusively.
            unsafe { (self.dcgmConnect_v2)(address.as_ptr(), &raw mut params, &raw mut handle) }
        })?;
        Ok(DcgmConnection(handle))
    }

    /// Disconnects, and shuts the library down.
    pub(super) fn disconnect(&self, connection: &DcgmConnection) {
        // SAFETY: The library created the connection, and nothing uses it afterwards.
        let ended = self.call("dcgmDisconnect", || unsafe {
            (self.dcgmDisconnect)(connection.0)
        });
        // SAFETY: The function takes no arguments, and no other library function is called
        // afterwards.
        let ended = ended.and(self.call("dcgmShutdown", || unsafe { (self.dcgmShutdown)() }));
        if let Err(error) = ended {
            tracing::debug!(%error, "DCGM was not shut down");
        }
    }

    /// Creates an empty device group.
    pub(super) fn group(&self, of: &DcgmConnection) -> Result<DeviceGroup, DcgmError> {
        let mut group = 0;
        self.call("dcgmGroupCreate", || {
            let name = GROUP_NAME.as_ptr();
            // SAFETY: As above, and the name is a static string.
            unsafe { (self.dcgmGroupCreate)(of.0, EMPTY, name, &raw mut group) }
        })?;
        Ok(DeviceGroup(group))
    }

    /// Adds a device to a group.
    pub(super) fn add(
        &self,
        of: &DcgmConnection,
        group: &DeviceGroup,
        entity: DcgmEntity,
    ) -> Result<(), DcgmError> {
        self.call("dcgmGroupAddEntity", || {
            // SAFETY: The library created connection and group; the rest are numbers.
            unsafe { (self.dcgmGroupAddEntity)(of.0, group.0, entity.group, entity.id) }
        })
    }

    /// Returns the devices of a kind that can be watched.
    pub(super) fn entities(
        &self,
        of: &DcgmConnection,
        kind: u32,
    ) -> Result<Vec<DcgmEntity>, DcgmError> {
        let mut ids = [0; MAX_ENTITIES];
        let mut count = c_int::try_from(ids.len()).unwrap_or(c_int::MAX);
        self.call("dcgmGetEntityGroupEntities", || {
            // SAFETY: The array has room for `count` entries; the library sets `count` to the
            // number it wrote.
            unsafe {
                let ids = ids.as_mut_ptr();
                (self.dcgmGetEntityGroupEntities)(of.0, kind, ids, &raw mut count, ONLY_SUPPORTED)
            }
        })?;
        let count = usize::try_from(count).unwrap_or_default();
        let named = ids.into_iter().take(count);
        Ok(named.map(|id| DcgmEntity { group: kind, id }).collect())
    }

    /// Enables health watches on a group.
    pub(super) fn set_watches(
        &self,
        of: &DcgmConnection,
        group: &DeviceGroup,
        watches: u32,
    ) -> Result<(), DcgmError> {
        // SAFETY: The library created connection and group; the watches are a bit mask.
        self.call("dcgmHealthSet", || unsafe {
            (self.dcgmHealthSet)(of.0, group.0, watches)
        })
    }

    /// Makes the host engine read all watched fields once. A library without this function
    /// reads them on its own schedule.
    pub(super) fn update(&self, of: &DcgmConnection) -> Result<(), DcgmError> {
        let Some(update) = self.dcgmUpdateAllFields else {
            return Ok(());
        };
        // SAFETY: The library created the connection; 1 means to wait for completion.
        self.call("dcgmUpdateAllFields", || unsafe { update(of.0, 1) })
    }

    /// Reads the incidents of a group into `answer`, whose first word is the structure's
    /// version and encodes its size.
    pub(super) fn health(
        &self,
        of: &DcgmConnection,
        group: &DeviceGroup,
        answer: &mut [u32],
    ) -> Result<(), DcgmError> {
        let size = answer.first().copied().unwrap_or_default() & 0xff_ffff;
        debug_assert_eq!(
            size as usize,
            mem::size_of_val(answer),
            "the version encodes the size"
        );
        self.call("dcgmHealthCheck", || {
            // SAFETY: The library writes as many bytes as the version encodes, or nothing.
            unsafe { (self.dcgmHealthCheck)(of.0, group.0, answer.as_mut_ptr()) }
        })
    }

    /// Returns the version of the host engine, if the library can report it.
    pub(super) fn version(&self, of: &DcgmConnection) -> Option<String> {
        let mut info = VersionInfo {
            version: version::<VersionInfo>(2),
            text: [0; 512],
        };
        let ask = self.dcgmHostengineVersionInfo?;
        let result = self.call("dcgmHostengineVersionInfo", || {
            // SAFETY: As above.
            unsafe { ask(of.0, &raw mut info) }
        });
        result.ok()?;
        let text = text(&info.text);
        let version = text
            .split(';')
            .find_map(|part| part.strip_prefix("version:"));
        version.map(str::to_owned)
    }

    /// Returns the known values of `fields` for each of the devices.
    pub(super) fn values(
        &self,
        of: &DcgmConnection,
        entities: &[DcgmEntity],
        fields: &[u16],
    ) -> Result<Vec<Value>, DcgmError> {
        let call = "dcgmEntitiesGetLatestValues";
        let entities: Vec<Entity> = entities.iter().map(Entity::from).collect();
        let count = |length: usize| c_uint::try_from(length).unwrap_or_default();
        // Twice the room, in case a later version's value is longer: a value's version reveals
        // its form.
        let room = entities.len() * fields.len() * 2;
        let mut values: Vec<Value> = (0..room).map(|_| Value::blank()).collect();
        self.call(call, || {
            let Some(ask) = self.dcgmEntitiesGetLatestValues else {
                return FUNCTION_NOT_FOUND;
            };
            // SAFETY: The lengths passed are those of the slices, and `values` has room for one
            // value per device and field.
            unsafe {
                ask(
                    of.0,
                    entities.as_ptr(),
                    count(entities.len()),
                    fields.as_ptr(),
                    count(fields.len()),
                    LIVE,
                    values.as_mut_ptr(),
                )
            }
        })?;
        values.truncate(entities.len() * fields.len());
        Ok(values)
    }

    fn call(&self, call: &'static str, make: impl FnOnce() -> Code) -> Result<(), DcgmError> {
        (self.listener)(call, None);
        match make() {
            0 => Ok(()),
            code => Err(DcgmError {
                call,
                code,
                text: self.text_of(code),
            }),
        }
    }

    /// Returns the library's text for a code.
    fn text_of(&self, code: Code) -> String {
        let text = self.errorString.map_or(ptr::null(), |text_of| {
            // SAFETY: The function takes a number and returns a static string.
            unsafe { text_of(code) }
        });
        if text.is_null() {
            return String::new();
        }
        // SAFETY: The library returned a zero-terminated string.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

// === impl Entity ===

impl From<&DcgmEntity> for Entity {
    fn from(entity: &DcgmEntity) -> Self {
        Self {
            group: entity.group,
            id: entity.id,
        }
    }
}

// === impl Value ===

impl Value {
    fn blank() -> Self {
        Self {
            version: 0,
            entity_group: 0,
            entity: 0,
            field: 0,
            kind: 0,
            status: FUNCTION_NOT_FOUND,
            unused: 0,
            time: 0,
            bytes: [0; VALUE_BYTES],
        }
    }

    /// Returns true if this is the value of `field` of `entity`.
    pub(super) fn is_of(&self, entity: DcgmEntity, field: u16) -> bool {
        self.version == version::<Self>(2)
            && self.status == 0
            && (self.entity_group, self.entity, self.field) == (entity.group, entity.id, field)
    }

    /// Returns the value as a text; `None` if it is unknown or not a text.
    pub(super) fn text(&self) -> Option<String> {
        let text = text(&self.bytes);
        (!text.is_empty() && !text.starts_with(BLANK)).then_some(text)
    }

    /// Returns the value as a number; `None` if it is unknown or not a number.
    pub(super) fn number(&self) -> Option<u32> {
        let bytes = self.bytes.first_chunk()?;
        let number = i64::from_ne_bytes(*bytes);
        u32::try_from(number).ok().filter(|_| number < BLANK_NUMBER)
    }
}

/// Returns the version of a structure, which DCGM composes of its size and its version number.
#[allow(clippy::cast_possible_truncation, reason = "sizes of small structures")]
const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// Returns the text before the terminating zero.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    let bytes = bytes.get(..end.unwrap_or(bytes.len())).unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests;
