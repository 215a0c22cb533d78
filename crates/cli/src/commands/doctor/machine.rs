//! The machine: kernel log, data directory and its store, files that are named, and who else
//! is there. What the gpuwarden that runs holds open is not tried once more: whether it can
//! use it is for it to say ([`super::running`]).

use std::fs;
use std::path::Path;

use controller::policy::PolicySource;
use diagnosis::catalog::Catalog;
use domain::policy::Policy;
use domain::shell;
use host::kernel_log::{OpenError, Spec};
use runtime::descriptors;
use store::StoreError;
use store::sqlite::inspect;
use trial::lint::lint;

use super::{Finding, Installation, asker, causes};
use crate::commands::load_catalog;
use crate::given::Given;
use crate::policy_source;
use crate::settings::{ActSettings, Endpoint, NodeSettings};

/// Below this much room the store may stop taking events within a day.
const LITTLE_ROOM: u64 = 256 * 1024 * 1024;
const MIB: u64 = 1024 * 1024;
/// Longest call of another process that is shown, in characters.
const CALL_CHARS: usize = 200;
/// What to do about a kernel log that is none.
const ANOTHER_LOG: &str =
    "name another one with --kernel-log: kmsg, journal, a file, or - for standard input";
/// File of the event store in the data directory.
const EVENTS_FILE: &str = "events.db";
const NO_ROOM: &str = "a store without room takes no events";
const NO_START: &str = "gpuwarden does not start with it";

pub(super) fn check(installation: &Installation, running: bool, given: &Given) -> Vec<Finding> {
    let mut findings = Vec::new();
    let data = &installation.process.data_dir;
    if !running {
        let node = installation.node.as_ref();
        findings.extend(node.map(|node| kernel_log(&node.kernel_log, installation.command, given)));
        findings.push(data_dir(data));
    }
    let may_grow = match (&installation.act, &installation.delivery) {
        (Some(act), _) => act.store_size,
        (None, Some(delivery)) => delivery.outbox_size,
        (None, None) => 0,
    };
    findings.push(room(data, may_grow));
    let needed = descriptors::needed(installation.ingest.is_some());
    findings.extend(files(descriptors::hard_limit(), needed));
    if let Some(act) = &installation.act {
        if !running {
            findings.extend(store_file(data, given));
        }
        findings.extend(policy(&act.policy, given));
        findings.extend(connector_config(act));
    }
    if let Some(node) = &installation.node {
        findings.extend(catalog(node));
        findings.push(others(data));
    }
    findings
}

fn kernel_log(spec: &Spec, command: &str, given: &Given) -> Finding {
    const WHY: &str = "without it no fault of this machine is seen";
    let problem = |what: String| Finding::problem("kernel-log", what, WHY);
    match host::kernel_log::open(spec, None) {
        Ok(source) if source.missing().is_some() => problem(format!(
            "{spec} does not exist; gpuwarden would wait for it"
        ))
        .fix(ANOTHER_LOG),
        Ok(_) => Finding::ok("kernel-log", format!("{spec} can be read by {}", asker())),
        Err(error) => {
            let fix = match &error {
                OpenError::KmsgPermission(_) => format!(
                    "sudo setcap cap_syslog+ep \"$(command -v gpuwarden)\", or journalctl -kf | {}",
                    given.command_with(command, &[("kernel-log", "-")])
                ),
                // What can be done is in the error.
                _ => ANOTHER_LOG.to_owned(),
            };
            problem(format!("{spec}: {} (asked by {})", causes(&error), asker())).fix(fix)
        }
    }
}

fn data_dir(dir: &Path) -> Finding {
    // It is made at the start; what counts until then is the directory above it.
    let existing = existing(dir);
    let probe = tempfile::Builder::new()
        .prefix(".gpuwarden-doctor-")
        .tempfile_in(existing);
    let written = probe.and_then(|mut file| std::io::Write::write_all(&mut file, b"probe"));
    let (who, place) = (asker(), existing.display());
    match written {
        Ok(()) => Finding::ok("data-dir", format!("{who} can write to {}", dir.display())),
        Err(error) => Finding::problem(
            "data-dir",
            format!("{who} cannot write to {place}: {error}"),
            "an event is only acknowledged once it is stored: without it none is taken",
        )
        .fix(format!(
            "sudo install -d -m 700 -o \"$USER\" {}, or name another with --data-dir",
            shell::word(&dir.to_string_lossy())
        )),
    }
}

/// Returns the nearest directory that is there.
fn existing(dir: &Path) -> &Path {
    dir.ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("."))
}

fn room(dir: &Path, may_grow: u64) -> Finding {
    match host::disk::free_bytes(existing(dir)) {
        Ok(free) => {
            let used = fs::metadata(dir.join(EVENTS_FILE)).map_or(0, |file| file.len());
            judged(dir, free, used, may_grow)
        }
        Err(error) => {
            let what = format!("the room at {} is not known: {error}", dir.display());
            Finding::warning("disk", what, NO_ROOM)
        }
    }
}

fn judged(dir: &Path, free: u64, used: u64, may_grow: u64) -> Finding {
    let what = format!("{} MiB are free where {} lies", free / MIB, dir.display());
    if free < LITTLE_ROOM {
        Finding::problem("disk", what, NO_ROOM).fix("--data-dir names another place")
    } else if free.saturating_add(used) < may_grow {
        let grows = may_grow / MIB;
        let what = format!("{what}, and what is kept there may grow to {grows} MiB");
        Finding::warning("disk", what, NO_ROOM)
            .fix("--data-dir names another place, --store-size or --outbox-size gives it less")
    } else {
        Finding::ok("disk", what)
    }
}

/// Warns where fewer descriptors can be had than the limits of connections need.
fn files(limit: u64, needed: u64) -> Option<Finding> {
    let what = format!(
        "{} may open {limit} files and connections, up to {needed} are used",
        asker()
    );
    let why = "without one it can open neither a connection of an agent nor one to the API server";
    let fix = format!("LimitNOFILE={needed} in the systemd unit, or ulimit -Hn {needed} as root");
    (limit < needed).then(|| Finding::warning("descriptors", what, why).fix(fix))
}

/// Looks at the store that nobody has open; `None` where there is none yet.
fn store_file(dir: &Path, given: &Given) -> Option<Finding> {
    if !dir.join(EVENTS_FILE).exists() {
        return None;
    }
    let shown = dir.to_string_lossy();
    let damaged = |what: String| {
        let why = "gpuwarden moves a damaged store aside and begins anew, without its history; \
                   faults that nodes carry come back from the nodes";
        let fix = format!(
            "cp {}/{EVENTS_FILE}* elsewhere, where what can be read of it is wanted",
            shell::word(&shown)
        );
        Finding::warning("store", what, why).fix(fix)
    };
    Some(match inspect(dir) {
        Err(error @ StoreError::Corrupt { .. }) => damaged(causes(&error)),
        Err(error) => {
            let why = "gpuwarden does not start with a store that it cannot open";
            Finding::problem("store", causes(&error), why)
                .fix(given.command_with("store inspect", &[("data-dir", &shown)]))
        }
        Ok(found) => match found.damage.first() {
            None => Finding::ok("store", format!("sound, {} events", found.events)),
            Some(damage) => damaged(format!("damaged: {damage}")),
        },
    })
}

/// Looks at the policy, unless it is one that is looked at in the cluster.
fn policy(source: &PolicySource, given: &Given) -> Option<Finding> {
    let name = source.to_string();
    let text = match source {
        PolicySource::BuiltIn => return Some(Finding::ok("policy", "the built-in one holds")),
        PolicySource::ConfigMap { .. } => return None,
        PolicySource::Preset(_) | PolicySource::File(_) => policy_source::text(&name),
    };
    Some(match text {
        Ok(text) => {
            let lint = given.command("policy lint");
            parsed(&name, &text, format!("{lint} {}", shell::word(&name)))
        }
        Err(error) => Finding::problem("policy", causes(error.as_ref()), NO_START),
    })
}

/// Returns what is to be said of a policy's text.
pub(super) fn parsed(source: &str, text: &str, fix: String) -> Finding {
    let policy = match Policy::parse(text, source) {
        Ok(policy) => policy,
        Err(error) => {
            let why = "gpuwarden does not start with it, or goes on with the last good one";
            return Finding::problem("policy", causes(&error), why).fix(fix);
        }
    };
    match lint(&policy, Catalog::builtin()).as_slice() {
        [] => Finding::ok(
            "policy",
            format!("{source} can be read, and nothing is odd in it"),
        ),
        [first, rest @ ..] => {
            let more = match rest.len() {
                0 => String::new(),
                more => format!(" (and {more} more)"),
            };
            let what = format!("{}{more}", policy_source::placed(source, &first.what));
            Finding::warning("policy", what, "it may do other than it is meant to").fix(fix)
        }
    }
}

/// Returns what is to be said of a file without which gpuwarden does not start.
fn file(check: &'static str, shown: &str, error: Option<String>) -> Finding {
    match error {
        None => Finding::ok(check, format!("{shown} can be read")),
        Some(error) => Finding::problem(check, error, NO_START),
    }
}

fn connector_config(act: &ActSettings) -> Option<Finding> {
    let path = act.connector_config.as_ref()?;
    let error = connector::ConnectorConfig::read(path).err();
    let error = error.map(|error| causes(&error));
    Some(file("connector-config", &path.to_string_lossy(), error))
}

fn catalog(node: &NodeSettings) -> Option<Finding> {
    let shown: Vec<_> = node.catalog.iter().map(|it| it.to_string_lossy()).collect();
    if shown.is_empty() {
        return None;
    }
    let error = load_catalog(&node.catalog).err();
    let error = error.map(|error| causes(error.as_ref()));
    Some(file("catalog", &shown.join(", "), error))
}

/// Looks whether a second gpuwarden watches this machine.
fn others(data_dir: &Path) -> Finding {
    let own = Endpoint::read(data_dir).map(|endpoint| endpoint.pid);
    let mut found = watching(Path::new("/proc"));
    found.retain(|(pid, _)| Some(*pid) != own);
    let shown = found
        .iter()
        .map(|(pid, line)| format!("process {pid} ({line})"));
    let shown: Vec<String> = shown.collect();
    if shown.is_empty() {
        return Finding::ok("others", "no other gpuwarden watches this machine");
    }
    Finding::warning(
        "others",
        format!("other gpuwardens watch this machine: {}", shown.join(", ")),
        "each reports every fault and decides for itself, and this one may not be the one in use",
    )
    .fix("end all but one; doctor takes the --config and --data-dir of any")
}

/// Lists the processes that watch this machine with how they were called, by
/// `/proc/PID/cmdline` (proc(5)). One with a log file of its own watches that file.
fn watching(proc: &Path) -> Vec<(u32, String)> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut found: Vec<(u32, String)> = entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let mut words = line.split([' ', '=']);
            let ours = Path::new(words.next()?).file_name()? == "gpuwarden"
                && matches!(words.next()?, "run" | "agent");
            let log = words.skip_while(|word| *word != "--kernel-log").nth(1);
            let machine =
                log.is_none_or(|log| matches!(log, "auto" | "kmsg") || log.starts_with("journal"));
            let shown = line.trim_end().chars().take(CALL_CHARS).collect();
            (ours && machine).then_some((pid, shown))
        })
        .collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Outcome;

    #[test]
    fn other_processes_are_told_by_their_command() {
        let dir = tempfile::tempdir().unwrap();
        for (pid, line) in [
            ("7", &b"/usr/bin/gpuwarden\0run\0--quarantine\0"[..]),
            ("9", b"gpuwarden\0agent\0"),
            ("11", b"gpuwarden\0status\0"),
            ("13", b"/usr/bin/gpuwardend\0run\0"),
            ("15", b"vi\0run\0"),
            // A log file of their own.
            ("18", b"gpuwarden\0run\0--kernel-log\0/tmp/kern.log\0"),
            ("19", b"gpuwarden\0agent\0--kernel-log=-\0"),
            (
                "20",
                b"gpuwarden\0agent\0--kernel-log=journal:/var/log/journal\0",
            ),
            (
                "21",
                b"/opt/gpuwarden\0run\0--kernel-log=kmsg\0--quarantine\0",
            ),
            ("17", b""),
            ("self", b"gpuwarden\0run\0"),
        ] {
            fs::create_dir(dir.path().join(pid)).unwrap();
            fs::write(dir.path().join(pid).join("cmdline"), line).unwrap();
        }
        let found = watching(dir.path());
        assert_eq!(
            found,
            [
                (7, "/usr/bin/gpuwarden run --quarantine".to_owned()),
                (9, "gpuwarden agent".to_owned()),
                (
                    20,
                    "gpuwarden agent --kernel-log=journal:/var/log/journal".to_owned()
                ),
                (
                    21,
                    "/opt/gpuwarden run --kernel-log=kmsg --quarantine".to_owned()
                ),
            ]
        );
    }

    #[test]
    fn too_few_descriptors_are_told() {
        let needed = descriptors::needed(true);
        assert!(needed > descriptors::needed(false));
        assert_eq!(files(needed, needed), None);
        let finding = files(needed - 1, needed).unwrap();
        assert_eq!(finding.result, Outcome::Warning);
        assert!(
            finding
                .fix
                .unwrap()
                .contains(&format!("LimitNOFILE={needed}"))
        );
    }

    #[test]
    fn room_is_judged_by_what_the_store_may_take() {
        let dir = Path::new("/nowhere");
        for (free, used, may_grow, expected) in [
            (100 * MIB, 0, 50 * MIB, Outcome::Problem),
            (1_000 * MIB, 0, 4_096 * MIB, Outcome::Warning),
            (1_000 * MIB, 4_000 * MIB, 4_096 * MIB, Outcome::Ok),
            (5_000 * MIB, 0, 4_096 * MIB, Outcome::Ok),
        ] {
            assert_eq!(judged(dir, free, used, may_grow).result, expected);
        }
    }

    #[test]
    fn a_kernel_log_that_is_not_there_is_a_problem_with_a_way_out() {
        let look = |spec: Spec| kernel_log(&spec, "run", &Given::default());
        let found = look(Spec::FileOnce("/does/not/exist".into()));
        assert_eq!(found.result, Outcome::Problem);
        assert!(found.what.contains("/does/not/exist"), "{found:?}");
        assert!(found.fix.unwrap().contains("--kernel-log"));
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = look(Spec::FileOnce(file.path().to_owned()));
        assert_eq!(found.result, Outcome::Ok, "{found:?}");
    }

    #[test]
    fn a_data_directory_is_tried_and_left_as_it_was() {
        let home = tempfile::tempdir().unwrap();
        let found = data_dir(&home.path().join("a/b"));
        assert_eq!(found.result, Outcome::Ok, "{found:?}");
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
        // A file where a directory should be: not even root can write into it.
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = data_dir(file.path());
        assert_eq!(found.result, Outcome::Problem, "{found:?}");
    }

    #[test]
    fn a_store_is_sound_damaged_or_not_there_yet() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(store_file(home.path(), &Given::default()), None);
        fs::write(
            home.path().join(EVENTS_FILE),
            "this is no database".repeat(500),
        )
        .unwrap();
        let found = store_file(home.path(), &Given::default()).unwrap();
        assert_eq!(found.result, Outcome::Warning, "it starts all the same");
        assert!(found.why.unwrap().contains("begins anew"), "{found:?}");
        fs::remove_file(home.path().join(EVENTS_FILE)).unwrap();
        fs::create_dir(home.path().join(EVENTS_FILE)).unwrap();
        assert_eq!(
            store_file(home.path(), &Given::default()).unwrap().result,
            Outcome::Problem
        );
    }

    #[test]
    fn a_policy_is_well_odd_or_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.toml");
        let policy = |source: &PolicySource| policy(source, &Given::default());
        let setting = PolicySource::File(path.clone());
        let found = policy(&setting).unwrap();
        assert!(found.result == Outcome::Problem && found.what.contains("p.toml"));
        let rules = |text: &str| format!("[[rule-sets]]\nname = \"r\"\n{text}");
        for (text, expected, part) in [
            (
                rules("[[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"x\"\n"),
                Outcome::Problem,
                "p.toml:5: rule set 'r': expression unknown variable 'x'",
            ),
            (rules(""), Outcome::Warning, "p.toml: "),
            (String::new(), Outcome::Problem, "p.toml:1: it is empty"),
        ] {
            fs::write(&path, text).unwrap();
            let found = policy(&setting).unwrap();
            assert_eq!(found.result, expected, "{found:?}");
            assert!(found.what.contains(part), "{found:?}");
            assert!(found.fix.unwrap().starts_with("gpuwarden policy lint /"));
        }
        assert_eq!(policy(&PolicySource::BuiltIn).unwrap().result, Outcome::Ok);
    }
}
