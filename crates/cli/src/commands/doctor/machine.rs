//! The machine: kernel log, data directory and its store, files that are named, and other
//! gpuwardens. What the gpuwarden that runs holds open is not tried once more: whether it can
//! use that is for it to say ([`super::running`]).

use std::fs;
use std::path::Path;

use controller::policy::PolicySource;
use diagnosis::catalog::{Catalog, GPU_LIMITS};
use host::kernel_log::{OpenError, Spec};
use model::shell;
use runtime::descriptors;
use store::{StoreError, StoreUrl};

use super::{Finding, Installation, NO_START, asker, causes};
use crate::commands::load_catalog;
use crate::given::Given;
use crate::policy_source;
use crate::settings::Endpoint;

/// Below this much room the store may stop taking events within a day.
const LITTLE_ROOM: u64 = 256 * 1024 * 1024;
const MIB: u64 = 1024 * 1024;
/// Longest call of another process that is shown, in characters.
const CALL_CHARS: usize = 200;
/// The mend of a kernel log that cannot be read.
const ANOTHER_LOG: &str =
    "name another one with --kernel-log: kmsg, journal, a file, or - for standard input";

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
    if let Ok(free) = host::disk::free_bytes(existing(data)) {
        let file = StoreUrl::in_data_dir(data).file();
        let used = file.and_then(|file| fs::metadata(file).ok());
        let used = used.map_or(0, |file| file.len());
        findings.push(room(data, free, used, may_grow));
    }
    let needed = descriptors::needed(installation.ingest.is_some());
    findings.extend(files(descriptors::hard_limit(), needed));
    if let Some(act) = &installation.act {
        if !running {
            findings.extend(store_file(data, given));
        }
        findings.extend(policy(&act.policy, given));
        findings.extend(act.connector_config.as_ref().map(|path| {
            let read = connector::ConnectorConfig::read(path).map_err(|error| causes(&error));
            let well = format!("{} can be read", path.display());
            Finding::tried("connector-config", well, read, NO_START)
        }));
    }
    if let Some(node) = &installation.node {
        if !node.catalog.is_empty() {
            let read = load_catalog(&node.catalog).map_err(|error| causes(error.as_ref()));
            let well = read.as_ref().map_or(String::new(), changed);
            findings.push(Finding::tried("catalog", well, read, NO_START));
        }
        findings.push(others(data));
    }
    findings
}

/// Returns what files of changes come to; the thresholds of GPUs one by one.
fn changed(catalog: &Catalog) -> String {
    let changes = Catalog::builtin().changes_to(catalog);
    let (limits, others): (Vec<_>, Vec<_>) =
        (changes.iter()).partition(|change| change.kind == GPU_LIMITS);
    let mut well = "all files of changes can be read".to_owned();
    if !others.is_empty() {
        well.push_str(&format!("; {} fields of rows are others", others.len()));
    }
    for change in limits {
        well.push_str(&format!("; {} is {}", change.key, change.after));
    }
    well
}

fn kernel_log(spec: &Spec, command: &str, given: &Given) -> Finding {
    let mut fix = ANOTHER_LOG.to_owned();
    let opened = match host::kernel_log::open(spec, None) {
        Ok(source) if source.missing().is_some() => Err(format!(
            "{spec} does not exist; gpuwarden would wait for it"
        )),
        Ok(_) => Ok(()),
        Err(error) => {
            if let OpenError::KmsgPermission(_) = error {
                fix = format!(
                    "sudo setcap cap_syslog+ep \"$(command -v gpuwarden)\", or journalctl -kf | {}",
                    given.command_with(command, &[("kernel-log", "-")])
                );
            } else if let Some(advice) = error.advice() {
                fix = advice;
            }
            Err(format!("{spec}: {} (asked by {})", causes(&error), asker()))
        }
    };
    let well = format!("{spec} can be read by {}", asker());
    let why = "without it no fault of this machine is seen";
    Finding::tried("kernel-log", well, opened, why).fix(fix)
}

fn data_dir(dir: &Path) -> Finding {
    // It is made at the start; what counts until then is the directory above it.
    let existing = existing(dir);
    let probe = tempfile::Builder::new()
        .prefix(".gpuwarden-doctor-")
        .tempfile_in(existing);
    let written = probe.and_then(|mut file| std::io::Write::write_all(&mut file, b"probe"));
    let (who, place) = (asker(), existing.display());
    Finding::tried(
        "data-dir",
        format!("{who} can write to {}", dir.display()),
        written.map_err(|error| format!("{who} cannot write to {place}: {error}")),
        "an event is only acknowledged once it is stored: without it none is taken",
    )
    .fix(format!(
        "sudo install -d -m 700 -o \"$USER\" {}, or name another with --data-dir",
        shell::word(&dir.to_string_lossy())
    ))
}

/// Returns the nearest directory that exists.
fn existing(dir: &Path) -> &Path {
    dir.ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("."))
}

fn room(dir: &Path, free: u64, used: u64, may_grow: u64) -> Finding {
    const WHY: &str = "a store without room takes no events";
    let what = format!("{} MiB are free where {} lies", free / MIB, dir.display());
    if free < LITTLE_ROOM {
        Finding::problem("disk", what, WHY).fix("--data-dir names another place")
    } else if free.saturating_add(used) < may_grow {
        let grows = may_grow / MIB;
        let what = format!("{what}, and what is kept there may grow to {grows} MiB");
        Finding::warning("disk", what, WHY)
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

/// Looks at the store that nobody has open; returns `None` where there is none yet.
fn store_file(dir: &Path, given: &Given) -> Option<Finding> {
    let url = StoreUrl::in_data_dir(dir);
    let file = url.file();
    if file.as_ref().is_some_and(|file| !file.exists()) {
        return None;
    }
    let shown = dir.to_string_lossy();
    let damage = match url.inspect() {
        Ok(found) => found.damage.into_iter().next(),
        Err(error @ StoreError::Corrupt { .. }) => Some(causes(&error)),
        Err(error) => {
            let inspect = given.command_with("store inspect", &[("data-dir", &shown)]);
            return Some(Finding::problem("store", causes(&error), NO_START).fix(inspect));
        }
    };
    let Some(damage) = damage else {
        return Some(Finding::ok("store", "the event store is sound"));
    };
    let why = "gpuwarden moves a damaged store aside and begins anew, without its history; faults \
               that nodes carry come back from the nodes";
    let finding = Finding::warning("store", format!("damaged: {damage}"), why);
    Some(match file {
        Some(file) => finding.fix(format!(
            "cp {}* elsewhere, where what can be read of it is wanted",
            shell::word(&file.to_string_lossy())
        )),
        None => finding,
    })
}

/// Reads the policy, unless it is one that is looked at in the cluster.
fn policy(source: &PolicySource, given: &Given) -> Option<Finding> {
    let name = source.to_string();
    let read = match source {
        PolicySource::BuiltIn => return Some(Finding::ok("policy", "the built-in one holds")),
        PolicySource::ConfigMap { .. } => return None,
        PolicySource::Preset(_) | PolicySource::File(_) => policy_source::load(&name),
    };
    let read = read.map_err(|error| causes(error.as_ref()));
    let fix = format!("{} {}", given.command("policy lint"), shell::word(&name));
    Some(Finding::tried("policy", format!("{name} can be read"), read, NO_START).fix(fix))
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
    use crate::commands::doctor::Severity;

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
        assert_eq!(finding.result, Severity::Warning);
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
            (100 * MIB, 0, 50 * MIB, Severity::Problem),
            (1_000 * MIB, 0, 4_096 * MIB, Severity::Warning),
            (1_000 * MIB, 4_000 * MIB, 4_096 * MIB, Severity::Ok),
            (5_000 * MIB, 0, 4_096 * MIB, Severity::Ok),
        ] {
            assert_eq!(room(dir, free, used, may_grow).result, expected);
        }
    }

    #[test]
    fn a_kernel_log_that_is_not_there_is_a_problem_with_a_way_out() {
        let look = |spec: Spec| kernel_log(&spec, "run", &Given::default());
        let found = look(Spec::FileOnce("/does/not/exist".into()));
        assert_eq!(found.result, Severity::Problem);
        assert!(found.what.contains("/does/not/exist"), "{found:?}");
        assert!(found.fix.unwrap().contains("--kernel-log"));
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = look(Spec::FileOnce(file.path().to_owned()));
        assert_eq!(found.result, Severity::Ok, "{found:?}");
    }

    #[test]
    fn a_data_directory_is_tried_and_left_as_it_was() {
        let home = tempfile::tempdir().unwrap();
        let found = data_dir(&home.path().join("a/b"));
        assert_eq!(found.result, Severity::Ok, "{found:?}");
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
        // A file where a directory should be: not even root can write into it.
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = data_dir(file.path());
        assert_eq!(found.result, Severity::Problem, "{found:?}");
    }

    #[test]
    fn a_store_is_sound_damaged_or_not_there_yet() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(store_file(home.path(), &Given::default()), None);
        fs::write(
            home.path().join("events.db"),
            "this is no database".repeat(500),
        )
        .unwrap();
        let found = store_file(home.path(), &Given::default()).unwrap();
        assert_eq!(found.result, Severity::Warning, "it starts all the same");
        assert!(found.why.unwrap().contains("begins anew"), "{found:?}");
        fs::remove_file(home.path().join("events.db")).unwrap();
        fs::create_dir(home.path().join("events.db")).unwrap();
        assert_eq!(
            store_file(home.path(), &Given::default()).unwrap().result,
            Severity::Problem
        );
    }

    #[test]
    fn a_policy_can_be_read_or_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.toml");
        let policy = |source: &PolicySource| policy(source, &Given::default());
        let setting = PolicySource::File(path.clone());
        let found = policy(&setting).unwrap();
        assert!(found.result == Severity::Problem && found.what.contains("p.toml"));
        let rules = |text: &str| format!("[[rule-sets]]\nname = \"r\"\n{text}");
        let wrong = "[[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"x\"\n";
        for (text, part) in [
            (
                rules(wrong),
                "p.toml:5: rule set 'r': expression unknown variable 'x'",
            ),
            (String::new(), "p.toml:1: it is empty"),
        ] {
            fs::write(&path, text).unwrap();
            let found = policy(&setting).unwrap();
            assert_eq!(found.result, Severity::Problem, "{found:?}");
            assert!(found.what.contains(part), "{found:?}");
            assert!(found.fix.unwrap().starts_with("gpuwarden policy lint /"));
        }
        fs::write(&path, rules("")).unwrap();
        assert_eq!(policy(&setting).unwrap().result, Severity::Ok);
        assert_eq!(policy(&PolicySource::BuiltIn).unwrap().result, Severity::Ok);
    }
}
