//! NVIDIA's published libraries and headers, which tests compare with our structures and
//! function tables: NVML of several drivers, from Debian packages, and CUDA, NCCL and headers,
//! from Python wheels.
//!
//! The versions and checksums are in `testkit/witnesses`. Package managers fetch the files,
//! which are unpacked without being installed.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use testkit::components::{Component, find_program, sources};

use crate::shell;

/// File name of NVML, as drivers install it.
const NVML: &str = "libnvidia-ml.so.1";

/// Smallest number of drivers to fetch: Debian drops a version once it has a newer one.
const LEAST_DRIVERS: usize = 3;

/// A line of `drivers.txt`.
#[derive(Debug, PartialEq, Eq)]
struct Package<'a> {
    name: &'a str,
    version: &'a str,
    suite: &'a str,
    sum: &'a str,
}

/// Puts the NVML of each driver into a directory named after the driver's version.
pub(super) fn fetch_drivers(dir: &Path) -> anyhow::Result<()> {
    on_x86()?;
    let Some(apt) = find_program("apt-get") else {
        bail!("the libraries of drivers are Debian's, and there is no apt-get here");
    };
    let list = list(Component::DriverLibraries)?;
    let packages = parse(&list)?;
    println!("fetching NVML of {} drivers", packages.len());
    let work = tempfile::tempdir()?;
    let work = work.path();
    let mirror = mirror(&apt)?;
    let mut apt_sources = String::new();
    for package in &packages {
        let suite = package.suite;
        // Without Debian's keys, so that any system can fetch them: the checksums are verified
        // below.
        let line = format!("deb [arch=amd64 trusted=yes] {mirror} {suite} non-free\n");
        if !apt_sources.contains(&line) {
            apt_sources += &line;
        }
    }
    fs::write(work.join("sources.list"), apt_sources)?;
    fs::write(work.join("status"), "")?;
    fs::create_dir_all(work.join("lists/partial"))?;
    let shown = work.display();
    let options = [
        format!("Dir::Etc::SourceList={shown}/sources.list"),
        "Dir::Etc::SourceParts=-".to_owned(),
        format!("Dir::State::Lists={shown}/lists"),
        format!("Dir::State::status={shown}/status"),
        format!("Dir::Cache={shown}"),
        "Acquire::Languages=none".to_owned(),
        "APT::Architecture=amd64".to_owned(),
        // The user of this process has write access here, and need not be root.
        "APT::Sandbox::User=".to_owned(),
    ];
    let ask = |words: &[&str]| {
        let mut command = Command::new(&apt);
        command.current_dir(work);
        for option in &options {
            command.args(["-o", option]);
        }
        shell::output(command.args(words)).map(drop)
    };
    ask(&["--quiet", "update"])?;
    let mut fetched = 0;
    for package in &packages {
        let Package { name, version, .. } = package;
        let wanted = format!("{name}={version}");
        match ask(&["--quiet", "download", &wanted]) {
            Err(error) if format!("{error:#}").contains("was not found") => {
                println!("left out, for Debian has another version now: {wanted}");
                continue;
            }
            other => other?,
        }
        fetched += 1;
        let file = work.join(format!("{name}_{version}_amd64.deb"));
        let sum = shell::output(Command::new("sha256sum").arg(&file))?;
        if !sum.starts_with(package.sum) {
            bail!("{name} {version} is not the package that drivers.txt names: {sum}");
        }
        let unpacked = work.join(package.sum);
        shell::output(Command::new("dpkg-deb").arg("-x").arg(&file).arg(&unpacked))?;
        let (driver, _) = version.split_once('-').unwrap_or((version, ""));
        let library = find(&unpacked, &format!("libnvidia-ml.so.{driver}"))?
            .with_context(|| format!("no libnvidia-ml.so.{driver} in {name} {version}"))?;
        let place = dir.join(driver);
        fs::create_dir(&place)?;
        fs::copy(library, place.join(NVML))?;
    }
    if fetched < LEAST_DRIVERS {
        bail!(
            "Debian has {fetched} of the {} packages in drivers.txt: name their successors there",
            packages.len()
        );
    }
    Ok(())
}

/// Returns the URL of this machine's Debian mirror.
fn mirror(apt: &Path) -> anyhow::Result<String> {
    let mut targets = Command::new(apt);
    let targets = shell::output(targets.args(["indextargets", "--format", "$(REPO_URI)"]))?;
    let mut mirrors = targets.lines().map(|uri| uri.trim_end_matches('/'));
    let mirror = mirrors.find(|uri| uri.ends_with("/debian"));
    let mirror =
        mirror.context("apt's sources here name no Debian (an address that ends with /debian)")?;
    Ok(mirror.to_owned())
}

/// Unpacks the wheels into a directory.
pub(super) fn fetch_wheels(dir: &Path) -> anyhow::Result<()> {
    on_x86()?;
    let Some(python) = Component::PythonGrpc.locate()? else {
        bail!("needs {}", Component::PythonGrpc);
    };
    println!("fetching CUDA, NCCL and their headers (200 MB, once)");
    let list = Component::VendorWheels.list().unwrap_or_default();
    let mut pip = Command::new(python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
    ])
    .args(["--no-compile", "--only-binary", ":all:", "--require-hashes"])
    .arg("--target")
    .arg(dir)
    .arg("--requirement")
    .arg(sources().join("witnesses").join(list));
    shell::output(&mut pip).map(drop)
}

fn on_x86() -> anyhow::Result<()> {
    if env::consts::ARCH != "x86_64" {
        bail!("what is listed in testkit/witnesses is for x86-64");
    }
    Ok(())
}

fn list(component: Component) -> anyhow::Result<String> {
    let name = component.list().unwrap_or_default();
    let path = sources().join("witnesses").join(name);
    fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

fn parse(list: &str) -> anyhow::Result<Vec<Package<'_>>> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    let packages = lines.map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, version, suite, sum] = words[..] else {
            bail!("drivers.txt: not 'PACKAGE VERSION SUITE SUM': {line}");
        };
        Ok(Package {
            name,
            version,
            suite,
            sum,
        })
    });
    packages.collect()
}

/// Returns the path of the file with a name below a directory.
fn find(dir: &Path, name: &str) -> anyhow::Result<Option<PathBuf>> {
    for entry in fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if let Some(found) = find(&path, name)? {
                return Ok(Some(found));
            }
        } else if entry.file_name() == name {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_drivers_is_read_and_a_wrong_line_is_named() {
        let list = list(Component::DriverLibraries).unwrap();
        let packages = parse(&list).unwrap();
        assert!(packages.len() > 2, "{packages:?}");
        for package in packages {
            assert_eq!(package.sum.len(), 64, "{package:?}");
        }
        let error = parse("libnvidia-ml1 1.2").unwrap_err().to_string();
        assert!(error.contains("libnvidia-ml1 1.2"), "{error}");
    }
}
