//! The machine: kernel log, data directory and its store, files that are named, and who else
//! is there. What the gpuwarden that runs holds open is not tried once more: whether it can
//! use it is for it to say ([`super::running`]).

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use diagnosis::catalog::Catalog;
use domain::nearest::nearest;
use domain::policy::Policy;
use host::kernel_log::{OpenError, Spec};
use runtime::descriptors;
use store::StoreError;
use store::sqlite::inspect;
use trial::lint::lint;

use super::{Finding, Installation, asker, causes, shell_word};
use crate::commands::load_catalog;
use crate::policy_source;
use crate::settings::{ActSettings, Endpoint, NodeSettings, PolicySetting, ProcessSettings};

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

pub(super) fn check(installation: &Installation, running: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let process = &installation.process;
    if !running {
        if let Some(node) = &installation.node {
            findings.push(kernel_log(&node.kernel_log, installation.command));
        }
        findings.extend(data_dir(process));
    }
    let may_grow = match (&installation.act, &installation.delivery) {
        (Some(act), _) => act.store_size,
        (None, Some(delivery)) => delivery.outbox_size,
        (None, None) => 0,
    };
    findings.push(room(&process.data_dir, may_grow));
    let needed = descriptors::needed(installation.ingest.is_some());
    findings.extend(files(descriptors::hard_limit(), needed));
    if let Some(act) = &installation.act {
        if !running {
            findings.extend(store_file(&process.data_dir));
        }
        findings.extend(policy(act.policy.as_ref()));
        findings.extend(connector_config(act));
    }
    if let Some(node) = &installation.node {
        findings.extend(catalog(node));
        findings.push(others(&process.data_dir));
    }
    findings
}

fn kernel_log(spec: &Spec, role: &str) -> Finding {
    const WHY: &str = "without it no fault of this machine is seen";
    match host::kernel_log::open(spec, None) {
        Ok(source) => match source.missing() {
            Some(path) => Finding::problem(
                "kernel-log",
                format!("{spec} does not exist; gpuwarden would wait for it"),
                WHY,
                another_log(path),
            ),
            None => Finding::ok("kernel-log", format!("{spec} can be read by {}", asker())),
        },
        Err(error) => {
            let fix = match &error {
                OpenError::KmsgPermission(_) => &format!(
                    "sudo setcap cap_syslog+ep \"$(command -v gpuwarden)\", or journalctl -kf | \
                     gpuwarden {role} --kernel-log -"
                ),
                OpenError::KmsgOff => "sudo sysctl kernel.printk_devkmsg=ratelimit",
                OpenError::NoKmsg(_) => {
                    "pass /dev/kmsg into the container, or name a file with --kernel-log"
                }
                _ => ANOTHER_LOG,
            };
            let what = format!("{spec}: {} (asked by {})", causes(&error), asker());
            Finding::problem("kernel-log", what, WHY, fix)
        }
    }
}

/// What to do about a log file that is not there: its neighbour may have been meant.
fn another_log(path: &Path) -> String {
    let Some((dir, name)) = path.parent().zip(path.file_name().and_then(OsStr::to_str)) else {
        return ANOTHER_LOG.to_owned();
    };
    let beside: Vec<String> = fs::read_dir(if dir == Path::new("") {
        Path::new(".")
    } else {
        dir
    })
    .into_iter()
    .flatten()
    .flatten()
    .filter_map(|entry| entry.file_name().into_string().ok())
    .collect();
    match nearest(name, beside.iter().map(String::as_str), 1).as_slice() {
        [meant, ..] => format!(
            "--kernel-log {}, where that was meant; else {ANOTHER_LOG}",
            shell_word(&dir.join(meant).to_string_lossy())
        ),
        [] => ANOTHER_LOG.to_owned(),
    }
}

fn data_dir(process: &ProcessSettings) -> Vec<Finding> {
    let dir = &process.data_dir;
    let shown = dir.display();
    // It is made at the start; what counts until then is the directory above it.
    let existing = existing(dir);
    let probe = tempfile::Builder::new()
        .prefix(".gpuwarden-doctor-")
        .tempfile_in(existing);
    let written = probe.and_then(|mut file| std::io::Write::write_all(&mut file, b"probe"));
    vec![match written {
        Ok(()) => Finding::ok("data-dir", format!("{} can write to {shown}", asker())),
        Err(error) => Finding::problem(
            "data-dir",
            format!(
                "{} cannot write to {}: {error}",
                asker(),
                existing.display()
            ),
            "an event is only acknowledged once it is stored: without it none is taken",
            format!(
                "sudo install -d -m 700 -o \"$USER\" {}, or name another with --data-dir",
                shell_word(&dir.to_string_lossy())
            ),
        ),
    }]
}

/// The nearest directory that is there.
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
        Err(error) => Finding::warning(
            "disk",
            format!("the room at {} is not known: {error}", dir.display()),
            "a store without room takes no events",
            format!("df {}", shell_word(&dir.to_string_lossy())),
        ),
    }
}

fn judged(dir: &Path, free: u64, used: u64, may_grow: u64) -> Finding {
    const WHY: &str = "a store without room takes no events";
    let what = format!("{} MiB are free where {} lies", free / MIB, dir.display());
    let fix = format!(
        "df -h {} shows what there is; --data-dir names another place",
        shell_word(&existing(dir).to_string_lossy())
    );
    if free < LITTLE_ROOM {
        Finding::problem("disk", what, WHY, fix)
    } else if free.saturating_add(used) < may_grow {
        let what = format!(
            "{what}, and what is kept there may grow to {} MiB",
            may_grow / MIB
        );
        let fix = format!("{fix}, and --store-size or --outbox-size gives it less");
        Finding::warning("disk", what, WHY, fix)
    } else {
        Finding::ok("disk", what)
    }
}

/// Whether as many descriptors can be had as the limits of connections need.
fn files(limit: u64, needed: u64) -> Option<Finding> {
    (limit < needed).then(|| {
        Finding::warning(
            "descriptors",
            format!(
                "{} may open {limit} files and connections, up to {needed} are used",
                asker()
            ),
            "without one it can open neither a connection of an agent nor one to the API server",
            format!("LimitNOFILE={needed} in the systemd unit, or ulimit -Hn {needed} as root"),
        )
    })
}

/// The store that nobody has open; `None` where there is none yet.
fn store_file(dir: &Path) -> Option<Finding> {
    let file = dir.join(EVENTS_FILE);
    if !file.exists() {
        return None;
    }
    let shown = shell_word(&dir.to_string_lossy());
    let damaged = |what: String| {
        Finding::warning(
            "store",
            what,
            "gpuwarden moves a damaged store aside and begins anew, without its history; faults that \
             nodes carry come back from the nodes",
            format!("cp {shown}/{EVENTS_FILE}* elsewhere, where what can be read of it is wanted"),
        )
    };
    Some(match inspect(dir) {
        Err(error @ StoreError::Corrupt { .. }) => damaged(causes(&error)),
        Err(error) => Finding::problem(
            "store",
            causes(&error),
            "gpuwarden does not start with a store that it cannot open",
            format!("gpuwarden store inspect --data-dir {shown}"),
        ),
        Ok(found) => match found.damage.first() {
            None => Finding::ok("store", format!("sound, {} events", found.events)),
            Some(damage) => damaged(format!("damaged: {damage}")),
        },
    })
}

fn policy(setting: Option<&PolicySetting>) -> Option<Finding> {
    let (source, text) = match setting {
        None => return Some(Finding::ok("policy", "the built-in one holds")),
        // Looked at in the cluster.
        Some(PolicySetting::ConfigMap { .. }) => return None,
        Some(PolicySetting::Preset(preset)) => {
            (format!("preset:{}", preset.name), preset.text.to_owned())
        }
        Some(PolicySetting::File(path)) => {
            let source = path.display().to_string();
            match fs::read_to_string(path) {
                Ok(text) => (source, text),
                Err(error) => {
                    return Some(Finding::problem(
                        "policy",
                        format!("{source}: {error}"),
                        "gpuwarden does not start without the policy that it is told to use",
                        "mend --policy, or its file",
                    ));
                }
            }
        }
    };
    let lint = format!("gpuwarden policy lint {}", shell_word(&source));
    Some(parsed(&source, &text, lint))
}

/// What is to be said of a policy's text.
pub(super) fn parsed(source: &str, text: &str, fix: String) -> Finding {
    match Policy::parse(text, source) {
        Err(error) => Finding::problem(
            "policy",
            causes(&error),
            "gpuwarden does not start with it, or goes on with the last good one",
            fix,
        ),
        Ok(policy) => match lint(&policy, Catalog::builtin()).as_slice() {
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
                Finding::warning("policy", what, "it may do other than it is meant to", fix)
            }
        },
    }
}

fn connector_config(act: &ActSettings) -> Option<Finding> {
    let path = act.connector_config.as_ref()?;
    Some(match connector::Config::read(path) {
        Ok(_) => Finding::ok(
            "connector-config",
            format!("{} can be read", path.display()),
        ),
        Err(error) => Finding::problem(
            "connector-config",
            causes(&error),
            "gpuwarden does not start with it",
            "mend the file, or take --connector-config away",
        ),
    })
}

fn catalog(node: &NodeSettings) -> Option<Finding> {
    let shown: Vec<String> = node
        .catalog
        .iter()
        .map(|it| it.display().to_string())
        .collect();
    if shown.is_empty() {
        return None;
    }
    Some(match load_catalog(&node.catalog) {
        Ok(_) => Finding::ok("catalog", format!("{} can be read", shown.join(", "))),
        Err(error) => Finding::problem(
            "catalog",
            causes(error.as_ref()),
            "gpuwarden does not start with it",
            format!("gpuwarden catalog diff {}", shown.join(" ")),
        ),
    })
}

/// Whether a second gpuwarden watches this machine.
fn others(data_dir: &Path) -> Finding {
    let own = Endpoint::read(data_dir).map(|endpoint| endpoint.pid);
    let mut found = watching(Path::new("/proc"));
    found.retain(|(pid, _)| Some(*pid) != own && *pid != std::process::id());
    of_others(own.is_some(), &found)
}

fn of_others(own: bool, found: &[(u32, String)]) -> Finding {
    let shown: Vec<String> = found
        .iter()
        .map(|(pid, line)| format!("process {pid} ({line})"))
        .collect();
    let shown = shown.join(", ");
    match (own, found) {
        (_, []) => Finding::ok("others", "no other gpuwarden watches this machine"),
        (false, [_]) => Finding::warning(
            "others",
            format!("a gpuwarden runs with another data directory: {shown}"),
            "what is looked at here is not what is in use",
            "doctor with the --config and --data-dir of that one",
        ),
        _ => Finding::warning(
            "others",
            format!("other gpuwardens watch this machine: {shown}"),
            "each reports every fault, and each decides for itself",
            "end all but one: systemctl stop, or kill, whichever started it",
        ),
    }
}

/// Processes that watch this machine and how they were called, by `/proc/PID/cmdline`
/// (proc(5)).
fn watching(proc: &Path) -> Vec<(u32, String)> {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut found: Vec<(u32, String)> = entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            if !watches(&line) {
                return None;
            }
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            Some((pid, shortened(line.trim_end())))
        })
        .collect();
    found.sort_unstable();
    found
}

/// A call, cut where it is long.
fn shortened(line: &str) -> String {
    match line.char_indices().nth(CALL_CHARS) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line.to_owned(),
    }
}

/// Whether this is a gpuwarden that watches the machine: one with a log file of its own
/// watches that file.
fn watches(cmdline: &[u8]) -> bool {
    let mut words = cmdline.split(|byte| *byte == 0);
    let program = words
        .next()
        .map(|word| PathBuf::from(String::from_utf8_lossy(word).into_owned()));
    let is_ours =
        program.is_some_and(|path| path.file_name().is_some_and(|name| name == "gpuwarden"));
    if !is_ours || !matches!(words.next(), Some(b"run" | b"agent")) {
        return false;
    }
    let mut log = &b"auto"[..];
    while let Some(word) = words.next() {
        if word == b"--kernel-log" {
            log = words.next().unwrap_or_default();
        } else if let Some(value) = word.strip_prefix(b"--kernel-log=") {
            log = value;
        }
    }
    matches!(log, b"auto" | b"kmsg" | b"journal") || log.starts_with(b"journal:")
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
                )
            ]
        );
        let long = "é".repeat(CALL_CHARS);
        assert_eq!(shortened(&long), long);
        assert_eq!(shortened(&format!("{long}é")), format!("{long}…"));
        for (own, others, expected) in [
            (true, &[][..], Outcome::Ok),
            (true, &found[..1], Outcome::Warning),
            (false, &found[..1], Outcome::Warning),
            (false, &found[..], Outcome::Warning),
        ] {
            assert_eq!(of_others(own, others).result, expected);
        }
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
        let found = kernel_log(&Spec::FileOnce("/does/not/exist".into()), "run");
        assert_eq!(found.result, Outcome::Problem);
        assert!(found.what.contains("/does/not/exist"), "{found:?}");
        assert!(found.fix.unwrap().contains("--kernel-log"));
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = kernel_log(&Spec::FileOnce(file.path().to_owned()), "run");
        assert_eq!(found.result, Outcome::Ok, "{found:?}");
    }

    #[tokio::test]
    async fn a_log_file_that_is_not_there_yet_is_a_problem_that_names_its_neighbour() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("kern.log"), "").unwrap();
        let log = |name: &str| kernel_log(&Spec::File(dir.path().join(name)), "run");
        let found = log("kern.lgo");
        assert_eq!(found.result, Outcome::Problem);
        assert!(
            found
                .what
                .ends_with("kern.lgo does not exist; gpuwarden would wait for it")
        );
        let meant = format!("--kernel-log {}/kern.log, where", dir.path().display());
        assert!(found.fix.unwrap().starts_with(&meant));
        assert!(log("other").fix.unwrap().starts_with("name another one"));
        assert_eq!(log("kern.log").result, Outcome::Ok);
    }

    #[test]
    fn a_data_directory_is_tried_and_left_as_it_was() {
        let home = tempfile::tempdir().unwrap();
        let process = |data_dir: PathBuf| ProcessSettings {
            data_dir,
            data_dir_is_default: false,
            listen: "127.0.0.1:1".parse().unwrap(),
            log: String::new(),
            log_format: runtime::logging::LogFormat::Text,
        };
        let found = data_dir(&process(home.path().join("a/b")));
        assert_eq!(found[0].result, Outcome::Ok, "{found:?}");
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
        // A file where a directory should be: not even root can write into it.
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = data_dir(&process(file.path().to_owned()));
        assert_eq!(found[0].result, Outcome::Problem, "{found:?}");
    }

    #[test]
    fn a_store_is_sound_damaged_or_not_there_yet() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(store_file(home.path()), None);
        fs::write(
            home.path().join(EVENTS_FILE),
            "this is no database".repeat(500),
        )
        .unwrap();
        let found = store_file(home.path()).unwrap();
        assert_eq!(found.result, Outcome::Warning, "it starts all the same");
        assert!(found.why.unwrap().contains("begins anew"), "{found:?}");
        fs::remove_file(home.path().join(EVENTS_FILE)).unwrap();
        fs::create_dir(home.path().join(EVENTS_FILE)).unwrap();
        assert_eq!(store_file(home.path()).unwrap().result, Outcome::Problem);
    }

    #[test]
    fn a_policy_is_well_odd_or_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.toml");
        let setting = Some(PolicySetting::File(path.clone()));
        let found = policy(setting.as_ref()).unwrap();
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
            let found = policy(setting.as_ref()).unwrap();
            assert_eq!(found.result, expected, "{found:?}");
            assert!(found.what.contains(part), "{found:?}");
            assert!(found.fix.unwrap().starts_with("gpuwarden policy lint /"));
        }
        assert_eq!(policy(None).unwrap().result, Outcome::Ok);
    }
}
