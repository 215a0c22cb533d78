//! The arguments of `janitor-provider`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::common::address;
use super::{AuditArgs, ConnectArgs, LogArgs};

#[derive(Args, Debug)]
pub(crate) struct JanitorProviderArgs {
    /// Address for the requests of janitors.
    #[arg(long, env = "GPUWARDEN_PROVIDER_LISTEN", value_name = "ADDRESS:PORT",
          default_value = "127.0.0.1:50052", value_parser = address)]
    pub listen: SocketAddr,
    /// Provider: generic reboots a node, or resets its GPUs, by a privileged Job.
    #[arg(long, env = "CSP", value_name = "generic", default_value = "generic")]
    pub provider: ProviderArg,
    /// Certificate for the server (PEM); read again when it changes.
    #[arg(long, env = "TLS_CERT_PATH", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Key of that certificate (PEM).
    #[arg(long, env = "TLS_KEY_PATH", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Audience that tokens must have.
    #[arg(
        long,
        env = "AUTH_AUDIENCES",
        value_name = "NAME",
        default_value = "nvsentinel-csp-provider"
    )]
    pub audience: String,
    /// `ServiceAccount`s that may call, each as NAMESPACE/NAME.
    #[arg(
        long,
        env = "GPUWARDEN_PROVIDER_CALLERS",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub callers: Vec<String>,
    /// Accept calls without a token, on this machine only.
    #[arg(long, conflicts_with = "callers")]
    pub anybody: bool,
    /// Image of the Job that reboots.
    #[arg(
        long,
        env = "GENERIC_REBOOT_IMAGE",
        value_name = "IMAGE",
        default_value = "public.ecr.aws/docker/library/busybox:1.37.0"
    )]
    pub reboot_image: String,
    /// Namespace of the Jobs [default: that of --namespace].
    #[arg(long, env = "GENERIC_REBOOT_JOB_NAMESPACE", value_name = "NAME")]
    pub reboot_namespace: Option<String>,
    /// Reboot by the kernel at once (sysrq), without stopping services first.
    #[arg(long, env = "GENERIC_REBOOT_USE_SYSRQ")]
    pub reboot_sysrq: bool,
    /// Write a line to the host's log before the reboot.
    #[arg(long, env = "GENERIC_REBOOT_WRITE_SYSLOG")]
    pub reboot_syslog: bool,
    /// Lifetime of a finished Job, in seconds. The lifetime must be longer than the janitor's timeout,
    /// since the Job identifies a repeated signal.
    #[arg(
        long,
        env = "GENERIC_REBOOT_JOB_TTL",
        value_name = "SECONDS",
        default_value_t = 3600
    )]
    pub reboot_job_ttl: u32,
    /// Secrets for pulling the images.
    #[arg(
        long,
        env = "GENERIC_REBOOT_IMAGE_PULL_SECRETS",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub reboot_pull_secrets: Vec<String>,
    /// Image of the Job that resets GPUs, gpuwarden's own or NVSentinel's [default: none, and no GPU is
    /// reset].
    #[arg(long, env = "GPUWARDEN_RESET_IMAGE", value_name = "IMAGE")]
    pub reset_image: Option<String>,
    /// Runtime class of the pod that resets GPUs, such as nvidia.
    #[arg(long, env = "GPUWARDEN_RESET_RUNTIME_CLASS", value_name = "NAME")]
    pub reset_runtime_class: Option<String>,
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// Namespace of the provider [default: the pod's own, else gpuwarden].
    #[arg(short, long, env = "GPUWARDEN_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
    #[command(flatten)]
    pub audit: AuditArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProviderArg {
    /// A privileged Job on the node.
    Generic,
}
