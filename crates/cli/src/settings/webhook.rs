//! The settings of `webhook`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cluster::ConnectOptions;
use contract::names;
use preflight::config::{Config, FailurePolicy, PodSecurity};
use runtime::logging::LogFormat;
use runtime::tls::CertificateFiles;

use super::amount::{self, parsed};
use super::network::certificate_lifetime;
use super::parts::log_format;
use super::{AuditSettings, DeliverySettings, SettingsError, connect_options, named, namespace};
use crate::args::{DeliveryArgs, FailurePolicyArg, WebhookArgs};

/// Default path of the configuration, where NVSentinel's chart mounts it.
const CONFIG: &str = "/etc/preflight/config.yaml";
/// Longest `--drain`: a pod has 30 s to end.
const MAX_DRAIN: Duration = Duration::from_secs(20);

#[derive(Debug, Clone)]
pub struct WebhookSettings {
    /// Checks that pods get.
    pub preflight: Config,
    /// Address for the requests of API servers.
    pub listen: SocketAddr,
    /// Address of metrics and probes.
    pub metrics_listen: SocketAddr,
    /// Address for pods of gangs.
    pub rendezvous_listen: SocketAddr,
    /// URL of that address for pods; `None`: derived from [`Reached`].
    pub rendezvous_url: Option<String>,
    pub cluster: ConnectOptions,
    pub namespace: String,
    pub reached: Reached,
    /// Delivery to the controller; `None`: nothing is reported to a controller.
    pub delivery: Option<DeliverySettings>,
    /// Treatment of pods while no webhook answers; `None`: the configuration's.
    pub failure_policy: Option<FailurePolicy>,
    /// Lifetime of the webhook's own certificates.
    pub certificate_lifetime: Duration,
    /// True if custom resources for the janitor are validated at admission.
    pub validates_requests: bool,
    /// Time after SIGTERM until the webhook stops answering.
    pub drain: Duration,
    /// Audit log of writes to the API server, if there is one.
    pub audit: Option<AuditSettings>,
    pub log: String,
    pub log_format: LogFormat,
}

/// Address of the webhook for API servers, and the owner of its certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reached {
    /// Name of a Service, with a certificate of the webhook's own.
    Service(String),
    /// URL, with a certificate of the webhook's own.
    Url {
        url: String,
        /// Name or address in the URL.
        host: String,
        /// True if the registration stays when this process ends.
        keep: bool,
    },
    /// Another program registers the webhook, with this certificate.
    Elsewhere(CertificateFiles),
}

impl WebhookSettings {
    /// Reads the configuration, and checks all settings.
    pub(crate) fn resolve(args: WebhookArgs) -> Result<Self, SettingsError> {
        let preflight = preflight(args.config.as_deref(), args.image.as_deref())?;
        let lifetime = certificate_lifetime(&args.certificate_lifetime)?;
        let drain = positive("--drain", &args.drain)?;
        if drain > MAX_DRAIN {
            let what = "is longer than 20s; a pod has 30 s to end";
            return Err(SettingsError::value("--drain", args.drain, what));
        }
        let given = args.failure_policy.map(|policy| match policy {
            FailurePolicyArg::Fail => FailurePolicy::Fail,
            FailurePolicyArg::Ignore => FailurePolicy::Ignore,
        });
        // A test must not stop the pods of a cluster.
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
                "podSecurity: https needs --controller, and no --tls-cert: checks report to the webhook, \
                 and trust its own certificate",
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
            audit: AuditSettings::resolve(args.audit),
            log_format: log_format(args.log.log_format.as_deref())?,
            log: args.log.log,
        })
    }
}

/// Returns the settings of the delivery to the controller.
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
            "nothing identifies the webhook to the controller: add --token-file FILE, with a token for the \
             audience gpuwarden",
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

/// Returns the configuration of checks: from `file`, else the built-in checks in `image`, else from
/// the default path.
fn preflight(file: Option<&Path>, image: Option<&str>) -> Result<Config, SettingsError> {
    let default = Path::new(CONFIG);
    match (file, image) {
        (None, Some(image)) => {
            let text = serde_json::json!({"image": image}).to_string();
            Config::parse(&text, "--image")
                .map_err(|error| SettingsError::value("--image", image, error.to_string()))
        }
        (None, None) if !default.exists() => Err(SettingsError::Conflict(
            "there is no configuration: name one with --config FILE, or run the built-in checks \
             (preflight-dcgm-diag, preflight-nccl-loopback, preflight-nccl-allreduce) with --image IMAGE, an \
             image that has gpuwarden in its PATH",
        )),
        (file, _) => parsed("--config", file.unwrap_or(default), Config::parse),
    }
}

fn positive(name: &'static str, text: &str) -> Result<Duration, SettingsError> {
    let read = amount::duration(name, text)?;
    // The duration is never negative.
    Ok(Duration::try_from(read).unwrap_or_default())
}

/// Returns the name or address in a URL.
fn host(url: &str, flag: &'static str) -> Result<String, SettingsError> {
    let uri: http::Uri = url.parse().unwrap_or_default();
    match (uri.scheme_str(), uri.host()) {
        (Some("https"), Some(host)) => Ok(host.trim_matches(['[', ']']).to_owned()),
        _ => Err(SettingsError::value(flag, url, "is not https://HOST:PORT")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_file_the_built_in_checks_run_in_the_image_that_is_named() {
        // The machine of the test may have a file at the default path.
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
