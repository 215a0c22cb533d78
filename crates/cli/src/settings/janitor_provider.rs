//! The settings of `janitor-provider`.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use cluster::ConnectOptions;
use contract::names;
use controller::ingest::ServiceAccount;
use maintenance::gpu_reset::ResetSettings;
use maintenance::janitor::generic::GenericConfig;
use runtime::logging::LogFormat;
use runtime::tls::CertificateFiles;

use super::parts::log_format;
use super::{AuditSettings, SettingsError, connect_options, named, namespace};
use crate::args::JanitorProviderArgs;

#[derive(Debug, Clone)]
pub struct JanitorProviderSettings {
    /// Address for the requests of janitors.
    pub listen: SocketAddr,
    /// Certificate of the server; `None`: without TLS.
    pub tls: Option<CertificateFiles>,
    /// Audience of tokens, and the accounts that may call; `None`: everybody may call.
    pub callers: Option<(String, BTreeSet<String>)>,
    pub generic: GenericConfig,
    /// `None`: GPUs are not reset.
    pub resets: Option<ResetSettings>,
    pub cluster: ConnectOptions,
    /// Default namespace of the Jobs.
    pub namespace: String,
    /// Audit log of writes to the API server, if there is one.
    pub audit: Option<AuditSettings>,
    pub log: String,
    pub log_format: LogFormat,
}

// === impl JanitorProviderSettings ===

impl JanitorProviderSettings {
    pub(crate) fn resolve(args: JanitorProviderArgs) -> Result<Self, SettingsError> {
        let tls = args.tls_cert.zip(args.tls_key);
        let tls = tls.map(|(certificate, key)| CertificateFiles { certificate, key });
        if !args.listen.ip().is_loopback() && tls.is_none() {
            return Err(SettingsError::Conflict(
                "--listen can be reached from other machines, whose tokens would travel in the open: add \
                 --tls-cert and --tls-key, or listen on 127.0.0.1",
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
        // A container template without a value passes an empty name, as for --namespace.
        let reboot_namespace = args.reboot_namespace.filter(|name| !name.is_empty());
        let reboot_namespace = reboot_namespace
            .map(|name| named("--reboot-namespace", name, names::dns_label))
            .transpose()?;
        let generic = GenericConfig {
            image: args.reboot_image,
            namespace: reboot_namespace.unwrap_or_default(),
            use_sysrq: args.reboot_sysrq,
            write_syslog: args.reboot_syslog,
            job_ttl_seconds: args.reboot_job_ttl,
            image_pull_secrets: args.reboot_pull_secrets,
        };
        let resets = args.reset_image.map(|image| ResetSettings {
            pull_secrets: generic.image_pull_secrets.clone(),
            runtime_class: args.reset_runtime_class,
            ..ResetSettings::of_job(&image)
        });
        Ok(Self {
            listen: args.listen,
            tls,
            callers: (!args.anybody).then_some((args.audience, callers)),
            generic,
            resets,
            cluster: connect_options(args.connect),
            namespace: namespace(args.namespace)?,
            audit: AuditSettings::resolve(args.audit),
            log_format: log_format(args.log.log_format.as_deref())?,
            log: args.log.log,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn a_provider_is_not_reached_in_the_open_or_by_anybody() {
        let provider = |more: &[&str]| {
            let args = [
                &["gpuwarden", "janitor-provider", "--kubeconfig", "/k"],
                more,
            ]
            .concat();
            let Command::JanitorProvider(args) = Cli::parse_from(args).command else {
                panic!("another command");
            };
            JanitorProviderSettings::resolve(*args).map_err(|error| error.to_string())
        };
        let open = ["--listen", "0.0.0.0:1"];
        let tls = ["--tls-cert", "c", "--tls-key", "k"];
        let callers = ["--callers", "a/b,c/d"];
        let settings = provider(&[&open[..], &tls, &callers].concat()).unwrap();
        let (audience, names) = settings.callers.unwrap();
        let names: Vec<String> = names.into_iter().collect();
        assert_eq!(audience, "nvsentinel-csp-provider");
        assert_eq!(
            names,
            ["system:serviceaccount:a:b", "system:serviceaccount:c:d"]
        );
        assert!(provider(&["--anybody"]).unwrap().callers.is_none());
        assert!(provider(&["--anybody"]).unwrap().resets.is_none());
        let namespace_of_jobs = |name: &str| {
            let settings = provider(&["--anybody", "--reboot-namespace", name]);
            settings.map(|settings| settings.generic.namespace)
        };
        assert_eq!(namespace_of_jobs("reboots").unwrap(), "reboots");
        assert_eq!(namespace_of_jobs("").unwrap(), "", "that of --namespace");
        assert!(namespace_of_jobs("Reboots").is_err());
        let resets = provider(&["--anybody", "--reset-image", "i"]).unwrap();
        assert_eq!(resets.resets.unwrap().image, "i");
        for (more, expected) in [
            ([&open[..], &callers].concat(), "in the open"),
            ([&open[..], &tls].concat(), "nobody may call"),
            (
                [&open[..], &tls, &["--anybody"]].concat(),
                "this machine only",
            ),
            (vec!["--callers", "janitor"], "NAMESPACE/NAME"),
        ] {
            let error = provider(&more).unwrap_err();
            assert!(error.contains(expected), "{more:?}: {error}");
        }
    }
}
