//! Limits on what a check inherits from the user's containers. The creator of a pod decides how
//! much that is, and each check gets a copy.

use serde_json::Value;

use crate::field::{self, shortened};

/// Most variables that a check inherits. Jobs that tune NCCL, libfabric and UCX at once have
/// some dozens.
const MAX_VARIABLES: usize = 256;
/// Most mounts that a check inherits. A fabric's libraries need a handful.
const MAX_MOUNTS: usize = 64;
/// Most bytes of variables and mounts together, as JSON. A whole pod may have 1.5 MiB, shared
/// by three checks or more.
const MAX_BYTES: usize = 64 * 1024;

/// Variables and mounts that a check inherited, and those left out.
#[derive(Default)]
pub(super) struct Inherited {
    variables: Kind,
    mounts: Kind,
    bytes: usize,
}

#[derive(Default)]
struct Kind {
    taken: usize,
    left_out: usize,
    /// Name of the first one that was left out.
    first: Option<String>,
}

// === impl Inherited ===

impl Inherited {
    /// Returns true if there is room for a variable, and counts it.
    pub(super) fn has_room_for_variable(&mut self, variable: &Value) -> bool {
        self.variables
            .take(variable, MAX_VARIABLES, &mut self.bytes)
    }

    /// Returns true if there is room for a mount, and counts it.
    pub(super) fn has_room_for_mount(&mut self, mount: &Value) -> bool {
        self.mounts.take(mount, MAX_MOUNTS, &mut self.bytes)
    }

    /// Returns warnings about left-out variables and mounts, for the creator of the pod.
    pub(super) fn left_out(&self) -> impl Iterator<Item = String> {
        let kinds = [
            ("variables", MAX_VARIABLES, &self.variables),
            ("volume mounts", MAX_MOUNTS, &self.mounts),
        ];
        kinds.into_iter().filter_map(|(what, most, kind)| {
            let first = kind.first.as_ref()?;
            Some(format!(
                "preflight checks take over {} of the pod's {what} and leave out {}, such as {first}: at most {most} \
                 are taken over, and with variables and mounts together {} KiB",
                kind.taken,
                kind.left_out,
                MAX_BYTES / 1024
            ))
        })
    }
}

// === impl Kind ===

impl Kind {
    fn take(&mut self, one: &Value, most: usize, bytes: &mut usize) -> bool {
        let with_it = *bytes + one.to_string().len();
        if self.taken < most && with_it <= MAX_BYTES {
            self.taken += 1;
            *bytes = with_it;
            return true;
        }
        self.left_out += 1;
        self.first
            .get_or_insert_with(|| shortened(field::name(one)));
        false
    }
}
