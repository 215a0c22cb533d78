//! The settings of `webhook`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use cluster::ConnectOptions;
use preflight::config::{Config, ConfigError, FailurePolicy};
use runtime::logging::LogFormat;
use runtime::tls::CertificateFiles;

use super::parts::log_format;
use super::{SettingsError, amount, connect_options, namespace};
use crate::args::{FailurePolicyArg, WebhookArgs};

/// Shortest life of a certificate: a third of it is the time in which the next one is made.
const MIN_LIFETIME: Duration = Duration::from_secs(10);
/// Longest time for which questions are answered after the end was asked for. A pod has 30 s to end.
const MAX_DRAIN: Duration = Duration::from_secs(20);

/// `WebhookSettings` are the settings of `webhook`, with all defaults.
#[derive(Debug, Clone)]
pub struct WebhookSettings {
    /// What checks pods get.
    pub preflight: Config,
    /// Address on which API servers are answered.
    pub listen: SocketAddr,
    /// Address of metrics and probes.
    pub metrics_listen: SocketAddr,
    /// Address on which pods of gangs ask for each other.
    pub rendezvous_listen: SocketAddr,
    /// Address under which they reach it, where it does not follow from how API servers do.
    pub rendezvous_url: Option<String>,
    /// The cluster.
    pub cluster: ConnectOptions,
    /// The namespace of the webhook.
    pub namespace: String,
    /// Where API servers find the webhook, and whose certificate it shows.
    pub reached: Reached,
    /// What becomes of pods while no webhook answers, where it is not the configuration that says so.
    pub failure_policy: Option<FailurePolicy>,
    /// Time for which a certificate that is made here is good.
    pub certificate_lifetime: Duration,
    /// Time for which questions are answered after SIGTERM.
    pub drain: Duration,
    /// The log filter.
    pub log: String,
    /// The format of log lines.
    pub log_format: LogFormat,
}

/// Where API servers find the webhook, and whose certificate it shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reached {
    /// By a Service, with a certificate of our own.
    Service(String),
    /// By an address, with a certificate of our own.
    Url {
        /// The address.
        url: String,
        /// The name or address in it.
        host: String,
        /// The registration stays when this process ends.
        keep: bool,
    },
    /// By what somebody else registers, with that somebody's certificate.
    Elsewhere(CertificateFiles),
}

impl WebhookSettings {
    /// Reads the configuration, and checks all of it.
    pub(crate) fn resolve(args: WebhookArgs) -> Result<Self, SettingsError> {
        let preflight = read(&args.config)?;
        let lifetime = positive("--certificate-lifetime", &args.certificate_lifetime)?;
        if lifetime < MIN_LIFETIME {
            let what = "is shorter than 10s";
            let given = args.certificate_lifetime;
            return Err(SettingsError::value("--certificate-lifetime", given, what));
        }
        let drain = positive("--drain", &args.drain)?;
        if drain > MAX_DRAIN {
            let what = "is longer than 20s; a pod has 30 s to end";
            return Err(SettingsError::value("--drain", args.drain, what));
        }
        let given = args.failure_policy.map(|policy| match policy {
            FailurePolicyArg::Fail => FailurePolicy::Fail,
            FailurePolicyArg::Ignore => FailurePolicy::Ignore,
        });
        // Who tries it out is not to stop a cluster's pods.
        let tried_out = args.register_url.as_ref().map(|_| FailurePolicy::Ignore);
        let reached = match (args.tls_cert.zip(args.tls_key), args.register_url) {
            (Some((certificate, key)), _) => {
                Reached::Elsewhere(CertificateFiles { certificate, key })
            }
            (None, Some(url)) => Reached::Url {
                host: host(&url, "--register-url")?,
                url,
                keep: args.keep_registration,
            },
            (None, None) => Reached::Service(args.service),
        };
        Ok(Self {
            preflight,
            listen: args.listen,
            metrics_listen: args.metrics_listen,
            rendezvous_listen: args.rendezvous_listen,
            rendezvous_url: match args.rendezvous_url {
                Some(url) => host(&url, "--rendezvous-url").map(|_| Some(url))?,
                None => None,
            },
            cluster: connect_options(args.kubeconfig, args.context),
            namespace: namespace(args.namespace)?,
            reached,
            failure_policy: given.or(tried_out),
            certificate_lifetime: lifetime,
            drain,
            log: args.log,
            log_format: log_format(args.log_format.as_deref())?,
        })
    }
}

fn read(path: &PathBuf) -> Result<Config, SettingsError> {
    let text = std::fs::read_to_string(path).map_err(|source| SettingsError::Read {
        path: path.clone(),
        source,
    })?;
    let place = path.display().to_string();
    Config::parse(&text, &place)
        .map_err(|ConfigError { place, what }| SettingsError::value("--config", place, what))
}

fn positive(name: &'static str, text: &str) -> Result<Duration, SettingsError> {
    let read = amount::duration(name, text)?;
    // It is never negative.
    Ok(Duration::try_from(read).unwrap_or_default())
}

/// Returns the name or address in a URL.
fn host(url: &str, flag: &'static str) -> Result<String, SettingsError> {
    let wrong = |what: &str| SettingsError::value(flag, url, what);
    let rest = url.strip_prefix("https://");
    let rest = rest.ok_or_else(|| wrong("does not begin with https://"))?;
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = match authority.strip_prefix('[') {
        Some(six) => six.split(']').next().unwrap_or_default(),
        None => authority
            .rsplit_once(':')
            .map_or(authority, |(host, _)| host),
    };
    if host.is_empty() {
        return Err(wrong("names no host; write https://HOST:PORT"));
    }
    Ok(host.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_an_address_is_what_the_certificate_is_for() {
        for (url, expected) in [
            ("https://127.0.0.1:8443", Some("127.0.0.1")),
            ("https://webhook.example:8443/", Some("webhook.example")),
            ("https://webhook.example", Some("webhook.example")),
            ("https://[::1]:8443", Some("::1")),
            ("http://127.0.0.1", None),
            ("https://", None),
            ("127.0.0.1:8443", None),
        ] {
            assert_eq!(
                host(url, "--register-url").ok().as_deref(),
                expected,
                "{url}"
            );
        }
    }
}
