//! The settings of the network between agents and their controller.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use std::time::Duration;

use connector::outbox;
use contract::names;
use controller::ingest::{ServiceAccount, TokenRules};
use runtime::tls::CertificateFiles;

use super::{SettingsError, amount, named};
use crate::args::{DeliveryArgs, IngestArgs};

/// Port of a controller for events, from the contract.
const GRPC_PORT: u16 = 50051;
/// Audience of the agents' tokens.
const AUDIENCE: &str = "gpuwarden";
/// `ServiceAccount` of the agents.
const AGENT: &str = "gpuwarden-agent";

/// Service of a controller's port.
const SERVICE: &str = "gpuwarden-controller";
/// Default lifetime of a certificate that gpuwarden issues itself.
const LIFETIME: &str = "90d";
/// Shortest lifetime of such a certificate, which is renewed in the last third of it.
const MIN_LIFETIME: Duration = Duration::from_secs(10);

/// Settings of the delivery from a node to its controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliverySettings {
    pub controller: String,
    /// Certificates of the authority of the controller's certificate; always set for https.
    pub authority: Option<PathBuf>,
    /// Certificate that identifies this node.
    pub certificate: Option<CertificateFiles>,
    /// File of the token that identifies this node, without a certificate.
    pub token_file: Option<PathBuf>,
    /// Largest size of the waiting events (bytes).
    pub outbox_size: u64,
}

/// Settings of a controller's port for events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IngestSettings {
    pub listen: SocketAddr,
    pub transport: Transport,
    /// Rules for tokens; used only with a cluster.
    pub tokens: TokenRules,
}

/// Protection of events on the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transport {
    Tls {
        own: ServerCertificate,
        /// Certificates of the authority of nodes' certificates; `None`: nodes show tokens only.
        clients: Option<PathBuf>,
    },
    /// Without TLS, on this machine only.
    Open,
}

/// Certificate of a controller's port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerCertificate {
    /// Certificate that somebody else issues.
    Files(CertificateFiles),
    /// Certificate that the controller issues, and keeps in a Secret of its cluster.
    Own {
        /// Name of the Service that agents connect to.
        service: String,
        lifetime: Duration,
    },
}

// === impl DeliverySettings ===

impl DeliverySettings {
    pub(super) fn resolve(args: DeliveryArgs) -> Result<Self, SettingsError> {
        let controller = args.controller.ok_or(SettingsError::Conflict(
            "an agent needs a controller: name it with --controller https://HOST:50051 (a machine \
             on its own is watched by 'gpuwarden run')",
        ))?;
        let certificate = pair(
            args.tls_cert,
            args.tls_key,
            "--tls-cert and --tls-key go together: add the other one",
        )?;
        if controller.starts_with("https:") {
            if args.tls_ca.is_none() {
                return Err(SettingsError::Conflict(
                    "--controller https://... needs --tls-ca FILE: the authority of the controller's \
                     certificate",
                ));
            }
            if certificate.is_none() && args.token_file.is_none() {
                return Err(SettingsError::Conflict(
                    "nothing identifies this node: add --tls-cert and --tls-key, or --token-file",
                ));
            }
        }
        let outbox_size = match args.outbox_size {
            None => outbox::DEFAULT_BYTES,
            Some(text) => amount::bytes("--outbox-size", &text)?,
        };
        if outbox_size < outbox::MIN_BYTES {
            let what = "is less than 16MiB: a large request would never fit";
            return Err(SettingsError::value(
                "--outbox-size",
                outbox_size.to_string(),
                what,
            ));
        }
        Ok(Self {
            controller,
            authority: args.tls_ca,
            certificate,
            token_file: args.token_file,
            outbox_size,
        })
    }
}

// === impl IngestSettings ===

impl IngestSettings {
    /// Checks the arguments and fills in the defaults. `namespace` is gpuwarden's own, which is also
    /// the default namespace of agents.
    pub(super) fn resolve(
        args: IngestArgs,
        in_cluster: bool,
        namespace: &str,
    ) -> Result<Self, SettingsError> {
        let own = pair(
            args.grpc_tls_cert,
            args.grpc_tls_key,
            "--grpc-tls-cert and --grpc-tls-key go together: add the other one",
        )?;
        let service = args.grpc_service.unwrap_or_else(|| SERVICE.to_owned());
        let lifetime = args.certificate_lifetime.as_deref().unwrap_or(LIFETIME);
        let issued = ServerCertificate::Own {
            service: named("--grpc-service", service, names::dns_label)?,
            lifetime: certificate_lifetime(lifetime)?,
        };
        let own = own.map(ServerCertificate::Files);
        let open = args.grpc_insecure.unwrap_or(false);
        let everywhere = if open {
            Ipv4Addr::LOCALHOST
        } else {
            Ipv4Addr::UNSPECIFIED
        };
        let listen = args
            .grpc_listen
            .unwrap_or_else(|| SocketAddr::from((everywhere, GRPC_PORT)));
        let clients = args.grpc_client_ca;
        let issued = in_cluster.then_some(issued);
        let transport = transport(own, issued, clients, open, listen)?;
        let agents = args
            .agents
            .unwrap_or_else(|| vec![format!("{namespace}/{AGENT}")]);
        let tokens = TokenRules {
            audience: args.token_audience.unwrap_or_else(|| AUDIENCE.to_owned()),
            agents: accounts("--agents", &agents)?,
            central: accounts(
                "--central-monitors",
                &args.central_monitors.unwrap_or_default(),
            )?,
        };
        Ok(Self {
            listen,
            transport,
            tokens,
        })
    }
}

/// Parses the lifetime of certificates that gpuwarden issues itself.
pub(super) fn certificate_lifetime(text: &str) -> Result<Duration, SettingsError> {
    let flag = "--certificate-lifetime";
    // The duration is never negative.
    let lifetime = Duration::try_from(amount::duration(flag, text)?).unwrap_or_default();
    if lifetime < MIN_LIFETIME {
        return Err(SettingsError::value(flag, text, "is shorter than 10s"));
    }
    Ok(lifetime)
}

/// Returns the protection of a controller's port, if the settings are consistent. `issued` is the
/// certificate without `own` files; `None` without a cluster.
fn transport(
    own: Option<ServerCertificate>,
    issued: Option<ServerCertificate>,
    clients: Option<PathBuf>,
    open: bool,
    listen: SocketAddr,
) -> Result<Transport, SettingsError> {
    let in_cluster = issued.is_some();
    let conflict = match (own, open) {
        (Some(_), true) => "--grpc-insecure and --grpc-tls-cert exclude each other: remove one",
        (None, true) if clients.is_some() => "--grpc-client-ca needs TLS: remove --grpc-insecure",
        (None, true) if !listen.ip().is_loopback() => {
            let what = "can be reached from other machines, and --grpc-insecure authenticates nobody: \
                        use a loopback address, or TLS";
            return Err(SettingsError::value(
                "--grpc-listen",
                listen.to_string(),
                what,
            ));
        }
        (None, true) => return Ok(Transport::Open),
        (None, false) => match issued {
            Some(own) => return Ok(Transport::Tls { own, clients }),
            None => {
                "a controller needs a certificate: name it with --grpc-tls-cert and --grpc-tls-key \
                 (for tests on one machine: --grpc-insecure)"
            }
        },
        (Some(_), false) if clients.is_none() && !in_cluster => {
            "agents could not authenticate: name the authority of the nodes' certificates with \
             --grpc-client-ca, or a cluster that checks their tokens with --kubeconfig"
        }
        (Some(own), false) => return Ok(Transport::Tls { own, clients }),
    };
    Err(SettingsError::Conflict(conflict))
}

fn accounts(name: &'static str, texts: &[String]) -> Result<Vec<ServiceAccount>, SettingsError> {
    let parse = |text: &String| {
        let parsed = text.trim().parse();
        parsed.map_err(|_| {
            SettingsError::value(name, text, "is not a ServiceAccount; write NAMESPACE/NAME")
        })
    };
    texts.iter().map(parse).collect()
}

/// Returns the certificate and key of two flags, which go together.
pub(super) fn pair(
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    half: &'static str,
) -> Result<Option<CertificateFiles>, SettingsError> {
    match (certificate, key) {
        (None, None) => Ok(None),
        (Some(certificate), Some(key)) => Ok(Some(CertificateFiles { certificate, key })),
        _ => Err(SettingsError::Conflict(half)),
    }
}
