//! Checks of the machine: kernel log, data directory with its store, limits, and the files that
//! settings name.
//!
//! Files that a running gpuwarden holds open are not opened a second time: that process reports
//! their state ([`super::running`]).

use std::fs;
use std::path::Path;

use controller::policy::PolicySource;
use controller::text_place::TextPlace;
use diagnosis::catalog::{Catalog, GPU_LIMITS};
use host::kernel_log::KernelLogSpec;
use model::shell;
use runtime::descriptors;
use store::{StoreError, StoreUrl};

use super::{Finding, Installation, asker, causes};
use crate::commands::load_catalog;
use crate::given::Given;
use crate::settings::AnalysisRules;
use crate::{policy_source, rules_source};

/// Free space below which the store may stop accepting events within a day.
const LITTLE_ROOM: u64 = 256 * MIB;
const MIB: u64 = 1024 * 1024;
pub(super) fn check(installation: &Installation, running: bool, given: &Given) -> Vec<Finding> {
    let (node, act) = (installation.node.as_ref(), installation.act.as_ref());
    let data = &installation.process.data_dir;
    let mut findings = Vec::new();
    if !running {
        findings.extend(node.map(|node| kernel_log(&node.kernel_log)));
        findings.push(data_dir(data));
        findings.extend(act.and_then(|_| store_file(data, given)));
    }
    let delivery = installation.delivery.as_ref();
    let may_grow = act.map(|act| act.store_size);
    let may_grow = may_grow.or(delivery.map(|delivery| delivery.outbox_size));
    if let Ok(free) = host::disk::free_bytes(existing(data)) {
        let file = StoreUrl::in_data_dir(data).file();
        let used = file.and_then(|file| fs::metadata(file).ok());
        let used = used.map_or(0, |file| file.len());
        findings.push(room(data, free, used, may_grow.unwrap_or_default()));
    }
    let needed = descriptors::needed(installation.ingest.is_some());
    findings.extend(files(descriptors::hard_limit(), needed));
    findings.extend(act.and_then(|act| policy(&act.policy, given)));
    findings.extend(act.and_then(|act| rules(&act.rules, given)));
    if let Some(node) = node.filter(|node| !node.catalog.is_empty()) {
        let read = load_catalog(&node.catalog).map_err(|error| causes(error.as_ref()));
        findings.push(Finding::tried("catalog", read.map(|read| changed(&read))));
    }
    findings
}

/// Describes the changes that files make to the catalogue; thresholds of GPUs one by one.
fn changed(catalog: &Catalog) -> String {
    let changes = Catalog::builtin().changes_to(catalog);
    let (limits, others): (Vec<_>, Vec<_>) =
        (changes.iter()).partition(|change| change.kind == GPU_LIMITS);
    let mut well = "all files of changes can be read".to_owned();
    if !others.is_empty() {
        well.push_str(&format!("; {} fields of rows are changed", others.len()));
    }
    for change in limits {
        well.push_str(&format!("; {} is {}", change.key, change.after));
    }
    well
}

fn kernel_log(spec: &KernelLogSpec) -> Finding {
    let mut advice = None;
    let opened = match host::kernel_log::open(spec, None) {
        Ok(source) if source.missing().is_some() => Err(format!(
            "{spec} does not exist; gpuwarden would wait for it"
        )),
        Ok(_) => Ok(format!("{spec} can be read by {}", asker())),
        Err(error) => {
            advice = error.advice();
            Err(format!("{spec}: {} (as {})", causes(&error), asker()))
        }
    };
    let finding = Finding::tried("kernel-log", opened);
    match advice {
        Some(advice) => finding.fix(advice),
        None => finding,
    }
}

fn data_dir(dir: &Path) -> Finding {
    // The start creates the directory; until then its nearest parent counts.
    let existing = existing(dir);
    let probe = tempfile::Builder::new()
        .prefix(".gpuwarden-doctor-")
        .tempfile_in(existing);
    let written = probe.and_then(|mut file| std::io::Write::write_all(&mut file, b"probe"));
    let (who, place) = (asker(), existing.display());
    let written = match written {
        Ok(()) => Ok(format!("{who} can write to {}", dir.display())),
        Err(error) => Err(format!("{who} cannot write to {place}: {error}")),
    };
    let dir = shell::word(&dir.to_string_lossy());
    Finding::tried("data-dir", written).fix(format!(
        "sudo install -d -m 700 -o \"$USER\" {dir}, or name another with --data-dir"
    ))
}

/// Returns the nearest directory that exists.
fn existing(dir: &Path) -> &Path {
    dir.ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("."))
}

fn room(dir: &Path, free: u64, used: u64, may_grow: u64) -> Finding {
    let what = format!(
        "{} MiB are free on the disk of {}",
        free / MIB,
        dir.display()
    );
    if free < LITTLE_ROOM {
        Finding::problem("disk", what)
    } else if free.saturating_add(used) < may_grow {
        let grows = may_grow / MIB;
        Finding::warning(
            "disk",
            format!("{what}, and its files may grow to {grows} MiB"),
        )
    } else {
        Finding::ok("disk", what)
    }
}

/// Warns if the limit of descriptors is lower than the most connections and files need.
fn files(limit: u64, needed: u64) -> Option<Finding> {
    let what = format!(
        "{} may open {limit} files and connections, up to {needed} are used",
        asker()
    );
    let fix = format!("LimitNOFILE={needed} in the systemd unit, or ulimit -Hn {needed} as root");
    (limit < needed).then(|| Finding::warning("descriptors", what).fix(fix))
}

/// Checks a store that no process has open; returns `None` if there is none yet.
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
            return Some(Finding::problem("store", causes(&error)).fix(inspect));
        }
    };
    let Some(damage) = damage else {
        return Some(Finding::ok("store", "the event store is sound"));
    };
    let finding = Finding::warning("store", format!("damaged: {damage}"));
    Some(match file {
        Some(file) => finding.fix(format!(
            "cp {}* elsewhere, to keep what can be read of it",
            shell::word(&file.to_string_lossy())
        )),
        None => finding,
    })
}

/// Reads the policy, except one in the cluster ([`super::in_cluster`]).
fn policy(source: &PolicySource, given: &Given) -> Option<Finding> {
    let name = source.to_string();
    let read = match source {
        PolicySource::BuiltIn => return Some(Finding::ok("policy", "the built-in one is used")),
        PolicySource::Place(TextPlace::ConfigMap { .. }) => return None,
        PolicySource::Preset(_) | PolicySource::Place(TextPlace::File(_)) => {
            policy_source::load(&name)
        }
    };
    let read = read.map_err(|error| causes(error.as_ref()));
    let fix = format!("{} {}", given.command("policy lint"), shell::word(&name));
    Some(Finding::tried("policy", read.map(|_| format!("{name} can be read"))).fix(fix))
}

fn rules(source: &AnalysisRules, given: &Given) -> Option<Finding> {
    let AnalysisRules::Place(TextPlace::File(path)) = source else {
        return None;
    };
    let name = path.display().to_string();
    let read = rules_source::load(&name).map_err(|error| causes(error.as_ref()));
    let fix = format!("{} {}", given.command("rules lint"), shell::word(&name));
    Some(Finding::tried("rules", read.map(|_| format!("{name} can be read"))).fix(fix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::Severity;

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
        let look = |spec: KernelLogSpec| kernel_log(&spec);
        let found = look(KernelLogSpec::FileOnce("/does/not/exist".into()));
        assert_eq!(found.result, Severity::Problem);
        assert!(found.what.contains("/does/not/exist"), "{found:?}");
        assert!(found.fix.unwrap().contains("--kernel-log"));
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = look(KernelLogSpec::FileOnce(file.path().to_owned()));
        assert_eq!(found.result, Severity::Ok, "{found:?}");
    }

    #[test]
    fn a_data_directory_is_tried_and_left_as_it_was() {
        let home = tempfile::tempdir().unwrap();
        let found = data_dir(&home.path().join("a/b"));
        assert_eq!(found.result, Severity::Ok, "{found:?}");
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
        // Not even root can write below a file.
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
        assert!(found.why.unwrap().contains("starts a new one"), "{found:?}");
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
        let setting = PolicySource::Place(TextPlace::File(path.clone()));
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
