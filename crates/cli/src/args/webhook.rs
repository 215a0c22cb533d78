//! The arguments of `webhook`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::roles::address;

/// Arguments of `webhook`.
#[derive(Args, Debug)]
pub struct WebhookArgs {
    /// Configuration of preflight: `NVSentinel`'s file (YAML), or the values of its chart
    /// [default: `/etc/preflight/config.yaml`, where it is there].
    #[arg(long, env = "GPUWARDEN_PREFLIGHT_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Image that has gpuwarden: without a configuration, the built-in checks run in it.
    #[arg(
        long,
        env = "GPUWARDEN_PREFLIGHT_IMAGE",
        value_name = "IMAGE",
        conflicts_with = "config"
    )]
    pub image: Option<String>,
    /// Address on which API servers are answered.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_LISTEN", value_name = "ADDRESS:PORT",
          default_value = "0.0.0.0:8443", value_parser = address)]
    pub listen: SocketAddr,
    /// Address of metrics and probes, in the open.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_METRICS_LISTEN", value_name = "ADDRESS:PORT",
          default_value = "0.0.0.0:8080", value_parser = address)]
    pub metrics_listen: SocketAddr,
    /// Address on which pods of gangs ask for each other.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_RENDEZVOUS_LISTEN", value_name = "ADDRESS:PORT",
          default_value = "0.0.0.0:8444", value_parser = address)]
    pub rendezvous_listen: SocketAddr,
    /// Address under which pods reach it [default: the Service, or with --register-url its host, and the
    /// port of --rendezvous-listen].
    #[arg(long, env = "GPUWARDEN_WEBHOOK_RENDEZVOUS_URL", value_name = "URL")]
    pub rendezvous_url: Option<String>,
    /// Address of the controller, such as `https://controller.example:50051`. Then checks of pods that
    /// Pod Security lets mount nothing of the host report by the webhook, and members of gangs that
    /// nobody reaches are reported. The controller has to name the account of the webhook in its
    /// --central-monitors.
    #[arg(long, env = "GPUWARDEN_CONTROLLER", value_name = "URL")]
    pub controller: Option<String>,
    /// Certificates of the authority that the controller is trusted by (PEM).
    #[arg(
        long,
        env = "GPUWARDEN_TLS_CA",
        value_name = "FILE",
        requires = "controller"
    )]
    pub tls_ca: Option<PathBuf>,
    /// `ServiceAccount` token by which the controller knows the webhook; read for every request.
    #[arg(
        long,
        env = "GPUWARDEN_TOKEN_FILE",
        value_name = "FILE",
        requires = "controller"
    )]
    pub token_file: Option<PathBuf>,
    /// Kubeconfig of the cluster [default: that of the pod, where this is one].
    #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace of the webhook, with its Secret and its Lease [default: the pod's own, else
    /// gpuwarden].
    #[arg(short, long, env = "GPUWARDEN_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
    /// Service in that namespace by which API servers find the webhook.
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_SERVICE",
        value_name = "NAME",
        default_value = "gpuwarden-webhook"
    )]
    pub service: String,
    /// Register by an address instead of a Service, such as `https://127.0.0.1:8443`, to try it out
    /// from outside of the cluster: pods start without checks while the webhook is away, and at its
    /// end the registration is taken away.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_REGISTER_URL", value_name = "URL")]
    pub register_url: Option<String>,
    /// Leave the registration by an address when this process ends: other replicas go on.
    #[arg(long, requires = "register_url")]
    pub keep_registration: bool,
    /// What becomes of pods while no webhook answers: they are not created (Fail), or start without
    /// checks (Ignore) [default: the configuration's; Ignore with --register-url].
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_FAILURE_POLICY",
        value_name = "Fail|Ignore"
    )]
    pub failure_policy: Option<FailurePolicyArg>,
    /// Certificate for the server (PEM), as cert-manager or the service CA of `OpenShift` keeps one. Then
    /// nothing is registered here: whoever makes the certificate puts its authority into the
    /// registration [default: one is made, kept in a Secret and made anew in time].
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_TLS_CERT",
        value_name = "FILE",
        requires = "tls_key",
        conflicts_with = "register_url"
    )]
    pub tls_cert: Option<PathBuf>,
    /// Key of that certificate (PEM).
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_TLS_KEY",
        value_name = "FILE",
        requires = "tls_cert"
    )]
    pub tls_key: Option<PathBuf>,
    /// Time for which a certificate that is made here is good, at least 10s.
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_CERTIFICATE_LIFETIME",
        value_name = "DURATION",
        default_value = "2160h"
    )]
    pub certificate_lifetime: String,
    /// Refuse requests of the janitor at once that cannot be carried out: for a node that does not exist, or that
    /// another request of the kind is at work on. Needs further permissions.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_VALIDATE_REQUESTS")]
    pub validate_requests: bool,
    /// Time for which questions are still answered after SIGTERM, until API servers have turned to
    /// another replica.
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_DRAIN",
        value_name = "DURATION",
        default_value = "5s"
    )]
    pub drain: String,
    /// The log filter: error, warn, info, debug, trace, also by crate.
    #[arg(
        long,
        env = "GPUWARDEN_LOG",
        value_name = "FILTER",
        default_value = "info"
    )]
    pub log: String,
    /// The format of log lines [default: text].
    #[arg(long, env = "GPUWARDEN_LOG_FORMAT", value_name = "text|json")]
    pub log_format: Option<String>,
}

/// The values of `--failure-policy`, as Kubernetes spells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum FailurePolicyArg {
    /// They are not created.
    Fail,
    /// They start without checks.
    Ignore,
}
