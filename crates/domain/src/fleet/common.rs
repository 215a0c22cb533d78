//! What decisions about all nodes have in common.

use std::sync::Arc;

use jiff::Timestamp;

use super::Settings;
use super::devices::Devices;
use crate::fault::FaultBook;
use crate::policy::Policy;

/// What decisions about all nodes have in common.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) settings: Settings,
    /// The policy in force; `None` where it is not known yet.
    pub(super) policy: Option<Arc<Policy>>,
    pub(super) book: FaultBook,
    pub(super) devices: Devices,
    /// The time at which the store was made, see `Ownership::kept_by_another`.
    pub(super) begun: Timestamp,
    pub(super) now: Timestamp,
}
