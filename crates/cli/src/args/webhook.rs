//! The arguments of `webhook`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::common::address;
use super::{AuditArgs, ConnectArgs, LogArgs};

#[derive(Args, Debug)]
pub(crate) struct WebhookArgs {
    /// Configuration of preflight: `NVSentinel`'s file (YAML), or the values of its chart
    /// [default: `/etc/preflight/config.yaml`, if it exists].
    #[arg(long, env = "GPUWARDEN_PREFLIGHT_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Image that contains gpuwarden: without a configuration, the built-in checks run in it.
    #[arg(
        long,
        env = "GPUWARDEN_PREFLIGHT_IMAGE",
        value_name = "IMAGE",
        conflicts_with = "config"
    )]
    pub image: Option<String>,
    /// Address for the requests of API servers.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_LISTEN", value_name = "ADDRESS:PORT",
          default_value = "0.0.0.0:8443", value_parser = address)]
    pub listen: SocketAddr,
    /// Address of metrics and probes, without TLS.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_METRICS_LISTEN", value_name = "ADDRESS:PORT",
          default_value = "0.0.0.0:8080", value_parser = address)]
    pub metrics_listen: SocketAddr,
    /// Address for pods of gangs, which ask for each other's addresses.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_RENDEZVOUS_LISTEN", value_name = "ADDRESS:PORT",
          default_value = "0.0.0.0:8444", value_parser = address)]
    pub rendezvous_listen: SocketAddr,
    /// URL of that address for pods [default: the Service, or with --register-url its host, and the
    /// port of --rendezvous-listen].
    #[arg(long, env = "GPUWARDEN_WEBHOOK_RENDEZVOUS_URL", value_name = "URL")]
    pub rendezvous_url: Option<String>,
    /// Address of the controller, such as `https://controller.example:50051`. With it, checks report
    /// through the webhook in pods whose Pod Security forbids mounts of the host, and gang members
    /// that cannot be reached are reported. The controller has to list the account of the webhook in
    /// its --central-monitors.
    #[arg(long, env = "GPUWARDEN_CONTROLLER", value_name = "URL")]
    pub controller: Option<String>,
    /// Certificates of the authority of the controller's certificate (PEM).
    #[arg(
        long,
        env = "GPUWARDEN_TLS_CA",
        value_name = "FILE",
        requires = "controller"
    )]
    pub tls_ca: Option<PathBuf>,
    /// `ServiceAccount` token that identifies the webhook to the controller; read for every request.
    #[arg(
        long,
        env = "GPUWARDEN_TOKEN_FILE",
        value_name = "FILE",
        requires = "controller"
    )]
    pub token_file: Option<PathBuf>,
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Namespace of the webhook, with its Secret and its Lease [default: the pod's own, else
    /// gpuwarden].
    #[arg(short, long, env = "GPUWARDEN_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
    /// Service of the webhook in that namespace, for API servers.
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_SERVICE",
        value_name = "NAME",
        default_value = "gpuwarden-webhook"
    )]
    pub service: String,
    /// Address to register instead of a Service, such as `https://127.0.0.1:8443`, for tests from
    /// outside of the cluster: pods start without checks while the webhook is down, and it removes
    /// the registration when it ends.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_REGISTER_URL", value_name = "URL")]
    pub register_url: Option<String>,
    /// Keep the registration by an address when this process ends, for other replicas.
    #[arg(long, requires = "register_url")]
    pub keep_registration: bool,
    /// Treatment of pods while no webhook answers: they are not created (Fail), or start without
    /// checks (Ignore) [default: the configuration's; Ignore with --register-url].
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_FAILURE_POLICY",
        value_name = "Fail|Ignore"
    )]
    pub failure_policy: Option<FailurePolicyArg>,
    /// Certificate for the server (PEM), from cert-manager or the service CA of `OpenShift`. With it,
    /// gpuwarden registers nothing: the issuer of the certificate puts its authority into the
    /// registration [default: a certificate of its own, kept in a Secret and renewed in time].
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
    /// Lifetime of the webhook's own certificates, at least 10s.
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_CERTIFICATE_LIFETIME",
        value_name = "DURATION",
        default_value = "2160h"
    )]
    pub certificate_lifetime: String,
    /// Reject custom resources for the janitor that cannot be carried out: for a node that does not
    /// exist, or that another resource of the kind is carried out on. Needs further permissions.
    #[arg(long, env = "GPUWARDEN_WEBHOOK_VALIDATE_REQUESTS")]
    pub validate_requests: bool,
    /// Time after SIGTERM until the webhook stops answering, so that API servers change to another
    /// replica.
    #[arg(
        long,
        env = "GPUWARDEN_WEBHOOK_DRAIN",
        value_name = "DURATION",
        default_value = "5s"
    )]
    pub drain: String,
    #[command(flatten)]
    pub audit: AuditArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

/// Failure policies, as Kubernetes spells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub(crate) enum FailurePolicyArg {
    /// Pods are not created.
    Fail,
    /// Pods start without checks.
    Ignore,
}
