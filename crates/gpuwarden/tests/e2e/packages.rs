//! Packages for machines without Kubernetes: their files, their life in a Debian that does not run,
//! and the same on a machine in qemu with systemd.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tempfile::TempDir;
use testkit::{Component, binary, require};
use tokio::io::AsyncReadExt as _;

use crate::reboot::{machine, pack};

/// Longest time for the story of the guest: about two minutes on an idle machine, without KVM, and
/// ten beside other tests on a slow one.
const STORY: Duration = Duration::from_secs(1_800);

/// Files of the `.deb` that the `.rpm` does not have, and their places there.
const ONLY_DEB: [(&str, Option<&str>); 3] = [
    ("usr/share/doc/gpuwarden/changelog.Debian.gz", None),
    ("usr/share/lintian/overrides/gpuwarden", None),
    (
        "usr/share/zsh/vendor-completions/_gpuwarden",
        Some("usr/share/zsh/site-functions/_gpuwarden"),
    ),
];

/// File of the `.rpm` that Debian has for all packages.
const ONLY_RPM: &str = "usr/share/licenses/gpuwarden/LICENSE";

/// Configuration files, which an upgrade keeps.
const CONFIGURATION: [&str; 2] = ["etc/gpuwarden/agent.toml", "etc/gpuwarden/gpuwarden.toml"];

/// Parts of a root that installations of any package change, and that no purge restores: records
/// of dpkg, copies of the user database before its last change, and what systemd-analyze writes.
const NOT_COMPARED: [&str; 8] = [
    "etc/group-",
    "etc/gshadow-",
    "etc/passwd-",
    "etc/shadow-",
    "run/systemd",
    "tmp",
    "var/lib/dpkg",
    "var/log",
];

/// Link that starts the service when the machine boots.
const ENABLED: &str = "etc/systemd/system/multi-user.target.wants/gpuwarden.service";

const PAGE: &str = include_str!("../../../../docs/install-machine.md");

/// Script of the guest's story. The console has what each step prints.
const STORY_SCRIPT: &str = include_str!("packages.sh");

/// Unit that runs the story on the guest's console, once the machine is up.
const STORY_UNIT: &str = "\
[Unit]
After=basic.target
[Service]
Type=oneshot
ExecStart=/bin/sh /root/story
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
";

/// Packages of the executable under test.
struct Packages {
    directory: TempDir,
}

/// A Debian below a directory.
struct Root {
    directory: TempDir,
}

/// A file below a root.
#[derive(Debug, PartialEq, Eq)]
struct File {
    mode: u32,
    owner: (u32, u32),
    /// Hash of the content, or target of the link; empty for others.
    content: String,
}

/// Runs a program and returns its standard output. Fails if the program fails, with all of its
/// output.
fn run(command: &mut Command) -> anyhow::Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .env("LC_ALL", "C")
        .stdin(std::process::Stdio::null())
        .output()
        .with_context(|| format!("{command:?}"))?;
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    let stderr = String::from_utf8_lossy(&stderr);
    ensure!(status.success(), "{command:?}: {status}\n{stdout}{stderr}");
    Ok(stdout)
}

fn sh(script: &str, arguments: &[&Path]) -> anyhow::Result<String> {
    run(Command::new("sh")
        .args(["-ec", script, "sh"])
        .args(arguments))
}

/// Returns all files and links below a directory, by name, without directories if `leaves`.
fn files(root: &Path, leaves: bool) -> anyhow::Result<BTreeMap<String, File>> {
    let mut found = BTreeMap::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
            if NOT_COMPARED.contains(&name.as_str()) {
                continue;
            }
            let metadata = fs::symlink_metadata(&path)?;
            let mut content = String::new();
            if metadata.is_dir() {
                directories.push(path);
                if leaves {
                    continue;
                }
            } else if metadata.is_symlink() {
                content = fs::read_link(path)?.display().to_string();
            } else if metadata.is_file() {
                let mut hash = DefaultHasher::new();
                fs::read(path)?.hash(&mut hash);
                content = format!("{:x}", hash.finish());
            }
            let file = File {
                mode: metadata.mode(),
                owner: (metadata.uid(), metadata.gid()),
                content,
            };
            found.insert(name, file);
        }
    }
    Ok(found)
}

/// Returns the lines in which two lists of files differ.
fn difference(before: &BTreeMap<String, File>, after: &BTreeMap<String, File>) -> Vec<String> {
    let names = before.keys().chain(after.keys());
    let mut lines: Vec<String> = names
        .filter(|name| before.get(*name) != after.get(*name))
        .map(|name| format!("{name}: {:?} -> {:?}", before.get(name), after.get(name)))
        .collect();
    lines.sort();
    lines.dedup();
    lines
}

// === impl Packages ===

impl Packages {
    /// Returns the packages, built once for tests that run side by side; `None` without the
    /// program that builds them.
    #[track_caller]
    fn shared() -> Option<Arc<Self>> {
        static SHARED: Mutex<Weak<Packages>> = Mutex::new(Weak::new());
        require(Component::Nfpm)?;
        let mut shared = SHARED.lock().unwrap();
        if let Some(packages) = shared.upgrade() {
            return Some(packages);
        }
        let packages = Arc::new(Self::build().unwrap());
        *shared = Arc::downgrade(&packages);
        Some(packages)
    }

    fn build() -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        run(Command::new(cargo)
            .args(["run", "--quiet", "--package", "xtask", "--", "package"])
            .arg("--executable")
            .arg(binary()?)
            .arg("--output")
            .arg(directory.path()))?;
        Ok(Self { directory })
    }

    /// Returns the package whose name has this ending.
    fn with_ending(&self, ending: &str) -> PathBuf {
        let files = fs::read_dir(self.directory.path()).unwrap();
        let mut paths = files.map(|file| file.unwrap().path());
        let has_ending = |path: &PathBuf| path.to_string_lossy().ends_with(ending);
        paths.find(has_ending).unwrap()
    }

    /// Writes the `.deb` of a later release, whose gpuwarden.toml is another.
    fn later_release(&self, file: &Path) -> anyhow::Result<()> {
        let root = tempfile::tempdir()?;
        let script = "dpkg-deb -R \"$1\" \"$2\"
            sed -i 's/^Version: .*/Version: 99.0.0-1/' \"$2/DEBIAN/control\"
            echo '# Another example.' >> \"$2/etc/gpuwarden/gpuwarden.toml\"
            dpkg-deb --build -Znone \"$2\" \"$3\"";
        sh(script, &[&self.with_ending(".deb"), root.path(), file]).map(drop)
    }
}

// === impl Root ===

impl Root {
    /// Unpacks the Debian; `None` if this machine has none.
    #[track_caller]
    fn new() -> Option<Self> {
        let archive = require(Component::DebianRoot)?;
        let directory = tempfile::tempdir().unwrap();
        sh("tar -C \"$2\" -xf \"$1\"", &[&archive, directory.path()]).unwrap();
        Some(Self { directory })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn files(&self) -> anyhow::Result<BTreeMap<String, File>> {
        files(self.directory.path(), false)
    }

    /// Returns a command that gives this Debian a `/proc`, and runs the program of its arguments.
    fn with_proc(&self) -> Command {
        let mut proc = std::ffi::OsString::from("--mount-proc=");
        proc.push(self.path("proc"));
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork"]).arg(proc);
        // systemctl does not recognise the chroot, because process 1 is in it too.
        command.env("SYSTEMD_OFFLINE", "1");
        command
    }

    /// Runs a program of this Debian, where no systemd runs.
    fn run<const N: usize>(&self, words: [&str; N]) -> anyhow::Result<String> {
        let mut command = self.with_proc();
        run(command.arg("chroot").arg(self.directory.path()).args(words))
    }

    /// Runs commands of the page, in `/tmp`. Services are enabled and disabled only, because none
    /// runs here.
    fn follow<'a>(&self, commands: impl Iterator<Item = &'a str>) -> anyhow::Result<String> {
        let lines: Vec<&str> = commands.collect();
        let script = lines.join("\n").replace(" --now", "");
        self.run(["sh", "-exc", &format!("cd /tmp\n{script}")])
    }

    /// Checks that the next boot starts gpuwarden.service, and not the agent's.
    #[track_caller]
    fn starts_only_the_first_service(&self) {
        let is_enabled = |link: &str| fs::symlink_metadata(self.path(link)).is_ok();
        assert!(is_enabled(ENABLED));
        assert!(!is_enabled(&ENABLED.replace(".service", "-agent.service")));
    }

    /// Returns how the files differ from those before, without directories: packages of RPM and
    /// archives leave those that others may use.
    fn left(&self, before: &BTreeMap<String, File>) -> anyhow::Result<Vec<String>> {
        let mut left = difference(before, &self.files()?);
        left.retain(|line| !line.contains("content: \"\""));
        Ok(left)
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap())?;
        fs::write(path, text)?;
        Ok(())
    }
}

#[test]
fn all_packages_have_the_files_of_one_list() -> anyhow::Result<()> {
    let (Some(lintian), Some(packages)) = (require(Component::PackageTools), Packages::shared())
    else {
        return Ok(());
    };
    let [deb, rpm, archive] = [".deb", ".rpm", ".tar.gz"].map(|it| packages.with_ending(it));
    let directory = tempfile::tempdir()?;
    let [of_deb, of_rpm, of_archive] = ["deb", "rpm", "tar"].map(|it| directory.path().join(it));
    for made in [&of_rpm, &of_archive] {
        fs::create_dir(made)?;
    }
    sh("dpkg-deb -x \"$1\" \"$2\"", &[&deb, &of_deb])?;
    sh(
        "rpm2cpio \"$1\" | cpio --quiet --no-absolute-filenames -idm -D \"$2\"",
        &[&rpm, &of_rpm],
    )?;
    sh("tar -C \"$2\" -xzf \"$1\"", &[&archive, &of_archive])?;

    let mut in_deb = files(&of_deb, true)?;
    assert_eq!(
        difference(&in_deb, &files(&of_archive, true)?),
        [] as [&str; 0]
    );
    for (file, place) in ONLY_DEB {
        let moved = in_deb.remove(file).context(file)?;
        if let Some(place) = place {
            in_deb.insert(place.to_owned(), moved);
        }
    }
    let mut in_rpm = files(&of_rpm, true)?;
    in_rpm.remove(ONLY_RPM).context(ONLY_RPM)?;
    assert_eq!(difference(&in_deb, &in_rpm), [] as [&str; 0]);
    for name in ["usr/bin/gpuwarden", "usr/share/man/man1/gpuwarden-run.1.gz"] {
        assert!(in_deb.contains_key(name), "{name}: {in_deb:?}");
    }

    let kept = sh("dpkg-deb --info \"$1\" conffiles", &[&deb])?;
    let expected = CONFIGURATION.map(|file| format!("/{file}\n")).concat();
    assert_eq!(kept, expected);
    let kept = sh("rpm -qp --configfiles \"$1\"", &[&rpm])?;
    assert_eq!(kept, expected);
    let findings = run(Command::new(lintian).arg("--allow-root").arg(&deb))?;
    assert_eq!(findings, "");
    Ok(())
}

#[test]
fn an_upgrade_keeps_the_configuration_and_a_purge_leaves_nothing() -> anyhow::Result<()> {
    let (Some(root), Some(packages)) = (Root::new(), Packages::shared()) else {
        return Ok(());
    };
    fs::copy(packages.with_ending(".deb"), root.path("tmp/gpuwarden.deb"))?;
    packages.later_release(&root.path("tmp/later.deb"))?;
    let before = root.files()?;
    root.run(["dpkg", "--install", "/tmp/gpuwarden.deb"])?;
    assert!(
        root.run(["gpuwarden", "--version"])?
            .starts_with("gpuwarden ")
    );
    root.starts_only_the_first_service();

    let units = ["gpuwarden.service", "gpuwarden-agent.service"];
    for unit in units {
        let findings = root.run(["systemd-analyze", "verify", "--man=no", unit])?;
        assert_eq!(findings, "");
        // The threshold is ten times the score.
        let security = [
            "systemd-analyze",
            "security",
            "--offline=true",
            "--threshold=29",
            unit,
        ];
        root.run(security)?;
    }

    let [agent, edited] = CONFIGURATION;
    let changed = "observe = true\n# This site's.\n";
    root.write(edited, changed)?;
    // What a gpuwarden that ran leaves.
    root.write("var/lib/gpuwarden/events.db", "events")?;
    let metadata = "{\"written_by\":\"gpuwarden\"}";
    root.write("var/lib/nvsentinel/gpu_metadata.json", metadata)?;
    root.run(["dpkg", "--force-confold", "--install", "/tmp/later.deb"])?;
    assert_eq!(fs::read_to_string(root.path(edited))?, changed);
    let offered = fs::read_to_string(root.path(&format!("{edited}.dpkg-dist")))?;
    assert!(offered.ends_with("# Another example.\n"));

    root.run(["dpkg", "--remove", "gpuwarden"])?;
    assert!(!root.path("usr/bin/gpuwarden").exists());
    for kept in [agent, edited, "var/lib/gpuwarden/events.db"] {
        assert!(root.path(kept).exists(), "{kept}");
    }
    root.run(["dpkg", "--purge", "gpuwarden"])?;
    assert_eq!(difference(&before, &root.files()?), [] as [&str; 0]);
    Ok(())
}

/// The socket and the description of the GPUs of NVSentinel stay unchanged.
#[test]
fn files_of_another_program_survive_installation_and_purge() -> anyhow::Result<()> {
    let (Some(root), Some(packages)) = (Root::new(), Packages::shared()) else {
        return Ok(());
    };
    fs::copy(packages.with_ending(".deb"), root.path("tmp/gpuwarden.deb"))?;
    root.write("run/nvsentinel.sock", "")?;
    root.write("var/lib/nvsentinel/gpu_metadata.json", "{}")?;
    let before = root.files()?;
    root.run(["dpkg", "--install", "/tmp/gpuwarden.deb"])?;
    root.run(["dpkg", "--purge", "gpuwarden"])?;
    assert_eq!(difference(&before, &root.files()?), [] as [&str; 0]);
    Ok(())
}

/// Returns the commands for root in a section of the page.
fn commands(heading: &str) -> impl Iterator<Item = &'static str> {
    let (_, section) = PAGE.split_once(heading).unwrap();
    let lines = section.lines().take_while(|line| !line.starts_with("## "));
    lines.filter_map(|line| line.strip_prefix("# "))
}

#[test]
fn the_archive_is_installed_and_removed_by_the_commands_of_the_page() -> anyhow::Result<()> {
    let (Some(root), Some(packages)) = (Root::new(), Packages::shared()) else {
        return Ok(());
    };
    let archive = packages.with_ending(".tar.gz");
    let name = archive.file_name().context("no name")?;
    fs::copy(&archive, root.path("tmp").join(name))?;
    let before = root.files()?;
    root.follow(commands("\n## Install\n"))?;
    assert!(root.path("usr/bin/gpuwarden").exists());
    root.starts_only_the_first_service();
    root.follow(commands("\n## Remove\n"))?;
    assert_eq!(root.left(&before)?, [] as [&str; 0]);
    Ok(())
}

#[test]
fn the_rpm_is_installed_and_removed_by_its_scripts() -> anyhow::Result<()> {
    let (Some(_), Some(root), Some(packages)) = (
        require(Component::PackageTools),
        Root::new(),
        Packages::shared(),
    ) else {
        return Ok(());
    };
    let rpm = |verb: &str, package: &Path| {
        let mut command = root.with_proc();
        command.arg("rpm").arg("--root").arg(root.directory.path());
        // The packages that it depends on are Debian's.
        command.args(["--dbpath", "/tmp/rpm", "--nodeps", verb]);
        run(command.arg(package))
    };
    let before = root.files()?;
    rpm("--install", &packages.with_ending(".rpm"))?;
    root.run(["getent", "passwd", "gpuwarden"])?;
    root.starts_only_the_first_service();
    rpm("--erase", Path::new("gpuwarden"))?;
    assert!(!root.path("usr/bin/gpuwarden").exists());
    root.follow(commands("\n## Remove\n").skip(3))?;
    assert_eq!(root.left(&before)?, [] as [&str; 0]);
    Ok(())
}

/// Returns what each step of the story has printed, by its name.
fn steps(console: &str) -> BTreeMap<&str, &str> {
    let steps = console.split("\n== ").skip(1);
    let named = steps.filter_map(|step| step.split_once('\n'));
    named.map(|(name, text)| (name, text.trim())).collect()
}

#[tokio::test]
async fn a_machine_with_systemd_installs_runs_upgrades_and_purges_it() -> anyhow::Result<()> {
    let (Some(qemu), Some(root), Some(packages)) =
        (require(Component::Guest), Root::new(), Packages::shared())
    else {
        return Ok(());
    };
    fs::copy(
        packages.with_ending(".deb"),
        root.path("root/gpuwarden.deb"),
    )?;
    packages.later_release(&root.path("root/later.deb"))?;
    root.write("root/story", STORY_SCRIPT)?;
    root.write("etc/systemd/system/story.service", STORY_UNIT)?;
    let wanted = root.path("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wanted)?;
    symlink("../story.service", wanted.join("story.service"))?;
    symlink("lib/systemd/systemd", root.path("init"))?;
    let directory = tempfile::tempdir()?;
    let image = directory.path().join("initramfs");
    pack(root.directory.path(), &image)?;
    drop(root);

    let mut guest = machine(&qemu, &image, "2048").spawn()?;
    let mut console = guest.stdout.take().context("no console")?;
    let mut printed = Vec::new();
    let ended = tokio::time::timeout(STORY, console.read_to_end(&mut printed)).await;
    let printed = String::from_utf8_lossy(&printed).replace('\r', "");
    ensure!(ended.is_ok(), "the guest has not ended:\n{printed}");
    let steps = steps(&printed);
    let step = |name: &str| {
        *steps
            .get(name)
            .unwrap_or_else(|| panic!("{name}:\n{printed}"))
    };
    let has = |name: &str, text: &str| assert!(step(name).contains(text), "{text}:\n{printed}");

    assert_eq!(step("enabled"), "enabled\ndisabled\nactive\ninactive");
    has("up", "observing");
    has("up", "kernel-log  following: auto: kmsg");
    has("doctor", "0 problems");
    // CAP_SYSLOG alone.
    assert_eq!(step("privileges"), "gpuwarden\nCapEff:\t0000000400000000");
    has("kernel log", "SysLogsXIDError 79 on PCI 0000:3b:00");
    has("socket", "SysLogsXIDError 48 on PCI 0000:3c:00");
    assert_eq!(step("killed"), "another process\nNRestarts=1\nactive");
    has("after the kill", "SysLogsXIDError 79 on PCI 0000:3b:00");
    has(
        "upgraded",
        "another process\n99.0.0-1\n# This site's.\nactive",
    );
    has("after the upgrade", "SysLogsXIDError 79 on PCI 0000:3b:00");
    assert_eq!(step("agent"), "inactive\nactive");
    assert_eq!(step("agent upgraded"), "another process\ninactive\nactive");
    assert_eq!(step("purged"), "nothing left");
    Ok(())
}
