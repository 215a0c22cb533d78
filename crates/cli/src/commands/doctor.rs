//! `gpuwarden doctor`: finds what is wrong with an installation, why that matters, and what to do.
//!
//! It checks the settings, files and permissions that a role with the same flags would use, and the
//! state of the gpuwarden that runs, if there is one. It changes nothing.

mod actors;
mod gpus;
mod in_cluster;
mod machine;
mod needs;
mod peers;
mod release;
mod running;

use controller::objects::ObjectsSource;
use model::shell;
use runtime::logging::chain;
use serde::Serialize;

use crate::args::{DoctorArgs, DoctorRole, Format, OutputArgs};
use crate::exit_code;
use crate::given::Given;
use crate::output::{self, Colour, plural, say};
use crate::settings::{
    ActSettings, AgentSettings, ControllerSettings, DeliverySettings, IngestSettings,
    LabelSettings, NodeSettings, ProcessSettings, Role, RunSettings, SettingsError, resolve,
};

/// All checks: name, why a finding other than `ok` matters, and the usual fix (`-`: none). A check
/// with a better fix sets its own.
const CHECKS: &str = include_str!("../../data/checks.tsv");

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// Name of the check, from [`CHECKS`].
    check: &'static str,
    result: Severity,
    /// A sentence about the state that was found.
    what: String,
    /// Why the state matters; absent where all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'static str>,
    /// The fix: a command, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Severity {
    Ok,
    /// Something that may be intended.
    Warning,
    /// Something does not work.
    Problem,
}

/// Settings of a role; the groups that it does not have are `None`.
struct Installation {
    /// Command that starts the role.
    command: &'static str,
    process: ProcessSettings,
    node: Option<NodeSettings>,
    act: Option<ActSettings>,
    ingest: Option<IngestSettings>,
    labels: Option<LabelSettings>,
    objects: Option<ObjectsSource>,
    delivery: Option<DeliverySettings>,
    /// True if the role acts only while it holds the Lease.
    leader_elect: bool,
}

pub(super) async fn execute(args: DoctorArgs, given: &Given) -> anyhow::Result<u8> {
    let (read, output) = match args.role {
        None => (read(args.run), args.output),
        Some(DoctorRole::Agent(args)) => (read(args.agent), args.output),
        Some(DoctorRole::Controller(args)) => (read(args.controller), args.output),
        Some(DoctorRole::Cluster(args)) => {
            return report(&release::check(&args.kube).await?, args.output);
        }
    };
    let findings = match read {
        Ok((settings, installation)) => {
            let mut findings = vec![settings];
            findings.extend(check(&installation, given).await);
            findings
        }
        Err(error) => vec![unusable(&error)],
    };
    report(&findings, output)
}

/// Prints the findings. Returns the exit code.
fn report(findings: &[Finding], output: OutputArgs) -> anyhow::Result<u8> {
    show(findings, output.output)?;
    let well = findings.iter().all(|it| it.result != Severity::Problem);
    Ok(exit_code(well))
}

/// Reads the settings of a role, as the role does at its start.
fn read<R: Role>(args: R) -> Result<(Finding, Installation), SettingsError>
where
    R::Settings: Into<Installation>,
{
    let what = match args.config() {
        Some(path) => format!("{} can be read, and all settings are valid", path.display()),
        None => "no configuration file; flags, environment and defaults are valid".to_owned(),
    };
    let installation = resolve(args)?.into();
    Ok((Finding::ok("settings", what), installation))
}

fn unusable(error: &SettingsError) -> Finding {
    let finding = Finding::problem("settings", causes(error));
    match error {
        SettingsError::File { path, error } => finding.fix(format!(
            "${{EDITOR:-vi}} +{} {}",
            error.line,
            shell::word(&path.to_string_lossy())
        )),
        _ => finding,
    }
}

async fn check(installation: &Installation, given: &Given) -> Vec<Finding> {
    let (mut findings, running) = running::check(installation, given).await;
    findings.extend(machine::check(installation, running, given));
    findings.extend(gpus::check(installation, running).await);
    findings.extend(peers::check(installation, running).await);
    findings.extend(in_cluster::check(installation).await);
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
        plural(number as u64, one)
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

/// Returns the user of this process, whose permissions are checked. A service may run as another
/// user.
fn asker() -> String {
    match host::identity::effective_uid() {
        0 => "root".to_owned(),
        uid => format!("uid {uid}"),
    }
}

// === impl Finding ===

impl Finding {
    fn ok(check: &'static str, what: impl Into<String>) -> Self {
        let (result, what) = (Severity::Ok, what.into());
        Self {
            check,
            result,
            what,
            why: None,
            fix: None,
        }
    }

    fn warning(check: &'static str, what: impl Into<String>) -> Self {
        let mut rows = CHECKS.lines().map(|row| row.split('\t'));
        let row = rows.find_map(|mut row| (row.next()? == check).then_some(row));
        let (why, fix) = row.map_or((None, None), |mut row| (row.next(), row.next()));
        Self {
            result: Severity::Warning,
            why,
            fix: fix.filter(|fix| *fix != "-").map(str::to_owned),
            ..Self::ok(check, what)
        }
    }

    fn problem(check: &'static str, what: impl Into<String>) -> Self {
        Self {
            result: Severity::Problem,
            ..Self::warning(check, what)
        }
    }

    /// Returns `ok` or a problem.
    fn tried(check: &'static str, tried: Result<String, String>) -> Self {
        match tried {
            Ok(well) => Self::ok(check, well),
            Err(error) => Self::problem(check, error),
        }
    }

    /// Sets the fix, except where all is well.
    fn fix(mut self, fix: impl Into<String>) -> Self {
        if self.result != Severity::Ok {
            self.fix = Some(fix.into());
        }
        self
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
            labels: None,
            objects: None,
            delivery: None,
            leader_elect: false,
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
            labels: settings.labels,
            objects: settings.objects,
            leader_elect: settings.leader_elect,
            ..Self::new("controller", settings.process)
        }
    }
}

#[cfg(test)]
mod tests {
    use contract::findings::FileError;

    use super::*;

    #[test]
    fn a_wrong_setting_is_a_problem_with_its_place() {
        let found = unusable(&SettingsError::File {
            path: "/c d.toml".into(),
            error: FileError {
                findings: vec!["/c d.toml:3: unknown key 'x'".into()],
                line: 3,
            },
        });
        assert_eq!(found.result, Severity::Problem);
        assert_eq!(found.what, "/c d.toml:3: unknown key 'x'");
        assert_eq!(found.fix.as_deref(), Some("${EDITOR:-vi} +3 '/c d.toml'"));
        let found = unusable(&SettingsError::Read {
            path: "/none".into(),
            source: std::io::Error::from(std::io::ErrorKind::NotFound),
        });
        assert!(found.what.contains("/none: entity not found"), "{found:?}");
        assert_eq!(found.fix, None);
    }

    #[test]
    fn each_check_has_a_row_and_each_row_a_check() {
        let sources = [
            include_str!("doctor.rs"),
            include_str!("doctor/actors.rs"),
            include_str!("doctor/gpus.rs"),
            include_str!("doctor/in_cluster.rs"),
            include_str!("doctor/in_cluster/objects.rs"),
            include_str!("doctor/machine.rs"),
            include_str!("doctor/peers.rs"),
            include_str!("doctor/release.rs"),
            include_str!("doctor/running.rs"),
        ];
        let mut names = Vec::new();
        for row in CHECKS.lines().skip(1) {
            let columns: Vec<&str> = row.split('\t').collect();
            let [name, why, _] = columns[..] else {
                panic!("{row}");
            };
            let used = sources
                .iter()
                .any(|text| text.contains(&format!("\"{name}\"")));
            assert!(used && !why.is_empty() && !names.contains(&name), "{row}");
            names.push(name);
        }
        for text in sources {
            for maker in [
                "Finding::warning(\"",
                "Finding::problem(\"",
                "Finding::tried(\"",
            ] {
                for after in text.split(maker).skip(1) {
                    let name = after.split('"').next().unwrap();
                    assert!(names.contains(&name), "{name}");
                }
            }
        }
    }
}
