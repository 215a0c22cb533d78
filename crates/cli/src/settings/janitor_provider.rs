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
use super::{SettingsError, connect_options, named, namespace};
use crate::args::JanitorProviderArgs;

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
    /// How it resets GPUs; `None`: it does not.
    pub resets: Option<ResetSettings>,
    /// The cluster.
    pub cluster: ConnectOptions,
    /// The namespace of its Jobs, where none is configured.
    pub namespace: String,
    /// The log filter.
    pub log: String,
    /// The format of log lines.
    pub log_format: LogFormat,
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
        // As with --namespace, an empty name is that of a template without a value.
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
