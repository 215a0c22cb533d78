//! Limits and checks on what providers write.

use std::collections::BTreeMap;

use contract::device::{Condition, ConditionStatus, GpuSpec};
use contract::json;
use runtime::shares;

use super::record::SourceCondition;
use super::{BoardError, Provider};

/// Most GPUs that the driver shows: some more than the largest machines have, replaced ones
/// included.
pub const MAX_GPUS: usize = 256;
/// Most GPUs that only providers have registered, in addition to the driver's.
pub const MAX_OF_PROVIDERS: usize = 256;
/// Most providers outside this process.
pub const MAX_PROVIDERS: usize = 32;
/// Most condition types that one provider owns. It frees them with its last registration.
pub const MAX_CONDITIONS: usize = 16;
/// Longest name, type or reason, in bytes.
pub const MAX_WORD: usize = 128;
/// Longest message of a condition, in bytes.
pub const MAX_MESSAGE: usize = 1024;
/// Most partitions of one GPU; the largest of today have seven.
const MAX_MIG_DEVICES: usize = 64;

/// Checks the name of a GPU, a provider or a condition type, by rules like Kubernetes' own: no
/// name can look like another one, or like none.
pub(super) fn name(field: &'static str, text: &str) -> Result<(), BoardError> {
    if text.is_empty() {
        let problem = "it is missing".to_owned();
        return Err(BoardError::Invalid { field, problem });
    }
    at_most(field, text, MAX_WORD)?;
    let is_end = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/".contains(byte);
    if !(bytes.iter().all(is_name) && is_end(bytes.first()) && is_end(bytes.last())) {
        let problem = format!(
            "{text:?} is not a valid name: use ASCII letters and digits, and between them - _ . : /"
        );
        return Err(BoardError::Invalid { field, problem });
    }
    Ok(())
}

/// Checks that a provider may add one more thing. `holders` has the providers of each existing
/// thing. Users who do not administer the machine have the same share as of all other
/// resources.
pub(super) fn room<'a>(
    provider: &Provider,
    what: &'static str,
    limit: usize,
    holders: impl Iterator<Item = Vec<&'a Provider>>,
) -> Result<(), BoardError> {
    let (mut taken, mut of_others, mut of_own) = (0, 0, 0);
    for holders in holders {
        taken += 1;
        of_others += usize::from(holders.iter().any(|one| !one.is_operator));
        of_own += usize::from(holders.iter().any(|one| one.uid == provider.uid));
    }
    let (one, all) = (limit / shares::ONE, limit / shares::OTHERS);
    if !provider.is_operator && (of_own >= one || of_others >= all) {
        return Err(BoardError::TooManyOfOthers { what, one, all });
    }
    if taken >= limit {
        return Err(BoardError::TooMany { what, limit });
    }
    Ok(())
}

fn at_most(field: &'static str, text: &str, limit: usize) -> Result<(), BoardError> {
    if text.len() > limit {
        let problem = format!("it has {} bytes; the limit is {limit}", text.len());
        return Err(BoardError::Invalid { field, problem });
    }
    Ok(())
}

/// Checks a provider's description of the GPU with this name, and fills in its UUID.
pub(super) fn spec(name: &str, mut spec: GpuSpec) -> Result<GpuSpec, BoardError> {
    if spec.uuid.is_empty() {
        name.clone_into(&mut spec.uuid);
    }
    if !spec.uuid.eq_ignore_ascii_case(name) {
        let field = "spec.uuid";
        let problem = format!("{:?} is not the name, {name:?}", spec.uuid);
        return Err(BoardError::Invalid { field, problem });
    }
    at_most("spec.product_name", &spec.product_name, MAX_WORD)?;
    at_most("spec.architecture", &spec.architecture, MAX_WORD)?;
    at_most("spec.pci_bus_id", &spec.pci_bus_id, MAX_WORD)?;
    if spec.mig_devices.len() > MAX_MIG_DEVICES {
        let (what, limit) = ("partitions of the GPU", MAX_MIG_DEVICES);
        return Err(BoardError::TooMany { what, limit });
    }
    for mig in &spec.mig_devices {
        at_most("spec.mig_devices.uuid", &mig.uuid, MAX_WORD)?;
    }
    Ok(spec)
}

/// Checks a provider's conditions and returns them by type.
pub(super) fn conditions(
    conditions: Vec<Condition>,
) -> Result<BTreeMap<String, SourceCondition>, BoardError> {
    if conditions.len() > MAX_CONDITIONS {
        let (what, limit) = ("types of conditions of this provider", MAX_CONDITIONS);
        return Err(BoardError::TooMany { what, limit });
    }
    let mut checked = BTreeMap::new();
    for one in conditions {
        name("condition.type", &one.r#type)?;
        at_most("condition.reason", &one.reason, MAX_WORD)?;
        at_most("condition.message", &one.message, MAX_MESSAGE)?;
        let status = status(one.status)?;
        let since = one.last_transition_time.and_then(json::timestamp);
        let condition = SourceCondition {
            status,
            reason: one.reason,
            message: one.message,
            since,
        };
        if checked.insert(one.r#type.clone(), condition).is_some() {
            let problem = format!("{:?} is given twice", one.r#type);
            let field = "condition.type";
            return Err(BoardError::Invalid { field, problem });
        }
    }
    Ok(checked)
}

/// Parses a status. One of a later version counts as unknown.
fn status(number: i32) -> Result<ConditionStatus, BoardError> {
    match ConditionStatus::try_from(number) {
        Ok(ConditionStatus::Unspecified) => Err(BoardError::Invalid {
            field: "condition.status",
            problem: "it is missing: give TRUE, FALSE or UNKNOWN".to_owned(),
        }),
        Ok(status) => Ok(status),
        Err(_) => Ok(ConditionStatus::Unknown),
    }
}
