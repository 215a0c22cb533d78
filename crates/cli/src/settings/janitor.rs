//! The settings of the janitor.

use std::path::Path;

use jiff::SignedDuration;
use maintenance::janitor::JanitorConfig;
use maintenance::validation_request::ValidationConfiguration;

use super::{SettingsError, amount};
use crate::args::ActArgs;

/// Time for which resources are kept after their end, as in NVSentinel.
const TTL: &str = "336h";

/// `JanitorSettings` are the settings of the janitor.
#[derive(Debug, Clone)]
pub struct JanitorSettings {
    /// Its configuration.
    pub config: JanitorConfig,
    /// The time for which resources are kept after their end; `None`: for ever.
    pub ttl: Option<SignedDuration>,
    /// The tests of nodes that may be asked for; `None`: these requests are left alone.
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
                    "--janitor-config, --janitor-ttl and --validation-config stand beside --janitor: add it, \
                     or remove them",
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
            validation: args
                .validation_config
                .as_deref()
                .map(validation_config)
                .transpose()?,
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

/// Reads the file that says which tests of nodes there are.
fn validation_config(path: &Path) -> Result<ValidationConfiguration, SettingsError> {
    let source = path.display().to_string();
    let wrong = |what: String| SettingsError::value("--validation-config", &source, what);
    let text =
        std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    ValidationConfiguration::parse(&text, |path| std::fs::read_to_string(path))
        .map_err(|error| wrong(format!("is not right:\n{error}")))
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
        // Without --quarantine, too: somebody else may make the resources.
        assert_eq!(janitor(&|_| ()), Ok(Some(Some(336))));
        let for_ever = |act: &mut ActArgs| act.janitor_ttl = Some("0s".into());
        assert_eq!(janitor(&for_ever), Ok(Some(None)));
        let table: [(Edit<'_>, &str); 6] = [
            (&|act| act.janitor = None, "stand beside --janitor"),
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
