//! The settings of the janitor.

use jiff::SignedDuration;
use maintenance::janitor::JanitorConfig;
use maintenance::validation_request::ValidationConfiguration;

use super::SettingsError;
use super::amount::{self, parsed};
use crate::args::ActArgs;

/// Lifetime of finished resources, as in NVSentinel.
const TTL: &str = "336h";

#[derive(Debug, Clone)]
pub struct JanitorSettings {
    pub config: JanitorConfig,
    /// Lifetime of finished resources; `None`: forever.
    pub ttl: Option<SignedDuration>,
    /// Tests that a `ValidationRequest` may name; `None`: such requests are ignored.
    pub validation: Option<ValidationConfiguration>,
}

// === impl JanitorSettings ===

impl JanitorSettings {
    pub(super) fn resolve(args: &ActArgs, in_cluster: bool) -> Result<Option<Self>, SettingsError> {
        if !args.janitor.unwrap_or(false) {
            if args.janitor_config.is_some()
                || args.janitor_ttl.is_some()
                || args.validation_config.is_some()
            {
                return Err(SettingsError::Conflict(
                    "--janitor-config, --janitor-ttl and --validation-config need --janitor: add it, or \
                     remove them",
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
                "--janitor carries out custom resources, and --dry-run writes nothing: remove one",
            ));
        }
        let Some(path) = &args.janitor_config else {
            return Err(SettingsError::Conflict(
                "--janitor needs --janitor-config FILE, which names the provider that reboots nodes",
            ));
        };
        let ttl = args.janitor_ttl.as_deref().unwrap_or(TTL);
        let ttl = amount::duration("--janitor-ttl", ttl)?;
        let validation = args.validation_config.as_deref().map(|path| {
            parsed("--validation-config", path, |text, source| {
                ValidationConfiguration::parse(text, source, |path| std::fs::read_to_string(path))
            })
        });
        Ok(Some(Self {
            config: parsed("--janitor-config", path, JanitorConfig::parse)?,
            ttl: Some(ttl).filter(SignedDuration::is_positive),
            validation: validation.transpose()?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::RunArgs;
    use crate::settings::resolve;

    type Edit<'a> = &'a dyn Fn(&mut ActArgs);

    #[test]
    fn a_janitor_needs_a_cluster_and_a_file_and_writes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("janitor.yaml");
        std::fs::write(&path, "global: {timeout: 20m}\n").unwrap();
        let janitor = |edit: Edit<'_>| {
            let mut run = RunArgs::default();
            run.act.kubeconfig = Some("/k".into());
            (run.act.janitor, run.act.janitor_config) = (Some(true), Some(path.clone()));
            edit(&mut run.act);
            let settings = resolve(run).map_err(|error| error.to_string())?;
            let ttl = |it: JanitorSettings| it.ttl.map(|ttl| ttl.as_hours());
            Ok::<_, String>(settings.act.janitor.map(ttl))
        };
        // Another program may create the resources, so --quarantine is not needed.
        assert_eq!(janitor(&|_| ()), Ok(Some(Some(336))));
        let for_ever = |act: &mut ActArgs| act.janitor_ttl = Some("0s".into());
        assert_eq!(janitor(&for_ever), Ok(Some(None)));
        let table: [(Edit<'_>, &str); 6] = [
            (&|act| act.janitor = None, "need --janitor"),
            (&|act| act.kubeconfig = None, "--janitor needs a cluster"),
            (&|act| act.janitor_config = None, "needs --janitor-config"),
            (
                &|act| act.janitor_config = Some("/nowhere".into()),
                "cannot be read",
            ),
            (
                &|act| act.janitor_ttl = Some("soon".into()),
                "--janitor-ttl",
            ),
            (
                &|act| (act.quarantine, act.dry_run) = (Some(true), Some(true)),
                "--dry-run writes nothing",
            ),
        ];
        for (edit, expected) in table {
            let error = janitor(edit).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        std::fs::write(&path, "globl: {}\n").unwrap();
        let error = janitor(&|_| ()).unwrap_err();
        assert!(error.contains("globl"), "{error}");
    }
}
