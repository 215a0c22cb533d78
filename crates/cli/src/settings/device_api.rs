//! The settings of the Device API and of the job gate.

use std::path::PathBuf;

use devices::Providers;

use super::{ProcessSettings, SettingsError, is_root};
use crate::args::DeviceArgs;

/// Socket on which NVSentinel's server of this API listens.
const CONTRACT_SOCKET: &str = "/var/run/device-api/device.sock";

/// `DeviceSettings` are the settings of the Device API and of the job gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSettings {
    /// Unix socket of the Device API.
    pub socket: PathBuf,
    /// The processes that may write conditions there.
    pub providers: Providers,
    /// Unix socket of the job gate, where there is one.
    pub job_gate: Option<PathBuf>,
}

// === impl DeviceSettings ===

impl DeviceSettings {
    pub(super) fn resolve(
        args: DeviceArgs,
        process: &ProcessSettings,
    ) -> Result<Self, SettingsError> {
        let socket = args.device_api.unwrap_or_else(|| {
            if is_root() && process.data_dir_is_default {
                PathBuf::from(CONTRACT_SOCKET)
            } else {
                process.data_dir.join("device-api.sock")
            }
        });
        let providers = match args.device_api_providers.as_deref() {
            None | Some("operators") => Providers::Operators,
            Some("any") => Providers::Any,
            Some(other) => {
                return Err(SettingsError::value(
                    "--device-api-providers",
                    other,
                    "is neither operators nor any",
                ));
            }
        };
        Ok(Self {
            socket,
            providers,
            job_gate: args.job_gate,
        })
    }
}
