//! Functions of DCGM that gpuwarden calls, as declared in `dcgm_agent.h` of DCGM 4, answered
//! from the scenario beside this library. There is no host engine: connecting reads the
//! scenario.

#![allow(unsafe_code, reason = "exports the functions of a C library")]
#![allow(non_snake_case, reason = "the names of dcgm_agent.h")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ushort, c_void};
use std::ptr;

use crate::nvml::{behave, current};
use crate::scenario::{FakeDcgm, FakeIncident, Scenario};

const OK: c_int = 0;
const BAD_PARAMETER: c_int = -1;
const VER_MISMATCH: c_int = -12;
/// Kinds of entities: none, GPUs and switches.
const NONE: c_uint = 0;
const GPU: c_uint = 1;
const SWITCH: c_uint = 3;
/// Handle of every connection and of every group.
const ONE: usize = 1;
/// Size of a field value in bytes, and the offset of the value in it.
const VALUE: usize = 4128;
const VALUE_OF: usize = 32;

/// Runs a call, unless the scenario replaces it.
fn answer(call: &str, answer: impl FnOnce(&Scenario) -> c_int) -> c_int {
    let scenario = current();
    match scenario.calls.get(call) {
        Some(behaviour) => behave(behaviour).cast_signed(),
        None => answer(&scenario),
    }
}

/// Writes a value at an offset in bytes behind a pointer.
fn write<T>(at: *mut c_void, offset: usize, value: T) {
    // SAFETY: The caller of a DCGM function passes a pointer to a structure with this field.
    unsafe { at.byte_add(offset).cast::<T>().write_unaligned(value) };
}

/// Writes a NUL-terminated text, cut to the available room.
fn write_text(at: *mut c_void, offset: usize, room: usize, text: &str) {
    let length = text.len().min(room.saturating_sub(1));
    // SAFETY: As above, and `room` is the size of the field.
    unsafe {
        let at = at.byte_add(offset).cast::<u8>();
        at.copy_from_nonoverlapping(text.as_ptr(), length);
        at.add(length).write(0);
    }
}

/// Returns the version field of a structure.
fn version_of(at: *const c_void) -> u32 {
    // SAFETY: As above; the version is the first field of each versioned structure.
    unsafe { at.cast::<u32>().read() }
}

/// Returns the version word of a structure: its size in bytes and its number.
fn version(bytes: usize, number: u32) -> u32 {
    u32::try_from(bytes).unwrap_or_default() | number << 24
}

#[unsafe(no_mangle)]
extern "C" fn dcgmInit() -> c_int {
    answer("dcgmInit", |_| OK)
}

#[unsafe(no_mangle)]
extern "C" fn dcgmShutdown() -> c_int {
    answer("dcgmShutdown", |_| OK)
}

#[unsafe(no_mangle)]
extern "C" fn dcgmConnect_v2(
    address: *const c_char,
    params: *mut c_void,
    handle: *mut usize,
) -> c_int {
    answer("dcgmConnect_v2", |_| {
        if address.is_null() || params.is_null() || handle.is_null() {
            return BAD_PARAMETER;
        }
        if version_of(params) != version(16, 2) {
            return VER_MISMATCH;
        }
        // SAFETY: The caller passes a NUL-terminated string.
        if unsafe { CStr::from_ptr(address) }.is_empty() {
            return BAD_PARAMETER;
        }
        write(handle.cast(), 0, ONE);
        OK
    })
}

#[unsafe(no_mangle)]
extern "C" fn dcgmDisconnect(handle: usize) -> c_int {
    of_connection("dcgmDisconnect", handle, |_| OK)
}

/// Runs a call for a connection.
fn of_connection(call: &str, handle: usize, tell: impl FnOnce(&Scenario) -> c_int) -> c_int {
    answer(call, |scenario| {
        if handle == ONE {
            tell(scenario)
        } else {
            BAD_PARAMETER
        }
    })
}

/// Runs a call for a group.
fn of_group(call: &str, handles: [usize; 2], tell: impl FnOnce(&Scenario) -> c_int) -> c_int {
    let [connection, group] = handles;
    of_connection(call, connection, |scenario| {
        if group == ONE {
            tell(scenario)
        } else {
            BAD_PARAMETER
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn dcgmGroupCreate(
    handle: usize,
    _kind: c_uint,
    _name: *const c_char,
    group: *mut usize,
) -> c_int {
    of_connection("dcgmGroupCreate", handle, |_| {
        write(group.cast(), 0, ONE);
        OK
    })
}

#[unsafe(no_mangle)]
extern "C" fn dcgmGroupAddEntity(handle: usize, group: usize, _kind: c_uint, _id: c_uint) -> c_int {
    of_group("dcgmGroupAddEntity", [handle, group], |_| OK)
}

#[unsafe(no_mangle)]
extern "C" fn dcgmGetEntityGroupEntities(
    handle: usize,
    kind: c_uint,
    ids: *mut c_uint,
    count: *mut c_int,
    _flags: c_uint,
) -> c_int {
    of_connection("dcgmGetEntityGroupEntities", handle, |scenario| {
        let there = match kind {
            GPU => scenario.counted(),
            SWITCH => (0..scenario.dcgm.switches).collect(),
            _ => return BAD_PARAMETER,
        };
        for (at, id) in there.iter().enumerate() {
            write(ids.cast(), at * size_of::<c_uint>(), *id);
        }
        write(count.cast(), 0, c_int::try_from(there.len()).unwrap_or(0));
        OK
    })
}

#[unsafe(no_mangle)]
extern "C" fn dcgmHealthSet(handle: usize, group: usize, _watches: c_uint) -> c_int {
    of_group("dcgmHealthSet", [handle, group], |_| OK)
}

#[unsafe(no_mangle)]
extern "C" fn dcgmUpdateAllFields(handle: usize, _wait: c_int) -> c_int {
    of_connection("dcgmUpdateAllFields", handle, |_| OK)
}

#[unsafe(no_mangle)]
extern "C" fn dcgmHostengineVersionInfo(handle: usize, info: *mut c_void) -> c_int {
    of_connection("dcgmHostengineVersionInfo", handle, |scenario| {
        if version_of(info) != version(516, 2) {
            return VER_MISMATCH;
        }
        let version = &scenario.dcgm.version;
        write_text(info, 4, 512, &format!("version:{version};arch:x86_64"));
        OK
    })
}

#[unsafe(no_mangle)]
extern "C" fn dcgmHealthCheck(handle: usize, group: usize, answer: *mut c_void) -> c_int {
    of_group("dcgmHealthCheck", [handle, group], |scenario| {
        let dcgm = &scenario.dcgm;
        let text = dcgm.text_bytes as usize;
        let room = dcgm.most_incidents as usize;
        if version_of(answer) != version(12 + room * (text + 20), dcgm.response) {
            return VER_MISMATCH;
        }
        let told = dcgm.incident.iter().take(room);
        let count = u32::try_from(told.len()).unwrap_or_default();
        write(answer, 4, if count == 0 { 0_u32 } else { 20 });
        write(answer, 8, count);
        for (at, incident) in told.enumerate() {
            tell(answer, 12 + at * (text + 20), dcgm, incident);
        }
        OK
    })
}

/// Writes an incident into a response.
fn tell(answer: *mut c_void, at: usize, dcgm: &FakeDcgm, incident: &FakeIncident) {
    let text = dcgm.text_bytes as usize;
    let (kind, id) = match incident.switch {
        Some(switch) => (SWITCH, switch),
        None if incident.machine => (NONE, 0),
        None => (GPU, incident.gpu),
    };
    write(answer, at, incident.watch);
    write(answer, at + 4, incident.health);
    write_text(answer, at + 8, text, &incident.message);
    for (number, behind) in [incident.code, kind, id].into_iter().zip([8, 12, 16]) {
        write(answer, at + text + behind, number);
    }
}

#[unsafe(no_mangle)]
extern "C" fn dcgmEntitiesGetLatestValues(
    handle: usize,
    entities: *const [c_uint; 2],
    entity_count: c_uint,
    fields: *const c_ushort,
    field_count: c_uint,
    _flags: c_uint,
    values: *mut c_void,
) -> c_int {
    of_connection("dcgmEntitiesGetLatestValues", handle, |scenario| {
        let mut offset = 0;
        for entity in 0..entity_count as usize {
            // SAFETY: The caller passes as many entities as its count argument says.
            let [kind, id] = unsafe { entities.add(entity).read() };
            let gpu = scenario.gpu(id);
            for field in 0..field_count as usize {
                // SAFETY: The caller passes as many fields as its count argument says.
                let field = unsafe { fields.add(field).read() };
                write(values, offset, version(VALUE, 2));
                write(values, offset + 4, kind);
                write(values, offset + 8, id);
                write(values, offset + 12, field);
                write(values, offset + 16, OK);
                let text = |text: &str| write_text(values, offset + VALUE_OF, 256, text);
                match field {
                    52 => write(values, offset + VALUE_OF, i64::from(id)),
                    54 => text(&gpu.uuid()),
                    57 => text(&gpu.pci()),
                    _ => text("<<<NOT_SUPPORTED>>>"),
                }
                offset += VALUE;
            }
        }
        OK
    })
}

#[unsafe(no_mangle)]
extern "C" fn errorString(code: c_int) -> *const c_char {
    let text = match code {
        BAD_PARAMETER => c"Bad parameter passed to function",
        VER_MISMATCH => c"API version mismatch",
        -21 => c"The connection to the host engine is not valid any longer",
        _ => return ptr::null(),
    };
    text.as_ptr()
}
