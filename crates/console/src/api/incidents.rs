//! Responses of `/api/v1/incidents`.

use fleet::view::IncidentView;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Response of `/api/v1/incidents`, and of `/api/v1/incidents/{name}` with one incident.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IncidentsView {
    /// Time of the response, by the server's clock.
    pub now: Timestamp,
    /// Incidents with open faults, oldest first.
    pub incidents: Vec<IncidentView>,
}
