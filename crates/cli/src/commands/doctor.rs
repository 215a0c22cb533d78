//! `gpuwarden doctor`: what is wrong with this installation, why it matters, and how to
//! mend it. It looks at what a role with the same flags and file would use, and at the
//! gpuwarden that runs, if one does. It changes nothing.

mod in_cluster;
mod machine;
mod needs;
mod peers;
mod running;

use std::path::Path;

use runtime::logging::chain;
use serde::Serialize;

use crate::args::{DoctorArgs, DoctorRole, Format};
use crate::given::{Given, shell_word};
use crate::output::{self, Colour};
use crate::settings::{
    ActSettings, AgentSettings, ControllerSettings, DeliverySettings, IngestSettings, NodeSettings,
    ProcessSettings, Role, RunSettings, SettingsError, examine,
};
use crate::{EXIT_OK, EXIT_UNHEALTHY};

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// What: `kernel-log`, `data-dir`, `server` ...
    check: &'static str,
    result: Outcome,
    /// What was found.
    what: String,
    /// Why it matters; absent where all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'static str>,
    /// What mends it: a command where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    /// All is well.
    Ok,
    /// It may be meant so.
    Warning,
    /// Something does not work.
    Problem,
}

/// What a role would use; what it does not have is `None`.
struct Installation {
    /// The command that starts it.
    command: &'static str,
    process: ProcessSettings,
    node: Option<NodeSettings>,
    act: Option<ActSettings>,
    ingest: Option<IngestSettings>,
    delivery: Option<DeliverySettings>,
    /// Whether it acts only while it holds the Lease.
    leader_elect: bool,
}

pub(super) async fn execute(args: DoctorArgs, given: &Given) -> anyhow::Result<u8> {
    let (mut findings, format) = match args.role {
        None => (
            look_at(args.run, "gpuwarden doctor").await,
            args.output.output,
        ),
        Some(DoctorRole::Agent(args)) => {
            let found = look_at(args.agent, "gpuwarden doctor agent").await;
            (found, args.output.output)
        }
        Some(DoctorRole::Controller(args)) => {
            let found = look_at(args.controller, "gpuwarden doctor controller").await;
            (found, args.output.output)
        }
    };
    for fix in findings.iter_mut().filter_map(|it| it.fix.as_mut()) {
        *fix = given.complete(fix);
    }
    show(&findings, format)?;
    let well = findings.iter().all(|it| it.result != Outcome::Problem);
    Ok(if well { EXIT_OK } else { EXIT_UNHEALTHY })
}

/// What there is to say of a role; `doctor` is the command that asks.
async fn look_at<R: Role>(args: R, doctor: &str) -> Vec<Finding>
where
    R::Settings: Into<Installation>,
{
    let config = args.config().map(Path::to_owned);
    let (settings, wrong) = examine(args);
    let mut findings = of_settings(config.as_deref(), &wrong);
    let Some(settings) = settings else {
        findings.push(Finding::warning(
            "settings",
            "nothing else is looked at until they go together",
            "there is no telling what to look at",
            format!("{doctor}, once the problem above is mended"),
        ));
        return findings;
    };
    let installation = settings.into();
    let (of_running, running) = running::check(&installation, doctor).await;
    findings.extend(of_running);
    findings.extend(machine::check(&installation, running));
    findings.extend(peers::check(&installation, running).await);
    findings.extend(in_cluster::check(&installation).await);
    findings
}

fn of_settings(config: Option<&Path>, wrong: &[SettingsError]) -> Vec<Finding> {
    if wrong.is_empty() {
        let what = match config {
            Some(path) => format!(
                "{} can be read, and all settings go together",
                path.display()
            ),
            None => "no configuration file is named; flags, environment and defaults go together"
                .to_owned(),
        };
        return vec![Finding::ok("settings", what)];
    }
    let finding = |error: &SettingsError| {
        let fix = match error {
            SettingsError::Read { .. } => {
                "mend --config, or the permissions of the file".to_owned()
            }
            SettingsError::File { path, line, .. } => {
                format!(
                    "${{EDITOR:-vi}} +{line} {}",
                    shell_word(&path.to_string_lossy())
                )
            }
            SettingsError::Value { name, .. } => format!(
                "mend {name}, its environment variable, or the key {} of the configuration file",
                name.trim_start_matches('-')
            ),
            // It says so itself.
            SettingsError::Conflict(_) => return Finding::unusable(error.to_string()),
        };
        Finding {
            fix: Some(fix),
            ..Finding::unusable(causes(error))
        }
    };
    wrong.iter().map(finding).collect()
}

fn show(findings: &[Finding], format: Format) -> anyhow::Result<()> {
    if output::structured(format, &findings)? {
        return Ok(());
    }
    for finding in findings {
        let word = match finding.result {
            Outcome::Ok => output::colour("ok      ", Colour::Green),
            Outcome::Warning => output::colour("warning ", Colour::Yellow),
            Outcome::Problem => output::colour("problem ", Colour::Red),
        };
        let what = output::plain(&finding.what);
        output::line(&format!("{word} {:<15} {what}", finding.check))?;
        if let Some(why) = finding.why {
            output::line(&format!("{:25}why: {why}", ""))?;
        }
        if let Some(fix) = &finding.fix {
            output::line(&format!("{:25}fix: {}", "", output::plain(fix)))?;
        }
    }
    let count = |result, one: &str| {
        let number = findings.iter().filter(|it| it.result == result).count();
        let plural = if number == 1 { "" } else { "s" };
        format!("{number} {one}{plural}")
    };
    let (problems, warnings) = (
        count(Outcome::Problem, "problem"),
        count(Outcome::Warning, "warning"),
    );
    output::line(&format!("\n{problems}, {warnings}"))?;
    Ok(())
}

/// An error with its causes, on one line.
fn causes(error: &dyn std::error::Error) -> String {
    chain(error).replace('\n', "; ")
}

/// Who asks: permissions of files are his, not those of a service that runs as another.
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
            result: Outcome::Ok,
            what: what.into(),
            why: None,
            fix: None,
        }
    }

    fn problem(
        check: &'static str,
        what: impl Into<String>,
        why: &'static str,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            check,
            result: Outcome::Problem,
            what: what.into(),
            why: Some(why),
            fix: Some(fix.into()),
        }
    }

    /// A setting with which nothing starts.
    fn unusable(what: String) -> Self {
        Self {
            fix: None,
            ..Self::problem("settings", what, "gpuwarden does not start with it", "")
        }
    }

    fn warning(
        check: &'static str,
        what: impl Into<String>,
        why: &'static str,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            result: Outcome::Warning,
            ..Self::problem(check, what, why, fix)
        }
    }
}

// === impl Installation ===

impl From<RunSettings> for Installation {
    fn from(settings: RunSettings) -> Self {
        Self {
            command: "run",
            process: settings.process,
            node: Some(settings.node),
            act: Some(settings.act),
            ingest: None,
            delivery: None,
            leader_elect: false,
        }
    }
}

impl From<AgentSettings> for Installation {
    fn from(settings: AgentSettings) -> Self {
        Self {
            command: "agent",
            process: settings.process,
            node: Some(settings.node),
            act: None,
            ingest: None,
            delivery: Some(settings.delivery),
            leader_elect: false,
        }
    }
}

impl From<ControllerSettings> for Installation {
    fn from(settings: ControllerSettings) -> Self {
        Self {
            command: "controller",
            process: settings.process,
            node: None,
            act: Some(settings.act),
            ingest: Some(settings.ingest),
            delivery: None,
            leader_elect: settings.leader_elect,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_setting_is_a_problem_with_its_place() {
        let wrong = [
            SettingsError::File {
                path: "/c.toml".into(),
                line: 3,
                what: "unknown field `x`".into(),
            },
            SettingsError::Value {
                name: "--history",
                value: "soon".into(),
                what: "is no duration".into(),
            },
            SettingsError::Read {
                path: "/none".into(),
                source: std::io::Error::from(std::io::ErrorKind::NotFound),
            },
        ];
        let found = of_settings(None, &wrong);
        assert!(found.iter().all(|it| it.result == Outcome::Problem));
        assert_eq!(found[0].fix.as_deref(), Some("${EDITOR:-vi} +3 /c.toml"));
        assert!(found[1].fix.as_ref().unwrap().contains("the key history"));
        assert!(
            found[2].what.contains("/none: entity not found"),
            "{found:?}"
        );
        assert_eq!(of_settings(None, &[])[0].result, Outcome::Ok);
    }
}
