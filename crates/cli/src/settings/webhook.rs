//! The settings of `webhook`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cluster::ConnectOptions;
use contract::names;
use preflight::config::{Config, ConfigError, FailurePolicy, PodSecurity};
use runtime::logging::LogFormat;
use runtime::tls::CertificateFiles;

use super::parts::log_format;
use super::{DeliverySettings, SettingsError, amount, connect_options, named, namespace};
use crate::args::{DeliveryArgs, FailurePolicyArg, WebhookArgs};

/// The usual place of the configuration: NVSentinel's chart mounts it there.
const CONFIG: &str = "/etc/preflight/config.yaml";
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
    /// The way to the controller, if there is one.
    pub delivery: Option<DeliverySettings>,
    /// What becomes of pods while no webhook answers, where it is not the configuration that says so.
    pub failure_policy: Option<FailurePolicy>,
    /// Time for which a certificate that is made here is good.
    pub certificate_lifetime: Duration,
    /// Requests of the janitor are looked at before they are there.
    pub validates_requests: bool,
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
        let preflight = preflight(args.config.as_deref(), args.image.as_deref())?;
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
            (None, None) => Reached::Service(named("--service", args.service, names::dns_label)?),
        };
        let delivery = delivery(args.controller, args.tls_ca, args.token_file)?;
        let takes_reports = delivery.is_some() && !matches!(reached, Reached::Elsewhere(_));
        if preflight.pod_security == Some(PodSecurity::Https) && !takes_reports {
            return Err(SettingsError::Conflict(
                "podSecurity: https needs --controller, and a certificate that is made here (no \
                 --tls-cert): by that way checks report",
            ));
        }
        Ok(Self {
            preflight,
            delivery,
            listen: args.listen,
            metrics_listen: args.metrics_listen,
            rendezvous_listen: args.rendezvous_listen,
            rendezvous_url: match args.rendezvous_url {
                Some(url) => host(&url, "--rendezvous-url").map(|_| Some(url))?,
                None => None,
            },
            cluster: connect_options(args.connect),
            namespace: namespace(args.namespace)?,
            reached,
            failure_policy: given.or(tried_out),
            certificate_lifetime: lifetime,
            validates_requests: args.validate_requests,
            drain,
            log_format: log_format(args.log.log_format.as_deref())?,
            log: args.log.log,
        })
    }
}

/// Returns the way to the controller.
fn delivery(
    controller: Option<String>,
    tls_ca: Option<PathBuf>,
    token_file: Option<PathBuf>,
) -> Result<Option<DeliverySettings>, SettingsError> {
    let Some(address) = &controller else {
        return Ok(None);
    };
    if address.starts_with("https:") && token_file.is_none() {
        return Err(SettingsError::Conflict(
            "nothing tells the controller who this is: add --token-file FILE, with a token for the audience \
             gpuwarden",
        ));
    }
    DeliverySettings::resolve(DeliveryArgs {
        controller,
        tls_ca,
        token_file,
        ..DeliveryArgs::default()
    })
    .map(Some)
}

/// Returns what checks pods get: by the file that is named, else the built-in checks in `image`, else by the
/// file at its usual place.
fn preflight(file: Option<&Path>, image: Option<&str>) -> Result<Config, SettingsError> {
    let usual = Path::new(CONFIG);
    let (flag, text, place) = match (file, image) {
        (None, Some(image)) => {
            let text = serde_json::json!({"image": image}).to_string();
            ("--image", text, image.to_owned())
        }
        (None, None) if !usual.exists() => {
            return Err(SettingsError::Conflict(
                "there is no configuration: name one with --config FILE, or run the built-in checks \
                 (preflight-dcgm-diag, preflight-nccl-loopback, preflight-nccl-allreduce) with --image IMAGE, an \
                 image that has gpuwarden in its PATH",
            ));
        }
        (file, _) => {
            let path = file.unwrap_or(usual);
            let text = std::fs::read_to_string(path).map_err(|source| SettingsError::Read {
                path: path.to_owned(),
                source,
            })?;
            ("--config", text, path.display().to_string())
        }
    };
    Config::parse(&text, &place)
        .map_err(|ConfigError { place, what }| SettingsError::value(flag, place, what))
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
    fn without_a_file_the_built_in_checks_run_in_the_image_that_is_named() {
        // No test may rely on what stands at the usual place.
        if !Path::new(CONFIG).exists() {
            let error = preflight(None, None).expect_err("no image").to_string();
            assert!(
                error.contains("--image IMAGE") && error.contains("--config FILE"),
                "{error}"
            );
        }
        let config = preflight(None, Some("registry.example/gpuwarden:1")).expect("built in");
        let names: Vec<&str> = config.checks.iter().map(|check| &*check.name).collect();
        let built_in = "preflight-dcgm-diag preflight-nccl-loopback preflight-nccl-allreduce";
        assert_eq!(names.join(" "), built_in);
        for check in &config.checks {
            assert_eq!(check.container["image"], "registry.example/gpuwarden:1");
        }
        let error = preflight(None, Some("a b"))
            .expect_err("no image")
            .to_string();
        assert!(error.starts_with("--image \"a b\""), "{error}");
        let error = preflight(Some(Path::new("/nowhere/x.yaml")), None).expect_err("no file");
        assert!(error.to_string().contains("/nowhere/x.yaml"), "{error}");
    }

    #[test]
    fn the_way_to_the_controller_is_by_a_token() {
        let path = |name: &str| Some(PathBuf::from(name));
        let url = |text: &str| Some(text.to_owned());
        assert_eq!(delivery(None, path("ca"), None).expect("none"), None);
        for (ca, token, part) in [
            (path("ca"), None, "--token-file"),
            (None, path("token"), "--tls-ca"),
        ] {
            let error = delivery(url("https://c:50051"), ca, token).expect_err(part);
            assert!(error.to_string().contains(part), "{error}");
        }
        let whole = delivery(url("https://c:50051"), path("ca"), path("token"));
        assert_eq!(
            whole.expect("a way").map(|it| it.controller),
            url("https://c:50051")
        );
    }

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
