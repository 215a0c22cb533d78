//! `gpuwarden doctor`: what is wrong with this installation, why it matters, and how to
//! mend it. It looks at what a role with the same flags and file would use, and at the
//! gpuwarden that runs, if one does. It changes nothing.

mod gpus;
mod in_cluster;
mod machine;
mod needs;
mod peers;
mod running;

use std::fmt::Display;

use model::shell;
use runtime::logging::chain;
use serde::Serialize;

use crate::args::{DoctorArgs, DoctorRole, Format};
use crate::given::Given;
use crate::output::{self, Colour, say};
use crate::settings::{
    ActSettings, AgentSettings, ControllerSettings, DeliverySettings, IngestSettings, NodeSettings,
    ProcessSettings, Role, RunSettings, SettingsError, resolve,
};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// The reason why a file that a setting names matters.
const NO_START: &str = "gpuwarden does not start with it";

/// A `Finding` is the result of looking at one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// The thing that was looked at: `kernel-log`, `data-dir`, `server` ...
    check: &'static str,
    result: Severity,
    /// A sentence on what was found.
    what: String,
    /// The reason why it matters; absent where all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'static str>,
    /// The mend: a command where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Severity {
    /// All is well.
    Ok,
    /// It may be meant so.
    Warning,
    /// Something does not work.
    Problem,
}

/// An `Installation` holds the settings of a role; the groups that it does not have are `None`.
struct Installation {
    /// The command that starts the role.
    command: &'static str,
    process: ProcessSettings,
    node: Option<NodeSettings>,
    act: Option<ActSettings>,
    ingest: Option<IngestSettings>,
    delivery: Option<DeliverySettings>,
    /// True if the role acts only while it holds the Lease.
    leader_elect: bool,
}

pub(super) async fn execute(args: DoctorArgs, given: &Given) -> anyhow::Result<u8> {
    let (read, output) = match args.role {
        None => (read(args.run), args.output),
        Some(DoctorRole::Agent(args)) => (read(args.agent), args.output),
        Some(DoctorRole::Controller(args)) => (read(args.controller), args.output),
    };
    let findings = match read {
        Ok((settings, installation)) => {
            let mut findings = vec![settings];
            findings.extend(look_at(&installation, given).await);
            findings
        }
        Err(error) => vec![unusable(&error)],
    };
    show(&findings, output.output)?;
    let well = findings.iter().all(|it| it.result != Severity::Problem);
    Ok(if well { EXIT_OK } else { EXIT_UNHEALTHY })
}

/// Reads the settings of a role, as it does itself.
fn read<R: Role>(args: R) -> Result<(Finding, Installation), SettingsError>
where
    R::Settings: Into<Installation>,
{
    let what = match args.config() {
        Some(path) => format!(
            "{} can be read, and all settings go together",
            path.display()
        ),
        None => {
            "no configuration file is named; flags, environment and defaults go together".to_owned()
        }
    };
    let installation = resolve(args)?.into();
    Ok((Finding::ok("settings", what), installation))
}

/// Returns the finding about settings with which nothing starts.
fn unusable(error: &SettingsError) -> Finding {
    let finding = Finding::problem("settings", causes(error), NO_START);
    match error {
        SettingsError::File { path, line, .. } => finding.fix(format!(
            "${{EDITOR:-vi}} +{line} {}",
            shell::word(&path.to_string_lossy())
        )),
        _ => finding,
    }
}

/// Looks at everything that a role uses.
async fn look_at(installation: &Installation, given: &Given) -> Vec<Finding> {
    let (mut findings, running) = running::check(installation, given).await;
    findings.extend(machine::check(installation, running, given));
    findings.extend(gpus::check(installation, running).await);
    findings.extend(peers::check(installation, running).await);
    findings.extend(in_cluster::check(installation, given).await);
    findings
}

fn show(findings: &[Finding], format: Format) -> anyhow::Result<()> {
    if output::structured(format, &findings)? {
        return Ok(());
    }
    for finding in findings {
        let word = match finding.result {
            Severity::Ok => output::colour("ok      ", Colour::Green),
            Severity::Warning => output::colour("warning ", Colour::Yellow),
            Severity::Problem => output::colour("problem ", Colour::Red),
        };
        let what = output::plain(&finding.what);
        say!("{word} {:<15} {what}", finding.check)?;
        if let Some(why) = finding.why {
            say!("{:25}why: {why}", "")?;
        }
        if let Some(fix) = &finding.fix {
            say!("{:25}fix: {}", "", output::plain(fix))?;
        }
    }
    let count = |result, one: &str| {
        let number = findings.iter().filter(|it| it.result == result).count();
        let plural = if number == 1 { "" } else { "s" };
        format!("{number} {one}{plural}")
    };
    let problems = count(Severity::Problem, "problem");
    let warnings = count(Severity::Warning, "warning");
    say!("\n{problems}, {warnings}")?;
    Ok(())
}

/// Returns an error with its causes, on one line.
fn causes(error: &dyn std::error::Error) -> String {
    chain(error).replace('\n', "; ")
}

/// Returns the user of this process. Its permissions are looked at, not those of a service that
/// runs as another user.
fn asker() -> String {
    match host::identity::effective_uid() {
        0 => "root".to_owned(),
        uid => format!("uid {uid}"),
    }
}

// === impl Finding ===

impl Finding {
    fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self {
            check,
            result: Severity::Ok,
            what: what.into(),
            why: None,
            fix: None,
        }
    }

    fn warning(check: &'static str, what: impl Into<String>, why: &'static str) -> Self {
        Self {
            result: Severity::Warning,
            why: Some(why),
            ..Self::ok(check, what)
        }
    }

    fn problem(check: &'static str, what: impl Into<String>, why: &'static str) -> Self {
        Self {
            result: Severity::Problem,
            ..Self::warning(check, what, why)
        }
    }

    /// Returns that all is `well` where something was done, else a problem with the error.
    fn tried<T, E: Display>(
        check: &'static str,
        well: impl Into<String>,
        tried: Result<T, E>,
        why: &'static str,
    ) -> Self {
        match tried {
            Ok(_) => Self::ok(check, well),
            Err(error) => Self::problem(check, error.to_string(), why),
        }
    }

    /// Adds the mend, which a finding that all is well does not need.
    fn fix(self, fix: impl Into<String>) -> Self {
        Self {
            fix: (self.result != Severity::Ok).then(|| fix.into()),
            ..self
        }
    }
}

// === impl Installation ===

impl Installation {
    fn new(command: &'static str, process: ProcessSettings) -> Self {
        Self {
            command,
            process,
            node: None,
            act: None,
            ingest: None,
            delivery: None,
            leader_elect: false,
        }
    }

    /// Returns the command that looks at this installation.
    fn doctor(&self) -> String {
        match self.command {
            "run" => "doctor".to_owned(),
            other => format!("doctor {other}"),
        }
    }
}

impl From<RunSettings> for Installation {
    fn from(settings: RunSettings) -> Self {
        Self {
            node: Some(settings.node),
            act: Some(settings.act),
            ..Self::new("run", settings.process)
        }
    }
}

impl From<AgentSettings> for Installation {
    fn from(settings: AgentSettings) -> Self {
        Self {
            node: Some(settings.node),
            delivery: Some(settings.delivery),
            ..Self::new("agent", settings.process)
        }
    }
}

impl From<ControllerSettings> for Installation {
    fn from(settings: ControllerSettings) -> Self {
        Self {
            act: Some(settings.act),
            ingest: Some(settings.ingest),
            leader_elect: settings.leader_elect,
            ..Self::new("controller", settings.process)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_setting_is_a_problem_with_its_place() {
        let found = unusable(&SettingsError::File {
            path: "/c d.toml".into(),
            line: 3,
            what: "unknown field `x`".into(),
        });
        assert_eq!(found.result, Severity::Problem);
        assert_eq!(found.what, "/c d.toml:3: unknown field `x`");
        assert_eq!(found.fix.as_deref(), Some("${EDITOR:-vi} +3 '/c d.toml'"));
        let found = unusable(&SettingsError::Read {
            path: "/none".into(),
            source: std::io::Error::from(std::io::ErrorKind::NotFound),
        });
        assert!(found.what.contains("/none: entity not found"), "{found:?}");
        assert_eq!(found.fix, None);
    }
}
