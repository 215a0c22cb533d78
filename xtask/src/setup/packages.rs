//! Programs from Debian packages that are unpacked and not installed, so that no service of
//! theirs starts on this machine; and modules of npm.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use testkit::components::{NODE_MODULES, find_program};

use crate::shell;

/// Packages of the monitoring, and the files or directories that are kept, below `usr`.
const PROMETHEUS: [(&str, &[&str]); 2] = [
    ("prometheus", &["bin/prometheus", "bin/promtool"]),
    (
        "prometheus-alertmanager",
        // Debian's Alertmanager reads its templates at the start.
        &[
            "bin/prometheus-alertmanager",
            "share/prometheus/alertmanager",
        ],
    ),
];

/// Puts the programs of Prometheus and its Alertmanager into `dir`.
pub(super) fn unpack_prometheus(dir: &Path) -> anyhow::Result<()> {
    for (package, kept) in PROMETHEUS {
        unpack(package, kept, dir)?;
    }
    Ok(())
}

fn unpack(package: &str, kept: &[&str], dir: &Path) -> anyhow::Result<()> {
    let Some(apt) = find_program("apt-get") else {
        bail!("no apt-get here: the programs of Debian's package {package} are missing");
    };
    println!("unpacking the package {package}");
    let work = tempfile::tempdir_in(dir)?;
    let download = || {
        let mut command = Command::new(&apt);
        command
            .arg("download")
            .arg(package)
            .current_dir(work.path());
        shell::output(&mut command)
    };
    if download().is_err() {
        // The lists of packages are missing or old; without root, the second attempt says so.
        drop(shell::output(Command::new(&apt).arg("update")));
        download()?;
    }
    let archive = fs::read_dir(work.path())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|it| it == "deb"));
    let archive = archive.with_context(|| format!("apt-get download {package} brought no file"))?;
    let root = work.path().join("root");
    shell::output(Command::new("dpkg-deb").arg("-x").arg(archive).arg(&root))?;
    for path in kept {
        let to = dir.join(path);
        fs::create_dir_all(to.parent().unwrap_or(dir))?;
        fs::rename(root.join("usr").join(path), &to)
            .with_context(|| format!("the package {package} has no usr/{path}"))?;
    }
    Ok(())
}

/// Installs the types of Grafana's dashboards, and a compiler that checks them, into `dir`.
pub(super) fn install_grafana_schema(dir: &Path) -> anyhow::Result<()> {
    let Some(npm) = find_program("npm") else {
        bail!("no npm here: install Node.js 18 or newer with npm");
    };
    println!("installing {}", NODE_MODULES.join(", "));
    let mut install = Command::new(npm);
    install.args([
        "install",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--prefix",
    ]);
    shell::output(install.arg(dir).args(NODE_MODULES)).map(drop)
}
