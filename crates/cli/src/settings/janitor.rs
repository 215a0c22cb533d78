//! The settings of the janitor, in a controller, and of a provider that is served by itself.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

use cluster::ConnectOptions;
use controller::ingest::ServiceAccount;
use domain::janitor::JanitorConfig;
use domain::janitor::generic::GenericConfig;
use jiff::SignedDuration;
use runtime::logging::LogFormat;
use runtime::tls::CertificateFiles;

use super::parts::log_format;
use super::{SettingsError, amount, connect_options, namespace};
use crate::args::{ActArgs, JanitorProviderArgs};

/// Time for which resources are kept after their end, as in NVSentinel.
const TTL: &str = "336h";

/// `JanitorSettings` are the settings of the janitor.
#[derive(Debug, Clone)]
pub struct JanitorSettings {
    /// Its configuration.
    pub config: JanitorConfig,
    /// The time for which resources are kept after their end; `None`: for ever.
    pub ttl: Option<SignedDuration>,
}

/// `JanitorProviderSettings` are the settings of `janitor-provider`, with all defaults.
#[derive(Debug, Clone)]
pub struct JanitorProviderSettings {
    /// Address on which janitors are answered.
    pub listen: SocketAddr,
    /// Its certificate; `None`: it is reached in the open.
    pub tls: Option<CertificateFiles>,
    /// Who may call, and for which audience tokens have to be made; `None`: everybody.
    pub callers: Option<(String, BTreeSet<String>)>,
    /// How it reboots.
    pub generic: GenericConfig,
    /// The cluster.
    pub cluster: ConnectOptions,
    /// The namespace of its Jobs, where none is configured.
    pub namespace: String,
    /// The log filter.
    pub log: String,
    /// The format of log lines.
    pub log_format: LogFormat,
}

// === impl JanitorSettings ===

impl JanitorSettings {
    pub(super) fn resolve(args: &ActArgs, in_cluster: bool) -> Result<Option<Self>, SettingsError> {
        if !args.janitor.unwrap_or(false) {
            if args.janitor_config.is_some() || args.janitor_ttl.is_some() {
                return Err(SettingsError::Conflict(
                    "--janitor-config and --janitor-ttl stand beside --janitor: add it, or remove them",
                ));
            }
            return Ok(None);
        }
        if !in_cluster {
            return Err(SettingsError::Conflict(
                "--janitor needs a cluster to act on: name one with --kubeconfig FILE or --context NAME",
            ));
        }
        if args.dry_run.unwrap_or(false) {
            return Err(SettingsError::Conflict(
                "--janitor carries out what it is asked for, and --dry-run writes nothing: remove one",
            ));
        }
        let Some(path) = &args.janitor_config else {
            return Err(SettingsError::Conflict(
                "--janitor needs --janitor-config FILE, which says by which provider nodes are rebooted",
            ));
        };
        let ttl = args.janitor_ttl.as_deref().unwrap_or(TTL);
        let ttl = amount::duration("--janitor-ttl", ttl)?;
        Ok(Some(Self {
            config: janitor_config(path)?,
            ttl: Some(ttl).filter(SignedDuration::is_positive),
        }))
    }
}

/// Reads the file that says by which providers actions are carried out.
pub(crate) fn janitor_config(path: &Path) -> Result<JanitorConfig, SettingsError> {
    let source = path.display().to_string();
    let wrong = |what: String| SettingsError::value("--janitor-config", &source, what);
    let text =
        std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    JanitorConfig::parse(&text).map_err(|error| wrong(format!("is not right:\n{error}")))
}

// === impl JanitorProviderSettings ===

impl JanitorProviderSettings {
    /// Checks all of it.
    pub(crate) fn resolve(args: JanitorProviderArgs) -> Result<Self, SettingsError> {
        let tls = args.tls_cert.zip(args.tls_key);
        let tls = tls.map(|(certificate, key)| CertificateFiles { certificate, key });
        if !args.listen.ip().is_loopback() && tls.is_none() {
            return Err(SettingsError::Conflict(
                "--listen is reached from other machines, whose tokens would travel in the open: add --tls-cert \
                 and --tls-key, or listen on 127.0.0.1",
            ));
        }
        if !args.anybody && args.callers.is_empty() {
            return Err(SettingsError::Conflict(
                "nobody may call: name the ServiceAccount of the janitor with --callers NAMESPACE/NAME",
            ));
        }
        if args.anybody && !args.listen.ip().is_loopback() {
            return Err(SettingsError::Conflict(
                "--anybody is for this machine only: listen on 127.0.0.1, or name --callers",
            ));
        }
        let callers = args.callers.iter().map(|text| {
            let account: ServiceAccount = text
                .parse()
                .map_err(|error| SettingsError::value("--callers", text, format!("{error}")))?;
            let ServiceAccount { namespace, name } = account;
            Ok(format!("system:serviceaccount:{namespace}:{name}"))
        });
        let callers = callers.collect::<Result<BTreeSet<String>, SettingsError>>()?;
        let generic = GenericConfig {
            image: args.reboot_image,
            namespace: args.reboot_namespace.unwrap_or_default(),
            use_sysrq: args.reboot_sysrq,
            write_syslog: args.reboot_syslog,
            job_ttl_seconds: args.reboot_job_ttl,
            image_pull_secrets: args.reboot_pull_secrets,
        };
        Ok(Self {
            listen: args.listen,
            tls,
            callers: (!args.anybody).then_some((args.audience, callers)),
            generic,
            cluster: connect_options(args.kubeconfig, args.context),
            namespace: namespace(args.namespace)?,
            log: args.log,
            log_format: log_format(args.log_format.as_deref())?,
        })
    }
}
