//! The settings of the Device API and of the job gate.

use std::net::SocketAddr;
use std::path::PathBuf;

use devices::Providers;
use runtime::tls::CertificateFiles;

use super::amount::choice;
use super::network::pair;
use super::{ProcessSettings, SettingsError, is_root};
use crate::args::DeviceArgs;

/// Socket of NVSentinel's server of this API.
const CONTRACT_SOCKET: &str = "/var/run/device-api/device.sock";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSettings {
    /// Unix socket of the Device API.
    pub socket: PathBuf,
    /// Processes that may write conditions.
    pub providers: Providers,
    /// `None`: the API cannot be read over the network.
    pub network: Option<DeviceNetwork>,
    /// Unix socket of the job gate; `None`: no gate.
    pub job_gate: Option<PathBuf>,
}

/// Access to the Device API over the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNetwork {
    pub listen: SocketAddr,
    /// Certificate of the server, and authority of the clients that may read; `None`: without TLS,
    /// on this machine only.
    pub tls: Option<(CertificateFiles, PathBuf)>,
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
        let providers = choice(
            "--device-api-providers",
            args.device_api_providers.as_deref(),
            [("operators", Providers::Operators), ("any", Providers::Any)],
        )?;
        let own = pair(
            args.device_api_tls_cert,
            args.device_api_tls_key,
            "--device-api-tls-cert and --device-api-tls-key go together: add the other one",
        )?;
        let network = network(args.device_api_listen, own, args.device_api_client_ca)?;
        Ok(Self {
            socket,
            providers,
            network,
            job_gate: args.job_gate,
        })
    }
}

/// Returns the access over the network, if the settings are consistent.
fn network(
    listen: Option<SocketAddr>,
    own: Option<CertificateFiles>,
    clients: Option<PathBuf>,
) -> Result<Option<DeviceNetwork>, SettingsError> {
    let conflict = match (listen, own, clients) {
        (None, None, None) => return Ok(None),
        (None, _, _) => {
            "--device-api-tls-cert and --device-api-client-ca are for --device-api-listen: add it, or \
             remove them"
        }
        (Some(listen), Some(own), Some(clients)) => {
            let tls = Some((own, clients));
            return Ok(Some(DeviceNetwork { listen, tls }));
        }
        (Some(_), Some(_), None) => {
            "any client could read the Device API: name the authority of the clients' certificates with \
             --device-api-client-ca"
        }
        (Some(_), None, Some(_)) => {
            "--device-api-client-ca needs TLS: add --device-api-tls-cert and --device-api-tls-key"
        }
        (Some(listen), None, None) if listen.ip().is_loopback() => {
            return Ok(Some(DeviceNetwork { listen, tls: None }));
        }
        (Some(listen), None, None) => {
            let what = "can be reached from other machines without authentication: add \
                        --device-api-tls-cert, --device-api-tls-key and --device-api-client-ca, or use \
                        a loopback address";
            return Err(SettingsError::value(
                "--device-api-listen",
                listen.to_string(),
                what,
            ));
        }
    };
    Err(SettingsError::Conflict(conflict))
}
