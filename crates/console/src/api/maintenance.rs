//! Response of `/api/v1/maintenance`.

use jiff::Timestamp;
use notices::Record;
use serde::{Deserialize, Serialize};

/// Response of `/api/v1/maintenance`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MaintenancesView {
    /// Time of the response, by the server's clock.
    pub now: Timestamp,
    /// Announced maintenances, also those that are over, in the order of their first notice.
    pub maintenances: Vec<Record>,
}
